"""The coalescing client, for asyncio: what differs from threads, which is cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from quota.calls import Release, Reserve
from quota.client import AsyncClient
from quota.client.attempts import Done, Execute, Together
from quota.client.coalescing import Batches
from quota.errors import Unavailable, UnknownReservation, UnknownSubject
from quota.ids import uuid7
from tests.client.conftest import CAPACITY, PATIENCE_S, books, eventually, standing_in_the_way, waiting
from tests.client.proxy import Proxy
from tests.server import Connection


class Watched(AsyncClient):
    """A coalescing client that notes what it sends, and sends nothing while its gate is shut."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **{"timeout_s": 30, "coalesce": True, "batches_in_flight": 1, **settings})
        self.gate = asyncio.Event()
        self.gate.set()
        self.functions: list[str] = []

    async def _execute(self, step: Execute | Together) -> Done:
        for one in step.steps if isinstance(step, Together) else (step,):
            self.functions.append(one.statement.partition("quota.")[2].partition("(")[0])
        await self.gate.wait()
        return await super()._execute(step)

    @property
    def queued(self) -> int:
        """How many calls wait to be sent."""
        return sum(len(lane) for lane in self._coalescers.get(self._scope())._waiting.values())


@pytest.fixture
async def watched(ledger: str) -> AsyncIterator[Watched]:
    async with asyncio.timeout(PATIENCE_S), Watched(ledger) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Lets the other tasks run until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)


@asynccontextmanager
async def gathering(client: Watched, calls: int) -> AsyncIterator[None]:
    """What is called inside the block goes out together after it: so many calls wait behind one that does nothing."""
    client.gate.clear()
    before = len(client.functions)
    first = asyncio.create_task(client.release(uuid7()))
    await until(lambda: len(client.functions) > before)
    yield
    await until(lambda: client.queued == calls)
    client.gate.set()
    with pytest.raises(UnknownReservation):
        await first


async def blocked(observer: Connection) -> None:
    """Waits until a batch waits for a lock."""
    await asyncio.to_thread(eventually, lambda: bool(waiting(observer)))


async def settled_as(observer: Connection, left: Any) -> None:
    """Waits until the books say so."""
    await asyncio.to_thread(eventually, lambda: books(observer) == left)


async def test_calls_that_wait_go_out_together(watched: Watched, observer: Connection) -> None:
    async with gathering(watched, 20):
        calls = [asyncio.create_task(watched.reserve("user:1", {"usd": n})) for n in range(1, 21)]
    answers = await asyncio.gather(*calls)
    assert [answer.requested for answer in answers] == list(range(1, 21))
    # In the order they came: 1 to 9 are 45, and 5 is no longer to be had.
    assert [answer.granted for answer in answers] == [True] * 9 + [False] * 11
    assert watched.functions == ["release", "reserve_many"]
    assert watched.batches == Batches(2, 21, 20)
    settled = await asyncio.gather(*(watched.settle(one.reservation or "", {"usd": 1}) for one in answers[:9]))
    assert {one.state for one in settled} == {"settled"}
    assert books(observer) == (9, 0, 9)


async def test_an_error_reaches_only_its_own_caller(watched: Watched, observer: Connection) -> None:
    async with gathering(watched, 3):
        good, bad, also = (
            asyncio.create_task(watched.reserve(subject, {"usd": 1})) for subject in ("user:1", "user:9", "user:1")
        )
    with pytest.raises(UnknownSubject):
        await bad
    assert (await good).granted
    assert (await also).granted
    assert books(observer) == (0, 2, 2)


async def test_an_answer_lost_on_the_way_is_asked_for_again(proxy: Proxy, observer: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S), Watched(proxy.url) as client:
        await client.balance("user:1")
        proxy.lose_answers = 1
        answers = await asyncio.gather(*(client.reserve("user:1", {"usd": 1}) for _ in range(6)))
        assert all(answer.granted for answer in answers)
        assert answers[0].replayed
    assert books(observer) == (0, 6, 6)


async def test_cancelled_while_under_way(watched: Watched, ledger: str, observer: Connection) -> None:
    """The batch goes on for the others; the hold that was granted to nobody is released."""
    with standing_in_the_way(ledger):
        async with gathering(watched, 3):
            cancelled, given, other = (
                asyncio.create_task(watched.call(call))
                for call in (Reserve("user:1", {"usd": 2}), Reserve("user:1", {"usd": 4}, id=uuid7()),
                             Reserve("user:1", {"usd": 1}))
            )  # fmt: skip
        await blocked(observer)
        cancelled.cancel()
        given.cancel()
        done = await asyncio.gather(cancelled, given, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
    assert (await other).granted
    await settled_as(observer, (0, 1, 3))


async def test_a_replayed_hold_is_not_a_cancelled_callers_to_release(
    watched: Watched, ledger: str, observer: Connection
) -> None:
    held = await watched.reserve("user:1", {"usd": 2}, id=(known := uuid7()))
    # `also` makes no difference to the id; the lock is on the reservation that both are about.
    with ExitStack() as way:
        way.enter_context(standing_in_the_way(ledger))
        async with gathering(watched, 2):
            other = asyncio.create_task(watched.reserve("user:1", {"usd": 1}))
            again = asyncio.create_task(watched.reserve("user:1", {"usd": 2}, id=known))
        await blocked(observer)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
    assert (await other).granted
    assert (await watched.settle(held.reservation or "", {"usd": 1})).state == "settled"
    assert books(observer) == (1, 1, 2)


async def test_cancelled_while_waiting_sends_nothing(watched: Watched, observer: Connection) -> None:
    async with gathering(watched, 1):
        cancelled = asyncio.create_task(watched.reserve("user:1", {"usd": 2}))
        other = asyncio.create_task(watched.reserve("user:1", {"usd": 1}))
        await until(lambda: watched.queued == 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert (await other).granted
    assert watched.functions == ["release", "reserve"]
    assert books(observer) == (0, 1, 1)


async def test_what_closes_a_hold_goes_through_when_it_is_cancelled(watched: Watched, observer: Connection) -> None:
    one, two = [(await watched.reserve("user:1", {"usd": 2})).reservation or "" for _ in range(2)]
    async with gathering(watched, 2):
        closing = [asyncio.create_task(watched.settle(one, {"usd": 1})), asyncio.create_task(watched.release(two))]
        await until(lambda: watched.queued == 2)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
    await settled_as(observer, (1, 0, 2))


async def test_asking_again_after_a_cancellation_takes_the_hold_over(
    watched: Watched, ledger: str, observer: Connection
) -> None:
    with standing_in_the_way(ledger):
        impatient = asyncio.create_task(watched.reserve("user:1", {"usd": 2}, id=(known := uuid7())))
        await blocked(observer)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        again = asyncio.create_task(watched.reserve("user:1", {"usd": 2}, id=known))
        await until(lambda: watched.queued == 1)
    answer = await again
    assert (answer.granted, answer.replayed) == (True, True)
    assert (await watched.settle(known, {"usd": 1})).state == "settled"
    assert books(observer) == (1, 0, 1)


async def test_a_deadline_is_the_callers_own(watched: Watched, ledger: str, observer: Connection) -> None:
    with standing_in_the_way(ledger):
        async with gathering(watched, 2):
            patient = asyncio.create_task(watched.reserve("user:1", {"usd": 1}))
            hasty = asyncio.create_task(watched.call(Reserve("user:1", {"usd": 2}), timeout_s=0.5))
        with pytest.raises(Unavailable, match="no answer within 0.5 s: its batch is under way") as caught:
            await hasty
        assert caught.value.in_doubt
        assert not patient.done()
    assert (await patient).granted
    await settled_as(observer, (0, 1, 2))


async def test_holds_and_their_cancellation(watched: Watched, ledger: str, observer: Connection) -> None:
    async def work(cost: int) -> None:
        async with watched.hold("user:1", {"usd": cost}) as hold:
            hold.sending()
            await hold.settle({"usd": 1})

    await asyncio.gather(*(work(cost) for cost in range(1, 7)))
    with standing_in_the_way(ledger):
        task = asyncio.create_task(work(CAPACITY - 6))
        await blocked(observer)
        task.cancel()
        # Its release waits for the answer to its reserve.
        await until(lambda: watched.queued == 1)
        assert watched.functions[-1] == "reserve"
    with pytest.raises(asyncio.CancelledError):
        await task
    assert books(observer) == (6, 0, 7)


async def test_a_release_that_came_too_late_leaves_no_hold(ledger: str, observer: Connection) -> None:
    """A cancelled hold's own release runs out of time behind the stuck reserve. What is granted is released."""
    async with asyncio.timeout(PATIENCE_S), Watched(ledger) as client:
        with standing_in_the_way(ledger):
            async with gathering(client, 2):
                patient = asyncio.create_task(client.reserve("user:1", {"usd": 1}))
                entering = asyncio.create_task(client.hold("user:1", {"usd": 5}).__aenter__())
            await blocked(observer)
            client.timeout_s = 0.3
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            assert not patient.done()
        assert (await patient).granted
        await settled_as(observer, (0, 1, 2))


async def test_few_batches_are_under_way(ledger: str, observer: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S), Watched(ledger, batches_in_flight=2, batch_max=4) as client:
        with standing_in_the_way(ledger):
            calls = [asyncio.create_task(client.reserve("user:1", {"usd": 1})) for _ in range(30)]
            await until(lambda: client.queued >= 30 - 2 * 4)
            await asyncio.to_thread(eventually, lambda: len(waiting(observer)) == 2)
            assert len(client.functions) == 2
        assert all([(await call).granted for call in calls])
        assert client.batches.largest == 4


async def test_closing_answers_whoever_waits(watched: Watched, observer: Connection) -> None:
    watched.gate.clear()
    calls = [asyncio.create_task(watched.reserve("user:1", {"usd": 1})) for _ in range(5)]
    await until(lambda: len(watched.functions) == 1)
    closing = asyncio.create_task(watched.close())
    await asyncio.wait({closing}, timeout=0.2)
    assert not closing.done()
    watched.gate.set()
    await closing
    assert all([(await call).granted for call in calls])
    with pytest.raises(RuntimeError, match="closed"):
        await watched.call(Release(uuid7()))
    assert books(observer) == (0, 5, 5)


def test_every_loop_has_batches_of_its_own(ledger: str) -> None:
    client = AsyncClient(ledger, timeout_s=30, coalesce=True)

    async def three() -> Batches:
        try:
            await asyncio.gather(*(client.reserve("user:1", {"usd": 1}) for _ in range(3)))
            return client.batches
        finally:
            await client.close()
            client._closed = False

    assert asyncio.run(three()).requests == 3
    assert asyncio.run(three()).requests == 3
