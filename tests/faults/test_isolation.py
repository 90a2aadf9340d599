"""Above READ COMMITTED a stale snapshot fails as 40001, never as a wrong answer; a hold ends with its transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    advance,
    bucket,
    budget,
    call,
    entries,
    hold,
    new_id,
    outcome,
    reserve,
    set_clock,
    slots,
    spent_reserved,
    state,
    value,
)

LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]


def _in_an_old_snapshot(
    database: str, level: str, meanwhile: Callable[[], object], act: Callable[[Connection], Any]
) -> Any:
    """What `act` answers in a transaction whose snapshot is older than what happened `meanwhile`; or its SQLSTATE."""
    with connect(database) as connection:
        try:
            with connection.transaction():
                connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
                connection.execute("SELECT count(*) FROM quota_internal.accounts")
                meanwhile()
                return act(connection)
        except psycopg.Error as error:
            return error.sqlstate


@pytest.mark.parametrize("level", LEVELS)
def test_no_grant_by_a_stale_snapshot(database: str, conn: Connection, level: str) -> None:
    budget(conn, "user:1")
    answer = _in_an_old_snapshot(
        database, level, lambda: hold(conn, "user:1", {"usd": 50}), lambda c: reserve(c, "user:1", {"usd": 50})
    )
    assert answer == "40001"
    assert spent_reserved(conn, "user:1") == (0, 50)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reason", ["held", "exhausted", "rate", "concurrency", "too_large", "frozen"])
def test_no_refusal_by_a_stale_snapshot(database: str, conn: Connection, level: str, reason: str) -> None:
    """What stood in the way in the snapshot is gone since: the refusal would be wrong."""
    set_clock(conn, NOON)
    budget(conn, "user:1")
    costs: dict[str, Any] = {"usd": 50}
    if reason == "held":
        key = hold(conn, "user:1", costs)
        meanwhile: Callable[[], object] = lambda: call(conn, "release", key)  # noqa: E731
    elif reason == "exhausted":
        call(conn, "record", "user:1", costs)
        booked = value(conn, "SELECT reservation FROM quota.reservations WHERE outcome = 'record'")
        meanwhile = lambda: call(conn, "credit", booked, costs, "a mistake")  # noqa: E731
    elif reason == "rate":
        bucket(conn, "user:1", 10, 0)
        costs = {"cost": 10}
        key = hold(conn, "user:1", costs)
        meanwhile = lambda: call(conn, "release", key)  # noqa: E731
    elif reason == "concurrency":
        slots(conn, "user:1", 1)
        key = hold(conn, "user:1", {"usd": 0})
        meanwhile = lambda: call(conn, "release", key)  # noqa: E731
    elif reason == "too_large":
        costs = {"usd": 60}
        meanwhile = lambda: budget(conn, "user:1", 60)  # noqa: E731
    else:
        call(conn, "freeze", "user:1", "why")
        meanwhile = lambda: call(conn, "unfreeze", "user:1")  # noqa: E731
    assert reserve(conn, "user:1", costs)["reason"] == reason
    assert _in_an_old_snapshot(database, level, meanwhile, lambda c: reserve(c, "user:1", costs)) == "40001"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("operation", "change"),
    [("reserve", change) for change in ("cap", "kind", "tier", "freeze", "freeze_parent", "move", "retire")]
    + [("adjust", change) for change in ("cap", "kind", "tier", "freeze", "freeze_parent")],
)
def test_no_decision_by_old_limits_or_an_old_tree(
    database: str, conn: Connection, level: str, change: str, operation: str
) -> None:
    call(conn, "create_subject", "org:a")
    call(conn, "create_subject", "org:b")
    budget(conn, "org:b", 1)
    call(conn, "create_subject", "key:1", "org:a", "bulk")
    budget(conn, "key:1", 50)
    budget(conn, "key:*", 50, "kind")
    key = hold(conn, "key:1", {"usd": 1, "cost": 1}) if operation == "adjust" else None
    changes: dict[str, Callable[[], object]] = {
        "cap": lambda: budget(conn, "key:1", 5),
        "kind": lambda: budget(conn, "key:*", 5, "kind"),
        "tier": lambda: call(conn, "set_rate_tier", "key:1", "basic"),
        "freeze": lambda: call(conn, "freeze", "key:1", "why"),
        "freeze_parent": lambda: call(conn, "freeze", "org:a", "why"),
        "move": lambda: call(conn, "move_subject", "key:1", "org:b"),
        "retire": lambda: call(conn, "retire_subject", "key:1"),
    }
    costs = {"usd": 10, "cost": 1_500_000}

    def act(connection: Connection) -> Any:
        if key is None:
            return reserve(connection, "key:1", costs)
        return call(connection, "adjust", key, costs)

    assert _in_an_old_snapshot(database, level, changes[change], act) == "40001"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("closing", ["settle", "release", "expired"])
def test_no_replay_of_a_hold_that_was_closed_since(database: str, conn: Connection, level: str, closing: str) -> None:
    """`granted` is true only while the hold is open."""
    set_clock(conn, NOON)
    budget(conn, "user:1")
    key = hold(conn, "user:1", {"usd": 10}, ttl="1 minute")

    def close() -> None:
        if closing == "expired":
            advance(conn, "1 minute")
            call(conn, "reap")
        else:
            call(conn, closing, key)

    answer = _in_an_old_snapshot(database, level, close, lambda c: reserve(c, "user:1", {"usd": 10}, id=key))
    assert answer == "40001"


@pytest.mark.parametrize("level", LEVELS)
def test_no_second_hold_of_an_id_that_was_taken_since(database: str, conn: Connection, level: str) -> None:
    budget(conn, "user:1")
    key = new_id()
    answer = _in_an_old_snapshot(
        database,
        level,
        lambda: hold(conn, "user:1", {"usd": 10}, id=key),
        lambda c: reserve(c, "user:1", {"usd": 10}, id=key),
    )
    assert answer == "40001"
    assert spent_reserved(conn, "user:1") == (0, 10)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("operation", ["settle", "release", "adjust", "extend", "credit"])
def test_no_second_close_by_a_stale_snapshot(database: str, conn: Connection, level: str, operation: str) -> None:
    set_clock(conn, NOON)
    budget(conn, "user:1", 50, period="day")
    key = hold(conn, "user:1", {"usd": 10}, ttl="1 day")
    if operation == "credit":
        call(conn, "settle", key)
        advance(conn, "1 day")
        call(conn, "record", "user:1", {"usd": 1})  # the window that the hold was booked in is not the current one
    first = {"credit": lambda: call(conn, "credit", key, {"usd": 7}, "why")}.get(
        operation, lambda: call(conn, "settle", key)
    )

    def act(connection: Connection) -> Any:
        args: dict[str, tuple[Any, ...]] = {
            "adjust": ({"usd": 11},),
            "extend": ("1 day",),
            "credit": ({"usd": 7}, "why"),
        }
        return call(connection, operation, key, *args.get(operation, ()))

    assert _in_an_old_snapshot(database, level, first, act) == "40001"


@pytest.mark.parametrize("level", LEVELS)
def test_a_reaper_in_an_old_snapshot_closes_nothing_twice(database: str, conn: Connection, level: str) -> None:
    set_clock(conn, NOON)
    budget(conn, "user:1", on_expiry="charge")
    key = hold(conn, "user:1", {"usd": 10}, ttl="1 minute")
    advance(conn, "1 minute")
    answer = _in_an_old_snapshot(database, level, lambda: call(conn, "reap"), lambda c: call(c, "reap"))
    assert answer in ("40001", {"released": 0, "charged": 0})
    assert entries(conn, key) == [("charge", 10)]


@pytest.mark.parametrize("level", ["READ COMMITTED", *LEVELS])
def test_undisturbed_every_level_works(database: str, conn: Connection, level: str) -> None:
    budget(conn, "user:1")
    with connect(database) as other:
        other.execute(f"SET default_transaction_isolation = '{level.lower()}'".encode())
        key = hold(other, "user:1", {"usd": 10})
        assert outcome(other, "reserve", "user:1", {"usd": 41}) == "refused:held"
        assert outcome(other, "adjust", key, {"usd": 20}) == "ok"
        assert outcome(other, "settle", key, {"usd": 15}) == "ok"
        call(other, "credit", key, {"usd": 5}, "why")
        call(other, "record", "user:1", {"usd": 1})
        assert outcome(other, "reserve", "user:1", {"usd": 40}) == "refused:exhausted"
    assert spent_reserved(conn, "user:1") == (11, 0)


# -- within the caller's own transaction ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["READ COMMITTED", *LEVELS])
def test_a_hold_appears_and_vanishes_with_the_callers_transaction(database: str, conn: Connection, level: str) -> None:
    budget(conn, "user:1")
    before = value(conn, "SELECT a::text FROM quota_internal.accounts a")
    with connect(database) as other:
        other.execute(f"SET default_transaction_isolation = '{level.lower()}'".encode())
        with other.transaction(force_rollback=True):
            hold(other, "user:1", {"usd": 50})
            assert spent_reserved(other, "user:1") == (0, 50)
            assert spent_reserved(conn, "user:1") == (0, 0)
        assert value(conn, "SELECT a::text FROM quota_internal.accounts a") == before
        with other.transaction():
            key = hold(other, "user:1", {"usd": 50})
            with other.transaction(force_rollback=True):
                call(other, "settle", key)
            assert state(other, key) == "held"
    assert spent_reserved(conn, "user:1") == (0, 50)


def test_a_transaction_opened_long_ago_reserves_by_the_present_time(database: str, conn: Connection) -> None:
    """L17: the caller's now() is a minute old; the refill and the expiry are of this moment."""
    bucket(conn, "user:1", 60, 1)
    key = hold(conn, "user:1", {"cost": 60})
    with connect(database) as other, other.transaction():
        before = value(other, "SELECT now()")
        value(conn, "SELECT count(pg_sleep(1.1))")
        answer = reserve(other, "user:1", {"cost": 1}, ttl="1 second")
        assert answer["granted"], "what a second refilled is there"
        assert value(other, "SELECT extract(epoch FROM %s - %s) > 2", answer["expires_at"], before)
    assert isinstance(key, UUID)
