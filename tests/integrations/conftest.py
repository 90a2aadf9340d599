"""A provider that counts, and a ledger where each test's user has a dollar and its pool has quota tokens."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import pytest

from quota.calls import CreateSubject, SetLimit, SetPrice
from quota.client import AsyncClient, Client, run
from tests.conftest import assert_balanced
from tests.integrations.provider import Provider, running
from tests.server import Connection, connect, create_database, drop_database

# Dollars per million tokens; the answers of the provider come to COST.
RATES = {"input": "1000", "cached_input": "100", "output": "2000"}
COST = Decimal("0.142")  # 80 at 1000, 20 at 100, 30 at 2000
MODELS = {"openai": "gpt-x", "anthropic": "claude-opus-4-8", "aws": "regional.anthropic.claude-opus-4-8"}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running() as found:
        yield found


@pytest.fixture(scope="package")
def priced(admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    """URL of a database with prices: one for all tests here, each of which spends under a subject of its own."""
    name = f"quota_test_{run_id}_{secrets.token_hex(4)}"
    url = create_database(admin_dsn, name, template)
    try:
        with connect(url) as connection:
            for provider_name, model in MODELS.items():
                run(connection, SetPrice(provider_name, model, RATES, effective_from="-infinity", output_max=64_000))
        yield url
    finally:
        drop_database(admin_dsn, name)


class Books:
    """What the ledger says, seen from beside; `user` has a dollar, `pool` has 100,000 quota tokens a day."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.user = f"user:{secrets.token_hex(6)}"
        self.pool = f"pool:aws-1/us-east-1/{secrets.token_hex(6)}/runtime"
        run(connection, CreateSubject(self.user))
        run(connection, SetLimit(self.user, "cap", "usd", "budget", 1, on_expiry="charge"))
        run(connection, SetLimit(self.user, "calls", "requests", "budget", None))
        run(connection, CreateSubject(self.pool))
        run(connection, SetLimit(self.pool, "tpd", "quota_tokens", "budget", 100_000, period="day"))

    def spent(self, subject: str | None = None, limit: str = "cap") -> tuple[Decimal | int, Decimal | int]:
        """Spent and reserved."""
        name = subject or self.user
        (row,) = self.connection.execute(
            "SELECT spent, reserved FROM quota.balance(%s) WHERE limit_name = %s AND subject = %s", (name, limit, name)
        ).fetchall()
        return row[0], row[1]

    def last(self) -> dict[str, Any]:
        """The user's newest reservation: its state, what it held and booked, its outcome, its details."""
        row = self.connection.execute(
            "SELECT r.state, r.held, r.booked, r.outcome, r.details, r.subject, r.also"
            " FROM quota.reservations r WHERE r.subject = %s ORDER BY r.created_at DESC, r.reservation DESC LIMIT 1",
            (self.user,),
        ).fetchone()
        assert row is not None
        return dict(zip(("state", "held", "booked", "outcome", "details", "subject", "also"), row, strict=True))

    def held(self) -> Decimal:
        """What the user's newest reservation held."""
        return Decimal(str(self.last()["held"]["usd"]))


@pytest.fixture
def books(priced: str) -> Iterator[Books]:
    with connect(priced) as connection:
        yield Books(connection)
        assert_balanced(connection)


@pytest.fixture
def client(priced: str) -> Iterator[Client]:
    with Client(priced, timeout_s=30) as found:
        yield found


@pytest.fixture
async def async_client(priced: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(priced, timeout_s=30) as found:
        yield found
