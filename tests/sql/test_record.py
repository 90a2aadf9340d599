"""record and credit: usage that had no hold, and what is taken back."""

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
    new_id,
    nothing_changes,
    outcome,
    set_clock,
    slots,
    spent_reserved,
    value,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 50)
    return tx_conn


def test_a_record_is_booked_in_full_and_never_refused(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    slots(ledger, "user:1", 0)
    call(ledger, "freeze", "user:1", "why")
    call(ledger, "record", "user:1", {"usd": 60, "cost": 11})
    assert spent_reserved(ledger, "user:1") == (60, 0)
    assert balance(ledger, "user:1", "rate")["level"] == 0
    assert balance(ledger, "user:1", "slots")["reserved"] == 0


def test_a_record_counts_a_request_and_reaches_the_ancestors(ledger: Connection) -> None:
    call(ledger, "ensure_subject", "key:1", "user:1")
    budget(ledger, "user:1", 50, "calls", "requests")
    call(ledger, "record", "key:1", {"usd": 6})
    assert spent_reserved(ledger, "user:1") == (6, 0)
    assert spent_reserved(ledger, "user:1", "calls") == (1, 0)


def test_a_record_opens_a_window_and_a_refusal_does_not(ledger: Connection) -> None:
    budget(ledger, "user:2", 10, period="1 hour")
    with nothing_changes(ledger):
        assert outcome(ledger, "reserve", "user:2", {"usd": 11}) == "refused:too_large"
    assert balance(ledger, "user:2")["window_start"] is None
    call(ledger, "record", "user:2", {"usd": 11})
    row = balance(ledger, "user:2")
    assert (row["spent"], row["window_start"] is not None) == (11, True)


def test_the_same_record_twice_is_booked_once(ledger: Connection) -> None:
    """D29, L36."""
    key = new_id()
    first = call(ledger, "record", "user:1", {"usd": 6}, key)
    with nothing_changes(ledger):
        again = call(ledger, "record", "user:1", {"usd": "6.0"}, key, details={"x": 1})
    assert (first["replayed"], again) == (False, {"entry": first["entry"], "replayed": True})
    with misuse(ledger, "id_conflict", str(key)):
        call(ledger, "record", "user:1", {"usd": 7}, key)
    with misuse(ledger, "id_conflict", str(key)):
        call(ledger, "reserve", "user:1", {"usd": 7}, id=key)
    held = hold(ledger, "user:1", {"usd": 6})
    with misuse(ledger, "id_conflict", str(held)):
        call(ledger, "record", "user:1", {"usd": 6}, held)


def test_a_required_unit_is_required_of_a_record_too(ledger: Connection) -> None:
    budget(ledger, "user:1", 50, "must", "tokens", required=True)
    with misuse(ledger, "unit_missing", "tokens"):
        call(ledger, "record", "user:1", {"usd": 1})


@pytest.mark.parametrize("named", [{"details": "[]"}, {"details": None}, {"also": None}, {"also": [None]}])
def test_bad_arguments_of_record(ledger: Connection, named: dict[str, Any]) -> None:
    with misuse(ledger, "invalid_argument"):
        call(ledger, "record", "user:1", {"usd": 1}, **named)


# -- credit -----------------------------------------------------------------------------------------------------------


def test_a_credit_takes_back_at_most_what_was_booked(ledger: Connection) -> None:
    """A13, G20, D35."""
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", key, {"usd": 8})
    once = new_id()
    call(ledger, "credit", key, {"usd": 5}, "a mistake", once)
    with nothing_changes(ledger):
        assert call(ledger, "credit", key, {"usd": 5}, "again", once)["replayed"] is True
    with misuse(ledger, "amount_out_of_range", "3.000000000001", str(key)):
        call(ledger, "credit", key, {"usd": "3.000000000001"}, "too much")
    with misuse(ledger, "id_conflict", str(once)):
        call(ledger, "credit", key, {"usd": 3}, "other", once)
    call(ledger, "credit", key, {"usd": 3}, "the rest")
    assert spent_reserved(ledger, "user:1") == (0, 0)
    assert entries(ledger, key) == [("settle", 8), ("credit", 5), ("credit", 3)]


def test_a_credit_reaches_all_accounts_in_their_windows(ledger: Connection) -> None:
    call(ledger, "ensure_subject", "key:1", "user:1")
    budget(ledger, "key:1", 50, period="day")
    bucket(ledger, "key:1", 20, 0, unit="usd", name="level")
    key = hold(ledger, "key:1", {"usd": 10})
    call(ledger, "settle", key)
    advance(ledger, "1 day")
    call(ledger, "record", "key:1", {"usd": 1})
    call(ledger, "credit", key, {"usd": 10}, "yesterday's")
    assert (spent_reserved(ledger, "user:1"), spent_reserved(ledger, "key:1")) == ((1, 0), (1, 0))
    assert balance(ledger, "key:1", "level")["level"] == 9, "a credit gives no bucket anything back"


def test_nothing_booked_nothing_credited(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    with misuse(ledger, "amount_out_of_range"):
        call(ledger, "credit", key, {"usd": 1}, "why")
    call(ledger, "release", key)
    with misuse(ledger, "amount_out_of_range"):
        call(ledger, "credit", key, {"usd": 1}, "why")


@pytest.mark.parametrize("reason", ["", "   ", None, "x" * 2001])
def test_a_credit_says_why(ledger: Connection, reason: str | None) -> None:
    call(ledger, "record", "user:1", {"usd": 6}, key := new_id())
    with misuse(ledger, "invalid_argument", "reason"):
        call(ledger, "credit", key, {"usd": 1}, reason)


def test_one_id_for_credits_of_two_reservations_is_a_conflict(ledger: Connection) -> None:
    one, two, once = new_id(), new_id(), new_id()
    for key in (one, two):
        call(ledger, "record", "user:1", {"usd": 6}, key)
    call(ledger, "credit", one, {"usd": 1}, "why", once)
    with misuse(ledger, "id_conflict", str(once), str(one)):
        call(ledger, "credit", two, {"usd": 1}, "why", once)


def test_a_credit_is_logged_with_its_reason(ledger: Connection) -> None:
    call(ledger, "record", "user:1", {"usd": 6}, key := new_id())
    call(ledger, "credit", key, {"usd": 1}, "the provider gave it back")
    row = ledger.execute("SELECT target, reason FROM quota.log WHERE action = 'credit'").fetchall()
    assert row == [(str(key), "the provider gave it back")]
    assert value(ledger, "SELECT count(*) FROM quota.entries WHERE signed_amount < 0") == 1
