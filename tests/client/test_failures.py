"""The database away, slow, silent, failing over: what a client makes of it, and that nothing is booked twice."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from quota.calls import Balance, CreateTenant, Record, Reserve, Settle
from quota.client import AsyncClient, Client
from quota.client.attempts import Execute, NoConnection, Pause, Result, TooLate, attempts
from quota.errors import Unavailable, UnknownReservation, UnknownSubject
from quota.ids import uuid7
from tests.client.conftest import CAPACITY, PATIENCE_S, books, eventually, standing_in_the_way, waiting
from tests.client.proxy import Proxy
from tests.server import Connection, connect


@pytest.fixture
def black_hole() -> Iterator[str]:
    """URL of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"postgresql://quota@127.0.0.1:{listener.getsockname()[1]}/quota?sslmode=disable"


# -- away, or silent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["closed_port", "black_hole"])
def test_away_is_unavailable_within_the_deadline(where: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(where)
    began_s = time.monotonic()
    with Client(url, timeout_s=Decimal("0.5")) as client, pytest.raises(Unavailable) as caught:
        client.reserve("user:1", {"usd": 1})
    assert time.monotonic() - began_s < PATIENCE_S
    assert not caught.value.in_doubt
    assert "quota.reserve: no connection within 0.5 s" in str(caught.value)
    if where == "closed_port":
        assert "refused" in str(caught.value)


@pytest.mark.parametrize("where", ["closed_port", "black_hole"])
async def test_away_is_unavailable_within_the_deadline_asynchronously(
    where: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(where)
    async with asyncio.timeout(PATIENCE_S), AsyncClient(url, timeout_s=Decimal("0.5")) as client:
        with pytest.raises(Unavailable, match="no connection") as caught:
            await client.reserve("user:1", {"usd": 1})
    assert not caught.value.in_doubt


def test_many_callers_wait_for_a_black_hole_side_by_side(black_hole: str) -> None:
    began_s = time.monotonic()
    with Client(black_hole, timeout_s=0.5) as client, ThreadPoolExecutor(32) as threads:

        def ask(_: int) -> bool:
            with pytest.raises(Unavailable):
                client.balance("user:1")
            return True

        assert all(threads.map(ask, range(32)))
    assert time.monotonic() - began_s < PATIENCE_S


def test_a_server_that_falls_silent_in_the_middle(proxy: Proxy) -> None:
    with Client(proxy.url, timeout_s=30) as client:
        assert client.balance("user:1")
        proxy.frozen.set()
        client.timeout_s = 0.5
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer within 0\.5 s") as caught:
            client.reserve("user:1", {"usd": 1})
        assert caught.value.in_doubt
        assert time.monotonic() - began_s < PATIENCE_S
        # Other connections are opened in its place; once the server speaks again, so does the client.
        proxy.frozen.clear()
        client.timeout_s = 30
        assert client.balance("user:1")


async def test_a_server_that_falls_silent_in_the_middle_asynchronously(proxy: Proxy) -> None:
    async with asyncio.timeout(PATIENCE_S), AsyncClient(proxy.url, timeout_s=30) as client:
        assert await client.balance("user:1")
        proxy.frozen.set()
        client.timeout_s = 0.5
        with pytest.raises(Unavailable, match="no answer") as caught:
            await client.reserve("user:1", {"usd": 1})
        assert caught.value.in_doubt
        proxy.frozen.clear()
        client.timeout_s = 30
        assert await client.balance("user:1")


def test_a_statement_that_is_too_late_is_cancelled_on_the_server(
    client: Client, ledger: str, observer: Connection
) -> None:
    with standing_in_the_way(ledger):
        with pytest.raises(Unavailable) as caught:
            client.call(Reserve("user:1", {"usd": 1}), timeout_s=0.5)
        assert caught.value.in_doubt
        eventually(lambda: not waiting(observer))
    assert client.reserve("user:1", {"usd": CAPACITY}).granted
    assert books(observer) == (0, CAPACITY, 1)


async def test_a_statement_that_is_too_late_is_cancelled_on_the_server_asynchronously(
    ledger: str, observer: Connection
) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        with standing_in_the_way(ledger):
            with pytest.raises(Unavailable):
                await client.call(Reserve("user:1", {"usd": 1}), timeout_s=0.5)
            await asyncio.to_thread(eventually, lambda: not waiting(observer))
        assert (await client.reserve("user:1", {"usd": CAPACITY})).granted
    assert books(observer) == (0, CAPACITY, 1)


def test_a_pool_that_is_busy(ledger: str, observer: Connection) -> None:
    with Client(ledger, pool_max=1, timeout_s=30) as client, ThreadPoolExecutor(1) as threads:
        with standing_in_the_way(ledger):
            slow = threads.submit(client.reserve, "user:1", {"usd": 1})
            eventually(lambda: bool(waiting(observer)))
            with pytest.raises(Unavailable, match="all 1 of the pool are busy") as caught:
                client.call(Balance("user:1"), timeout_s=0.3)
            assert not caught.value.in_doubt
        assert slow.result().granted


# -- connections lost ------------------------------------------------------------------------------------------------


def end_idle_sessions(client: Client, ledger: str, observer: Connection) -> None:
    """Four holds by four sessions at once; then the server ends all of them."""
    with ThreadPoolExecutor(4) as threads, standing_in_the_way(ledger):
        several = [threads.submit(client.reserve, "user:1", {"usd": 1}) for _ in range(4)]
        eventually(lambda: len(waiting(observer)) == 4)
    assert all(one.result().granted for one in several)
    observer.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'quota'"
    )


def test_sessions_ended_while_idle_cost_no_attempt(ledger: str, observer: Connection) -> None:
    with Client(ledger, retries=0, timeout_s=30) as client:
        end_idle_sessions(client, ledger, observer)
        assert client.reserve("user:1", {"usd": 1}).granted
    assert books(observer) == (0, 5, 5)


@pytest.mark.parametrize("retries", [0, 1])
def test_sessions_ended_while_idle_are_found_by_reads_too(ledger: str, observer: Connection, retries: int) -> None:
    """A read looks before it takes a connection, or finds out by itself and looks then: one attempt is enough."""
    with Client(ledger, retries=retries, timeout_s=30) as client:
        end_idle_sessions(client, ledger, observer)
        assert [row.reserved for row in client.balance("user:1")] == [4]


@pytest.mark.parametrize("kind", ["reserve", "record"])
def test_a_session_killed_in_the_middle_is_repeated_with_the_same_id(
    client: Client, ledger: str, observer: Connection, kind: str
) -> None:
    call = {"reserve": Reserve("user:1", {"usd": 5}, id=uuid7()), "record": Record("user:1", {"usd": 5}, id=uuid7())}
    with ThreadPoolExecutor(1) as threads:
        with standing_in_the_way(ledger):
            answer = threads.submit(client.call, call[kind])
            eventually(lambda: bool(waiting(observer)))
            [pid] = waiting(observer)
            observer.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
            # Repeated on a session of its own, which finds the same lock.
            eventually(lambda: bool(waiting(observer)))
            assert waiting(observer) != [pid]
        answer.result()
    assert books(observer)[:2] == ((0, 5) if kind == "reserve" else (5, 0))


@pytest.mark.parametrize(
    ("act", "left"),
    [
        (lambda client, held: client.reserve("user:1", {"usd": 5}), (0, 7, 2)),
        (lambda client, held: client.record("user:1", {"usd": 5}), (5, 2, 2)),
        (lambda client, held: client.settle(held, {"usd": 1}), (1, 0, 1)),
        (lambda client, held: client.settle(held, {"usd": 1}, final=False), (1, 1, 1)),
        (lambda client, held: client.release(held), (0, 0, 1)),
        (lambda client, held: client.adjust(held, {"usd": 4}), (0, 4, 1)),
        (lambda client, held: client.extend(held, timedelta(hours=1)), (0, 2, 1)),
    ],
    ids=["reserve", "record", "settle", "settle a part", "release", "adjust", "extend"],
)
def test_an_answer_lost_on_the_way_is_asked_for_again(
    proxy: Proxy, observer: Connection, act: Callable[[Client, Any], Any], left: Any
) -> None:
    """The server has done it and said so; nobody heard. It is done once."""
    with Client(proxy.url, timeout_s=30) as client:
        held = client.reserve("user:1", {"usd": 2}).reservation
        proxy.lose_answers = 1
        answer = act(client, held)
    assert proxy.lose_answers == 0
    assert getattr(answer, "replayed", True) is True or isinstance(answer, datetime) or answer.granted
    assert books(observer) == left


async def test_an_answer_lost_on_the_way_is_asked_for_again_asynchronously(proxy: Proxy, observer: Connection) -> None:
    async with AsyncClient(proxy.url, timeout_s=30) as client:
        await client.balance("user:1")
        proxy.lose_answers = 1
        answer = await client.reserve("user:1", {"usd": 5})
        assert (answer.granted, answer.replayed) == (True, True)
    assert books(observer) == (0, 5, 1)


def test_retries_are_bounded(proxy: Proxy, observer: Connection) -> None:
    with Client(proxy.url, timeout_s=30, retries=2) as client:
        client.balance("user:1")
        proxy.lose_answers = 1000  # of new connections, too
        client.timeout_s = 3
        with pytest.raises(Unavailable) as caught:
            client.reserve("user:1", {"usd": 5})
        assert caught.value.in_doubt
    assert books(observer) == (0, 5, 1)


def test_what_cannot_be_repeated_is_not(proxy: Proxy, observer: Connection) -> None:
    with Client(proxy.url, timeout_s=30) as client:
        client.balance("user:1")
        proxy.lose_answers = 1
        with pytest.raises(Unavailable, match=r"quota\.create_tenant: the outcome is unknown") as caught:
            client.call(CreateTenant("acme"))
        assert caught.value.in_doubt
    assert observer.execute("SELECT count(*) FROM quota_internal.tenants WHERE name = 'acme'").fetchone() == (1,)


# -- rolled back, or in doubt by the server's own word ---------------------------------------------------------------


def sabotage(observer: Connection, times: int, body: str) -> None:
    """Makes the first `times` inserts of reservations do what `body` says. A sequence counts: no rollback undoes it."""
    observer.execute("CREATE SEQUENCE public.sabotage")
    observer.execute(
        f"""CREATE FUNCTION public.sabotage() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('public.sabotage') <= {times} THEN {body}; END IF;
            RETURN NEW;
        END $$""".encode()
    )
    observer.execute(
        """CREATE TRIGGER sabotage BEFORE INSERT ON quota_internal.reservations
           FOR EACH ROW EXECUTE FUNCTION public.sabotage()"""
    )


def attempted(observer: Connection) -> int:
    row = observer.execute("SELECT last_value FROM public.sabotage").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_serialization_failures_and_deadlocks_are_repeated(client: Client, observer: Connection, sqlstate: str) -> None:
    sabotage(observer, 2, f"RAISE EXCEPTION 'once more' USING ERRCODE = '{sqlstate}'")
    answer = client.reserve("user:1", {"usd": 5})
    assert (answer.granted, answer.replayed) == (True, False)
    assert attempted(observer) == 3
    assert books(observer) == (0, 5, 1)


def test_repeated_in_vain(client: Client, ledger: str, observer: Connection) -> None:
    sabotage(observer, 1000, "RAISE EXCEPTION 'once more' USING ERRCODE = '40001'")
    with pytest.raises(Unavailable, match="given up after 4 attempts: once more") as caught:
        client.reserve("user:1", {"usd": 5})
    # The server said every time that nothing had happened.
    assert not caught.value.in_doubt
    assert attempted(observer) == 4
    assert books(observer) == (0, 0, 0)


def test_a_real_deadlock(client: Client, ledger: str, observer: Connection) -> None:
    """Somebody who locks in another order than the ledger does: PostgreSQL ends one of both, here the client's."""
    lock = "SELECT FROM quota_internal.accounts WHERE subject = %s FOR UPDATE"
    with connect(ledger) as other, ThreadPoolExecutor(2) as threads:
        other.execute("SET deadlock_timeout = '1h'")  # it never looks, so the client's is found to be in the way
        with other.transaction():
            other.execute(lock, ("user:2",))
            answer = threads.submit(client.reserve, "user:1", {"usd": 5}, also=["user:2"])
            eventually(lambda: bool(waiting(observer)))
            other.execute(lock, ("user:1",))
        assert answer.result(PATIENCE_S).granted
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    eventually(lambda: observer.execute(deadlocks).fetchone() == (1,))
    assert books(observer) == (0, 5, 1)
    assert books(observer, "user:2") == (0, 5, 1)


def test_a_warning_on_a_write_is_in_doubt(client: Client, ledger: str, observer: Connection) -> None:
    """A commit whose wait for a standby was cancelled is acknowledged, with a warning."""
    sabotage(observer, 1, "RAISE WARNING 'canceling wait for synchronous replication due to user request'")
    answer = client.reserve("user:1", {"usd": 5})
    assert (answer.granted, answer.replayed) == (True, True)
    assert books(observer) == (0, 5, 1)


async def test_a_warning_on_a_write_is_in_doubt_asynchronously(ledger: str, observer: Connection) -> None:
    sabotage(observer, 1, "RAISE WARNING 'canceling wait for synchronous replication due to user request'")
    async with AsyncClient(ledger, timeout_s=30) as client:
        answer = await client.reserve("user:1", {"usd": 5})
    assert (answer.granted, answer.replayed) == (True, True)
    assert books(observer) == (0, 5, 1)


def test_a_notice_is_not(client: Client, ledger: str, observer: Connection) -> None:
    sabotage(observer, 1, "RAISE NOTICE 'by the way'")
    assert client.reserve("user:1", {"usd": 5}).replayed is False


# -- fail open -------------------------------------------------------------------------------------------------------


def test_failing_open_is_explicit_counted_and_logged(closed_port: str, caplog: pytest.LogCaptureFixture) -> None:
    with Client(closed_port, timeout_s=0.3, fail_open=True) as client:
        answer = client.reserve("user:1", {"usd": 5}, id=(known := uuid7()))
        assert (answer.granted, answer.state, answer.reservation) == (True, "fail_open", known)
        assert (answer.expires_at, answer.remaining) == (None, ())
        assert client.bypasses == 1
        assert f"fail open: {known} of user:1 passed unchecked" in caplog.text
        # Closing it does nothing, at once: nothing is known of it in the ledger.
        assert client.adjust(known, {"usd": 6}).state == "fail_open"
        assert client.extend(known, timedelta(hours=1)) > datetime.now(UTC)
        assert client.settle(str(known), {"usd": 1}).state == "fail_open"
        assert client.settle(known, {"usd": 1}).state == "fail_open"
        assert client.release(known).state == "fail_open"
        # Nothing else is open.
        with pytest.raises(Unavailable):
            client.settle(uuid7())
        with pytest.raises(Unavailable):
            client.record("user:1", {"usd": 1})
        assert client.bypasses == 1


def test_a_hold_that_failed_open(closed_port: str) -> None:
    with Client(closed_port, timeout_s=0.3, fail_open=True) as client:
        with client.hold("user:1", {"usd": 5}) as hold:
            hold.sending()
            assert hold.reservation.state == "fail_open"
            assert hold.settle({"usd": 1}).state == "fail_open"
        with client.hold("user:1", {"usd": 5}):
            pass
        assert client.bypasses == 2


async def test_a_hold_that_failed_open_asynchronously(closed_port: str) -> None:
    async with AsyncClient(closed_port, timeout_s=0.3, fail_open=True) as client:
        async with client.hold("user:1", {"usd": 5}) as hold:
            assert hold.reservation.state == "fail_open"
        assert client.bypasses == 1


def test_failing_open_bypasses_no_refusal_and_no_misuse(ledger: str) -> None:
    with Client(ledger, timeout_s=30, fail_open=True) as client:
        assert client.reserve("user:1", {"usd": CAPACITY + 1}).refused
        with pytest.raises(UnknownSubject):
            client.reserve("user:9", {"usd": 1})
        with pytest.raises(UnknownReservation):
            client.settle(uuid7())
        assert client.bypasses == 0


def test_closing_fails_closed_by_default(closed_port: str) -> None:
    with Client(closed_port, timeout_s=0.3) as client:
        with pytest.raises(Unavailable), client.hold("user:1", {"usd": 5}):
            pytest.fail("the work must not begin")
        assert client.bypasses == 0


# -- interrupted -----------------------------------------------------------------------------------------------------


def test_interrupted_while_reserving(client: Client, ledger: str, observer: Connection) -> None:
    """Ctrl-C while the hold is being asked for: the server is told, and nothing stays held."""
    with standing_in_the_way(ledger):

        def interrupt() -> None:
            eventually(lambda: bool(waiting(observer)))
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt), client.hold("user:1", {"usd": 5}):
            pytest.fail("the work must not begin")
        interrupter.join()
        assert not waiting(observer)
    assert client.reserve("user:1", {"usd": CAPACITY}).granted
    assert books(observer) == (0, CAPACITY, 1)


async def test_cancelled_calls_give_their_connections_back(ledger: str, observer: Connection) -> None:
    async with AsyncClient(ledger, timeout_s=30, pool_max=2) as client:
        for _ in range(3):
            with standing_in_the_way(ledger):
                tasks = [asyncio.create_task(client.reserve("user:1", {"usd": 1})) for _ in range(6)]
                await asyncio.sleep(0.3)
                for task in tasks:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(one, asyncio.CancelledError) for one in done)
        answers = await asyncio.gather(*(client.balance("user:1") for _ in range(8)))
        assert len(answers) == 8
    assert books(observer) == (0, 0, 0)


# -- the plan itself, without a database -----------------------------------------------------------------------------

ROWS: list[Any] = [{"state": "settled", "late": False, "replayed": False, "overage": "{}"}]
LOST = psycopg.OperationalError("server closed the connection unexpectedly")


def carried_out(outcomes: list[Any], *, retries: int = 3, timeout_s: float = 60) -> tuple[Any, list[Any]]:
    """Drives a settle through these outcomes of its statements; returns its answer (or error) and its steps."""
    plan = attempts(Settle(uuid7()), timeout_s=timeout_s, retries=retries)
    steps: list[Any] = [next(plan)]
    try:
        while True:
            if isinstance(steps[-1], Pause):
                steps.append(plan.send(None))
                continue
            outcome = outcomes.pop(0)
            steps.append(plan.throw(outcome) if isinstance(outcome, BaseException) else plan.send(outcome))
    except StopIteration as stop:
        return stop.value, steps
    except Exception as error:
        return error, steps


def test_a_plan_that_works_is_one_step() -> None:
    answer, [step] = carried_out([Result(ROWS, [])])
    assert answer.state == "settled"
    assert isinstance(step, Execute)
    assert step.deadline_s <= time.monotonic() + 60


def test_a_plan_repeats_the_very_same_statement_after_a_pause_that_grows() -> None:
    answer, steps = carried_out([LOST, psycopg.errors.DeadlockDetected("x"), Result(ROWS, ["doubt"]), Result(ROWS, [])])
    assert answer.state == "settled"
    assert [type(step) for step in steps] == [Execute, Pause] * 3 + [Execute]
    assert len({id(step) for step in steps[::2]}) == 1
    for attempt, pause in enumerate(steps[1::2]):
        assert 0 <= pause.seconds <= 0.05 * 2**attempt


@pytest.mark.parametrize(
    ("outcomes", "in_doubt"),
    [
        ([NoConnection("refused")], False),
        ([LOST, NoConnection("refused")], True),
        ([TooLate("late")], True),
        ([LOST, LOST], True),
        ([LOST, psycopg.errors.SerializationFailure("x")], True),
        ([psycopg.errors.SerializationFailure("x")] * 2, False),
        ([psycopg.errors.TooManyConnections("x")], False),
        ([psycopg.errors.QueryCanceled("x")], False),
        ([Result(ROWS, ["doubt"]), Result(ROWS, ["doubt"])], True),
    ],
)
def test_a_plan_that_ends_unavailable_knows_whether_it_is_in_doubt(outcomes: list[Any], in_doubt: bool) -> None:
    error, _ = carried_out(list(outcomes), retries=1)
    assert isinstance(error, Unavailable)
    assert error.in_doubt is in_doubt


def test_a_plan_without_time_left_does_not_pause() -> None:
    error, steps = carried_out([LOST], timeout_s=1e-9)
    assert isinstance(error, Unavailable)
    assert len(steps) == 1


def test_a_fault_of_the_server_is_shown_as_it_is() -> None:
    fault = psycopg.errors.InternalError_("cache lookup failed")
    assert carried_out([fault])[0] is fault


def test_repeating_is_logged_without_fuss(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quota.client"), Client(proxy.url, timeout_s=30) as client:
        client.balance("user:1")
        proxy.lose_answers = 1
        client.reserve("user:1", {"usd": 1})
    assert "quota.reserve: repeated (attempt 1 failed" in caplog.text
