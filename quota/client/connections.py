"""Connections that keep a deadline, and pools that belong to one process.

**Deadlines.** Neither `statement_timeout` (behind a pooler in transaction mode it is a refused startup option, or a SET
that leaks to other clients) nor the network's own timeouts bound a call: a server may accept and never answer. So the
deadline is kept on this side. psycopg waits for its socket in slices and resumes a generator after each; that generator
is wrapped here, and stops when the time has passed. It needs nothing of the server, of a pooler, or of a timer thread.
What the server still does then is cancelled in the background, and the connection is thrown away.

**Forks.** A connection used by two processes mixes up their answers. Pools are kept by process: a child finds none of
its own and opens one; its parent's it never touches, neither to use it nor to close it (closing would end the parent's
session).
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import psycopg
from psycopg.rows import TupleRow

from quota.calls import Row
from quota.client.attempts import TooLate
from quota.client.statements import Outcome, Statements

__all__ = ["AsyncBoundConnection", "BoundConnection", "Failures", "PerProcess", "is_stale", "pool_options", "until"]

V = TypeVar("V")

Failures = deque[str]
"""Of length one: why connecting failed, if it failed the last time."""

# A worker of the pool that connects to a server that never answers is busy for this long at least; libpq's own least.
_CONNECT_LEAST_S = 2


def until(waiting: Generator[Any, Any, V], deadline_s: float) -> Generator[Any, Any, V]:
    """Returns psycopg's `waiting`, cut off at `deadline_s` (of `time.monotonic`) with `TooLate`.

    What has arrived is read before the clock is: an answer in time is an answer.
    """
    try:
        state = next(waiting)
        while True:
            ready = yield state
            state = waiting.send(ready)
            if time.monotonic() >= deadline_s:
                raise TooLate("no answer in time")
    except StopIteration as stop:
        answer: V = stop.value
        return answer


def _note_warnings(connection: psycopg.BaseConnection[Any], warnings: list[str]) -> None:
    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            warnings.append(diagnostic.message_primary or "WARNING")

    connection.add_notice_handler(note)


class BoundConnection(psycopg.Connection[TupleRow]):
    """A connection that gives up at `deadline_s` (of `time.monotonic`) and collects the server's `warnings`."""

    deadline_s: float = math.inf
    warnings: list[str]
    statements: Statements

    @classmethod
    def connect(  # type: ignore[override]  # everything else is passed on
        cls,
        conninfo: str = "",
        *,
        failures: Failures | None = None,
        prepare_threshold: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Connects as psycopg does; `failures` learns why not."""
        try:
            connection = super().connect(conninfo, prepare_threshold=None, **kwargs)
        except psycopg.Error as error:
            if failures is not None:
                failures.append(str(error).strip())
            raise
        if failures is not None:
            failures.clear()
        connection.warnings = []
        _note_warnings(connection, connection.warnings)
        connection.statements = Statements(connection, prepare_threshold)
        return connection

    def fetch(self, text: str, parameters: Mapping[str, object]) -> list[Row]:
        """Executes a statement of `quota.calls`; returns its rows."""
        return self.wait(self.statements.fetching(text, parameters))

    def fetch_together(self, statements: Sequence[tuple[str, Mapping[str, object]]]) -> list[Outcome]:
        """Executes statements in one round trip, each a transaction of its own; returns what became of each."""
        return self.wait(self.statements.fetching_together(statements, self.warnings))

    def wait(self, gen: Generator[Any, Any, V], *args: Any, **kwargs: Any) -> V:
        """psycopg's, until the deadline."""
        return super().wait(until(gen, self.deadline_s), *args, **kwargs)


class AsyncBoundConnection(psycopg.AsyncConnection[TupleRow]):
    """`BoundConnection`, asynchronous."""

    deadline_s: float = math.inf
    warnings: list[str]
    statements: Statements

    @classmethod
    async def connect(  # type: ignore[override]  # everything else is passed on
        cls,
        conninfo: str = "",
        *,
        failures: Failures | None = None,
        prepare_threshold: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Connects as psycopg does; `failures` learns why not."""
        try:
            connection = await super().connect(conninfo, prepare_threshold=None, **kwargs)
        except psycopg.Error as error:
            if failures is not None:
                failures.append(str(error).strip())
            raise
        if failures is not None:
            failures.clear()
        connection.warnings = []
        _note_warnings(connection, connection.warnings)
        connection.statements = Statements(connection, prepare_threshold)
        return connection

    async def fetch(self, text: str, parameters: Mapping[str, object]) -> list[Row]:
        """Executes a statement of `quota.calls`; returns its rows."""
        return await self.wait(self.statements.fetching(text, parameters))

    async def fetch_together(self, statements: Sequence[tuple[str, Mapping[str, object]]]) -> list[Outcome]:
        """Executes statements in one round trip, each a transaction of its own; returns what became of each."""
        return await self.wait(self.statements.fetching_together(statements, self.warnings))

    async def wait(self, gen: Generator[Any, Any, V], *args: Any, **kwargs: Any) -> V:
        """psycopg's, until the deadline."""
        return await super().wait(until(gen, self.deadline_s), *args, **kwargs)


def is_stale(connection: psycopg.BaseConnection[Any]) -> bool:
    """True when a connection that lay idle in the pool has something to say: nearly always that the server is gone.

    One look at the socket, no round trip. Whatever else it may be is cheaper thrown away than read.
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def pool_options(
    *, failures: Failures, application_name: str, prepare_threshold: int | None, pool_max: int, timeout_s: float
) -> dict[str, Any]:
    """Returns what both kinds of pool are opened with.

    Arguments:
        failures: learns why connecting fails.
        application_name: how the server lists the sessions, unless the URL says otherwise.
        prepare_threshold: uses before a statement is prepared; None: never.
        pool_max: most connections.
        timeout_s: how long a worker of the pool tries to connect before it lets others try.
    """
    return {
        "kwargs": {
            "autocommit": True,
            "prepare_threshold": prepare_threshold,
            "fallback_application_name": application_name,
            "client_encoding": "utf8",
            "connect_timeout": max(_CONNECT_LEAST_S, math.ceil(timeout_s)),
            "failures": failures,
        },
        "min_size": 0,  # nothing is opened before it is needed, and an idle client gives everything back
        "max_size": pool_max,
        "open": False,
        "reconnect_timeout": timeout_s,
        "name": application_name,
    }


class _Forks:
    """How many forks lie behind this process: a child may get the process id of an ancestor that has died."""

    def __init__(self) -> None:
        self.behind = 0

    def one_more(self) -> None:
        self.behind += 1


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.one_more)


class _Cell(Generic[V]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: V | None = None


class PerProcess(Generic[V]):
    """A value that every process (and, if asked so, every event loop) makes for itself when it first needs it.

    What a forked child inherits stays where it is, unused and not disposed of.

    Arguments:
        make: makes the value.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._cells: dict[Hashable, _Cell[V]] = {}

    def get(self, scope: Hashable = None) -> V:
        """Returns this process's value for `scope`."""
        key = self._key(scope)
        cell = self._cells.get(key)
        if cell is None:
            # A new cell has a new lock: the old one may have been held, at the fork, by a thread that the child lacks.
            cell = self._cells.setdefault(key, _Cell())
        value = cell.value
        if value is None:
            with cell.lock:
                if cell.value is None:
                    cell.value = self._make()
                value = cell.value
        return value

    def pop(self, scope: Hashable = None) -> V | None:
        """Forgets this process's value for `scope`; returns it if there is one."""
        cell = self._cells.pop(self._key(scope), None)
        return None if cell is None else cell.value

    @staticmethod
    def _key(scope: Hashable) -> Hashable:
        return os.getpid(), _forks.behind, scope
