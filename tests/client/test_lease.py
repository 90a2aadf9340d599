"""Leased budgets against the real database: grown, shrunk, ended by windows and clocks, lost answers and forks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from quota.calls import CreateSubject, Freeze, Reservation, Reserve, SetLimit, Unfreeze
from quota.client import AsyncClient, Client, run
from quota.errors import InvalidAmount, InvalidCosts, Refused, Unavailable, UnknownReservation, UnknownUnit
from quota.ids import uuid7
from quota.lease import AsyncLeasedBudget, LeasedBudget
from quota.lease.escrow import Escrow
from tests.client.conftest import standing_in_the_way
from tests.client.proxy import Proxy
from tests.server import Connection
from tests.sql.kit import NOON
from tests.test_lease import Clock

HOUR = timedelta(hours=1)
# The background sleeps: the test looks after the leases itself.
QUIET: dict[str, Any] = {"post_every": HOUR, "idle": HOUR, "ttl": timedelta(hours=12)}


@contextmanager
def leased(client: Client, size: Any = 10, **settings: Any) -> Iterator[LeasedBudget]:
    with LeasedBudget(client, "user:1", {"usd": size}, **{**QUIET, **settings}) as budget:
        yield budget


def tend(budget: LeasedBudget) -> None:
    budget.drive(budget.tending(budget.escrow))


def spend(budget: LeasedBudget, amount: Any, used: Any | None = None) -> None:
    answer = budget.reserve({"usd": amount}).raise_if_refused()
    assert answer.reservation is not None
    budget.settle(answer.reservation, {"usd": amount if used is None else used})


def holds(observer: Connection) -> list[tuple[Any, Any]]:
    asked = """SELECT (held ->> 'usd')::numeric, coalesce(booked ->> 'usd', '0')::numeric FROM quota.holds
        ORDER BY created_at"""
    return [(held, booked) for held, booked in observer.execute(asked).fetchall()]


def spent(observer: Connection, subject: str = "user:1") -> Any:
    row = observer.execute("SELECT spent FROM quota.balance(%s) WHERE limit_name = 'cap'", (subject,)).fetchone()
    assert row is not None
    return row[0]


def told(answer: Reservation, *fields: str) -> tuple[Any, ...]:
    return tuple(getattr(answer, field) for field in fields)


def set_clock(observer: Connection, at: str) -> None:
    observer.execute("UPDATE quota_test.clock SET at = %s", (at,))


# -- taking, growing, returning ---------------------------------------------------------------------------------------


def test_one_hold_for_many_calls_and_exact_books(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        for _ in range(8):
            spend(budget, 1, "0.25")
        assert holds(observer) == [(10, 0)]
        assert budget.decisions == (8, 0)
        tend(budget)
        assert holds(observer) == [(10, 2)]
        assert spent(observer) == 2
    assert holds(observer) == []
    assert spent(observer) == 2
    states = observer.execute("SELECT state, booked FROM quota.reservations").fetchall()
    assert states == [("settled", {"usd": Decimal(2)})]


def test_nothing_is_leased_before_it_is_needed(client: Client, observer: Connection) -> None:
    with leased(client):
        assert holds(observer) == []


def test_it_grows_until_the_database_refuses_and_not_a_cent_further(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        granted = sum(budget.reserve({"usd": "0.75"}).granted for _ in range(80))
        assert granted == 66
        refusal = budget.reserve({"usd": "0.75"})
        assert told(refusal, "reason", "limit_name", "capacity") == ("held", "cap", 50)
        assert told(refusal, "reservation", "state", "requested") == (None, None, Decimal("0.75"))
        assert refusal.retry_after_s == 1
        assert refusal.violations[0].available == Decimal(0)
        with pytest.raises(Refused):
            refusal.raise_if_refused()
        assert budget.reserve({"usd": "0.5"}).granted, "what fits still fits"
        assert not budget.reserve({"usd": "0.01"}).granted
        assert holds(observer) == [(50, 0)]


def test_threads_share_the_last_cent(client: Client, observer: Connection) -> None:
    won: list[int] = []

    def go(budget: LeasedBudget) -> None:
        for _ in range(20):
            answer = budget.reserve({"usd": "0.5"})
            if answer.reservation is not None:
                budget.settle(answer.reservation)
                won.append(1)

    with leased(client, 7) as budget:
        threads = [threading.Thread(target=go, args=(budget,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(won) == 100
    assert spent(observer) == 50


def test_a_lease_that_does_not_fit_is_a_refusal_or_the_part_that_fits(client: Client, observer: Connection) -> None:
    client.reserve("user:1", {"usd": 44})
    with leased(client) as budget:
        refusal = budget.reserve({"usd": 1})
        assert told(refusal, "reason", "requested", "reserved") == ("held", 10, 44)
    with leased(client, at_least={"usd": 7}) as budget:
        assert not budget.reserve({"usd": 1}).granted
    with leased(client, at_least={"usd": 2}) as budget:
        assert budget.reserve({"usd": 1}).granted
        assert holds(observer) == [(44, 0), (6, 0)]
        refusal = budget.reserve({"usd": "5.5"})
        assert told(refusal, "reason", "requested") == ("held", Decimal("5.5"))
    with leased(client, at_least={"usd": 1}) as budget:
        refusal = budget.reserve({"usd": "6.5"})
        assert told(refusal, "reason", "requested") == ("held", Decimal("6.5"))


def test_headroom_is_left_untouched(client: Client, observer: Connection) -> None:
    with leased(client, 30, at_least={"usd": 1}, headroom=Decimal("0.5")) as budget:
        assert sum(budget.reserve({"usd": 1}).granted for _ in range(30)) == 25
        assert holds(observer) == [(25, 0)]


def test_what_is_idle_returns(client: Client, observer: Connection) -> None:
    clock = Clock()
    with leased(client, clock=clock, idle=timedelta(seconds=10)) as budget:
        kept = budget.reserve({"usd": 3})
        clock.s += 10
        tend(budget)
        assert holds(observer) == [(10, 0)]
        clock.s += 10
        tend(budget)
        assert holds(observer) == [(3, 0)], "only what is open stays"
        spend(budget, 5)
        assert holds(observer) == [(18, 0)], "and it grows again"
        assert kept.reservation is not None
        budget.release(kept.reservation)
        for _ in range(2):
            clock.s += 10
            tend(budget)
        assert holds(observer) == [], "idle altogether: it is gone"
        assert spent(observer) == 5
        spend(budget, 1)
    assert spent(observer) == 6


def test_the_background_posts_and_returns_by_itself(client: Client, observer: Connection) -> None:
    soon = timedelta(seconds=0.05)
    with leased(client, post_every=soon, idle=soon) as budget:
        spend(budget, 1)
        while holds(observer):
            threading.Event().wait(0.02)
        assert spent(observer) == 1
        while budget.escrow.keeper is not None:
            threading.Event().wait(0.02)
        spend(budget, 1)
        assert budget.escrow.keeper is not None


def test_an_overage_is_held_after_the_fact_or_booked_above_the_cap(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        spend(budget, 4, 13)
        tend(budget)
        assert holds(observer) == [(13, 13)]
        spend(budget, 1, 48)
        tend(budget)
    assert spent(observer) == 61
    assert not client.reserve("user:1", {"usd": 1}).granted


# -- what the database decides ----------------------------------------------------------------------------------------


def test_calls_that_no_lease_can_decide_go_to_the_database(client: Client, observer: Connection) -> None:
    with leased(client, 2, most={"usd": 4}) as budget:
        large = budget.reserve({"usd": 9}, details={"task": 1})
        assert large.reservation is not None
        assert holds(observer) == [(9, 0)]
        assert budget.decisions == (0, 1)
        assert budget.settle(large.reservation, {"usd": 7}).state == "settled"
        with pytest.raises(UnknownUnit):
            budget.reserve({"usd": 1, "peanuts": 1})
        with pytest.raises(UnknownReservation):
            budget.settle(uuid7(), {"usd": 1})
        with pytest.raises(UnknownReservation):
            budget.release(uuid7())
        assert not budget.call(Reserve("user:2", {"usd": 51})).granted, "somebody else's budget"
        with pytest.raises(InvalidCosts):
            budget.reserve({})
        with pytest.raises(InvalidAmount):
            budget.reserve({"usd": "-1"})
        with pytest.raises(TypeError, match="float"):
            budget.reserve({"usd": 0.5})  # type: ignore[dict-item]
    assert spent(observer) == 7


def test_an_id_that_was_asked_in_the_database_is_asked_there_again(client: Client, observer: Connection) -> None:
    with leased(client, 2, most={"usd": 4}) as budget:
        identity = uuid7()
        first, again = (budget.reserve({"usd": 9}, id=identity) for _ in range(2))
        assert again.replayed
        assert first.reservation == again.reservation
        assert holds(observer) == [(9, 0)]


def test_requests_and_slots_are_leased_with_it(ledger: str, client: Client, observer: Connection) -> None:
    run(observer, SetLimit("user:1", "calls", "requests", "budget", 20))
    run(observer, SetLimit("user:1", "slots", "concurrency", "concurrency", 5))
    with leased(client) as budget:
        open_ = [budget.reserve({"usd": "0.1"}) for _ in range(7)]
        assert [answer.granted for answer in open_] == [True] * 5 + [False] * 2
        assert open_[5].reason == "concurrency"
        assert open_[5].requested == 1
        for answer in open_[:5]:
            assert answer.reservation is not None
            budget.settle(answer.reservation)
        for _ in range(15):
            spend(budget, "0.1")
        assert budget.reserve({"usd": "0.1"}).reason == "held", "used, and not posted yet"
        tend(budget)
        assert budget.reserve({"usd": "0.1"}).reason == "exhausted"
        assert [row.spent for row in client.balance("user:1") if row.unit == "requests"] == [20]
    assert {row.reserved for row in client.balance("user:1")} == {0}


def test_a_hold_under_a_lease(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        with budget.hold({"usd": 2}) as hold:
            hold.sending()
            hold.adjust({"usd": 12})
            hold.settle({"usd": 11})
        with pytest.raises(ValueError, match="work"), budget.hold({"usd": 2}):
            raise ValueError("work")
        with pytest.raises(Refused), budget.hold({"usd": 40}):
            pass
        assert len(holds(observer)) == 1
    assert spent(observer) == 11


def test_a_freeze_reaches_a_lease_at_its_next_extension(client: Client, observer: Connection) -> None:
    clock = Clock()
    with leased(client, clock=clock, ttl=timedelta(seconds=30)) as budget:
        spend(budget, 1)
        run(observer, Freeze("user:1", "a runaway"))
        assert budget.reserve({"usd": 1}).granted, "not before"
        clock.s += 10
        tend(budget)
        refusal = budget.reserve({"usd": 1})
        assert told(refusal, "reason", "limit_subject") == ("frozen", "user:1")
        assert holds(observer) == [(2, 1)], "what is open stays, the rest is back"
        run(observer, Unfreeze("user:1"))
        spend(budget, 1)
    assert spent(observer) == 2


# -- windows and clocks -----------------------------------------------------------------------------------------------


def test_a_lease_ends_with_its_window_and_is_taken_anew(ledger: str, client: Client, observer: Connection) -> None:
    run(observer, SetLimit("user:1", "hourly", "usd", "budget", 20, period="1 hour"))
    set_clock(observer, NOON)
    clock = Clock()
    with leased(client, clock=clock) as budget:
        spend(budget, 4)
        before = budget.reserve({"usd": 2})
        clock.s += 3600 * 0.95
        set_clock(observer, "2026-05-04 13:00:00+00")
        spend(budget, 5)
        assert holds(observer) == [(10, 0), (10, 0)]
        assert before.reservation is not None
        budget.settle(before.reservation, {"usd": 1})
        tend(budget)
        assert holds(observer) == [(10, 5)]
    windows = observer.execute(
        """SELECT window_start, sum(amount) FROM quota.entries WHERE limit_name = 'hourly' GROUP BY 1 ORDER BY 1"""
    ).fetchall()
    assert windows == [(datetime(2026, 5, 4, hour, tzinfo=UTC), 5) for hour in (12, 13)]


def test_a_window_about_to_turn_is_not_worth_a_lease(ledger: str, client: Client, observer: Connection) -> None:
    run(observer, SetLimit("user:1", "hourly", "usd", "budget", 20, period="1 hour"))
    set_clock(observer, NOON)
    client.record("user:1", {"usd": 1})
    set_clock(observer, "2026-05-04 12:59:59.99+00")
    with leased(client, clock=Clock()) as budget:
        spend(budget, 4)
        assert budget.decisions == (0, 1)
        tend(budget)
        assert holds(observer) == []
    assert spent(observer) == 5


def test_a_lease_that_the_database_has_closed_is_settled_late(client: Client, observer: Connection) -> None:
    """The database's clock leaps: what was not used of the lease was charged, and is corrected."""
    set_clock(observer, NOON)
    with leased(client) as budget:
        spend(budget, 4)
        kept = budget.reserve({"usd": 2})
        set_clock(observer, "2026-05-05 12:00:00+00")
        client.reap()
        assert spent(observer) == 10
        tend(budget)
        spend(budget, 1)
        assert kept.reservation is not None
        budget.settle(kept.reservation, {"usd": 1})
        tend(budget)
        assert spent(observer) == 6
        assert holds(observer) == [(10, 1)]
    assert spent(observer) == 6


def test_a_lease_goes_on_as_long_as_it_is_extended(client: Client, observer: Connection) -> None:
    clock = Clock()
    with leased(client, clock=clock, ttl=timedelta(seconds=30)) as budget:
        spend(budget, 1)
        for _ in range(5):
            clock.s += 12
            tend(budget)
        spend(budget, 1)
        assert observer.execute("SELECT count(*) FROM quota.reservations WHERE costs ->> 'usd' <> '0'").fetchone() == (
            1,
        )


# -- the database away, answers lost ----------------------------------------------------------------------------------


def test_decisions_go_on_while_the_database_is_away_until_the_lease_may_have_expired(
    ledger: str, proxy: Proxy, observer: Connection
) -> None:
    clock = Clock()
    with Client(proxy.url, timeout_s=0.5, retries=0) as client:
        budget = LeasedBudget(client, "user:1", {"usd": 10}, **{**QUIET, "ttl": timedelta(seconds=30)}, clock=clock)
        spend(budget, 1)
        proxy.frozen.set()
        clock.s += 28.4
        spend(budget, 1)
        clock.s += 0.2
        with pytest.raises(Unavailable):
            budget.reserve({"usd": 1})
        proxy.frozen.clear()
    with Client(ledger) as client:
        budget._client = client
        budget._core = client
        budget.close()
    assert spent(observer) == 2


def test_failing_open_is_the_clients_setting(ledger: str, proxy: Proxy) -> None:
    with Client(proxy.url, timeout_s=0.3, retries=0, fail_open=True) as client:
        proxy.frozen.set()
        budget = LeasedBudget(client, "user:1", {"usd": 10}, **QUIET)
        answer = budget.reserve({"usd": 1})
        assert (answer.granted, answer.state, client.bypasses) == (True, "fail_open", 1)
        assert answer.reservation is not None
        assert budget.settle(answer.reservation).state == "fail_open"


def lose(step: Callable[[LeasedBudget], None], ledger: str, retries: int) -> Callable[[], None]:
    def go() -> None:
        with Proxy(ledger) as proxy, Client(proxy.url, timeout_s=30, retries=retries) as client:
            clock = Clock()
            settings = {**QUIET, "idle": timedelta(seconds=10), "ttl": timedelta(seconds=300)}
            with LeasedBudget(client, "user:1", {"usd": 10}, **settings, clock=clock) as budget:
                spend(budget, 4)
                kept = budget.reserve({"usd": 1})
                clock.s += 20
                proxy.lose_answers = 1
                step(budget)
                clock.s += 100
                tend(budget)
                spend(budget, 4)
                assert kept.reservation is not None
                budget.settle(kept.reservation)

    return go


def grow(budget: LeasedBudget) -> None:
    answer = budget.reserve({"usd": 20})
    assert answer.reservation is not None
    budget.release(answer.reservation)


def grow_in_doubt(budget: LeasedBudget) -> None:
    with pytest.raises(Unavailable):
        budget.reserve({"usd": 20})


@pytest.mark.parametrize(("step", "retries"), [(tend, 3), (tend, 0), (grow, 3), (grow_in_doubt, 0)])
def test_a_lost_answer_is_harmless(
    ledger: str, observer: Connection, step: Callable[[LeasedBudget], None], retries: int
) -> None:
    lose(step, ledger, retries)()
    assert spent(observer) == 9
    assert holds(observer) == []


def test_a_lowering_in_doubt_ends_its_lease(ledger: str, proxy: Proxy, observer: Connection) -> None:
    clock = Clock()
    with Client(proxy.url, timeout_s=30) as client:
        settings = {**QUIET, "idle": timedelta(seconds=10)}
        with LeasedBudget(client, "user:1", {"usd": 10}, **settings, clock=clock) as budget:
            kept = budget.reserve({"usd": 1})
            for lost in (0, 1):
                clock.s += 10
                proxy.lose_answers = lost
                tend(budget)
            assert holds(observer) == [(1, 0)], "it was lowered, although nobody heard of it"
            spend(budget, 4)
            assert holds(observer) == [(1, 0), (10, 0)], "the old one is not raised again"
            assert kept.reservation is not None
            budget.settle(kept.reservation)
    assert spent(observer) == 5


def test_a_lease_in_doubt_is_not_used_and_given_back(ledger: str, proxy: Proxy, observer: Connection) -> None:
    with Client(proxy.url, timeout_s=30, retries=0) as client:
        client.balance("user:1")
        with LeasedBudget(client, "user:1", {"usd": 10}, **QUIET) as budget:
            proxy.lose_answers = 1
            with pytest.raises(Unavailable):
                budget.reserve({"usd": 1})
            assert holds(observer) == [(10, 0)]
            tend(budget)
            assert holds(observer) == []
    assert spent(observer) == 0


# -- processes, closing -----------------------------------------------------------------------------------------------


def test_a_forked_child_takes_a_lease_of_its_own(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        parents = budget.reserve({"usd": 2})
        assert parents.reservation is not None
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(UnknownReservation):
                    budget.settle(parents.reservation)
                spend(budget, 3)
                budget.close()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert holds(observer) == [(10, 0)]
        budget.settle(parents.reservation)
    assert spent(observer) == 5


def test_calls_that_are_open_at_the_close_keep_their_part(client: Client, observer: Connection) -> None:
    budget = LeasedBudget(client, "user:1", {"usd": 10}, **QUIET)
    open_ = budget.reserve({"usd": 2})
    assert open_.reservation is not None
    budget.close()
    assert holds(observer) == [(2, 0)]
    with pytest.raises(RuntimeError, match="closed"):
        budget.reserve({"usd": 1})
    budget.settle(open_.reservation, {"usd": "1.5"})
    budget.close()
    assert holds(observer) == []
    assert spent(observer) == Decimal("1.5")


def test_a_killed_process_is_charged_what_it_held(client: Client, observer: Connection) -> None:
    set_clock(observer, NOON)
    budget = LeasedBudget(client, "user:1", {"usd": 10}, **QUIET)
    spend(budget, 4)
    tend(budget)
    spend(budget, 1)
    budget.escrow = Escrow(budget._terms, Clock())  # what a killed process forgets
    set_clock(observer, "2026-05-05 12:00:00+00")
    assert spent(observer) == 10
    client.reap()
    assert (holds(observer), spent(observer)) == ([], 10)


ENDS_IN_ORDER = """
import sys
from quota.client import Client
from quota.lease import LeasedBudget
budget = LeasedBudget(Client(sys.argv[1]), "user:1", {"usd": 10})
answer = budget.reserve({"usd": 3}).raise_if_refused()
budget.settle(answer.reservation, {"usd": 2})
"""


def test_a_process_that_ends_in_order_is_charged_what_it_used(ledger: str, observer: Connection) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENDS_IN_ORDER, ledger], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert holds(observer) == []
    assert spent(observer) == 2


def test_a_lease_that_somebody_released_loses_nothing(client: Client, observer: Connection) -> None:
    with leased(client) as budget:
        spend(budget, 3)
        tend(budget)
        spend(budget, 2)
        (lease,) = budget.escrow.leases()
        client.release(lease.id)
        tend(budget)
        spend(budget, 1)
    assert spent(observer) == 6


def test_also_and_ancestors_are_charged(ledger: str, client: Client, observer: Connection) -> None:
    run(observer, CreateSubject("team:a"))
    run(observer, SetLimit("team:a", "cap", "usd", "budget", 12, period="day"))
    with leased(client, also=("team:a",)) as budget:
        spend(budget, 10)
        assert budget.reserve({"usd": 3}).limit_subject == "team:a"
    assert spent(observer, "team:a") == 10


# -- asyncio ----------------------------------------------------------------------------------------------------------


async def test_the_asynchronous_twin(ledger: str, observer: Connection) -> None:
    async def go(budget: AsyncLeasedBudget) -> int:
        won = 0
        for _ in range(10):
            answer = await budget.reserve({"usd": "0.5"})
            if answer.reservation is not None:
                await asyncio.sleep(0)
                await budget.settle(answer.reservation)
                won += 1
        return won

    async with AsyncClient(ledger, timeout_s=30) as client:
        soon = timedelta(seconds=0.05)
        async with AsyncLeasedBudget(client, "user:1", {"usd": 7}, post_every=soon) as budget:
            assert sum(await asyncio.gather(*(go(budget) for _ in range(20)))) == 100
            while spent(observer) < 50:  # noqa: ASYNC110 - it happens in another task
                await asyncio.sleep(0.02)
            refusal = await budget.reserve({"usd": 1})
            assert told(refusal, "reason", "requested") == ("exhausted", 1)
        async with AsyncLeasedBudget(client, "user:2", {"usd": 7}) as budget:
            async with budget.hold({"usd": 2}) as hold:
                await hold.settle({"usd": 1})
            with pytest.raises(UnknownReservation):
                await budget.release(uuid7())
    assert holds(observer) == []
    assert spent(observer, "user:2") == 1


async def test_cancelled_while_the_lease_is_taken(ledger: str, observer: Connection) -> None:
    async with (
        AsyncClient(ledger, timeout_s=30) as client,
        AsyncLeasedBudget(client, "user:1", {"usd": 7}) as budget,
    ):
        with standing_in_the_way(ledger):
            task = asyncio.create_task(budget.reserve({"usd": 1}))
            other = asyncio.create_task(budget.reserve({"usd": 2}))
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while observer.execute(waiting).fetchone() == (0,):  # noqa: ASYNC110 - it happens in the server
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        answer = await other
        assert answer.granted
        assert answer.reservation is not None
        await budget.settle(answer.reservation)
    assert holds(observer) == []
    assert spent(observer) == 2
