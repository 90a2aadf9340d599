"""What is stored of a reservation: its lines, its facts, its entries, and the arithmetic of totals over lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from uuid import UUID

from tests.model.amounts import ZERO
from tests.model.limits import Account
from tests.model.windows import Window

ADDING = ("settle", "overage", "late", "charge", "record", "carried", "correction_up")
TAKING = ("correction_down", "credit")


@dataclass
class Line:
    """What one reservation holds on one account in one of its windows.

    `charge`: whether expiry books what is still held; fixed when the account's first line was taken, so that expiry
    depends on the reservation alone.
    """

    account: Account
    window: Window | None
    held: Fraction
    charge: bool
    booked: Fraction = ZERO
    credited: Fraction = ZERO

    @property
    def remaining(self) -> Fraction:
        """What is still held: the unbooked rest. Slots are never booked."""
        return max(ZERO, self.held - self.booked)

    @property
    def taken(self) -> Fraction:
        """What the line has taken out of its account, held or booked."""
        return max(self.held, self.booked)

    @property
    def current(self) -> bool:
        """Whether the window it was taken in is the one stored on the account."""
        return self.account.window == self.window


@dataclass
class Hold:
    """A reservation. `held` are its totals per unit, `booked` what partial settles have booked of them.

    A record is one that is born settled: its id is taken, its totals stand, and it can be credited.
    """

    id: UUID
    subject: str
    also: tuple[str, ...]
    asked: dict[str, Fraction]
    held: dict[str, Fraction]
    expires_at: datetime
    subjects: frozenset[str]
    headroom: Fraction = ZERO
    on_expiry: str | None = None
    lines: list[Line] = field(default_factory=list)
    state: str = "held"
    booked: dict[str, Fraction] = field(default_factory=dict)
    totals: dict[str, Fraction] | None = None
    correctable: bool = False
    late: bool = False
    record: bool = False
    overage: dict[str, Fraction] = field(default_factory=dict)

    def overdue(self, now: datetime) -> bool:
        """Open, and its time has passed: expired, swept or not."""
        return self.state == "held" and now >= self.expires_at

    def lines_of(self, unit: str) -> list[list[Line]]:
        """The lines that book a unit, grouped by account, in the order in which they were taken."""
        groups: dict[tuple[bytes, bytes], list[Line]] = {}
        for line in self.lines:
            if line.account.shape.unit == unit and line.account.shape.kind != "concurrency":
                groups.setdefault(line.account.key, []).append(line)
        return [groups[key] for key in sorted(groups)]

    def books(self, unit: str) -> bool:
        """Whether totals of this unit count. Slots are never booked, so their totals are nobody's business."""
        kinds = {line.account.shape.kind for line in self.lines if line.account.shape.unit == unit}
        return bool(kinds - {"concurrency"}) or (not kinds and unit != "concurrency")

    def filled(self, costs: dict[str, Fraction]) -> dict[str, Fraction]:
        """Totals of a settle: units left out stand at the hold, or at what is booked above it."""
        return {unit: costs.get(unit, max(held, self.booked.get(unit, ZERO))) for unit, held in self.held.items()}


@dataclass(frozen=True)
class Note:
    """What a credit with an id of its own asked for."""

    reservation: UUID
    costs: dict[str, Fraction]


@dataclass(frozen=True)
class Entry:
    """One line of the ledger. The sign is in the kind."""

    account: Account
    window: Window | None
    kind: str
    amount: Fraction
    reservation: UUID | None

    @property
    def signed(self) -> Fraction:
        """What it adds to what the account has spent."""
        return self.amount if self.kind in ADDING else -self.amount if self.kind in TAKING else ZERO


def spread(lines: list[Line], total: Fraction) -> list[Fraction]:
    """A unit's total over one account's lines: each up to what it holds, in order; what exceeds them to the last."""
    shares = []
    for line in lines[:-1]:
        shares.append(min(total, line.held))
        total -= shares[-1]
    return [*shares, total]


def total(amounts: Iterable[Fraction]) -> Fraction:
    """The exact sum."""
    return sum(amounts, ZERO)
