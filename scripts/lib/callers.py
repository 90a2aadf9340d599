"""P5: many callers of one Python client, threads that hold small amounts of one budget, over and over."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bench_kit import EMPTY, HELD, PARTS, Bench, BenchError, connect, number, percentile, result, run_sql, say

from quota.client import Client
from quota.errors import QuotaError

CALLERS = 64
WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Calls:
    """What the callers did: in the window, grants per second and their 99th percentile in ms; and in all."""

    per_second: float
    p99_ms: float
    attempts: int
    successes: int
    batch_mean: float


def window(url: str, subject: str, *, coalesce: bool, seconds: float, in_flight: int | None = None) -> Calls:
    """Lets the callers call for so many seconds.

    Arguments: `url`, `subject`: whose budget; `coalesce`: whether the client coalesces; `in_flight`: with how many
    batches under way, None: as many as a client has by itself.
    """
    settings = {} if in_flight is None else {"batches_in_flight": in_flight}
    with Client(url, timeout_s=30, coalesce=coalesce, **settings) as client:
        first_s = time.monotonic() + WARM_UP_S
        last_s = first_s + seconds
        taken: list[tuple[int, list[tuple[float, float]]]] = []

        def call() -> None:
            attempts, grants = 0, []
            while (began_s := time.monotonic()) < last_s:
                attempts += 1
                try:
                    answer = client.reserve(subject, {"usd": "0.01"}, ttl=timedelta(hours=1))
                except QuotaError:
                    continue
                if answer.granted:
                    grants.append((began_s, time.monotonic()))
            taken.append((attempts, grants))

        threads = [threading.Thread(target=call) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        batches = client.batches
    grants = [grant for _, each in taken for grant in each]
    inside = [end_s - began_s for began_s, end_s in grants if first_s <= end_s < last_s]
    return Calls(
        per_second=len(inside) / seconds,
        p99_ms=percentile(inside, 99) * 1e3,
        attempts=sum(attempts for attempts, _ in taken),
        successes=len(grants),
        batch_mean=batches.requests / batches.sent if batches.sent else 1.0,
    )


def compared(bench: Bench, url: str, subject: str) -> dict[str, Any]:
    """Runs a coalescing client and one that is not in turn; returns the part's result."""
    rounds = []
    with connect(url) as watcher:
        for _ in range(bench.options.rounds):
            sides = []
            for coalesce in (False, True):
                run_sql(watcher, EMPTY)
                found = window(url, subject, coalesce=coalesce, seconds=bench.options.seconds)
                if found.successes != number(watcher, HELD.format(subject)):
                    raise BenchError("not every grant has left a hold")
                sides.append(found)
            below, above = sides
            rounds.append((above, below))
            say(
                f"P5: {above.per_second:8,.0f}/s against {below.per_second:7,.0f}/s: "
                f"{above.per_second / below.per_second:.2f}x; p99 {above.p99_ms:.1f} against {below.p99_ms:.1f} ms"
            )
    slower = statistics.median(above.p99_ms / below.p99_ms for above, below in rounds)
    return result(
        "P5",
        [(above.per_second, below.per_second) for above, below in rounds],
        met=slower <= 1,
        p99_ms=round(statistics.median(above.p99_ms for above, _ in rounds), 2),
        floor_p99_ms=round(statistics.median(below.p99_ms for _, below in rounds), 2),
        details={
            "what": f"{PARTS['P5'][0]}; p99 {slower:.2f}x",
            "attempts": sum(above.attempts for above, _ in rounds),
            "successes": sum(above.successes for above, _ in rounds),
            "floor_attempts": sum(below.attempts for _, below in rounds),
            "floor_successes": sum(below.successes for _, below in rounds),
            "batch_mean": round(statistics.median(above.batch_mean for above, _ in rounds), 1),
        },
    )


def p5(bench: Bench) -> dict[str, Any]:
    """Threads that share a client."""
    with bench.copy("p5") as ledger:
        return compared(bench, ledger, "user:one")
