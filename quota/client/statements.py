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
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from quota.calls import Row

__all__ = ["Statements"]

# psycopg remembers and prepares as many for a connection. What comes on top is executed all the same.
_MOST = 100
_PLACEHOLDER = re.compile(r"%(?:\((\w+)\)s|%)")


@dataclass(slots=True)
class _Known:
    """What is known of a statement: how often it was executed, its name if it is prepared, its columns."""

    uses: int = 0
    name: bytes | None = None
    columns: tuple[str, ...] = ()


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
        protocol, values = self._protocol, self._values
        query, names = _translated(text)
        sent = values.dump_sequence([parameters[name] for name in names], [PyFormat.AUTO] * len(names))
        types, formats = values.types, values.formats
        known = self._find(text, types)
        if known.name is None and self._prepare_threshold is not None and known.uses >= self._prepare_threshold:
            name = f"quota_{next(self._names)}".encode()
            protocol.send_prepare(name, query, types)
            _checked((yield from execute(protocol)))
            known.name = name
        if known.name is None:
            known.uses += 1
            protocol.send_query_params(query, sent, types, formats, Format.BINARY)
        else:
            protocol.send_query_prepared(known.name, sent, formats, Format.BINARY)
        result = _checked((yield from execute(protocol)))
        values.set_pgresult(result)
        columns = known.columns = known.columns or _columns(result)
        return [dict(zip(columns, row, strict=True)) for row in values.load_rows(0, result.ntuples, tuple)]

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


def _checked(results: list[PGresult]) -> PGresult:
    (result,) = results  # one statement, one result
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise error_from_result(result)
    return result
