"""Fleets of real processes: started, some killed with SIGKILL and replaced, and what all of them were told."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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

    def add(self, line: dict[str, Any]) -> None:
        if "granted" not in line:
            self.notes.append(line)
            return
        if not line["granted"]:
            self.refused += 1
            return
        self.granted += 1
        for limit in line["limits"]:
            if Decimal(limit["spent"]) + Decimal(limit["reserved"]) > Decimal(limit["capacity"]):
                self.over.append(limit)


class Process:
    """A worker: a module and its arguments, its number and its seconds following. `killed`: by us."""

    def __init__(self, folder: Path, command: list[str], number: int, seconds: float) -> None:
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        self.killed = False
        order = [sys.executable, "-m", *command, str(number), str(seconds)]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(order, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=ROOT)

    def start(self) -> None:
        """Lets it begin, once it is ready: whoever comes late to a fleet finds everything spent."""
        until = time.monotonic() + PATIENCE_S
        while not self._out.read_bytes().startswith(b"ready\n"):
            assert self._process.poll() is None, self._err.read_text()
            assert time.monotonic() < until, "a worker is not ready"
            time.sleep(0.01)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Kills it with SIGKILL, unless it has ended by itself."""
        self._process.kill()
        self.killed = self._process.wait() == -signal.SIGKILL

    def end(self) -> list[dict[str, Any]]:
        """Waits for its end; returns what it wrote. A line that a kill cut off is left out."""
        code = self._process.wait(PATIENCE_S)
        assert self.killed or code == 0, self._err.read_text()
        lines = self._out.read_text().splitlines()[1:]
        return [json.loads(line) for line in lines if not self.killed or line.endswith("}")]

    def clear(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def run_workers(
    conn: Connection, folder: Path, command: list[str], *, seconds: float, workers: int = 8, kill: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """Runs a fleet, all of it from the same moment on; a reaper runs beside it.

    Arguments:
        folder: where the workers write.
        command: a module and its arguments; it begins with `wait_for_the_start`.
        kill: how many workers are killed with SIGKILL, one after another, and replaced by new ones.

    Result: what each has written, a line of JSON each time; of a killed one until then.
    """
    fleet = [Process(folder, command, number, seconds) for number in range(workers)]
    try:
        for process in fleet:
            process.start()
        until = time.monotonic() + seconds
        for number in range(kill):
            time.sleep(seconds / (kill + 1))
            call(conn, "reap")
            random.choice([process for process in fleet if not process.killed]).kill()
            fleet.append(Process(folder, command, workers + number, max(0.1, until - time.monotonic())))
            fleet[-1].start()
        assert not kill or any(process.killed for process in fleet), "none was killed in mid flight"
        while time.monotonic() < until:
            time.sleep(seconds / 5)
            call(conn, "reap")
        for process in fleet:
            yield process.end()
    finally:
        for process in fleet:
            process.clear()


def wait_for_the_start() -> None:
    """In a worker, when it has done what takes long: says so, and waits for the others."""
    print("ready", flush=True)
    sys.stdin.read()


def run_fleet(
    conn: Connection, folder: Path, command: list[str], *, seconds: float, workers: int = 8, kill: int = 0
) -> Told:
    """Runs a fleet of workers that write `granted` for each decision, and with a grant `limits`, each with its `spent`,
    `reserved` and `capacity`. Other lines are notes. Arguments: as of `run_workers`."""
    told = Told()
    for lines in run_workers(conn, folder, command, seconds=seconds, workers=workers, kill=kill):
        for line in lines:
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
