"""Client and AsyncClient: the calls of `quota.calls` over psycopg pools, with a deadline and safe retries.

    with Client("postgresql://worker@db/app") as client:
        with client.hold("key:42", {"usd": "0.25"}) as hold:
            hold.sending()
            usage = ask_the_model()
            hold.settle({"usd": usage.cost})

Everything is written once: what to do is decided by plans (`attempts`, `holds`), what can be asked by `verbs`; the two
clients only carry out steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent import futures
from contextlib import contextmanager
from decimal import Decimal
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolClosed, PoolTimeout

from quota.calls import Call, Reservation, Reserve, ReserveInTurn
from quota.client import verbs
from quota.client.attempts import Done, Execute, Join, NoConnection, Plan, Result, Together, Wait
from quota.client.connections import AsyncBoundConnection, BoundConnection, is_stale
from quota.client.core import Core
from quota.client.holds import AsyncHold, Hold
from quota.client.transactions import Do, Transaction, run, run_async, transact
from quota.client.verbs import awaited, blocking
from quota.client.waiting import AsyncBell, ThreadBell, Threads

__all__ = ["AsyncClient", "AsyncHold", "Client", "Do", "Hold", "Transaction", "run", "run_async"]

logger = logging.getLogger("quota.client")

A = TypeVar("A")
H = TypeVar("H")
P = ParamSpec("P")

# How long the background may take to cancel what the server still does for a call that is over.
_CANCEL_S = 2.0


def _held(
    make: Callable[[Any, Reserve | ReserveInTurn], H], build: Callable[Concatenate[Any, P], Call[Reservation]]
) -> Callable[Concatenate[Any, P], H]:
    def hold(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> H:
        """Returns a hold to be used as a context: reserved on entering (`Refused` when refused), closed on leaving.

        Arguments: as in `reserve`. What happens on leaving is told by `Hold`.
        """
        return make(self, cast("Reserve | ReserveInTurn", build(self, *args, **kwargs)))

    return hold


def _keep(task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Keeps a task until it is done: a loop has only weak references to its own."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Client(Core):
    """The ledger, for threads. Thread-safe, and safe after a fork: every process opens connections of its own.

    Arguments:
        url: `postgresql://` URL or libpq connection string; None: `QUOTA_DATABASE_URL`.
        tenant: the tenant of every call that this client builds.
        timeout_s: deadline of a call in seconds, for waiting, connecting, executing and retrying together.
        pool_max: most connections per process. They are opened when needed.
        prepare_threshold: uses before a statement is prepared on the server; None: never, for poolers in transaction
            mode older than PgBouncer 1.22.
        fail_open: let reservations pass, granted with the state `fail_open`, while the database is away. Each is
            counted (`bypasses`) and logged; closing one does nothing. When only the answer of a reserve was lost, the
            hold exists all the same; it returns when its time has passed.
        retries: how often a call may be repeated: serialization failures, deadlocks, lost connections. The id stays the
            same, so nothing is booked twice.
        application_name: how the server lists the sessions, unless the URL says otherwise.
        coalesce: gather concurrent reserves, settles and releases into batches: far more of them on one hot budget. See
            `docs/operating.md`. Nothing of what a call means changes, but that a reserve whose caller has left by its
            deadline or a cancellation cannot be called back; the hold is released when it turns out granted. (An
            exception is an id of the caller's own after its deadline: ask for the same id again, or let it expire.)
        batches_in_flight: most batches under way at a time; each takes a connection.
        batch_max: most calls in a batch, at most 10,000.

    Errors: `ConfigError` for arguments that cannot mean anything, or no URL. The first call connects, nothing before.
    A call never takes much longer than its deadline, even when the server accepts and never answers.
    """

    def _new_pool(self) -> ConnectionPool[BoundConnection]:
        pool = ConnectionPool(self._url, connection_class=BoundConnection, **self._pool_options)
        pool.open()
        return pool

    def _new_bell(self) -> ThreadBell:
        return ThreadBell()

    def _new_workers(self) -> Threads:
        return Threads(self.drive)

    def _start(self, plan: Plan[None]) -> None:
        self._workers.get().start(plan)

    def call(self, call: Call[A], *, timeout_s: Decimal | float | None = None) -> A:
        """Carries out any value of `quota.calls`; returns its answer. `timeout_s`: its own deadline in seconds."""
        return self.drive(self.plan(call, timeout_s))

    reserve = blocking(verbs.reserve)
    settle = blocking(verbs.settle)
    release = blocking(verbs.release)
    adjust = blocking(verbs.adjust)
    extend = blocking(verbs.extend)
    record = blocking(verbs.record)
    balance = blocking(verbs.balance)
    ensure_subject = blocking(verbs.ensure_subject)
    credit = blocking(verbs.credit)
    reap = blocking(verbs.reap)
    check = blocking(verbs.check)
    repair = blocking(verbs.repair)
    hold = _held(Hold, verbs.reserve)

    def drive(self, plan: Plan[A]) -> A:
        """Carries out the steps of a plan; returns its answer."""
        try:
            step = next(plan)
            while True:
                result: Done | None = None
                try:
                    if isinstance(step, Execute | Together):
                        result = self._execute(step)
                    elif isinstance(step, Join):
                        futures.wait([step.other], timeout=max(0.0, step.deadline_s - time.monotonic()))
                    elif isinstance(step, Wait):
                        step.bell.wait(step.until_s)
                    else:
                        time.sleep(step.seconds)
                except BaseException as error:  # the plan decides about every one
                    step = plan.throw(error)
                else:
                    step = plan.send(result)
        except StopIteration as stop:
            answer: A = stop.value
            return answer

    def transact(self, work: Callable[[Transaction], A], *, timeout_s: Decimal | float | None = None) -> A:
        """Carries out several calls in one transaction: all of them take effect, or none.

        Arguments:
            work: given a function that carries out a call and returns its answer. After a serialization failure or a
                deadlock it runs again, so it must do nothing else that counts.
            timeout_s: deadline in seconds; None: the client's.

        Result: what `work` returns. Errors: what `work` raises, the `Misuse` that the database names, `Unavailable`.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        seconds = self.timeout_s if timeout_s is None else float(timeout_s)
        return transact(self._borrowed, work, timeout_s=seconds, retries=self.retries)

    def _execute(self, step: Execute | Together) -> Done:
        pool: ConnectionPool[BoundConnection] = self._pools.get()
        connection = self._take(pool, step.deadline_s, look=step.look)
        try:
            if isinstance(step, Together):
                return step.results(connection.fetch_together(step.statements()))
            return Result(connection.fetch(step.statement, step.parameters), list(connection.warnings))
        finally:
            self._give_back(pool, connection)

    @contextmanager
    def _borrowed(self, deadline_s: float) -> Iterator[BoundConnection]:
        pool: ConnectionPool[BoundConnection] = self._pools.get()
        connection = self._take(pool, deadline_s)
        try:
            yield connection
        finally:
            self._give_back(pool, connection)

    def _take(self, pool: ConnectionPool[BoundConnection], deadline_s: float, *, look: bool = True) -> BoundConnection:
        while True:
            try:
                connection = pool.getconn(deadline_s - time.monotonic())
            except (PoolTimeout, PoolClosed) as error:
                raise NoConnection(self._why_no_connection()) from error
            if not (look and is_stale(connection)):
                connection.deadline_s = deadline_s
                connection.warnings.clear()
                return connection
            connection.close()
            pool.putconn(connection)

    def _give_back(self, pool: ConnectionPool[BoundConnection], connection: BoundConnection) -> None:
        if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
            threading.Thread(target=self._abandon, args=(pool, connection), daemon=True).start()
        else:
            pool.putconn(connection)

    @staticmethod
    def _abandon(pool: ConnectionPool[BoundConnection], connection: BoundConnection) -> None:
        try:
            connection.cancel_safe(timeout=_CANCEL_S)
        except psycopg.Error as error:
            logger.info("a statement that was too late could not be cancelled: %s", error)
        finally:
            connection.close()
            pool.putconn(connection)

    def close(self) -> None:
        """Closes this process's connections. Calls after it are a `RuntimeError`.

        A coalescing client answers first, for `timeout_s` at most, whoever waits.
        """
        self._closed = True
        workers: Threads | None = self._workers.pop()
        if workers is not None:
            workers.close(self.timeout_s)
        pool: ConnectionPool[BoundConnection] | None = self._pools.pop()
        if pool is not None:
            pool.close(timeout=self.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(Core):
    """`Client` for asyncio: the same arguments, the same verbs, each to be awaited.

    Every event loop has connections of its own; close the client in the loop that used it.
    """

    def _new_pool(self) -> AsyncConnectionPool[AsyncBoundConnection]:
        return AsyncConnectionPool(self._url, connection_class=AsyncBoundConnection, **self._pool_options)

    def _new_bell(self) -> AsyncBell:
        return AsyncBell()

    def _new_workers(self) -> set[asyncio.Task[None]]:
        return set()

    def _start(self, plan: Plan[None]) -> None:
        loop = asyncio.get_running_loop()
        _keep(loop.create_task(self.drive(plan)), self._workers.get(loop))

    def _scope(self) -> Hashable:
        return asyncio.get_running_loop()

    async def call(self, call: Call[A], *, timeout_s: Decimal | float | None = None) -> A:
        """Carries out any value of `quota.calls`; returns its answer. `timeout_s`: its own deadline in seconds."""
        return await self.drive(self.plan(call, timeout_s))

    reserve = awaited(verbs.reserve)
    settle = awaited(verbs.settle)
    release = awaited(verbs.release)
    adjust = awaited(verbs.adjust)
    extend = awaited(verbs.extend)
    record = awaited(verbs.record)
    balance = awaited(verbs.balance)
    ensure_subject = awaited(verbs.ensure_subject)
    credit = awaited(verbs.credit)
    reap = awaited(verbs.reap)
    check = awaited(verbs.check)
    repair = awaited(verbs.repair)
    hold = _held(AsyncHold, verbs.reserve)

    async def drive(self, plan: Plan[A]) -> A:
        """Carries out the steps of a plan; returns its answer."""
        try:
            step = next(plan)
            while True:
                result: Done | None = None
                try:
                    if isinstance(step, Join):
                        # A bell of one's own: who is cancelled here must not cancel what others wait for too.
                        bell = AsyncBell()
                        step.other.add_done_callback(bell.ring_from_anywhere)
                        await bell.wait(step.deadline_s)
                    elif isinstance(step, Execute | Together):
                        result = await self._execute(step)
                    elif isinstance(step, Wait):
                        await step.bell.wait(step.until_s)
                    else:
                        await asyncio.sleep(step.seconds)
                except BaseException as error:  # the plan decides about every one
                    step = plan.throw(error)
                else:
                    step = plan.send(result)
        except StopIteration as stop:
            answer: A = stop.value
            return answer

    async def _execute(self, step: Execute | Together) -> Done:
        pool: AsyncConnectionPool[AsyncBoundConnection] = self._pools.get(asyncio.get_running_loop())
        if pool.closed:
            await pool.open()
        connection = await self._take(pool, step.deadline_s, look=step.look)
        try:
            connection.deadline_s = step.deadline_s
            connection.warnings.clear()
            if isinstance(step, Together):
                return step.results(await connection.fetch_together(step.statements()))
            rows = await connection.fetch(step.statement, step.parameters)
            return Result(rows, list(connection.warnings))
        finally:
            if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self._in_background(self._abandon(pool, connection))
            else:
                # Shielded: a connection that a cancellation keeps from its pool is lost to it for ever.
                await asyncio.shield(self._in_background(pool.putconn(connection)))

    async def _take(
        self, pool: AsyncConnectionPool[AsyncBoundConnection], deadline_s: float, *, look: bool
    ) -> AsyncBoundConnection:
        while True:
            try:
                connection = await pool.getconn(deadline_s - time.monotonic())
            except (PoolTimeout, PoolClosed) as error:
                raise NoConnection(self._why_no_connection()) from error
            if not (look and is_stale(connection)):
                return connection
            await connection.close()
            await pool.putconn(connection)

    @staticmethod
    async def _abandon(pool: AsyncConnectionPool[AsyncBoundConnection], connection: AsyncBoundConnection) -> None:
        try:
            await connection.cancel_safe(timeout=_CANCEL_S)
        except psycopg.Error as error:
            logger.info("a statement that was too late could not be cancelled: %s", error)
        finally:
            await connection.close()
            await pool.putconn(connection)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return _keep(asyncio.get_running_loop().create_task(work), self._background)

    async def close(self) -> None:
        """Closes this loop's connections. Calls after it are a `RuntimeError`.

        A coalescing client answers first, for `timeout_s` at most, whoever waits.
        """
        self._closed = True
        workers: set[asyncio.Task[None]] | None = self._workers.pop(asyncio.get_running_loop())
        if workers:
            await asyncio.wait(set(workers), timeout=self.timeout_s)
        pool: AsyncConnectionPool[AsyncBoundConnection] | None = self._pools.pop(asyncio.get_running_loop())
        if self._background:
            await asyncio.wait(set(self._background), timeout=_CANCEL_S)
        if pool is not None:
            await pool.close(timeout=self.timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
