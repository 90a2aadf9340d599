"""A crowd of clients in simulated time: real plans against a real ledger, a clock that jumps from event to event.

The ledger's clock is the test clock; a client that pauses is woken up when the clock has come to it. Nothing sleeps,
nothing runs at the same time, and chance comes from a seed: a run is the same every time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row

from quota.calls import Call, CreateSubject, Reservation, Reserve, ReserveInTurn, SetLimit, Settle
from quota.client import run
from quota.client.attempts import Execute, Pause, Plan, Result, attempts
from quota.client.retrying import in_turn
from tests.server import Connection
from tests.sql.kit import set_clock

POOL = "pool:one"
START = datetime(2026, 5, 4, 12, tzinfo=UTC)

Life = Generator[Pause | Execute, Any, None]
Ask = Callable[["Crowd", Any], Plan[Reservation]]


@dataclass
class Crowd:
    """Clients of one bucket.

    Arguments:
        connection: the ledger, with the test clock.
        capacity, refill_per_s: of the bucket, whose unit is `cost`.
        held, settled: what a call holds, and what it settles at after `call_s` seconds.
        think_s: how long a client pauses between its calls, on average.
        seed: of everything that is left to chance.

    Fields:
        now_s: the simulated time, in seconds from the start.
        asks: when the ledger was asked for a hold once more.
        grants: when a hold was granted.
        waits: by client, how long each of its calls waited for its hold.
        waiting: by client, since when it waits for one.
    """

    connection: Connection
    capacity: int
    refill_per_s: int
    held: int = 1
    settled: int = 1
    call_s: float = 0.0
    think_s: float = 0.0
    seed: int = 1
    now_s: float = 0.0
    asks: list[float] = field(default_factory=list)
    grants: list[float] = field(default_factory=list)
    waits: dict[int, list[float]] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._order = itertools.count()
        self._due: list[tuple[float, float, int, Life]] = []
        run(self.connection, CreateSubject(POOL))
        run(self.connection, SetLimit(POOL, "rate", "cost", "bucket", self.capacity, self.refill_per_s))

    def add(self, clients: int, ask: Ask) -> range:
        """Lets so many clients live, all of them from now on; returns their numbers."""
        numbers = range(len(self.waits), len(self.waits) + clients)
        for number in numbers:
            self.waits[number] = []
            self._wake(self.now_s, self._life(number, ask))
        return numbers

    def run(self, until_s: float) -> None:
        """Lets time pass."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, _, life = heapq.heappop(self._due)
            set_clock(self.connection, START + timedelta(seconds=self.now_s))
            self._step(life)
        self.now_s = until_s

    def _wake(self, at_s: float, life: Life) -> None:
        # Who is woken at the same instant comes in any order, as on many machines.
        heapq.heappush(self._due, (at_s, self.random.random(), next(self._order), life))

    def _step(self, life: Life) -> None:
        result: Result | None = None
        while True:
            try:
                step = life.send(result)
            except StopIteration:
                return
            if isinstance(step, Pause):
                self._wake(self.now_s + step.seconds, life)
                return
            with self.connection.cursor(row_factory=dict_row) as cursor:
                rows = cursor.execute(step.statement.encode(), step.parameters, binary=True).fetchall()
            result = Result(list(rows), [])

    def _life(self, number: int, ask: Ask) -> Life:
        while True:
            self.waiting[number] = self.now_s
            answer: Reservation = yield from ask(self, number)  # type: ignore[misc]
            assert answer.granted, answer
            self.waits[number].append(self.now_s - self.waiting.pop(number))
            self.grants.append(self.now_s)
            yield Pause(self.call_s)
            yield from self._one(Settle(answer.reservation or "", {"cost": self.settled}))  # type: ignore[misc]
            yield Pause(self.think_s * self.random.uniform(0.5, 1.5))

    def _one(self, call: Call[Any]) -> Plan[Any]:
        return attempts(call, timeout_s=3600, retries=0)

    def used(self, from_s: float) -> Decimal:
        """The share of the refill since then that grants have settled."""
        granted = sum(at >= from_s for at in self.grants)
        return Decimal(granted * self.settled) / (self.refill_per_s * Decimal(self.now_s - from_s))

    def crush(self, from_s: float, slot_s: float = 0.1) -> int:
        """The most repeated asks within a tenth of a second."""
        slots = [int(at / slot_s) for at in self.asks if at >= from_s]
        return max((slots.count(slot) for slot in set(slots)), default=0)

    def longest_wait(self, clients: Iterable[int] | None = None) -> float:
        """The longest that any of these has waited, or waits; None: of all."""
        meant = self.waits if clients is None else set(clients)
        over = [wait for number in meant for wait in self.waits[number]]
        return max(*over, *(self.now_s - since for number, since in self.waiting.items() if number in meant), 0)


def in_turn_for(patience: timedelta, headroom: str = "0") -> Ask:
    """The client's own way: `reserve(wait=…)`."""

    def ask(crowd: Crowd, number: int) -> Plan[Reservation]:
        name = UUID(int=crowd.random.getrandbits(128))
        first = ReserveInTurn(POOL, {"cost": crowd.held}, name, patience, headroom=headroom)
        began = crowd.now_s

        def one(call: ReserveInTurn) -> Plan[Any]:
            if crowd.now_s > began:
                crowd.asks.append(crowd.now_s)
            return crowd._one(call)

        return (yield from in_turn(one, first, now=lambda: crowd.now_s, uniform=crowd.random.uniform))

    return ask


def as_told(crowd: Crowd, number: int) -> Plan[Reservation]:
    """The naive way: after a refusal to come back exactly when it says."""
    while True:
        answer: Reservation = yield from crowd._one(Reserve(POOL, {"cost": crowd.held}))
        if answer.granted:
            return answer
        yield Pause(float(answer.retry_after_s or 0))
        crowd.asks.append(crowd.now_s)
