"""Coalescing clients in many processes on one budget: batches, killed workers, forgotten holds, and the cap."""

from __future__ import annotations

from pathlib import Path

from tests.faults.processes import reap_everything, run_fleet
from tests.faults.worker import SUBJECT
from tests.server import Connection
from tests.sql.kit import budget, value


def test_the_cap_holds_for_coalescing_clients(conn: Connection, database: str, tmp_path: Path, fleet_s: float) -> None:
    budget(conn, SUBJECT, 40, "second", period="1 second")
    budget(conn, SUBJECT, cap := int(fleet_s * 16), "lifetime")
    command = ["tests.faults.client_worker", database, "coalescing"]
    told = run_fleet(conn, tmp_path, command, seconds=fleet_s, kill=3)
    assert told.over == []
    assert told.granted > 50, "a fleet that does nothing proves nothing"
    assert told.refused > 0, "the cap binds"
    assert any(note["batches"]["largest"] > 1 for note in told.notes), "calls have gone out together"
    reap_everything(conn)
    spent = value(conn, "SELECT spent FROM quota.balance(%s) WHERE limit_name = 'lifetime'", SUBJECT)
    assert 0 < spent <= cap
    states = conn.execute("SELECT state FROM quota.reservations GROUP BY 1 ORDER BY 1").fetchall()
    assert [state for (state,) in states] == ["expired", "released", "settled"]
