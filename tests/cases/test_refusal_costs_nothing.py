"""P7: a refusal from the ledger as it stands takes no lock, writes no WAL and uses no transaction id."""

from __future__ import annotations

import threading

import pytest
from psycopg.types.json import Jsonb

from tests.server import Connection, connect
from tests.sql.kit import NOON, advance, bucket, budget, call, hold, reserve, rows, set_clock, slots, value


@pytest.mark.parametrize(
    "reason", ["held", "exhausted", "too_large", "rate", "concurrency", "frozen", "held_with_others_overdue"]
)
def test_a_refusal_takes_no_lock_writes_no_wal_and_uses_no_xid(database: str, conn: Connection, reason: str) -> None:
    set_clock(conn, NOON)
    budget(conn, "user:1", 50)
    budget(conn, "user:2", 50)
    usd = 1
    if reason == "exhausted":
        call(conn, "record", "user:1", {"usd": 50})
    elif reason == "too_large":
        usd = 51
    elif reason == "rate":
        bucket(conn, "user:1", 1, 1, unit="usd")
        hold(conn, "user:1", {"usd": 1})
    elif reason == "concurrency":
        slots(conn, "user:1", 0)
        slots(conn, "user:1", 1)
        hold(conn, "user:1", {"usd": 1})
    else:
        hold(conn, "user:1", {"usd": 50}, ttl="1 hour")
    if reason == "frozen":
        call(conn, "freeze", "user:1", "why")
    if reason == "held_with_others_overdue":
        hold(conn, "user:2", {"usd": 5}, ttl="1 second")
        advance(conn, "1 minute")
    assert reserve(conn, "user:1", {"usd": usd})["reason"] == reason.split("_with")[0]  # all is bound by now
    with connect(database) as other, other.transaction():
        answer = reserve(other, "user:1", {"usd": usd})
        assert answer["granted"] is False
        batch = rows(other, "reserve_many", ["user:1"] * 3, [Jsonb({"usd": usd})] * 3)
        assert [row["reason"] for row in batch] == [answer["reason"]] * 3
        assert value(other, "SELECT pg_current_xact_id_if_assigned()") is None
        locks = other.execute(
            "SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> 'virtualxid'"
            " AND mode <> 'AccessShareLock'"
        ).fetchall()
        assert locks == []


def test_a_refusal_writes_no_wal(database: str, conn: Connection) -> None:
    """The server is shared with other tests: what this backend itself has written is what counts."""
    budget(conn, "user:1", 50)
    hold(conn, "user:1", {"usd": 50}, ttl="1 hour")
    with connect(database) as other:
        reserve(other, "user:1", {"usd": 1})
        plan = other.execute(
            "EXPLAIN (ANALYZE, WAL, FORMAT JSON) SELECT * FROM quota.reserve('user:1', '{\"usd\": 1}')"
        ).fetchone()
        assert plan is not None
        assert plan[0][0]["Plan"].get("WAL Records", 0) == 0
        written = other.execute(
            "EXPLAIN (ANALYZE, WAL, FORMAT JSON) SELECT * FROM quota.record('user:1', '{\"usd\": 1}')"
        ).fetchone()
        assert written is not None
        assert written[0][0]["Plan"]["WAL Records"] > 0, "this is how a write would show"


def test_refusals_do_not_wait_for_those_who_write(database: str, conn: Connection) -> None:
    """L35: an account locked by an open transaction refuses at once by what is committed."""
    budget(conn, "user:1", 50)
    hold(conn, "user:1", {"usd": 50}, ttl="1 hour")
    with connect(database) as other, other.transaction():
        other.execute("SELECT FROM quota_internal.accounts FOR UPDATE")
        done = threading.Event()

        def ask() -> None:
            with connect(database) as third:
                third.execute("SET lock_timeout = '5s'")
                if reserve(third, "user:1", {"usd": 1})["reason"] == "held":
                    done.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(30)
        assert done.is_set()
