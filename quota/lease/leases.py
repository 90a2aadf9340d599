"""The leases of one process, as the plans see them: what to ask the database next, and what came of it. No I/O."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from typing import Any

from quota.lease.amounts import ZERO, Amounts, add, subtract
from quota.lease.lease import Lease
from quota.lease.terms import Terms

__all__ = ["Leases"]


class Leases:
    """The leases of one process: the one that calls are granted from, and those that wait for their last call.

    Arguments: `terms`; `clock`, seconds that never step back and go on while the machine sleeps.

    Field: `keeper` is whatever looks after the leases.
    """

    def __init__(self, terms: Terms, clock: Callable[[], float]) -> None:
        self.terms = terms
        self.keeper: Any = None
        self._clock = clock
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._draining: list[Lease] = []
        self._direct_until_s = -math.inf
        self._turn: Future[None] | None = None
        self._closed = False
        # What the leases that are over have used.
        self._past: Amounts = {}

    @property
    def local(self) -> int:
        """How many calls were granted here."""
        raise NotImplementedError

    def _sweep(self, now_s: float) -> None:
        """Closes the calls whose time has passed."""
        raise NotImplementedError

    def _in_use(self, lease: Lease) -> bool:
        """True while calls under this lease are open."""
        raise NotImplementedError

    def is_needed(self, lease: Lease) -> bool:
        """True while calls are granted from this lease, or open under it."""
        with self._lock:
            return not lease.draining or self._in_use(lease)

    def turn(self) -> Future[None] | None:
        """Asks to be the one who talks to the database about leases; None: so it is, until `pass_turn`. Else who is."""
        with self._lock:
            if self._turn is None:
                self._turn = Future()
                return None
            return self._turn

    def pass_turn(self) -> None:
        """Lets others have their turn, and wakes those who wait."""
        with self._lock:
            done, self._turn = self._turn, None
        if done is not None:
            done.set_result(None)

    def now_s(self) -> float:
        """The local clock."""
        return self._clock()

    def standing(self) -> tuple[Amounts, Amounts]:
        """Returns, by unit, what is free here, and what calls have taken so far: used it, or still hold it."""
        with self._lock:
            taken = dict(self._past)
            for lease in (*self._draining, *([self._lease] if self._lease else [])):
                for unit, amount in lease.out().items():
                    taken[unit] = add(taken.get(unit, ZERO), amount)
            return dict(self._lease.free) if self._lease else {}, taken

    def current(self) -> Lease | None:
        """The lease that calls are granted from, None when there is none."""
        with self._lock:
            return self._usable(self._clock())

    def _usable(self, now_s: float) -> Lease | None:
        if self._lease is not None and now_s >= self._lease.until:
            self._retire(self._lease)
        return self._lease

    def opened(self, lease: Lease, least_life_s: float) -> None:
        """A lease was taken; one that would not live for `least_life_s` sends its calls to the database meanwhile."""
        with self._lock:
            now_s = self._clock()
            lease.reviewed_s, lease.reviewed_grants = now_s, self.local
            if self._closed or lease.until - now_s < least_life_s:
                self._direct_until_s = max(lease.until, now_s + least_life_s)
                lease.draining = True
                self._draining.append(lease)
            else:
                self._lease = lease

    def abandoned(self, lease: Lease) -> None:
        """A lease that may have been taken, and is not to be used: it ends as soon as that can be said."""
        with self._lock:
            lease.draining = lease.sealed = True
            self._draining.append(lease)

    def retire(self, lease: Lease, *, sealed: bool = False, lost: bool = False) -> None:
        """Nothing new is granted from this lease. `sealed`: it is not raised again; `lost`: the database closed it."""
        with self._lock:
            lease.sealed = lease.sealed or sealed or lost
            lease.lost = lease.lost or lost
            self._retire(lease)

    def _retire(self, lease: Lease) -> None:
        lease.draining = True
        lease.until = -math.inf
        if self._lease is lease:
            self._lease = None
            self._draining.append(lease)

    def short_of(self, lease: Lease, asked: Amounts, *, ambitious: bool) -> Amounts:
        """Returns the totals to raise a lease to, so that `asked` fits; empty when it does."""
        with self._lock:
            return lease.raised(asked, ambitious)

    def uncovered(self, lease: Lease) -> Amounts:
        """Returns the totals to raise a lease to where calls have used more than there was; empty when none have."""
        with self._lock:
            if lease.sealed or lease.draining:
                return {}
            return {unit: subtract(lease.held[unit], free) for unit, free in lease.free.items() if free < ZERO}

    def grown(self, lease: Lease, totals: Amounts) -> None:
        """The database has raised a lease to these totals."""
        with self._lock:
            lease.grown(totals)

    def anchored(self, lease: Lease, sent_s: float, expires_at: datetime) -> None:
        """The database has extended a lease, asked for it at `sent_s`."""
        with self._lock:
            lease.anchored(sent_s, expires_at)

    def leases(self) -> list[Lease]:
        """All leases that the database may still hold; calls whose time has passed are closed first."""
        with self._lock:
            now_s = self._clock()
            self._sweep(now_s)
            lease = self._usable(now_s)
            if lease is not None:
                lease.tight = False
            return [*self._draining, *([self._lease] if self._lease is not None else [])]

    def final_totals(self, lease: Lease) -> Amounts | None:
        """Returns what a lease comes to that no call needs any more, fixed from here on; None while one does."""
        with self._lock:
            if not lease.draining or self._in_use(lease):
                return None
            if not lease.closing:
                lease.closing = True
                lease.sent = {unit: max(total, lease.sent[unit]) for unit, total in lease.used.items()}
            return {unit: total for unit, total in lease.sent.items() if unit not in lease.slots}

    def gone(self, lease: Lease) -> None:
        """A lease is settled: the database holds nothing of it."""
        with self._lock:
            if lease in self._draining:
                self._draining.remove(lease)
                for unit, total in lease.used.items():
                    self._past[unit] = add(self._past.get(unit, ZERO), total)

    def to_post(self, lease: Lease) -> Amounts | None:
        """Returns the totals to post; None when they are posted already."""
        with self._lock:
            totals = {unit: max(total, lease.sent[unit]) for unit, total in lease.booked().items()}
            if all(total == lease.posted[unit] for unit, total in totals.items()):
                return None
            lease.sent |= totals
            return totals

    def posted(self, lease: Lease, totals: Amounts) -> None:
        """The database has booked these totals."""
        with self._lock:
            lease.posted |= totals

    def to_return(self, lease: Lease) -> Amounts | None:
        """Gives up what is idle; returns the totals to lower the reservation to, None when nothing is to be done."""
        with self._lock:
            if lease.draining:
                return lease.lowered({}) if self._in_use(lease) else None
            now_s = self._clock()
            if now_s - lease.reviewed_s < self.terms.idle_s:
                return None
            out = lease.out()
            moved = {unit: subtract(out[unit], lease.reviewed_out[unit]) for unit in out}
            idle = self.local == lease.reviewed_grants
            lease.reviewed_s, lease.reviewed_grants, lease.reviewed_out = now_s, self.local, out
            if idle and not self._in_use(lease):
                self._retire(lease)
                return None
            if idle:
                return lease.lowered({})
            for unit, size in lease.size.items():
                wanted = max(size, add(moved[unit], moved[unit]))
                lease.step[unit] = min(wanted, self.terms.most_of(unit))
            return lease.lowered(lease.step)

    def kept(self, lease: Lease, before: Amounts) -> None:
        """A lowering was not carried out: the lease holds what it held before."""
        with self._lock:
            lease.grown(before)

    def closed(self) -> None:
        """No new calls; the lease ends with those that are open."""
        with self._lock:
            self._closed = True
            if self._lease is not None:
                self._retire(self._lease)

    def rest(self, keeper: object) -> bool:
        """True when there is nothing to look after; the keeper, if it is this one, is dismissed."""
        with self._lock:
            if self._lease is None and not self._draining and self.keeper is keeper:
                self.keeper = None
                return True
            return False

    def hire(self, make: Callable[[], object], alive: Callable[[Any], bool]) -> bool:
        """Makes a keeper where there is work and none at it. Result: True when it is new."""
        with self._lock:
            if self._lease is None and not self._draining:
                return False
            if self.keeper is not None and alive(self.keeper):
                return False
            self.keeper = make()
            return True
