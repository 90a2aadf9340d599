"""Limits, tiers, freezes and moves that commit while a reserve waits for an account: no grant by the old state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server import Connection, connect
from tests.sql.kit import Background, budget, call, hold, outcome, spent_reserved

# What changes, in a transaction of its own, and what the waiting reserve of 40 usd and 1,500,000 cost then comes to.
CHANGES: dict[str, tuple[Callable[[Connection], object], str]] = {
    "cap": (lambda c: budget(c, "key:1", 30), "refused:too_large"),
    "parent_cap": (lambda c: budget(c, "org:a", 30), "refused:too_large"),
    "kind_default": (lambda c: budget(c, "key:*", 30, "default"), "refused:too_large"),
    "new_limit": (lambda c: budget(c, "key:1", 30, "new"), "refused:too_large"),
    "new_kind_default": (lambda c: budget(c, "key:*", 30, "new"), "refused:too_large"),
    "removed_own_limit": (lambda c: call(c, "remove_limit", "key:1", "own"), "refused:too_large"),
    "tier": (lambda c: call(c, "set_rate_tier", "key:1", "basic"), "refused:too_large"),
    "tier_numbers": (
        lambda c: call(c, "set_tier_limit", "bulk", "bucket", "cost", "bucket", 1, 1, tenant="default"),
        "refused:too_large",
    ),
    "tier_retired": (lambda c: call(c, "retire_tier", "bulk"), "refused:too_large"),
    "frozen": (lambda c: call(c, "freeze", "key:1", "why"), "refused:frozen"),
    "parent_frozen": (lambda c: call(c, "freeze", "org:a", "why"), "refused:frozen"),
    "required": (lambda c: budget(c, "org:a", 30, "must", "tokens", required=True), "unit_missing"),
    "ttl_maximum": (lambda c: call(c, "configure_tenant", "default", "1 minute"), "invalid_ttl"),
}
# The first in the order of locks: whoever waits for it holds no other.
ACCOUNT = "SELECT FROM quota_internal.accounts WHERE subject = 'key:1' AND limit_name = 'bucket' FOR NO KEY UPDATE"


@pytest.fixture
def ledger(conn: Connection) -> Connection:
    for parent, capacity in (("org:a", 50), ("org:b", 30)):
        call(conn, "create_subject", parent)
        budget(conn, parent, capacity)
    call(conn, "create_subject", "key:1", "org:a", "bulk")
    budget(conn, "key:1", 50)
    budget(conn, "key:1", 50, "own")
    budget(conn, "key:*", 50, "default")
    budget(conn, "key:*", 30, "own")
    call(conn, "release", hold(conn, "key:1", {"usd": 0, "cost": 0}))  # all accounts carry what is in force
    return conn


def _waits(
    ledger: Connection, database: str, change: Callable[[Connection], object], commit_first: bool, batch: bool
) -> str:
    """What a reserve comes to that waited for the account while the change committed, or was still in flight."""
    with connect(database) as holder, connect(database) as admin:
        with holder.transaction():
            holder.execute(ACCOUNT)
            waiting = Background(database, "reserve", "key:1", {"usd": 40, "cost": 1_500_000}, batch=batch)
            waiting.must_block(ledger)
            if commit_first:
                changing = admin
                admin.execute("SET lock_timeout = '5s'")
            else:
                changing = holder  # the holder of the lock is the one who changes: both commit at once
            change(changing)
        return waiting.word()


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("name", [*CHANGES])
def test_no_grant_by_what_was_in_force_before(ledger: Connection, database: str, name: str, batch: bool) -> None:
    change, expected = CHANGES[name]
    assert _waits(ledger, database, change, commit_first=False, batch=batch) == expected
    assert spent_reserved(ledger, "key:1", "default") == (0, 0)


# Those that need no lock of an account commit while it is held by somebody else.
@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize(
    "name", ["parent_cap", "kind_default", "tier_numbers", "tier_retired", "frozen", "parent_frozen"]
)
def test_no_grant_by_what_was_in_force_before_the_lock_was_free(
    ledger: Connection, database: str, name: str, batch: bool
) -> None:
    change, expected = CHANGES[name]
    assert _waits(ledger, database, change, commit_first=True, batch=batch) == expected


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: call(c, "move_subject", "key:1", "org:b"), "refused:too_large"),
        (lambda c: call(c, "retire_subject", "key:1"), "unknown_subject"),
    ],
    ids=["moved", "retired"],
)
def test_no_grant_on_an_old_lineage(ledger: Connection, database: str, change: Any, expected: str, batch: bool) -> None:
    assert _waits(ledger, database, change, commit_first=False, batch=batch) == expected


def test_a_raised_cap_is_seen_by_whoever_waited(ledger: Connection, database: str) -> None:
    hold(ledger, "key:1", {"usd": 20})
    with connect(database) as admin:
        with admin.transaction():
            admin.execute(ACCOUNT)
            for owner, name in (("key:1", "cap"), ("key:1", "own"), ("org:a", "cap"), ("key:*", "default")):
                budget(admin, owner, 100, name)
            waiting = Background(database, "record", "key:1", {"usd": 40})
            waiting.must_block(ledger)
        assert waiting.word() == "ok"
    assert outcome(ledger, "reserve", "key:1", {"usd": 40}) == "ok"


@pytest.mark.parametrize("operation", ["move_subject", "retire_subject"])
def test_a_move_waits_for_a_hold_in_flight_and_is_then_refused(
    ledger: Connection, database: str, operation: str
) -> None:
    args = ("key:1", "org:b") if operation == "move_subject" else ("key:1",)
    with connect(database) as other:
        with other.transaction():
            hold(other, "key:1", {"usd": 1, "cost": 1})
            waiting = Background(database, operation, *args)
            waiting.must_block(ledger)
        assert waiting.word() == "has_open_holds"


def test_an_adjust_that_waits_sees_the_freeze(ledger: Connection, database: str) -> None:
    key = hold(ledger, "key:1", {"usd": 1, "cost": 1})
    with connect(database) as other:
        with other.transaction():
            other.execute(ACCOUNT)
            waiting = Background(database, "adjust", key, {"usd": 2})
            waiting.must_block(ledger)
            call(other, "freeze", "org:a", "why")
        assert waiting.word() == "refused:frozen"


def test_an_adjust_that_waits_sees_the_lower_cap(ledger: Connection, database: str) -> None:
    key = hold(ledger, "key:1", {"usd": 1, "cost": 1})
    with connect(database) as other:
        with other.transaction():
            other.execute(ACCOUNT)
            waiting = Background(database, "adjust", key, {"usd": 40})
            waiting.must_block(ledger)
            budget(other, "key:1", 30)
        assert waiting.word() in {"refused:too_large", "refused:exhausted", "refused:held"}
    assert spent_reserved(ledger, "key:1") == (0, 1)
