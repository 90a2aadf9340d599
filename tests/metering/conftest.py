"""A ledger that these tests share, each with a key of its own, and the metered application in both protocols."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quota.metering import Policy
from tests.client.conftest import closed_port
from tests.conftest import assert_balanced
from tests.metering.kit import AsgiGateway, Books, Gateway, WsgiGateway
from tests.server import Connection, connect, create_database, drop_database

__all__ = ["closed_port"]


@pytest.fixture(scope="package")
def shared_ledger(admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    name = f"quota_test_{run_id}_{secrets.token_hex(4)}"
    url = create_database(admin_dsn, name, template)
    try:
        yield url
    finally:
        drop_database(admin_dsn, name)


@pytest.fixture
def beside(shared_ledger: str) -> Iterator[Connection]:
    """A connection to look into the ledger."""
    with connect(shared_ledger) as connection:
        yield connection
        assert_balanced(connection)


@pytest.fixture
def books(beside: Connection) -> Books:
    """A fresh key of the tier basic."""
    return Books(beside)


@pytest.fixture(params=[AsgiGateway, WsgiGateway], ids=["asgi", "wsgi"])
def protocol(request: pytest.FixtureRequest) -> type[Gateway]:
    found: type[Gateway] = request.param
    return found


@pytest.fixture
def serve(protocol: Any, shared_ledger: str) -> Iterator[Callable[..., Gateway]]:
    """Starts the metered application: `serve(Policy(…))`, with another ledger's `url`, with settings of the client."""
    started: list[Gateway] = []

    def start(policy: Policy | None = None, url: str = shared_ledger, **client: Any) -> Gateway:
        started.append(protocol(url, policy or Policy(), **client))
        return started[-1]

    yield start
    for one in started:
        one.close()
