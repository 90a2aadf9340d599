"""adjust and extend: an open hold changes its size or its time."""

from __future__ import annotations

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


def test_raising_is_decided_like_a_reserve(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    hold(ledger, "user:1", {"usd": 20})
    assert outcome(ledger, "adjust", key, {"usd": 30}) == "ok"
    with nothing_changes(ledger):
        answer = call(ledger, "adjust", key, {"usd": 31})
    assert (answer["granted"], answer["reason"], answer["reserved"], answer["requested"]) == (False, "held", 50, 1)
    assert outcome(ledger, "adjust", key, {"usd": 30}) == "replayed"


def test_lowering_is_never_refused(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    budget(ledger, "user:1", 1)
    call(ledger, "freeze", "user:1", "why")
    assert outcome(ledger, "adjust", key, {"usd": 4}) == "ok"
    assert spent_reserved(ledger, "user:1") == (0, 4)
    assert outcome(ledger, "adjust", key, {"usd": 5}) == "refused:frozen"


def test_the_headroom_of_the_reservation_holds_for_what_it_adds(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10}, headroom="0.2")
    assert outcome(ledger, "adjust", key, {"usd": 40}) == "ok"
    assert outcome(ledger, "adjust", key, {"usd": "40.1"}) == "refused:held"


def test_one_unit_up_and_one_down_all_or_nothing(ledger: Connection) -> None:
    budget(ledger, "user:1", 100, "tokens", "tokens")
    key = hold(ledger, "user:1", {"usd": 10, "tokens": 50})
    with nothing_changes(ledger):
        assert outcome(ledger, "adjust", key, {"usd": 5, "tokens": 101}) == "refused:held"
    assert outcome(ledger, "adjust", key, {"usd": 5, "tokens": 100}) == "ok"
    assert (spent_reserved(ledger, "user:1"), spent_reserved(ledger, "user:1", "tokens")) == ((0, 5), (0, 100))


def test_below_what_is_booked_is_an_error(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", key, {"usd": 6}, False)
    with misuse(ledger, "total_decreased", "5", "6"):
        call(ledger, "adjust", key, {"usd": 5})
    assert outcome(ledger, "adjust", key, {"usd": 6}) == "ok"
    assert spent_reserved(ledger, "user:1") == (6, 0)


def test_what_adjust_adds_is_taken_in_the_present_window(ledger: Connection) -> None:
    budget(ledger, "user:2", 50, period="1 hour")
    key = hold(ledger, "user:2", {"usd": 40}, ttl="3 hours")
    advance(ledger, "1 hour")
    assert outcome(ledger, "adjust", key, {"usd": 60}) == "ok"
    assert spent_reserved(ledger, "user:2") == (0, 20)
    call(ledger, "settle", key, {"usd": 45})
    assert spent_reserved(ledger, "user:2") == (5, 0)


def test_a_bucket_gives_and_takes(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    key = hold(ledger, "user:1", {"cost": 4})
    call(ledger, "adjust", key, {"cost": 7})
    assert balance(ledger, "user:1", "rate")["level"] == 3
    assert outcome(ledger, "adjust", key, {"cost": 11}) == "refused:rate"
    call(ledger, "adjust", key, {"cost": 1})
    assert balance(ledger, "user:1", "rate")["level"] == 9


def test_a_raise_closes_the_overdue_holds_in_its_way(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    overdue = hold(ledger, "user:1", {"cost": 6}, ttl="1 minute")
    key = hold(ledger, "user:1", {"cost": 4})
    advance(ledger, "2 minutes")
    with nothing_changes(ledger):
        assert outcome(ledger, "adjust", key, {"cost": 4}) == "replayed"
    assert outcome(ledger, "adjust", key, {"cost": 9}) == "ok"
    assert value(ledger, "SELECT state FROM quota.reservations WHERE reservation = %s", overdue) == "expired"
    assert balance(ledger, "user:1", "rate")["level"] == 1
    assert outcome(ledger, "adjust", key, {"cost": 11}) == "refused:rate"


def test_slots_are_whole(ledger: Connection) -> None:
    slots(ledger, "user:1", 5)
    key = hold(ledger, "user:1", {"usd": 1, "concurrency": 2})
    for amount in ("2.5", "1.5"):
        with misuse(ledger, "invalid_amount", amount):
            call(ledger, "adjust", key, {"concurrency": amount})
    call(ledger, "adjust", key, {"concurrency": 5})
    assert balance(ledger, "user:1", "slots")["reserved"] == 5


def test_amounts_are_looked_at_before_the_state(ledger: Connection) -> None:
    slots(ledger, "user:1", 5)
    key = hold(ledger, "user:1", {"usd": 1, "concurrency": 1})
    call(ledger, "settle", key)
    with misuse(ledger, "invalid_amount", "2.5"):
        call(ledger, "adjust", key, {"concurrency": 2.5})
    with misuse(ledger, "already_settled"):
        call(ledger, "adjust", key, {"concurrency": 2})


def test_a_removed_limit_takes_no_test_of_what_is_added(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "remove_limit", "user:1", "cap")
    assert outcome(ledger, "adjust", key, {"usd": 60}) == "ok"
    call(ledger, "settle", key, {"usd": 55})


def test_extend_is_now_and_ttl_and_never_earlier(ledger: Connection) -> None:
    """A15: renewals while working."""
    key = hold(ledger, "user:1", {"usd": 10}, ttl="10 minutes")
    first = value(ledger, "SELECT expires_at FROM quota.holds")
    assert call(ledger, "extend", key, "1 second") == {"expires_at": first}
    advance(ledger, "9 minutes")
    assert value(
        ledger,
        "SELECT %s = quota_internal.clock() + interval '10 minutes'",
        call(ledger, "extend", key, "10 minutes")["expires_at"],
    )
    advance(ledger, "9 minutes")
    assert call(ledger, "reap")["released"] == 0
    advance(ledger, "1 minute")
    with misuse(ledger, "expired", str(key)):
        call(ledger, "extend", key, "10 minutes")
