"""B1, B7, G17: real processes on one budget. The ledger holds the cap in every answer; the naive guard breaks it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import pytest

from tests.faults import worker
from tests.server import Connection
from tests.sql.kit import PATIENCE_S, budget, call, value

ROOT = Path(__file__).parents[2]
WORKERS = 8


@dataclass
class Result:
    """What the workers of a fleet were told, all of them together."""

    granted: int = 0
    refused: int = 0
    over: list[dict[str, str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        decision = json.loads(line)
        if not decision["granted"]:
            self.refused += 1
            return
        self.granted += 1
        for limit in decision["limits"]:
            if Decimal(limit["spent"]) + Decimal(limit["reserved"]) > Decimal(limit["capacity"]):
                self.over.append(limit)


def _start(folder: Path, url: str, guard: str, number: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.faults.worker", url, guard, str(number), str(seconds)]
    with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)


def run_fleet(conn: Connection, url: str, folder: Path, guard: str, seconds: float, kill: int) -> Result:
    """Runs the fleet; some workers are killed with SIGKILL and replaced by new ones, a reaper runs beside them."""
    budget(conn, worker.SUBJECT, 20, "second", period="1 second")
    budget(conn, worker.SUBJECT, int(seconds * 8), "lifetime")
    until = time.monotonic() + seconds
    processes = {n: _start(folder, url, guard, n, seconds) for n in range(WORKERS)}
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
                processes[number] = _start(folder, url, guard, number, max(0.1, until - time.monotonic()))
        for process in processes.values():
            process.wait(PATIENCE_S)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    result = Result()
    for number, process in processes.items():
        complaint = (folder / f"{number}.err").read_text()
        assert process.returncode == (-signal.SIGKILL if number in killed else 0), complaint
        for line in (folder / f"{number}.out").read_text().splitlines():
            if number not in killed or line.endswith("}"):
                result.add(line)
    return result


def test_the_cap_holds_across_processes_killed_workers_and_forgotten_holds(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    result = run_fleet(conn, database, tmp_path, "ledger", fleet_s, kill=3)
    assert result.over == []
    assert result.granted > 50, "a fleet that does nothing proves nothing"
    assert result.refused > 0, "the cap binds"
    until = time.monotonic() + PATIENCE_S
    while value(conn, "SELECT count(*) FROM quota.holds") and time.monotonic() < until:
        time.sleep(0.1)
        call(conn, "reap")
    assert value(conn, "SELECT count(*) FROM quota.holds") == 0
    states = conn.execute("SELECT state FROM quota.reservations GROUP BY 1 ORDER BY 1").fetchall()
    assert [state for (state,) in states] == ["expired", "released", "settled"]
    assert value(conn, "SELECT coalesce(sum(reserved), 0) FROM quota_internal.accounts") == 0
    assert conn.execute("SELECT * FROM quota.check()").fetchall() == []


def test_the_naive_guard_overspends_in_the_same_fleet(conn: Connection, database: str, tmp_path: Path) -> None:
    """Check, call, add: every worker was right when it looked."""
    result = run_fleet(conn, database, tmp_path, "naive", 5, kill=0)
    assert result.over, "the naive guard must break the cap, or this fleet does not test it"


@pytest.mark.soak
def test_the_cap_holds_while_reapers_and_checkers_run(
    conn: Connection, database: str, tmp_path: Path, fleet_s: float
) -> None:
    result = run_fleet(conn, database, tmp_path, "ledger", fleet_s, kill=20)
    assert result.over == []
