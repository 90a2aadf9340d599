"""What a leased budget asks the database, in which order, and what it makes of the answers. As plans, see `attempts`.

One at a time talks to the database about the leases of a process (`Leases.turn`), so that an answer is never about a
lease that has changed meanwhile. Everything may be asked twice, and every answer may be lost:

- a lease whose reserve is in doubt is never used, and released;
- a raise in doubt does not count here, and is over when the next totals are set;
- a lowering counts here before it is asked for, is asked once, and in doubt its lease is never raised again: it could
  still be under way;
- postings are totals, and so are the final ones, which no longer change once they were sent.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar, cast
from uuid import UUID, uuid5

from quota.calls import (
    Adjust,
    Balance,
    BalanceRow,
    Call,
    Extend,
    Record,
    Release,
    Reservation,
    Reserve,
    Settle,
    Settlement,
)
from quota.client.attempts import Join, Plan
from quota.client.core import Core
from quota.errors import (
    AlreadyReleased,
    AlreadySettled,
    Expired,
    InvalidTtl,
    QuotaError,
    Unavailable,
    UnknownReservation,
)
from quota.ids import uuid7
from quota.lease.amounts import ZERO, Amounts, add, amounts_of, subtract
from quota.lease.escrow import Escrow, Need, Verdict, key_of
from quota.lease.lease import Lease, earliest_end, fitting
from quota.lease.terms import COUNTED, Terms

__all__ = ["Planner", "boot_clock"]

logger = logging.getLogger("quota.lease")

A = TypeVar("A")

# A lease that would live shorter than this is more trouble than its calls.
_LEAST_LIFE_S = 0.1
_TTL_MOST_S = 86_400.0
_CLOSED = (Expired, AlreadySettled, AlreadyReleased, UnknownReservation)


def boot_clock() -> Callable[[], float]:
    """Returns the clock of leases, in seconds.

    It never steps back, and where the system has one it goes on while the machine sleeps: the database's does, and a
    lease that was slept through must not look alive (`time.monotonic` stands still meanwhile on Linux).
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return time.monotonic
    return functools.partial(time.clock_gettime, clock)


def seconds_of(ttl: timedelta) -> float:
    """Returns how long a call lives. Errors: `InvalidTtl`."""
    seconds = ttl.total_seconds()
    if not 0 < seconds <= _TTL_MOST_S:
        raise InvalidTtl(f"invalid_ttl: {ttl} is not more than 0 and at most 24 hours", "Extend it while it goes on.")
    return seconds


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()


def _start_anew() -> None:
    for planner in list(_planners):
        planner.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class Planner:
    """The part of a leased budget that does no I/O. Arguments: the client's core, the terms, the clock, the tenant."""

    def __init__(self, core: Core, terms: Terms, clock: Callable[[], float], tenant: str | None = None) -> None:
        self._core = core
        self._terms = terms
        self._clock = clock
        self.tenant = tenant or core.tenant
        self.start_anew()
        _planners.add(self)

    def start_anew(self) -> None:
        """Begins without a lease: at first, and in a forked child, which has no part in its parent's."""
        self.escrow = Escrow(self._terms, self._clock)

    def plan(self, call: Call[A], timeout_s: Decimal | float | None = None, *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a call: decided here if it can be, else by the database.

        Arguments: `call`, any value of `quota.calls`; `timeout_s`, its deadline in seconds, None: the client's;
        `id_is_ours`: as in `Client.plan`.
        """
        id_is_ours = id_is_ours or (isinstance(call, Reserve) and call.id is None)
        deadline_s = time.monotonic() + float(self._core.timeout_s if timeout_s is None else timeout_s)
        call = call.identified(uuid7)
        answer: object = None
        match call:
            case Reserve() if self._is_ours(call):
                answer = yield from self._reserve(call, deadline_s)
            case Settle() if call.tenant == self.tenant:
                answer = yield from self._settle(call)
            case Release() if call.tenant == self.tenant:
                answer = self.escrow.release(key_of(call.id))
            case Adjust() if call.tenant == self.tenant:
                answer = yield from self._adjust(call, deadline_s)
            case Extend() if call.tenant == self.tenant:
                answer = self.escrow.extend(key_of(call.id), seconds_of(call.ttl))
            case _:
                return (yield from self._core.plan(call, timeout_s, id_is_ours=id_is_ours))
        if answer is None:
            left_s = max(0.001, deadline_s - time.monotonic())
            answer = yield from self._core.plan(call, left_s, id_is_ours=id_is_ours)
        return cast("A", answer)

    def _is_ours(self, call: Reserve) -> bool:
        terms = self._terms
        return (
            (call.subject, call.tenant) == (terms.subject, self.tenant)
            and set(call.also) == set(terms.also)
            and call.headroom == terms.headroom
            and call.on_expiry is None
        )

    # -- calls --------------------------------------------------------------------------------------------------------

    def _reserve(self, call: Reserve, deadline_s: float) -> Plan[Reservation | None]:
        escrow, given, ttl_s = self.escrow, amounts_of(call.costs), seconds_of(call.ttl)
        key = key_of(call.id or "")
        while True:
            verdict = escrow.reserve(given, ttl_s, key)
            if isinstance(verdict, Reservation):
                return verdict
            if verdict is Verdict.DATABASE:
                return None
            try:
                refusal = yield from self._supplied(escrow, given, None, deadline_s)
            except Unavailable:
                if not self._core.fail_open:
                    raise
                return None
            if refusal is not None:
                return refusal

    def _supplied(
        self, escrow: Escrow, given: Amounts, need: Need | None, deadline_s: float
    ) -> Plan[Reservation | None]:
        """Takes or raises a lease, or waits for whoever does. Result: the refusal; None: try once more."""
        other = escrow.turn()
        if other is not None:
            yield Join(other, deadline_s)
            if time.monotonic() >= deadline_s:
                raise Unavailable("quota lease: no answer in time; others were waiting for the database as well")
            return None
        try:
            if need is not None:
                return (yield from self._raise(escrow, need.lease, need.amounts, deadline_s))
            lease = escrow.current()
            if lease is None:
                return (yield from self._take(escrow, given, deadline_s))
            asked = lease.complete(given)
            return None if asked is None else (yield from self._raise(escrow, lease, asked, deadline_s))
        finally:
            escrow.pass_turn()

    def _settle(self, call: Settle) -> Plan[Settlement | None]:
        given = None if call.costs is None else amounts_of(call.costs)
        key = key_of(call.id)
        found = self.escrow.settle(key, given, call.final, call.outcome)
        if found is None:
            return None
        answer, unbooked = found
        if unbooked:
            # Its lease is closed.
            yield from self._core.ask(self._record(unbooked, call.id))
            self.escrow.recorded(key)
        return answer

    def _record(self, unbooked: Amounts, identity: UUID | str) -> Record:
        """The call that books usage without a lease; the id keeps it from being booked twice."""
        return Record(self._terms.subject, unbooked, id=identity, also=self._terms.also, tenant=self.tenant)

    def _adjust(self, call: Adjust, deadline_s: float) -> Plan[Reservation | None]:
        escrow, given, key = self.escrow, amounts_of(call.costs), key_of(call.id)
        while True:
            found = escrow.adjust(key, given)
            if not isinstance(found, Need):
                return found
            if found.lease.sealed or escrow.now_s() >= found.lease.expiry:
                raise Unavailable("quota lease: the lease of this call takes no more; settle it and reserve anew")
            refusal = yield from self._supplied(escrow, given, found, deadline_s)
            if refusal is not None:
                return replace(refusal, reservation=UUID(int=key), state="held")

    # -- leases -------------------------------------------------------------------------------------------------------

    def _ask(self, call: Call[A], deadline_s: float, retries: int | None = None) -> Plan[A]:
        return (yield from self._core.ask(call, max(0.001, deadline_s - time.monotonic()), retries))

    def _take(self, escrow: Escrow, given: Amounts, deadline_s: float) -> Plan[Reservation | None]:
        """Takes a new lease; returns the refusal, if it was refused."""
        floor = self._terms.floor(given)
        totals = {unit: max(size, floor[unit]) for unit, size in self._terms.size.items()}
        while True:
            answer = yield from self._open(escrow, totals, deadline_s)
            if answer is None:
                return None
            part = None if self._terms.at_least is None else self._part(answer, totals)
            if part is None or part == totals or any(part[unit] < least for unit, least in floor.items()):
                return _refusal(answer, given if part is not None and part != totals else totals)
            totals = part

    def _part(self, refusal: Reservation, totals: Amounts) -> Amounts | None:
        left = fitting(refusal, Decimal(self._terms.headroom))
        return None if left is None else {unit: min(total, left.get(unit, total)) for unit, total in totals.items()}

    def _open(self, escrow: Escrow, totals: Amounts, deadline_s: float) -> Plan[Reservation | None]:
        """Reserves a lease of this size; returns the refusal, if it was refused."""
        terms = self._terms
        call = Reserve(
            terms.subject,
            totals,
            ttl=timedelta(seconds=terms.ttl_s),
            id=uuid7(),
            also=terms.also,
            headroom=terms.headroom,
            on_expiry="charge",
            details={**terms.details, "lease": {"host": socket.gethostname(), "pid": os.getpid()}},
            tenant=self.tenant,
        )
        lease_id = UUID(str(call.id))
        sent_s = escrow.now_s()
        try:
            answer = yield from self._ask(call, deadline_s)
        except QuotaError as error:
            if isinstance(error, Unavailable) and error.in_doubt:
                escrow.abandoned(Lease(lease_id, terms, totals, _nothing(lease_id), sent_s))
            raise
        except BaseException:
            escrow.abandoned(Lease(lease_id, terms, totals, _nothing(lease_id), sent_s))
            raise
        if answer.refused:
            if answer.reason == "closed":
                raise Unavailable("quota lease: the answer came when the lease had expired; try again", True)
            return answer
        lease = Lease(lease_id, terms, totals, answer, sent_s)
        try:
            rows: list[BalanceRow] = []
            for subject in (terms.subject, *terms.also):
                rows += yield from self._ask(Balance(subject, tenant=self.tenant), deadline_s)
        except BaseException:
            escrow.abandoned(lease)
            raise
        lease.ends(earliest_end(lease, answer, rows), escrow.now_s())
        escrow.opened(lease, _LEAST_LIFE_S)
        return None

    def _raise(self, escrow: Escrow, lease: Lease, asked: Amounts, deadline_s: float) -> Plan[Reservation | None]:
        """Raises a lease so that `asked` fits; returns the refusal, if not even that is to be had."""
        least = escrow.short_of(lease, asked, ambitious=False)
        totals = least if lease.tight else escrow.short_of(lease, asked, ambitious=True)
        while totals:
            try:
                answer = yield from self._ask(Adjust(lease.id, totals, tenant=self.tenant), deadline_s)
            except _CLOSED as error:
                logger.warning("lease %s is closed: %s", lease.id, error)
                escrow.retire(lease, lost=True)
                return None
            if answer.granted:
                escrow.grown(lease, totals)
                return None
            if totals == least:
                return _refusal(answer, asked)
            lease.tight = True
            left = fitting(answer, Decimal(self._terms.headroom)) or {}
            some = {u: min(t, add(lease.held[u], left.get(u, t))) for u, t in totals.items()}
            totals = some if some != totals and all(some[u] >= least[u] for u in least) else least
        return None

    # -- looking after leases -----------------------------------------------------------------------------------------

    def giving_back(self, escrow: Escrow) -> Plan[None]:
        """Plans the end of the lease in use: what is free of it returns now, the rest with its last open call."""
        lease = escrow.current()
        if lease is not None:
            escrow.retire(lease)
            yield from self.tending(escrow)

    def tending(self, escrow: Escrow) -> Plan[None]:
        """Plans one look at the leases: extend, post, return what is idle, end what is over."""
        deadline_s = time.monotonic() + self._core.timeout_s
        while (other := escrow.turn()) is not None:
            yield Join(other, deadline_s)
            if time.monotonic() >= deadline_s:
                return
        try:
            for lease in escrow.leases():
                try:
                    yield from self._tend(escrow, lease)
                except _CLOSED as error:
                    logger.warning("lease %s is closed: %s", lease.id, error)
                    escrow.retire(lease, lost=True)
                except Unavailable as error:
                    logger.info("lease %s: %s", lease.id, error)
                except QuotaError as error:
                    logger.warning("lease %s: %s", lease.id, error)
        finally:
            escrow.pass_turn()

    def _tend(self, escrow: Escrow, lease: Lease) -> Plan[None]:
        if not lease.lost and escrow.is_needed(lease):
            if escrow.now_s() - lease.anchor_s >= self._terms.ttl_s / 3:
                yield from self._extend(escrow, lease)
                yield from self._probe(escrow, lease)
            totals = escrow.to_post(lease)
            if totals is not None:
                yield from self._core.ask(Settle(lease.id, totals, final=False, tenant=self.tenant))
                escrow.posted(lease, totals)
            yield from self._return(escrow, lease)
            yield from self._cover(escrow, lease)
        final = escrow.final_totals(lease)
        if final is not None:
            yield from self._finish(escrow, lease, final)

    def _extend(self, escrow: Escrow, lease: Lease) -> Plan[None]:
        sent_s = escrow.now_s()
        ttl = timedelta(seconds=self._terms.ttl_s)
        expires_at: datetime = yield from self._core.ask(Extend(lease.id, ttl, tenant=self.tenant))
        escrow.anchored(lease, sent_s, expires_at)

    def _probe(self, escrow: Escrow, lease: Lease) -> Plan[None]:
        """Asks for nothing: it fits anywhere, unless somebody has frozen the subject; then nothing new is granted."""
        if lease.draining:
            return
        nothing = {**dict.fromkeys(lease.held, ZERO), **dict.fromkeys(COUNTED, ZERO)}
        terms, second = self._terms, timedelta(seconds=1)
        call = Reserve(terms.subject, nothing, ttl=second, id=uuid7(), also=terms.also, tenant=self.tenant)
        try:
            answer = yield from self._core.ask(call)
        except QuotaError as error:
            if isinstance(error, Unavailable):
                raise
            logger.warning("lease %s of %s is given up: %s", lease.id, self._terms.subject, error)
            escrow.retire(lease)
            return
        if answer.refused:
            escrow.retire(lease)
        else:
            yield from self._core.ask(Release(call.id or "", tenant=self.tenant))

    def _return(self, escrow: Escrow, lease: Lease) -> Plan[None]:
        before = dict(lease.held)
        totals = escrow.to_return(lease)
        if not totals:
            return
        try:
            # Once: were it repeated, the first one could still be under way when the lease is raised again.
            yield from self._core.ask(Adjust(lease.id, totals, tenant=self.tenant), None, 0)
        except BaseException as error:
            if isinstance(error, Unavailable) and not error.in_doubt:
                escrow.kept(lease, {unit: before[unit] for unit in totals})
            else:
                escrow.retire(lease, sealed=True)
            raise

    def _cover(self, escrow: Escrow, lease: Lease) -> Plan[None]:
        """Calls have used more than they held, and more than was free: holds it now, if that is to be had."""
        totals = escrow.uncovered(lease)
        if totals:
            answer = yield from self._core.ask(Adjust(lease.id, totals, tenant=self.tenant))
            if answer.granted:
                escrow.grown(lease, totals)

    def _finish(self, escrow: Escrow, lease: Lease, totals: Amounts) -> Plan[None]:
        try:
            if totals:
                yield from self._core.ask(Settle(lease.id, totals, tenant=self.tenant))
            else:  # nobody knows whether it was taken, so nothing was used of it
                yield from self._core.ask(Release(lease.id, tenant=self.tenant))
        except UnknownReservation:
            # It may still be under way, until its own time would have passed.
            if escrow.now_s() < lease.anchor_s + self._terms.ttl_s:
                return
        except AlreadySettled as error:
            logger.warning("lease %s was closed by somebody else: %s", lease.id, error)
        except AlreadyReleased as error:
            logger.warning("lease %s was released by somebody else, what was used is recorded: %s", lease.id, error)
            unposted = {unit: subtract(total, lease.posted[unit]) for unit, total in totals.items()}
            if any(unposted.values()):
                yield from self._core.ask(self._record(unposted, uuid5(lease.id, "unposted")))
        escrow.gone(lease)


def _nothing(lease_id: UUID) -> Reservation:
    """The answer that was lost: nothing is known to be held."""
    return Reservation(granted=False, reservation=lease_id, state=None)


def _refusal(answer: Reservation, asked: Amounts) -> Reservation:
    """The database's refusal with its numbers, for the caller that it is about."""
    requested: Any = answer.requested if answer.unit is None else asked.get(answer.unit, answer.requested)
    return replace(answer, reservation=None, state=None, expires_at=None, requested=requested)
