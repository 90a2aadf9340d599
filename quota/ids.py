"""Ids that sort by the time they were made: UUID version 7 (RFC 9562), the idempotency keys of what they name."""

from __future__ import annotations

import os
import threading
import time
from uuid import UUID

__all__ = ["uuid7"]

_TAIL_BITS = 74  # 12 + 62 bits of a version 7 UUID that are neither time, version nor variant
_STEP_BYTES = 4


class _Sequence:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    # Also runs in a forked child: the lock may have been held by a thread that the child does not have, and the child
    # must not continue its parent's sequence.
    start_anew = __init__

    def next(self) -> int:
        # Half of the tail's range is left free, so that steps within a millisecond rarely carry into the time.
        random = int.from_bytes(os.urandom(10)) >> (80 - (_TAIL_BITS - 1))
        fresh = (time.time_ns() // 1_000_000 << _TAIL_BITS) | random
        with self._lock:
            if fresh <= self._last:
                fresh = self._last + 1 + int.from_bytes(os.urandom(_STEP_BYTES))
            self._last = fresh
        return fresh


_sequence = _Sequence()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sequence.start_anew)


def uuid7() -> UUID:
    """Returns a new UUID of version 7, greater than every one that this process has made before.

    Result: 48 bits of Unix milliseconds, then random bits. Within one millisecond, or while the clock steps back, the
    next id is the last one plus a random step, so that ids stay ordered and stay unpredictable (RFC 9562, 6.2,
    method 2). Threads share one sequence; a forked child has its own.
    """
    fresh = _sequence.next()
    time_ms, middle, low = fresh >> _TAIL_BITS, fresh >> 62 & 0xFFF, fresh & ((1 << 62) - 1)
    return UUID(int=time_ms << 80 | 7 << 76 | middle << 64 | 0b10 << 62 | low)
