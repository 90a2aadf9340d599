"""What the tests of the engine share: calls by name, errors that change nothing, a clock, and calls that wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.server import Connection, connect

Row = dict[str, Any]
# How long a test waits for something that must happen, before it fails: what is tested is never how fast a machine is.
PATIENCE_S = 60.0
SQLSTATES = {
    "unknown_tenant": "QT001",
    "unknown_subject": "QT002",
    "unknown_unit": "QT003",
    "unknown_limit": "QT004",
    "unknown_tier": "QT005",
    "unknown_reservation": "QT006",
    "no_limit": "QT007",
    "unit_missing": "QT008",
    "unit_not_held": "QT009",
    "invalid_costs": "QT010",
    "invalid_amount": "QT011",
    "amount_out_of_range": "QT012",
    "invalid_name": "QT013",
    "invalid_ttl": "QT014",
    "invalid_argument": "QT015",
    "id_conflict": "QT016",
    "already_settled": "QT017",
    "already_released": "QT018",
    "expired": "QT019",
    "total_decreased": "QT020",
    "parent_differs": "QT021",
    "limit_differs": "QT022",
    "cycle": "QT023",
    "too_deep": "QT024",
    "has_open_holds": "QT025",
    "already_exists": "QT026",
    "unpriced_model": "QT030",
    "prices_overlap": "QT031",
}
NOON = "2026-05-04 12:00:00+00"


# -- calls ----------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A cost map as JSON text, every digit as it was written."""
    if isinstance(value, dict):
        return json.dumps({k: str(v) if isinstance(v, Decimal) else v for k, v in value.items()})
    return value


def statement(function: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[sql.Composed, list[Any]]:
    """Returns `SELECT * FROM quota.function(...)` with its parameters."""
    places = [sql.SQL("%s")] * len(args)
    places += [sql.SQL("{} => %s").format(sql.Identifier(name)) for name in named]  # type: ignore[misc]
    query = sql.SQL("SELECT * FROM {}({})").format(sql.Identifier("quota", function), sql.SQL(", ").join(places))
    return query, [_plain(value) for value in (*args, *named.values())]


def rows(connection: Connection, function: str, *args: Any, **named: Any) -> list[Row]:
    """Calls a public function; returns its rows as dicts."""
    query, parameters = statement(function, args, named)
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, parameters).fetchall()


def call(connection: Connection, function: str, *args: Any, **named: Any) -> Row:
    """Calls a public function that answers with one row."""
    (row,) = rows(connection, function, *args, **named)
    return row


def value(connection: Connection, query: str, *parameters: Any) -> Any:
    """The one value that a query returns."""
    row = connection.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]


def reserve(connection: Connection, subject: str, costs: Any, **named: Any) -> Row:
    return call(connection, "reserve", subject, costs, **named)


def hold(connection: Connection, subject: str, costs: Any, **named: Any) -> UUID:
    """A hold that must be granted; returns its id."""
    answer = reserve(connection, subject, costs, **named)
    assert answer["granted"], answer
    return cast("UUID", answer["reservation"])


def budget(
    connection: Connection, subject: str, capacity: Any = 50, name: str = "cap", unit: str = "usd", **named: Any
) -> None:
    """A subject, if it is not there yet, and a budget on it."""
    if not subject.endswith(":*"):
        call(connection, "ensure_subject", subject, **{k: named[k] for k in ("tenant",) if k in named})
    call(connection, "set_limit", subject, name, unit, "budget", capacity, **named)


def bucket(
    connection: Connection, subject: str, capacity: Any = 10, refill: Any = 1, name: str = "rate", **named: Any
) -> None:
    call(connection, "ensure_subject", subject)
    call(connection, "set_limit", subject, name, named.pop("unit", "cost"), "bucket", capacity, refill, **named)


def slots(connection: Connection, subject: str, capacity: int = 1, name: str = "slots") -> None:
    call(connection, "ensure_subject", subject)
    call(connection, "set_limit", subject, name, "concurrency", "concurrency", capacity)


def balance(
    connection: Connection, subject: str, limit_name: str = "cap", owner: str | None = None, **named: Any
) -> Row:
    """The row of one limit in the balance of a subject; `owner` when it stands on an ancestor."""
    (row,) = [
        row
        for row in rows(connection, "balance", subject, **named)
        if row["limit_name"] == limit_name and row["subject"] == (owner or subject)
    ]
    return row


def spent_reserved(connection: Connection, subject: str, limit_name: str = "cap", **named: Any) -> tuple[Any, Any]:
    row = balance(connection, subject, limit_name, **named)
    return row["spent"], row["reserved"]


def entries(connection: Connection, reservation: UUID | None = None) -> list[tuple[str, Any]]:
    """Kind and amount of the ledger's lines, oldest first."""
    return [
        (kind, amount)
        for kind, amount in connection.execute(
            "SELECT kind, amount FROM quota.entries WHERE %(id)s::uuid IS NULL OR reservation = %(id)s ORDER BY entry",
            {"id": reservation},
        )
    ]


def state(connection: Connection, reservation: UUID) -> str:
    return cast("str", value(connection, "SELECT state FROM quota.reservations WHERE reservation = %s", reservation))


# -- the clock ------------------------------------------------------------------------------------------------------


def set_clock(connection: Connection, at: str | datetime | None) -> None:
    """From now on the ledger reads this instant; None: the real time."""
    connection.execute("UPDATE quota_test.clock SET at = %s", (at,))


def advance(connection: Connection, span: str | timedelta) -> None:
    """Moves the ledger's clock, which must stand; back, too."""
    connection.execute(
        "UPDATE quota_test.clock SET at = (at AT TIME ZONE 'UTC' + %s::interval) AT TIME ZONE 'UTC'", (span,)
    )


# -- errors that change nothing -------------------------------------------------------------------------------------

_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'quota_internal' ORDER BY 1"


def snapshot(connection: Connection) -> dict[str, list[str]]:
    """Every row of every table of the ledger, as text."""
    found = {}
    for (name,) in connection.execute(_TABLES).fetchall():
        table = sql.Identifier("quota_internal", name)
        query = sql.SQL("SELECT coalesce(array_agg(t::text ORDER BY t::text), '{{}}') FROM {} t").format(table)
        row = connection.execute(query).fetchone()
        assert row is not None
        found[name] = row[0]
    return found


@contextmanager
def nothing_changes(connection: Connection) -> Iterator[None]:
    before = snapshot(connection)
    yield
    assert snapshot(connection) == before


def assert_error(caught: BaseException, error: str, *words: str) -> None:
    """The error is the contract's: its SQLSTATE, its name first, the value in it, and a remedy."""
    assert isinstance(caught, psycopg.Error), caught
    assert caught.sqlstate == SQLSTATES[error], caught
    message = caught.diag.message_primary or ""
    assert message.startswith(f"{error}: "), message
    for word in words:
        assert word in message, f"{word!r} is not named in: {message}"
    assert caught.diag.message_hint, "an error says what to do"


@contextmanager
def misuse(connection: Connection, error: str, *words: str) -> Iterator[None]:
    """The block fails with this error, its message names these words, and not a byte of the ledger is another one."""
    with nothing_changes(connection):
        with pytest.raises(psycopg.Error) as caught, connection.transaction():
            yield
        assert_error(caught.value, error, *words)


def outcome(connection: Connection, function: str, *args: Any, **named: Any) -> str:
    """What a call comes to, in a word: `ok`, `replayed`, `refused:reason`, or the name of its error."""
    try:
        with connection.transaction():
            answer = call(connection, function, *args, **named)
    except psycopg.Error as error:
        return word_of(error)
    return word_of(answer)


def word_of(answer: Row | BaseException) -> str:
    if isinstance(answer, psycopg.Error):
        names = {code: name for name, code in SQLSTATES.items()}
        return names.get(answer.sqlstate or "", answer.sqlstate or "lost")
    if isinstance(answer, BaseException):
        raise answer
    if answer.get("error"):
        return str(answer["error"])
    if set(answer) == {"released", "charged"}:
        return str(answer["released"] + answer["charged"])
    if answer.get("granted") is False:
        return f"refused:{answer['reason']}"
    if answer.get("replayed"):
        return "replayed"
    return "late" if answer.get("late") else "ok"


# -- calls that wait --------------------------------------------------------------------------------------------------


def as_batch(
    function: str, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The same call of `reserve` or `settle` as a batch of one."""
    arrays = {"id": "ids", "ttl": "ttls"}
    return (
        f"{function}_many",
        tuple([Jsonb(each) if isinstance(each, dict) else each] for each in args),
        {arrays[name]: f'{{"{each}"}}' for name, each in named.items()},
    )


class Background:
    """A call on a connection, in a thread and as a transaction of its own; with `batch` as a batch of one."""

    def __init__(
        self, url: str, function: str, *args: Any, isolation: str = "read committed", batch: bool = False, **named: Any
    ) -> None:
        if batch:
            function, args, named = as_batch(function, args, named)
        self._connection = connect(url)
        self._connection.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
        self.pid = self._connection.info.backend_pid
        self._answer: list[Row] | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args, named), daemon=True)
        self._thread.start()

    def _run(self, function: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            self._answer = rows(self._connection, function, *args, **named)
        except BaseException as error:
            self._answer = error
        finally:
            self._connection.close()

    def running(self) -> bool:
        return self._thread.is_alive()

    def blocked(self, observer: Connection) -> bool:
        """Waits until the call either waits for a lock or has ended; true if it waits."""
        deadline = time.monotonic() + PATIENCE_S
        while self.running():
            if value(observer, "SELECT cardinality(pg_blocking_pids(%s)) > 0", self.pid):
                return True
            assert time.monotonic() < deadline, "neither waits nor ends"
            time.sleep(0.002)
        return False

    def must_block(self, observer: Connection) -> None:
        assert self.blocked(observer), f"did not wait for a lock: {self._answer!r}"

    def result(self) -> Row | BaseException:
        """The one row of the answer, or the error."""
        self._thread.join(PATIENCE_S)
        assert not self.running(), "the call still waits"
        assert self._answer is not None
        if isinstance(self._answer, BaseException):
            return self._answer
        (row,) = self._answer
        return row

    def row(self) -> Row:
        answer = self.result()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def word(self) -> str:
        return word_of(self.result())


def in_parallel(url: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Row | BaseException]:
    """All calls at once, each on a connection of its own, let go together; their answers in order."""
    barrier = threading.Barrier(len(calls))
    answers: list[Row | BaseException] = [RuntimeError("not run")] * len(calls)

    def run(place: int, function: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            with connect(url) as connection:
                barrier.wait(PATIENCE_S)
                answers[place] = call(connection, function, *args, **named)
        except BaseException as error:
            answers[place] = error

    threads = [threading.Thread(target=run, args=(place, *each), daemon=True) for place, each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return answers


def new_id() -> UUID:
    return uuid4()
