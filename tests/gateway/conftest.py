"""The gateway as it runs: gunicorn on a real PostgreSQL, in front of upstreams that behave and ones that do not."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest

from quota import credentials
from tests.conftest import assert_balanced
from tests.gateway.upstream import Upstream
from tests.server import Connection, connect, create_database, drop_database
from tests.web import Answer

PATIENCE_S = 60


@dataclass(frozen=True)
class Key:
    """Somebody who may ask."""

    subject: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        """How they say who they are."""
        return {"Authorization": f"Bearer {self.secret}"}


@dataclass
class Proxy:
    """A running gateway."""

    port: int
    database: str
    log: Path
    process: subprocess.Popen[bytes]
    keys: list[Key] = field(default_factory=list)

    def request(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Makes one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, target, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """Opens a connection for bytes as they are."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def raw(self, text: bytes) -> bytes:
        """Sends bytes as they are; returns all that comes until the gateway closes the connection.

        It is asked to close it once it has answered what came before.
        """
        found = b""
        with self.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(text)
            found = connection.recv(65536)
            connection.sendall(b"GET /-/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while piece := connection.recv(65536):
                found += piece
        return found


def until(what: Callable[[], bool], told: Callable[[], object] = lambda: "") -> None:
    """Waits for a condition, as long as it takes on a loaded machine."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def as_worker(url: str) -> str:
    """The URL with the rights of the role quota_worker and no others."""
    return f"{url}{'&' if '?' in url else '?'}options={quote('-c role=quota_worker')}"


def start(folder: Path, config: str, database: str, **environment: str) -> Proxy:
    """Starts a gateway with this configuration; waits until it answers for itself."""
    file = folder / "gateway.toml"
    file.write_text(config)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port, log = listener.getsockname()[1], folder / f"gateway-{secrets.token_hex(3)}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QUOTA_")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "--config", "python:quota.gateway.serving",
                 "--bind", f"fd://{listener.fileno()}"],
                env={
                    **clean, "QUOTA_DATABASE_URL": as_worker(database), "QUOTA_GATEWAY_CONFIG": str(file),
                    "QUOTA_TIMEOUT_S": "30", "QUOTA_PARENT": str(os.getpid()), **environment,
                },
                stdout=out, stderr=subprocess.STDOUT, pass_fds=[listener.fileno()],
            )  # fmt: skip
    proxy = Proxy(port, database, log, process)
    # It listens already, so this waits in the queue until it is served.
    try:
        assert proxy.request("GET", "/-/health").status == 200
    except (OSError, AssertionError):
        stop(proxy)
        pytest.fail(f"the gateway did not start:\n{log.read_text()}", pytrace=False)
    return proxy


def stop(proxy: Proxy, how: signal.Signals = signal.SIGTERM) -> int:
    """Ends it; returns its exit code."""
    if proxy.process.poll() is None:
        proxy.process.send_signal(how)
    try:
        return proxy.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        proxy.process.kill()
        return proxy.process.wait()


def make_key(database: str, **limits: int) -> Key:
    """Makes a key of tier basic; `limits`: numbers of its own for `bucket` (which never refills), `slots`, `hits`."""
    made = credentials.Credential.new(credentials.KEY)
    subject = f"key:{made.id}"
    shapes = {
        "bucket": ("cost", "bucket", 0), "hourly": ("cost", "budget", None),
        "slots": ("concurrency", "concurrency", None),
    }  # fmt: skip
    with connect(database) as db:
        db.execute("SELECT quota.create_key(%s, %s, %s)", (made.id, "test", made.hash))
        for name, capacity in limits.items():
            unit, kind, refill = shapes[name]
            period = "1 hour" if name == "hourly" else None
            db.execute(
                "SELECT quota.set_limit(%s, %s, %s, %s, %s, refill_per_s => %s, period => %s)",
                (subject, name, unit, kind, capacity, refill, period),
            )
    return Key(subject, made.secret)


@pytest.fixture(scope="session")
def gateway_database(admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    """URL of the database that the gateways of this worker of the run meter in."""
    name = f"quota_test_{run_id}_gateway_{secrets.token_hex(4)}"
    url = create_database(admin_dsn, name, template)
    try:
        yield url
        with connect(url) as connection:
            assert_balanced(connection)
    finally:
        drop_database(admin_dsn, name)


@pytest.fixture(scope="session")
def db(gateway_database: str) -> Iterator[Connection]:
    """A connection of the owner to that database."""
    with connect(gateway_database) as connection:
        yield connection


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    """The upstream that can do everything wrong."""
    running = Upstream()
    yield running
    running.close()


@pytest.fixture
def key(gateway_database: str) -> Key:
    """A key of the test's own."""
    return make_key(gateway_database)


def settled(db: Connection, key: Key) -> list[tuple[str, int, str]]:
    """Waits until the key holds nothing; returns what became of its calls: state, cost and outcome, oldest first."""
    held = "SELECT count(*) FROM quota.holds WHERE subject = %s"

    def count() -> int:
        row = db.execute(held.encode(), (key.subject,)).fetchone()
        assert row is not None
        return int(row[0])

    until(lambda: count() == 0, lambda: f"{count()} holds are open")
    rows = db.execute(
        "SELECT state, booked->>'cost', outcome FROM quota.reservations WHERE subject = %s ORDER BY reservation",
        (key.subject,),
    ).fetchall()
    return [(state, int(cost or 0), outcome) for state, cost, outcome in rows]
