"""Callers who ask often are decided from memory: a process holds a part of their limits, and hands it out.

The cap stays exact, since nothing is given out here that the ledger does not hold for it (`quota.lease`). What a caller
is told is what the ledger had at a look, once a second, less what has been let through here since.

Near a cap nothing is leased: every call is decided by the ledger, and every refusal is its own. Nor is anything for
callers whose concurrency is limited: their slots are to be back at once, everywhere.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TypeVar
from uuid import UUID

from quota import calls
from quota.calls import LimitState, Reservation, Settle
from quota.client import AsyncClient, Client
from quota.client.attempts import Join, Plan
from quota.config import ConfigError
from quota.errors import Unavailable
from quota.lease import AsyncLeasedBudget, LeasedBudget
from quota.lease.amounts import ZERO, Amounts, add, subtract
from quota.lease.escrow import TTL_S
from quota.metering.books import Ledger, Snapshot
from quota.metering.identity import Identity

__all__ = ["Leased", "Leases", "Leasing"]

A = TypeVar("A")

_AMOUNT_MAX = 10**15
_TTL = timedelta(seconds=TTL_S)
# Whoever was refused a lease is near a cap, and decided one by one for so long; a ledger that is away is not looked at.
_REST_S = 5.0
# A caller is not kept waiting long for balances that may be a little older.
_LOOK_S = 0.5
# A call is closed once. What is kept longer than it lives makes the collector of garbage look through everything.
_REMEMBERED = 1
# So many callers' frequency is remembered.
_SEEN = 10_000


@dataclass(frozen=True, kw_only=True)
class Leasing:
    """How much of a caller's limits a process holds at a time, and for whom.

    Fields:
        size: how much is taken at a time, in `unit`. A call that may cost more is decided by the ledger.
        unit: of the routes that it is for.
        most: what may be held and not used at any time: what a killed process costs. None: eight times `size`.
        leaves: share of every capacity that is not leased: from there on calls are decided one by one.
        from_per_s: calls of a caller within a second from which on it gets a lease.
        callers: most callers with a lease at a time, in each process.
        ttl: how long a lease outlives its process, and how long decisions go on while the ledger is away.
        idle: what was not needed for so long returns.
        post_every: how often what was used is booked, and the balances are looked at.
    """

    size: int
    unit: str = "cost"
    most: int | None = None
    leaves: Decimal = Decimal("0.5")
    from_per_s: int = 20
    callers: int = 100
    ttl: timedelta = timedelta(seconds=30)
    idle: timedelta = timedelta(seconds=10)
    post_every: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        for name in ("size", "most", "from_per_s", "callers"):
            value = getattr(self, name)
            if name == "most" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _AMOUNT_MAX:
                raise ConfigError(f"lease: {name} {value!r}; give a whole number from 1 on")
        if self.most is not None and self.most < self.size:
            raise ConfigError(f"lease: most {self.most} is less than size, {self.size}")
        if not 0 <= self.leaves < 1:
            raise ConfigError(f"lease: leaves {self.leaves}; give 0 to below 1")
        for name in ("ttl", "idle", "post_every"):
            span: timedelta = getattr(self, name)
            if not timedelta(0) < span <= timedelta(hours=24):
                raise ConfigError(f"lease: {name} {span}; give more than 0 and at most a day")


class Leases:
    """The callers of one process who ask often, and what it holds for them. Thread-safe.

    Arguments: `ledger`, where the leases are taken; `terms`.
    """

    def __init__(self, ledger: Ledger, terms: Leasing) -> None:
        self._ledger = ledger
        self._terms = terms
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[str, str], _Frequency] = OrderedDict()
        self._leased: dict[tuple[str, str], Leased] = {}
        self._closed = False

    def of(self, identity: Identity) -> Leased | None:
        """Returns the books of a caller who is to be decided here; None: one by one. Each question counts as a call."""
        key = (self._ledger.tenant_of(identity), identity.subject)
        now_s = time.monotonic()
        with self._lock:
            leased = self._leased.get(key)
            if self._closed or (leased is not None and now_s < leased.rests_until_s):
                return None
            if leased is None or not leased.has_lease:
                if not self._asks_often(key, now_s) or not self._may_be_leased(identity):
                    return None
                if leased is None:
                    if not self._has_room(now_s):
                        return None
                    leased = self._leased[key] = Leased(self._ledger, identity, self._terms)
            leased.asked_s = now_s
            return leased

    def _asks_often(self, key: tuple[str, str], now_s: float) -> bool:
        asked = self._asked.pop(key, None)
        if asked is None or now_s - asked.since_s >= 1:
            asked = _Frequency(now_s)
        asked.calls += 1
        self._asked[key] = asked
        if len(self._asked) > _SEEN:
            self._asked.popitem(last=False)
        return asked.calls >= self._terms.from_per_s

    def _may_be_leased(self, identity: Identity) -> bool:
        """By its limits as they were seen lately: who has not been seen yet is decided by the ledger first."""
        known = self._ledger.terms(identity)
        return known is not None and _none_is_concurrent(known.states)

    def _has_room(self, now_s: float) -> bool:
        if len(self._leased) >= self._terms.callers:
            for key in [key for key, leased in self._leased.items() if leased.is_over(now_s)]:
                del self._leased[key]
        return len(self._leased) < self._terms.callers

    def close(self) -> list[AsyncLeasedBudget | LeasedBudget]:
        """Takes no more leases; returns the budgets that are to be closed."""
        with self._lock:
            self._closed = True
            return [leased.budget for leased in self._leased.values()]


class _Frequency:
    __slots__ = ("calls", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.calls = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the ledger had at a moment (of `time.monotonic`), and by unit what was free here and had been taken here."""

    at_s: float
    states: list[LimitState]
    free: Amounts
    taken: Amounts


class Leased:
    """One caller whose calls are decided here: their `Books`.

    Arguments: `ledger`; `identity`, the caller; `terms`.
    Fields: `asked_s`, when it was asked for last; `rests_until_s`, until when the ledger decides (`time.monotonic`).
    """

    keeps_details = False

    def __init__(self, ledger: Ledger, identity: Identity, terms: Leasing) -> None:
        self._ledger = ledger
        self._terms = terms
        self._seen: _Seen | None = None
        self._look_at_s = 0.0
        self.asked_s = self.rests_until_s = 0.0
        client = ledger.client
        assert isinstance(client, AsyncClient | Client)
        # Both kinds take the same arguments, each its own kind of client.
        kind: type = AsyncLeasedBudget if isinstance(client, AsyncClient) else LeasedBudget
        self.budget: AsyncLeasedBudget | LeasedBudget = kind(
            client,
            identity.subject,
            {terms.unit: terms.size},
            most=None if terms.most is None else {terms.unit: terms.most},
            ttl=terms.ttl,
            idle=terms.idle,
            post_every=terms.post_every,
            headroom=terms.leaves,
            remember=_REMEMBERED,
            tenant=ledger.tenant_of(identity),
        )

    @property
    def has_lease(self) -> bool:
        """True while calls can be granted from a lease."""
        return self.budget.escrow.current() is not None

    def is_over(self, now_s: float) -> bool:
        """True when the ledger holds nothing for it, and nobody is about to take a lease."""
        return now_s - self.asked_s > self._terms.idle.total_seconds() and not self.budget.escrow.leases()

    def reserving(self, cost: int, ttl: timedelta, identity: UUID) -> Plan[Reservation | None]:
        """Plans a hold out of the lease; None: the ledger is to decide, with nothing held back here.

        Arguments: `cost`, in the unit of the leases; `ttl`, how long it lives; `identity`, its id, unless it gets one.
        """
        costs = {self._terms.unit: cost}
        if ttl == _TTL and (taken := self.budget.escrow.take(costs)) is not None:
            return taken
        reserve = self.budget.asked(costs, ttl=ttl, id=identity)
        answer = yield from self.plan(reserve, id_is_ours=True)
        if answer.granted:
            return answer
        yield from self._give_back()
        return None

    def plan(self, call: calls.Call[A], *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a call, decided here if it can be."""
        try:
            return (yield from self.budget.plan(call, id_is_ours=id_is_ours))
        finally:
            self.budget.look_after()

    def settling(self, settle: Settle, identity: Identity) -> Plan[None]:  # noqa: ARG002 - the protocol's
        """Plans a settlement; what is left after it is a look of its own, which may fail by itself."""
        if not isinstance(settle.id, UUID) or self.budget.escrow.close(settle.id.int, settle.costs) is None:
            yield from self.plan(settle)

    def looking(self, identity: Identity) -> Plan[Snapshot]:
        """Plans what is left: by a look at the ledger, unless the last one is young."""
        seen = self._seen
        if seen is None or time.monotonic() >= self._look_at_s:
            seen = yield from self._look(identity)
        return Snapshot(seen.states, self._shifts(seen))

    def _look(self, identity: Identity) -> Plan[_Seen]:
        began_s, before = time.monotonic(), self._seen
        try:
            seen = yield from self._look_in_turn(identity)
        except Unavailable:
            if before is None or began_s - before.at_s > self._terms.ttl.total_seconds():
                raise
            # Calls go on while the lease lives; what was seen last is told until then.
            self._look_at_s = time.monotonic() + _REST_S
            return before
        if before is not None and _terms_of(before.states) != _terms_of(seen.states):
            yield from self._give_back()  # other limits are in force: what was taken under the old ones returns
        return seen

    def _look_in_turn(self, identity: Identity) -> Plan[_Seen]:
        """Looks while nobody takes, raises or returns a lease: what the ledger has and what is free belong together."""
        escrow, client, post_every_s = self.budget.escrow, self._ledger.client, self._terms.post_every.total_seconds()
        most_s = client.timeout_s if self._seen is None else min(_LOOK_S, client.timeout_s)
        deadline_s = time.monotonic() + most_s
        while (other := escrow.turn()) is not None:
            if self._seen is not None and time.monotonic() < self._look_at_s + post_every_s:
                return self._seen  # a little older, rather than wait for whoever is at the lease
            yield Join(other, deadline_s)
            if time.monotonic() >= deadline_s:
                raise Unavailable("quota lease: the balances were not read in time")
        try:
            at_s = time.monotonic()
            snapshot = yield from client.plan(self._ledger.look(identity), max(0.001, deadline_s - at_s))
            self._seen = seen = _Seen(at_s, snapshot.states, *escrow.standing())
            self._look_at_s = at_s + post_every_s
        finally:
            escrow.pass_turn()
        return seen

    def _shifts(self, seen: _Seen) -> dict[str, Decimal]:
        """By unit, what is left beyond what the ledger had: what was free here then, less what was taken here since."""
        _, taken = self.budget.escrow.standing()
        return {
            unit: subtract(add(seen.free.get(unit, ZERO), seen.taken.get(unit, ZERO)), amount)
            for unit, amount in taken.items()
        }

    def _give_back(self) -> Plan[None]:
        self.rests_until_s = time.monotonic() + _REST_S
        yield from self.budget.giving_back(self.budget.escrow)


def _none_is_concurrent(states: Iterable[LimitState]) -> bool:
    return not any(state.kind == "concurrency" and state.capacity is not None for state in states)


def _terms_of(states: Iterable[LimitState]) -> list[tuple[object, ...]]:
    return [(one.owner, one.limit_name, one.unit, one.kind, one.capacity, one.refill_per_s) for one in states]
