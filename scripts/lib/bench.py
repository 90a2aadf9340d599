"""`scripts/bench`: the CPU that one backend spends on a call, beside a floor that is measured in the same run.

Absolute times on a shared machine drift by a factor within the hour; the ratio of two sides that take turns does not.
So every part runs its two sides in rounds (A B A B ...), counts the CPU time of the one backend process over a window
and the transactions done in that window, and reports the medians: of each side, and of the ratios round by round.

The server is durable (fsync and synchronous_commit on) and the run's own, embedded and removed at the end; or the one
that QUOTA_BENCH_DSN names, on this machine and as a superuser, where databases `quota_bench_*` are made and dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from quota import embedded, migrate
from quota._pgbin import BinariesError, find_binaries
from quota.calls import pages

PARTS = {
    "P1": ("reserve, one account, against F1", 2.2),
    "P2": ("reserve + settle, two accounts each, mean of both, against F1", 2.8),
    "P3": ("reserve, six accounts, against F1", 5.0),
    "P7": ("refusal on an exhausted budget, against SELECT 1", 4.0),
    "P8": ("reserve among closed reservations and 10,000 open holds, against an empty ledger", 1.2),
    "P11": ("the last page of 100 of a million keys, as GET /v1/keys reads it, against the first page", 2.0),
    "P12": ("refusal beside 100,000 overdue holds of others, against P7's", 2.0),
}
SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
SHOWN = (
    "server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "shared_buffers",
    "max_wal_size", "jit", "is_superuser",
)  # fmt: skip
P8_ROWS = 10_000_000
P8_ROWS_SMALL_DISK = 500_000
P8_DISK_BYTES = 20 << 30
OPEN_HOLDS = 10_000
OVERDUE_HOLDS = 100_000
KEYS = 1_000_000
KEYS_SMALL_DISK = 100_000
CHUNK = 1_000_000
WARM_UP_S = 0.7  # connecting, planning, filling the backend's caches

Connection = psycopg.Connection[tuple[Any, ...]]


class BenchError(Exception):
    """The bench cannot say anything: the message says what went wrong and what to do."""


def say(text: str) -> None:
    """Progress, on stderr: stdout belongs to the result."""
    print(text, file=sys.stderr, flush=True)


# -- the workloads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """One side of a comparison: statements that one client repeats, a transaction each, on one database.

    Fields:
        database: its URL.
        statements: with `:name` for a variable; a statement that ends in `-> name` keeps its one column for the next.
        variables: name to value.
        reset: what empties the tables again, before each window; None: nothing to empty.
        done: a query that counts what the statements have achieved since the reset; None: every one counts.
    """

    database: str
    statements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    reset: str | None = None
    done: str | None = None

    def parts(self) -> list[tuple[str, str | None]]:
        """Returns each statement with the variable that keeps its result."""
        split = (statement.partition("->") for statement in self.statements)
        return [(text.strip(), name.strip() or None) for text, _, name in split]


@dataclass(frozen=True, slots=True)
class Window:
    """What one side did in one round: CPU per statement in us, statements per second, and attempts and successes."""

    cpu_us: float
    per_second: float
    attempts: int
    successes: int


F1_TABLE = """
    CREATE TABLE b (id bigint PRIMARY KEY, cap numeric NOT NULL, spent numeric NOT NULL, reserved numeric NOT NULL)
    WITH (fillfactor = 50);
    INSERT INTO b VALUES (1, 1e17, 0, 0)
"""
F1 = "UPDATE b SET reserved = reserved + :amount WHERE id = :id AND spent + reserved + :amount <= cap"
RESERVE = "SELECT * FROM quota.reserve(:subject, :costs)"
RESERVE_ID = "SELECT reservation FROM quota.reserve(:subject, :costs) -> reservation"
SETTLE = "SELECT * FROM quota.settle(:reservation, :totals)"

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
RETURN_HOLDS = """
    DELETE FROM quota_internal.reservations WHERE tenant = 'default' AND state = 'held' AND subject = 'user:one';
    UPDATE quota_internal.accounts SET reserved = 0, earliest_expiry = 'infinity' WHERE subject = 'user:one';
    VACUUM quota_internal.accounts
"""
REFUSED = "SELECT NOT granted FROM quota.reserve('user:full', '{\"usd\": 1}')"
NO_XID = "SELECT pg_current_xact_id_if_assigned() IS NULL"
MAKE_OVERDUE = """
    UPDATE quota_internal.reservations
    SET created_at = created_at - interval '13 hours', expires_at = expires_at - interval '13 hours'
    WHERE state = 'held' AND subject <> 'user:full';
    UPDATE quota_internal.accounts SET earliest_expiry = clock_timestamp() - interval '1 day' WHERE reserved > 0;
    VACUUM (ANALYZE) quota_internal.reservations, quota_internal.accounts
"""
OVERDUE = "SELECT count(*) FROM quota_internal.reservations WHERE state = 'held' AND expires_at < clock_timestamp()"
HELD = "SELECT count(*) FROM quota_internal.reservations WHERE state = 'held' AND subject = '{}'"
SETTLED = "SELECT count(*) FROM quota_internal.reservations WHERE state <> 'held' AND subject = '{}'"


def f1(database: str) -> Load:
    """The floor: a conditional UPDATE of one hot row."""
    return Load(database, (F1,), {"amount": "0.01", "id": "1"}, "VACUUM b", "SELECT (reserved * 100)::bigint FROM b")


def reserve(database: str, subject: str, costs: str, reset: str = EMPTY) -> Load:
    """A reserve that is always granted."""
    return Load(database, (RESERVE,), {"subject": subject, "costs": costs}, reset, HELD.format(subject))


def refusal(database: str) -> Load:
    """A reserve that never fits. Its successes are refusals; a grant would be seen as one too few."""
    return Load(database, (RESERVE,), {"subject": "user:full", "costs": '{"usd": "1"}'})


# -- measuring ------------------------------------------------------------------------------------------------------


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


class Pgbench:
    """Windows driven by pgbench, prepared, one client."""

    name = "pgbench, prepared, 1 client"

    def __init__(self, program: Path) -> None:
        self._program = program

    def window(self, load: Load, watcher: Connection, seconds: float) -> tuple[float, float, int, int]:
        """Returns CPU seconds, seconds and transactions of the window, and all transactions ever tried."""
        name = f"quota_bench_{secrets.token_hex(6)}"
        with tempfile.TemporaryDirectory(prefix="quota-bench-run-") as folder:
            script = Path(folder) / "script.sql"
            script.write_text(
                "".join(f"{text} \\gset\n" if kept else f"{text};\n" for text, kept in load.parts()), encoding="utf-8"
            )
            limit = math.ceil(seconds + WARM_UP_S + 2)
            order = [str(self._program), "-n", "-c1", "-j1", "-Mprepared", f"-T{limit}", f"-f{script}", "--log"]
            order += [f"--log-prefix={folder}/log", *(f"-D{key}={value}" for key, value in load.variables.items())]
            parts = conninfo_to_dict(load.database)
            words = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
            environ = {variable: str(parts[key]) for key, variable in words.items() if key in parts}
            with subprocess.Popen(
                [*order, str(parts["dbname"])],
                env={**os.environ, **environ, "PGAPPNAME": name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process:
                try:
                    # Not earlier: pgbench's first connection is a short one, to look around.
                    time.sleep(WARM_UP_S)
                    pid = self._backend(watcher, name, process)
                    first_cpu, first = cpu_s(pid), time.time()
                    time.sleep(seconds)
                    last_cpu, last = cpu_s(pid), time.time()
                    output, _ = process.communicate(timeout=limit + 30)
                except OSError:
                    # The backend is gone before its time: pgbench says why.
                    output, _ = process.communicate(timeout=limit + 30)
                    raise BenchError(f"pgbench ended early:\n{output.strip()[-2000:]}") from None
                except BaseException:
                    process.kill()
                    raise
            if process.returncode != 0:
                raise BenchError(f"pgbench failed:\n{output.strip()[-2000:]}")
            ends = [
                int(words[4]) + int(words[5]) / 1e6
                for log in Path(folder).glob("log*")
                for words in map(str.split, log.read_text(encoding="ascii").splitlines())
            ]
            inside = sum(first <= end < last for end in ends)
            return last_cpu - first_cpu, last - first, inside, len(ends)

    @staticmethod
    def _backend(watcher: Connection, name: str, process: subprocess.Popen[str]) -> int:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and process.poll() is None:
            row = watcher.execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
            if row is not None:
                return int(row[0])
            time.sleep(0.02)
        output, _ = process.communicate(timeout=10) if process.poll() is not None else ("it does not connect", None)
        raise BenchError(f"pgbench failed:\n{output.strip()[-2000:]}")


class Driver:
    """Windows driven from this process with prepared statements: the same method where there is no pgbench."""

    name = "psycopg, prepared, 1 client"

    def window(self, load: Load, watcher: Connection, seconds: float) -> tuple[float, float, int, int]:
        """Returns CPU seconds, seconds and transactions of the window, and all transactions ever tried."""
        del watcher
        variables: dict[str, Any] = dict(load.variables)
        parts = [(self._query(text, load.variables), kept) for text, kept in load.parts()]
        with connect(load.database) as connection:
            pid = connection.info.backend_pid
            tried = self._repeat(connection, parts, variables, time.monotonic() + WARM_UP_S)
            first_cpu, first = cpu_s(pid), time.monotonic()
            inside = self._repeat(connection, parts, variables, first + seconds)
            return cpu_s(pid) - first_cpu, time.monotonic() - first, inside, tried + inside

    @staticmethod
    def _query(text: str, variables: Mapping[str, str]) -> bytes:
        for key in sorted({*variables, "reservation"}, key=len, reverse=True):
            text = text.replace(f":{key}", f"%({key})s")
        return text.encode()

    @staticmethod
    def _repeat(
        connection: Connection, parts: list[tuple[bytes, str | None]], variables: dict[str, Any], until: float
    ) -> int:
        count = 0
        while time.monotonic() < until:
            for query, kept in parts:
                cursor = connection.execute(query, variables, prepare=True)
                if kept and (row := cursor.fetchone()) is not None:
                    variables[kept] = row[0]
            count += 1
        return count


class Bench:
    """One run on one server: its databases, its driver, and the parts' results."""

    def __init__(self, url: str, driver: Pgbench | Driver, options: argparse.Namespace) -> None:
        self.url = url
        self.driver = driver
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
    def copy(self, name: str) -> Iterator[str]:
        """Yields the URL of a copy of the ledger, empty but for its limits, and drops it."""
        yield self.create(name, "ledger")
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

    def compare(self, part: str, side: Load, floor: Load) -> dict[str, Any]:
        """Runs both sides in turn; returns the part's result."""
        rounds = []
        with connect(side.database) as side_watcher, connect(floor.database) as floor_watcher:
            for _ in range(self.options.rounds):
                below = self._window(floor, floor_watcher)
                above = self._window(side, side_watcher)
                rounds.append((above, below))
                times = above.cpu_us / below.cpu_us
                say(f"{part}: {above.cpu_us:8.1f} us against {below.cpu_us:7.1f} us: {times:.2f}x")
        ratio = statistics.median(above.cpu_us / below.cpu_us for above, below in rounds)
        return {
            "id": part,
            "value": round(statistics.median(above.cpu_us for above, _ in rounds), 2),
            "floor": round(statistics.median(below.cpu_us for _, below in rounds), 2),
            "ratio": round(ratio, 3),
            "target": PARTS[part][1],
            "met": ratio <= PARTS[part][1],
            "details": {
                "what": PARTS[part][0],
                "ratios": [round(above.cpu_us / below.cpu_us, 3) for above, below in rounds],
                "attempts": sum(above.attempts for above, _ in rounds),
                "successes": sum(above.successes for above, _ in rounds),
                "per_second": round(statistics.median(above.per_second for above, _ in rounds)),
                "floor_per_second": round(statistics.median(below.per_second for _, below in rounds)),
            },
        }

    def _window(self, load: Load, watcher: Connection) -> Window:
        if load.reset is not None:
            run_sql(watcher, load.reset)
        before = number(watcher, load.done) if load.done else 0
        used_s, lasted_s, inside, tried = self.driver.window(load, watcher, self.options.seconds)
        if inside == 0:
            raise BenchError(f"nothing was done within {lasted_s:.1f} s; pass a larger --seconds")
        successes = number(watcher, load.done) - before if load.done else tried
        if successes != tried:
            raise BenchError(f"{tried} attempts, {successes} successes: what is measured is not what was meant")
        each = len(load.statements)
        calls = inside * each
        return Window(used_s / calls * 1e6, calls / lasted_s, tried * each, successes * each)


# -- the parts ------------------------------------------------------------------------------------------------------


def p1(bench: Bench) -> dict[str, Any]:
    """One account."""
    with bench.copy("p1") as ledger:
        return bench.compare("P1", reserve(ledger, "user:one", '{"usd": "0.01"}'), f1(bench.floor))


def p2(bench: Bench) -> dict[str, Any]:
    """A pair of calls over a bucket and an hour's budget."""
    variables = {"subject": "user:two", "costs": '{"usd": "0.01"}', "totals": '{"usd": "0.006"}'}
    with bench.copy("p2") as ledger:
        pair = Load(ledger, (RESERVE_ID, SETTLE), variables, EMPTY, SETTLED.format("user:two"))
        return bench.compare("P2", pair, f1(bench.floor))


def p3(bench: Bench) -> dict[str, Any]:
    """Six accounts: usd at three subjects, tokens, requests, a slot."""
    with bench.copy("p3") as ledger:
        side = reserve(ledger, "svc:six", '{"usd": "0.01", "tokens": 1200}')
        return bench.compare("P3", side, f1(bench.floor))


def p7(bench: Bench) -> dict[str, Any]:
    """Refusals; they must leave no trace."""
    with bench.copy("p7") as ledger:
        with connect(ledger) as connection, connection.transaction():
            refused = connection.execute(REFUSED).fetchone() == (True,)
            if not refused or connection.execute(NO_XID).fetchone() != (True,):
                raise BenchError("a refusal has taken a transaction id, or is none")
        return bench.compare("P7", refusal(ledger), Load(bench.floor, ("SELECT 1",)))


def p8(bench: Bench) -> dict[str, Any]:
    """Closed reservations in the way, and open holds of others."""
    with bench.copy("p8") as crowded, bench.copy("p8_empty") as empty:
        with connect(crowded) as connection:
            load_closed(connection, bench.options.p8_rows)
            load_holds(connection, OPEN_HOLDS)
            say("P8: vacuum")
            connection.execute("VACUUM (ANALYZE, FREEZE) quota_internal.reservations")
            connection.execute("CHECKPOINT")
        one, costs = "user:one", '{"usd": "0.01"}'
        side, floor = (reserve(database, one, costs, RETURN_HOLDS) for database in (crowded, empty))
        return bench.compare("P8", side, floor)


def p11(bench: Bench) -> dict[str, Any]:
    """Keys by id, a page at a time: the walk costs the same at any depth."""
    call = pages.keys("default", most=101)
    nothing = (name for name, value in call.values.items() if value is None)
    text = call.statement
    for name in nothing:
        text = text.replace(f"%({name})s", "NULL")
    text = text.replace("%(tenant)s", ":tenant").replace("%(after)s", ":after").replace("%(most)s", "101")
    with bench.copy("p11") as ledger:
        with connect(ledger) as connection:
            last = load_keys(connection, bench.options.p11_keys)
        sides = [
            Load(ledger, (" ".join(text.split()),), {"tenant": "default", "after": after}) for after in (last, "!")
        ]
        return bench.compare("P11", *sides)


def p12(bench: Bench) -> dict[str, Any]:
    """Overdue holds of others; and the account that refuses may have had some of its own: it has to look for them."""
    with bench.copy("p12") as crowded, bench.copy("p12_clean") as clean:
        with connect(crowded) as connection:
            load_holds(connection, OVERDUE_HOLDS)
            run_sql(connection, MAKE_OVERDUE)
        result = bench.compare("P12", refusal(crowded), refusal(clean))
        with connect(crowded) as connection:
            left = number(connection, OVERDUE)
        if left != OVERDUE_HOLDS:
            raise BenchError(f"{left} of {OVERDUE_HOLDS} overdue holds are left: somebody has swept them")
        return result


def load_closed(connection: Connection, rows: int) -> None:
    """Writes settled reservations that booked nothing, so that the books need no entries; ids grow with time."""
    for first in range(1, rows + 1, CHUNK):
        last = min(first + CHUNK - 1, rows)
        say(f"P8: closed reservations {first:,} to {last:,} of {rows:,}")
        connection.execute(
            """INSERT INTO quota_internal.reservations
                   (tenant, id, subject, also, costs, held, booked, state, created_at, expires_at, closed_at,
                    line_accounts, line_windows, line_held, line_booked, line_charged, outcome)
               SELECT a.tenant,
                   (lpad(to_hex((extract(epoch FROM x.at) * 1000)::bigint), 12, '0') || '7'
                       || substr(md5(x.n::text), 1, 3) || '8' || substr(md5(x.n::text), 4, 15))::uuid,
                   a.subject, '{}', '{"usd": 0.01}', '{"usd": 0.01}', '{"usd": 0}', 'settled',
                   x.at, x.at + interval '10 minutes', x.at + interval '2 seconds',
                   ARRAY[a.id], ARRAY[NULL::timestamptz], ARRAY[0.01], ARRAY[0::numeric], ARRAY[false], 'ok'
               FROM (
                   SELECT n, clock_timestamp() - interval '1 day' - (%(rows)s::bigint - n) * interval '10 ms' AS at
                   FROM generate_series(%(first)s::bigint, %(last)s::bigint) n
               ) x
               CROSS JOIN quota_internal.accounts a
               WHERE a.subject = 'user:one'""",
            {"rows": rows, "first": first, "last": last},
        )


def load_keys(connection: Connection, count: int) -> str:
    """Writes keys and their subjects, bound to nothing; returns the id after which the last page begins."""
    say(f"P11: {count:,} keys")
    for statement in (
        """INSERT INTO quota_internal.subjects (tenant, name, kind, lineage, created_at)
           SELECT 'default', 'key:k' || md5(n::text), 'key', ARRAY['key:k' || md5(n::text)], clock_timestamp()
           FROM generate_series(1, %s::bigint) n""",
        """INSERT INTO quota_internal.api_keys (tenant, id, subject, name, secret_hash, created_at, changed_at)
           SELECT 'default', 'k' || md5(n::text), 'key:k' || md5(n::text), 'key ' || n, sha256(n::text::bytea),
               clock_timestamp(), clock_timestamp()
           FROM generate_series(1, %s::bigint) n""",
    ):
        connection.execute(statement.encode(), [count])
    connection.execute("VACUUM (ANALYZE, FREEZE) quota_internal.subjects")
    connection.execute("VACUUM (ANALYZE, FREEZE) quota_internal.api_keys")
    row = connection.execute("SELECT id FROM quota_internal.api_keys ORDER BY id DESC OFFSET 101 LIMIT 1").fetchone()
    assert row is not None
    return str(row[0])


def load_holds(connection: Connection, count: int) -> None:
    """Takes holds for a hundred other subjects, by the front door."""
    say(f"{count:,} open holds of others")
    connection.execute("SELECT quota.set_limit('team:*', 'total', 'usd', 'budget', 1e9)")
    connection.execute("SELECT count(quota.create_subject('team:' || n)) FROM generate_series(1, 100) n")
    for _ in range(count // 1000):
        connection.execute(
            """SELECT count(*) FROM generate_series(1, 1000) n
               CROSS JOIN LATERAL quota.reserve('team:' || 1 + n % 100, '{"usd": 1}', ttl => '12 hours') r
               WHERE r.granted"""
        )


RUN: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "P1": p1,
    "P2": p2,
    "P3": p3,
    "P7": p7,
    "P8": p8,
    "P11": p11,
    "P12": p12,
}


# -- the run --------------------------------------------------------------------------------------------------------


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


def find_driver() -> Pgbench | Driver:
    """pgbench from beside the server's binaries or on PATH; else psycopg."""
    with contextlib.suppress(BinariesError):
        beside = find_binaries().folder / "pgbench"
        if os.access(beside, os.X_OK):
            return Pgbench(beside)
    found = shutil.which("pgbench")
    return Pgbench(Path(found)) if found else Driver()


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


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    lines = "\n".join(f"  {part:4} {what}: <= {target}x" for part, (what, target) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=f"Backend CPU per call, beside its floor in the same run.\n\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="P1,P2", help="the parts to run (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window (default 2, at most 60)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of both sides (default 7, at least 1)")
    parser.add_argument("--p8-rows", type=int, metavar="N", help="closed reservations for P8 (default 10,000,000)")
    parser.add_argument("--p11-keys", type=int, metavar="N", help="keys for P11 (default 1,000,000)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write bench.json and bench.md there")
    parser.add_argument("--psycopg", action="store_true", help="drive from Python although there is pgbench")
    options = parser.parse_args(arguments)
    options.only = [part.strip().upper() for part in options.only.split(",") if part.strip()]
    if unknown := [part for part in options.only if part not in PARTS]:
        parser.error(f'unknown part "{unknown[0]}"; there are {", ".join(PARTS)}')
    if not 0 < options.seconds <= 60 or not 1 <= options.rounds <= 100:
        parser.error("--seconds is above 0 and at most 60, --rounds 1 to 100")
    roomy = shutil.disk_usage(tempfile.gettempdir()).free >= P8_DISK_BYTES
    if options.p11_keys is None:
        options.p11_keys = KEYS if roomy else KEYS_SMALL_DISK
    if options.p8_rows is None:
        options.p8_rows = P8_ROWS if roomy else P8_ROWS_SMALL_DISK
    if options.p8_rows < 1 or options.p11_keys < 1000:
        parser.error("--p8-rows is at least 1, --p11-keys at least 1000")
    return options


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table, which a terminal shows as well."""
    head = ("part", "what", "us", "floor us", "ratio", "rounds", "target", "met", "attempts", "successes")
    rows = [
        (
            r["id"], r["details"]["what"], f"{r['value']:.1f}", f"{r['floor']:.1f}", f"{r['ratio']:.2f}x",
            f"{min(r['details']['ratios']):.2f}-{max(r['details']['ratios']):.2f}", f"<= {r['target']}x",
            "yes" if r["met"] else "no", f"{r['details']['attempts']:,}", f"{r['details']['successes']:,}",
        )
        for r in report["results"]
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in [head, *rows]]  # fmt: skip
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    about = [
        "machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()),
        "settings: " + ", ".join(f"{key} {value}" for key, value in report["settings"].items()),
    ]
    return "\n".join([*lines, "", *about])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns the report."""
    report: dict[str, Any] = {"machine": machine(), "settings": {}, "results": []}
    driver = Driver() if options.psycopg else find_driver()
    with server() as (url, origin):
        settings = must_be_fit(url)
        report["settings"] = {
            "postgresql": settings.pop("server_version"), "origin": origin, "driver": driver.name, **settings,
            "seconds": options.seconds, "rounds": options.rounds,
            **({"p8_rows": options.p8_rows} if "P8" in options.only else {}),
        }  # fmt: skip
        bench = Bench(url, driver, options)
        try:
            bench.prepare()
            for part in options.only:
                report["results"].append(RUN[part](bench))
        finally:
            bench.drop_all()
    return report


def main(arguments: list[str]) -> int:
    """Runs the command line; the result's exit code says whether it was measured, not whether targets are met."""
    options = options_of(arguments)
    # A server is stopped and its folder removed however the run ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report = run(options)
    except (BenchError, embedded.EmbeddedError, psycopg.Error) as error:
        say(f"bench: {error}")
        return 1
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (options.out / "bench.md").write_text(table(report) + "\n", encoding="utf-8")
    if options.json:
        plain = [{key: value for key, value in r.items() if key != "details"} for r in report["results"]]
        print(json.dumps({**report, "results": plain}))
    else:
        print(table(report))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
