"""Shared reads: few statements for many callers, and nobody is told what was so before it asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from quota import AsyncClient, Client
from quota.calls import LimitState
from quota.client.attempts import Join, Pause, Plan
from quota.metering.books import Snapshot
from quota.metering.reads import Reads


class World:
    """Something that changes, read by plans that are carried out by hand, step by step."""

    def __init__(self) -> None:
        self.value = 0
        self.reads = 0

    def ask(self) -> Plan[list[int]]:
        self.reads += 1
        seen = [self.value]
        yield Pause(0)
        return seen


def finish(plan: Any) -> Any:
    """Carries a plan out to its end, as far as it waits for nobody."""
    try:
        while True:
            step = next(plan)
            assert not isinstance(step, Join) or step.other.done(), "it waits for somebody"
    except StopIteration as stop:
        return stop.value


def test_who_comes_during_a_read_shares_the_next_one() -> None:
    world, reads = World(), Reads[list[int]]()
    first = reads.sharing("a", world.ask, 0)
    assert isinstance(next(first), Pause)  # it is under way and has seen 0
    world.value = 1
    late = [reads.sharing("a", world.ask, 0) for _ in range(5)]
    steps = [next(plan) for plan in late]
    assert all(isinstance(step, Join) for step in steps)
    other = reads.sharing("b", world.ask, 0)
    assert isinstance(next(other), Pause)  # another key waits for nobody
    assert finish(first) == [0]
    leader, *followers = late
    assert finish(leader) == [1]
    world.value = 2
    assert [finish(plan) for plan in followers] == [[1]] * 4
    assert world.reads == 3
    assert finish(reads.sharing("a", world.ask, 0)) == [2]


@pytest.mark.parametrize("end", [lambda plan: plan.throw(RuntimeError("no")), lambda plan: plan.close()])
def test_whoever_led_and_failed_fails_alone(end: Callable[[Any], Any]) -> None:
    world, reads = World(), Reads[list[int]]()
    first, leader, follower = (reads.sharing("a", world.ask, 0) for _ in range(3))
    for plan in (first, leader, follower):
        next(plan)
    with contextlib.suppress(RuntimeError):
        end(leader)
    assert finish(first) == [0]
    assert finish(follower) == [0]
    assert world.reads == 2
    assert finish(reads.sharing("a", world.ask, 0)) == [0]


def test_event_loops_and_threads_share_alike() -> None:
    world, reads = World(), Reads[list[int]]()
    lock, until_s = threading.Lock(), time.monotonic() + 60

    def ask() -> Plan[list[int]]:
        with lock:
            world.reads += 1
        yield Pause(0.001)
        return [world.value]

    blocking, loop_client = Client("postgresql://nowhere"), AsyncClient("postgresql://nowhere")
    found: list[list[int]] = []

    def in_thread() -> None:
        for _ in range(20):
            found.append(blocking.drive(reads.sharing("a", ask, until_s)))

    async def in_loop() -> None:
        async def one() -> None:
            found.append(await loop_client.drive(reads.sharing("a", ask, until_s)))

        await asyncio.gather(*(one() for _ in range(100)))

    threads = [threading.Thread(target=in_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(in_loop())
    for thread in threads:
        thread.join()
    assert found == [[0]] * 180
    assert world.reads < 180


def test_the_headers_of_one_look_are_written_once_for_each_unit() -> None:
    def state(unit: str) -> LimitState:
        return LimitState(
            owner="key:1", limit_name=f"all {unit}", unit=unit, money=False, kind="budget", capacity=Decimal(10),
            refill_per_s=None, period=None, window_s=None, spent=Decimal(1), reserved=Decimal(0), level=None,
            available=Decimal(9), window_start=None, window_end=None, resets_in_s=None, full_after_s=None,
        )  # fmt: skip

    look = Snapshot([state("cost"), state("tokens"), state("requests")])
    cost, tokens = (look.headers("key:1", unit, "draft-11") for unit in ("cost", "tokens"))
    assert dict(cost)["RateLimit"] == '"all cost";r=9, "all requests";r=9'
    assert dict(tokens)["RateLimit"] == '"all tokens";r=9, "all requests";r=9'
    assert look.headers("key:1", "cost", "draft-11") is cost
