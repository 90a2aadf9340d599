"""`scripts/bench-redis`: reserve + settle pairs of one hot budget by a durable Redis script and by the ledger, in turn.

Redis runs with `appendonly yes` and `appendfsync always`: every answer is on disk, as every commit of PostgreSQL is.
Its scripts keep what the ledger keeps of a call: the counters, the hold with its expiry, what was booked of it, and a
line of the ledger. They count in whole cents: Redis computes decimals as floats. They know one unit, one limit and no
windows, lineage, replays or proofs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from bench_kit import (
    EMPTY,
    AbsentError,
    Bench,
    BenchError,
    Connection,
    about,
    connect,
    find_pgbench,
    machine,
    markdown,
    must_be_fit,
    number,
    run_sql,
    say,
    server,
)
from bench_rates import BATCH, BATCH_CLIENTS, CLOSED, PAIR, SUBJECT, batch_rate, best, drive, medians

from quota import embedded

SINGLE_CLIENTS = (1, 8, 64)
LEDGER_CLIENTS = (1, 4, 8)
CAP = 10**15
RESERVE = b"""
local b = redis.call('HMGET', KEYS[1], 'spent', 'reserved', 'cap')
if b[1] + b[2] + ARGV[1] > b[3] + 0 then return 0 end
redis.call('HINCRBY', KEYS[1], 'reserved', ARGV[1])
redis.call('HSET', KEYS[2], 'held', ARGV[1], 'state', 'held')
redis.call('ZADD', KEYS[3], ARGV[2], KEYS[2])
return 1
"""
SETTLE = b"""
local held = redis.call('HGET', KEYS[2], 'held')
if not held or redis.call('HGET', KEYS[2], 'state') ~= 'held' then return 0 end
redis.call('HINCRBY', KEYS[1], 'reserved', -held)
redis.call('HINCRBY', KEYS[1], 'spent', ARGV[1])
redis.call('HSET', KEYS[2], 'state', 'settled', 'booked', ARGV[1])
redis.call('ZREM', KEYS[3], KEYS[2])
redis.call('XADD', KEYS[4], '*', 'kind', 'settle', 'hold', KEYS[2], 'amount', ARGV[1])
return 1
"""


class RedisError(BenchError):
    """Redis answered something that it should not."""


def encoded(*words: bytes | str | int) -> bytes:
    """One command in Redis' protocol."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def asked(port: int, *words: bytes | str | int) -> bytes:
    """Sends one command; returns the first line of the answer, or of a bulk answer its text."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, connection.makefile("rwb") as stream:
        stream.write(encoded(*words))
        stream.flush()
        line = bytes(stream.readline()).rstrip(b"\r\n")
        if line.startswith(b"-"):
            raise RedisError(f"Redis: {line[1:].decode()}")
        if line.startswith(b"$"):
            return bytes(stream.read(int(line[1:])))
        return line[1:]


@contextlib.contextmanager
def redis() -> Iterator[tuple[int, str]]:
    """Starts a durable Redis in a folder of its own; yields its port and version, and ends it.

    Errors: `AbsentError` where there is none.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise AbsentError(
            "Redis is absent: there is no redis-server on PATH, and nothing was measured."
            " Install it (Debian/Ubuntu: apt-get install redis-server) and run this again."
        )
    with tempfile.TemporaryDirectory(prefix="quota-bench-redis-") as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        settings = {"port": port, "bind": "127.0.0.1", "dir": folder, "appendonly": "yes", "appendfsync": "always",
                    "save": "", "daemonize": "no", "logfile": f"{folder}/redis.log"}  # fmt: skip
        order = [program, *itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in settings.items())]
        with subprocess.Popen(order, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                version = _answers(port, process, Path(folder) / "redis.log")
                yield port, version
            finally:
                process.terminate()


def _answers(port: int, process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until it answers and is durable; returns its version."""
    deadline = time.monotonic() + 15
    while process.poll() is None and time.monotonic() < deadline:
        try:
            facts = dict(line.split(":", 1) for line in asked(port, "INFO").decode().splitlines() if ":" in line)
        except OSError:
            time.sleep(0.05)
            continue
        if facts["aof_enabled"] != "1":
            raise RedisError("this Redis keeps no append-only file")
        return facts["redis_version"]
    said = log.read_text(encoding="utf-8")[-1000:] if log.exists() else "nothing"
    raise RedisError(f"redis-server does not answer; its log says: {said}")


class Caller:
    """One connection that reserves and settles in turn, so many holds a round trip."""

    def __init__(self, port: int, scripts: tuple[str, str], name: str, depth: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.settled = 0
        self._scripts = scripts
        self._name = name
        self._depth = depth
        self._count = itertools.count()
        self._holds: list[str] = []
        self._wanted = b":1\r\n" * depth
        self._got = b""

    def send(self) -> None:
        """Sends the next half of a pair: reserves, or settles what was reserved."""
        keys = ("budget", "holds", "ledger")
        reserve, settle = self._scripts
        if self._holds:
            orders = [encoded("EVALSHA", settle, 4, keys[0], hold, *keys[1:], 60) for hold in self._holds]
            self._holds = []
        else:
            self._holds = [f"hold:{self._name}:{next(self._count)}" for _ in range(self._depth)]
            expires = int(time.time()) + 600
            orders = [encoded("EVALSHA", reserve, 3, keys[0], hold, keys[1], 100, expires) for hold in self._holds]
        self.socket.sendall(b"".join(orders))

    def receive(self) -> bool:
        """Takes what has come; returns whether all has. Errors: `RedisError` for anything but success."""
        self._got += self.socket.recv(1 << 16)
        if not self._wanted.startswith(self._got):
            raise RedisError(f"Redis answered {self._got[:80]!r}")
        if len(self._got) < len(self._wanted):
            return False
        self._got = b""
        if not self._holds:
            self.settled += self._depth
        return True

    @property
    def between(self) -> bool:
        """Whether no hold of its own is open."""
        return not self._holds


def redis_rate(port: int, clients: int, depth: int, seconds: float) -> tuple[float, int]:
    """Returns pairs per second and pairs in all, of so many connections with so many calls a round trip."""
    asked(port, "FLUSHALL")
    asked(port, "HSET", "budget", "spent", 0, "reserved", 0, "cap", CAP)
    scripts = (asked(port, "SCRIPT", "LOAD", RESERVE).decode(), asked(port, "SCRIPT", "LOAD", SETTLE).decode())
    callers = [Caller(port, scripts, str(n), depth) for n in range(clients)]
    with selectors.DefaultSelector() as selector:
        for caller in callers:
            selector.register(caller.socket, selectors.EVENT_READ, caller)
            caller.send()
        began = time.monotonic()
        open_callers = len(callers)
        while open_callers:
            for key, _ in selector.select(timeout=10):
                caller = key.data
                if caller.receive():
                    if caller.between and time.monotonic() > began + seconds:
                        selector.unregister(caller.socket)
                        open_callers -= 1
                    else:
                        caller.send()
        lasted_s = time.monotonic() - began
    for caller in callers:
        caller.socket.close()
    settled = sum(caller.settled for caller in callers)
    if int(asked(port, "HGET", "budget", "spent")) != settled * 60 or int(asked(port, "XLEN", "ledger")) != settled:
        raise RedisError("Redis has not booked every pair")
    return settled / lasted_s, settled


def ledger_rate(bench: Bench, url: str, watcher: Connection, clients: int) -> tuple[float, int]:
    """Returns pairs per second of single calls, and pairs in all."""
    run_sql(watcher, EMPTY)
    run = drive(bench, url, PAIR, bench.options.seconds, clients, subject=SUBJECT)
    if number(watcher, CLOSED) != len(run.log):
        raise BenchError("not every pair was settled")
    return run.per_second(bench.options.seconds), len(run.log)


def compared(bench: Bench, port: int) -> list[dict[str, Any]]:
    """Runs all in turn; returns a row for single calls and one for batches."""
    singles: dict[str, dict[int, list[float]]] = {"ledger": {}, "redis": {}}
    batches: dict[str, dict[int, list[float]]] = {"ledger": {}, "redis": {}}
    done = dict.fromkeys(("single ledger", "single redis", "batch ledger", "batch redis"), 0)

    def note(kind: str, side: str, clients: int, rate: float, pairs: int) -> None:
        rates = singles if kind == "single" else batches
        rates[side].setdefault(clients, []).append(rate)
        done[f"{kind} {side}"] += pairs
        say(f"{kind} {side}, {clients} clients: {rate:,.0f} pairs/s")

    seconds = bench.options.seconds
    with bench.copy("redis") as ledger, connect(ledger) as watcher:
        for _ in range(bench.options.rounds):
            for clients in LEDGER_CLIENTS:
                note("single", "ledger", clients, *ledger_rate(bench, ledger, watcher, clients))
            for clients in SINGLE_CLIENTS:
                note("single", "redis", clients, *redis_rate(port, clients, 1, seconds))
            for clients in BATCH_CLIENTS:
                rate, _, closed = batch_rate(bench, ledger, watcher, clients)
                note("batch", "ledger", clients, rate, closed)
                note("batch", "redis", clients, *redis_rate(port, clients, BATCH, seconds))
    return [
        row(kind, rates["ledger"], rates["redis"], done[f"{kind} ledger"], done[f"{kind} redis"])
        for kind, rates in (("single", singles), ("batch", batches))
    ]


def row(
    kind: str, ledger: dict[int, list[float]], other: dict[int, list[float]], ledger_pairs: int, redis_pairs: int
) -> dict[str, Any]:
    """Compares the best number of clients of both."""
    ours, theirs = best(ledger), best(other)
    ratios = [value / floor for value, floor in zip(ledger[ours], other[theirs], strict=True)]
    return {
        "calls": kind,
        "ledger_per_s": round(statistics.median(ledger[ours])),
        "ledger_clients": ours,
        "redis_per_s": round(statistics.median(other[theirs])),
        "redis_clients": theirs,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "ledger_by_clients": medians(ledger),
        "redis_by_clients": medians(other),
        "ledger_pairs": ledger_pairs,
        "redis_pairs": redis_pairs,
    }


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    head = ("calls", "ledger pairs/s", "clients", "Redis pairs/s", "clients", "ledger / Redis", "rounds")
    rows = [
        (
            "one by one" if r["calls"] == "single" else f"{BATCH} together", f"{r['ledger_per_s']:,}",
            str(r["ledger_clients"]), f"{r['redis_per_s']:,}", str(r["redis_clients"]), f"{r['ratio']:.2f}x",
            f"{min(r['ratios']):.2f}-{max(r['ratios']):.2f}",
        )
        for r in report["results"]
    ]  # fmt: skip
    return markdown([head, *rows]) + "\n\n" + about(report)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns the report."""
    # Redis first: without it there is nothing to say, and no reason to start a server.
    with redis() as (port, version), server() as (url, origin):
        program = find_pgbench()
        if program is None:
            raise BenchError("pgbench is not here; install it (Debian/Ubuntu: postgresql-contrib)")
        report: dict[str, Any] = {"machine": machine()}
        settings = must_be_fit(url)
        report["settings"] = {
            "postgresql": settings.pop("server_version"), "origin": origin, **settings, "redis": version,
            "appendonly": "yes", "appendfsync": "always", "seconds": options.seconds, "rounds": options.rounds,
        }  # fmt: skip
        bench = Bench(url, program, options)
        try:
            bench.prepare()
            report["results"] = compared(bench, port)
        finally:
            bench.drop_all()
    return report


def main(arguments: list[str]) -> int:
    """Runs the command line: 0 when it was measured."""
    parser = argparse.ArgumentParser(prog="scripts/bench-redis", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window (default 2, at most 60)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all sides (default 3, at least 1)")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds <= 60 or not 1 <= options.rounds <= 100:
        parser.error("--seconds is above 0 and at most 60, --rounds 1 to 100")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report = run(options)
    except (BenchError, embedded.EmbeddedError, psycopg.Error, OSError) as error:
        say(f"bench-redis: {error}")
        return 1
    print(json.dumps(report) if options.json else table(report))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
