"""Fleets: real processes with connections of their own, ended with their parent, missed when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quota.errors import UnknownSubject
from quota.fleet import Fleet, FleetError, Worker


def who(worker: Worker, word: str) -> tuple[int, int, str]:
    worker.tell(f"hello {worker.number}")
    worker.together()
    worker.client.check()
    return worker.number, os.getpid(), word


def fail(worker: Worker) -> None:
    if worker.number == 1:
        worker.client.balance("nobody:1")
    time.sleep(60)


def die(worker: Worker) -> None:
    if worker.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.together()  # with one that never comes


def hang(worker: Worker) -> None:
    worker.tell(os.getpid())
    time.sleep(60)


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """True while the process is there and not only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_each_worker_is_a_process_and_works_with_its_own_arguments(database: str) -> None:
    told: list[tuple[int, Any]] = []
    with Fleet(3, database) as fleet:
        first = fleet.run(who, [("a",), ("b",), ("c",)], lambda number, news: told.append((number, news)))
        again = fleet.run(who, [("d",)] * 3)
    assert [(number, word) for number, _, word in first] == [(0, "a"), (1, "b"), (2, "c")]
    assert len({pid for _, pid, _ in first} | {os.getpid()}) == 4
    assert [pid for _, pid, _ in again] == [pid for _, pid, _ in first]
    assert sorted(told) == [(number, f"hello {number}") for number in range(3)]


def test_the_first_error_of_a_task_ends_the_run_soon(database: str) -> None:
    started = time.monotonic()
    with pytest.raises(UnknownSubject), Fleet(2, database) as fleet:
        fleet.run(fail, [()] * 2)
    assert time.monotonic() - started < 30


def test_a_worker_that_is_killed_is_missed_though_others_wait_for_it(database: str) -> None:
    started = time.monotonic()
    with pytest.raises(FleetError, match=r"worker 1 \(process \d+\) ended with signal 9"), Fleet(3, database) as fleet:
        fleet.run(die, [()] * 3)
    assert time.monotonic() - started < 30


def test_kill_is_sigkill(database: str) -> None:
    with Fleet(1, database) as fleet:
        fleet.start(hang, [()])
        news = next(fleet.news())
        assert fleet.kill(0) == news.value
        until(lambda: not lives(news.value))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_end_with_a_parent_that_is_killed(database: str) -> None:
    program = (
        "import sys\n"
        "from quota.fleet import Fleet\n"
        "from tests.test_fleet import hang\n"
        "if __name__ == '__main__':\n"
        "    with Fleet(2, sys.argv[1]) as fleet:\n"
        "        fleet.start(hang, [()] * 2)\n"
        "        for news in fleet.news(): print(news.value, flush=True)\n"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", program, database], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(lives(pid) for pid in pids)
        parent.kill()
    for pid in pids:
        until(lambda pid=pid: not lives(pid))  # type: ignore[misc]
