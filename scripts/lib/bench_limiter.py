"""G3: a small query API in Flask, bare, in the metering middleware, and under Flask-Limiter with a durable Redis.

All three run at the same time, one worker of 8 threads each, and are asked in turns with one key. The page of 100 rows
comes from the PostgreSQL that the ledger is in, as in G1 and G2: so do a query API's pages, and the ledger has to share
it. Both check two limits: here a bucket and an hour's budget, there the windows of a second and of an hour. They have
no more in common: Flask-Limiter keeps counters and knows no keys, holds, settled costs or ledger.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
from typing import Any

import bench_redis
from bench_gateway import asked, asked_and_booked, books_of, latencies, must_answer, prepared, process, request_with
from bench_kit import PARTS, AbsentError, Bench, BenchError, percentile, result, say
from gateway_apps import ROWS
from http_load import Load

WSGI = ("limiter_apps", "gthread", "--threads", "8")
SIDES = {"bare": "bare", "middleware": "metered", "middleware, leased": "leased", "Flask-Limiter": "limited"}
METERED = ("middleware", "middleware, leased")
COUNTED = b"""
local counted = 0
for _, key in ipairs(redis.call('KEYS', '*/hour')) do counted = counted + redis.call('GET', key) end
return counted
"""


def must_have_limiter() -> None:
    """Errors: `AbsentError` where Flask-Limiter or its client of Redis is not installed."""
    for module in ("flask_limiter", "redis"):
        if importlib.util.find_spec(module) is None:
            raise AbsentError(
                f"Flask-Limiter is absent: there is no module {module}, and nothing was measured."
                " Install it (pip install 'flask-limiter[redis]>=4.1,<5') and run this again."
            )


def g3(bench: Bench) -> dict[str, Any]:
    """Closed loop, then open at a rate that all can keep, so that what is added is no queue."""
    must_have_limiter()
    closed: dict[str, list[Load]] = {side: [] for side in SIDES}
    opened: dict[str, list[Load]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        redis, _version = stack.enter_context(bench_redis.redis())
        url = stack.enter_context(bench.copy("g3"))
        secret = prepared(url)
        request = request_with(secret)
        environment = {"QUOTA_DATABASE_URL": url, "BENCH_REDIS": f"redis://127.0.0.1:{redis}"}
        sides = {name: stack.enter_context(process(WSGI, app, environment)) for name, app in SIDES.items()}
        for side in sides.values():
            must_answer(side.port, secret)
        # Asked once before the rounds: the rate, and caches that are full when they begin.
        rate = min(asked(bench, side.port, request).per_second for side in sides.values()) / 2
        for number in range(bench.options.rounds):
            for name, side in sides.items():
                closed[name].append(asked(bench, side.port, request))
            for name, side in sides.items():
                opened[name].append(asked(bench, side.port, request, rate))
                time.sleep(0.2)  # what a side could not keep up with is not the next one's
            told = ", ".join(
                f"{name} {closed[name][-1].per_second:.0f}/s {percentile(opened[name][-1].latencies_s, 50) * 1000:.2f}"
                for name in SIDES
            )
            say(f"G3: round {number + 1}: rate, and p50 in ms at {rate:.0f}/s: {told}")
        books, counted = books_of(url), int(bench_redis.asked(redis, "EVAL", COUNTED, 0))
    answered = {name: sum(load.answers for load in closed[name] + opened[name]) for name in SIDES}
    sides_of = {"middleware": METERED, "Flask-Limiter": ("Flask-Limiter",)}
    for name, found in (("middleware", books["booked"] // ROWS), ("Flask-Limiter", counted)):
        if found < (answers := sum(answered[side] for side in sides_of[name])):
            raise BenchError(f"{name} has counted {found} calls of {answers}; what it limits is not what was asked")
    rates = {name: [load.per_second for load in loads] for name, loads in closed.items()}
    medians = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    return result(
        "G3",
        list(zip(rates["middleware"], rates["Flask-Limiter"], strict=True)),
        met=not books["violations"],
        requests_per_s=medians,
        **latencies(opened, rate),
        details=asked_and_booked(sum(answered.values()), books),
    )


assert PARTS.keys() >= {"G3"}
RUN = {"G3": g3}
