"""`scripts/bench`: the CPU that one backend spends on a call, beside a floor that is measured in the same run.

Absolute times on a shared machine drift by a factor within the hour; the ratio of two sides that take turns does not.
So every part runs its two sides in rounds (A B A B ...), counts the CPU time of the one backend process over a window
and the transactions done in that window, and reports the medians: of each side, and of the ratios round by round.

The server is durable (fsync and synchronous_commit on) and the run's own, embedded and removed at the end; or the one
that QUOTA_BENCH_DSN names, on this machine and as a superuser, where databases `quota_bench_*` are made and dropped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_cpu
import bench_curve
import bench_gateway
import bench_http
import bench_lease
import bench_limiter
import bench_plot
import bench_rates
import callers
import psycopg
from bench_kit import (
    PARTS,
    RATES,
    AbsentError,
    Bench,
    BenchError,
    about,
    connect,
    find_pgbench,
    machine,
    markdown,
    must_be_fit,
    say,
    server,
)

from quota import embedded

P8_ROWS = 10_000_000
P8_ROWS_SMALL_DISK = 500_000
P8_DISK_BYTES = 20 << 30
KEYS = 1_000_000
KEYS_SMALL_DISK = 100_000


def p6(bench: Bench) -> dict[str, Any]:
    """Leases. What is measured is this process; the server only sees a posting now and then."""
    with bench.copy("p6") as ledger:
        with connect(ledger) as connection:
            connection.execute("SELECT quota.create_subject('user:shared')")
            order = "SELECT quota.set_limit('user:shared', 'total', 'usd', 'budget', %s)"
            connection.execute(order, [bench_lease.CAP])
        options = bench.options
        one, many = (
            bench_lease.compared(ledger, threads, options.rounds, options.seconds, say)
            for threads in (1, bench_lease.THREADS)
        )
        cap = bench_lease.overspend(ledger)
        say(f"P6: {cap}")
    ratio, target = statistics.median(one["ratios"]), PARTS["P6"][1]
    return {
        "id": "P6",
        "value": round(one["value"]),
        "floor": round(one["floor"]),
        "ratio": round(ratio, 3),
        "target": target,
        "met": ratio >= target and cap["exact"] and cap["overspend"] == "0",
        "details": {
            "what": PARTS["P6"][0],
            "ratios": one["ratios"],
            "attempts": one["local"] + one["direct"],
            "successes": one["local"],
            "threads": {str(bench_lease.THREADS): many},
            "cap": cap,
        },
    }


RUN: dict[str, Callable[[Bench], dict[str, Any]]] = {
    **bench_cpu.RUN, **bench_rates.RUN, **bench_gateway.RUN, **bench_limiter.RUN,
    "P5": callers.p5, "P6": p6, "P13": bench_http.p13,
}  # fmt: skip


# -- the run --------------------------------------------------------------------------------------------------------


def bound(part: str) -> str:
    """The target of a part, as it is shown."""
    return f"{'>=' if part in RATES else '<='} {PARTS[part][1]}x"


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    lines = "\n".join(f"  {part:4} {what}: {bound(part)}" for part, (what, _) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=f"What a call costs, beside its floor in the same run.\n\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="P1,P2", help="the parts to run (default: all; beside --curve: none)")
    parser.add_argument("--curve", action="store_true", help="the curve over clients, budgets and fill, and no part")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="length of a window (default 2, at most 60); P9 lasts 300 of them, but 10 minutes at most",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of both sides (default 7, at least 1)")
    parser.add_argument("--p8-rows", type=int, metavar="N", help="closed reservations for P8 (default 10,000,000)")
    parser.add_argument("--p11-keys", type=int, metavar="N", help="keys for P11 (default 1,000,000)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write bench.json and bench.md there, and curve.svg"
    )
    parser.add_argument("--psycopg", action="store_true", help="drive from Python although there is pgbench")
    options = parser.parse_args(arguments)
    if options.only is None:
        options.only = "" if options.curve else ",".join(PARTS)
    options.only = [part.strip().upper() for part in options.only.split(",") if part.strip()]
    if unknown := [part for part in options.only if part not in PARTS]:
        parser.error(f'unknown part "{unknown[0]}"; there are {", ".join(PARTS)}')
    if not 0 < options.seconds <= 60 or not 1 <= options.rounds <= 100:
        parser.error("--seconds is above 0 and at most 60, --rounds 1 to 100")
    roomy = shutil.disk_usage(tempfile.gettempdir()).free >= P8_DISK_BYTES
    if options.p8_rows is None:
        options.p8_rows = P8_ROWS if roomy else P8_ROWS_SMALL_DISK
    if options.p11_keys is None:
        options.p11_keys = KEYS if roomy else KEYS_SMALL_DISK
    if options.p8_rows < 1 or options.p11_keys < 1000:
        parser.error("--p8-rows is at least 1, --p11-keys at least 1000")
    return options


def measured(part: str, value: float) -> str:
    """A value of a part with its unit."""
    return f"{value:,.0f}/s" if part in RATES else f"{value:.1f} us"


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table, which a terminal shows as well."""
    head = ("part", "what", "value", "floor", "ratio", "rounds", "target", "met", "attempts", "successes")
    rows = [
        (
            r["id"], r["details"]["what"], measured(r["id"], r["value"]), measured(r["id"], r["floor"]),
            f"{r['ratio']:.2f}x", f"{min(r['details']['ratios']):.2f}-{max(r['details']['ratios']):.2f}",
            bound(r["id"]), "yes" if r["met"] else "no",
            f"{r['details']['attempts']:,}", f"{r['details']['successes']:,}",
        )
        for r in report["results"]
    ]  # fmt: skip
    shown = [markdown([head, *rows])] if rows else []
    if "curve" in report:
        shown.append(bench_curve.tables(report["curve"]))
    shown += [f"{part} is left out. {why}" for part, why in report["left_out"].items()]
    return "\n\n".join([*shown, about(report)])


def measure(
    bench: Bench, parts: Sequence[str], run_of: Mapping[str, Callable[[Bench], dict[str, Any]]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Runs the parts; returns their results, and of those whose other side is absent what to install."""
    results, left_out = [], {}
    for part in parts:
        try:
            results.append(run_of[part](bench))
        except AbsentError as error:
            left_out[part] = str(error)
            say(f"{part} is left out. {error}")
    return results, left_out


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns the report."""
    report: dict[str, Any] = {"machine": machine(), "settings": {}}
    pgbench = None if options.psycopg else find_pgbench()
    driver = "pgbench, prepared" if pgbench else "psycopg, prepared"
    if pgbench is None and (options.curve or bench_rates.RUN.keys() & set(options.only)):
        raise BenchError(
            f"{', '.join(bench_rates.RUN)} and the curve need pgbench; install it (Debian/Ubuntu: postgresql-contrib)"
            " or name the parts that do not: --only P1,P2,..."
        )
    with server() as (url, origin):
        settings = must_be_fit(url)
        report["settings"] = {
            "postgresql": settings.pop("server_version"), "origin": origin, "driver": driver, **settings,
            "seconds": options.seconds, "rounds": options.rounds,
            **({"p8_rows": options.p8_rows} if "P8" in options.only else {}),
        }  # fmt: skip
        bench = Bench(url, pgbench, options)
        try:
            bench.prepare()
            report["results"], report["left_out"] = measure(bench, options.only, RUN)
            if options.curve:
                report["curve"] = bench_curve.curve(bench)
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
        if "curve" in report:
            (options.out / "curve.svg").write_text(bench_plot.plot(report["curve"]), encoding="utf-8")
    if options.json:
        plain = [{key: value for key, value in r.items() if key != "details"} for r in report["results"]]
        print(json.dumps({**report, "results": plain}))
    else:
        print(table(report))
    return 1 if report["left_out"] and not report["results"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
