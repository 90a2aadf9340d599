"""Many callers of one Python client, for the bench: threads that hold small amounts of one budget, over and over."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

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
    inside = sorted(end_s - began_s for began_s, end_s in grants if first_s <= end_s < last_s)
    return Calls(
        per_second=len(inside) / seconds,
        p99_ms=inside[len(inside) * 99 // 100] * 1e3 if inside else float("inf"),
        attempts=sum(attempts for attempts, _ in taken),
        successes=len(grants),
        batch_mean=batches.requests / batches.sent if batches.sent else 1.0,
    )
