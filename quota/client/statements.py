"""How a connection executes: what psycopg does anew for every statement is done once for each, since there are few.

A cursor is made for one execution. It rewrites the text, finds out how to read every column and what it is called; for
a row of a dozen columns that is more work than everything that PostgreSQL does for it. Here the rewritten text, the
names and the readers stay with the connection. All else is psycopg's: how values are sent and read, its generator that
waits for an answer, its errors.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.generators import execute, fetch, send
from psycopg.pq import ConnStatus, ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

from quota.calls import Row

__all__ = ["Outcome", "Statements"]

# psycopg remembers and prepares as many for a connection. What comes on top is executed all the same.
_MOST = 100
_PLACEHOLDER = re.compile(r"%(?:\((\w+)\)s|%)")


@dataclass(slots=True)
class _Known:
    """What is known of a statement: how often it was executed, its name if it is prepared, its columns."""

    uses: int = 0
    name: bytes | None = None
    columns: tuple[str, ...] = ()


class _Bound(NamedTuple):
    """A statement with its values, as they are sent; `due`: under which name it is to be prepared now."""

    known: _Known
    due: bytes | None
    query: bytes
    sent: Sequence[Any]
    types: Any
    formats: Any


Outcome = tuple[list[Row], list[str]] | psycopg.Error
"""Rows and warnings of a statement, or what it failed with."""


class Statements:
    """The statements of one connection.

    Arguments:
        connection: in autocommit mode, or with a transaction that its user has begun. Nobody else may prepare anything
            on it: psycopg forgets what it has prepared with a `DEALLOCATE ALL`.
        prepare_threshold: uses before a statement is prepared on the server; None: never.
    """

    def __init__(self, connection: psycopg.BaseConnection[Any], prepare_threshold: int | None) -> None:
        self._protocol = connection.pgconn
        self._values = Transformer(connection)
        self._prepare_threshold = prepare_threshold
        self._known: dict[tuple[str, Sequence[int] | None], _Known] = {}
        self._names = itertools.count()

    def fetching(self, text: str, parameters: Mapping[str, object]) -> PQGen[list[Row]]:
        """Executes a statement as a generator, for `wait` of a connection of either kind.

        Arguments: `text`, with `%(name)s` for a parameter and `%%` for a percent sign; `parameters` by name.
        Result: the rows, columns by name. Errors: psycopg's.
        """
        protocol, bound = self._protocol, self._bind(text, parameters)
        if bound.due is not None:
            protocol.send_prepare(bound.due, bound.query, bound.types)
            (prepared,) = yield from execute(protocol)
            _check(prepared)
            bound.known.name = bound.due
        self._send(bound, bound.known.name)
        (result,) = yield from execute(protocol)
        _check(result)
        return self._rows(bound.known, result)

    def fetching_together(
        self, statements: Sequence[tuple[str, Mapping[str, object]]], warnings: list[str]
    ) -> PQGen[list[Outcome]]:
        """`fetching` of several statements in one round trip, each a transaction of its own, one after the other.

        Arguments: `statements`, text and parameters of each; `warnings`, where the server's arrive.
        Result: of each its rows and its warnings, or psycopg's error. What is executed does not depend on what became
        of those before; after a lost connection all that have no answer have the same error.
        """
        protocol = self._protocol
        bound = [self._bound_or_error(text, parameters) for text, parameters in statements]
        outcomes: list[Outcome] = []
        protocol.enter_pipeline_mode()
        try:
            for one in bound:
                if isinstance(one, _Bound):
                    self._send_all(one)
            yield from send(protocol)
            for one in bound:
                outcomes.append((yield from self._outcome(one, warnings)) if isinstance(one, _Bound) else one)
        except psycopg.OperationalError as error:
            if protocol.status == ConnStatus.OK:
                raise
            outcomes += [error] * (len(bound) - len(outcomes))
        finally:
            # Else it is under way still, or lost: nobody uses this connection again.
            if protocol.transaction_status == TransactionStatus.IDLE:
                protocol.exit_pipeline_mode()
        return outcomes

    def _bound_or_error(self, text: str, parameters: Mapping[str, object]) -> _Bound | psycopg.Error:
        try:
            return self._bind(text, parameters)
        except psycopg.Error as error:  # a value that cannot be sent
            return error

    def _send_all(self, bound: _Bound) -> None:
        """Sends a statement of a pipeline, prepared before where that is due."""
        if bound.due is not None:
            self._protocol.send_prepare(bound.due, bound.query, bound.types)
        self._send(bound, bound.due or bound.known.name)
        self._protocol.pipeline_sync()

    def _outcome(self, bound: _Bound, warnings: list[str]) -> PQGen[Outcome]:
        """Reads what became of a statement of a pipeline. Errors: psycopg's when the connection is lost."""
        results = yield from self._until_sync()
        said = list(warnings)
        warnings.clear()
        try:
            for result in results:
                _check(result)
            bound.known.name = bound.due or bound.known.name
            return self._rows(bound.known, results[-1]), said
        except psycopg.Error as error:
            return error

    def _until_sync(self) -> PQGen[list[PGresult]]:
        """Reads what belongs to one statement of a pipeline."""
        results: list[PGresult] = []
        while True:
            result = yield from fetch(self._protocol)
            if result is None:  # the end of a message's results
                if self._protocol.status != ConnStatus.OK:
                    raise psycopg.OperationalError("the connection is lost")
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return results
            else:
                results.append(result)

    def _bind(self, text: str, parameters: Mapping[str, object]) -> _Bound:
        values = self._values
        query, names = _translated(text)
        sent = values.dump_sequence([parameters[name] for name in names], [PyFormat.AUTO] * len(names))
        known, due = self._find(text, values.types), None
        if known.name is None and self._prepare_threshold is not None and known.uses >= self._prepare_threshold:
            due = f"quota_{next(self._names)}".encode()
        return _Bound(known, due, query, sent, values.types, values.formats)

    def _send(self, bound: _Bound, name: bytes | None) -> None:
        if name is None:
            bound.known.uses += 1
            self._protocol.send_query_params(bound.query, bound.sent, bound.types, bound.formats, Format.BINARY)
        else:
            self._protocol.send_query_prepared(name, bound.sent, bound.formats, Format.BINARY)

    def _rows(self, known: _Known, result: PGresult) -> list[Row]:
        self._values.set_pgresult(result)
        columns = known.columns = known.columns or _columns(result)
        return [dict(zip(columns, row, strict=True)) for row in self._values.load_rows(0, result.ntuples, tuple)]

    def _find(self, text: str, types: Sequence[int] | None) -> _Known:
        known = self._known.get((text, types))
        if known is None:
            known = _Known()
            if len(self._known) < _MOST:
                self._known[text, types] = known
        return known


@functools.lru_cache(maxsize=1000)
def _translated(text: str) -> tuple[bytes, tuple[str, ...]]:
    """The text as the server reads it, `$1` for `%(tenant)s`, and the names of its parameters in this order."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name = found[1]
        return "%" if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _PLACEHOLDER.sub(number, text).encode(), tuple(numbers)


def _columns(result: PGresult) -> tuple[str, ...]:
    return tuple((result.fname(i) or b"").decode() for i in range(result.nfields))


def _check(result: PGresult) -> None:
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise error_from_result(result)
