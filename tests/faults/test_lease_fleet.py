"""Leases under fire: processes of many threads decide from memory on one cap, some are killed, the cap is exact."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.faults import worker
from tests.server import Connection
from tests.sql.kit import PATIENCE_S, budget, call, value

ROOT = Path(__file__).parents[2]
WORKERS = 8
WINDOW_CAP = 60


def _start(folder: Path, url: str, number: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.faults.lease_worker", url, str(number), str(seconds)]
    with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)


def run_fleet(conn: Connection, url: str, folder: Path, seconds: float, kill: int) -> list[dict[str, Any]]:
    """Runs the fleet; some workers are killed and replaced, a reaper runs beside them. Returns what the others tell."""
    until = time.monotonic() + seconds
    processes = {n: _start(folder, url, n, seconds) for n in range(WORKERS)}
    killed: set[int] = set()
    try:
        while time.monotonic() < until:
            time.sleep(seconds / (kill + 2) if kill else seconds / 4)
            call(conn, "reap")
            if len(killed) < kill:
                victim = random.choice([n for n in processes if n not in killed])
                processes[victim].send_signal(signal.SIGKILL)
                killed.add(victim)
                number = WORKERS + len(killed)
                processes[number] = _start(folder, url, number, max(0.1, until - time.monotonic()))
        for process in processes.values():
            process.wait(PATIENCE_S)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    told = []
    for number, process in processes.items():
        complaint = (folder / f"{number}.err").read_text()
        assert process.returncode == (-signal.SIGKILL if number in killed else 0), complaint
        if number not in killed:
            told.append(json.loads((folder / f"{number}.out").read_text()))
    return told


def reap_all(conn: Connection) -> None:
    """Waits until every lease that somebody has left behind has expired and is closed."""
    until = time.monotonic() + PATIENCE_S
    while value(conn, "SELECT count(*) FROM quota.holds") and time.monotonic() < until:
        time.sleep(0.1)
        call(conn, "reap")
    assert value(conn, "SELECT count(*) FROM quota.holds") == 0
    assert value(conn, "SELECT coalesce(sum(reserved), 0) FROM quota_internal.accounts") == 0


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
    reap_all(conn)
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
    reap_all(conn)
    assert spent(conn) == sum(Decimal(one["booked"]) for one in told)
    assert spent(conn) <= lifetime
    assert sum(one["refused"] for one in told) > 0, "the cap binds"
