"""Fleets of real processes: started, some killed with SIGKILL and replaced, and what all of them were told."""

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
from typing import Any

from tests.server import Connection
from tests.sql.kit import PATIENCE_S, call, value

ROOT = Path(__file__).parents[2]


@dataclass
class Told:
    """What the workers of a fleet were told, all of them together. `notes`: lines that are no decisions."""

    granted: int = 0
    refused: int = 0
    over: list[dict[str, str]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: str) -> None:
        decision = json.loads(line)
        if "granted" not in decision:
            self.notes.append(decision)
            return
        if not decision["granted"]:
            self.refused += 1
            return
        self.granted += 1
        for limit in decision["limits"]:
            if Decimal(limit["spent"]) + Decimal(limit["reserved"]) > Decimal(limit["capacity"]):
                self.over.append(limit)


def _start(folder: Path, command: list[str], number: int, seconds: float) -> subprocess.Popen[bytes]:
    order = [sys.executable, "-m", *command, str(number), str(seconds)]
    with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
        return subprocess.Popen(order, stdout=out, stderr=err, cwd=ROOT)


def run_fleet(
    conn: Connection, folder: Path, command: list[str], *, seconds: float, workers: int = 8, kill: int = 0
) -> Told:
    """Runs a fleet; a reaper runs beside it.

    Arguments:
        folder: where the workers write.
        command: a module and its arguments; a worker's number and its seconds follow. It writes a line of JSON for
            each decision: `granted`, and with a grant `limits`, each with its `spent`, `reserved` and `capacity`. Other
            lines are notes.
        kill: how many workers are killed with SIGKILL, one after another, and replaced by new ones.
    """
    until = time.monotonic() + seconds
    processes = {n: _start(folder, command, n, seconds) for n in range(workers)}
    killed: set[int] = set()
    try:
        while time.monotonic() < until:
            time.sleep(seconds / (kill + 2) if kill else seconds / 4)
            call(conn, "reap")
            if len(killed) < kill:
                victim = random.choice([n for n in processes if n not in killed])
                processes[victim].send_signal(signal.SIGKILL)
                killed.add(victim)
                number = workers + len(killed)
                processes[number] = _start(folder, command, number, max(0.1, until - time.monotonic()))
        for process in processes.values():
            process.wait(PATIENCE_S)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    told = Told()
    for number, process in processes.items():
        complaint = (folder / f"{number}.err").read_text()
        assert process.returncode == (-signal.SIGKILL if number in killed else 0), complaint
        for line in (folder / f"{number}.out").read_text().splitlines():
            if number not in killed or line.endswith("}"):
                told.add(line)
    return told


def reap_everything(conn: Connection) -> None:
    """Waits until no hold is left: those of the dead expire, and the reaper closes them."""
    until = time.monotonic() + PATIENCE_S
    while value(conn, "SELECT count(*) FROM quota.holds") and time.monotonic() < until:
        time.sleep(0.1)
        call(conn, "reap")
    assert value(conn, "SELECT count(*) FROM quota.holds") == 0
    assert value(conn, "SELECT coalesce(sum(reserved), 0) FROM quota_internal.accounts") == 0
    assert conn.execute("SELECT * FROM quota.check()").fetchall() == []
