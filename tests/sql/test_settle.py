"""settle and release: what becomes of a hold, in the window it was taken in; buckets give back and take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import Connection
from tests.sql.kit import (
    NOON,
    advance,
    balance,
    bucket,
    budget,
    call,
    entries,
    hold,
    misuse,
    outcome,
    set_clock,
    spent_reserved,
    value,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 500, unit="cost")
    return tx_conn


def test_three_hundred_held_and_forty_rows(ledger: Connection) -> None:
    """R6b: 260 come back."""
    bucket(ledger, "user:1", 500, 0)
    key = hold(ledger, "user:1", {"cost": 300})
    assert (balance(ledger, "user:1", "rate")["level"], spent_reserved(ledger, "user:1")) == (200, (0, 300))
    assert call(ledger, "settle", key, {"cost": 40}) == {
        "state": "settled",
        "late": False,
        "replayed": False,
        "overage": {},
    }
    assert (balance(ledger, "user:1", "rate")["level"], spent_reserved(ledger, "user:1")) == (460, (40, 0))
    assert entries(ledger, key) == [("settle", 40), ("settle", 40)]


def test_one_hundred_held_and_one_hundred_and_sixty_settled(ledger: Connection) -> None:
    """R6b, D6: 60 more are taken."""
    bucket(ledger, "user:1", 500, 0)
    key = hold(ledger, "user:1", {"cost": 100})
    assert call(ledger, "settle", key, {"cost": 160})["overage"] == {"cost": "60"}
    assert (balance(ledger, "user:1", "rate")["level"], spent_reserved(ledger, "user:1")) == (340, (160, 0))
    kinds = [kind for kind, _ in entries(ledger, key)]
    assert kinds == ["settle", "settle", "overage", "overage"]


def test_refunds_stop_at_the_capacity_and_charges_at_nothing(ledger: Connection) -> None:
    """R9, L11, L12, L15: no debt in a bucket; the budget takes the full extra charge, and then refuses."""
    bucket(ledger, "user:1", 10, 1)
    key = hold(ledger, "user:1", {"cost": 3})
    advance(ledger, "10 seconds")
    call(ledger, "settle", key, {"cost": 0})
    assert balance(ledger, "user:1", "rate")["level"] == 10
    key = hold(ledger, "user:1", {"cost": 5})
    call(ledger, "settle", key, {"cost": 515})
    assert balance(ledger, "user:1", "rate")["level"] == 0
    row = balance(ledger, "user:1")
    assert (row["spent"], row["available"]) == (515, 0)
    advance(ledger, "10 seconds")
    assert outcome(ledger, "reserve", "user:1", {"cost": 1}) == "refused:exhausted"


def test_a_hold_remembers_its_window(ledger: Connection) -> None:
    """R8, A12: a settle after the window has turned never touches the new one, above the hold or below."""
    for n, actual in enumerate((1, 9)):
        subject = f"user:w{n}"
        budget(ledger, subject, 50, unit="cost", period="1 hour")
        set_clock(ledger, NOON)
        key = hold(ledger, subject, {"cost": 4}, ttl="3 hours")
        advance(ledger, "1 hour")
        assert spent_reserved(ledger, subject) == (0, 0)
        hold(ledger, subject, {"cost": 2})
        call(ledger, "settle", key, {"cost": actual})
        assert spent_reserved(ledger, subject) == (0, 2)
        windows = ledger.execute(
            "SELECT DISTINCT window_start = %s::timestamptz FROM quota.entries WHERE reservation = %s", (NOON, key)
        ).fetchall()
        assert windows == [(True,)]


def test_a_settle_in_an_ended_window_that_nobody_has_replaced(ledger: Connection) -> None:
    budget(ledger, "user:2", 50, unit="cost", period="1 hour")
    key = hold(ledger, "user:2", {"cost": 4}, ttl="3 hours")
    advance(ledger, "1 hour")
    call(ledger, "settle", key, {"cost": 50})
    assert spent_reserved(ledger, "user:2") == (0, 0)
    assert outcome(ledger, "reserve", "user:2", {"cost": 50}) == "ok"


def test_units_left_out_settle_at_the_hold_and_nought_is_nought(ledger: Connection) -> None:
    budget(ledger, "user:1", 1000, "tokens", "tokens")
    key = hold(ledger, "user:1", {"cost": 10, "tokens": 100})
    call(ledger, "settle", key, {"cost": 0})
    assert (spent_reserved(ledger, "user:1"), spent_reserved(ledger, "user:1", "tokens")) == ((0, 0), (100, 0))


def test_settle_alone_books_the_whole_hold(ledger: Connection) -> None:
    """B3: a timeout settles at the hold."""
    key = hold(ledger, "user:1", {"cost": 10})
    call(ledger, "settle", key, outcome="timeout")
    assert spent_reserved(ledger, "user:1") == (10, 0)


def test_partial_settles_are_totals_never_steps(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"cost": 100})
    for total in (30, 60, 60):
        call(ledger, "settle", key, {"cost": total}, False)
    assert spent_reserved(ledger, "user:1") == (60, 40)
    with misuse(ledger, "total_decreased", "59", "60", str(key)):
        call(ledger, "settle", key, {"cost": 59}, False)
    with misuse(ledger, "total_decreased", "0"):
        call(ledger, "settle", key, {"cost": 0})
    assert call(ledger, "settle", key, {"cost": 120}, False)["overage"] == {"cost": "20"}
    assert spent_reserved(ledger, "user:1") == (120, 0)
    call(ledger, "settle", key, {"cost": 130})
    assert spent_reserved(ledger, "user:1") == (130, 0)
    assert [amount for _, amount in entries(ledger, key)] == [30, 30, 40, 20, 10]


def test_the_whole_hold_again_after_a_partial_settle_above_it_is_a_replay(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"cost": 100})
    call(ledger, "settle", key, {"cost": 120}, False)
    assert call(ledger, "settle", key)["overage"] == {"cost": "20"}
    assert call(ledger, "settle", key)["replayed"]
    assert call(ledger, "settle", key, {"cost": 120})["replayed"]
    with misuse(ledger, "already_settled", "120"):
        call(ledger, "settle", key, {"cost": 100})


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"outcome": "fine"}, "invalid_argument"),
        ({"outcome": None}, "invalid_argument"),
        ({"final": None}, "invalid_argument"),
        ({"details": "[]"}, "invalid_argument"),
        ({"details": None}, "invalid_argument"),
        ({"outcome": "unknown", "costs": {"cost": 1}}, "invalid_argument"),
        ({"outcome": "unknown", "final": False}, "invalid_argument"),
        ({"final": False}, "invalid_costs"),
    ],
)
def test_bad_arguments_of_settle(ledger: Connection, named: dict[str, Any], error: str) -> None:
    key = hold(ledger, "user:1", {"cost": 10})
    with misuse(ledger, error):
        call(ledger, "settle", key, **named)


def test_bad_details_of_release(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"cost": 10})
    for details in ("[]", None, "null"):
        with misuse(ledger, "invalid_argument", "details"):
            call(ledger, "release", key, details)


def test_a_late_settle_books_in_full_and_says_so(ledger: Connection) -> None:
    """D5, D21, A15."""
    key = hold(ledger, "user:1", {"cost": 100}, ttl="5 minutes")
    advance(ledger, "658 seconds")
    call(ledger, "reap")
    answer = call(ledger, "settle", key, {"cost": 120})
    assert (answer["state"], answer["late"], answer["overage"]) == ("settled", True, {"cost": "20"})
    assert entries(ledger, key) == [("late", 120)]
    assert spent_reserved(ledger, "user:1") == (120, 0)
    assert outcome(ledger, "settle", key, {"cost": 120}) == "replayed"


@pytest.mark.parametrize(("actual", "last"), [(70, ("correction_down", 30)), (130, ("late", 30)), (100, None)])
def test_a_late_settle_after_a_charge_corrects_it(ledger: Connection, actual: int, last: Any) -> None:
    key = hold(ledger, "user:1", {"cost": 100}, ttl="5 minutes", on_expiry="charge")
    advance(ledger, "5 minutes")
    assert call(ledger, "reap") == {"released": 0, "charged": 1}
    call(ledger, "settle", key, {"cost": actual})
    assert spent_reserved(ledger, "user:1") == (actual, 0)
    assert entries(ledger, key) == [("charge", 100)] + ([last] if last else [])


def test_a_late_settle_only_takes_from_a_bucket(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    key = hold(ledger, "user:1", {"cost": 4}, ttl="1 minute")
    advance(ledger, "1 minute")
    call(ledger, "reap")
    assert balance(ledger, "user:1", "rate")["level"] == 10
    call(ledger, "settle", key, {"cost": 3})
    assert balance(ledger, "user:1", "rate")["level"] == 7


def test_settles_are_accepted_above_a_lowered_cap_and_on_a_frozen_subject(ledger: Connection) -> None:
    """D24."""
    key, other = hold(ledger, "user:1", {"cost": 400}), hold(ledger, "user:1", {"cost": 50})
    budget(ledger, "user:1", 100, unit="cost")
    call(ledger, "freeze", "user:1", "runaway")
    call(ledger, "settle", key)
    call(ledger, "release", other)
    assert balance(ledger, "user:1")["available"] == 0
    call(ledger, "unfreeze", "user:1")
    assert outcome(ledger, "reserve", "user:1", {"cost": 1}) == "refused:exhausted"


def test_details_are_merged(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"cost": 1}, details={"a": 1, "b": 1})
    call(ledger, "settle", key, details={"b": 2})
    stored = value(ledger, "SELECT details FROM quota.reservations WHERE reservation = %s", key)
    assert stored == {"a": 1, "b": 2}
