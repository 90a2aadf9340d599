"""A provider that counts, and a ledger where `user:7` has a dollar and a pool has quota tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import pytest

from quota.calls import CreateSubject, SetLimit, SetPrice
from quota.client import AsyncClient, Client, run
from tests.integrations.provider import Provider, running
from tests.server import Connection, connect

# Dollars per million tokens; the answers of the provider come to COST.
RATES = {"input": "1000", "cached_input": "100", "output": "2000"}
COST = Decimal("0.142")  # 80 at 1000, 20 at 100, 30 at 2000
MODELS = {"openai": "gpt-x", "anthropic": "claude-opus-4-8", "aws": "regional.anthropic.claude-opus-4-8"}
POOL = "pool:aws-1/us-east-1/opus/runtime"


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running() as found:
        yield found


@pytest.fixture
def ledger(database: str) -> str:
    """URL of a database where `user:7` has a dollar, and the pool its quota."""
    with connect(database) as connection:
        run(connection, CreateSubject("user:7"))
        run(connection, SetLimit("user:7", "cap", "usd", "budget", 1, on_expiry="charge"))
        run(connection, SetLimit("user:7", "calls", "requests", "budget", None))
        run(connection, CreateSubject(POOL))
        run(connection, SetLimit(POOL, "tpd", "quota_tokens", "budget", 100_000, period="day"))
        for name, model in MODELS.items():
            run(connection, SetPrice(name, model, RATES, effective_from="-infinity", output_max=64_000))
    return database


@pytest.fixture
def books(ledger: str) -> Iterator[Books]:
    with connect(ledger) as connection:
        yield Books(connection)


@pytest.fixture
def client(ledger: str) -> Iterator[Client]:
    with Client(ledger, timeout_s=30) as found:
        yield found


@pytest.fixture
async def async_client(ledger: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(ledger, timeout_s=30) as found:
        yield found


class Books:
    """What the ledger says, seen from beside."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def spent(self, subject: str = "user:7", limit: str = "cap") -> tuple[Decimal | int, Decimal | int]:
        """Spent and reserved."""
        (row,) = self._connection.execute(
            "SELECT spent, reserved FROM quota.balance(%s) WHERE limit_name = %s AND subject = %s",
            (subject, limit, subject),
        ).fetchall()
        return row[0], row[1]

    def last(self) -> dict[str, Any]:
        """The newest reservation: its state, what it held and booked, its outcome, its details."""
        row = self._connection.execute(
            "SELECT r.state, r.held, r.booked, r.outcome, r.details, r.subject, r.also"
            " FROM quota.reservations r ORDER BY r.created_at DESC, r.reservation DESC LIMIT 1"
        ).fetchone()
        assert row is not None
        return dict(zip(("state", "held", "booked", "outcome", "details", "subject", "also"), row, strict=True))

    def reservations(self) -> int:
        """How many there are."""
        row = self._connection.execute("SELECT count(*) FROM quota.reservations").fetchone()
        assert row is not None
        return int(row[0])
