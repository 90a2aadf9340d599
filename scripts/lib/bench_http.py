"""P13: how many requests the admin API answers a second, beside a bare Flask endpoint on the same gunicorn.

Both are run with the API's own numbers of processes and threads, one after the other, and asked over connections that
are kept open, four for each thread: with fewer, chance decides how many of the processes have something to do. What
asks is one process that sends the same bytes again and again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kit import PARTS, WARM_UP_S, Bench, BenchError, result, say

from quota import credentials
from quota.admin import serving
from quota.calls import CreateKey, CreateToken
from quota.client import Client

WORKERS, THREADS = serving.DEFAULT_WORKERS, serving.DEFAULT_THREADS
START_S = 30


@dataclass(frozen=True, slots=True)
class Served:
    """What came back within the window: good answers per second, and how many requests were sent in all."""

    per_second: float
    attempts: int
    successes: int


@contextlib.contextmanager
def gunicorn(what: list[str], **environment: str) -> Iterator[int]:
    """Runs gunicorn; yields its port. `what`: how it is told what to serve."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUOTA_")}
    order = [
        sys.executable, "-m", "gunicorn", *what, f"--bind=127.0.0.1:{port}", f"--workers={WORKERS}",
        f"--threads={THREADS}", "--worker-class=gthread", "--preload", "--log-level=warning",
    ]  # fmt: skip
    # Requests are logged as they are in production, to a file that nobody reads.
    with subprocess.Popen(order, env={**environ, **environment}, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if server.poll() is not None or time.monotonic() > until:
                    raise BenchError("gunicorn did not start; see what `quota serve` says")
                time.sleep(0.05)
            yield port
        finally:
            server.send_signal(signal.SIGTERM)


class _Connection:
    """One connection: sends the request anew as soon as its answer is there."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._seen = b""
        self._ends: int | None = None

    def send(self) -> None:
        self._seen, self._ends = b"", None
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Reads what has come; returns whether the answer is complete. Errors: `BenchError` for another than 200."""
        more = self.socket.recv(1 << 16)
        if not more:
            raise BenchError("gunicorn has closed a connection")
        self._seen += more
        if self._ends is None:
            head, found, _ = self._seen.partition(b"\r\n\r\n")
            if not found:
                return False
            if not head.startswith(b"HTTP/1.1 200 "):
                raise BenchError(f"an answer that is none: {head[:60]!r}")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._ends = len(head) + 4 + int(length)
        return len(self._seen) >= self._ends


def ask(port: int, token: str, seconds: float) -> Served:
    """Asks over all connections at once; returns what was answered in a window of so many seconds."""
    request = (
        f"GET /v1/keys/web HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
        "Accept: application/json\r\n\r\n"
    ).encode()
    connections = [_Connection(port, request) for _ in range(4 * WORKERS * THREADS)]
    first_s = time.monotonic() + WARM_UP_S
    last_s, attempts, successes, inside = first_s + seconds, 0, 0, 0
    with selectors.DefaultSelector() as ready:
        for one in connections:
            ready.register(one.socket, selectors.EVENT_READ, one)
            one.send()
            attempts += 1
        while (now_s := time.monotonic()) < last_s:
            for key, _ in ready.select(1):
                if key.data.read():
                    successes += 1
                    inside += now_s >= first_s
                    key.data.send()
                    attempts += 1
    for one in connections:
        one.socket.close()
    return Served(inside / seconds, attempts, successes)


def prepared(ledger: str) -> str:
    """Makes the key that is asked for; returns the secret of a token that may ask."""
    key, token = credentials.Credential.new(credentials.KEY, "web"), credentials.Credential.new(credentials.TOKEN)
    with Client(ledger) as client:
        client.call(CreateKey(key.id, "Web shop", key.hash))
        client.call(CreateToken(token.id, "bench", "viewer", token.hash))
    return token.secret


def p13(bench: Bench) -> dict[str, Any]:
    """The API and the bare endpoint in turn, both running all the while."""
    here = str(Path(__file__).parent)
    sides, rounds = [], []
    with (
        bench.copy("p13") as ledger,
        gunicorn(["--config=python:quota.admin.serving"], QUOTA_DATABASE_URL=ledger) as api,
        gunicorn([f"--pythonpath={here}", "bench_bare:app"]) as bare,
    ):
        token = prepared(ledger)
        for _ in range(bench.options.rounds):
            floor, value = (ask(port, token, bench.options.seconds) for port in (bare, api))
            rounds.append((value, floor))
            sides.append((value.per_second, floor.per_second))
            ratio = value.per_second / floor.per_second
            say(f"P13: {value.per_second:8,.0f}/s against {floor.per_second:8,.0f}/s: {ratio:.2f}x")
    return result(
        "P13",
        sides,
        details={
            "what": PARTS["P13"][0],
            "attempts": sum(value.attempts for value, _ in rounds),
            "successes": sum(value.successes for value, _ in rounds),
            "workers": WORKERS,
            "threads": THREADS,
        },
    )
