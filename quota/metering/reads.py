"""One read for all who ask the same at the same time, and nobody is told what is older than its question."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from quota.client.attempts import Join, Plan
from quota.client.connections import PerProcess

__all__ = ["Reads"]

V = TypeVar("V")


class _Read(Generic[V]):
    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.value: V | None = None


class _Board(Generic[V]):
    """What is being read, and what will be read next, by key."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[Hashable, _Read[V]] = {}
        self.next: dict[Hashable, _Read[V]] = {}


class Reads(Generic[V]):
    """Shares reads. A read under way may be older than the question, so who comes meanwhile shares the one after it.

    No I/O; for threads and event loops alike.
    """

    def __init__(self) -> None:
        self._board: PerProcess[_Board[V]] = PerProcess(_Board)

    def sharing(self, key: Hashable, ask: Callable[[], Plan[V]], deadline_s: float) -> Plan[V]:
        """Plans a read that begins after now, by whoever makes it.

        Arguments:
            key: what is read.
            ask: plans the read itself.
            deadline_s: how long to wait for others (of `time.monotonic`).

        Errors: those of `ask`; a read that fails fails for who made it, the others ask for themselves.
        """
        board = self._board.get()
        with board.lock:
            read = board.next.get(key)
            leads = read is None
            if read is None:
                read = board.next[key] = _Read()
            before = board.running.get(key)
        if not leads:
            yield Join(read.done, deadline_s)
            return (yield from ask()) if read.value is None else read.value
        try:
            if before is not None:
                yield Join(before.done, deadline_s)
            with board.lock:
                del board.next[key]
                board.running[key] = read
            read.value = yield from ask()
            return read.value
        finally:
            with board.lock:
                for place in (board.next, board.running):
                    if place.get(key) is read:
                        del place[key]
            read.done.set_result(None)
