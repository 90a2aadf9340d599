"""One worker of a fleet of Python clients: `python -m tests.faults.client_worker URL WAY SEED SECONDS`.

Sixteen threads share one client and spend from `user:fleet` until their time is over. A line of JSON is written for
every decision: what it was told that each limit has spent and reserved. The ways differ in where holds come from.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from itertools import cycle
from typing import Any

from quota.calls import Reservation
from quota.client import Client
from tests.faults.processes import wait_for_the_start
from tests.faults.worker import ENDS, SUBJECT

THREADS = 16
TTL_S = 6
CALL_S = 0.004

Decide = Callable[[random.Random], dict[str, Any]]


def told(answer: Reservation) -> dict[str, Any]:
    """Returns what a decision said, as the fleet counts it."""
    if not answer.granted:
        return {"granted": False}
    shown = ("limit_name", "capacity", "spent", "reserved")
    return {"granted": True, "limits": [{key: str(getattr(row, key)) for key in shown} for row in answer.remaining]}


def coalescing(client: Client) -> Decide:
    """Holds, settles and releases through a coalescing client; some holds are forgotten, and expire."""
    ends = cycle(ENDS)

    def decide(chance: random.Random) -> dict[str, Any]:
        worst = Decimal(chance.randint(100, 500)) / 100
        began_s = time.monotonic()
        answer = client.reserve(SUBJECT, {"usd": worst}, ttl=timedelta(seconds=TTL_S))
        if not answer.granted or answer.reservation is None:
            time.sleep(CALL_S * 10)  # a refused caller does not come back at once
            return told(answer)
        time.sleep(CALL_S)
        end = next(ends)
        if end == "released":
            client.release(answer.reservation)
        # A settle after the hold's time is accepted above the cap: the machine may be slow, this worker is not late.
        elif end == "settled" and time.monotonic() - began_s < TTL_S / 3:
            client.settle(answer.reservation, {"usd": worst * chance.randint(10, 100) / 100})
        return told(answer)

    return decide


WAYS: dict[str, tuple[dict[str, Any], Callable[[Client], Decide]]] = {"coalescing": ({"coalesce": True}, coalescing)}
"""By name: the settings of the client, and what makes a decision with it."""


def main(url: str, way: str, seed: str, seconds: str) -> None:
    settings, how = WAYS[way]
    writing = threading.Lock()
    failures: list[BaseException] = []

    def spend(number: int, decide: Decide, until_s: float) -> None:
        chance = random.Random(int(seed) * THREADS + number)
        try:
            while time.monotonic() < until_s:
                line = json.dumps(decide(chance))
                with writing:
                    print(line, flush=True)
        except BaseException as failure:
            failures.append(failure)
            raise

    with Client(url, timeout_s=60, **settings) as client:
        decide = how(client)
        wait_for_the_start()
        until_s = time.monotonic() + float(seconds)
        threads = [threading.Thread(target=spend, args=(number, decide, until_s)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps({"batches": client.batches._asdict()}), flush=True)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
