"""B1, B7, G17: real processes on one budget. The ledger holds the cap in every answer; the naive guard breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import worker
from tests.faults.processes import Told, reap_everything, run_fleet
from tests.server import Connection
from tests.sql.kit import budget


def run(conn: Connection, url: str, folder: Path, guard: str, seconds: float, kill: int) -> Told:
    """Runs the fleet on a budget per second and one for ever."""
    budget(conn, worker.SUBJECT, 20, "second", period="1 second")
    budget(conn, worker.SUBJECT, int(seconds * 8), "lifetime")
    return run_fleet(conn, folder, ["tests.faults.worker", url, guard], seconds=seconds, kill=kill)


def test_the_cap_holds_across_processes_killed_workers_and_forgotten_holds(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    result = run(conn, database, tmp_path, "ledger", fleet_s, kill=3)
    assert result.over == []
    assert result.granted > 2 * (8 + 3), "a fleet that does nothing proves nothing: one worker at least had three holds"
    assert result.refused > 0, "the cap binds"
    reap_everything(conn)
    states = conn.execute("SELECT state FROM quota.reservations GROUP BY 1 ORDER BY 1").fetchall()
    assert [state for (state,) in states] == ["expired", "released", "settled"]


def test_the_naive_guard_overspends_in_the_same_fleet(conn: Connection, database: str, tmp_path: Path) -> None:
    """Check, call, add: every worker was right when it looked."""
    result = run(conn, database, tmp_path, "naive", 5, kill=0)
    assert result.over, "the naive guard must break the cap, or this fleet does not test it"


@pytest.mark.soak
def test_the_cap_holds_while_reapers_and_checkers_run(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    result = run(conn, database, tmp_path, "ledger", fleet_s, kill=20)
    assert result.over == []
