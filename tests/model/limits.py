"""Limits and accounts: the arithmetic of budgets, buckets and slots, and the one comparison that decides.

Everything here is a function of what an account stores, of the limit in force and of an instant; nothing changes
anything except the few methods of `Account` that say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fractions import Fraction

from tests.model.amounts import ZERO, ceil_to_microsecond, seconds
from tests.model.windows import Window, window_at

POLLING_HINT_S = Fraction(1)

REASONS = ("closed", "frozen", "too_large", "exhausted", "rate", "concurrency", "held")
"""By precedence."""


@dataclass(frozen=True)
class Shape:
    """What never changes under one limit name."""

    unit: str
    kind: str
    period: str | None
    zone: str


@dataclass(frozen=True)
class Limit:
    """A limit in force. Capacity None: unlimited, counted, never refused (budgets only)."""

    name: str
    shape: Shape
    capacity: Fraction | None
    refill_per_s: Fraction = ZERO
    on_expiry: str = "release"
    required: bool = False

    @property
    def unit(self) -> str:
        return self.shape.unit

    @property
    def kind(self) -> str:
        return self.shape.kind

    def admits(self, headroom: Fraction) -> Fraction | None:
        """The capacity that a test with this headroom uses: slots are whole, rounded up."""
        if self.capacity is None:
            return None
        admitted = self.capacity * (1 - headroom)
        return Fraction(math.ceil(admitted)) if self.kind == "concurrency" else admitted


@dataclass(frozen=True)
class Numbers:
    """An account as it stands at an instant, seen through the limit in force. `window`: the open one, if any."""

    spent: Fraction
    reserved: Fraction
    level: Fraction
    window: Window | None


@dataclass
class Account:
    """The live counters of one limit of one subject. `level` None: never touched, so full.

    `limit`: the definition in force, or the last one that was. A limit that is gone lives on for the holds it has.
    """

    subject: str
    name: str
    shape: Shape
    limit: Limit
    spent: Fraction = ZERO
    reserved: Fraction = ZERO
    level: Fraction | None = None
    level_at: datetime | None = None
    window: Window | None = None

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Accounts are ordered by subject and limit name, byte by byte."""
        return self.subject.encode(), self.name.encode()

    def time(self, now: datetime) -> datetime:
        """An account's time never runs backwards behind what it has stored."""
        stored = [at for at in (self.level_at, self.window.start if self.window else None) if at is not None]
        return max(now, *stored) if stored else now

    def open_window(self, now: datetime) -> Window | None:
        """The stored window while it lasts."""
        if self.window is not None and self.time(now) < self.window.end:
            return self.window
        return None

    def numbers(self, now: datetime) -> Numbers:
        """What is stored, brought to `now`: a window that has ended counts nothing, a bucket has refilled."""
        window = self.open_window(now)
        turned = self.shape.period is not None and window is None
        return Numbers(
            spent=ZERO if turned else self.spent,
            reserved=ZERO if turned else self.reserved,
            level=self.level_now(now),
            window=window,
        )

    def level_now(self, now: datetime) -> Fraction:
        """Refilled since the last touch at the rate now in force, cut to the capacity now in force."""
        if self.shape.kind != "bucket":
            return ZERO
        capacity = self.limit.capacity
        assert capacity is not None
        if self.level is None or self.level_at is None:
            return capacity
        elapsed_s = seconds(max(timedelta(0), now - self.level_at))
        return min(capacity, self.level + self.limit.refill_per_s * elapsed_s)

    def shift_level(self, now: datetime, change: Fraction) -> None:
        """Touch: refill, then add or take, within 0 and the capacity, all by the numbers now in force."""
        assert self.limit.capacity is not None
        self.level = max(ZERO, min(self.limit.capacity, self.level_now(now) + change))
        self.level_at = self.time(now)

    def turn_window(self, now: datetime) -> None:
        """A grant or a record opens the window of its instant, with counters at zero, unless one is open."""
        if self.shape.period is None or self.open_window(now) is not None:
            return
        self.window = window_at(self.shape.period, self.shape.zone, self.time(now))
        self.spent = self.reserved = ZERO


@dataclass(frozen=True)
class Row:
    """One limit of a subject in numbers: a row of `balance`, an element of `remaining` and of `violations`."""

    subject: str
    limit_name: str
    unit: str
    kind: str
    capacity: Fraction | None
    spent: Fraction | None
    reserved: Fraction | None
    level: Fraction | None
    available: Fraction | None
    reason: str | None = None
    retry_after_s: Fraction | None = None
    window: Window | None = None
    full_after_s: Fraction | None = None

    @property
    def tightness(self) -> tuple[int, Fraction]:
        """Smaller is tighter: what share of the capacity is left; unlimited comes last."""
        if self.capacity is None or self.available is None:
            return 1, ZERO
        return 0, self.available / self.capacity if self.capacity else ZERO


def row_of(account: Account, numbers: Numbers, now: datetime) -> Row:
    """What a reader sees of an account: a bucket has a level, and nothing spent."""
    limit = account.limit
    available: Fraction | None
    full_after_s: Fraction | None = None
    if limit.kind == "bucket":
        available = numbers.level
        full_after_s = wait_for_level(account, numbers.level, limit.capacity or ZERO, now)
    elif limit.capacity is None:
        available = None
    else:
        available = max(ZERO, limit.capacity - numbers.spent - numbers.reserved)
    return Row(
        subject=account.subject,
        limit_name=account.name,
        unit=limit.unit,
        kind=limit.kind,
        capacity=limit.capacity,
        spent=None if limit.kind == "bucket" else numbers.spent,
        reserved=numbers.reserved,
        level=numbers.level if limit.kind == "bucket" else None,
        available=available,
        window=numbers.window,
        full_after_s=full_after_s,
    )


def wait_for_level(account: Account, level: Fraction, wanted: Fraction, now: datetime) -> Fraction | None:
    """Seconds from `now` until refill alone lifts the level to `wanted`; None when it never will.

    A clock behind the account's last touch first has to catch up: nothing refills until then.
    """
    if level >= wanted:
        return ZERO
    if not account.limit.refill_per_s:
        return None
    behind_s = seconds(account.time(now) - now)
    return behind_s + ceil_to_microsecond((wanted - level) / account.limit.refill_per_s)


def judge(account: Account, numbers: Numbers, cost: Fraction, headroom: Fraction, now: datetime) -> Row | None:
    """The one comparison: None if `cost` fits, otherwise the account's row with the reason and the wait."""
    reason = _reason(account.limit, numbers, cost, headroom)
    if reason is None:
        return None
    wait_s = _wait(account, numbers, cost, headroom, now, reason)
    return replace(row_of(account, numbers, now), reason=reason, retry_after_s=wait_s)


def _reason(limit: Limit, numbers: Numbers, cost: Fraction, headroom: Fraction) -> str | None:
    admitted = limit.admits(headroom)
    if cost == 0 or admitted is None:
        return None
    if cost > admitted:
        return "too_large"
    if limit.kind == "bucket":
        assert limit.capacity is not None
        return "rate" if numbers.level - limit.capacity * headroom < cost else None
    if limit.kind == "concurrency":
        return "concurrency" if numbers.reserved + cost > admitted else None
    if numbers.spent + cost > admitted:
        return "exhausted"
    return "held" if numbers.spent + numbers.reserved + cost > admitted else None


def _wait(
    account: Account, numbers: Numbers, cost: Fraction, headroom: Fraction, now: datetime, reason: str
) -> Fraction | None:
    if reason == "too_large":
        return None
    if reason == "rate":
        assert account.limit.capacity is not None
        return wait_for_level(account, numbers.level, cost + account.limit.capacity * headroom, now)
    to_end_s = seconds(numbers.window.end - now) if numbers.window else None
    if reason == "exhausted":
        return to_end_s
    return POLLING_HINT_S if to_end_s is None else min(POLLING_HINT_S, to_end_s)


def binding(violations: list[Row]) -> Row:
    """The violation that a refusal names: by precedence, then the longest wait (never is longest), then lock order."""

    def rank(row: Row) -> tuple[int, int, Fraction]:
        assert row.reason is not None
        never = 0 if row.retry_after_s is None else 1
        return REASONS.index(row.reason), never, -(row.retry_after_s or ZERO)

    return min(violations, key=rank)


def longest_wait(violations: list[Row]) -> Fraction | None:
    """Over all violated limits; None when one of them never fits."""
    waits = [row.retry_after_s for row in violations]
    known = [wait for wait in waits if wait is not None]
    return max(known) if known and len(known) == len(waits) else None
