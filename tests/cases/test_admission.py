"""Field reports on admission: who is let in, and that a refusal leaves nothing behind."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tests.server import Connection
from tests.sql.kit import (
    NOON,
    advance,
    balance,
    bucket,
    budget,
    call,
    hold,
    misuse,
    new_id,
    nothing_changes,
    outcome,
    reserve,
    set_clock,
    slots,
    spent_reserved,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    return tx_conn


@pytest.mark.parametrize("cost", ["0", "4", "5", "5.000000000001", "100", "999999999999999999"])
def test_a_refused_cost_leaves_the_state_byte_for_byte(ledger: Connection, cost: str) -> None:
    """A02, L9, L10: also when it is larger than the whole limit."""
    budget(ledger, "user:1", 10, unit="cost", period="1 hour")
    bucket(ledger, "user:1", 10, 1)
    hold(ledger, "user:1", {"cost": 5})
    if Decimal(cost) <= 5:
        assert reserve(ledger, "user:1", {"cost": cost})["granted"]
        return
    with nothing_changes(ledger):
        answer = reserve(ledger, "user:1", {"cost": cost})
    assert answer["reason"] == ("too_large" if Decimal(cost) > 10 else "rate")
    assert (answer["retry_after_s"] is None) == (Decimal(cost) > 10)


def test_twenty_calls_refused_by_the_hour_cost_the_bucket_nothing(ledger: Connection) -> None:
    """L7, L8."""
    budget(ledger, "user:1", 10, "hourly", "cost", period="1 hour")
    bucket(ledger, "user:1", 100, 0)
    assert [outcome(ledger, "reserve", "user:1", {"cost": cost}) for cost in (8, 8, 2)] == ["ok", "refused:held", "ok"]
    with nothing_changes(ledger):
        assert {outcome(ledger, "reserve", "user:1", {"cost": 1}) for _ in range(20)} == {"refused:held"}
    assert balance(ledger, "user:1", "rate")["level"] == 90


def test_a_call_refused_for_want_of_a_slot_consumes_no_request(ledger: Connection) -> None:
    """G14: one request a minute, one slot. A runs, B is refused, A ends and the minute with it, C is admitted."""
    bucket(ledger, "user:1", 2, 0, "rpm", unit="requests")
    slots(ledger, "user:1", 1)
    first = hold(ledger, "user:1", {"requests": 1})
    assert outcome(ledger, "reserve", "user:1", {"requests": 1}) == "refused:concurrency"
    call(ledger, "settle", first)
    assert outcome(ledger, "reserve", "user:1", {"requests": 1}) == "ok"


def test_ten_slots_of_callers_that_vanished_are_free_after_the_ttl(ledger: Connection) -> None:
    """G15, L37, A09."""
    slots(ledger, "user:1", 10)
    budget(ledger, "user:1", 100)
    for _ in range(10):
        hold(ledger, "user:1", {"usd": 1}, ttl="30 seconds")
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}) == "refused:concurrency"
    advance(ledger, "30 seconds")
    assert [outcome(ledger, "reserve", "user:1", {"usd": 1}) for _ in range(11)] == ["ok"] * 10 + [
        "refused:concurrency"
    ]


def test_a_budget_that_is_held_is_not_a_budget_that_is_spent(ledger: Connection) -> None:
    """G8: nobody is told to top up; exact decimals; admitted again after a release."""
    budget(ledger, "user:1", 25)
    keys = [hold(ledger, "user:1", {"usd": "6.25"}) for _ in range(4)]
    answer = reserve(ledger, "user:1", {"usd": "6.25"})
    assert [answer[key] for key in ("reason", "spent", "reserved", "retry_after_s")] == ["held", 0, 25, 1]
    call(ledger, "release", keys[0])
    assert outcome(ledger, "reserve", "user:1", {"usd": "6.25"}) == "ok"


def test_exactly_full_is_full(ledger: Connection) -> None:
    """D1, D34, D44: six of 1,000 under 5,000; what is exactly used up refuses the next unit."""
    budget(ledger, "user:1", 5000)
    assert [outcome(ledger, "reserve", "user:1", {"usd": 1000}) for _ in range(6)] == ["ok"] * 5 + ["refused:held"]
    assert spent_reserved(ledger, "user:1") == (0, 5000)


def test_four_calls_near_the_cap(ledger: Connection) -> None:
    """D41: cap 5, spent 4.752720, four of 0.0884: two admitted."""
    budget(ledger, "user:1", 5)
    call(ledger, "record", "user:1", {"usd": "4.752720"})
    words = [outcome(ledger, "reserve", "user:1", {"usd": "0.0884"}) for _ in range(4)]
    assert words == ["ok", "ok", "refused:held", "refused:held"]


def test_the_lower_of_two_limits_binds_and_the_higher_counts_only_what_passed(ledger: Connection) -> None:
    """D25, D27: high 100, low 1; a thousand refusals count as nothing."""
    budget(ledger, "user:1", 100, "high", "requests")
    budget(ledger, "user:1", 1, "low", "requests")
    words = [outcome(ledger, "reserve", "user:1", {"requests": 1}) for _ in range(10)]
    assert words.count("ok") == 1
    assert [spent_reserved(ledger, "user:1", name) for name in ("high", "low")] == [(0, 1), (0, 1)]


def test_a_refused_session_leaves_no_hold(ledger: Connection) -> None:
    """D39, D30, D2: nor can what was refused be settled."""
    budget(ledger, "user:1", "0.8")
    refused = new_id()
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}, id=refused) == "refused:too_large"
    for function, args in (("settle", ()), ("release", ()), ("extend", ("1 minute",))):
        with misuse(ledger, "unknown_reservation", str(refused)):
            call(ledger, function, refused, *args)
    assert outcome(ledger, "reserve", "user:1", {"usd": "0.8"}) == "ok"


def test_the_same_id_twice_is_one_hold(ledger: Connection) -> None:
    """L36, D36."""
    budget(ledger, "user:1", 50)
    key = new_id()
    first = reserve(ledger, "user:1", {"usd": 5}, id=key)
    second = reserve(ledger, "user:1", {"usd": 5}, id=key)
    assert first["reservation"] == second["reservation"] == key
    assert spent_reserved(ledger, "user:1") == (0, 5)
    with misuse(ledger, "id_conflict", str(key), "costs"):
        reserve(ledger, "user:1", {"usd": 6}, id=key)


def test_a_burst_over_the_turn_of_the_hour_is_capped_by_the_bucket(ledger: Connection) -> None:
    """L30."""
    budget(ledger, "user:1", 100, "hourly", "cost", period="1 hour")
    bucket(ledger, "user:1", 10, 1)
    set_clock(ledger, "2026-05-04 12:00:00+00")
    call(ledger, "settle", hold(ledger, "user:1", {"cost": 1}))
    set_clock(ledger, "2026-05-04 12:59:59.9+00")
    before = sum(outcome(ledger, "reserve", "user:1", {"cost": 1}, ttl="1 hour") == "ok" for _ in range(20))
    set_clock(ledger, "2026-05-04 13:00:00.1+00")
    after = sum(outcome(ledger, "reserve", "user:1", {"cost": 1}, ttl="1 hour") == "ok" for _ in range(20))
    assert before + after == 10


def test_a_refusal_only_when_ledger_and_holds_exceed_the_cap(ledger: Connection) -> None:
    """G6, D38, D40: what is enforced is what the ledger says."""
    budget(ledger, "user:1", 100)
    for _ in range(3):
        call(ledger, "settle", hold(ledger, "user:1", {"usd": 30}), {"usd": "18.58"})
    assert str(balance(ledger, "user:1")["spent"]) == "55.74"
    assert outcome(ledger, "reserve", "user:1", {"usd": "44.26"}) == "ok"
    assert outcome(ledger, "reserve", "user:1", {"usd": "0.01"}) == "refused:held"


def test_a_budget_with_a_period_is_not_wiped_by_whoever_looks(ledger: Connection) -> None:
    """G11, D32: the boundary is computed when the window opens; spent stays until then."""
    budget(ledger, "user:1", 50, period="1 day")
    call(ledger, "record", "user:1", {"usd": 3})
    for _ in range(3):
        advance(ledger, "5 hours")
        call(ledger, "reap")
        assert spent_reserved(ledger, "user:1") == (3, 0)
    advance(ledger, "9 hours")
    assert spent_reserved(ledger, "user:1") == (0, 0)
