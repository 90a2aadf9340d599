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


# -- several in one round trip ---------------------------------------------------------------------------------------


def rows(outcome: object) -> object:
    assert isinstance(outcome, tuple), outcome
    return outcome[0]


def test_statements_that_go_together_are_transactions_of_their_own_in_order(connection: BoundConnection) -> None:
    connection.execute("CREATE TEMPORARY TABLE seen (a integer PRIMARY KEY)")
    add = "INSERT INTO seen VALUES (%(a)s::integer) RETURNING a"
    nothing: dict[str, object] = {}
    count = ("SELECT count(*) AS n FROM seen", nothing)
    for round_trip in range(5):  # prepared from the third on
        first, again, one, two = connection.fetch_together([
            (add, {"a": round_trip}), (add, {"a": round_trip}), count, ("SELECT %(t)s::text AS t", {"t": "x"}),
        ])  # fmt: skip
        assert rows(first) == [{"a": round_trip}]
        assert isinstance(again, psycopg.errors.UniqueViolation)
        assert (rows(one), rows(two)) == ([{"n": round_trip + 1}], [{"t": "x"}])
    (row,) = connection.fetch(PREPARED, {})
    assert row["found"] == 4  # the first twice: both came due in one round trip


def test_what_cannot_be_sent_keeps_nothing_else_back(connection: BoundConnection) -> None:
    text = "SELECT %(t)s::text AS t"
    before, bad, after = connection.fetch_together([(text, {"t": "a"}), (text, {"t": "a\0b"}), (text, {"t": "c"})])
    assert isinstance(bad, psycopg.DataError)
    assert (rows(before), rows(after)) == ([{"t": "a"}], [{"t": "c"}])
    assert connection.fetch("SELECT 1 AS n", {}) == [{"n": 1}]


def test_warnings_belong_to_the_statement_that_gave_them(connection: BoundConnection) -> None:
    connection.execute(
        "CREATE FUNCTION pg_temp.warn(text) RETURNS integer LANGUAGE plpgsql AS"
        " $$ BEGIN IF $1 <> '' THEN RAISE WARNING '%', $1; END IF; RETURN 1; END $$"
    )
    text = "SELECT pg_temp.warn(%(t)s::text) AS n"
    outcomes = connection.fetch_together([(text, {"t": told}) for told in ("one", "", "three")])
    assert outcomes == [([{"n": 1}], ["one"]), ([{"n": 1}], []), ([{"n": 1}], ["three"])]
    assert connection.warnings == []


def test_a_lost_connection_leaves_the_answers_that_have_come(connection: BoundConnection) -> None:
    outcomes = connection.fetch_together([
        ("SELECT 1 AS n", {}), ("SELECT pg_terminate_backend(pg_backend_pid()) AS gone", {}), ("SELECT 2 AS n", {}),
    ])  # fmt: skip
    assert rows(outcomes[0]) == [{"n": 1}]
    assert all(isinstance(outcome, psycopg.OperationalError) for outcome in outcomes[1:])
    assert connection.closed


def test_large_statements_go_together(connection: BoundConnection) -> None:
    """Both sides send before they have read: nobody waits for the other."""
    text = "x" * (16 << 20)
    for _ in range(2):
        outcomes = connection.fetch_together([("SELECT %(a)s::text AS a", {"a": text})] * 3)
        assert [rows(outcome) for outcome in outcomes] == [[{"a": text}]] * 3
