"""What the functions answer, as frozen values. Amounts are exact `Decimal`, times are in UTC, waits are in seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Self, overload
from uuid import UUID

from quota.errors import Refused

__all__ = [
    "FAIL_OPEN",
    "BalanceRow",
    "LimitState",
    "Reaped",
    "Recorded",
    "Released",
    "Repaired",
    "Reservation",
    "Row",
    "Settlement",
    "Standing",
    "Turn",
    "Violation",
    "amount",
    "amounts",
    "exact",
    "instant",
]

Row = Mapping[str, Any]
"""One row of a result, by column name."""

FAIL_OPEN = "fail_open"
"""The state of a reservation that was never asked for: the database was away and the client is set to fail open."""


def amount(value: object) -> Decimal | None:
    """Returns a number of a result exactly; None stays None. Errors: `TypeError` for a binary float."""
    if value is None or isinstance(value, Decimal):
        return value
    if isinstance(value, int | str):
        return Decimal(value)
    raise TypeError(
        f"the connection turned a numeric into {type(value).__name__} {value!r}; amounts are exact decimals"
    )


def exact(value: object) -> Decimal:
    """Returns a number of a result that is never None, exactly."""
    found = amount(value)
    if found is None:
        raise TypeError("the result has no number where there is always one")
    return found


def instant(value: datetime | None) -> datetime | None:
    """Returns a time of a result in UTC; None stays None."""
    return None if value is None else value.astimezone(UTC)


_decoder = json.JSONDecoder(parse_float=Decimal)


def _parsed(text: str | None) -> Any:
    return None if text is None else _decoder.decode(text)


def _uuid(value: UUID | str | None) -> UUID | None:
    return UUID(value) if isinstance(value, str) else value


def _picked(row: Row, words: tuple[str, ...], numbers: tuple[str, ...]) -> dict[str, Any]:
    picked = {word: row[word] for word in words}
    for number in numbers:
        value = row[number]
        picked[number] = value if value is None or type(value) is Decimal else amount(value)
    return picked


def amounts(text: str | None) -> dict[str, Decimal]:
    """Returns a JSON object of units and decimal strings as amounts by unit; nothing is an empty map."""
    if text is None or text == "{}":  # most of them
        return {}
    return {unit: Decimal(number) for unit, number in _parsed(text).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one limit stands, as the decision saw it.

    Fields: `capacity` None means unlimited; `level` only for buckets, `spent` only for budgets; `reason` and
    `retry_after_s` (seconds; None: waiting does not help) only where the limit is violated.
    """

    subject: str
    limit_name: str | None
    unit: str | None
    kind: str | None
    capacity: Decimal | None
    spent: Decimal | None
    reserved: Decimal | None
    level: Decimal | None
    available: Decimal | None
    reason: str | None = None
    retry_after_s: Decimal | None = None

    @classmethod
    def of(cls, item: Row) -> Self:
        """Reads one element of `remaining` or `violations`."""
        numbers = ("capacity", "spent", "reserved", "level", "available", "retry_after_s")
        words = ("subject", "limit_name", "unit", "kind", "reason")
        return cls(**_picked(item, words, numbers))


class Standings(Sequence[Standing]):
    """A tuple of `Standing` that is read when it is first looked at: most callers never do.

    Arguments: `text`, a JSON array of them.
    """

    __slots__ = ("_read", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._read: tuple[Standing, ...] | None = None

    def _all(self) -> tuple[Standing, ...]:
        if self._read is None:
            self._read = tuple(Standing.of(item) for item in _decoder.decode(self._text))
        return self._read

    @overload
    def __getitem__(self, index: int) -> Standing: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Standing, ...]: ...
    def __getitem__(self, index: int | slice) -> Standing | tuple[Standing, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Standings):
            return self._text == other._text or self._all() == other._all()
        return self._all() == other

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def _standings(text: str | None) -> Sequence[Standing]:
    return () if text is None or text == "[]" else Standings(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The answer of `reserve` and `adjust`: granted, or refused with the reason.

    Fields:
        granted: True only while the hold is open.
        reservation: its id, also the idempotency key; None on a refusal that left nothing behind.
        state: `held`, `settled`, `released`, `expired`, or `fail_open` (see `Client`); None on a refusal.
        expires_at: from when on the hold counts as expired.
        replayed: the answer to an earlier call with the same id.
        reason: why it was refused: `closed`, `frozen`, `too_large`, `exhausted`, `rate`, `concurrency` or `held`.
        limit_subject, limit_name, unit, capacity, spent, reserved, requested: the binding limit of a refusal and its
            numbers; on a grant the tightest limit after the hold.
        retry_after_s: seconds until this cost would fit; None when waiting does not help.
        remaining, violations: every limit that was asked, and those that did not fit.
    """

    granted: bool
    reservation: UUID | None
    state: str | None
    expires_at: datetime | None = None
    replayed: bool = False
    reason: str | None = None
    limit_subject: str | None = None
    limit_name: str | None = None
    unit: str | None = None
    capacity: Decimal | None = None
    spent: Decimal | None = None
    reserved: Decimal | None = None
    requested: Decimal | None = None
    retry_after_s: Decimal | None = None
    remaining: Sequence[Standing] = ()
    violations: Sequence[Standing] = ()

    @property
    def refused(self) -> bool:
        """True when there is no open hold to spend under."""
        return not self.granted

    def raise_if_refused(self) -> Self:
        """Returns this answer when it was granted. Errors: `Refused` with this answer when it was not."""
        if self.refused:
            raise Refused(self)
        return self

    @classmethod
    def of(cls, row: Row) -> Self:
        """Reads the result row of `reserve` or `adjust`."""
        words = ("state", "reason", "limit_subject", "limit_name", "unit")
        numbers = ("capacity", "spent", "reserved", "requested", "retry_after_s")
        return cls(
            granted=bool(row["granted"]),
            reservation=_uuid(row["reservation"]),
            expires_at=instant(row["expires_at"]),
            replayed=bool(row["replayed"]),
            remaining=_standings(row["remaining"]),
            violations=_standings(row["violations"]),
            **_picked(row, words, numbers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Reservation):
    """The answer of `reserve_in_turn`: a reservation, or a refusal and the place in the queue that goes with it.

    Fields:
        ahead: how many others wait for the binding limit and come first.
        look_after_s: seconds within which to ask again, to keep the place; None: there is none to keep.
    """

    ahead: int = 0
    look_after_s: Decimal | None = None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Reads the result row of `reserve_in_turn`."""
        decided = Reservation.of(row)
        known = {item.name: getattr(decided, item.name) for item in fields(decided)}
        return cls(**known, ahead=row["ahead"], look_after_s=amount(row["look_after_s"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The answer of `settle`.

    Fields:
        state: `settled`, or `held` after a settle that was not final.
        late: the hold had expired before.
        replayed: the same totals had been settled before.
        overage: per unit, what was booked above the amount once held.
    """

    state: str
    late: bool = False
    replayed: bool = False
    overage: Mapping[str, Decimal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The answer of `release`: the state, and whether it was so before."""

    state: str
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The answer of `record` and `credit`: the number of the ledger entry, and whether it stood there before."""

    entry: int | None
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """The answer of `reap`: how many overdue holds returned, and how many were booked as spent."""

    released: int
    charged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """One counter that `repair` has set right: `spent` or `reserved` of a limit, what it was and what it is now."""

    subject: str
    limit_name: str
    counter: str
    was: Decimal
    is_now: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRow:
    """One limit on a subject's lineage, as it stands now.

    Fields: `capacity` None means unlimited; `level` and `full_after_s` (seconds) only for buckets; `window_start` and
    `window_end` (UTC, half open) are None for a lifetime budget and while no window is open.
    """

    subject: str
    limit_name: str
    unit: str
    kind: str
    capacity: Decimal | None
    spent: Decimal | None
    reserved: Decimal | None
    level: Decimal | None
    available: Decimal | None
    window_start: datetime | None
    window_end: datetime | None
    full_after_s: Decimal | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Reads one result row of `balance`."""
        numbers = ("capacity", "spent", "reserved", "level", "available", "full_after_s")
        return cls(
            **_picked(row, ("subject", "limit_name", "unit", "kind"), numbers),
            window_start=instant(row["window_start"]),
            window_end=instant(row["window_end"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """One limit on a subject's lineage: its terms, and where it stands now.

    Fields:
        owner: the subject that it stands on: the one asked for, or an ancestor.
        limit_name, unit, kind: of the limit. `money`: whether the unit is money.
        capacity: None means unlimited.
        refill_per_s: of buckets only.
        period, window_s: of its window, and the nominal length of it in seconds; None for a lifetime.
        spent, reserved, level, available: as in `BalanceRow`.
        window_start, window_end: of the open window (UTC, half open); None while none is.
        resets_in_s: seconds until that window ends.
        full_after_s: seconds until a bucket is full; None if it never is.
    """

    owner: str
    limit_name: str
    unit: str
    money: bool
    kind: str
    capacity: Decimal | None
    refill_per_s: Decimal | None
    period: str | None
    window_s: Decimal | None
    spent: Decimal | None
    reserved: Decimal | None
    level: Decimal | None
    available: Decimal | None
    window_start: datetime | None
    window_end: datetime | None
    resets_in_s: Decimal | None
    full_after_s: Decimal | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Reads one result row of `limits_of`."""
        numbers = (
            "capacity", "refill_per_s", "window_s", "spent", "reserved", "level", "available", "resets_in_s",
            "full_after_s",
        )  # fmt: skip
        return cls(
            **_picked(row, ("owner", "limit_name", "unit", "money", "kind", "period"), numbers),
            window_start=instant(row["window_start"]),
            window_end=instant(row["window_end"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One invariant that does not hold: where, what was expected and what was found, both as text."""

    tenant: str
    invariant: str
    subject: str | None
    limit_name: str | None
    expected: str | None
    found: str | None
