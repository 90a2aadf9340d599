"""Load over HTTP/1.1 on connections that stay: closed, each asks again when it is answered; and open, at a given rate.

An open loop measures from the moment when a request was due, so that who is slow cannot slow the question down.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import uvloop

WARM_UP_S = 0.5


class LoadError(Exception):
    """An answer that is none, or a connection that went."""


@dataclass
class Load:
    """What was measured: seconds of every answer in the window, how long that was, and all answers, before it too."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answers: int = 0

    @property
    def per_second(self) -> float:
        """Answers per second."""
        return len(self.latencies_s) / self.seconds


class _Caller(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._buffer = b""
        self._due_s = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._run.free(self)

    def ask(self, due_s: float) -> None:
        self._due_s = due_s
        self._transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        at = lower.find(b"\r\ncontent-length:")
        if not lower.startswith(b"http/1.1 200") or at < 0:
            self._run.fail(f"an answer that was not expected: {head[:300]!r}")
            return
        if len(rest) < int(lower[at + 17 :].partition(b"\r\n")[0]):
            return
        self._buffer = b""
        self._run.answered(self._due_s)
        self._run.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._run.over:
            self._run.fail(f"a connection was closed: {exc}")


class _Run:
    def __init__(self, request: bytes, rate_per_s: float | None) -> None:
        self.request = request
        self.over = False
        self.load = Load()
        self._rate_per_s = rate_per_s
        self._from_s = float("inf")
        self._free: deque[_Caller] = deque()
        self._due: deque[float] = deque()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(LoadError(why))

    def free(self, caller: _Caller) -> None:
        if self.over:
            return
        if self._rate_per_s is None:
            caller.ask(time.perf_counter())
        elif self._due:
            caller.ask(self._due.popleft())
        else:
            self._free.append(caller)

    def answered(self, due_s: float) -> None:
        self.load.answers += 1
        if due_s >= self._from_s and not self.over:
            self.load.latencies_s.append(time.perf_counter() - due_s)

    async def last(self, seconds: float) -> Load:
        begin = time.perf_counter()
        self._from_s = begin + WARM_UP_S
        end = self._from_s + seconds
        if self._rate_per_s is None:
            await asyncio.wait([self._failed], timeout=end - begin)
        else:
            await self._pace(begin, end)
        self.over = True
        self.load.seconds = seconds
        if self._failed.done():
            self._failed.result()
        return self.load

    async def _pace(self, begin: float, end: float) -> None:
        assert self._rate_per_s is not None
        number = 0
        while (now := time.perf_counter()) < end and not self._failed.done():
            while (due := begin + number / self._rate_per_s) <= now:
                number += 1
                if self._free:
                    self._free.popleft().ask(due)
                else:
                    self._due.append(due)
            await asyncio.sleep(max(0.0, begin + number / self._rate_per_s - time.perf_counter()))


async def _load(port: int, request: bytes, callers: int, seconds: float, rate_per_s: float | None) -> Load:
    loop = asyncio.get_running_loop()
    run = _Run(request, rate_per_s)
    transports = []
    try:
        for _ in range(callers):
            transport, _protocol = await loop.create_connection(lambda: _Caller(run), "127.0.0.1", port)
            transports.append(transport)
        return await run.last(seconds)
    finally:
        run.over = True
        for transport in transports:
            transport.close()


def load(port: int, request: bytes, *, callers: int, seconds: float, rate_per_s: float | None = None) -> Load:
    """Asks for so many seconds.

    Arguments: `port` on this machine; `request`, its bytes; `callers`, connections; `rate_per_s`: requests that are due
    each second, None: as many as are answered. Errors: `LoadError`.
    """
    return uvloop.run(_load(port, request, callers, seconds, rate_per_s))
