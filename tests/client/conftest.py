"""A small ledger that these tests spend from, and the ways to get between a client and its server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quota.calls import CreateSubject, SetLimit
from quota.client import Client, run
from tests.client.proxy import Proxy
from tests.server import Connection, connect

CAPACITY = 50
# An upper bound for "does not hang", on a machine that is busy with something else.
PATIENCE_S = 60


@pytest.fixture
def ledger(database: str) -> str:
    """URL of a database where `user:1` and `user:2` have a budget of 50 usd each, and one slot each."""
    with connect(database) as connection:
        for subject in ("user:1", "user:2"):
            run(connection, CreateSubject(subject))
            run(connection, SetLimit(subject, "cap", "usd", "budget", CAPACITY))
    return database


@pytest.fixture
def client(ledger: str) -> Iterator[Client]:
    """A client of the small ledger with time to spare: what is tested is never how fast this machine is."""
    with Client(ledger, timeout_s=30) as client:
        yield client


@pytest.fixture
def proxy(ledger: str) -> Iterator[Proxy]:
    """A proxy in front of the server; its `url` leads to the small ledger."""
    with Proxy(ledger) as proxy:
        yield proxy


@pytest.fixture
def observer(ledger: str) -> Iterator[Connection]:
    """A connection beside the client's, to look at what it has done."""
    with connect(ledger) as connection:
        yield connection


@contextmanager
def standing_in_the_way(ledger: str) -> Iterator[None]:
    """Whatever charges an account waits until the block is left."""
    with connect(ledger) as connection, connection.transaction():
        connection.execute("SELECT FROM quota_internal.accounts FOR UPDATE")
        yield


@pytest.fixture
def closed_port() -> Iterator[str]:
    """URL of a port where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"postgresql://quota@127.0.0.1:{taken.getsockname()[1]}/quota"


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        pause.wait(0.02)


def waiting(observer: Connection) -> list[int]:
    """Returns the backend pids of clients that wait for a lock."""
    asked = """SELECT pid FROM pg_stat_activity
               WHERE datname = current_database() AND application_name = 'quota' AND wait_event_type = 'Lock'"""
    return [pid for (pid,) in observer.execute(asked)]


def books(observer: Connection, subject: str = "user:1") -> Any:
    """Returns (spent, reserved) of the subject and how many ids are known: of reservations and of records."""
    row = observer.execute(
        "SELECT b.spent, b.reserved, (SELECT count(*) FROM quota_internal.reservations) FROM quota.balance(%s) b",
        (subject,),
    ).fetchone()
    assert row is not None
    return row
