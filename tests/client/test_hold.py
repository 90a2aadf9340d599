"""A hold around a piece of work: how it is left decides how it is closed."""

# ruff: noqa: PT012 - what happens inside a block is the point here

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from quota.client import AsyncClient, Client, Hold
from quota.errors import IdConflict, Misuse, Refused, Unavailable, UnitNotHeld
from quota.ids import uuid7
from tests.client.conftest import CAPACITY, standing_in_the_way
from tests.client.proxy import Proxy
from tests.server import Connection


class WorkFailed(Exception):  # noqa: N818
    """The work's own failure."""


def state(observer: Connection) -> Any:
    """Returns (state, spent, reserved) of the only reservation and the account of `user:1`."""
    row = observer.execute(
        """SELECT r.state, b.spent, b.reserved
           FROM quota_internal.reservations r, quota.balance('user:1') b"""
    ).fetchone()
    assert row is not None
    return row


# -- the ways out ----------------------------------------------------------------------------------------------------


def leave(hold: Hold) -> None:
    """Does nothing."""


def settle(hold: Hold) -> None:
    assert hold.settle({"usd": 3}).state == "settled"


def settle_in_parts(hold: Hold) -> None:
    assert hold.settle({"usd": 1}, final=False).state == "held"
    hold.settle({"usd": 3}, outcome="error")


def release(hold: Hold) -> None:
    assert hold.release(details={"why": "cached"}).state == "released"


def settle_a_part(hold: Hold) -> None:
    hold.settle({"usd": 3}, final=False)


def adjust_and_extend(hold: Hold) -> None:
    assert hold.adjust({"usd": 3}).reserved == 3
    assert hold.extend(timedelta(hours=1)) - datetime.now(UTC) > timedelta(minutes=59)


def fail(hold: Hold) -> None:
    raise WorkFailed


def fail_after_sending(hold: Hold) -> None:
    hold.sending()
    raise WorkFailed


def interrupt(hold: Hold) -> None:
    raise KeyboardInterrupt


def interrupt_after_sending(hold: Hold) -> None:
    hold.sending()
    raise KeyboardInterrupt


def fail_after_settling(hold: Hold) -> None:
    hold.sending()
    hold.settle({"usd": 3})
    raise WorkFailed


def fail_after_settling_a_part(hold: Hold) -> None:
    hold.settle({"usd": 3}, final=False)
    raise WorkFailed


@pytest.mark.parametrize(
    ("work", "left"),
    [
        (leave, ("settled", 5, 0)),
        (settle, ("settled", 3, 0)),
        (settle_in_parts, ("settled", 3, 0)),
        (settle_a_part, ("settled", 5, 0)),
        (adjust_and_extend, ("settled", 3, 0)),
        (release, ("released", 0, 0)),
        (fail, ("released", 0, 0)),
        (fail_after_sending, ("settled", 5, 0)),
        (interrupt, ("released", 0, 0)),
        (interrupt_after_sending, ("settled", 5, 0)),
        (fail_after_settling, ("settled", 3, 0)),
        (fail_after_settling_a_part, ("released", 3, 0)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_how_a_hold_is_left(client: Client, observer: Connection, work: Callable[[Hold], None], left: Any) -> None:
    notes: list[str] = []
    try:
        with client.hold("user:1", {"usd": 5}) as hold:
            assert hold.reservation.granted
            assert hold.id == hold.reservation.reservation
            assert state(observer) == ("held", 0, 5)
            work(hold)
    except (WorkFailed, KeyboardInterrupt) as error:
        notes = getattr(error, "__notes__", [])
    assert notes == []
    assert state(observer) == left


def test_an_unknown_outcome_may_be_corrected_once(client: Client, observer: Connection) -> None:
    with pytest.raises(WorkFailed), client.hold("user:1", {"usd": 5}) as hold:
        fail_after_sending(hold)
    assert state(observer) == ("settled", 5, 0)
    client.settle(hold.id, {"usd": 2})
    assert state(observer) == ("settled", 2, 0)


def test_a_refused_hold_raises_before_the_work(client: Client, observer: Connection) -> None:
    with pytest.raises(Refused) as caught, client.hold("user:1", {"usd": CAPACITY + 1}):
        pytest.fail("the work must not begin")
    assert caught.value.refusal.reason == "too_large"
    assert observer.execute("SELECT count(*) FROM quota_internal.reservations").fetchone() == (0,)


def test_a_hold_takes_what_reserve_takes(client: Client, observer: Connection) -> None:
    arguments: dict[str, Any] = {"also": ["user:2"], "ttl": timedelta(hours=2), "headroom": Decimal("0.1")}
    with client.hold("user:1", {"usd": 5}, id=(known := uuid7()), details={"run": 7}, **arguments) as hold:
        assert hold.id == known
        assert [standing.subject for standing in hold.reservation.remaining] == ["user:1", "user:2"]
    with pytest.raises(IdConflict), client.hold("user:2", {"usd": 5}, id=known):
        pytest.fail("the work must not begin")


def test_a_hold_is_entered_once(client: Client) -> None:
    hold = client.hold("user:1", {"usd": 5})
    with pytest.raises(RuntimeError, match="not been entered"):
        _ = hold.reservation
    with hold:
        pass
    with pytest.raises(RuntimeError, match="once"), hold:
        pass


def test_misuse_inside_leaves_the_way_out_open(client: Client, observer: Connection) -> None:
    with pytest.raises(UnitNotHeld), client.hold("user:1", {"usd": 5}) as hold:
        hold.sending()
        hold.settle({"requests": 1})
    # The settle was refused and changed nothing; the call may have left, so the whole hold is booked.
    assert state(observer) == ("settled", 5, 0)


# -- when closing fails ----------------------------------------------------------------------------------------------


def test_closing_never_hides_the_works_own_failure(
    ledger: str, proxy: Proxy, observer: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Client(proxy.url, timeout_s=30) as client,
        caplog.at_level(logging.WARNING, "quota.client"),
        pytest.raises(WorkFailed) as caught,
        client.hold("user:1", {"usd": 5}) as hold,
    ):
        client.timeout_s = 0.5
        proxy.frozen.set()
        raise WorkFailed
    [note] = caught.value.__notes__
    assert f"hold {hold.id} could not be closed" in note
    assert note in caplog.text
    assert state(observer) == ("held", 0, 5)


def test_closing_that_fails_after_good_work_is_told(ledger: str, proxy: Proxy) -> None:
    with (
        Client(proxy.url, timeout_s=30) as client,
        pytest.raises(Unavailable) as caught,
        client.hold("user:1", {"usd": 5}),
    ):
        client.timeout_s = 0.5
        proxy.frozen.set()
    assert caught.value.in_doubt


def test_somebody_else_closed_it(client: Client, ledger: str) -> None:
    with pytest.raises(WorkFailed) as caught, client.hold("user:1", {"usd": 5}) as hold:
        client.settle(hold.id, {"usd": 1})
        raise WorkFailed
    assert "already_settled" in caught.value.__notes__[0]
    with pytest.raises(Misuse), client.hold("user:1", {"usd": 5}) as hold:
        client.release(hold.id)


def test_a_settle_in_doubt_is_repeated_and_not_replaced(ledger: str, proxy: Proxy, observer: Connection) -> None:
    """The settle took effect, its answer was lost: leaving must not ask for anything else."""
    with (
        Client(proxy.url, timeout_s=30, retries=0) as client,
        pytest.raises(Unavailable) as caught,
        client.hold("user:1", {"usd": 5}) as hold,
    ):
        hold.sending()
        proxy.lose_answers = 1
        hold.settle({"usd": 2})
    assert not hasattr(caught.value, "__notes__")
    assert state(observer) == ("settled", 2, 0)


def test_a_settle_that_never_arrived_is_made_up_for(ledger: str, proxy: Proxy, observer: Connection) -> None:
    """The true cost is known: leaving books that, not the whole hold."""
    with (
        Client(proxy.url, timeout_s=30) as client,
        pytest.raises(WorkFailed),
        client.hold("user:1", {"usd": 5}) as hold,
    ):
        hold.sending()
        client.timeout_s = 0.5
        proxy.frozen.set()
        with pytest.raises(Unavailable):
            hold.settle({"usd": 2})
        assert state(observer) == ("held", 0, 5)
        client.timeout_s = 30
        proxy.frozen.clear()
        raise WorkFailed
    assert state(observer) == ("settled", 2, 0)


# -- asynchronous ----------------------------------------------------------------------------------------------------


async def test_an_asynchronous_hold(ledger: str, observer: Connection) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        async with client.hold("user:1", {"usd": 5}) as hold:
            assert (await hold.adjust({"usd": 6})).reserved == 6
            await hold.extend(timedelta(minutes=20))
            await hold.settle({"usd": "2.5"})
        assert state(observer) == ("settled", Decimal("2.5"), 0)
        with pytest.raises(Refused):
            async with client.hold("user:1", {"usd": CAPACITY + 1}):
                pytest.fail("the work must not begin")


@pytest.mark.parametrize(("sent", "left"), [(False, ("released", 0, 0)), (True, ("settled", 5, 0))])
async def test_cancellation_is_an_exception_like_any_other(
    ledger: str, observer: Connection, sent: bool, left: Any
) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        entered = asyncio.Event()

        async def work() -> None:
            async with client.hold("user:1", {"usd": 5}) as hold:
                if sent:
                    hold.sending()
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert state(observer) == left


async def test_a_second_cancellation_does_not_leave_the_hold_open(ledger: str, observer: Connection) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        entered = asyncio.Event()

        async def work() -> None:
            async with client.hold("user:1", {"usd": 5}):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await entered.wait()
        # What releases the hold has to wait, so that the second cancellation finds it at work.
        with standing_in_the_way(ledger):
            task.cancel()
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0.1)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert state(observer) == ("released", 0, 0)


async def test_a_timeout_around_a_hold(ledger: str, observer: Connection) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), client.hold("user:1", {"usd": 5}) as hold:
                hold.sending()
                await asyncio.sleep(60)
    assert state(observer) == ("settled", 5, 0)


async def test_cancelled_while_reserving(ledger: str, observer: Connection) -> None:
    """The work will never be done: nothing may stay held for it until it expires."""
    async with AsyncClient(ledger, timeout_s=30) as client:

        async def work() -> None:
            async with client.hold("user:1", {"usd": 5}):
                pytest.fail("the work must not begin")

        with standing_in_the_way(ledger):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # The connection is whole: what was under way was cancelled on the server too.
        assert (await client.reserve("user:1", {"usd": CAPACITY})).granted
    assert observer.execute("SELECT count(*) FROM quota_internal.reservations").fetchone() == (1,)
