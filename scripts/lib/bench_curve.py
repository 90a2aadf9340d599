"""The curve: many clients on one budget and on a thousand, near and far from the cap, by single calls and by batches.

A hold is 1 of a cap of 4,000; its settle books a millionth, so that a budget stays as full as the cell says. Whether an
answer was right is asked in four ways: of the numbers that a refusal or a grant names; of the cell (where all that can
be open at once fits, any refusal is false); of the accounts, while it runs; and at the edge, where the holds are
settled in full and exactly as many must be granted as the cap has room for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

from bench_kit import EMPTY, Bench, BenchError, Connection, connect, markdown, number, percentile, run_sql, say
from bench_rates import drive, f1_rate

CLIENTS = (1, 4, 16, 64)
BUDGETS = (1, 1000)
FILLS = (5, 50, 95)  # per cent of the cap that are spent
SIZES = (1, 100)  # single calls, batches
CAPACITY = 4000
EDGE_CAPACITY = 1_000_000
EDGE_ROUNDS = 5

PREPARE = f"""
    SELECT quota.set_limit('lane:*', 'total', 'usd', 'budget', {CAPACITY});
    SELECT count(quota.create_subject('lane:' || n)) FROM generate_series(1, {max(BUDGETS)}) n;
    SELECT quota.create_subject('edge:1');
    SELECT quota.set_limit('edge:1', 'total', 'usd', 'budget', {EDGE_CAPACITY});
    CREATE TABLE wrong (false_refusals bigint NOT NULL, overspent bigint NOT NULL)
"""
# What is wrong with a decision, by its own numbers.
JUDGED = """
    count(*) FILTER (WHERE granted) AS granted,
    count(*) FILTER (WHERE granted IS NOT true AND coalesce(spent + reserved + requested <= capacity, true)) AS refused,
    count(*) FILTER (WHERE granted AND coalesce(spent + reserved > capacity, true)) AS overspent
"""
NOTE_WRONG = """
\\if :refused + :overspent > 0
INSERT INTO wrong VALUES (:refused, :overspent);
\\endif
"""
SINGLE = f"""
\\set lane random(1, :budgets)
SELECT (array_agg(reservation))[1] AS reservation, {JUDGED}
FROM quota.reserve(:kind || :lane::text, '{{"usd": "1"}}') \\gset
\\if :granted
SELECT state FROM quota.settle(:reservation, :totals::jsonb);
\\endif
{NOTE_WRONG}
"""
BATCHED = f"""
SELECT coalesce(array_agg(reservation) FILTER (WHERE granted), '{{}}')::text AS ids, {JUDGED}
FROM quota.reserve_many(
    ARRAY(SELECT :kind || 1 + floor(random() * :budgets::integer)::integer FROM generate_series(1, :size::integer)),
    array_fill('{{"usd": "1"}}'::jsonb, ARRAY[:size::integer])) \\gset
\\if :granted
SELECT count(*) FROM quota.settle_many(:ids::uuid[], array_fill(:totals::jsonb, ARRAY[:granted::integer]));
\\endif
{NOTE_WRONG}
"""
WRONG = "SELECT coalesce(sum({}), 0) FROM wrong"
# What `record` has booked counts here too: one a budget.
CLOSED = "SELECT count(*) FROM quota_internal.reservations WHERE state = 'settled'"
ABOVE = "SELECT count(*) FROM quota_internal.accounts WHERE spent + reserved > capacity"
BUSY = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench' AND datname = current_database()"
UPDATES = "SELECT {} FROM pg_stat_user_tables WHERE schemaname = 'quota_internal' AND relname = 'accounts'"
LSN = "SELECT pg_current_wal_insert_lsn() - '0/0'"


class Watch(threading.Thread):
    """Looks for accounts above their cap, over and over, until it is stopped; `above`: how many it has seen."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.above = 0
        self._url = url
        self._over = threading.Event()

    def run(self) -> None:
        """Looks every tenth of a second."""
        with connect(self._url) as watcher:
            while not self._over.wait(0.1):
                self.above += number(watcher, ABOVE)

    def stop(self) -> int:
        """Ends it; returns `above`."""
        self._over.set()
        self.join()
        return self.above


def empty(watcher: Connection, kind: str, budgets: int, spent: int) -> None:
    """Empties the ledger and spends so much of each budget."""
    run_sql(watcher, EMPTY)
    watcher.execute("TRUNCATE wrong")
    watcher.execute(
        "SELECT count(*) FROM generate_series(1, %s) n"
        " CROSS JOIN LATERAL quota.record(%s || n::text, jsonb_build_object('usd', %s::integer))",
        [budgets, kind, spent],
    )
    watcher.execute("SELECT pg_stat_force_next_flush()")


def settled_stats(watcher: Connection) -> tuple[int, int]:
    """Returns updates of accounts, all and HOT, once the backends that made them have gone."""
    deadline = time.monotonic() + 10
    while number(watcher, BUSY) and time.monotonic() < deadline:
        time.sleep(0.02)
    return number(watcher, UPDATES.format("n_tup_upd")), number(watcher, UPDATES.format("n_tup_hot_upd"))


def cell(
    bench: Bench, url: str, watcher: Connection, clients: int, budgets: int, fill: int, size: int
) -> dict[str, Any]:
    """Measures one cell."""
    spent = CAPACITY * fill // 100
    empty(watcher, "lane:", budgets, spent)
    updates, hot = settled_stats(watcher)
    lsn = number(watcher, LSN)
    watch = Watch(url)
    watch.start()
    try:
        variables = {"kind": "lane:", "budgets": budgets, "size": size, "totals": '{"usd": "0.000001"}'}
        seconds = bench.options.seconds
        run = drive(bench, url, SINGLE if size == 1 else BATCHED, seconds, clients, **variables)
    finally:
        above = watch.stop()
    wal = number(watcher, LSN) - lsn
    after, hot_after = settled_stats(watcher)
    attempts, granted = len(run.log) * size, number(watcher, CLOSED) - budgets
    window = f"created_at >= to_timestamp({run.since}) AND created_at < to_timestamp({run.since + seconds})"
    inside = number(watcher, f"{CLOSED} AND {window}")
    refused, false_refusals = attempts - granted, number(watcher, WRONG.format("false_refusals"))
    if clients * size < CAPACITY - spent:
        false_refusals = max(false_refusals, refused)
    overspent = number(watcher, WRONG.format("overspent")) + above + number(watcher, ABOVE)
    if number(watcher, "SELECT count(*) FROM quota.check()"):
        raise BenchError("the books are wrong: quota.check() is not empty")
    took = run.inside(run.since, run.since + seconds)
    if not took:
        raise BenchError(f"nothing was done within {seconds:.1f} s by {clients} clients; pass a larger --seconds")
    return {
        "clients": clients, "budgets": budgets, "fill": fill, "batch": size,
        "granted_per_s": round(inside / seconds, 1), "attempts": attempts, "granted": granted, "refused": refused,
        "false_refusals": false_refusals, "overspent": overspent,
        "p50_ms": round(percentile(took, 50) * 1e3, 2), "p99_ms": round(percentile(took, 99) * 1e3, 2),
        "wal_bytes_per_pair": round(wal / max(granted, 1)),
        "hot": round((hot_after - hot) / max(after - updates, 1), 4),
    }  # fmt: skip


def edge(bench: Bench, url: str, watcher: Connection, clients: int, size: int) -> dict[str, Any]:
    """Fills a budget to its cap by holds that are settled in full: first what fits for sure, then more than fits."""
    fits = clients * size * EDGE_ROUNDS
    room = fits + max(1, size // 2)
    empty(watcher, "edge:", 1, EDGE_CAPACITY - room)
    script, granted = SINGLE if size == 1 else BATCHED, []
    for transactions in (EDGE_ROUNDS, 2):
        variables = {"kind": "edge:", "budgets": 1, "size": size, "totals": '{"usd": "1"}'}
        drive(bench, url, script, 0, clients, transactions=transactions, **variables)
        granted.append(number(watcher, CLOSED) - 1)
    return {
        "clients": clients, "batch": size, "room": room, "granted": granted[1],
        "false_refusals": max(fits - granted[0], room - granted[1], number(watcher, WRONG.format("false_refusals"))),
        "overspent": max(granted[1] - room, number(watcher, WRONG.format("overspent")), number(watcher, ABOVE)),
    }  # fmt: skip


def curve(bench: Bench) -> dict[str, Any]:
    """Measures every cell and every edge; returns them with F1's rate at the same numbers of clients."""
    cells, edges, floors = [], [], {}
    with bench.copy("curve") as ledger, connect(ledger) as watcher:
        run_sql(watcher, PREPARE)
        for clients in CLIENTS:
            floors[str(clients)] = round(f1_rate(bench, clients), 1)
            for size, budgets, fill in itertools.product(SIZES, BUDGETS, FILLS):
                cells.append(cell(bench, ledger, watcher, clients, budgets, fill, size))
                say(f"curve: {cells[-1]}")
            for size in SIZES:
                edges.append(edge(bench, ledger, watcher, clients, size))
                say(f"edge: {edges[-1]}")
    return {"cells": cells, "edges": edges, "f1_per_s": floors}


def tables(found: Mapping[str, Any]) -> str:
    """The curve as Markdown tables."""
    head = ("calls", "budgets", "fill", "clients", "granted/s", "attempts", "granted", "refused", "false", "overspent",
            "p50 ms", "p99 ms", "WAL B/pair", "HOT")  # fmt: skip
    ordered = sorted(found["cells"], key=lambda c: (c["batch"], c["budgets"], c["fill"], c["clients"]))
    rows = [
        (
            "single" if c["batch"] == 1 else f"by {c['batch']}", f"{c['budgets']:,}", f"{c['fill']} %",
            str(c["clients"]),
            f"{c['granted_per_s']:,.0f}", f"{c['attempts']:,}", f"{c['granted']:,}", f"{c['refused']:,}",
            str(c["false_refusals"]), str(c["overspent"]), f"{c['p50_ms']:.1f}", f"{c['p99_ms']:.1f}",
            f"{c['wal_bytes_per_pair']:,}", f"{c['hot']:.1%}",
        )
        for c in ordered
    ]  # fmt: skip
    edges = [
        ("single" if e["batch"] == 1 else f"by {e['batch']}", str(e["clients"]), f"{e['room']:,}", f"{e['granted']:,}",
         str(e["false_refusals"]), str(e["overspent"]))
        for e in found["edges"]
    ]  # fmt: skip
    floors = [(clients, f"{rate:,.0f}") for clients, rate in found["f1_per_s"].items()]
    return "\n\n".join(
        [
            markdown([head, *rows]),
            markdown([("at the edge", "clients", "room", "granted", "false", "overspent"), *edges]),
            markdown([("clients", "F1 updates/s"), *floors]),
        ]
    )
