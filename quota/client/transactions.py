"""Calls inside a transaction of the caller's own: what they do appears and vanishes with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import psycopg
from psycopg.rows import dict_row

from quota.calls import Call, Row
from quota.client.attempts import NoConnection, pause_s
from quota.errors import Fate, Unavailable, fate, from_database_error

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from quota.client.connections import BoundConnection

__all__ = ["Do", "Transaction", "run", "run_async", "transact"]

A = TypeVar("A")
B = TypeVar("B")


class Do(Protocol):
    """Carries out a call in a transaction."""

    def __call__(self, call: Call[B], /) -> B:
        """Returns its answer."""


class Transaction(Do, Protocol):
    """`Do` of `Client.transact`, which can also do without a call that fails."""

    def __call__(self, call: Call[B], /, *, savepoint: bool = False) -> B:
        """Returns its answer. `savepoint`: when the call fails, the transaction can go on."""


def run(connection: psycopg.Connection[Any] | Connection | Session, call: Call[A]) -> A:
    """Carries out a call on a connection of the caller's own. Neither commits nor retries.

    Arguments:
        connection: a psycopg connection, or a SQLAlchemy connection or session over psycopg.
        call: any value of `quota.calls`, with its tenant.

    Result: the answer. A hold is as lasting as the transaction: make the paid call after the commit.
    Errors: the `Misuse` that the database names. Everything else (serialization failures, lost connections) is raised
    as the driver raised it, because only the owner of the transaction can repeat it. As after any error PostgreSQL
    refuses further statements of the transaction; a savepoint around the call keeps the transaction usable.
    """
    if not isinstance(connection, psycopg.Connection):
        return call.answer(_run_sqlalchemy(connection, call))
    try:
        # A cursor of our own making: the connection's may deliver other rows, or take other placeholders.
        with psycopg.Cursor(connection, row_factory=dict_row) as cursor:
            rows = cursor.execute(call.statement, call.parameters(), binary=True).fetchall()
    except psycopg.Error as error:
        _raise_ours(error, error)
    return call.answer(rows)


async def run_async(connection: psycopg.AsyncConnection[Any] | AsyncConnection | AsyncSession, call: Call[A]) -> A:
    """`run`, asynchronous: on a psycopg `AsyncConnection`, or a SQLAlchemy `AsyncConnection` or `AsyncSession`."""
    if not isinstance(connection, psycopg.AsyncConnection):
        # SQLAlchemy's own bridge: both its kinds hand their synchronous counterpart to a function.
        return call.answer(await connection.run_sync(_run_sqlalchemy, call))
    try:
        async with psycopg.AsyncCursor(connection, row_factory=dict_row) as cursor:
            rows = await (await cursor.execute(call.statement, call.parameters(), binary=True)).fetchall()
    except psycopg.Error as error:
        _raise_ours(error, error)
    return call.answer(rows)


def _run_sqlalchemy(connection: Connection | Session, call: Call[Any]) -> list[Row]:
    # Whoever has such a connection has loaded SQLAlchemy; whoever has not need not wait for it.
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session

    on = connection.connection() if isinstance(connection, Session) else connection
    try:
        return [dict(row) for row in on.exec_driver_sql(call.statement, call.parameters()).mappings()]
    except DBAPIError as error:
        _raise_ours(error.orig, error)


def _raise_ours(cause: BaseException | None, error: Exception) -> NoReturn:
    ours = from_database_error(cause) if isinstance(cause, psycopg.Error) else None
    if ours is None:
        raise error
    raise ours from error


def transact(
    borrowed: Callable[[float], AbstractContextManager[BoundConnection]],
    work: Callable[[Transaction], A],
    *,
    timeout_s: float,
    retries: int,
) -> A:
    """The loop of `Client.transact`: `borrowed` lends a connection until a deadline (of `time.monotonic`)."""
    deadline_s = time.monotonic() + timeout_s
    attempt = 0

    def do_on(connection: BoundConnection) -> Transaction:
        def do(call: Call[B], /, *, savepoint: bool = False) -> B:
            with connection.transaction() if savepoint else nullcontext():
                try:
                    rows = connection.fetch(call.statement, call.parameters())
                except psycopg.Error as error:
                    _raise_ours(error, error)
                return call.answer(rows)

        return do

    while True:
        attempt += 1
        committing = False
        try:
            with borrowed(deadline_s) as connection:
                with connection.transaction():
                    answer = work(do_on(connection))
                    committing = True
                # A commit whose wait for a standby was cancelled is acknowledged with nothing but a warning.
                warnings = connection.warnings
            if warnings:
                raise Unavailable(f"transaction: the outcome is unknown: {'; '.join(warnings)}", True)
        except NoConnection as error:
            raise Unavailable(f"transaction: no connection within {timeout_s:g} s: {error}") from error
        except psycopg.Error as error:
            known = fate(error)
            again = known is Fate.ROLLED_BACK and attempt <= retries and time.monotonic() < deadline_s
            if known is Fate.REJECTED:
                raise
            if not again:
                raise Unavailable(f"transaction: {str(error).strip()}", committing) from error
            time.sleep(pause_s(attempt))
        else:
            return answer
