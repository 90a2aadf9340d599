"""Many calls of one kind as one: one statement, one transaction, an answer or a typed error for each.

>>> calls = ReserveMany([Reserve("key:1", {"usd": "0.25"}), Reserve("key:2", {"usd": "0.10"})])
>>> answers = client.call(calls)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar, cast
from uuid import UUID

from quota.calls.answers import Released, Reservation, Row, Settlement
from quota.calls.base import FLAG, NAME, A, Call, Function, Kind
from quota.calls.worker import Release, Reserve, Settle
from quota.errors import InvalidArgument, Misuse, misuse

__all__ = ["BATCH_MAX", "Batch", "ReleaseMany", "ReserveMany", "SettleMany"]

BATCH_MAX = 10_000
"""The most requests that one call takes."""

C = TypeVar("C", Reserve, Settle, Release)


def _literal(_what: str, texts: object) -> str:
    """Texts as an array that PostgreSQL reads. The driver escapes each by a regular expression, which takes longer."""
    members = [
        "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for text in cast("list[str | None]", texts)
    ]
    return "{" + ",".join(members) + "}"


def _texts(cast: str) -> Kind:
    return Kind(f"{cast}[]", _literal)


def _values(cast: str) -> Kind:
    return Kind(f"{cast}[]", lambda _what, values: values)


def _ragged(what: str, value: object) -> object:
    """Lists of names as JSON: an array of PostgreSQL has no rows of different lengths."""
    return _literal(what, [json.dumps(names) for names in cast("list[list[str]]", value)])


@dataclass(frozen=True)
class Batch(Call["list[A | Misuse]"], Generic[C, A]):
    """What the three have in common.

    Arguments:
        requests: at most 10,000, all of one tenant.
        atomic: all or nothing. When one is refused, none is granted, and the others answer `linked`; misuse of one is
            raised, and nothing has happened.
        tenant: the tenant; that of the single requests does not count.

    Class fields: `arrays`, the parameter of the single call that each array carries.

    The answer has one member a request, in order: what the single call answers, or the `Misuse` of this one request.
    """

    requests: Sequence[C]
    atomic: bool = False
    tenant: str = "default"

    arrays: ClassVar[Mapping[str, str]]

    def parameters(self) -> dict[str, object]:
        """Returns the arrays by name. A request that cannot be sent is its typed error, with the position as a note."""
        members: list[dict[str, object]] = []
        for position, request in enumerate(self.requests, start=1):
            try:
                members.append(request.parameters())
            except (TypeError, Misuse) as error:
                error.add_note(f"request {position} of the batch")
                raise
        if len(members) > BATCH_MAX:
            raise InvalidArgument(
                f"invalid_argument: a batch of {len(members)} is above the maximum of {BATCH_MAX}",
                "send a longer batch in parts",
            )
        columns = {
            array: self.function.takes[array].send(array, [member[parameter] for member in members])
            for array, parameter in self.arrays.items()
        }
        return columns | {"atomic": FLAG.send("atomic", self.atomic), "tenant": NAME.send("tenant", self.tenant)}

    def answer(self, rows: Sequence[Row]) -> list[A | Misuse]:
        """One answer or error a request, in order."""
        return [
            self.requests[0].answer([row])  # type: ignore[misc]
            if row["error"] is None
            else misuse(row["error_code"], row["error_message"], row["error_remedy"])
            for row in rows
        ]

    def identified(self, new_id: Callable[[], UUID]) -> Self:
        """Every request gets the id it lacks."""
        return dataclasses.replace(self, requests=[request.identified(new_id) for request in self.requests])


_ERROR = "error, error_code, error_message, error_remedy"


@dataclass(frozen=True)
class ReserveMany(Batch[Reserve, Reservation]):
    """`quota.reserve_many`: many holds in one transaction, each decided as `reserve` would, in order. See `Batch`."""

    arrays: ClassVar[Mapping[str, str]] = {
        "subjects": "subject", "costs": "costs", "ids": "id", "ttls": "ttl", "also": "also", "headrooms": "headroom",
        "on_expiries": "on_expiry", "details": "details",
    }  # fmt: skip
    function = Function(
        "reserve_many",
        "granted, reservation, state, expires_at, replayed, reason, limit_subject, limit_name, unit, capacity, spent, "
        f"reserved, requested, retry_after_s, remaining::text AS remaining, violations::text AS violations, {_ERROR}",
        subjects=_texts("text"), costs=_texts("jsonb"), ids=_texts("uuid"), ttls=_values("interval"),
        also=Kind("jsonb[]", _ragged),
        headrooms=_texts("numeric"), on_expiries=_texts("text"), details=_texts("jsonb"), atomic=FLAG, tenant=NAME,
    )  # fmt: skip


@dataclass(frozen=True)
class SettleMany(Batch[Settle, Settlement]):
    """`quota.settle_many`: many settles in one transaction. See `Batch`."""

    arrays: ClassVar[Mapping[str, str]] = {
        "ids": "id",
        "costs": "costs",
        "finals": "final",
        "outcomes": "outcome",
        "details": "details",
    }
    function = Function(
        "settle_many",
        f"state, late, replayed, overage::text AS overage, {_ERROR}",
        ids=_texts("uuid"), costs=_texts("jsonb"), finals=_values("boolean"), outcomes=_texts("text"),
        details=_texts("jsonb"), atomic=FLAG, tenant=NAME,
    )  # fmt: skip


@dataclass(frozen=True)
class ReleaseMany(Batch[Release, Released]):
    """`quota.release_many`: many releases in one transaction. See `Batch`."""

    arrays: ClassVar[Mapping[str, str]] = {"ids": "id", "details": "details"}
    function = Function(
        "release_many", f"state, replayed, {_ERROR}",
        ids=_texts("uuid"), details=_texts("jsonb"), atomic=FLAG, tenant=NAME,
    )  # fmt: skip
