"""One process of a fleet that decides under leases: `python -m tests.faults.lease_worker URL SEED SECONDS`.

Its threads share one leased budget and spend from `user:fleet` until their time is over. At the end it prints a line of
JSON: how many calls were granted and refused, and what they come to.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from datetime import timedelta
from decimal import Decimal

from quota.client import Client
from quota.lease import LeasedBudget
from tests.faults.processes import wait_for_the_start
from tests.faults.worker import SUBJECT

THREADS = 16
CALL_S = 0.004
FORGOTTEN_TTL = timedelta(seconds=1)
LONG_TTL = timedelta(minutes=10)


class Tally:
    """What the threads of a process did, all of them together."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.granted = self.refused = 0
        self.booked = Decimal(0)

    def add(self, granted: int, refused: int, booked: Decimal) -> None:
        with self.lock:
            self.granted += granted
            self.refused += refused
            self.booked += booked


def spend(budget: LeasedBudget, tally: Tally, chance: random.Random, until: float) -> None:
    """One thread. A call is settled at less than its hold, or released, or forgotten: then it is booked in full."""
    granted = refused = 0
    booked = Decimal(0)
    while time.monotonic() < until:
        worst = Decimal(chance.randint(1, 50)) / 100
        lot = chance.random()
        answer = budget.reserve({"usd": worst}, ttl=FORGOTTEN_TTL if lot < 0.01 else LONG_TTL)
        if answer.reservation is None:
            refused += 1
            time.sleep(CALL_S)
            continue
        granted += 1
        time.sleep(CALL_S)
        if lot < 0.01:
            booked += worst
        elif lot < 0.1:
            budget.release(answer.reservation)
        else:
            cost = (worst * chance.randint(10, 100) / 100).quantize(Decimal("0.0001"))
            budget.settle(answer.reservation, {"usd": cost})
            booked += cost
    tally.add(granted, refused, booked)


def main(url: str, seed: str, seconds: str) -> None:
    tally = Tally()
    soon = timedelta(seconds=0.25)
    with (
        Client(url, timeout_s=60) as client,
        LeasedBudget(
            client, SUBJECT, {"usd": 2}, at_least={"usd": 0}, ttl=timedelta(seconds=3), post_every=soon, idle=soon * 2,
            on_expiry="charge",
        ) as budget,
    ):  # fmt: skip
        wait_for_the_start()
        until = time.monotonic() + float(seconds)
        threads = [
            threading.Thread(target=spend, args=(budget, tally, random.Random(f"{seed}:{n}"), until))
            for n in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        local, direct = budget.decisions
    told = {"granted": tally.granted, "refused": tally.refused, "booked": str(tally.booked)}
    print(json.dumps({**told, "local": local, "direct": direct}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
