"""P6: decisions under a lease beside a bare lock and Decimals, in one process; and the cap over several processes.

A decision is a reserve with its settle, on both sides: the guard takes its lock twice, compares and adds. Both sides
take turns in one process; amounts differ from call to call.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from quota.client import Client
from quota.lease import LeasedBudget

PROCESSES = 8
THREADS = 16
CAP = 2000
_AMOUNTS = [(Decimal(n) / 100, Decimal(n) / 125) for n in range(1, 101)]
_ROUND = 200  # decisions between two looks at the clock


class Guard:
    """The bare guard: it knows no ids, no units, no time, and forgets everything when its process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cap = Decimal("1e17")
        self._spent = self._reserved = Decimal(0)

    def reserve(self, cost: Decimal) -> bool:
        """Takes the cost if it fits."""
        with self._lock:
            if self._spent + self._reserved + cost <= self._cap:
                self._reserved += cost
                return True
        return False

    def settle(self, cost: Decimal, true: Decimal) -> None:
        """Replaces the cost by the true one."""
        with self._lock:
            self._reserved -= cost
            self._spent += true


def guarded(guard: Guard) -> Callable[[], None]:
    """Returns what decides `_ROUND` times by the guard."""
    amounts = itertools.cycle(_AMOUNTS)

    def go() -> None:
        for cost, true in itertools.islice(amounts, _ROUND):
            if guard.reserve(cost):
                guard.settle(cost, true)

    return go


def leased(budget: LeasedBudget) -> Callable[[], None]:
    """Returns what decides `_ROUND` times under the lease."""
    amounts = itertools.cycle(_AMOUNTS)

    def go() -> None:
        for cost, true in itertools.islice(amounts, _ROUND):
            answer = budget.reserve({"usd": cost})
            if answer.reservation is not None:
                budget.settle(answer.reservation, {"usd": true})

    return go


def per_second(make: Callable[[], Callable[[], None]], threads: int, seconds: float) -> float:
    """Returns how many decisions a second so many threads come to."""
    until = time.monotonic() + seconds
    counts = []

    def run() -> None:
        go, count = make(), 0
        while time.monotonic() < until:
            go()
            count += _ROUND
        counts.append(count)

    running = [threading.Thread(target=run) for _ in range(threads)]
    began = time.monotonic()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def compared(url: str, threads: int, rounds: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs both sides in turn; returns the medians."""
    guard = Guard()
    sides = []
    with Client(url, timeout_s=60) as client, LeasedBudget(client, "user:one", {"usd": 10**9}) as budget:
        budget.settle(budget.reserve({"usd": 0}).reservation or "")  # takes the lease
        for _ in range(rounds):
            floor = per_second(lambda: guarded(guard), threads, seconds)
            value = per_second(lambda: leased(budget), threads, seconds)
            sides.append((value, floor))
            say(f"P6: {threads:2} threads {value:9,.0f}/s against {floor:9,.0f}/s: {value / floor:.3f}x")
        local, direct = budget.decisions
    return {
        "value": statistics.median(value for value, _ in sides),
        "floor": statistics.median(floor for _, floor in sides),
        "ratios": [round(value / floor, 4) for value, floor in sides],
        "local": local,
        "direct": direct,
    }


def _spend(url: str, granted: Any) -> None:
    """One of several processes: spends until the budget is gone."""
    count = itertools.count()
    with Client(url, timeout_s=60) as client:
        budget = LeasedBudget(client, "user:shared", {"usd": 20}, at_least={"usd": 0})

        def run() -> None:
            while (answer := budget.reserve({"usd": "0.01"})).reservation is not None:
                budget.settle(answer.reservation)
                next(count)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        budget.close()
    granted.put(next(count))


def overspend(url: str) -> dict[str, Any]:
    """Lets processes spend one budget under leases until it is gone; returns what was granted, spent and overspent."""
    context = multiprocessing.get_context("spawn")
    granted = context.Queue()
    processes = [context.Process(target=_spend, args=(url, granted)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [granted.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    with Client(url, timeout_s=60) as client:
        (row,) = client.balance("user:shared")
        violations = client.check()
    spent = row.spent or Decimal(0)
    return {
        "processes": PROCESSES,
        "granted": sum(counts),
        "spent": str(spent),
        "overspend": str(max(Decimal(0), spent - CAP)),
        "exact": spent == Decimal(sum(counts)) / 100 and not violations,
    }
