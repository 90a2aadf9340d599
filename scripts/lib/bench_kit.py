"""What the parts of `scripts/bench` share: the server, its databases, the floor F1, pgbench, how a result is told."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import secrets
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from quota import embedded, migrate
from quota._pgbin import BinariesError, find_binaries

PARTS = {
    "P1": ("reserve, one account, against F1", 2.2),
    "P2": ("reserve + settle, two accounts each, mean of both, against F1", 2.8),
    "P3": ("reserve, six accounts, against F1", 5.0),
    "P4": ("reserve_many + settle_many, batches of 500 on one budget: pairs per second, against F1's updates", 7.0),
    "P5": ("Python client, 64 callers on one budget, coalescing, against one by one", 5.0),
    "P6": ("decisions under a lease in one process, per second, against a bare lock and Decimals", 0.2),
    "P7": ("refusal on an exhausted budget, against SELECT 1", 4.0),
    "P8": ("reserve among closed reservations and 10,000 open holds, against an empty ledger", 1.2),
    "P9": ("reserve + settle on one budget for 10 minutes: the last minute's rate, against the first's", 0.9),
    "P10": ("reaper, 100,000 holds due at once beside reserves: closed per second, against F1's updates", 4.0),
    "P11": ("the last page of 100 of a million keys, as GET /v1/keys reads it, against the first page", 2.0),
    "P12": ("refusal beside 100,000 overdue holds of others, against P7's", 2.0),
    "P13": ("GET /v1/keys/{id}, requests per second, against a bare Flask endpoint on the same gunicorn", 0.5),
    "G1": ("the gateway, one key: requests per second, against a plain proxy on the same server and client", 0.6),
    "G2": ("metering middleware, one key, at half the bare API's peak: what p50 it adds, against 1.5 ms", 1.0),
    "G3": ("metering middleware under Flask: requests per second, against Flask-Limiter with a durable Redis", 1.0),
    "G4": ("as G1, the gateway with leases", 0.6),
    "G5": ("as G2, the middleware with leases", 1.0),
}
# Of these more is better: calls per second. Of the others less is: CPU per call.
RATES = {"P4", "P5", "P6", "P9", "P10", "P13", "G1", "G3", "G4"}
SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
SHOWN = (
    "server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "shared_buffers",
    "max_wal_size", "jit", "is_superuser",
)  # fmt: skip
WARM_UP_S = 0.7  # connecting, planning, filling the backend's caches

Connection = psycopg.Connection[tuple[Any, ...]]


class BenchError(Exception):
    """The bench cannot say anything: the message says what went wrong and what to do."""


class AbsentError(BenchError):
    """What a part compares with is not installed: the part is left out, the others go on."""


def say(text: str) -> None:
    """Progress, on stderr: stdout belongs to the result."""
    print(text, file=sys.stderr, flush=True)


F1_TABLE = """
    CREATE TABLE b (id bigint PRIMARY KEY, cap numeric NOT NULL, spent numeric NOT NULL, reserved numeric NOT NULL)
    WITH (fillfactor = 50);
    INSERT INTO b VALUES (1, 1e17, 0, 0)
"""
F1 = "UPDATE b SET reserved = reserved + :amount WHERE id = :id AND spent + reserved + :amount <= cap"

SUBJECTS = """
    SELECT quota.create_subject('user:one');
    SELECT quota.set_limit('user:one', 'total', 'usd', 'budget', 1e17);
    SELECT quota.create_subject('user:two');
    SELECT quota.set_limit('user:two', 'rate', 'requests', 'bucket', 1e12, refill_per_s => 1e6);
    SELECT quota.set_limit('user:two', 'hour', 'usd', 'budget', 1e17, period => '1 hour');
    SELECT quota.create_subject('org:six');
    SELECT quota.set_limit('org:six', 'total', 'usd', 'budget', 1e17);
    SELECT quota.create_subject('user:six', parent => 'org:six');
    SELECT quota.set_limit('user:six', 'month', 'usd', 'budget', 1e17, period => 'month');
    SELECT quota.create_subject('svc:six', parent => 'user:six');
    SELECT quota.set_limit('svc:six', 'day', 'usd', 'budget', 1e17, period => 'day');
    SELECT quota.set_limit('svc:six', 'tokens', 'tokens', 'bucket', 1e12, refill_per_s => 1e6);
    SELECT quota.set_limit('svc:six', 'requests', 'requests', 'bucket', 1e12, refill_per_s => 1e6);
    SELECT quota.set_limit('svc:six', 'slots', 'concurrency', 'concurrency', 1e9);
    SELECT quota.create_subject('user:full');
    SELECT quota.set_limit('user:full', 'total', 'usd', 'budget', 10);
    SELECT quota.record('user:full', '{"usd": "9.5"}');
    SELECT quota.reserve('user:full', '{"usd": "0.25"}', ttl => '12 hours');
"""
# Empties the ledger of what a window has left: the accounts as new, no rows. Only the owner of a bench may do this.
EMPTY = """
    SET session_replication_role = replica;
    TRUNCATE quota_internal.reservations, quota_internal.entries;
    UPDATE quota_internal.accounts SET spent = 0, reserved = 0, earliest_expiry = 'infinity';
    RESET session_replication_role;
    VACUUM quota_internal.accounts
"""
# The same where other rows must stay: only the holds of the subject that the bench reserves for.
HELD = "SELECT count(*) FROM quota_internal.reservations WHERE state = 'held' AND subject = '{}'"


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, user and system, in seconds."""
    process = Path("/proc") / str(pid)
    try:
        return int((process / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    except FileNotFoundError:
        times = (process / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def connect(url: str) -> Connection:
    """Connects in autocommit mode."""
    return psycopg.connect(url, autocommit=True, connect_timeout=10)


def run_sql(connection: Connection, script: str) -> None:
    """Runs statements one by one (VACUUM stands alone)."""
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(statement.encode())


def number(connection: Connection, query: str) -> int:
    """Returns the one number that a query gives."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def result(
    part: str, sides: Sequence[tuple[float, float]], *, met: bool = True, digits: int | None = 1, **more: Any
) -> dict[str, Any]:
    """Returns a part's result.

    Arguments: `part`; `sides`: value and floor, round by round; `met`: whether what its target demands beside the ratio
    holds; `digits` of value and floor; `more`: what else a program reads, and `details` for `--out`.
    """
    ratios = [value / floor for value, floor in sides]
    what, target = PARTS[part]
    ratio = statistics.median(ratios)
    details = more.pop("details")
    return {
        "id": part,
        "value": round(statistics.median(value for value, _ in sides), digits),
        "floor": round(statistics.median(floor for _, floor in sides), digits),
        "ratio": round(ratio, 3),
        "target": target,
        "met": met and (ratio >= target if part in RATES else ratio <= target),
        **more,
        "details": {"what": what, "ratios": [round(each, 3) for each in ratios], **details},
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the least value that so many percent of all do not exceed; infinity where there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.inf


def find_pgbench() -> Path | None:
    """pgbench from beside the server's binaries or on PATH."""
    with contextlib.suppress(BinariesError):
        beside = find_binaries().folder / "pgbench"
        if os.access(beside, os.X_OK):
            return beside
    found = shutil.which("pgbench")
    return Path(found) if found else None


def pgbench_order(
    program: Path, url: str, folder: Path, statements: str, limit: str, clients: int = 1, **variables: Any
) -> tuple[list[str], dict[str, str]]:
    """Returns pgbench's command line and environment; it logs every transaction into the folder (`read_log`).

    Arguments: `program`; `url` of the database; `folder` for script and logs; `statements`: the script;
    `limit`: `-T` with seconds or `-t` with transactions of each client; `clients`; `variables` of the script.
    """
    script = folder / "script.sql"
    script.write_text(statements, encoding="utf-8")
    order = [str(program), "-n", f"-c{clients}", "-j1", "-Mprepared", limit, f"-f{script}", "--log"]
    order += [f"--log-prefix={folder}/log", *(f"-D{key}={value}" for key, value in variables.items())]
    parts = conninfo_to_dict(url)
    words = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    environ = {variable: str(parts[key]) for key, variable in words.items() if key in parts}
    return [*order, str(parts["dbname"])], {**os.environ, **environ}


def read_log(folder: Path) -> list[tuple[float, float]]:
    """Returns of every transaction when it ended, in seconds since the epoch, and how long it took, in seconds."""
    return [
        (int(words[4]) + int(words[5]) / 1e6, int(words[2]) / 1e6)
        for log in folder.glob("log*")
        for words in map(str.split, log.read_text(encoding="ascii").splitlines())
    ]


class Bench:
    """One run on one server: its databases, pgbench if it is there, and the options."""

    def __init__(self, url: str, pgbench: Path | None, options: argparse.Namespace) -> None:
        self.url = url
        self.pgbench = pgbench
        self.options = options
        self.floor = ""
        self._made: list[str] = []
        self._run = secrets.token_hex(4)

    def create(self, name: str, template: str = "") -> str:
        """Creates a database, empty or as a copy of another one of the run; returns its URL."""
        full, source = self._full(name), self._full(template) if template else "template0"
        order = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(full), sql.Identifier(source))
        with connect(self.url) as connection:
            connection.execute(order)
        self._made.append(name)
        parts = {key: str(value) for key, value in conninfo_to_dict(self.url).items() if value is not None}
        parts.pop("dbname", None)
        user, password = parts.pop("user", ""), parts.pop("password", "")
        login = quote(user, safe="") + (":" + quote(password, safe="") if password else "")
        query = urlencode(parts, quote_via=quote, safe="/")
        return f"postgresql://{login + '@' if login else ''}/{full}{'?' + query if query else ''}"

    def _full(self, name: str) -> str:
        return f"quota_bench_{self._run}_{name}"

    def drop(self, name: str) -> None:
        """Drops one of the run's databases."""
        order = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(self._full(name)))
        with connect(self.url) as connection:
            connection.execute(order)
        self._made.remove(name)

    def drop_all(self) -> None:
        """Drops what the run has made."""
        for name in list(self._made):
            self.drop(name)

    @contextlib.contextmanager
    def copy(self, name: str, template: str = "ledger") -> Iterator[str]:
        """Yields the URL of a copy, by default of the ledger that is empty but for its limits, and drops it."""
        yield self.create(name, template)
        self.drop(name)

    def prepare(self) -> None:
        """Makes the floor's database, and the ledger that every part gets a copy of."""
        self.floor, ledger = self.create("floor"), self.create("ledger")
        with connect(self.floor) as connection:
            run_sql(connection, F1_TABLE)
        migrate.upgrade(ledger)
        with connect(ledger) as connection:
            for unit in ("usd", "tokens"):
                connection.execute(
                    "SELECT quota.create_unit(%s) WHERE NOT EXISTS (SELECT FROM quota_internal.units WHERE name = %s)",
                    [unit, unit],
                )
            run_sql(connection, SUBJECTS)


@contextlib.contextmanager
def server() -> Iterator[tuple[str, str]]:
    """Yields the URL of a durable server and whence it is."""
    given = os.environ.get("QUOTA_BENCH_DSN", "").strip()
    if given:
        yield given, "QUOTA_BENCH_DSN"
        return
    folder = Path(tempfile.mkdtemp(prefix="quota-bench-"))
    try:
        folder.chmod(0o755)
        with embedded.EmbeddedServer(folder / "server", durable=True, settings=SETTINGS) as own:
            yield own.url, "embedded"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def must_be_fit(url: str) -> dict[str, str]:
    """Returns the server's settings. Errors: `BenchError` when it is not durable, not here, or not ours."""
    with connect(url) as connection:
        rows = connection.execute(
            "SELECT name, current_setting(name) FROM unnest(%s::text[]) name", [list(SHOWN)]
        ).fetchall()
        settings = {str(name): str(value) for name, value in rows}
        if settings["fsync"] != "on" or settings["synchronous_commit"] != "on":
            raise BenchError("the server is not durable; turn fsync and synchronous_commit on")
        if settings.pop("is_superuser") != "on":
            raise BenchError("the bench empties tables as no ordinary user may; connect as a superuser")
        try:
            cpu_s(connection.info.backend_pid)
        except OSError as error:
            raise BenchError("a backend's CPU time cannot be read; run on Linux, beside the server") from error
    return settings


def machine() -> dict[str, Any]:
    """The machine in general terms; nothing that names it."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = round(os.getloadavg()[0], 2)
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "system": platform.system(),
        "load_before": load,
    }  # fmt: skip


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, which a terminal shows as well; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def about(report: Mapping[str, Any]) -> str:
    """Returns the two lines that say on what a report was measured."""
    return "\n".join(
        f"{what}: " + ", ".join(f"{key} {value}" for key, value in report[what].items())
        for what in ("machine", "settings")
    )
