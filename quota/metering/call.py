"""One request from its arrival to its settlement, as plans: no I/O, so that WSGI and ASGI decide nothing by themselves.

    answer = yield from call.opening()          # authenticate, estimate, reserve; an answer ends it here
    headers = yield from call.responding(...)   # the application has answered: settle, and tell what is left
    call.counted(chunk)                         # as the answer flows
    yield from call.closing(...)                # always, in the end

| what happened | outcome | settled at |
|---|---|---|
| answered, with a cost | `answered` | that cost |
| answered, without one | `answered`, and `cost_header_missing` | 1, logged and counted |
| an answer of 500 and above | `failed` | its cost if it tells one, else the route's `failure_charge` |
| the application raised before it answered | `exception` | `failure_charge` |
| it ran out of time, as somebody noted | `timeout` | `failure_charge`; the estimate with `on_timeout = hold` |
| the answer broke off | `cut` | its cost if it told one, else `failure_charge` |
| the caller left | `gone` | likewise |

Where the cost comes with the headers of a whole answer, it is settled before they go out, so that the balances in them
are those after it. Of an answer that flows, the difference to the estimate returns then; the rest, and the slot, when
it ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, Literal

from quota.calls import Adjust, EnsureSubject, Extend, Release, Reservation, Reserve, Settle
from quota.client.attempts import Plan
from quota.client.connections import PerProcess
from quota.client.core import Core
from quota.config import ConfigError
from quota.costs.rows import Request
from quota.errors import QuotaError, Unavailable, UnknownSubject
from quota.http.cost_header import COST, FACTS, read_cost, read_facts
from quota.http.problems import Problem
from quota.ids import uuid7
from quota.lease import AsyncLeasedBudget, LeasedBudget
from quota.metering import answers
from quota.metering.answers import FAIL_OPEN, Answer, ResponseHeaders
from quota.metering.books import Books, Ledger, Snapshot
from quota.metering.ceiling import Ceiling
from quota.metering.identity import Identity, Keys
from quota.metering.leasing import Leased, Leases
from quota.metering.policy import FailOpen, Policy, Route

__all__ = ["Call", "Meter", "Outcome"]

logger = logging.getLogger("quota.metering")

Outcome = Literal["answered", "failed", "timeout", "cut", "gone", "exception"]

# What the ledger calls them.
_LEDGER_OUTCOMES = {
    "answered": "ok",
    "failed": "error",
    "timeout": "timeout",
    "cut": "error",
    "gone": "cancelled",
    "exception": "error",
}
# R3: what an answer without a readable cost is settled at.
_MISSING_COST = 1
_COST_END = 10**18


class Meter:
    """Meters requests by a policy.

    Arguments:
        client: the ledger, a `Client` or an `AsyncClient`, which also carries the plans out. What passes while the
            ledger is away is said by routes; a client that is set to fail open is refused.
        policy: what is metered how.
    """

    def __init__(self, client: Core, policy: Policy) -> None:
        if client.fail_open:
            raise ConfigError("fail_open: the client lets everything pass; set fail_open on the routes that may")
        self.client = client
        self.policy = policy
        self.authenticate = policy.authenticate or Keys(client)
        self.events: Counter[tuple[str, str]] = Counter()
        self.ledger = ledger = Ledger(client)
        lease = policy.lease
        self.leases = None if lease is None else PerProcess(lambda: Leases(ledger, lease))
        self._lock = threading.Lock()
        self._ceilings: dict[str, PerProcess[Ceiling]] = {}

    def call(self, request: Request) -> Call:
        """Returns the metering of one request."""
        return Call(self, request)

    def dropped(self) -> frozenset[str]:
        """Returns the headers, in lower case, that never reach the application from a caller."""
        own = (COST, FACTS, self.policy.subject_header or "", *self.policy.drop_headers)
        return frozenset(name.lower() for name in own if name)

    def count(self, event: str, route: Route, why: str) -> None:
        """Counts an event of a route (`events`), and logs the 1st, 2nd, 4th, 8th … of them."""
        with self._lock:
            self.events[event, route.name] += 1
            number = self.events[event, route.name]
        if number & (number - 1) == 0:
            logger.warning("%s at %s, %d so far: %s", event, route.name, number, why)

    def admits(self, route: Route, terms: FailOpen, cost: int) -> bool:
        """Whether a route lets a cost pass unchecked, as far as this process knows."""
        with self._lock:
            ceiling = self._ceilings.setdefault(route.name, PerProcess(lambda: Ceiling(terms)))
        return ceiling.get().take(cost)

    def leased(self, route: Route, identity: Identity, estimate: int) -> Leased | None:
        """Returns the books of a call that is decided out of a lease; None: the ledger decides it."""
        lease = self.policy.lease
        if lease is None or self.leases is None or estimate > lease.size or not self.policy.leases(route):
            return None
        return self.leases.get().of(identity)

    def close(self) -> list[AsyncLeasedBudget | LeasedBudget]:
        """Decides nothing out of leases any more; returns the budgets that are to be closed."""
        return [] if self.leases is None else self.leases.get().close()


class Call:
    """One request. Made by `Meter.call`; the middleware puts it where the application finds it (`quota.call`).

    Fields:
        request, route, identity: what is asked, how it is metered, and who asks (None: it is not metered).
        id: of its reservation.
        estimate: what was held, in the route's unit.
    """

    def __init__(self, meter: Meter, request: Request) -> None:
        self._meter = meter
        self.request = request
        self.route: Route | None = meter.policy.route_of(request.method, request.path)
        self.identity: Identity | None = None
        self.id = uuid7()
        self.estimate = 0
        self.facts: dict[str, Any] = {}
        self._tenant = meter.client.tenant
        self._books: Books = meter.ledger
        self._began_s = time.monotonic()
        self._extended_s = self._began_s
        self._held = False  # granted
        self._in_doubt = False  # perhaps granted
        self._passed = False  # let through while the ledger is away
        self._status = 0
        self._bytes = 0
        self._reported: int | None = None
        self._noted_cost: int | None = None
        self._noted_outcome: Outcome | None = None
        self._final: Settle | None = None
        self._settled = False
        self._closed = False
        self._booked = 0

    @property
    def is_open(self) -> bool:
        """True while there is, or may be, a hold to be closed."""
        return not self._closed and (self._held or self._in_doubt)

    # -- what the application may say ----------------------------------------------------------------------------------

    def note(self, *, outcome: Outcome | None = None, cost: int | None = None, **facts: Any) -> None:
        """Tells what only the application, or whoever forwards to it, knows. The latest word counts.

        Arguments:
            outcome: `timeout`, `failed`, … instead of what the answer looks like.
            cost: what the answer costs, for one that begins before anybody knows: it goes before the header.
            facts: for the reservation's details: `rows`, `node_calls`, `rows_read`, `database_ms`, …

        After the settlement it changes nothing. Errors: `ValueError` for what cannot be meant.
        """
        if outcome is not None and outcome not in _LEDGER_OUTCOMES:
            raise ValueError(f'outcome "{outcome}"; one of {", ".join(_LEDGER_OUTCOMES)}')
        if cost is not None and (type(cost) is not int or not 0 <= cost < _COST_END):
            raise ValueError(f"cost {cost!r}; a whole number, at least 0")
        for name, value in facts.items():
            # They go into the reservation with its settlement, which must not fail for them.
            if not (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
                raise ValueError(f"{name} {value!r}; facts are finite numbers")
        self._noted_outcome = outcome or self._noted_outcome
        self._noted_cost = self._noted_cost if cost is None else cost
        self.facts.update(facts)

    # -- before the application ----------------------------------------------------------------------------------------

    def opening(self) -> Plan[Answer | None]:
        """Plans what comes before the application. Result: what to answer in its place; None: it may go on."""
        try:
            if any("websocket" in offered.lower() for offered in self.request.headers.get("upgrade", ())):
                raise answers.no_websockets()  # some servers leave the handshake to the application
            if self.request.path == self._meter.policy.limits_path:
                return (yield from self._own_limits())
            return (yield from self._admitting())
        except Problem as problem:
            return answers.of_problem(problem, self._told())
        except QuotaError as error:
            return answers.of_problem(answers.ledger_problem(error), self._told())

    def _admitting(self) -> Plan[Answer | None]:
        route = self.route
        # A browser asks beforehand, without credentials, what it may send.
        if self.request.method == "OPTIONS" and (route is None or "OPTIONS" not in route.methods):
            self.route = None
            return None
        if route is None:
            raise Problem(404, "no_route", "Nothing is served here.")
        if not route.metered:
            self.route = None
            return None
        identity = yield from self._authenticating(while_away=route.fail_open is not None)
        for bound in route.bounds:
            bound(self.request)
        self.estimate = max(1, route.estimate(self.request))
        try:
            answer = yield from self._reserving(route, identity)
        except Unavailable as error:
            self._in_doubt = error.in_doubt
            self._let_through(route, error)
            return None
        except QuotaError:
            self._in_doubt = False
            raise
        if answer.refused:
            return (yield from self._refusal(answer, identity))
        self._held = True
        return None

    def _authenticating(self, *, while_away: bool) -> Plan[Identity]:
        found = self._meter.authenticate(self.request.headers, while_away=while_away)
        self.identity = found if isinstance(found, Identity) else (yield from found)
        self._tenant = self.identity.tenant or self._meter.client.tenant
        return self.identity

    def _reserving(self, route: Route, identity: Identity) -> Plan[Reservation]:
        answer = yield from self._asking(route, identity)
        # Nobody holds more than the bucket ever has: that much is held, and the rest settled.
        most = _bucket_capacity(answer, route.unit) if answer.reason == "too_large" else None
        if most is not None and 1 <= most < self.estimate:
            self.estimate = most
            answer = yield from self._asking(route, identity)
        return answer

    def _asking(self, route: Route, identity: Identity) -> Plan[Reservation]:
        self._in_doubt = True
        leased = self._meter.leased(route, identity, self.estimate)
        if leased is not None:
            self._books = leased
            granted = yield from leased.reserving(self.estimate, route.ttl, self.id)
            if granted is not None and granted.reservation is not None:
                self.id, self._in_doubt = granted.reservation, False
                return granted
            self._books = self._meter.ledger
        reserve = Reserve(
            identity.subject,
            {route.unit: self.estimate},
            ttl=route.ttl,
            id=self.id,
            headroom=route.headroom,
            details={"route": route.name, "estimate": self.estimate},
            tenant=self._tenant,
        )
        client = self._meter.client
        try:
            answer = yield from client.plan(reserve, id_is_ours=True)
        except UnknownSubject:
            if not identity.first_contact:
                raise
            for subject, parent in ((identity.parent, None), (identity.subject, identity.parent)):
                if subject is not None:
                    yield from client.plan(EnsureSubject(subject, parent, self._tenant))
            answer = yield from client.plan(reserve, id_is_ours=True)
        self._in_doubt = False
        return answer

    def _refusal(self, refusal: Reservation, identity: Identity) -> Plan[Answer]:
        meter = self._meter
        try:
            states = (meter.ledger.terms(identity) or (yield from meter.ledger.looking(identity))).states
        except Unavailable:
            states = []  # it is refused all the same; the terms are left out
        problem, headers = answers.refused(refusal, states, identity.subject, meter.policy.headers)
        return answers.of_problem(problem, self._told(headers))

    def _let_through(self, route: Route, error: Unavailable) -> None:
        """Lets a request pass while the ledger is away, as far as its route says so. Errors: `error`."""
        meter, terms = self._meter, route.fail_open
        if terms is None or not meter.admits(route, terms, self.estimate):
            meter.count("fail_closed", route, error.message)
            raise error
        meter.count("fail_open", route, error.message)
        self._passed = True

    def _own_limits(self) -> Plan[Answer]:
        """A caller's own limits, without spending."""
        method = self.request.method
        if method not in ("GET", "HEAD"):
            allow = {"Allow": "GET, HEAD, OPTIONS"}
            if method == "OPTIONS":
                return Answer(204, [*allow.items(), *self._told()], b"")
            raise Problem(405, "method_not_allowed", "Limits are read: GET or HEAD.", headers=allow)
        self.route = self.route or self._meter.policy.default
        identity = yield from self._authenticating(while_away=False)
        snapshot = yield from self._meter.ledger.looking(identity)
        headers = self._told(self._balances(snapshot, identity))
        return answers.of_limits(identity.subject, snapshot.states, headers)

    # -- the application has answered ----------------------------------------------------------------------------------

    def responding(self, status: int, headers: Sequence[tuple[str, str]]) -> Plan[ResponseHeaders]:
        """Plans what happens when the head of an answer is known, before it goes out.

        Arguments: `status`; `headers`, the application's.
        Result: the headers for the caller. What the application reports is read and taken out.
        """
        self._status = status
        values = _by_name(headers)
        self._reported = read_cost(values.get(COST, ()))
        self.facts = {**read_facts(values.get(FACTS, ())), **self.facts}
        hidden = frozenset() if self._meter.policy.show_cost else frozenset({COST, FACTS})
        kept = [(name, value) for name, value in headers if name.lower() not in hidden]
        if self.route is None or self.identity is None:
            return kept
        if self._passed:
            return self._told([(FAIL_OPEN, "?1")], kept)
        length = values.get("content-length", ())
        whole = bool(length) or self.request.method == "HEAD" or status in (204, 304)
        if length and self.request.method != "HEAD" and length[0].isdecimal():
            self._bytes = int(length[0])
        try:
            snapshot: Snapshot | None = None
            if whole:
                snapshot = yield from self._settling("answered", self.identity)
            elif self._reported is not None:
                yield from self._returning()
            if snapshot is None:
                snapshot = yield from self._books.looking(self.identity)
        except QuotaError as error:
            # The work is done and its answer goes out; closing tries once more.
            logger.warning("reservation %s: its balances are not told: %s", self.id, error)
            return kept
        return self._told(self._balances(snapshot, self.identity), kept)

    def counted(self, chunk: bytes) -> bool:
        """Counts what flows to the caller; True when the hold should be prolonged now: drive `extending`."""
        if self._settled or not self._held or self.route is None:
            return False
        self._bytes += len(chunk)
        return time.monotonic() - self._extended_s > self.route.ttl.total_seconds() / 2

    def extending(self) -> Plan[None]:
        """Plans a longer life of a hold whose answer still flows."""
        self._extended_s = time.monotonic()
        if self.route is None:
            return
        try:
            yield from self._books.plan(Extend(self.id, self.route.ttl, self._tenant))
        except QuotaError as error:
            logger.warning("reservation %s was not extended: %s", self.id, error)

    def closing(self, outcome: Outcome) -> Plan[None]:
        """Plans the end, whatever it was; a second one does nothing.

        Arguments: `outcome`, what it looks like from outside: what was noted goes before it.
        """
        if not self.is_open:
            return
        self._closed = True
        try:
            if self._held or self._passed:
                yield from self._settling(outcome)
            else:
                yield from self._books.plan(Release(self.id, tenant=self._tenant))
        except QuotaError as error:
            # In doubt means that there may be no hold at all.
            level = logging.WARNING if self._held else logging.INFO
            logger.log(level, "reservation %s was not closed, it returns when its time has passed: %s", self.id, error)

    # -- settling ------------------------------------------------------------------------------------------------------

    def _settling(self, outcome: Outcome, teller: Identity | None = None) -> Plan[Snapshot | None]:
        """Plans the settlement. `teller`: who is to be told what is left then, if that comes along with it."""
        if self._settled or self.route is None:
            return None
        # What was sent once is what is sent again: a first attempt may have taken effect.
        if self._final is None:
            self._final = self._settlement(self.route, outcome)
        snapshot = None
        if teller is None:
            yield from self._books.plan(self._final)
        else:
            snapshot = yield from self._books.settling(self._final, teller)
        self._settled, self._held = True, False
        return snapshot

    def _settlement(self, route: Route, outcome: Outcome) -> Settle:
        if outcome == "answered" and (self._status >= 500 or self._status == 0):
            outcome = "failed"
        outcome = self._noted_outcome or outcome
        missing = False
        cost = self._known_cost()
        if outcome == "timeout" and route.on_timeout == "hold":
            cost = self.estimate
        elif cost is None:
            missing = outcome == "answered" and 200 <= self._status < 300
            cost = _MISSING_COST if missing else route.failure_charge
            if missing:
                self._meter.count("cost_header_missing", route, f"a {self._status} told no cost that can be read")
        cost = self._charged(route, cost)
        details: dict[str, Any] = {}
        if self._books.keeps_details:
            details = {
                **self.facts,
                "route": route.name,
                "estimate": self.estimate,
                "cost": cost,
                "status": self._status or None,
                "latency_ms": round((time.monotonic() - self._began_s) * 1000),
                "response_bytes": self._bytes,
                "outcome": outcome,
                "cost_header_missing": missing,
            }
        return Settle(
            self.id,
            {route.unit: cost},
            outcome=_LEDGER_OUTCOMES[outcome],
            details=details,
            tenant=self._tenant,
        )

    def _known_cost(self) -> int | None:
        return self._reported if self._noted_cost is None else self._noted_cost

    def _charged(self, route: Route, cost: int) -> int:
        """What is booked of a cost: the policy's least and most, and never less than is booked already."""
        cost = max(cost, route.minimum_charge)
        if route.overrun == "cap":
            cost = min(cost, self.estimate)
        return max(cost, self._booked)

    def _returning(self) -> Plan[None]:
        """An answer flows, and its cost is known: what it does not need returns, what it exceeds the hold by is booked.

        The rest stays held, the slot with it, until the answer has ended.
        """
        route, cost = self.route, self._known_cost()
        if route is None or cost is None:
            return
        cost = self._charged(route, cost)
        if cost <= self.estimate:
            yield from self._books.plan(Adjust(self.id, {route.unit: cost}, self._tenant))
        else:
            self._booked = cost
            yield from self._books.plan(Settle(self.id, {route.unit: cost}, final=False, tenant=self._tenant))

    # -- headers -------------------------------------------------------------------------------------------------------

    def _balances(self, snapshot: Snapshot, identity: Identity) -> ResponseHeaders:
        unit = self.route.unit if self.route else "cost"
        return snapshot.headers(identity.subject, unit, self._meter.policy.headers)

    def _told(self, headers: ResponseHeaders | None = None, kept: ResponseHeaders | None = None) -> ResponseHeaders:
        return answers.told(headers or [], kept or [], self._meter.policy.headers)


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value)
    return found


def _bucket_capacity(refusal: Reservation, unit: str) -> int | None:
    """The least capacity of the buckets that a refused request is counted in; None without one."""
    capacities = [
        int(Decimal(item.capacity))
        for item in refusal.remaining
        if item.kind == "bucket" and item.unit == unit and item.capacity is not None
    ]
    return min(capacities, default=None)
