"""A real gunicorn on a real PostgreSQL: one for each worker of the run, a tenant of its own for each test.

The API logs in with the rights of `quota_api` and no others.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from psycopg import sql

from quota import credentials
from tests.conftest import assert_balanced
from tests.server import Connection, connect, create_database, drop_database
from tests.web import Answer

ROLES = ("worker", "viewer", "operator", "owner")
WORKERS = 4
CACHE_S = 1


@dataclass(frozen=True)
class Server:
    """A running API: where it listens, on which database, and what it has logged."""

    port: int
    database: str
    log: Path
    process: subprocess.Popen[bytes]

    def request(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        token: str | None = None,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        path_prefix: str = "/v1",
    ) -> Answer:
        """Makes one request on a connection of its own. `raw`: the body's bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"Connection": "close", **(headers or {})}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        data = raw
        if body is not None:
            data = json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path_prefix + path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()


def start(url: str, folder: Path, **environment: str) -> Server:
    """Starts gunicorn on a database; waits until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"api-{port}.log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QUOTA_")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--config", "python:quota.admin.serving"],
            env={
                **clean,
                "QUOTA_DATABASE_URL": url,
                "QUOTA_BIND": f"127.0.0.1:{port}",
                "QUOTA_TIMEOUT_S": "20",
                "QUOTA_PARENT": str(os.getpid()),
                **environment,
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    server = Server(port, url, log, process)
    deadline = time.monotonic() + 60
    while True:
        try:
            if server.request("GET", "/health/live").status == 200:
                return server
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            stop(server)
            pytest.fail(f"the API did not start:\n{log.read_text()}", pytrace=False)
        time.sleep(0.05)


def stop(server: Server, how: signal.Signals = signal.SIGQUIT) -> int:
    """Ends it, at once unless `how` says otherwise; returns its exit code."""
    if server.process.poll() is None:
        server.process.send_signal(how)
    try:
        return server.process.wait(45)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return server.process.wait()


def as_api(url: str) -> str:
    """The URL with the rights of the role quota_api and no others."""
    return f"{url}{'&' if '?' in url else '?'}options={quote('-c role=quota_api')}"


@pytest.fixture(scope="session")
def api_database(admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    """URL of the database that the API of this worker serves."""
    name = f"quota_test_{run_id}_api_{secrets.token_hex(4)}"
    url = create_database(admin_dsn, name, template)
    try:
        yield url
        with connect(url) as connection:
            assert_balanced(connection)
    finally:
        drop_database(admin_dsn, name)


@pytest.fixture(scope="session")
def server(api_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The running API."""
    running = start(
        as_api(api_database), tmp_path_factory.mktemp("api"), QUOTA_WORKERS=str(WORKERS), QUOTA_THREADS="2",
        QUOTA_CACHE_S=str(CACHE_S), QUOTA_PROXIES="1",
    )  # fmt: skip
    try:
        yield running
    finally:
        stop(running)


@pytest.fixture(scope="session")
def db(api_database: str, server: Server) -> Iterator[Connection]:
    """A connection of the owner to the API's database."""
    with connect(api_database) as connection:
        yield connection


def make_token(db: Connection, role: str, tenant: str | None) -> str:
    """Makes a token; returns its secret."""
    made = credentials.Credential.new(credentials.TOKEN)
    db.execute(
        "SELECT quota.create_token(%s, %s, %s, %s, tenant => %s)", (made.id, f"test {role}", role, made.hash, tenant)
    )
    return made.secret


@dataclass(frozen=True)
class Api:
    """The API as one tenant's people use it."""

    server: Server
    tenant: str
    tokens: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: object | None = None, role: str = "owner", **more: Any) -> Answer:
        """Makes a request with the token of a role."""
        return self.server.request(method, path, body, token=self.tokens[role], **more)

    def get(self, path: str, role: str = "owner", **more: Any) -> Any:
        """Reads; returns the JSON of an answer that has to be good."""
        answer = self.request("GET", path, role=role, **more)
        assert answer.status == 200, answer.body
        return answer.json

    def do(self, method: str, path: str, body: object | None = None, role: str = "owner", **more: Any) -> Any:
        """Writes; returns the JSON of an answer that has to be good."""
        answer = self.request(method, path, body, role, **more)
        assert answer.status in (200, 201), (answer.status, answer.body)
        return answer.json


def new_api(server: Server, db: Connection) -> Api:
    """A tenant of its own, with a token for each role."""
    tenant = f"t-{secrets.token_hex(4)}"
    db.execute(sql.SQL("SELECT quota.create_tenant({})").format(tenant))
    return Api(server, tenant, {role: make_token(db, role, tenant) for role in ROLES})


@pytest.fixture
def api(server: Server, db: Connection) -> Api:
    """The API as the people of a new tenant use it."""
    return new_api(server, db)


@pytest.fixture
def other(server: Server, db: Connection) -> Api:
    """The API as the people of another new tenant use it."""
    return new_api(server, db)


@pytest.fixture(scope="session")
def root(db: Connection) -> str:
    """An owner's token for every tenant."""
    return make_token(db, "owner", None)
