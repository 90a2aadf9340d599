"""What workers, readers and the reaper call: hold, settle, look, and prove."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from quota.calls.answers import (
    BalanceRow,
    LimitState,
    Reaped,
    Recorded,
    Released,
    Reservation,
    Row,
    Settlement,
    Turn,
    Violation,
    amounts,
    instant,
)
from quota.calls.base import (
    COSTS,
    DETAILS,
    FLAG,
    ID,
    NAME,
    NAMES,
    NUMBER,
    SPAN,
    WHOLE,
    WORD,
    Amount,
    Call,
    Costs,
    Function,
)

__all__ = [
    "Adjust",
    "Balance",
    "Check",
    "EnsureSubject",
    "Extend",
    "LimitsOf",
    "Reap",
    "Record",
    "Release",
    "Reserve",
    "ReserveInTurn",
    "Settle",
]

# jsonb is read as text and parsed here, so that no setting of a connection can turn an amount into a float.
_DECISION = (
    "granted, reservation, state, expires_at, replayed, reason, limit_subject, limit_name, unit, capacity, spent, "
    "reserved, requested, retry_after_s, remaining::text AS remaining, violations::text AS violations"
)

# A walk over a whole tenant takes what it takes.
_HOUSEKEEPING_S = Decimal(60)


@dataclass(frozen=True)
class Reserve(Call[Reservation]):
    """`quota.reserve`: holds the worst case, or refuses; all or nothing.

    Arguments:
        subject: who spends, `kind:id`; every ancestor is charged as well.
        costs: amounts by unit.
        ttl: how long the hold lives.
        id: the idempotency key; None: a client makes one, the database does otherwise.
        also: further subjects that the same cost counts on.
        headroom: share of every capacity to leave untouched, 0 to below 1.
        on_expiry: `charge` books the hold when its time has passed, whatever the limits say; None: as they say.
        details: free JSON that is kept with the reservation.
        tenant: the tenant.
    """

    subject: str
    costs: Costs
    ttl: timedelta = timedelta(minutes=10)
    id: UUID | str | None = None
    also: Collection[str] = ()
    headroom: Amount = 0
    on_expiry: str | None = None
    details: Mapping[str, object] | None = None
    tenant: str = "default"

    keyed = True
    function = Function(
        "reserve", _DECISION, subject=NAME, costs=COSTS, ttl=SPAN, id=ID, also=NAMES, headroom=NUMBER, on_expiry=WORD,
        details=DETAILS, tenant=NAME,
    )  # fmt: skip

    def answer(self, rows: Sequence[Row]) -> Reservation:
        """The reservation, or the refusal."""
        return Reservation.of(rows[0])


@dataclass(frozen=True)
class ReserveInTurn(Call[Turn]):
    """`quota.reserve_in_turn`: `Reserve` for callers who can wait; one that is refused takes a place in a queue.

    It is one ask. A client repeats it until there is an answer; see `quota.client.retrying`.

    Arguments:
        patience: for how long the caller would still wait, 0 to a day; 0 takes no place and gives up the one there is.
        all others: as in `Reserve`.
    """

    subject: str
    costs: Costs
    id: UUID | str | None = None
    patience: timedelta = timedelta(seconds=30)
    ttl: timedelta = timedelta(minutes=10)
    also: Collection[str] = ()
    headroom: Amount = 0
    on_expiry: str | None = None
    details: Mapping[str, object] | None = None
    tenant: str = "default"

    keyed = True
    function = Function(
        "reserve_in_turn", f"{_DECISION}, ahead, look_after_s", subject=NAME, costs=COSTS, id=ID, patience=SPAN,
        ttl=SPAN, also=NAMES, headroom=NUMBER, on_expiry=WORD, details=DETAILS, tenant=NAME,
    )  # fmt: skip

    def answer(self, rows: Sequence[Row]) -> Turn:
        """The reservation, or the refusal with the place."""
        return Turn.of(rows[0])


@dataclass(frozen=True)
class Settle(Call[Settlement]):
    """`quota.settle`: books the true cost.

    Arguments:
        id: the reservation.
        costs: totals of the reservation so far, by unit, never steps; units left out, or None, settle at the hold.
        final: False books and keeps the rest held.
        outcome: `ok`, `error`, `timeout`, `cancelled`, or `unknown`: books the whole hold, and one later settle may
            correct it.
        details, tenant: as in `Reserve`.
    """

    id: UUID | str
    costs: Costs | None = None
    final: bool = True
    outcome: str = "ok"
    details: Mapping[str, object] | None = None
    tenant: str = "default"

    function = Function(
        "settle", "state, late, replayed, overage::text AS overage",
        id=ID, costs=COSTS, final=FLAG, outcome=WORD, details=DETAILS, tenant=NAME,
    )  # fmt: skip

    def answer(self, rows: Sequence[Row]) -> Settlement:
        """What was settled."""
        row = rows[0]
        return Settlement(
            state=row["state"], late=row["late"], replayed=row["replayed"], overage=amounts(row["overage"])
        )


@dataclass(frozen=True)
class Release(Call[Released]):
    """`quota.release`: the call never left, the hold returns. `id`, `details` and `tenant` as in `Settle`."""

    id: UUID | str
    details: Mapping[str, object] | None = None
    tenant: str = "default"

    function = Function("release", "state, replayed", id=ID, details=DETAILS, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> Released:
        """The state after it."""
        return Released(state=rows[0]["state"], replayed=rows[0]["replayed"])


@dataclass(frozen=True)
class Adjust(Call[Reservation]):
    """`quota.adjust`: changes what an open hold holds to these totals, by unit; more is decided like a reserve."""

    id: UUID | str
    costs: Costs
    tenant: str = "default"

    function = Function("adjust", _DECISION, id=ID, costs=COSTS, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> Reservation:
        """The reservation as it stands, or the refusal that left it as it was."""
        return Reservation.of(rows[0])


@dataclass(frozen=True)
class Extend(Call[datetime]):
    """`quota.extend`: the hold lives for `ttl` from now on, never less than before."""

    id: UUID | str
    ttl: timedelta
    tenant: str = "default"

    function = Function("extend", "expires_at", id=ID, ttl=SPAN, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> datetime:
        """When the hold expires, in UTC."""
        at = instant(rows[0]["expires_at"])
        if at is None:
            raise TypeError("extend answered no time")
        return at


@dataclass(frozen=True)
class Record(Call[Recorded]):
    """`quota.record`: books usage that had no hold, in full, never refused. Arguments as in `Reserve`."""

    subject: str
    costs: Costs
    id: UUID | str | None = None
    also: Collection[str] = ()
    details: Mapping[str, object] | None = None
    tenant: str = "default"

    keyed = True
    function = Function(
        "record", "entry, replayed", subject=NAME, costs=COSTS, id=ID, also=NAMES, details=DETAILS, tenant=NAME
    )

    def answer(self, rows: Sequence[Row]) -> Recorded:
        """The ledger entry."""
        return Recorded(entry=rows[0]["entry"], replayed=rows[0]["replayed"])


@dataclass(frozen=True)
class Balance(Call[list[BalanceRow]]):
    """`quota.balance`: every limit on the subject's lineage as it stands now."""

    subject: str
    tenant: str = "default"

    writes = False
    function = Function(
        "balance",
        "subject, limit_name, unit, kind, capacity, spent, reserved, level, available, window_start, window_end, "
        "full_after_s",
        subject=NAME,
        tenant=NAME,
    )

    def answer(self, rows: Sequence[Row]) -> list[BalanceRow]:
        """One row per limit."""
        return [BalanceRow.of(row) for row in rows]


@dataclass(frozen=True)
class LimitsOf(Call[list[LimitState]]):
    """`quota.limits_of`: every limit on the subject's lineage: its terms, and where it stands now."""

    subject: str
    tenant: str = "default"

    writes = False
    function = Function(
        "limits_of",
        "owner, limit_name, unit, money, kind, capacity, refill_per_s, period, window_s, spent, reserved, level, "
        "available, window_start, window_end, resets_in_s, full_after_s",
        subject=NAME,
        tenant=NAME,
    )

    def answer(self, rows: Sequence[Row]) -> list[LimitState]:
        """One value per limit, the subject's own first."""
        return [LimitState.of(row) for row in rows]


@dataclass(frozen=True)
class EnsureSubject(Call[bool]):
    """`quota.ensure_subject`: the first contact of an id that somebody has authenticated."""

    name: str
    parent: str | None = None
    tenant: str = "default"

    function = Function("ensure_subject", "created", name=NAME, parent=NAME, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> bool:
        """True when the subject is new. (After a lost connection a repeated call may say False.)"""
        return bool(rows[0]["created"])


@dataclass(frozen=True)
class Reap(Call[Reaped]):
    """`quota.reap`: closes at most `max` overdue holds, oldest first; `tenant` None: of all tenants."""

    max: int = 1000
    tenant: str | None = None

    timeout_s = _HOUSEKEEPING_S
    function = Function("reap", "released, charged", max=WHOLE, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> Reaped:
        """How many were released and charged."""
        return Reaped(released=rows[0]["released"], charged=rows[0]["charged"])


@dataclass(frozen=True)
class Check(Call[list[Violation]]):
    """`quota.check`: proves the books in one snapshot; `tenant` None: of all tenants."""

    tenant: str | None = None

    writes = False
    timeout_s = _HOUSEKEEPING_S
    function = Function("check", "tenant, invariant, subject, limit_name, expected, found", tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> list[Violation]:
        """One value per violation; none when the books are right."""
        return [Violation(**row) for row in rows]
