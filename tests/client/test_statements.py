"""What a connection keeps of its statements: prepared in time, never too many, and good whatever a transaction did."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest

from quota.calls import Balance, Reserve
from quota.client import Client, Transaction
from quota.client.connections import BoundConnection
from quota.errors import UnknownSubject

PREPARED = "SELECT count(*) AS found FROM pg_prepared_statements"


@pytest.fixture
def connection(ledger: str) -> Iterator[BoundConnection]:
    with BoundConnection.connect(ledger, autocommit=True, prepare_threshold=2) as connection:
        yield connection


def test_a_statement_is_prepared_after_its_uses_and_answers_alike(connection: BoundConnection) -> None:
    text = "SELECT %(a)s::integer + 1 AS b, %(a)s::integer AS a, '%%' AS sign, %(c)s::numeric AS c"
    prepared = []
    for use in range(5):
        sent = None if use == 3 else "0.10"
        row = {"b": use + 1, "a": use, "sign": "%", "c": None if sent is None else Decimal(sent)}
        assert connection.fetch(text, {"a": use, "c": sent}) == [row]
        found = connection.fetch(f"{PREPARED} WHERE statement LIKE 'SELECT $1%%'", {})
        prepared.append(found[0]["found"])
    assert prepared == [0, 0, 1, 1, 1]


def test_values_of_another_type_are_another_statement(connection: BoundConnection) -> None:
    text = "SELECT %(a)s::text AS a, pg_typeof(%(a)s)::text AS type"
    for _ in range(4):
        assert connection.fetch(text, {"a": True})[0]["type"] == "boolean"
        assert connection.fetch(text, {"a": b"\0"})[0]["type"] == "bytea"


def test_the_number_of_prepared_statements_is_bounded(connection: BoundConnection) -> None:
    for number in range(150):
        for _ in range(3):
            assert connection.fetch(f"SELECT {number} AS n", {}) == [{"n": number}]
    (row,) = connection.fetch(PREPARED, {})
    assert row["found"] == 100


def test_an_error_is_the_drivers_and_leaves_the_connection_usable(connection: BoundConnection) -> None:
    for _ in range(4):
        with pytest.raises(psycopg.errors.DivisionByZero) as caught:
            connection.fetch("SELECT 1 / %(by)s::integer AS n", {"by": 0})
        assert caught.value.diag.message_primary == "division by zero"
        assert connection.fetch("SELECT 1 AS n", {}) == [{"n": 1}]


def test_what_is_larger_than_the_sockets_buffers_arrives(connection: BoundConnection) -> None:
    text = "x" * (32 << 20)
    for _ in range(4):
        assert connection.fetch("SELECT %(a)s::text AS a", {"a": text}) == [{"a": text}]


def test_a_transaction_that_fails_leaves_what_is_prepared(ledger: str) -> None:
    """psycopg forgets its own statements after a rollback, and has the server forget every one."""

    def fail(do: Transaction) -> None:
        for _ in range(8):
            do(Balance("user:1"))
        do(Reserve("user:none", {"usd": 1}))

    with Client(ledger, pool_max=1, prepare_threshold=0, timeout_s=30) as client:
        for _ in range(3):
            assert client.balance("user:1")
            with pytest.raises(UnknownSubject):
                client.transact(fail)
