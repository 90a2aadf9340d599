"""P4, P9, P10: how much one hot budget takes per second, beside F1's updates per second.

pgbench drives both sides and logs every transaction; what was granted is counted in the ledger. These parts need
pgbench: a driver in Python would be what they measure.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    number,
    percentile,
    pgbench_order,
    read_log,
    result,
    run_sql,
    say,
)

from quota.client import Client

BATCH = 500
# pgbench takes every colon before a word for a variable, in quotes too.
SUBJECT = "user:one"
F1_CLIENTS = (1, 4, 8)
BATCH_CLIENTS = (1, 2, 3, 4)
F1_SCRIPT = f"{F1};\n"
PAIR = """
SELECT reservation FROM quota.reserve(:subject, '{"usd": "0.01"}') \\gset
SELECT state FROM quota.settle(:reservation, '{"usd": "0.006"}');
"""
BATCH_PAIRS = """
SELECT array_agg(reservation)::text AS ids
FROM quota.reserve_many(
    array_fill(:subject::text, ARRAY[:size::integer]),
    array_fill('{"usd": "0.01"}'::jsonb, ARRAY[:size::integer])) \\gset
SELECT count(*) FROM quota.settle_many(:ids::uuid[], array_fill('{"usd": "0.006"}'::jsonb, ARRAY[:size::integer]));
"""
RESERVE = """
SELECT granted FROM quota.reserve(:subject, '{"usd": "0.01"}', ttl => '12 hours');
"""
CLOSED = f"SELECT count(*) FROM quota_internal.reservations WHERE state = 'settled' AND subject = '{SUBJECT}'"

# P9
FULL_S = 600
SNAPSHOT_S = 60
BACK_S = 10
P9_CLIENTS = 4
SMALL_BYTES = 1 << 20
ACCOUNTS_BYTES = "SELECT pg_table_size('quota_internal.accounts')"

# P10
DUE = 100_000
MOST = 10_000  # of one call
REAP_BATCHES = (50, 100, 1000)
REAP_S = 5  # a sweep lasts at most so many windows
TAKE_DUE = f"""
    SELECT count(*)
    FROM quota.reserve_many(array_fill('{SUBJECT}'::text, ARRAY[{MOST}]),
        array_fill('{{"usd": "0.01"}}'::jsonb, ARRAY[{MOST}]),
        ttls => array_fill('12 hours'::interval, ARRAY[{MOST}])) r
    WHERE r.granted
"""
MAKE_DUE = f"""
    UPDATE quota_internal.reservations
    SET created_at = created_at - interval '13 hours', expires_at = expires_at - interval '13 hours'
    WHERE subject = '{SUBJECT}';
    UPDATE quota_internal.accounts SET earliest_expiry = clock_timestamp() - interval '1 day'
    WHERE subject = '{SUBJECT}';
    VACUUM (ANALYZE) quota_internal.reservations, quota_internal.accounts
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What pgbench logged: when each transaction ended and how long it took, in s; `since`: end of the warm-up."""

    log: Sequence[tuple[float, float]]
    since: float

    def inside(self, first: float, last: float) -> list[float]:
        """Returns how long each transaction took that ended in [first, last)."""
        return [took for end, took in self.log if first <= end < last]

    def per_second(self, seconds: float) -> float:
        """Returns transactions per second from the first to the last that ended within so many seconds."""
        ends = [end for end, _ in self.log if self.since <= end < self.since + seconds]
        if len(ends) < 3:
            raise BenchError(f"hardly anything was done within {seconds:.1f} s; pass a larger --seconds")
        return (len(ends) - 1) / (ends[-1] - ends[0])


@contextlib.contextmanager
def driven(
    bench: Bench, url: str, script: str, seconds: float, clients: int = 1, transactions: int = 0, **variables: Any
) -> Iterator[list[tuple[float, float]]]:
    """Lets pgbench run beside the block and waits for its end; the list it yields is filled by then.

    Arguments: `script`; for how many `seconds`, or of each of the `clients` so many `transactions`; its `variables`.
    """
    assert bench.pgbench is not None
    log: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="quota-bench-run-") as name:
        folder = Path(name)
        limit = f"-t{transactions}" if transactions else f"-T{math.ceil(seconds)}"
        order, environ = pgbench_order(bench.pgbench, url, folder, script, limit, clients, **variables)
        with subprocess.Popen(
            order, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield log
                output, _ = process.communicate(timeout=seconds + 120)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise BenchError(f"pgbench failed:\n{output.strip()[-2000:]}")
        log += sorted(read_log(folder))
        if not log:
            raise BenchError(f"pgbench did nothing in {seconds:.0f} s:\n{output.strip()[-2000:]}")


def drive(
    bench: Bench, url: str, script: str, seconds: float, clients: int = 1, transactions: int = 0, **variables: Any
) -> Run:
    """Lets pgbench run for so many seconds after its warm-up; the arguments are those of `driven`."""
    with driven(bench, url, script, seconds + 2 * WARM_UP_S, clients, transactions, **variables) as log:
        pass
    return Run(log, log[0][0] - log[0][1] + WARM_UP_S)


def f1_rate(bench: Bench, clients: int) -> float:
    """F1's updates per second with so many clients."""
    with connect(bench.floor) as watcher:
        watcher.execute("VACUUM b")
        before = number(watcher, "SELECT (reserved * 100)::bigint FROM b")
        run = drive(bench, bench.floor, F1_SCRIPT, bench.options.seconds, clients, amount="0.01", id=1)
        if number(watcher, "SELECT (reserved * 100)::bigint FROM b") - before != len(run.log):
            raise BenchError("not every update of F1 has counted")
    return run.per_second(bench.options.seconds)


def best(rates: Mapping[int, Sequence[float]]) -> int:
    """Returns the number of clients whose median rate is the highest."""
    return max(rates, key=lambda clients: statistics.median(rates[clients]))


def medians(rates: Mapping[int, Sequence[float]]) -> dict[str, int]:
    """Returns the median rate of every number of clients."""
    return {str(clients): round(statistics.median(each)) for clients, each in rates.items()}


# -- P4 -------------------------------------------------------------------------------------------------------------


def batch_rate(bench: Bench, url: str, watcher: Connection, clients: int, size: int = BATCH) -> tuple[float, int, int]:
    """Returns reserve+settle pairs per second in batches, attempted pairs and closed ones; from an empty ledger."""
    run_sql(watcher, EMPTY)
    run = drive(bench, url, BATCH_PAIRS, bench.options.seconds, clients, size=size, subject=SUBJECT)
    closed, attempted = number(watcher, CLOSED), len(run.log) * size
    if closed != attempted:
        raise BenchError(f"{attempted} pairs attempted, {closed} reservations settled")
    return run.per_second(bench.options.seconds) * size, attempted, closed


def p4(bench: Bench) -> dict[str, Any]:
    """Batches of one hot budget."""
    floors: dict[int, list[float]] = {clients: [] for clients in F1_CLIENTS}
    pairs: dict[int, list[float]] = {clients: [] for clients in BATCH_CLIENTS}
    attempts = successes = 0
    with bench.copy("p4") as ledger, connect(ledger) as watcher:
        for _ in range(bench.options.rounds):
            for clients in F1_CLIENTS:
                floors[clients].append(f1_rate(bench, clients))
            for clients in BATCH_CLIENTS:
                rate, attempted, closed = batch_rate(bench, ledger, watcher, clients)
                pairs[clients].append(rate)
                attempts, successes = attempts + attempted, successes + closed
            say(
                "P4: " + ", ".join(f"{n}: {rates[-1]:,.0f}" for n, rates in pairs.items()) + " pairs/s against "
                + ", ".join(f"{n}: {rates[-1]:,.0f}" for n, rates in floors.items())
            )  # fmt: skip
        violations = number(watcher, "SELECT count(*) FROM quota.check()")
    if violations:
        raise BenchError(f"the books are wrong: quota.check() has {violations} rows")
    side, floor = best(pairs), best(floors)
    return result(
        "P4",
        list(zip(pairs[side], floors[floor], strict=True)),
        connections=side,
        floor_clients=floor,
        details={
            "attempts": attempts,
            "successes": successes,
            "by_connections": medians(pairs),
            "floor_by_clients": medians(floors),
        },
    )


# -- P9 -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sampled(url: str, every_s: float = 1.0) -> Iterator[list[tuple[float, int]]]:
    """Samples the size of the accounts table beside the block: (seconds since the epoch, bytes)."""
    sizes: list[tuple[float, int]] = []
    stop = threading.Event()

    def sample() -> None:
        with connect(url) as watcher:
            while not stop.is_set():
                sizes.append((time.time(), number(watcher, ACCOUNTS_BYTES)))
                stop.wait(every_s)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield sizes
    finally:
        stop.set()
        sampler.join()


def slices(run: Run, first: float, last: float, length_s: float) -> list[float]:
    """Returns the rate of each whole slice of [first, last)."""
    counts = Counter(int((end - first) // length_s) for end, _ in run.log if first <= end < last)
    return [counts[n] / length_s for n in range(int((last - first) // length_s))]


def endurance(bench: Bench, ledger: str, seconds: float) -> dict[str, Any]:
    """Ten minutes of load: rates of the first and the last tenth, and how large the accounts table was."""
    say(f"P9: {seconds:.0f} s of reserve + settle on one budget")
    with sampled(ledger) as sizes:
        run = drive(bench, ledger, PAIR, seconds, P9_CLIENTS, subject=SUBJECT)
    tenth = seconds / 10
    first, last = (len(run.inside(start, start + tenth)) / tenth for start in (run.since, run.since + seconds - tenth))
    # Vacuum gives pages back, once a minute at most: what counts is that the second half needs no more than the first.
    tenths = [
        max((size for at, size in sizes if start <= at < start + tenth), default=0)
        for start in (run.since + n * tenth for n in range(10))
    ]
    found = {"first": first, "last": last, "bytes_by_tenth": tenths, "attempts": len(run.log),
             "bounded": max(tenths[5:]) <= max(1.5 * max(tenths[:5]), SMALL_BYTES)}  # fmt: skip
    say(f"P9: {found}")
    return found


def snapshot(bench: Bench, ledger: str, seconds: float) -> dict[str, Any]:
    """The same load while an idle session holds a snapshot; before, during in slices, and how soon it is back."""
    slice_s = seconds / 6
    say(f"P9: the same with a snapshot held for {seconds:.0f} s")
    before_s, after_s = 2 * slice_s, max(BACK_S, slice_s) + 2 * slice_s
    with driven(bench, ledger, PAIR, before_s + seconds + after_s + 2 * WARM_UP_S, P9_CLIENTS, subject=SUBJECT) as log:
        time.sleep(2 * WARM_UP_S + before_s)
        with connect(ledger) as idle, idle.transaction():
            idle.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            idle.execute("SELECT 1 FROM quota_internal.accounts")
            taken = time.time()
            time.sleep(seconds)
            ended = time.time()
    run = Run(log, taken)
    before = statistics.median(slices(run, taken - before_s, taken, slice_s / 4))
    held = slices(run, taken, ended, slice_s)
    after = slices(run, ended, ended + after_s - WARM_UP_S, 1.0)
    # Back: from that second on, the next five seconds are on average at nine tenths of what was before.
    back = next((n for n in range(len(after)) if statistics.fmean(after[n : n + 5]) >= 0.9 * before), None)
    found = {"before": before, "held": [round(each, 1) for each in held], "held_ratio": min(held) / before,
             "back_s": back, "attempts": len(log)}  # fmt: skip
    say(f"P9: {found}")
    return found


def p9(bench: Bench) -> dict[str, Any]:
    """One budget for ten minutes, then with a snapshot in the way of pruning; --seconds 2 is the full time."""
    scale = min(1.0, bench.options.seconds / 2)
    with bench.copy("p9") as ledger:
        long = endurance(bench, ledger, FULL_S * scale)
        short = snapshot(bench, ledger, SNAPSHOT_S * scale)
        with connect(ledger) as watcher:
            closed = number(watcher, CLOSED)
            violations = number(watcher, "SELECT count(*) FROM quota.check()")
    attempts = long["attempts"] + short["attempts"]
    if closed != attempts or violations:
        raise BenchError(f"{attempts} pairs attempted, {closed} settled; quota.check() has {violations} rows")
    back = short["back_s"]
    return result(
        "P9",
        [(long["last"], long["first"])],
        met=long["bounded"] and short["held_ratio"] >= 0.5 and back is not None and back <= BACK_S,
        seconds=FULL_S * scale,
        accounts_bytes=max(long["bytes_by_tenth"]),
        held_ratio=round(short["held_ratio"], 3),
        back_s=back,
        details={
            "attempts": attempts,
            "successes": closed,
            "clients": P9_CLIENTS,
            "endurance": long,
            "snapshot": short,
        },
    )


# -- P10 ------------------------------------------------------------------------------------------------------------


def load_due(url: str) -> None:
    """Takes holds of the one budget and moves them back in time, so that all are due."""
    with connect(url) as connection:
        taken = sum(number(connection, TAKE_DUE) for _ in range(DUE // MOST))
        if taken != DUE:
            raise BenchError(f"{taken} of {DUE} holds taken")
        run_sql(connection, MAKE_DUE)


def reserve_p99(bench: Bench, ledger: str, watcher: Connection) -> float:
    """The 99th percentile of a reserve's time in seconds, with one client and nothing else."""
    run_sql(watcher, EMPTY)
    run = drive(bench, ledger, RESERVE, bench.options.seconds, subject=SUBJECT)
    return percentile(run.inside(run.since, run.since + bench.options.seconds), 99)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a reaper did: holds closed per second and in all; and the reserves beside it: p99 in seconds, how many."""

    per_second: float
    closed: int
    p99: float
    reserves_per_second: float
    attempts: int
    successes: int


def swept(bench: Bench, batch: int) -> Sweep:
    """Sweeps what is due, until nothing is left or the time is over, while one client reserves of the same budget."""
    limit_s, closed = REAP_S * bench.options.seconds, 0
    with bench.copy("p10_sweep", "p10_due") as ledger:
        with (
            Client(ledger, timeout_s=60) as client,
            driven(bench, ledger, RESERVE, limit_s + 4 * WARM_UP_S, subject=SUBJECT) as log,
        ):
            time.sleep(2 * WARM_UP_S)
            first = time.time()
            while time.time() < first + limit_s:
                done = client.reap(max=batch)
                closed += done.released + done.charged
                if done.released + done.charged < batch:
                    break
            last = time.time()
        with connect(ledger) as watcher:
            held = number(watcher, HELD.format(SUBJECT))
            violations = number(watcher, "SELECT count(*) FROM quota.check()")
    if violations:
        raise BenchError(f"the books are wrong: quota.check() has {violations} rows")
    granted = held - (DUE - closed)
    if granted != len(log):
        raise BenchError(f"{len(log)} reserves attempted, {granted} granted")
    inside, lasted_s = Run(log, first).inside(first, last), last - first
    return Sweep(
        closed / lasted_s, closed, percentile(inside, 99), len(inside) / lasted_s, len(log), granted
    )  # fmt: skip


def p10(bench: Bench) -> dict[str, Any]:
    """The reaper at work on a budget that others use."""
    floors: dict[int, list[float]] = {clients: [] for clients in F1_CLIENTS}
    sweeps: dict[int, list[Sweep]] = {batch: [] for batch in REAP_BATCHES}
    idle: list[float] = []
    load_due(bench.create("p10_due", "ledger"))
    with bench.copy("p10_idle") as ledger, connect(ledger) as watcher:
        for _ in range(bench.options.rounds):
            for clients in F1_CLIENTS:
                floors[clients].append(f1_rate(bench, clients))
            idle.append(reserve_p99(bench, ledger, watcher))
            for batch in REAP_BATCHES:
                sweeps[batch].append(swept(bench, batch))
            say(
                "P10: " + ", ".join(f"by {n}: {each[-1].per_second:,.0f}/s, p99 {each[-1].p99 * 1e3:.1f} ms"
                                    for n, each in sweeps.items())
                + f" against {max(each[-1] for each in floors.values()):,.0f}/s, {idle[-1] * 1e3:.1f} ms"
            )  # fmt: skip
    bench.drop("p10_due")
    floor = best(floors)
    slower = {
        batch: statistics.median(sweep.p99 / p99 for sweep, p99 in zip(each, idle, strict=True))
        for batch, each in sweeps.items()
    }
    # The target wants both of one setting: the fastest of those that leave reserves alone, else the fastest.
    quiet = [batch for batch in REAP_BATCHES if slower[batch] <= 2] or list(REAP_BATCHES)
    batch = best({batch: [sweep.per_second for sweep in sweeps[batch]] for batch in quiet})
    return result(
        "P10",
        [(sweep.per_second, below) for sweep, below in zip(sweeps[batch], floors[floor], strict=True)],
        met=slower[batch] <= 2,
        batch=batch,
        p99_ratio=round(slower[batch], 2),
        details={
            "attempts": sum(sweep.attempts for each in sweeps.values() for sweep in each),
            "successes": sum(sweep.successes for each in sweeps.values() for sweep in each),
            "floor_by_clients": medians(floors),
            "idle_p99_ms": round(statistics.median(idle) * 1e3, 2),
            "by_batch": {
                str(batch): {
                    "closed_per_second": round(statistics.median(sweep.per_second for sweep in each)),
                    "closed": [sweep.closed for sweep in each],
                    "p99_ms": round(statistics.median(sweep.p99 for sweep in each) * 1e3, 2),
                    "p99_ratio": round(slower[batch], 2),
                    "reserves_per_second": round(statistics.median(sweep.reserves_per_second for sweep in each)),
                }
                for batch, each in sweeps.items()
            },
        },
    )


RUN = {"P4": p4, "P9": p9, "P10": p10}
