"""Field reports on closing: a hold comes to an end once, and the true cost is always booked."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    Background,
    advance,
    balance,
    bucket,
    budget,
    call,
    entries,
    hold,
    in_parallel,
    misuse,
    outcome,
    set_clock,
    spent_reserved,
    value,
    word_of,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 50)
    return tx_conn


@pytest.mark.parametrize("first", ["settle", "release", "expire"])
@pytest.mark.parametrize("second", ["settle", "release", "expire"])
def test_two_code_paths_close_one_hold(ledger: Connection, first: str, second: str) -> None:
    """A10, D3, D15, L13: whatever the second does, the other hold keeps its five."""
    key = hold(ledger, "user:1", {"usd": 4}, ttl="1 minute")
    hold(ledger, "user:1", {"usd": 5}, ttl="1 hour")
    for act in (first, second):
        if act == "expire":
            advance(ledger, "1 minute")
            call(ledger, "reap")
        else:
            outcome(ledger, act, key)
    assert spent_reserved(ledger, "user:1")[1] == 5
    assert sum(amount for _, amount in entries(ledger, key)) in (0, 4)


def test_two_parallel_settles_of_one_hold(conn: Connection, database: str) -> None:
    """D4, D40: one wins, the other is told; booked once."""
    budget(conn, "user:1", 500)
    key = hold(conn, "user:1", {"usd": 100})
    words = [word_of(answer) for answer in in_parallel(database, [("settle", (key, {"usd": 60}), {})] * 4)]
    assert sorted(words) == ["ok"] + ["replayed"] * 3
    other = hold(conn, "user:1", {"usd": 100})
    answers = in_parallel(database, [("settle", (other, {"usd": usd}), {}) for usd in (60, 61)])
    assert sorted(word_of(answer) for answer in answers) == ["already_settled", "ok"]
    assert balance(conn, "user:1")["spent"] in (120, 121)


def test_a_timeout_is_not_a_failure(ledger: Connection) -> None:
    """A11, G22: the unknown outcome is booked at the hold, and the true cost corrects it later."""
    key = hold(ledger, "user:1", {"usd": 4})
    call(ledger, "settle", key, outcome="unknown")
    assert spent_reserved(ledger, "user:1") == (4, 0)
    assert outcome(ledger, "reserve", "user:1", {"usd": 47}) == "refused:exhausted"
    call(ledger, "settle", key, {"usd": "3.8"})
    assert spent_reserved(ledger, "user:1") == (Decimal("3.8"), 0)


@pytest.mark.parametrize("unit", ["usd", "tokens"])
def test_negative_usage_refills_nothing(ledger: Connection, unit: str) -> None:
    """A13, L24, G20, D45."""
    budget(ledger, "user:1", 10, "tokens", "tokens")
    call(ledger, "record", "user:1", {unit: 9})
    key = hold(ledger, "user:1", {unit: 1})
    for amount in (-1, -0.000001, "-1", -1_000_000):
        for function, args in (
            ("settle", (key,)),
            ("adjust", (key,)),
            ("record", ("user:1",)),
            ("reserve", ("user:1",)),
        ):
            with misuse(ledger, "invalid_amount", unit):
                call(ledger, function, *args, {unit: amount})


def test_a_release_whose_caller_failed_afterwards_is_undone_with_it(ledger: Connection) -> None:
    """D14, D20: usage is what it was until the caller commits."""
    key = hold(ledger, "user:1", {"usd": 4})
    with ledger.transaction(force_rollback=True):
        call(ledger, "release", key)
    assert spent_reserved(ledger, "user:1") == (0, 4)


def test_a_hold_that_was_refunded_after_the_bucket_refilled_mints_nothing(ledger: Connection) -> None:
    """L11, L12, L16: the level stops at the capacity, at any order of stamps."""
    bucket(ledger, "user:1", 100, 100)
    set_clock(ledger, "2026-05-04 12:00:10+00")
    key = hold(ledger, "user:1", {"cost": 50})
    set_clock(ledger, "2026-05-04 12:00:09+00")
    call(ledger, "settle", key, {"cost": 0})
    set_clock(ledger, "2026-05-04 12:00:11+00")
    assert balance(ledger, "user:1", "rate")["level"] == 100
    assert outcome(ledger, "reserve", "user:1", {"cost": 101}) == "refused:too_large"


def test_a_late_worker_is_booked_as_late_and_once(ledger: Connection) -> None:
    """A15, D5, D13, D21, L37: expired, its money lent again, and the true cost is on the ledger all the same."""
    key = hold(ledger, "user:1", {"usd": 40}, ttl="5 minutes")
    advance(ledger, "301 seconds")
    call(ledger, "reap")
    second = hold(ledger, "user:1", {"usd": 50}, ttl="1 hour")
    advance(ledger, "357 seconds")
    answer = call(ledger, "settle", key, {"usd": "32.5"})
    assert (answer["late"], answer["overage"]) == (True, {})
    call(ledger, "settle", second, {"usd": 50})
    assert spent_reserved(ledger, "user:1") == (Decimal("82.5"), 0)
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}) == "refused:exhausted"


def test_ten_thousand_amounts_sum_exactly(conn: Connection, soaked: Callable[[int, int], int]) -> None:
    """A07, I3: the counter is the sum of the ledger, to the last digit."""
    budget(conn, "user:1", None)
    chance = random.Random(7)
    amounts = [Decimal(chance.randrange(10**12)).scaleb(-12) for _ in range(soaked(3000, 10_000))]
    for start in range(0, len(amounts), 200):  # a transaction each: one that updates a row ever so often slows down
        conn.execute(
            "SELECT count(r.entry) FROM unnest(%s::text[]) amount,"
            " quota.record('user:1', jsonb_build_object('usd', amount)) r",
            [[f"{amount:f}" for amount in amounts[start : start + 200]]],
        )
    assert spent_reserved(conn, "user:1") == (sum(amounts), 0)
    assert value(conn, "SELECT sum(amount) FROM quota.entries") == sum(amounts)


def test_a_slow_call_keeps_no_lock(conn: Connection, database: str) -> None:
    """G23: between reserve and settle nothing is locked, no transaction is open; a second call is answered at once."""
    budget(conn, "user:1", 50)
    with connect(database) as slow:
        key = hold(slow, "user:1", {"usd": 5})
        quick = Background(database, "reserve", "user:1", {"usd": 5})
        assert not quick.blocked(conn)
        assert quick.word() == "ok"
        call(slow, "settle", key)


def test_concurrent_debits_of_one_account_never_overdraw(conn: Connection, database: str) -> None:
    """D42, D45, D17: fifty at once, ten fit."""
    budget(conn, "user:1", 10)
    answers = in_parallel(database, [("reserve", ("user:1", {"usd": 1}), {})] * 50)
    assert [word_of(answer) for answer in answers].count("ok") == 10
    assert spent_reserved(conn, "user:1") == (0, 10)
