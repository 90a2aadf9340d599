"""P1, P2, P3, P7, P8, P11, P12: the CPU that one backend spends on a call.

Every part counts the CPU time of the one backend process over a window and the transactions done in that window.
"""

from __future__ import annotations

import math
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_kit import (
    EMPTY,
    F1,
    HELD,
    WARM_UP_S,
    Bench,
    BenchError,
    Connection,
    connect,
    cpu_s,
    number,
    pgbench_order,
    read_log,
    result,
    run_sql,
    say,
)

from quota.calls import pages

OPEN_HOLDS = 10_000
OVERDUE_HOLDS = 100_000
CHUNK = 1_000_000


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


RESERVE = "SELECT * FROM quota.reserve(:subject, :costs)"
RESERVE_ID = "SELECT reservation FROM quota.reserve(:subject, :costs) -> reservation"
SETTLE = "SELECT * FROM quota.settle(:reservation, :totals)"
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


class Pgbench:
    """Windows driven by pgbench, prepared, one client."""

    name = "pgbench, prepared, 1 client"

    def __init__(self, program: Path) -> None:
        self._program = program

    def window(self, load: Load, watcher: Connection, seconds: float) -> tuple[float, float, int, int]:
        """Returns CPU seconds, seconds and transactions of the window, and all transactions ever tried."""
        name = f"quota_bench_{secrets.token_hex(6)}"
        with tempfile.TemporaryDirectory(prefix="quota-bench-run-") as folder:
            script = "".join(f"{text} \\gset\n" if kept else f"{text};\n" for text, kept in load.parts())
            limit = math.ceil(seconds + WARM_UP_S + 2)
            order, environ = pgbench_order(
                self._program, load.database, Path(folder), script, f"-T{limit}", **load.variables
            )
            with subprocess.Popen(
                order,
                env={**environ, "PGAPPNAME": name},
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
            ends = [end for end, _ in read_log(Path(folder))]
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


def compare(bench: Bench, part: str, side: Load, floor: Load) -> dict[str, Any]:
    """Runs both sides in turn; returns the part's result."""
    rounds = []
    with connect(side.database) as side_watcher, connect(floor.database) as floor_watcher:
        for _ in range(bench.options.rounds):
            below = window(bench, floor, floor_watcher)
            above = window(bench, side, side_watcher)
            rounds.append((above, below))
            times = above.cpu_us / below.cpu_us
            say(f"{part}: {above.cpu_us:8.1f} us against {below.cpu_us:7.1f} us: {times:.2f}x")
    return result(
        part,
        [(above.cpu_us, below.cpu_us) for above, below in rounds],
        digits=2,
        details={
            "attempts": sum(above.attempts for above, _ in rounds),
            "successes": sum(above.successes for above, _ in rounds),
            "per_second": round(statistics.median(above.per_second for above, _ in rounds)),
            "floor_per_second": round(statistics.median(below.per_second for _, below in rounds)),
        },
    )


def window(bench: Bench, load: Load, watcher: Connection) -> Window:
    """Runs one side for one window, from empty tables."""
    if load.reset is not None:
        run_sql(watcher, load.reset)
    before = number(watcher, load.done) if load.done else 0
    driver = Driver() if bench.pgbench is None else Pgbench(bench.pgbench)
    used_s, lasted_s, inside, tried = driver.window(load, watcher, bench.options.seconds)
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
        return compare(bench, "P1", reserve(ledger, "user:one", '{"usd": "0.01"}'), f1(bench.floor))


def p2(bench: Bench) -> dict[str, Any]:
    """A pair of calls over a bucket and an hour's budget."""
    variables = {"subject": "user:two", "costs": '{"usd": "0.01"}', "totals": '{"usd": "0.006"}'}
    with bench.copy("p2") as ledger:
        pair = Load(ledger, (RESERVE_ID, SETTLE), variables, EMPTY, SETTLED.format("user:two"))
        return compare(bench, "P2", pair, f1(bench.floor))


def p3(bench: Bench) -> dict[str, Any]:
    """Six accounts: usd at three subjects, tokens, requests, a slot."""
    with bench.copy("p3") as ledger:
        side = reserve(ledger, "svc:six", '{"usd": "0.01", "tokens": 1200}')
        return compare(bench, "P3", side, f1(bench.floor))


def p7(bench: Bench) -> dict[str, Any]:
    """Refusals; they must leave no trace."""
    with bench.copy("p7") as ledger:
        with connect(ledger) as connection, connection.transaction():
            refused = connection.execute(REFUSED).fetchone() == (True,)
            if not refused or connection.execute(NO_XID).fetchone() != (True,):
                raise BenchError("a refusal has taken a transaction id, or is none")
        return compare(bench, "P7", refusal(ledger), Load(bench.floor, ("SELECT 1",)))


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
        return compare(bench, "P8", side, floor)


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
        return compare(bench, "P11", *sides)


def p12(bench: Bench) -> dict[str, Any]:
    """Overdue holds of others; and the account that refuses may have had some of its own: it has to look for them."""
    with bench.copy("p12") as crowded, bench.copy("p12_clean") as clean:
        with connect(crowded) as connection:
            load_holds(connection, OVERDUE_HOLDS)
            run_sql(connection, MAKE_OVERDUE)
        result = compare(bench, "P12", refusal(crowded), refusal(clean))
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


RUN = {"P1": p1, "P2": p2, "P3": p3, "P7": p7, "P8": p8, "P11": p11, "P12": p12}
