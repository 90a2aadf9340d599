"""Fleets of worker processes, each with a connection of its own: what demo, replay and load tests drive.

    with Fleet(20, url) as fleet:
        tallies = fleet.run(work, [(rows[n::20],) for n in range(20)], on_news=show)

A task is a function of a module, called in every worker with its `Worker` and its own arguments. Everything between
parent and worker goes through one pipe per worker, so that a worker killed at any point takes no lock along.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

from quota.client import Client
from quota.errors import QuotaError

__all__ = ["Fleet", "FleetError", "News", "Task", "Worker"]

# Generous: a whole fleet contends for one row and two cores, and what is measured is how long it takes.
_CALL_S = 30
_START_S = 60.0
_TOGETHER_S = 120.0
_END_S = 5.0

Task = Callable[..., Any]
"""Called as `task(worker, *arguments)` in the worker's process; must be importable there by name."""


class FleetError(QuotaError):
    """A worker process ended, or did not start, without having been told to."""


class News(NamedTuple):
    """What a worker tells: its number, `news`, `done` or `failed`, and the value that goes with it."""

    number: int
    kind: str
    value: Any


class Worker:
    """A worker as its task sees it.

    Fields:
        number: 0 to size - 1.
        size: how many workers the fleet has.
        client: the ledger, over this process's own connection.
    """

    def __init__(self, number: int, size: int, client: Client, pipe: Connection, barrier: Any) -> None:
        self.number = number
        self.size = size
        self.client = client
        self._pipe = pipe
        self._barrier = barrier

    def tell(self, value: object) -> None:
        """Sends news to the parent."""
        self._pipe.send(("news", value))

    def together(self) -> None:
        """Waits until every worker of the fleet has come to this point."""
        self._barrier.wait(_TOGETHER_S)


class Fleet:
    """So many workers, from entering to leaving the context.

    Arguments:
        size: how many processes.
        url: the database.
        tenant: the tenant of the workers' clients.
        prepare_threshold: as in `Client`.
        preload: modules that the tasks need, imported once for all workers.
    """

    def __init__(
        self,
        size: int,
        url: str,
        *,
        tenant: str = "default",
        prepare_threshold: int | None = 5,
        preload: Sequence[str] = (),
    ) -> None:
        self.size = size
        self._preload = list(preload)
        self._options = {"url": url, "tenant": tenant, "prepare_threshold": prepare_threshold}
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._calm = True

    def __enter__(self) -> Self:
        # Neither forked from this process (which has threads, and libraries that mind) nor started anew twenty times:
        # forked from a small server that has imported what a worker needs.
        how = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(how)
        if how == "forkserver":
            context.set_forkserver_preload(["quota.fleet", *self._preload])
        barrier = context.Barrier(self.size)
        try:
            for number in range(self.size):
                ours, theirs = context.Pipe()
                arguments = (number, self.size, self._options, theirs, barrier)
                process = context.Process(target=_serve, args=arguments, name=f"quota worker {number}", daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
            self._await_ready()
        except BaseException:
            self._end(patience_s=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(patience_s=_END_S if error is None and self._calm else 0)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        for number, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise FleetError(f"worker {number} was not ready within {_START_S:g} s; try fewer workers")
            self._receive(number)

    def run(
        self, task: Task, arguments: Sequence[tuple[Any, ...]], on_news: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Has every worker do the task, each with its own arguments.

        Arguments:
            task: see `Task`.
            arguments: one tuple per worker.
            on_news: told of what workers `tell`: the number of the worker, and the value.

        Result: what the tasks returned, by worker. Errors: the first error of a task; `FleetError` when a worker ended.
        """
        results: list[Any] = [None] * self.size
        self.start(task, arguments)
        for number, kind, value in self.news():
            if kind == "done":
                results[number] = value
            elif on_news is not None:
                on_news(number, value)
        return results

    def start(self, task: Task, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Hands the task out and does not wait for it; see `news`."""
        self._calm = False
        for (_, pipe), own in zip(self._workers, arguments, strict=True):
            pipe.send((task, own))

    def news(self) -> Iterator[News]:
        """Yields what the workers tell, until all are done. Errors: as in `run`."""
        busy = {pipe: number for number, (_, pipe) in enumerate(self._workers)}
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                news = self._receive(busy[pipe])
                if news.kind == "done":
                    del busy[pipe]
                yield news
        self._calm = True

    def _receive(self, number: int) -> News:
        process, pipe = self._workers[number]
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            process.join(_END_S)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise FleetError(f"worker {number} (process {process.pid}) ended with {how}; the run is void") from None
        if kind == "failed":
            raise value
        return News(number, kind, value)

    def kill(self, number: int) -> int:
        """Ends a worker with SIGKILL, whatever it is doing; returns its process id."""
        process, _ = self._workers[number]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return process.pid

    def _end(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for _, pipe in self._workers:
            pipe.close()  # an idle worker takes that as the end
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
        for process, _ in self._workers:
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


# -- in the worker's process ----------------------------------------------------------------------------------------


def _serve(number: int, size: int, options: dict[str, Any], pipe: Connection, barrier: Any) -> None:
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    with Client(**options, timeout_s=_CALL_S, pool_max=1, application_name=f"quota worker {number}") as client:
        worker = Worker(number, size, client, pipe, barrier)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            pipe.send(("ready", None))
            while True:
                task, arguments = pipe.recv()
                pipe.send(_outcome(task, worker, arguments))


def _outcome(task: Task, worker: Worker, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "done", task(worker, *arguments)
    except (BrokenPipeError, ConnectionResetError):
        raise  # the parent is gone
    except Exception as error:
        return "failed", _sendable(error)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    except Exception:
        return FleetError(f"{type(error).__name__}: {error}")
    return error


def _follow_parent() -> None:
    """Ends this process with its parent, which may be killed in the middle of a task."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
