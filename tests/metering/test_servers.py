"""FastAPI under uvicorn, Flask and Django under gunicorn: real processes, real sockets, a login that may only work."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from quota.calls import SetLimit
from quota.client import run
from tests.metering.kit import Books
from tests.server import Connection
from tests.sql.kit import PATIENCE_S

GUNICORN = ["-m", "gunicorn", "--worker-class", "gthread", "--threads", "4", "--workers", "2", "--bind"]
UVICORN = ["-m", "uvicorn", "--factory", "--port"]
COMMANDS: dict[str, Callable[[int], list[str]]] = {
    "fastapi": lambda port: [*UVICORN, str(port), "tests.metering.apps:fastapi_app"],
    "flask": lambda port: [*GUNICORN, f"127.0.0.1:{port}", "tests.metering.apps:flask_app()"],
    "django": lambda port: [*GUNICORN, f"127.0.0.1:{port}", "tests.metering.apps:django_app()"],
}


class Running:
    """A server, and how it is asked."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, headers: Any = ()) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def started(command: Sequence[str], ledger: str, log: Path, port: int, **environment: str) -> Iterator[Running]:
    """Starts a server as a login that may only work; ends it in order."""
    as_worker = f"{ledger}{'&' if '?' in ledger else '?'}options={quote('-c role=quota_worker')}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "QUOTA_DATABASE_URL": as_worker, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        running, end_s = Running(port), time.monotonic() + PATIENCE_S
        while True:
            try:
                assert running.ask("/health")[0] == 200
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end_s:
                    pytest.fail(f"the server did not start:\n{log.read_text()}", pytrace=False)
                time.sleep(0.05)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module", params=COMMANDS)
def server(
    request: pytest.FixtureRequest, shared_ledger: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    port = free_port()
    log = tmp_path_factory.mktemp("metering") / "server.log"
    with started(COMMANDS[request.param](port), shared_ledger, log, port) as running:
        yield running


def test_a_page_is_settled_at_its_rows(server: Running, books: Books) -> None:
    """Not at the total, and not at the estimate: 100 of 10,000 rows through three nodes are 160, of 480 held."""
    status, headers, body = server.ask("/rows?rows=100&calls=3&limit=300", books.key)
    assert (status, len(json.loads(body)["rows"])) == (200, 100)
    assert '"hourly";r=1999840' in headers["ratelimit"]
    assert not {"x-agent-cost", "x-agent-facts"} & set(headers)
    details = books.last()["details"]
    assert {
        name: details[name] for name in ("route", "estimate", "cost", "rows", "node_calls", "rows_read", "status")
    } == {
        "route": "rows",
        "estimate": 480,
        "cost": 160,
        "rows": 100,
        "node_calls": 3,
        "rows_read": 10_000,
        "status": 200,
    }
    assert details["response_bytes"] == len(body)
    assert (details["outcome"], details["cost_header_missing"]) == ("answered", False)
    assert (books.spent(), books.reserved()) == (160, 0)
    server.ask("/rows?rows=0&calls=3", books.key)
    assert books.spent() == 160


def test_a_websocket_is_refused(server: Running, books: Books) -> None:
    """Servers that know no WebSockets hand the handshake on as a GET; nothing is held for it."""
    handshake = [
        ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]  # fmt: skip
    status, headers, body = server.ask("/rows?rows=1", [*books.key, *handshake])
    assert (status, headers["content-type"], json.loads(body)["title"]) == (
        501,
        "application/problem+json",
        "no websockets",
    )
    assert books.calls() == []


def test_a_caller_who_leaves_a_stream_frees_its_slot(server: Running, books: Books, beside: Connection) -> None:
    run(beside, SetLimit(books.subject, "slots", "concurrency", "concurrency", 1))
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as caller:
        lines = ["GET /flow HTTP/1.1", "Host: test", *(f"{name}: {value}" for name, value in books.key), "", ""]
        caller.sendall("\r\n".join(lines).encode())
        seen = b""
        while seen.count(b"row\n") < 1000:
            piece = caller.recv(65536)
            assert piece, seen
            seen += piece
        # While it flows: what it does not need has returned, the slot is taken, nothing waits in a buffer.
        assert (books.reserved(), books.reserved("slots")) == (40, 1)
        assert server.ask("/rows", books.key)[0] == 429
    end_s = time.monotonic() + PATIENCE_S
    while books.last()["state"] != "settled":
        assert time.monotonic() < end_s, books.last()
        time.sleep(0.02)
    assert books.last()["details"]["outcome"] == "gone"
    assert (books.spent(), books.reserved(), books.reserved("slots")) == (40, 0, 0)
    assert server.ask("/rows?rows=1", books.key)[0] == 200


def test_the_cap_holds_across_processes(server: Running, books: Books, beside: Connection) -> None:
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 2000, period="1 hour"))
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda _: server.ask("/rows?rows=100&limit=100&calls=3", books.key)[0], range(24)))
    # Each holds 160 and costs 160: as many as fit, and whoever is refused meanwhile may ask again.
    assert set(answers) <= {200, 429}
    assert books.spent() == answers.count(200) * 160 <= 2000
    while server.ask("/rows?rows=100&limit=100&calls=3", books.key)[0] == 200:
        pass
    assert (books.spent(), books.reserved()) == (12 * 160, 0)


def test_keep_alive_and_pipelining(server: Running, books: Books) -> None:
    """Several requests on one connection, sent before the first is answered: each is metered once."""
    key = "".join(f"{name}: {value}\r\n" for name, value in books.key)
    requests = [f"GET /rows?rows={n} HTTP/1.1\r\nHost: test\r\n{key}\r\n" for n in (1, 2)]
    requests.append(f"GET /rows?rows=4 HTTP/1.1\r\nHost: test\r\n{key}Connection: close\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as caller:
        caller.sendall("".join(requests).encode())
        seen = b""
        while piece := caller.recv(65536):
            seen += piece
    assert seen.count(b"HTTP/1.1 200") == 3
    assert [one["details"]["cost"] for one in books.calls()] == [1, 2, 4]
    assert (books.spent(), books.reserved()) == (7, 0)


LEASED: dict[str, Callable[[int], list[str]]] = {
    **COMMANDS,
    "flask, preloaded": lambda port: [*COMMANDS["flask"](port), "--preload"],
}


@pytest.mark.parametrize("kind", LEASED)
def test_leases_are_booked_and_given_back_when_a_server_ends(
    kind: str, shared_ledger: str, books: Books, tmp_path: Path
) -> None:
    """Forked before or after the application was made: each process has leases of its own, and closes them."""
    port = free_port()
    with started(LEASED[kind](port), shared_ledger, tmp_path / "log", port, TEST_LEASE="1") as server:
        with ThreadPoolExecutor(8) as callers:
            answers = list(callers.map(lambda _: server.ask("/rows?rows=100&calls=3", books.key)[0], range(80)))
        assert books.reserved() > 0
    assert answers == [200] * 80
    assert (books.spent(), books.reserved()) == (80 * 160, 0)
    kept = books.calls()
    assert {one["state"] for one in kept} == {"settled"}
    assert 1 <= sum("lease" in one["details"] for one in kept) <= 2
    assert len(kept) < 40
