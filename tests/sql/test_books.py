"""reap, balance, check, repair, retain: the ledger clears up after others, shows itself and proves itself."""

from __future__ import annotations

import pytest

from tests.conftest import assert_balanced
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
    reserve,
    rows,
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


@pytest.mark.parametrize("most", [0, -1, None])
def test_a_reaper_closes_at_least_one(ledger: Connection, most: int | None) -> None:
    with misuse(ledger, "invalid_argument", "null" if most is None else str(most)):
        call(ledger, "reap", most)


@pytest.mark.parametrize("most", [0, -1])
def test_retention_takes_at_least_one(ledger: Connection, most: int) -> None:
    with misuse(ledger, "invalid_argument", str(most)):
        call(ledger, "retain", most)


def test_charge_is_per_limit_and_stricter_per_reservation(ledger: Connection) -> None:
    budget(ledger, "user:1", 50, "money", on_expiry="charge")
    released, charged = hold(ledger, "user:1", {"usd": 10}), hold(ledger, "user:1", {"usd": 7}, on_expiry="charge")
    lenient = hold(ledger, "user:1", {"usd": 5}, on_expiry="release")
    call(ledger, "settle", charged, {"usd": 3}, False)
    advance(ledger, "10 minutes")
    assert call(ledger, "reap") == {"released": 0, "charged": 3}
    assert spent_reserved(ledger, "user:1", "money") == (22, 0)
    assert spent_reserved(ledger, "user:1") == (7, 0)
    assert entries(ledger, released) == [("charge", 10)]
    assert entries(ledger, lenient) == [("charge", 5)]


def test_expiry_returns_to_the_window_and_the_bucket_it_was_taken_from(ledger: Connection) -> None:
    budget(ledger, "user:2", 50, period="1 hour")
    bucket(ledger, "user:2", 10, 0)
    slots(ledger, "user:2", 1)
    hold(ledger, "user:2", {"usd": 40, "cost": 4}, ttl="2 hours")
    advance(ledger, "1 hour")
    hold(ledger, "user:2", {"usd": 30, "concurrency": 0}, ttl="2 hours")
    advance(ledger, "1 hour")
    call(ledger, "reap")
    assert balance(ledger, "user:2", "rate")["level"] == 10
    assert balance(ledger, "user:2", "slots")["reserved"] == 0


def test_reap_of_one_tenant_leaves_the_others(ledger: Connection) -> None:
    call(ledger, "create_tenant", "acme")
    budget(ledger, "user:1", 50, tenant="acme")
    for tenant in ("default", "acme"):
        hold(ledger, "user:1", {"usd": 1}, tenant=tenant)
    advance(ledger, "10 minutes")
    assert call(ledger, "reap", tenant="acme")["released"] == 1
    assert call(ledger, "reap")["released"] == 1


# -- balance ----------------------------------------------------------------------------------------------------------


def test_balance_has_a_row_per_limit_on_the_lineage(ledger: Connection) -> None:
    call(ledger, "ensure_subject", "run:1", "user:1")
    budget(ledger, "run:1", None, "all", period="day")
    bucket(ledger, "run:1", 10, 4)
    shown = [(row["subject"], row["limit_name"], row["kind"]) for row in rows(ledger, "balance", "run:1")]
    assert shown == [("run:1", "all", "budget"), ("run:1", "rate", "bucket"), ("user:1", "cap", "budget")]
    hold(ledger, "run:1", {"cost": 5, "usd": 20})
    row = balance(ledger, "run:1", "rate")
    assert [row[key] for key in ("spent", "reserved", "level", "available", "full_after_s")][2:] == [5, 5, "1.25"] or (
        row["spent"],
        row["level"],
        row["available"],
        float(row["full_after_s"]),
    ) == (None, 5, 5, 1.25)
    unlimited = balance(ledger, "run:1", "all")
    assert (unlimited["capacity"], unlimited["available"], unlimited["reserved"]) == (None, None, 20)
    assert unlimited["window_end"] - unlimited["window_start"]
    budget(ledger, "user:1", 10)
    assert balance(ledger, "run:1", owner="user:1")["available"] == 0


def test_an_overdue_hold_returns_to_a_bucket_by_the_numbers_in_force(ledger: Connection) -> None:
    """A tier changed after the hold, and nobody has reserved since: `balance` shows what the sweep will leave."""
    call(ledger, "ensure_subject", "key:1")
    call(ledger, "set_tier_limit", "basic", "bucket", "cost", "bucket", 5, 3000, tenant="default")
    hold(ledger, "key:1", {"cost": 5}, ttl="1 second")
    call(ledger, "retire_tier", "basic", tenant="default")  # back to the built-in 1,000,000
    advance(ledger, "1 second")
    shown = balance(ledger, "key:1", "bucket")
    assert (shown["level"], shown["reserved"]) == (3005, 0)
    assert call(ledger, "reap")["released"] == 1
    assert balance(ledger, "key:1", "bucket") == shown


# -- check and repair -------------------------------------------------------------------------------------------------

DAMAGES = [
    ("UPDATE quota_internal.accounts SET reserved = reserved + 1 WHERE kind = 'budget'", "reserved_matches_holds"),
    ("UPDATE quota_internal.accounts SET spent = spent + 1 WHERE kind = 'budget'", "spent_matches_entries"),
    ("UPDATE quota_internal.accounts SET reserved = 5 WHERE kind = 'concurrency'", "slots_match_holds"),
    ("UPDATE quota_internal.accounts SET level = -1 WHERE kind = 'bucket'", "level_in_range"),
    ("UPDATE quota_internal.accounts SET spent = -1 WHERE kind = 'budget'", "nothing_negative"),
    ("UPDATE quota_internal.reservations SET line_booked = ARRAY[7, 7, 7]", "outcome_matches_entries"),
]


@pytest.mark.parametrize(("damage", "invariant"), DAMAGES, ids=[invariant for _, invariant in DAMAGES])
def test_check_notices(ledger: Connection, damage: str, invariant: str) -> None:
    bucket(ledger, "user:1", 10, 0)
    slots(ledger, "user:1", 9)
    call(ledger, "settle", hold(ledger, "user:1", {"usd": 10, "cost": 1}), {"usd": 4})
    hold(ledger, "user:1", {"usd": 3, "cost": 1})
    assert_balanced(ledger)
    with ledger.transaction(force_rollback=True):
        ledger.execute(damage.encode())
        assert invariant in {row["invariant"] for row in rows(ledger, "check")}


@pytest.mark.parametrize(
    "damage", [damage for damage, invariant in DAMAGES if invariant.endswith(("holds", "entries"))][:3]
)
def test_repair_rebuilds_the_counters_and_enters_it(ledger: Connection, damage: str) -> None:
    """G6."""
    slots(ledger, "user:1", 9)
    call(ledger, "settle", hold(ledger, "user:1", {"usd": 10}), {"usd": 4})
    hold(ledger, "user:1", {"usd": 3})
    before = spent_reserved(ledger, "user:1")
    ledger.execute(damage.encode())
    repaired = rows(ledger, "repair")
    assert len(repaired) == 1
    assert repaired[0]["was"] != repaired[0]["is_now"]
    assert spent_reserved(ledger, "user:1") == before
    assert value(ledger, "SELECT count(*) FROM quota.entries WHERE kind = 'repair' AND signed_amount = 0") == 1
    assert rows(ledger, "repair") == []


def test_check_is_right_with_overdue_holds_about(ledger: Connection) -> None:
    hold(ledger, "user:1", {"usd": 10}, on_expiry="charge")
    hold(ledger, "user:1", {"usd": 10})
    advance(ledger, "10 minutes")
    assert rows(ledger, "check") == []
    assert spent_reserved(ledger, "user:1") == (10, 0)


# -- retention --------------------------------------------------------------------------------------------------------


def test_retention_carries_what_still_counts(ledger: Connection) -> None:
    budget(ledger, "user:1", 50, "month", period="1 month")
    old = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", old, {"usd": 6})
    young = hold(ledger, "user:1", {"usd": 10}, ttl="24 hours")
    advance(ledger, "31 days")
    call(ledger, "reap")
    call(ledger, "settle", young, {"usd": 1})
    kept = hold(ledger, "user:1", {"usd": 2})
    before = spent_reserved(ledger, "user:1")
    assert call(ledger, "retain") == {"reservations": 1, "entries": 1, "carried": 1}
    assert spent_reserved(ledger, "user:1") == before == (7, 2)
    assert_balanced(ledger)
    assert call(ledger, "retain") == {"reservations": 0, "entries": 0, "carried": 0}
    # Beyond `keep` an id is new.
    assert reserve(ledger, "user:1", {"usd": 1}, id=old)["replayed"] is False
    assert outcome(ledger, "settle", kept) == "ok"


def test_repair_after_retention_counts_the_carried(ledger: Connection) -> None:
    call(ledger, "settle", hold(ledger, "user:1", {"usd": 10}))
    advance(ledger, "31 days")
    call(ledger, "retain")
    ledger.execute("UPDATE quota_internal.accounts SET spent = 0")
    assert len(rows(ledger, "repair")) == 1
    assert spent_reserved(ledger, "user:1") == (10, 0)
