"""A small ledger that these tests spend from, and the ways to get between a client and its server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quota.calls import CreateSubject, SetLimit
from quota.client import Client, run
from tests.client.proxy import Proxy
from tests.server import Connection, connect

CAPACITY = 50


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
