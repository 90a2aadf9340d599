"""The command line as users have it: the installed `quota`, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

QUOTA = str(Path(sys.executable).with_name("quota"))


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)

    @property
    def rows(self) -> list[Any]:
        """The JSON lines on standard output."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def complaint(self) -> str:
        """The one line on standard error, which is no traceback."""
        (line,) = self.err.splitlines()
        assert line.startswith("quota: ")
        return line


def environment(database_url: str | None, **more: str) -> dict[str, str]:
    """Returns the environment of a command: this one's, without quota's own variables but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QUOTA_")}
    # Patience: what is tested is never how fast this machine is.
    clean |= {"QUOTA_TIMEOUT_S": "30", **more}
    return clean if database_url is None else clean | {"QUOTA_DATABASE_URL": database_url}


def run_quota(*arguments: str, url: str | None, **more: str) -> Ended:
    """Runs `quota` to its end."""
    done = subprocess.run(
        [QUOTA, *arguments], env=environment(url, **more), capture_output=True, text=True, timeout=120, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


Quota = Callable[..., Ended]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Runs a command in this process, for errors that need no server and no process."""
    from quota.cli import main

    code = main(arguments)
    captured = capsys.readouterr()
    return Ended(code, captured.out, captured.err)


@pytest.fixture
def shell(database: str) -> Quota:
    """Runs a command against the test's own database, in a process of its own."""

    def run(*arguments: str, **more: str) -> Ended:
        return run_quota(*arguments, url=database, **more)

    return run


@pytest.fixture
def quota(database: str, capsys: pytest.CaptureFixture[str]) -> Quota:
    """`shell` in this process: what many tests do, without the second that a new process takes to start."""

    def run(*arguments: str, **more: str) -> Ended:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("QUOTA_")]:
                patch.delenv(name)
            for name, value in {"QUOTA_DATABASE_URL": database, "QUOTA_TIMEOUT_S": "30", **more}.items():
                patch.setenv(name, value)
            return said(capsys, *arguments)

    return run


@pytest.fixture
def team(quota: Quota) -> Quota:
    """`quota`, where `key:42` spends below `team:a`, which has 50 usd."""
    assert quota("subject", "create", "team:a").code == 0
    assert quota("subject", "create", "key:42", "--parent", "team:a").code == 0
    assert quota("limit", "set", "team:a", "lifetime", "--unit", "usd", "--capacity", "50").code == 0
    return quota
