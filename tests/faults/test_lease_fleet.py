"""Leases under fire: processes of many threads decide from memory on one cap, some are killed, the cap is exact."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.faults import worker
from tests.faults.processes import reap_everything, run_workers
from tests.server import Connection
from tests.sql.kit import budget, value

WINDOW_CAP = 60


def run_fleet(conn: Connection, url: str, folder: Path, seconds: float, kill: int) -> list[dict[str, Any]]:
    """Runs the fleet; returns what those that were not killed tell at their end."""
    command = ["tests.faults.lease_worker", url]
    told = list(run_workers(conn, folder, command, seconds=seconds, kill=kill))
    return [line for lines in told for line in lines]


def spent(conn: Connection) -> Decimal:
    return Decimal(value(conn, "SELECT spent FROM quota.balances WHERE limit_name = 'lifetime'"))


def assert_within_the_caps(conn: Connection, lifetime: int) -> None:
    assert spent(conn) <= lifetime
    worst = """SELECT coalesce(max(used), 0) FROM (
        SELECT sum(signed_amount) AS used FROM quota.entries WHERE limit_name = 'window' GROUP BY window_start) w"""
    assert value(conn, worst) <= WINDOW_CAP
    assert conn.execute("SELECT * FROM quota.check()").fetchall() == []


def test_the_cap_is_exact_under_leases_and_killed_processes(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    lifetime = int(fleet_s * 20)
    budget(conn, worker.SUBJECT, WINDOW_CAP, "window", period="3 seconds")
    budget(conn, worker.SUBJECT, lifetime, "lifetime")
    told = run_fleet(conn, database, tmp_path, fleet_s, kill=int(fleet_s / 5))
    reap_everything(conn)
    assert_within_the_caps(conn, lifetime)
    assert sum(Decimal(one["booked"]) for one in told) <= spent(conn), "what was told to be booked is booked"
    assert sum(one["local"] for one in told) > 100, "a fleet that does nothing proves nothing"
    assert sum(one["refused"] for one in told) > 0, "the caps bind"


def test_without_accidents_every_cent_is_accounted_for(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    lifetime = int(fleet_s * 10)
    budget(conn, worker.SUBJECT, lifetime, "lifetime")
    told = run_fleet(conn, database, tmp_path, fleet_s / 3, kill=0)
    reap_everything(conn)
    assert spent(conn) == sum(Decimal(one["booked"]) for one in told)
    assert spent(conn) <= lifetime
    assert sum(one["refused"] for one in told) > 0, "the cap binds"
