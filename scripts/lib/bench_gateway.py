"""G1, G2; G4, G5: what metering adds to a query API over HTTP, as middleware and as the proxy, one key, 100 rows.

All sides run at the same time on the server that `quota gateway` uses, one worker each, and are asked in turns.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kit import PARTS, Bench, BenchError, connect, percentile, result, say
from http_load import Load, LoadError, load

from quota import credentials

CALLERS = 16
OPEN_CALLERS = 64
TARGET_ADDED_S = 0.0015
TABLE = "CREATE TABLE orders AS SELECT id, 'order ' || id AS name, id * 1.5 AS value FROM generate_series(1, 10000) id"
ASGI = ("gateway_apps", "asgi")
_START_S = 60
_HERE = Path(__file__).parent

# Name of each side: which application, and how its calls reach the ledger.
ONE_BY_ONE = {"BENCH_COALESCE": "0"}
LEASED = {"BENCH_LEASE": "1"}
_Sides = Mapping[str, tuple[str, dict[str, str]]]
SIDES: _Sides = {
    "bare": ("bare", {}),
    "middleware": ("metered", {}),
    "middleware, one by one": ("metered", ONE_BY_ONE),
    "plain proxy": ("PlainProxy", {}),
    "proxy": ("proxy", {}),
    "proxy, one by one": ("proxy", ONE_BY_ONE),
}
LEASED_SIDES: _Sides = {
    "bare": ("bare", {}),
    "middleware, leased": ("metered", LEASED),
    "plain proxy": ("PlainProxy", {}),
    "proxy, leased": ("proxy", LEASED),
}


@dataclass(frozen=True)
class Side:
    """One of them, as it runs: where it listens, and the process that listens there."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time so far of gunicorn and its worker, in seconds."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii").split()
        threads = [thread for pid in (str(self.pid), *children) for thread in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def _running(url: str, what: _Sides) -> Iterator[tuple[dict[str, Side], bytes]]:
    """Runs sides, the bare API first; yields them and the request."""
    secret = prepared(url)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, (app, how) in what.items():
            upstream = f"http://127.0.0.1:{sides['bare'].port if sides else 0}"
            environment = {"QUOTA_DATABASE_URL": url, "BENCH_UPSTREAM": upstream, **how}
            sides[name] = stack.enter_context(process(ASGI, app, environment))
        for side in sides.values():
            must_answer(side.port, secret)
        yield sides, request_with(secret)


def prepared(url: str) -> str:
    """Makes the table that is served and a key with a bucket and an hourly limit; returns its secret."""
    made = credentials.Credential.new(credentials.KEY)
    with connect(url) as connection:
        connection.execute(f"{TABLE}; ALTER TABLE orders ADD PRIMARY KEY (id); ANALYZE orders")
        connection.execute("SELECT quota.create_key(%s, 'bench', %s)", (made.id, made.hash))
        for name, kind in (("bucket", "bucket"), ("hourly", "budget")):
            refill, period = (10**9, None) if kind == "bucket" else (None, "1 hour")
            connection.execute(
                "SELECT quota.set_limit(%s, %s, 'cost', %s, 1e15, refill_per_s => %s, period => %s)",
                (f"key:{made.id}", name, kind, refill, period),
            )
    return made.secret


def request_with(secret: str) -> bytes:
    """The request that every side is asked."""
    return (
        f"GET /v1/rows/orders?limit=100 HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {secret}\r\n"
        "Accept: */*\r\nUser-Agent: bench\r\n\r\n"
    ).encode()


@contextlib.contextmanager
def process(served: tuple[str, ...], app: str, environment: Mapping[str, str]) -> Iterator[Side]:
    """Runs an application on gunicorn with one worker. `served`: its module, the worker's class, options of that."""
    module, kind, *options = served
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        number = listener.fileno()
        command = [
            sys.executable, "-m", "gunicorn", "-k", kind, *options, "-w", "1", "--bind", f"fd://{number}",
            "--keep-alive", "600", "--no-control-socket", "--log-level", "error", "--graceful-timeout", "2",
            f"{module}:{app}()",
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=_HERE, env={**os.environ, "QUOTA_TIMEOUT_S": "30", **environment}, pass_fds=[number]
        ) as process:
            try:
                yield Side(listener.getsockname()[1], process.pid)
            finally:
                process.terminate()


def must_answer(port: int, secret: str) -> None:
    """Waits until a side answers. Errors: `BenchError` unless it is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    try:
        connection.request("GET", "/v1/rows/orders?limit=100", headers={"Authorization": f"Bearer {secret}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchError(f"a side answered {answer.status}: {answer.read()!r}")
        answer.read()
    except OSError as error:
        raise BenchError(f"a side does not answer: {error}; what it said stands above") from error
    finally:
        connection.close()


def asked(bench: Bench, port: int, request: bytes, rate_per_s: float | None = None) -> Load:
    """Asks a side for a window, closed, or open at a rate."""
    callers = CALLERS if rate_per_s is None else OPEN_CALLERS
    try:
        return load(port, request, callers=callers, seconds=bench.options.seconds, rate_per_s=rate_per_s)
    except LoadError as error:
        raise BenchError(str(error)) from error


def rates(bench: Bench, part: str, judged: str, what: _Sides) -> dict[str, Any]:
    """Closed loop: requests per second of every side; `judged` is compared with the plain proxy."""
    found: dict[str, list[float]] = {side: [] for side in what}
    answers = 0
    cpu_us: dict[str, list[float]] = {side: [] for side in what}
    with bench.copy(part.lower()) as url, _running(url, what) as (sides, request):
        for number in range(bench.options.rounds):
            for name, side in sides.items():
                before_s, one = side.cpu_s(), asked(bench, side.port, request)
                found[name].append(one.per_second)
                answers += one.answers
                cpu_us[name].append((side.cpu_s() - before_s) / max(one.answers, 1) * 1e6)
            told = ", ".join(f"{side} {each[-1]:.0f}" for side, each in found.items())
            say(f"{part}: round {number + 1}: requests per second: {told}")
        books = books_of(url)
    pairs = list(zip(found[judged], found["plain proxy"], strict=True))
    medians = {side: round(statistics.median(each), 1) for side, each in found.items()}
    cpu = {side: round(statistics.median(each)) for side, each in cpu_us.items()}
    return result(
        part,
        pairs,
        met=not books["violations"],
        requests_per_s=medians,
        cpu_us=cpu,
        details=asked_and_booked(answers, books),
    )


def added(bench: Bench, part: str, judged: str, what: _Sides) -> dict[str, Any]:
    """Open loop at half of what the bare API can do at most: what a call takes longer on the side that is `judged`."""
    found: dict[str, list[Load]] = {side: [] for side in what}
    with bench.copy(part.lower()) as url, _running(url, what) as (sides, request):
        peak = statistics.median(asked(bench, sides["bare"].port, request).per_second for _ in range(3))
        rate = peak / 2
        for number in range(bench.options.rounds):
            for name, side in sides.items():
                found[name].append(asked(bench, side.port, request, rate))
                time.sleep(0.2)  # what a side could not keep up with is not the next one's
            told = ", ".join(f"{side} {percentile(x[-1].latencies_s, 50) * 1000:.2f}" for side, x in found.items())
            say(f"{part}: round {number + 1}: {rate:.0f} requests per second, p50 in ms: {told}")
        books = books_of(url)
    pairs = [(each * 1e6, TARGET_ADDED_S * 1e6) for each in _added_s(found, judged, 50)]
    peaks = {"bare_peak_per_s": round(peak, 1), **latencies(found, rate)}
    answers = sum(one.answers for loads in found.values() for one in loads)
    return result(part, pairs, met=not books["violations"], **peaks, details=asked_and_booked(answers, books))


def latencies(found: Mapping[str, list[Load]], rate_per_s: float) -> dict[str, Any]:
    """What was found of every side at a rate: percentiles, and what they add to the bare one's, in milliseconds."""
    return {
        "rate_per_s": round(rate_per_s, 1),
        "p50_ms": {side: median_ms(loads, 50) for side, loads in found.items()},
        "p99_ms": {side: median_ms(loads, 99) for side, loads in found.items()},
        "added_p50_ms": {side: round(statistics.median(_added_s(found, side, 50)) * 1000, 3) for side in found},
        "added_p99_ms": {side: round(statistics.median(_added_s(found, side, 99)) * 1000, 3) for side in found},
        "answered_of_due": {
            side: round(statistics.median(one.per_second for one in loads) / rate_per_s, 3)
            for side, loads in found.items()
        },
    }


def _added_s(found: Mapping[str, list[Load]], side: str, percent: float) -> list[float]:
    return [
        percentile(one.latencies_s, percent) - percentile(bare.latencies_s, percent)
        for one, bare in zip(found[side], found["bare"], strict=True)
    ]


def asked_and_booked(answers: int, books: dict[str, int]) -> dict[str, int]:
    """What was asked and answered (a window with any other answer than 200 fails), and what the ledger has of it."""
    return {"attempts": answers, "successes": answers, **books}


def median_ms(loads: list[Load], percent: float) -> float:
    return round(statistics.median(percentile(one.latencies_s, percent) for one in loads) * 1000, 3)


def books_of(url: str) -> dict[str, int]:
    """What the ledger has of it: settled reservations and what they cost, holds that are left, violations."""
    with connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE state = 'settled'), sum((booked->>'cost')::numeric),"
            " count(*) FILTER (WHERE state = 'held'), (SELECT count(*) FROM quota.check()) FROM quota.reservations"
        ).fetchone()
    assert row is not None
    return dict(zip(("settled", "booked", "holds_left", "violations"), (int(each or 0) for each in row), strict=True))


RUN = {
    "G1": lambda bench: rates(bench, "G1", "proxy", SIDES),
    "G2": lambda bench: added(bench, "G2", "middleware", SIDES),
    "G4": lambda bench: rates(bench, "G4", "proxy, leased", LEASED_SIDES),
    "G5": lambda bench: added(bench, "G5", "middleware, leased", LEASED_SIDES),
}
assert PARTS.keys() >= RUN.keys()
