"""One lease: a reservation of the database, and how far it has been given out here. Arithmetic; no lock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from quota.calls import BalanceRow, Reservation, Standing
from quota.lease.amounts import PLAIN, STEP, ZERO, Amounts, add, floored, multiply, subtract
from quota.lease.terms import CAUTION, COUNTED, Terms

__all__ = ["Lease", "earliest_end", "fitting"]

_ONE = Decimal(1)


class Lease:
    """Where one lease stands.

    Fields, amounts by unit:
        held: what the reservation holds at least, as totals; it may hold more, by a raise whose answer was lost.
        free: what of it is neither used nor held by an open call. Below 0 where calls have used more than they held.
        used: totals of the calls that were settled: what is posted.
        sent: the totals that may have been posted; they never go back.
        slots: the units that return when a call closes and are never booked.
        counted: 1 of each unit that counts by itself, where a limit counts it.
        size: how much is taken at a time, at least.
        step: how much is taken at a time; twice what went in the last period, where that is more.
        tight: a raise was refused lately; only what is needed is asked for.
    Fields, instants of the local clock, in seconds:
        until: from when on nothing is granted any more.
        expiry: when the database may take it for expired.
    Flags:
        draining: nothing new is granted; it ends with its last open call.
        sealed: never raised again (a lowering may still be under way).
        lost: the database has closed it, or says that it has.
        plain: its amounts are small enough for any context of the usual digits.
        closing: its final totals have been sent and are fixed.
    """

    def __init__(self, identity: UUID, terms: Terms, totals: Amounts, answer: Reservation, sent_s: float) -> None:
        self.id = identity
        self.terms = terms
        self.draining = self.sealed = self.lost = self.closing = self.tight = False
        standings = answer.remaining
        units = dict.fromkeys(s.unit for s in standings if s.unit is not None)
        self.held: Amounts = {unit: totals.get(unit, _ONE) for unit in units}
        self.free = dict(self.held)
        self.used: Amounts = dict.fromkeys(units, ZERO)
        self.sent = dict(self.used)
        self.posted = dict(self.used)
        self.slots = frozenset(s.unit for s in standings if s.kind == "concurrency" and s.unit is not None)
        self.counted: Amounts = {unit: _ONE for unit in COUNTED if unit in self.held}
        self.size = {unit: terms.size_of(unit, _least_available(standings, unit)) for unit in units}
        self.step = dict(self.size)
        self._ends: datetime | None = None
        self.plain = True
        self.note_size()
        self.anchor_s, self._anchor_at = sent_s, datetime.now(UTC)
        self.until = self.expiry = -math.inf
        if answer.expires_at is not None:
            self.anchored(sent_s, answer.expires_at)
        self.reviewed_s = sent_s
        self.reviewed_grants = 0
        self.reviewed_out = dict(self.used)

    # -- time ---------------------------------------------------------------------------------------------------------

    def anchored(self, sent_s: float, expires_at: datetime) -> None:
        """The database has set the expiry, at an instant that is not before `sent_s` of the local clock.

        Its clock read `expires_at` - ttl then. Whatever it will read later it reads, by the local clock, no earlier
        than after the same span from `sent_s`: no clocks are compared.
        """
        self.anchor_s = sent_s
        self._anchor_at = expires_at - timedelta(seconds=self.terms.ttl_s)
        self.expiry = max(self.expiry, self.local(expires_at))
        self._bound()

    def ends(self, at: datetime | None, now_s: float) -> None:
        """The earliest of its windows ends `at` (None: never). One that has turned already ends it at once."""
        self._ends = at
        self._bound()
        if at is not None and at <= self._anchor_at:
            self.until = now_s

    def _bound(self) -> None:
        if self.draining:
            self.until = -math.inf
        else:
            self.until = self.expiry if self._ends is None else min(self.expiry, self.local(self._ends))

    @property
    def taken_at(self) -> datetime:
        """The database's clock when it last set the expiry."""
        return self._anchor_at

    def local(self, at: datetime) -> float:
        """The local instant before which the database's clock does not read `at`."""
        return self.anchor_s + (at - self._anchor_at).total_seconds() * CAUTION

    def instant(self, local_s: float) -> datetime:
        """What the database's clock reads about at a local instant."""
        return self._anchor_at + timedelta(seconds=local_s - self.anchor_s)

    # -- amounts ------------------------------------------------------------------------------------------------------

    def complete(self, given: Amounts) -> Amounts | None:
        """Returns a call's costs with what counts by itself; None when only the database can judge them.

        A unit that the lease lacks may have a limit, or none; one that the call leaves out may be required.
        """
        asked = {**self.counted, **{u: a for u, a in given.items() if u in self.held or u not in COUNTED}}
        return asked if asked.keys() == self.held.keys() else None

    def fits(self, asked: Amounts) -> bool:
        """True when all of it is free. 0 fits anywhere."""
        return all(not amount or amount <= self.free[unit] for unit, amount in asked.items())

    def within(self, asked: Amounts) -> bool:
        """True when raising the lease for these amounts leaves what is held and not used within the terms."""
        return all(
            add(self.unused(unit), subtract(amount, self.free[unit])) <= self.terms.most_of(unit)
            for unit, amount in asked.items()
            if amount and amount > self.free[unit]
        )

    def raised(self, asked: Amounts, ambitious: bool) -> Amounts:
        """Returns the totals to raise the lease to, of the units that are short.

        Arguments: `asked`, what must become free; `ambitious`, take the usual step on top, within the terms.
        """
        totals = {}
        for unit, amount in asked.items():
            short = subtract(amount, self.free[unit]) if amount else ZERO
            if short > ZERO:
                room = subtract(self.terms.most_of(unit), add(self.unused(unit), short))
                step = max(ZERO, min(self.step[unit], room)) if ambitious else ZERO
                totals[unit] = add(self.held[unit], add(short, step))
        return totals

    def grown(self, totals: Amounts) -> None:
        """The database holds these totals now."""
        for unit, total in totals.items():
            if total > self.held[unit]:
                self.free[unit] = add(self.free[unit], subtract(total, self.held[unit]))
                self.held[unit] = total
        self.note_size()

    def note_size(self) -> None:
        """Something may have become large: `plain`."""
        self.plain = all(total < PLAIN for total in (*self.held.values(), *self.used.values()))

    def lowered(self, keep: Amounts) -> Amounts:
        """Gives up what is free above `keep`; returns the totals to lower the reservation to, none when nothing is."""
        totals = {}
        for unit, free in self.free.items():
            surplus = subtract(free, keep.get(unit, ZERO))
            if surplus > ZERO:
                self.free[unit] = subtract(free, surplus)
                self.held[unit] = totals[unit] = subtract(self.held[unit], surplus)
        return totals

    def unused(self, unit: str) -> Decimal:
        """What is held and not used."""
        return subtract(self.held[unit], self.used[unit])

    def booked(self) -> Amounts:
        """The totals to post: what was used of everything that is booked at all."""
        return {unit: total for unit, total in self.used.items() if unit not in self.slots}

    def out(self) -> Amounts:
        """What is used or held by open calls."""
        return {unit: subtract(held, self.free[unit]) for unit, held in self.held.items()}


def earliest_end(lease: Lease, granted: Reservation, balances: Iterable[BalanceRow]) -> datetime | None:
    """Returns when the first of the windows that a lease was taken in ends; None when none does.

    Arguments: `granted`, the answer that took it; `balances`, where its limits stand after that. A window that has
    turned in between ended, for all that can be known, when the lease was taken.
    """
    rows = {(row.subject, row.limit_name): row for row in balances}
    earliest: datetime | None = None
    for standing in granted.remaining:
        row = rows.get((standing.subject, standing.limit_name or ""))
        if standing.kind != "budget" or standing.unit is None or row is None:
            continue
        if row.window_end is None or row.window_start is None:
            if row.reserved is not None and row.reserved >= lease.held[standing.unit]:
                continue  # a lifetime budget: the lease stands in it
            return lease.taken_at
        if row.window_start > lease.taken_at:
            return lease.taken_at
        earliest = row.window_end if earliest is None else min(earliest, row.window_end)
    return earliest


def _left(standing: Standing, headroom: Decimal) -> Decimal | None:
    """What a limit still takes from a caller with this headroom; None: everything."""
    if standing.available is None or standing.capacity is None:
        return None
    reserve = multiply(standing.capacity, headroom)
    if standing.kind == "concurrency":
        reserve = floored(reserve, _ONE)
    return floored(max(ZERO, subtract(standing.available, reserve)), _ONE if standing.unit in COUNTED else STEP)


def _least_available(standings: Iterable[Standing], unit: str) -> Decimal | None:
    found = [s.available for s in standings if s.unit == unit and s.available is not None]
    return min(found, default=None)


def fitting(refusal: Reservation, headroom: Decimal) -> Amounts | None:
    """Returns how much of each unit the limits of a refusal would have taken, unlimited ones left out.

    None when no amount would have helped: a subject is frozen.
    """
    if not refusal.remaining:
        return None
    left: Amounts = {}
    for standing in refusal.remaining:
        part = _left(standing, headroom)
        if part is not None and standing.unit is not None:
            left[standing.unit] = min(left.get(standing.unit, part), part)
    return left
