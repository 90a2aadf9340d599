"""Reapers: any number of them, killed at any point; each overdue hold is closed once (A16, D40)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID

import psycopg

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    PATIENCE_S,
    Background,
    advance,
    balance,
    budget,
    call,
    entries,
    hold,
    set_clock,
    snapshot,
    spent_reserved,
    value,
)

HOLDS = 500


def _overdue(conn: Connection, count: int, on_expiry: str = "release") -> UUID:
    """So many holds of 4 are overdue, and one of 5 is open, whose id is returned."""
    set_clock(conn, NOON)
    budget(conn, "user:1", 1_000_000, on_expiry=on_expiry)
    conn.execute(
        "SELECT count(r.granted) FROM generate_series(1, %s) n, quota.reserve('user:1', '{\"usd\": 4}', '1 minute') r"
        " WHERE n > 0",
        (count,),
    )
    assert value(conn, "SELECT count(*) FROM quota.holds") in (1, count)
    while value(conn, "SELECT count(*) FROM quota.holds") < count:
        hold(conn, "user:1", {"usd": 4}, ttl="1 minute")
    open_one = hold(conn, "user:1", {"usd": 5}, ttl="1 hour")
    advance(conn, "1 minute")
    return open_one


def _reap_all(database: str, closed: list[int], batch: int) -> None:
    with connect(database) as connection:
        while count := sum(call(connection, "reap", batch).values()):
            closed.append(count)


def test_four_reapers_close_every_hold_once(conn: Connection, database: str, soaked: Callable[[int, int], int]) -> None:
    for round_ in range(1, soaked(2, 20) + 1):
        open_one = _overdue(conn, HOLDS, "charge")
        closed: list[int] = []
        threads = [threading.Thread(target=_reap_all, args=(database, closed, 50), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sum(closed) == HOLDS
        assert value(conn, "SELECT count(*) FROM quota.entries WHERE kind = 'charge'") == round_ * HOLDS
        assert spent_reserved(conn, "user:1") == (4 * round_ * HOLDS, 5)
        call(conn, "release", open_one)


def test_a_reaper_killed_in_mid_batch_leaves_no_trace_and_the_rest_finish(conn: Connection, database: str) -> None:
    _overdue(conn, 40)
    before = snapshot(conn)
    with connect(database) as other:
        with other.transaction():
            other.execute("SELECT FROM quota_internal.accounts FOR NO KEY UPDATE")
            killed = Background(database, "reap", 20)  # has its holds, waits for their account
            killed.must_block(conn)
            conn.execute("SELECT pg_terminate_backend(%s)", (killed.pid,))
            assert isinstance(killed.result(), psycopg.OperationalError)
        assert snapshot(conn) == before
    closed: list[int] = []
    _reap_all(database, closed, 1000)
    assert sum(closed) == 40
    assert spent_reserved(conn, "user:1") == (0, 5)


def test_a_reaper_skips_what_others_have_locked(conn: Connection, database: str) -> None:
    _overdue(conn, 4)
    with connect(database) as other, other.transaction():
        other.execute("SELECT FROM quota.holds WHERE false")
        other.execute(
            "SELECT FROM quota_internal.reservations WHERE state = 'held' AND expires_at <= quota_internal.clock()"
            " ORDER BY id LIMIT 1 FOR UPDATE"
        )
        reaper = Background(database, "reap")
        assert not reaper.blocked(conn)
        assert reaper.row() == {"released": 3, "charged": 0}
    assert call(conn, "reap") == {"released": 1, "charged": 0}


def test_the_oldest_go_first_and_at_most_max(conn: Connection) -> None:
    set_clock(conn, NOON)
    budget(conn, "user:1")
    keys = [hold(conn, "user:1", {"usd": 1}, ttl=f"{minutes} minutes") for minutes in (3, 1, 2)]
    advance(conn, "10 minutes")
    for oldest in (1, 2, 0):
        assert call(conn, "reap", 1) == {"released": 1, "charged": 0}
        assert value(conn, "SELECT state FROM quota.reservations WHERE reservation = %s", keys[oldest]) == "expired"
    assert call(conn, "reap", 1) == {"released": 0, "charged": 0}


def test_a_reaper_and_a_late_settle_at_once_book_the_true_cost(conn: Connection, database: str) -> None:
    """A15: in every order spent is the true cost, and nothing stays reserved."""
    set_clock(conn, NOON)
    for n, first in enumerate(("reap", "settle")):
        subject = f"user:{n}"
        budget(conn, subject)
        set_clock(conn, NOON)
        key = hold(conn, subject, {"usd": 4}, ttl="1 minute")
        advance(conn, "1 minute")
        settle = ("settle", key, {"usd": "3.2"})
        with connect(database) as other:
            with other.transaction():
                call(other, *(settle if first == "settle" else ("reap",)))
                second = Background(database, *(("reap",) if first == "settle" else settle))
                second.blocked(conn)
            second.row()
        assert [str(x) for x in spent_reserved(conn, subject)] == ["3.2", "0"]
        assert [kind for kind, _ in entries(conn, key)] == ["late"]
        assert balance(conn, subject)["reserved"] == 0


def test_a_reserve_that_waits_for_an_overdue_hold_finds_it_settled(conn: Connection, database: str) -> None:
    """It means to close what is in its way; a late settle was first, and the hold is not closed a second time."""
    set_clock(conn, NOON)
    budget(conn, "user:1", 50, on_expiry="charge")
    key = hold(conn, "user:1", {"usd": 40}, ttl="1 minute")
    advance(conn, "1 minute")
    with connect(database) as other:
        with other.transaction():
            call(other, "settle", key, {"usd": 10})
            waiting = Background(database, "reserve", "user:1", {"usd": 20})
            waiting.must_block(conn)
        assert waiting.row()["granted"]
    assert value(conn, "SELECT state FROM quota.reservations WHERE reservation = %s", key) == "settled"
    assert spent_reserved(conn, "user:1") == (10, 20)
