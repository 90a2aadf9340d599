"""How callers wait for an answer that somebody else brings, and the threads that bring it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

__all__ = ["AsyncBell", "Bell", "ThreadBell", "Threads", "undisturbed"]

# Starting a thread costs more than a round trip; one that has had nothing to do for so long is not missed.
_LINGER_S = 10.0

# Ctrl-C may be delivered to any thread, and does not wake up the main one where it waits for a lock.
_SLICE_S = 0.1


class Bell(Protocol):
    """What one caller waits for, once."""

    def ring(self) -> None:
        """Wakes the caller, now or when it comes to wait. Called once by whoever brings the answer."""


class ThreadBell:
    """A bell for a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.ring = self._lock.release

    def wait(self, until_s: float) -> None:
        """Waits until the bell has rung, or until `until_s` (of `time.monotonic`)."""
        while (left_s := until_s - time.monotonic()) > 0:
            if self._lock.acquire(timeout=min(left_s, _SLICE_S)):
                return


class AsyncBell:
    """A bell for a task; rung in its own loop."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ring(self) -> None:
        """Wakes the caller."""
        if not self._rung.done():
            self._rung.set_result(None)

    def ring_from_anywhere(self, *_: object) -> None:
        """Wakes the caller, from another loop's thread, too."""
        try:
            running: object = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._rung.get_loop():
            self.ring()
        else:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and whoever waited there with it
                self._rung.get_loop().call_soon_threadsafe(self.ring)

    async def wait(self, until_s: float) -> None:
        """Waits until the bell has rung, or until `until_s` (of `time.monotonic`)."""
        timer = asyncio.get_running_loop().call_later(until_s - time.monotonic(), self.ring)
        try:
            await self._rung
        finally:
            timer.cancel()


class Threads:
    """Daemon threads that do pieces of work, started when there is work for them; one that is idle for long ends.

    Arguments:
        work: does one piece.
    """

    def __init__(self, work: Callable[[Any], object]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._pieces: deque[Any] = deque()
        self._threads = 0
        self._idle = 0
        self._linger_s = _LINGER_S

    def start(self, piece: Any) -> None:
        """Has some thread do this piece. Errors: `RuntimeError` when no thread can be started."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()
            if self._idle >= len(self._pieces):
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="quota-batches", daemon=True).start()
        except RuntimeError:
            with self._changed:
                self._threads -= 1
                if piece in self._pieces:  # otherwise another thread has come to it meanwhile
                    self._pieces.remove(piece)
                    raise

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            self._work(piece)

    def _next(self) -> Any | None:
        with self._changed:
            self._idle += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pieces or not self._linger_s, self._linger_s)
            self._idle -= 1
            if self._pieces:
                return self._pieces.popleft()
            self._threads -= 1
            self._changed.notify_all()
            return None

    def close(self, timeout_s: float) -> None:
        """Waits at most so many seconds until everything is done; idle threads end."""
        with self._changed:
            self._linger_s = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._threads, timeout_s)


async def undisturbed(work: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Carries work out to its end in a task of its own, however often the present one is cancelled meanwhile.

    Result: the last cancellation, for the caller to raise when nothing else is on its way. Errors: those of the work.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as again:
            cancelled = again
    task.result()
    return cancelled
