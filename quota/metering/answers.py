"""What is answered in the application's place, and what is added to what it answers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from quota.calls import LimitState, Reservation
from quota.errors import Misuse, QuotaError, UnknownSubject
from quota.http import headers as limit_headers
from quota.http.problems import CONTENT_TYPE, Problem, of_error, of_refusal
from quota.http.values import written
from quota.metering.identity import unauthenticated

__all__ = [
    "FAIL_OPEN",
    "Answer",
    "ResponseHeaders",
    "balances",
    "ledger_problem",
    "no_websockets",
    "of_limits",
    "of_problem",
    "refused",
    "told",
]


logger = logging.getLogger("quota.metering")

FAIL_OPEN = "Quota-Fail-Open"
"""The header of an answer that passed while the ledger was away: the Structured Field `?1`."""

ResponseHeaders = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: `status`, `headers` (with their `Content-Length`) and `body`."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def _whole(status: int, content_type: str, text: str, headers: Iterable[tuple[str, str]]) -> Answer:
    body = text.encode("utf-8")
    return Answer(status, [("Content-Type", content_type), ("Content-Length", str(len(body))), *headers], body)


def of_problem(problem: Problem, headers: Iterable[tuple[str, str]] = ()) -> Answer:
    """Returns the answer that a problem is, with further headers."""
    return _whole(problem.status, CONTENT_TYPE, written(problem.document()), [*problem.headers.items(), *headers])


def refused(
    refusal: Reservation, states: Sequence[LimitState], subject: str, style: limit_headers.Style
) -> tuple[Problem, list[tuple[str, str]]]:
    """Returns the problem of a refusal and its headers: `RateLimit` where waiting helps, and never about money.

    Arguments:
        refusal: the answer.
        states: the limits on the subject's lineage, for their terms.
        subject: who asked. Ancestors are named by their kind: who they are is not the caller's business.
        style: of the headers.
    """
    money = {state.unit for state in states if state.money}
    hidden = refusal
    if refusal.limit_subject not in (None, subject):
        hidden = replace(refusal, limit_subject=str(refusal.limit_subject).partition(":")[0])
    problem = of_refusal(hidden, subject, money.__contains__)
    if problem.status != 429:
        return problem, []
    policies, violated = limit_headers.of_refusal(refusal, states, subject)
    return problem, [
        *limit_headers.rate_limit_headers(policies, style, violated),
        *limit_headers.full_after(policies),
    ]


def of_limits(subject: str, states: Sequence[LimitState], headers: Iterable[tuple[str, str]]) -> Answer:
    """Returns a caller's own limits, balances and windows. Of its ancestors, what is counted, not who they are."""
    shown = [
        {
            "owner": state.owner if state.owner == subject else state.owner.partition(":")[0],
            "name": state.limit_name,
            **{
                name: getattr(state, name)
                for name in (
                    "unit", "kind", "capacity", "refill_per_s", "period", "spent", "reserved", "level", "available",
                    "window_start", "window_end", "resets_in_s", "full_after_s",
                )
            },
        }
        for state in states
        if state.owner == subject or not state.money
    ]  # fmt: skip
    text = written({"subject": subject, "limits": shown})
    return _whole(200, "application/json", text, [("Cache-Control", "no-store"), *headers])


def no_websockets() -> Problem:
    """Returns the refusal of a WebSocket: nobody counts what flows through one."""
    detail = (
        "WebSockets are not passed on: what flows through one cannot be metered. Ask over plain HTTP; an answer may "
        "stream, as server-sent events do."
    )
    # A 501 may be kept by caches, and the same address is good for a plain GET.
    return Problem(501, "no_websockets", detail, headers={"Cache-Control": "no-store"})


def ledger_problem(error: QuotaError) -> Problem:
    """Returns the problem that an error of the ledger is to a caller, who can mend none of them."""
    if isinstance(error, UnknownSubject):
        return unauthenticated("Nobody is known under this credential any more.")
    if isinstance(error, Misuse):
        logger.error("a request cannot be metered: %s", error)
        return Problem(503, "misconfigured", "The service is not set up for this; its operator finds why in its log.")
    return of_error(error)


def balances(
    states: Sequence[LimitState],
    subject: str,
    units: Collection[str],
    style: limit_headers.Style,
    shifts: Mapping[str, Decimal],
) -> ResponseHeaders:
    """Returns the headers that tell what is left, see `quota.http.headers.of_states`."""
    policies = limit_headers.of_states(states, subject, units, shifts)
    return [*limit_headers.rate_limit_headers(policies, style), *limit_headers.full_after(policies)]


def told(headers: ResponseHeaders, kept: ResponseHeaders, style: limit_headers.Style) -> ResponseHeaders:
    """Returns the headers of an answer: ours in place of any of the same name, and all of them shown to scripts.

    Arguments: `headers`, ours; `kept`, the application's; `style`, which names are ours.
    """
    ours, names = _ours(style)
    expose, rest = [], []
    for name, value in kept:
        if name.lower() == "access-control-expose-headers":
            expose.append(value)
        elif name.lower() not in ours:
            rest.append((name, value))
    return [*rest, *headers, ("Access-Control-Expose-Headers", ", ".join([*expose, names]))]


@functools.cache
def _ours(style: limit_headers.Style) -> tuple[Container[str], str]:
    """Names that only we write, in lower case; and all that a browser's script may be shown, as it is written."""
    names = (*limit_headers.exposed(style), FAIL_OPEN)
    return frozenset(name.lower() for name in names) - {"retry-after"}, ", ".join(names)
