"""reserve(wait=…): a fleet that waits in turn, in simulated time and in real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from quota.calls import Freeze, Release, Reservation, ReserveInTurn, SetLimit, Turn
from quota.client import AsyncClient, Client
from quota.client.attempts import Pause, Plan
from quota.client.retrying import in_turn
from quota.errors import InvalidArgument, Refused, Shortage
from quota.fleet import Fleet, Worker
from quota.ids import uuid7
from tests.client.conftest import PATIENCE_S
from tests.client.crowd import Crowd, as_told, in_turn_for
from tests.server import Connection
from tests.sql.kit import NOON, set_clock, value

CLIENTS, REFILL = 200, 10
# So long it takes to serve everybody once; nobody can expect to wait less when all come at the same time.
FAIR_S = CLIENTS / REFILL
# Without any waiting they would ask three times as often as there is room.
THINK_S = FAIR_S / 3
SLOT = {"concurrency": 1}


# -- a crowd, in simulated time -------------------------------------------------------------------------------------


def test_two_hundred_clients_use_the_refill_without_bursts_and_each_is_served(conn: Connection) -> None:
    crowd = Crowd(conn, capacity=2 * REFILL, refill_per_s=REFILL, think_s=THINK_S)
    crowd.add(CLIENTS, in_turn_for(timedelta(hours=1)))
    crowd.run(until_s=2 * FAIR_S)
    assert crowd.used(from_s=5) >= 0.95
    assert crowd.crush(from_s=0) <= 0.15 * CLIENTS
    assert len(crowd.asks) <= 12 * len(crowd.grants)
    assert all(crowd.waits.values()), "everybody was served"
    assert crowd.longest_wait() <= 1.5 * FAIR_S


def test_those_who_come_back_as_told_come_all_at_once(conn: Connection) -> None:
    crowd = Crowd(conn, capacity=2 * REFILL, refill_per_s=REFILL, think_s=THINK_S)
    crowd.add(CLIENTS, as_told)
    crowd.run(until_s=1)
    assert crowd.crush(from_s=0) >= CLIENTS / 2
    assert len(crowd.asks) > 50 * len(crowd.grants)


def test_the_queue_moves_as_fast_as_holds_return(conn: Connection) -> None:
    """Each call holds eight times what it settles at: by what is held, everybody would be told eight times as long."""
    crowd = Crowd(conn, capacity=10 * REFILL, refill_per_s=REFILL, held=8, call_s=1.0, think_s=THINK_S / 2)
    crowd.add(CLIENTS // 2, in_turn_for(timedelta(hours=1)))
    crowd.run(until_s=1.75 * FAIR_S)
    assert crowd.used(from_s=15) >= 0.95
    assert crowd.longest_wait() <= FAIR_S


def test_batch_work_saturates_what_it_may_and_interactive_work_does_not_wait(conn: Connection) -> None:
    crowd = Crowd(conn, capacity=4 * REFILL, refill_per_s=REFILL, think_s=1.0)
    batch = crowd.add(CLIENTS // 4, in_turn_for(timedelta(hours=1), headroom="0.2"))
    crowd.run(until_s=10)
    interactive = crowd.add(REFILL // 2, in_turn_for(timedelta(hours=1)))
    crowd.run(until_s=20)
    assert crowd.longest_wait(interactive) == 0
    assert crowd.longest_wait(batch) > 5, "batch work waits for batch work"
    assert crowd.used(from_s=5) >= 0.95


# -- one plan -------------------------------------------------------------------------------------------------------


def answers(*turns: Turn) -> tuple[Callable[[ReserveInTurn], Plan[Turn]], list[float]]:
    """What gives these answers one after the other, and the patience that each was asked with."""
    asked: list[float] = []
    left = iter(turns)

    def ask(call: ReserveInTurn) -> Plan[Turn]:
        asked.append(call.patience.total_seconds())
        yield from ()
        return next(left)

    return ask, asked


def refused(look_after_s: Any, retry_after_s: Any = 5) -> Turn:
    return Turn(
        granted=False, reservation=None, state=None, reason="rate", ahead=3, look_after_s=look_after_s,
        retry_after_s=retry_after_s,
    )  # fmt: skip


def played(patience_s: float, *turns: Turn) -> tuple[Turn, list[float], list[float]]:
    """Plays a plan; returns its answer, its pauses and the patience of each ask. Jitter takes the middle."""
    now = 100.0
    ask, asked = answers(*turns)
    call = ReserveInTurn("key:1", {"cost": 1}, uuid7(), timedelta(seconds=patience_s))
    plan = in_turn(ask, call, now=lambda: now, uniform=lambda a, b: (a + b) / 2)
    pauses: list[float] = []
    try:
        step = next(plan)
        while True:
            assert isinstance(step, Pause)
            pauses.append(step.seconds)
            now += step.seconds
            step = plan.send(None)
    except StopIteration as stop:
        return stop.value, pauses, asked


GRANTED = Turn(granted=True, reservation=uuid7(), state="held")


def test_a_grant_ends_it() -> None:
    assert played(30, GRANTED) == (GRANTED, [], [30])


def test_looks_are_spread_but_for_the_last_second() -> None:
    _, pauses, asked = played(30, refused(8), refused(4), refused("0.25"), GRANTED)
    assert pauses == [3, 1.5, 0.25]
    assert asked == [30, 27, 25.5, 25.25]


def test_the_last_ask_is_when_the_time_is_over() -> None:
    with pytest.raises(Shortage, match=r"no room in 6 s, 3 still ahead; last answer: refused, rate; retry after 5 s"):
        played(6, refused(10), refused(10), refused(None))


def test_a_refusal_that_waiting_cannot_help_is_a_value() -> None:
    hopeless = refused(None, None)
    assert played(30, hopeless) == (hopeless, [], [30])
    assert played(30, refused(1), hopeless)[0] is hopeless
    impatient = refused(None)
    assert played(1, impatient) == (impatient, [], [1])


@pytest.mark.parametrize("wait", [-1, 86_401, float("nan"), float("inf")])
def test_a_wait_that_cannot_be(wait: float) -> None:
    with Client("postgresql://nowhere.invalid/x") as client, pytest.raises(InvalidArgument, match=f"wait is {wait}"):
        client.reserve("key:1", {"usd": 1}, wait=wait)


# -- real time ------------------------------------------------------------------------------------------------------


@pytest.fixture
def slot(client: Client) -> UUID:
    """`user:1` has one slot, and this hold has it."""
    client.call(SetLimit("user:1", "slots", "concurrency", "concurrency", 1))
    busy = client.reserve("user:1", SLOT).reservation
    assert busy is not None
    return busy


def until_waiting(observer: Connection, how_many: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while value(observer, "SELECT count(*) FROM quota_internal.waiters") != how_many:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.02)


def test_a_thread_waits_until_there_is_room(client: Client, slot: UUID, observer: Connection) -> None:
    got: list[Reservation] = []
    thread = threading.Thread(target=lambda: got.append(client.reserve("user:1", SLOT, wait=PATIENCE_S)))
    thread.start()
    until_waiting(observer, 1)
    client.release(slot)
    thread.join(PATIENCE_S)
    assert [answer.granted for answer in got] == [True]
    until_waiting(observer, 0)


def test_a_shortage_is_told_from_a_refusal(client: Client, slot: UUID, observer: Connection) -> None:
    with pytest.raises(Shortage) as caught:
        client.reserve("user:1", SLOT, wait=1.5)
    assert isinstance(caught.value, Refused)
    assert (caught.value.refusal.reason, caught.value.ahead) == ("concurrency", 0)
    until_waiting(observer, 0)
    assert client.reserve("user:1", SLOT, wait=0).reason == "concurrency"
    assert client.reserve("user:1", {"concurrency": 2}, wait=60).reason == "too_large"
    client.call(Freeze("user:1", "runaway"))
    assert client.reserve("user:1", SLOT, wait=60).reason == "frozen"


def test_a_hold_waits_too(client: Client, slot: UUID) -> None:
    with pytest.raises(Shortage), client.hold("user:1", SLOT, wait=0.1):
        pass
    client.release(slot)
    with client.hold("user:1", SLOT, wait=60) as hold:
        assert hold.reservation.granted


async def test_a_task_waits(ledger: str, client: Client, slot: UUID, observer: Connection) -> None:
    async with AsyncClient(ledger, timeout_s=30) as mine:
        with pytest.raises(Shortage):
            await mine.reserve("user:1", SLOT, wait=0.1)
        client.release(slot)
        assert (await mine.reserve("user:1", SLOT, wait=60)).granted


def wait_for_a_slot(worker: Worker) -> bool:
    worker.tell("waits")
    return worker.client.reserve("user:1", SLOT, wait=PATIENCE_S).granted


def test_processes_stand_in_one_queue(ledger: str, client: Client, slot: UUID, observer: Connection) -> None:
    set_clock(observer, NOON)  # no place lapses, however slow this machine is
    with Fleet(1, ledger) as fleet:
        fleet.start(wait_for_a_slot, [()])
        news = fleet.news()
        next(news)
        until_waiting(observer, 1)
        name = uuid7()
        with client._borrowed(time.monotonic() + PATIENCE_S) as connection:
            call = ReserveInTurn("user:1", SLOT, name)

            def ask() -> Turn:
                return call.answer(connection.fetch(call.statement, call.parameters()))

            turn = ask()
            assert (turn.granted, turn.ahead) == (False, 1)
            client.call(Release(slot))
            assert not ask().granted, "whoever is first, goes first"
        assert next(news).value is True, "the process got it that was there first"


def test_no_wait_is_a_plain_reserve(client: Client, slot: UUID, observer: Connection) -> None:
    assert client.reserve("user:1", SLOT).reason == "concurrency"
    assert value(observer, "SELECT count(*) FROM quota_internal.waiters") == 0
