"""set_limit, remove_limit, tiers and tenants: definitions, their shapes, and which one is in force."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    advance,
    balance,
    budget,
    call,
    hold,
    misuse,
    new_id,
    outcome,
    reserve,
    rows,
    set_clock,
    slots,
    spent_reserved,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    for name in ("key:1", "oauth:1", "user:1"):
        call(tx_conn, "create_subject", name)
    return tx_conn


BAD_LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("unknown_unit", {"unit": "eur"}),
    ("unknown_unit", {"unit": None}),
    ("unknown_subject", {"subject": "user:9"}),
    ("invalid_name", {"subject": "nobody"}),
    ("invalid_name", {"subject": "User:*"}),
    ("invalid_name", {"name": None}),
    ("invalid_argument", {"kind": "window"}),
    ("invalid_argument", {"kind": None}),
    ("invalid_argument", {"kind": "bucket"}),
    ("invalid_argument", {"kind": "bucket", "capacity": None, "refill_per_s": 1}),
    ("invalid_argument", {"kind": "bucket", "refill_per_s": 1, "period": "day"}),
    ("invalid_argument", {"kind": "budget", "refill_per_s": 1}),
    ("invalid_argument", {"kind": "concurrency", "capacity": None}),
    ("invalid_argument", {"kind": "concurrency", "capacity": "1.5"}),
    ("invalid_argument", {"kind": "concurrency", "period": "day"}),
    ("invalid_argument", {"time_zone": "Mars/Olympus"}),
    ("invalid_argument", {"time_zone": "UTC+3"}),
    ("invalid_argument", {"time_zone": None}),
    ("invalid_argument", {"period": ""}),
    ("invalid_argument", {"period": "year"}),
    ("invalid_argument", {"period": "0 seconds"}),
    ("invalid_argument", {"period": "-1 hour"}),
    ("invalid_argument", {"period": "1 month -1 day"}),
    ("invalid_argument", {"period": "infinity"}),
    ("invalid_argument", {"period": "1000 years"}),
    ("invalid_argument", {"on_expiry": "keep"}),
    ("invalid_argument", {"on_expiry": None}),
    ("invalid_argument", {"required": None}),
    ("invalid_amount", {"capacity": "NaN"}),
    ("invalid_amount", {"capacity": "Infinity"}),
    ("invalid_amount", {"capacity": "-Infinity"}),
    ("invalid_amount", {"capacity": -1}),
    ("invalid_amount", {"capacity": "0.0000000000001"}),
    ("amount_out_of_range", {"capacity": "1000000000000000000"}),
    ("invalid_amount", {"kind": "bucket", "refill_per_s": "NaN"}),
    ("invalid_amount", {"kind": "bucket", "refill_per_s": "Infinity"}),
    ("invalid_amount", {"kind": "bucket", "refill_per_s": -1}),
    ("invalid_amount", {"kind": "concurrency", "capacity": "NaN"}),
]


@pytest.mark.parametrize(("error", "changes"), BAD_LIMITS, ids=str)
def test_a_bad_definition(ledger: Connection, error: str, changes: dict[str, Any]) -> None:
    """A25, L25: NaN is no cap, whoever calls."""
    good: dict[str, Any] = {"subject": "user:1", "name": "cap", "unit": "usd", "kind": "budget", "capacity": 1}
    with misuse(ledger, error):
        call(ledger, "set_limit", **(good | changes))
    if not {"subject", "on_expiry", "required", "time_zone"} & set(changes):
        with misuse(ledger, error):
            call(ledger, "set_tier_limit", "own", **({k: v for k, v in (good | changes).items() if k != "subject"}))


@pytest.mark.parametrize(
    "changes",
    [{"unit": "tokens"}, {"kind": "bucket", "refill_per_s": 1}, {"period": "day"}, {"time_zone": "Asia/Tokyo"}],
)
@pytest.mark.parametrize("owners", [("user:1", "user:1"), ("user:*", "user:1"), ("user:1", "user:*")])
def test_a_limit_keeps_its_shape(ledger: Connection, owners: tuple[str, str], changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"name": "cap", "unit": "usd", "kind": "budget", "capacity": 1}
    call(ledger, "set_limit", owners[0], **good)
    with misuse(ledger, "limit_differs", "cap"):
        call(ledger, "set_limit", owners[1], **(good | changes))
    call(ledger, "remove_limit", owners[0], "cap")
    with misuse(ledger, "limit_differs", "cap"):
        call(ledger, "set_limit", owners[1], **(good | changes))


def test_own_before_tier_before_kind(ledger: Connection) -> None:
    for owner, capacity in (("key:*", 10), ("key:1", 30)):
        call(ledger, "set_limit", owner, "hourly", "cost", "budget", capacity, period="1 hour")
    assert balance(ledger, "key:1", "hourly")["capacity"] == 30
    call(ledger, "remove_limit", "key:1", "hourly")
    assert balance(ledger, "key:1", "hourly")["capacity"] == 2_000_000
    budget(ledger, "user:*", 7)
    assert balance(ledger, "user:1")["capacity"] == 7
    budget(ledger, "user:1", 9)
    assert balance(ledger, "user:1")["capacity"] == 9


def test_usage_is_kept_whatever_is_in_force(ledger: Connection) -> None:
    budget(ledger, "user:*", 50)
    hold(ledger, "user:1", {"usd": 10})
    call(ledger, "record", "user:1", {"usd": 5})
    budget(ledger, "user:1", 20)
    assert spent_reserved(ledger, "user:1") == (5, 10)
    call(ledger, "remove_limit", "user:1", "cap")
    assert outcome(ledger, "reserve", "user:1", {"usd": 36}) == "refused:held"


def test_a_removed_limit_takes_no_new_holds_and_lives_until_its_holds_close(ledger: Connection) -> None:
    budget(ledger, "user:1", 50)
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "remove_limit", "user:1", "cap")
    with misuse(ledger, "no_limit", "usd"):
        reserve(ledger, "user:1", {"usd": 1})
    with misuse(ledger, "unknown_limit", "cap", "user:1"):
        call(ledger, "remove_limit", "user:1", "cap")
    call(ledger, "settle", key, {"usd": 4})
    budget(ledger, "user:1", 50)
    assert spent_reserved(ledger, "user:1") == (4, 0)


@pytest.mark.parametrize("name", ["nothing", "hourly", "", None])
def test_an_unknown_limit(ledger: Connection, name: str | None) -> None:
    with misuse(ledger, "unknown_limit", "key:1"):
        call(ledger, "remove_limit", "key:1", name)


def test_a_capacity_of_nothing_refuses_all_and_no_refill_is_a_one_off_allowance(ledger: Connection) -> None:
    """L27."""
    budget(ledger, "user:1", 0)
    answer = reserve(ledger, "user:1", {"usd": 1})
    assert (answer["reason"], answer["retry_after_s"]) == ("too_large", None)
    call(ledger, "set_limit", "user:1", "once", "cost", "bucket", 10, 0)
    call(ledger, "settle", hold(ledger, "user:1", {"cost": 10}))
    answer = reserve(ledger, "user:1", {"cost": 1})
    assert (answer["reason"], answer["retry_after_s"]) == ("rate", None)
    assert balance(ledger, "user:1", "once")["full_after_s"] is None
    slots(ledger, "user:1", 0)
    assert reserve(ledger, "user:1", {"usd": 0})["reason"] == "too_large"


# -- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "numbers"),
    [
        ("basic", (1_000_000, 3_000, 2_000_000)),
        ("extended", (5_000_000, 15_000, 10_000_000)),
        ("bulk", (20_000_000, 60_000, 40_000_000)),
    ],
)
def test_the_three_tiers(ledger: Connection, tier: str, numbers: tuple[int, int, int]) -> None:
    """R5."""
    call(ledger, "create_subject", "key:2", None, tier)
    bucket, hourly = balance(ledger, "key:2", "bucket"), balance(ledger, "key:2", "hourly")
    assert (bucket["capacity"], hourly["capacity"]) == (numbers[0], numbers[2])
    hold(ledger, "key:2", {"cost": numbers[0]})
    advance(ledger, "1 second")
    assert balance(ledger, "key:2", "bucket")["level"] == numbers[1]
    window = balance(ledger, "key:2", "hourly")
    assert (window["window_end"] - window["window_start"]).total_seconds() == 3600


def test_a_key_is_basic_unless_it_says_otherwise_and_a_connection_always(ledger: Connection) -> None:
    """R5, R10."""
    for subject in ("key:1", "oauth:1"):
        assert balance(ledger, subject, "bucket")["capacity"] == 1_000_000
    assert rows(ledger, "balance", "user:1") == []
    with misuse(ledger, "invalid_argument", "oauth:1"):
        call(ledger, "set_rate_tier", "oauth:1", "bulk")
    with misuse(ledger, "invalid_argument", "user:2"):
        call(ledger, "create_subject", "user:2", None, "bulk")
    ledger.execute("UPDATE quota_internal.subjects SET rate_tier = 'nonsense'")
    ledger.execute("UPDATE quota_internal.tenants SET binding_version = binding_version + 1")
    hold(ledger, "key:1", {"cost": 1_000_000})


def test_a_tier_change_keeps_usage(ledger: Connection) -> None:
    """R6: the bucket is cut to the new capacity, hourly use stays."""
    call(ledger, "set_rate_tier", "key:1", "bulk")
    call(ledger, "settle", hold(ledger, "key:1", {"cost": 3_000_000}))
    call(ledger, "set_rate_tier", "key:1", "basic")
    assert balance(ledger, "key:1", "bucket")["level"] == 1_000_000
    hourly = balance(ledger, "key:1", "hourly")
    assert (hourly["spent"], hourly["capacity"], hourly["available"]) == (3_000_000, 2_000_000, 0)
    assert outcome(ledger, "reserve", "key:1", {"cost": 1}) == "refused:exhausted"
    hold(ledger, "key:1", {"cost": 0})
    call(ledger, "set_rate_tier", "key:1", "bulk")
    assert balance(ledger, "key:1", "bucket")["level"] == 1_000_000, "what was cut does not come back"


@pytest.mark.parametrize("tier", ["gold", "", None, "Basic"])
def test_an_unknown_tier(ledger: Connection, tier: str | None) -> None:
    with misuse(ledger, "unknown_tier"):
        call(ledger, "set_rate_tier", "key:1", tier)
    if tier is not None:
        with misuse(ledger, "unknown_tier", tier):
            call(ledger, "create_subject", "key:2", None, tier)
    with misuse(ledger, "unknown_tier"):
        call(ledger, "retire_tier", tier)


def test_a_tenants_own_tier_wins_limit_by_limit_and_ends(ledger: Connection) -> None:
    call(ledger, "set_tier_limit", "bulk", "bucket", "cost", "bucket", 10, 1, tenant="default")
    call(ledger, "set_rate_tier", "key:1", "bulk")
    assert balance(ledger, "key:1", "bucket")["capacity"] == 10
    assert balance(ledger, "key:1", "hourly")["capacity"] == 40_000_000
    call(ledger, "retire_tier", "bulk", "default")
    assert balance(ledger, "key:1", "bucket")["capacity"] == 20_000_000
    call(ledger, "retire_tier", "bulk")
    assert balance(ledger, "key:1", "bucket")["capacity"] == 1_000_000
    with misuse(ledger, "invalid_argument", "basic"):
        call(ledger, "retire_tier", "basic")
    with misuse(ledger, "limit_differs", "bucket"):
        call(ledger, "set_tier_limit", "other", "bucket", "cost", "budget", 10)


# -- tenants and units ------------------------------------------------------------------------------------------------


def test_names_of_tenants_and_units_are_taken_once(ledger: Connection) -> None:
    call(ledger, "create_tenant", "acme")
    call(ledger, "create_unit", "eur", True)
    with misuse(ledger, "already_exists", "acme"):
        call(ledger, "create_tenant", "acme")
    with misuse(ledger, "already_exists", "eur"):
        call(ledger, "create_unit", "eur")
    with misuse(ledger, "invalid_argument", "money"):
        call(ledger, "create_unit", "gbp", None)


def test_nothing_of_one_tenant_touches_anothers(ledger: Connection) -> None:
    call(ledger, "create_tenant", "acme")
    key = new_id()
    for tenant, capacity in (("default", 50), ("acme", 5)):
        budget(ledger, "org:x", capacity, tenant=tenant)
        hold(ledger, "org:x", {"usd": 5}, id=key, tenant=tenant)
    call(ledger, "settle", key, {"usd": 3}, tenant="acme")
    assert spent_reserved(ledger, "org:x") == (0, 5)
    assert spent_reserved(ledger, "org:x", tenant="acme") == (3, 0)
    with misuse(ledger, "unknown_subject", "user:1", "acme"):
        reserve(ledger, "user:1", {"usd": 1}, tenant="acme")


@pytest.mark.parametrize(
    "named",
    [
        {"ttl_maximum": "0"},
        {"ttl_maximum": "-1 hour"},
        {"polling_hint_s": 0},
        {"polling_hint_s": "NaN"},
        {"keep": "-1 day"},
    ],
)
def test_bad_settings_of_a_tenant(ledger: Connection, named: dict[str, Any]) -> None:
    with misuse(ledger, "invalid_argument"):
        call(ledger, "configure_tenant", "default", **named)


def test_a_bond_needs_a_login(ledger: Connection) -> None:
    with misuse(ledger, "invalid_argument", "nobody_at_all"):
        call(ledger, "bind_login", "nobody_at_all", "default")


def test_a_bound_login_learns_nothing_by_the_id_of_anothers_reservation(conn: Connection, database: str) -> None:
    """Neither what it is, nor that it is there: for this login the other tenant does not exist."""
    call(conn, "create_tenant", "acme")
    budget(conn, "user:1", 50)
    key = hold(conn, "user:1", {"usd": 5})
    record = new_id()
    call(conn, "record", "user:1", {"usd": 5}, record)
    me = conn.execute("SELECT session_user").fetchone()
    assert me is not None
    call(conn, "bind_login", me[0], "acme")
    try:
        with connect(database) as bound:
            for function, known in (("reserve", key), ("record", record)):
                for costs in ({"usd": 5}, {"usd": 6}):
                    with misuse(bound, "unknown_tenant", "default"):
                        call(bound, function, "user:1", costs, id=known, tenant="default")
    finally:
        conn.execute("DELETE FROM quota_internal.logins")


def test_amounts_are_shown_without_idle_zeros(ledger: Connection) -> None:
    budget(ledger, "user:1", "50.000")
    call(ledger, "record", "user:1", {"usd": "1.50"})
    row = balance(ledger, "user:1")
    assert (str(row["capacity"]), str(row["spent"])) == ("50", "1.5")
    assert row["available"] == Decimal("48.5")
