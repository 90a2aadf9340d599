"""Locks are taken in one order, and the clock is read after them: proven by watching who waits for whom."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    PATIENCE_S,
    Background,
    advance,
    budget,
    call,
    hold,
    in_parallel,
    new_id,
    outcome,
    reserve,
    set_clock,
    slots,
    spent_reserved,
    value,
)

LOCK_ACCOUNTS = "SELECT FROM quota_internal.accounts WHERE subject = %s FOR NO KEY UPDATE"
LOCK_RESERVATION = "SELECT FROM quota_internal.reservations WHERE id = %s FOR NO KEY UPDATE"


# -- one order --------------------------------------------------------------------------------------------------------


def test_shuffled_subjects_never_deadlock_and_lose_nothing(
    conn: Connection, database: str, soaked: Callable[[int, int], int]
) -> None:
    """A06, G24: eight threads shuffle five subjects; the sum is exact, and nobody ever sees 40P01."""
    rounds = soaked(30, 500)
    subjects = [f"user:{n}" for n in range(5)]
    for subject in subjects:
        budget(conn, subject, None)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with connect(database) as connection:
                for _ in range(rounds):
                    first, *also = chance.sample(subjects, 5)
                    key = hold(connection, first, {"usd": "0.1"}, also=also)
                    first, *also = chance.sample(subjects, 5)
                    call(connection, "record", first, {"usd": "0.01"}, also=also)
                    call(connection, "settle", key, {"usd": "0.2"})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S + rounds)
    assert errors == []
    for subject in subjects:
        assert spent_reserved(conn, subject) == (8 * rounds * Decimal("0.21"), 0)


@pytest.mark.parametrize("function", ["reserve", "record"])
def test_accounts_are_locked_by_subject_and_limit(conn: Connection, database: str, function: str) -> None:
    """Whoever waits for the first account holds none of the later ones yet, however the subjects were named."""
    for subject in ("user:a", "user:b", "user:c"):
        budget(conn, subject)
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_ACCOUNTS, ("user:b",))
            waiting = Background(database, function, "user:c", {"usd": 1}, also=["user:b", "user:a"])
            waiting.must_block(conn)
            free = "SELECT array_agg(subject ORDER BY subject) FROM (SELECT subject FROM quota_internal.accounts"
            free += " FOR NO KEY UPDATE SKIP LOCKED) x"
            assert value(conn, free) == ["user:c"], "user:a is locked, user:b waited for, user:c not yet"
        waiting.row()


def test_a_reservation_is_locked_before_its_accounts(conn: Connection, database: str) -> None:
    budget(conn, "user:1")
    key = hold(conn, "user:1", {"usd": 1})
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_RESERVATION, (key,))
            waiting = Background(database, "settle", key)
            waiting.must_block(conn)
            with conn.transaction():
                conn.execute("SET LOCAL lock_timeout = '5s'")
                conn.execute(LOCK_ACCOUNTS, ("user:1",))  # nobody has it
        waiting.row()


@pytest.mark.parametrize("operation", ["adjust", "reserve", "record"])
def test_definitions_that_change_while_an_account_is_awaited_make_no_deadlock(
    conn: Connection, database: str, operation: str
) -> None:
    """Who holds an account and finds new definitions must not wait for a subject that a binder of it holds already."""
    budget(conn, "user:1", 50)
    budget(conn, "user:*", 50, "kind")
    held = hold(conn, "user:1", {"usd": 1})
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_ACCOUNTS, ("user:1",))
            if operation == "adjust":
                first = Background(database, "adjust", held, {"usd": 2})
            else:
                first = Background(database, operation, "user:1", {"usd": 1})
            first.must_block(conn)
            call(conn, "set_limit", "user:*", "kind", "usd", "budget", 40)
            second = Background(database, "reserve", "user:1", {"usd": 1})
            second.must_block(conn)
        assert [first.word(), second.word()] == ["ok", "ok"]


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_a_reserve_decided_anew_holds_no_account_while_it_closes_overdue_holds(
    conn: Connection, database: str, batch: bool
) -> None:
    """It waited for an account, finds other limits, starts anew, and now an overdue hold is in its way: rows first."""
    set_clock(conn, NOON)
    budget(conn, "user:1", 50)
    overdue = hold(conn, "user:1", {"usd": 40}, ttl="1 minute")
    with connect(database) as other, connect(database) as third:
        with third.transaction():
            third.execute(LOCK_RESERVATION, (overdue,))
            with other.transaction():
                other.execute(LOCK_ACCOUNTS, ("user:1",))
                waiting = Background(database, "reserve", "user:1", {"usd": 10}, batch=batch)
                waiting.must_block(conn)
                advance(conn, "1 minute")
                other.execute("UPDATE quota_internal.accounts SET capacity = 45")
                other.execute("UPDATE quota_internal.limits SET capacity = 45")
                other.execute("UPDATE quota_internal.tenants SET config_version = config_version + 1")
            if waiting.blocked(conn):
                with third.transaction():  # what a settle of that hold would do next
                    third.execute("SET LOCAL lock_timeout = '5s'")
                    third.execute(LOCK_ACCOUNTS, ("user:1",))
        assert waiting.word() == "ok"


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_a_reserve_that_has_closed_overdue_holds_waits_for_no_further_one(
    conn: Connection, database: str, batch: bool
) -> None:
    """While it closed one, another fell due, and whoever has that one's row wants the account next."""
    set_clock(conn, NOON)
    budget(conn, "user:1", 50)
    hold(conn, "user:1", {"usd": 40}, ttl="1 minute")
    second = hold(conn, "user:1", {"usd": 10}, ttl="2 minutes")
    advance(conn, "1 minute")
    with connect(database) as other, connect(database) as third:
        with third.transaction():
            third.execute(LOCK_RESERVATION, (second,))
            with other.transaction():
                other.execute(LOCK_ACCOUNTS, ("user:1",))
                waiting = Background(database, "reserve", "user:1", {"usd": 45}, batch=batch)
                waiting.must_block(conn)
                advance(conn, "1 minute")
            if waiting.blocked(conn):
                with third.transaction():  # what a settle of that hold would do next
                    third.execute("SET LOCAL lock_timeout = '5s'")
                    third.execute(LOCK_ACCOUNTS, ("user:1",))
        assert waiting.word() == "ok"


@pytest.mark.parametrize("round_", range(3))
def test_everything_at_once_never_deadlocks(conn: Connection, database: str, round_: int) -> None:
    """Reserves over two subjects, settles, reapers, new limits, freezes: any mix, each a transaction of its own."""
    for subject in ("user:a", "user:b"):
        budget(conn, subject, 1000)
    budget(conn, "user:*", 1000, "kind")
    chance = random.Random(round_)
    keys = [hold(conn, "user:a", {"usd": 1}, also=["user:b"], ttl="0.05 seconds") for _ in range(8)]
    keys += [hold(conn, "user:b", {"usd": 1}, also=["user:a"]) for _ in range(8)]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for key in keys:
        calls.append((chance.choice(["settle", "release"]), (key,), {}))
        calls.append(("adjust", (key, {"usd": 3}), {}))
    calls += [("reserve", ("user:a", {"usd": 1}), {"also": ["user:b"]}) for _ in range(4)]
    calls += [("reserve", ("user:b", {"usd": 990}), {"also": ["user:a"]}) for _ in range(4)]
    calls += [("reap", (), {}) for _ in range(2)]
    calls += [("set_limit", ("user:*", "kind", "usd", "budget", n), {}) for n in (900, 1100)]
    calls += [("set_limit", ("user:b", "cap", "usd", "budget", n), {}) for n in (900, 1100)]
    calls += [("freeze", ("user:a", "why"), {}), ("unfreeze", ("user:a",), {}), ("repair", (), {})]
    chance.shuffle(calls)
    answers = in_parallel(database, calls)
    errors = [each for each in answers if isinstance(each, psycopg.Error)]
    surfaced = [each for each in errors if not (each.sqlstate or "").startswith("QT")]
    assert [f"{each}\n{each.diag.message_detail}\n{each.diag.context}" for each in surfaced] == []


# -- the clock is read after the locks --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Seoul"])
def test_expiry_counts_from_the_moment_the_hold_takes_effect(
    database: str, conn: Connection, zone: str, batch: bool
) -> None:
    """A17: the account is held longer than the TTL; the hold is not overdue when it is granted."""
    conn.execute(f"ALTER DATABASE \"{conn.info.dbname}\" SET timezone = '{zone}'".encode())
    budget(conn, "user:1")
    set_clock(conn, NOON)
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_ACCOUNTS, ("user:1",))
            waiting = Background(database, "reserve", "user:1", {"usd": 50}, ttl="1 second", batch=batch)
            waiting.must_block(conn)
            advance(conn, "1.5 seconds")
        answer = waiting.row()
    assert answer["granted"]
    left = "SELECT %s - quota_internal.clock() = interval '1 second'"
    assert value(conn, left, answer["expires_at"])
    assert call(conn, "reap")["released"] == 0
    assert outcome(conn, "reserve", "user:1", {"usd": 1}) == "refused:held"


def test_extend_counts_from_after_the_lock(database: str, conn: Connection) -> None:
    budget(conn, "user:1")
    set_clock(conn, NOON)
    key = hold(conn, "user:1", {"usd": 1}, ttl="10 seconds")
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_RESERVATION, (key,))
            waiting = Background(database, "extend", key, "10 seconds")
            waiting.must_block(conn)
            advance(conn, "5 seconds")
        answer = waiting.row()
    assert value(conn, "SELECT %s - quota_internal.clock() = interval '10 seconds'", answer["expires_at"])


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_a_hold_that_waited_for_a_rival_of_the_same_id_is_not_overdue_when_granted(
    database: str, conn: Connection, batch: bool
) -> None:
    """Two requests of one id on different subjects; the first one vanishes after longer than the second one's TTL."""
    budget(conn, "user:1")
    budget(conn, "user:2")
    set_clock(conn, NOON)
    key = new_id()
    with connect(database) as other:
        with other.transaction(force_rollback=True):
            reserve(other, "user:1", {"usd": 1}, id=key)
            waiting = Background(database, "reserve", "user:2", {"usd": 1}, id=key, ttl="1 second", batch=batch)
            waiting.must_block(conn)
            advance(conn, "1.5 seconds")
        answer = waiting.row()
    assert answer["granted"]
    assert value(conn, "SELECT %s > quota_internal.clock()", answer["expires_at"])


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_a_hold_expires_while_its_settle_waits(database: str, conn: Connection, batch: bool) -> None:
    """The settle waits for the reservation; when it gets it the hold is overdue, and it is booked late."""
    budget(conn, "user:1")
    set_clock(conn, NOON)
    key = hold(conn, "user:1", {"usd": 10}, ttl="1 minute")
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_RESERVATION, (key,))
            waiting = Background(database, "settle", key, {"usd": 4}, batch=batch)
            waiting.must_block(conn)
            advance(conn, "1 minute")
        assert waiting.word() == "late"
    assert spent_reserved(conn, "user:1") == (4, 0)


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_the_refill_is_counted_after_the_lock(database: str, conn: Connection, batch: bool) -> None:
    call(conn, "ensure_subject", "user:1")
    call(conn, "set_limit", "user:1", "rate", "cost", "bucket", 10, 1)
    set_clock(conn, NOON)
    hold(conn, "user:1", {"cost": 5})
    with connect(database) as other:
        with other.transaction():
            other.execute(LOCK_ACCOUNTS, ("user:1",))
            waiting = Background(database, "reserve", "user:1", {"cost": 4}, batch=batch)
            waiting.must_block(conn)
            advance(conn, "3 seconds")
        (bucket,) = waiting.row()["remaining"]
    assert bucket["level"] == "4"


def test_a_caller_who_waits_for_one_subject_does_not_keep_another_waiting(conn: Connection, database: str) -> None:
    """L35, D17: another key, held in an open transaction, is no reason to wait; nor is one key's slot another's."""
    for subject in ("user:1", "user:2"):
        budget(conn, subject)
        slots(conn, subject, 1)
    with connect(database) as other, other.transaction():
        hold(other, "user:1", {"usd": 1})
        waiting = Background(database, "reserve", "user:2", {"usd": 1})
        assert not waiting.blocked(conn)
        assert waiting.word() == "ok"
