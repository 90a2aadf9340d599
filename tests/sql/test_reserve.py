"""reserve: what it takes, what it refuses and why, and the numbers in its answers."""

from __future__ import annotations

from decimal import Decimal
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
    hold,
    misuse,
    nothing_changes,
    outcome,
    reserve,
    set_clock,
    slots,
    spent_reserved,
    value,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    return tx_conn


def test_ten_holds_of_five_fill_a_budget_of_fifty(ledger: Connection) -> None:
    """B1."""
    budget(ledger, "user:1", 50)
    for _ in range(10):
        hold(ledger, "user:1", {"usd": 5})
    with nothing_changes(ledger):
        answer = reserve(ledger, "user:1", {"usd": 5})
    assert (answer["granted"], answer["reason"], answer["limit_subject"], answer["limit_name"], answer["unit"]) == (
        False,
        "held",
        "user:1",
        "cap",
        "usd",
    )
    assert [answer[key] for key in ("capacity", "spent", "reserved", "requested")] == [50, 0, 50, 5]
    assert (answer["reservation"], answer["state"], answer["expires_at"]) == (None, None, None)
    assert len(answer["violations"]) == 1


def test_three_hundred_left_and_two_calls_of_two_hundred(ledger: Connection) -> None:
    """R6b."""
    budget(ledger, "user:1", 300, unit="cost")
    assert [outcome(ledger, "reserve", "user:1", {"cost": 200}) for _ in range(2)] == ["ok", "refused:held"]


@pytest.mark.parametrize("ttl", ["0", "-1 second", None, "24 hours 1 microsecond", "1 year", "infinity"])
def test_a_ttl_of_nothing_or_above_the_maximum(ledger: Connection, ttl: str | None) -> None:
    if ttl == "infinity" and ledger.info.server_version < 170000:
        pytest.skip("intervals without end came with PostgreSQL 17; older ones refuse the word itself")
    budget(ledger, "user:1", 50)
    key = hold(ledger, "user:1", {"usd": 1})
    with misuse(ledger, "invalid_ttl"):
        reserve(ledger, "user:1", {"usd": 1}, ttl=ttl)
    with misuse(ledger, "invalid_ttl"):
        call(ledger, "extend", key, ttl)


def test_the_longest_ttl_is_a_setting(ledger: Connection) -> None:
    budget(ledger, "user:1", 50)
    key = hold(ledger, "user:1", {"usd": 1}, ttl="24 hours")
    call(ledger, "configure_tenant", "default", ttl_maximum="1 hour")
    with misuse(ledger, "invalid_ttl", "01:00:01", "01:00:00"):
        reserve(ledger, "user:1", {"usd": 1}, ttl="1 hour 1 second")
    with misuse(ledger, "invalid_ttl"):
        call(ledger, "extend", key, "2 hours")
    hold(ledger, "user:1", {"usd": 1}, ttl="1 hour")


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"headroom": 1}, "1"),
        ({"headroom": "-0.1"}, "-0.1"),
        ({"headroom": "NaN"}, "NaN"),
        ({"headroom": None}, "null"),
        ({"on_expiry": "keep"}, "keep"),
        ({"details": "[]"}, "[]"),
        ({"details": None}, "null"),
        ({"also": None}, "null"),
        ({"also": ["user:1", None]}, "null"),
    ],
)
def test_an_invalid_argument(ledger: Connection, named: dict[str, Any], word: str) -> None:
    budget(ledger, "user:1", 50)
    with misuse(ledger, "invalid_argument", word):
        reserve(ledger, "user:1", {"usd": 1}, **named)


def test_a_required_limit_wants_its_unit(ledger: Connection) -> None:
    budget(ledger, "user:1", 50)
    budget(ledger, "user:1", 50, "must", "tokens", required=True)
    with misuse(ledger, "unit_missing", '"must"', '"user:1"', '"tokens"'):
        reserve(ledger, "user:1", {"usd": 1})
    hold(ledger, "user:1", {"usd": 1, "tokens": 0})


def test_a_slot_is_whole(ledger: Connection) -> None:
    slots(ledger, "user:1", 2)
    budget(ledger, "user:1", 50)
    with misuse(ledger, "invalid_amount", "1.5"):
        reserve(ledger, "user:1", {"usd": 1, "concurrency": "1.5"})


def test_exactly_full_fits_and_nothing_fits_anywhere(ledger: Connection) -> None:
    """D34, semantics: one comparison, a cost of 0 is not compared."""
    budget(ledger, "user:1", "0.3")
    for _ in range(3):
        hold(ledger, "user:1", {"usd": "0.1"})
    assert outcome(ledger, "reserve", "user:1", {"usd": "0.000000000001"}) == "refused:held"
    assert outcome(ledger, "reserve", "user:1", {"usd": 0}) == "ok"
    budget(ledger, "user:2", 0)
    assert outcome(ledger, "reserve", "user:2", {"usd": 0}) == "ok"
    assert outcome(ledger, "reserve", "user:2", {"usd": "0.000000000001"}) == "refused:too_large"


def test_unlimited_is_counted_and_never_refused(ledger: Connection) -> None:
    budget(ledger, "user:1", None)
    answer = reserve(ledger, "user:1", {"usd": "999999999999999999"})
    assert (answer["granted"], answer["capacity"], answer["reserved"]) == (True, None, 999999999999999999)


def test_a_charge_to_a_child_is_a_charge_to_every_ancestor_once(ledger: Connection) -> None:
    for name, parent in (("org:a", None), ("user:1", "org:a"), ("key:1", "user:1"), ("key:2", "user:1")):
        call(ledger, "ensure_subject", name, parent)
        budget(ledger, name, 50)
    hold(ledger, "key:1", {"usd": 3}, also=["key:2", "user:1", "key:1", "key:2"])
    reserved = {name: spent_reserved(ledger, name)[1] for name in ("org:a", "user:1", "key:1", "key:2")}
    assert reserved == {"org:a": 3, "user:1": 3, "key:1": 3, "key:2": 3}


@pytest.mark.parametrize("refusing", ["org:a", "user:1", "key:1", "run:1"])
def test_the_one_that_refuses_leaves_all_others_untouched(ledger: Connection, refusing: str) -> None:
    """A03, L7, L8, D25, G14, R4: all or nothing, whichever limit refuses."""
    parent = None
    for name in ("org:a", "user:1", "key:1", "run:1"):
        call(ledger, "ensure_subject", name, parent)
        budget(ledger, name, 10 if name == refusing else 100)
        slots(ledger, name, 10)
        parent = name
    assert outcome(ledger, "reserve", "run:1", {"usd": 8}) == "ok"
    for _ in range(3):
        with nothing_changes(ledger):
            answer = reserve(ledger, "run:1", {"usd": 8})
        assert (answer["granted"], answer["limit_subject"]) == (False, refusing)
    assert outcome(ledger, "reserve", "run:1", {"usd": 2}) == "ok"


def test_requests_and_slots_count_one_unless_the_map_says_otherwise(ledger: Connection) -> None:
    budget(ledger, "user:1", 50)
    budget(ledger, "user:1", 10, "calls", "requests")
    slots(ledger, "user:1", 10)
    hold(ledger, "user:1", {"usd": 1})
    hold(ledger, "user:1", {"usd": 1, "requests": 3, "concurrency": 0})
    assert spent_reserved(ledger, "user:1", "calls") == (0, 4)
    assert balance(ledger, "user:1", "slots")["reserved"] == 1


def test_headroom_leaves_its_share_to_others(ledger: Connection) -> None:
    budget(ledger, "user:1", 10)
    slots(ledger, "user:1", 3)
    assert outcome(ledger, "reserve", "user:1", {"usd": "8.1"}, headroom="0.2") == "refused:too_large"
    hold(ledger, "user:1", {"usd": 8}, headroom="0.2")
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}, headroom="0.2") == "refused:held"
    hold(ledger, "user:1", {"usd": 0}, headroom="0.2")
    hold(ledger, "user:1", {"usd": 0}, headroom="0.2")  # 3 x 0.8 = 2.4, rounded up: 3
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}, headroom="0.9") == "refused:concurrency"


@pytest.mark.parametrize(
    ("reason", "wait"),
    [("too_large", None), ("exhausted", 43200), ("rate", 3), ("concurrency", 1), ("held", 1)],
)
def test_each_reason_with_its_wait(ledger: Connection, reason: str, wait: int | None) -> None:
    budget(ledger, "user:1", 50, period="day")
    costs: dict[str, Any] = {"usd": 10}
    if reason == "too_large":
        costs = {"usd": 51}
    elif reason == "exhausted":
        call(ledger, "record", "user:1", {"usd": 41})
    elif reason == "rate":
        bucket(ledger, "user:1", 10, 1)
        hold(ledger, "user:1", {"cost": 8})
        costs = {"cost": 5}
    elif reason == "concurrency":
        slots(ledger, "user:1", 1)
        hold(ledger, "user:1", {"usd": 1})
    else:
        hold(ledger, "user:1", {"usd": 41})
    with nothing_changes(ledger):
        answer = reserve(ledger, "user:1", costs)
    assert (answer["reason"], answer["retry_after_s"]) == (reason, wait)
    if reason in {"exhausted", "rate"}:
        advance(ledger, f"{wait} seconds")
        advance(ledger, "-1 microsecond")
        assert reserve(ledger, "user:1", costs)["reason"] == reason
        advance(ledger, "1 microsecond")
        assert reserve(ledger, "user:1", costs)["granted"], "waiting exactly that long succeeds"


def test_the_polling_hint_is_a_setting_and_never_past_the_window(ledger: Connection) -> None:
    call(ledger, "configure_tenant", "default", polling_hint_s=5)
    budget(ledger, "user:1", 50, period="day")
    assert call(ledger, "reserve", "user:1", {"usd": 50}, ttl="23 hours")["granted"]
    assert reserve(ledger, "user:1", {"usd": 1})["retry_after_s"] == 5
    set_clock(ledger, "2026-05-04 23:59:58+00")
    assert reserve(ledger, "user:1", {"usd": 1})["retry_after_s"] == 2


def test_the_longest_wait_and_the_first_reason_bind(ledger: Connection) -> None:
    budget(ledger, "user:1", 10, "day", period="day")
    budget(ledger, "user:1", 10, "hour", period="1 hour")
    bucket(ledger, "user:1", 10, 1, "rate", unit="usd")
    hold(ledger, "user:1", {"usd": 10})
    call(ledger, "record", "user:1", {"usd": 1})
    answer = reserve(ledger, "user:1", {"usd": 10})
    assert [(v["limit_name"], v["reason"]) for v in answer["violations"]] == [
        ("day", "exhausted"),
        ("hour", "exhausted"),
        ("rate", "rate"),
    ]
    assert (answer["limit_name"], answer["retry_after_s"]) == ("day", 43200)
    budget(ledger, "user:1", 9, "lifetime")
    answer = reserve(ledger, "user:1", {"usd": 10})
    assert (answer["limit_name"], answer["reason"], answer["retry_after_s"]) == ("lifetime", "too_large", None)


def test_on_a_grant_the_columns_show_the_tightest_limit(ledger: Connection) -> None:
    budget(ledger, "user:1", 100, "a")
    budget(ledger, "user:1", 20, "b")
    budget(ledger, "user:1", None, "c")
    answer = reserve(ledger, "user:1", {"usd": 10})
    assert [answer[key] for key in ("limit_name", "capacity", "spent", "reserved", "requested")] == ["b", 20, 0, 10, 10]
    assert [(r["limit_name"], r["available"]) for r in answer["remaining"]] == [("a", "90"), ("b", "10"), ("c", None)]
    assert answer["violations"] == []


def test_an_overdue_hold_is_in_nobodys_way(ledger: Connection) -> None:
    """D11, B8, L37: whether or not the reaper has run."""
    budget(ledger, "user:1", 10)
    key = hold(ledger, "user:1", {"usd": 10}, ttl="5 seconds")
    advance(ledger, "10 seconds")
    assert balance(ledger, "user:1")["available"] == 10
    hold(ledger, "user:1", {"usd": 10})
    assert value(ledger, "SELECT state FROM quota.reservations WHERE reservation = %s", key) == "expired"


def test_an_overdue_hold_that_charges_counts_as_spent(ledger: Connection) -> None:
    budget(ledger, "user:1", 10)
    hold(ledger, "user:1", {"usd": 6}, ttl="5 seconds", on_expiry="charge")
    advance(ledger, "5 seconds")
    assert spent_reserved(ledger, "user:1") == (6, 0)
    assert outcome(ledger, "reserve", "user:1", {"usd": 5}) == "refused:exhausted"
    assert outcome(ledger, "reserve", "user:1", {"usd": 4}) == "ok"


def test_counters_are_exact(ledger: Connection) -> None:
    """A07."""
    budget(ledger, "user:1", "0.3")
    for _ in range(3):
        call(ledger, "settle", hold(ledger, "user:1", {"usd": "0.1"}))
    assert spent_reserved(ledger, "user:1") == (Decimal("0.3"), 0)


def test_a_generated_id_is_a_uuid_of_version_7(ledger: Connection) -> None:
    budget(ledger, "user:1", 50)
    keys = [hold(ledger, "user:1", {"usd": 1}) for _ in range(3)]
    assert {key.version for key in keys} == {7}


def test_a_grant_shows_the_refund_of_an_overdue_hold_that_it_did_not_need(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0, "rate", unit="usd")
    assert call(ledger, "reserve", "user:1", {"usd": 4}, ttl="1 minute")["granted"]
    set_clock(ledger, "2026-05-04 13:00:00+00")
    answer = reserve(ledger, "user:1", {"usd": 1})
    assert [(row["level"], row["reserved"]) for row in answer["remaining"]] == [("9", "1")]
    assert balance(ledger, "user:1", "rate")["level"] == 9


@pytest.mark.parametrize(("overdue", "shown"), [(20, 0), (21, 21)])
def test_beyond_twenty_overdue_holds_a_grant_shows_them_as_held(ledger: Connection, overdue: int, shown: int) -> None:
    """Adding up the refunds of many would cost the reserve more than itself; what is decided is exact either way."""
    budget(ledger, "user:1", 30)
    for _ in range(overdue):
        hold(ledger, "user:1", {"usd": 1}, ttl="1 minute")
    advance(ledger, "2 minutes")
    assert [row["reserved"] for row in reserve(ledger, "user:1", {"usd": 2})["remaining"]] == [str(shown + 2)]
    assert spent_reserved(ledger, "user:1") == (0, 2)
    assert outcome(ledger, "reserve", "user:1", {"usd": 29}) == "refused:held"
    assert outcome(ledger, "reserve", "user:1", {"usd": 28}) == "ok"


def test_a_reserve_that_binds_accounts_closes_what_is_in_its_way(ledger: Connection) -> None:
    call(ledger, "set_limit", "user:*", "rate", "usd", "bucket", 10, 0)
    call(ledger, "create_subject", "user:2")
    overdue = hold(ledger, "user:2", {"usd": 8}, ttl="1 minute")
    advance(ledger, "2 minutes")
    # The kind's numbers change: the next reserve binds the account anew, and holds its lock then.
    call(ledger, "set_limit", "user:*", "rate", "usd", "bucket", 9, 0)
    hold(ledger, "user:2", {"usd": 9})
    assert value(ledger, "SELECT state FROM quota.reservations WHERE reservation = %s", overdue) == "expired"
