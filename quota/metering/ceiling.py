"""What passes while the ledger is away: a bucket in this process's memory, exact in integers."""

from __future__ import annotations

import threading
import time

from quota.metering.policy import FailOpen

__all__ = ["Ceiling"]

_NANO = 10**9


class Ceiling:
    """A bucket that starts full and refills as time passes. Thread-safe.

    Arguments: `terms`, its capacity and refill.
    """

    def __init__(self, terms: FailOpen) -> None:
        self._terms = terms
        self._lock = threading.Lock()
        self._level_nano = terms.capacity * _NANO
        self._at_ns = time.monotonic_ns()

    def take(self, cost: int) -> bool:
        """Takes `cost` if it is there; False takes nothing."""
        with self._lock:
            now_ns = time.monotonic_ns()
            refilled = self._level_nano + (now_ns - self._at_ns) * self._terms.refill_per_s
            self._level_nano = min(self._terms.capacity * _NANO, refilled)
            self._at_ns = now_ns
            if cost * _NANO > self._level_nano:
                return False
            self._level_nano -= cost * _NANO
            return True
