"""Views of what changes with time: they read the ledger's clock, once a statement, and count as the engine counts."""

from __future__ import annotations

import re

import pytest

from quota import sql as engine
from tests.server import Connection
from tests.sql.kit import NOON, advance, bucket, budget, call, hold, set_clock, slots, value


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    """Accounts of every kind, touched at different times, and one that nobody has touched."""
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 50)
    budget(tx_conn, "user:1", 50, "hourly", period="1 hour")
    bucket(tx_conn, "user:1", 10, "0.3")
    slots(tx_conn, "user:1", 2)
    bucket(tx_conn, "user:2", 10, 1)
    budget(tx_conn, "user:2", None, "all", period="day")
    call(tx_conn, "record", "user:1", {"usd": 7, "cost": 9})
    advance(tx_conn, "10 seconds")
    hold(tx_conn, "user:1", {"usd": 5, "cost": 2}, ttl="1 minute")
    return tx_conn


def test_holds_are_overdue_by_the_ledgers_clock(ledger: Connection) -> None:
    ledger.execute("SET LOCAL ROLE quota_reader")  # who may call no function of the clock
    assert value(ledger, "SELECT overdue FROM quota.holds") is False
    ledger.execute("RESET ROLE")
    advance(ledger, "1 minute")
    ledger.execute("SET LOCAL ROLE quota_reader")
    assert value(ledger, "SELECT overdue FROM quota.holds") is True


# Columns of quota.balances, by the functions that decide.
BY_FUNCTIONS = """
SELECT a.tenant, a.subject, a.limit_name,
    CASE WHEN a.kind <> 'bucket' THEN quota_internal.in_window(a.spent, a.window_end, c.at) END,
    quota_internal.in_window(a.reserved, a.window_end, c.at),
    CASE WHEN a.kind = 'bucket' THEN
        quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, c.at) END,
    CASE WHEN a.window_end > c.at THEN a.window_start END, CASE WHEN a.window_end > c.at THEN a.window_end END
FROM quota_internal.accounts a, (SELECT quota_internal.clock() AS at) c
ORDER BY 1, 2, 3
"""
BY_VIEW = """
SELECT tenant, subject, limit_name, spent, reserved, level, window_start, window_end
FROM quota.balances ORDER BY 1, 2, 3
"""


@pytest.mark.parametrize("span", ["-1 hour", "-1 microsecond", "0", "3 seconds", "59 minutes 50 seconds", "3 days"])
def test_balances_counts_as_the_engine_does(ledger: Connection, span: str) -> None:
    """Before and after the last touch, at the last instant of the window and the first one behind it."""
    advance(ledger, span)
    expected = ledger.execute(BY_FUNCTIONS.encode()).fetchall()
    assert len(expected) == 6
    ledger.execute("SET LOCAL ROLE quota_reader")
    assert ledger.execute(BY_VIEW.encode()).fetchall() == expected


def test_balances_says_what_balance_says(ledger: Connection) -> None:
    for span in ("3 seconds", "20 seconds", "2 days"):
        advance(ledger, span)
        call(ledger, "reap")  # what is overdue is the one difference between the two
        columns = "limit_name, capacity, spent, reserved, level, window_start, window_end"
        for subject in ("user:1", "user:2"):
            query = f"SELECT {columns} FROM {{}} ORDER BY 1"
            from_view = query.format("quota.balances WHERE subject = %s")
            assert (
                ledger.execute(from_view.encode(), [subject]).fetchall()
                == ledger.execute(query.format("quota.balance(%s)").encode(), [subject]).fetchall()
            )


def test_the_clock_is_read_once_a_statement(ledger: Connection) -> None:
    """The view of the present as it is installed in production, with a clock that counts how often it is read."""
    found = re.search(r"CREATE OR REPLACE VIEW quota_internal\.present AS.*?;", engine.text("views"), re.DOTALL)
    assert found is not None
    ledger.execute("CREATE SEQUENCE quota_test.ticks")
    ledger.execute(
        "CREATE FUNCTION quota_test.tick() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
        " $$ SELECT '2026-05-04 12:00+00'::timestamptz + nextval('quota_test.ticks') * interval '1 second' $$"
    )
    ledger.execute(found[0].replace("clock_timestamp()", "quota_test.tick()").encode())
    hold(ledger, "user:2", {"cost": 1}, ttl="1 minute")
    for number, query in enumerate(
        ("quota.balances", "quota.holds", "quota.balances b JOIN quota.holds h USING (tenant)")
    ):
        before = value(ledger, "SELECT last_value FROM quota_test.ticks")
        assert len(ledger.execute(f"SELECT * FROM {query}".encode()).fetchall()) > 1
        # Two views of one statement read it once each.
        assert value(ledger, "SELECT last_value FROM quota_test.ticks") - before <= 1 + (number == 2)


def test_views_and_functions_have_one_clock() -> None:
    """It is written twice, for `quota_internal.clock()` may not be called by those who read views."""
    pattern = r"quota_internal\.(?:clock\(\) RETURNS|present AS).*?;"
    clock, present = (re.search(pattern, engine.text(file), re.DOTALL) for file in ("clock", "views"))
    assert clock is not None
    assert present is not None
    assert re.findall(r"\w+\(\)", clock[0])[1:] == re.findall(r"\w+\(\)", present[0]) == ["clock_timestamp()"]
    assert "clock_timestamp" not in engine.text("views").replace(present[0], "")
