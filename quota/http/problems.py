"""The one shape of an error over HTTP: `application/problem+json` (RFC 9457), from refusals and from errors alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from quota.calls import Reservation
from quota.errors import CostError, Misuse, NotAllowed, QuotaError, SchemaMismatch, Unavailable
from quota.http.values import plain

__all__ = ["CONTENT_TYPE", "Problem", "of_error", "of_refusal", "refusal_status"]

CONTENT_TYPE = "application/problem+json"
_TYPE = "urn:quota-ledger:problem:"
_NOT_STORED = frozenset({402, 429, 503})

_REFUSALS = {"closed": 409, "frozen": 403, "too_large": 422, "rate": 429, "held": 429, "concurrency": 429}


# What may be a secret: one whole, or without its prefix. Somebody may have put it where a name belongs.
_SECRET = re.compile(r"(?:q[kt]_[a-z0-9-]{1,63}_)?[A-Za-z0-9_-]{43,}", re.ASCII)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return _SECRET.sub(lambda found: f"{found[0][:4]}***", value)
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_secrets(item) for name, item in value.items()}
    return value


class Problem(Exception):  # noqa: N818 - RFC 9457's word
    """An answer that is an error.

    Fields:
        status: the HTTP status.
        name: what kind of problem, stable; its `type` is `urn:quota-ledger:problem:<name>`.
        detail: what was wrong here, and what to do. Never a secret, never more of the input than a name.
        members: further members of the document.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        name: str,
        detail: str,
        *,
        members: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.name = name
        self.detail = detail
        self.members = dict(members or {})
        self.headers = dict(headers or {})
        if status in _NOT_STORED:
            self.headers.setdefault("Cache-Control", "no-store")

    def document(self, instance: str | None = None) -> dict[str, Any]:
        """Returns the JSON document. `instance`: names this occurrence, such as the request's id."""
        found = {
            "type": _TYPE + self.name,
            "title": self.name.replace("_", " "),
            "status": self.status,
            "detail": self.detail,
            **({"instance": instance} if instance else {}),
            **self.members,
        }
        return {name: _without_secrets(plain(value)) for name, value in found.items()}


def of_error(error: QuotaError) -> Problem:
    """Returns the problem that an error of the library is.

    Misuse has the status of its class, and so has a cost that cannot be told. A database that is away is 503. What is
    the operator's to mend (a login without rights, another schema) is 503 too: the request was right, and nobody learns
    from it how the service is set up.
    """
    if isinstance(error, Misuse):
        detail = error.message.removeprefix(f"{error.name}: ")
        if error.hint:
            detail = f"{detail.rstrip('. ')}. {error.hint}"
        return Problem(error.http_status, error.name, detail)
    if isinstance(error, CostError):
        return Problem(error.http_status, error.name, error.message.removeprefix(f"{error.name}: "))
    if isinstance(error, Unavailable):
        members = {"in_doubt": error.in_doubt}
        detail = "The ledger is away or too slow; repeat the request, with the same id or Idempotency-Key."
        return Problem(503, "unavailable", detail, members=members, headers={"Retry-After": "1"})
    if isinstance(error, NotAllowed | SchemaMismatch):
        return Problem(503, "misconfigured", "The service is not set up for this; its operator finds why in its log.")
    return Problem(500, "internal", "The service failed; its operator finds why in its log.")


def refusal_status(refusal: Reservation, is_money: Callable[[str], bool]) -> int:
    """Returns the status of a refusal. `is_money`: whether a unit is money, whose exhaustion asks for payment."""
    if refusal.reason == "exhausted":
        # A budget without a known end of its window is one for a lifetime: waiting does not help, as with money.
        lasting = refusal.retry_after_s is None or (refusal.unit is not None and is_money(refusal.unit))
        return 402 if lasting else 429
    return _REFUSALS[refusal.reason or "closed"]


def _wait_s(refusal: Reservation) -> int | None:
    wait: Decimal | None = refusal.retry_after_s
    return None if wait is None else max(1, math.ceil(wait))


def of_refusal(refusal: Reservation, subject: str, is_money: Callable[[str], bool]) -> Problem:
    """Returns the problem that a refused reservation is.

    Arguments:
        refusal: the answer.
        subject: who asked, so that its own limits are told from its ancestors'.
        is_money: whether a unit is money.
    """
    status, wait_s = refusal_status(refusal, is_money), _wait_s(refusal)
    violated = [
        item.limit_name if item.subject == subject else f"{item.subject.partition(':')[0]}-{item.limit_name}"
        for item in refusal.violations
        if item.limit_name is not None
    ]
    members: dict[str, object] = {
        "reason": refusal.reason,
        "reservation": refusal.reservation,
        "state": refusal.state,
        "subject": refusal.limit_subject,
        "limit": refusal.limit_name,
        "unit": refusal.unit,
        "capacity": refusal.capacity,
        "spent": refusal.spent,
        "reserved": refusal.reserved,
        "requested": refusal.requested,
        "retry_after": wait_s,
        "violated-policies": violated,
    }
    waits = wait_s is not None and status in (402, 429)
    headers = {"Retry-After": str(wait_s)} if waits else {}
    return Problem(status, f"refused_{refusal.reason}", _told(refusal), members=members, headers=headers)


def _told(refusal: Reservation) -> str:
    match refusal.reason:
        case "closed":
            return f"This reservation is closed: {refusal.state}. Take a new id for a new one."
        case "frozen":
            return f'"{refusal.limit_subject}" is frozen.'
        case "too_large":
            return (
                f'It can never fit: limit "{refusal.limit_name}" of {refusal.limit_subject} is smaller. Ask for less.'
            )
        case "exhausted":
            return f'Limit "{refusal.limit_name}" of {refusal.limit_subject} is spent.'
        case "rate":
            return f'Limit "{refusal.limit_name}" of {refusal.limit_subject} refills; wait and try again.'
        case _:
            return f'Others hold what limit "{refusal.limit_name}" of {refusal.limit_subject} has; try again soon.'
