"""The error tree against the database's own table, and what is made of what the driver reports."""

from __future__ import annotations

import pickle

import psycopg
import pytest

from quota.calls import Reservation
from quota.errors import (
    ERRORS,
    Fate,
    InvalidArgument,
    Misuse,
    NotAllowed,
    QuotaError,
    Refused,
    SchemaMismatch,
    Unavailable,
    fate,
    from_database_error,
)
from tests.server import Connection

# The contract's list, in its order.
NAMES = [
    "unknown_tenant", "unknown_subject", "unknown_unit", "unknown_limit", "unknown_tier", "unknown_reservation",
    "no_limit", "unit_missing", "unit_not_held", "invalid_costs", "invalid_amount", "amount_out_of_range",
    "invalid_name", "invalid_ttl", "invalid_argument", "id_conflict", "already_settled", "already_released",
    "expired", "total_decreased", "parent_differs", "limit_differs", "cycle", "too_deep", "has_open_holds",
    "already_exists", "unknown_key", "unknown_token", "revoked", "unpriced_model", "prices_overlap",
]  # fmt: skip


def reported(connection: Connection, statement: str) -> psycopg.Error:
    """Returns the error that a statement ends with."""
    with pytest.raises(psycopg.Error) as caught, connection.transaction():
        connection.execute(statement.encode())
    return caught.value


def test_every_error_of_the_contract_has_one_row() -> None:
    assert [row.name for row in ERRORS] == NAMES
    assert [row.sqlstate for row in ERRORS] == [f"QT{number:03}" for number in range(1, len(NAMES) + 1)]
    for row in ERRORS:
        assert row.type.__name__ == "".join(word.capitalize() for word in row.name.split("_"))
        assert (row.type.name, row.type.sqlstate, row.type.http_status) == (row.name, row.sqlstate, row.http_status)
        assert row.http_status in (400, 404, 409, 422)


def test_the_database_has_the_same_table(tx_conn: Connection) -> None:
    for row in ERRORS:
        found = tx_conn.execute("SELECT quota_internal.sqlstate_of(%s)", (row.name,)).fetchone()
        assert found == (row.sqlstate,)


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row.name)
def test_what_the_database_raises_becomes_its_class(
    tx_conn: Connection, row: tuple[str, str, type[Misuse], int]
) -> None:
    error = reported(tx_conn, f"SELECT quota_internal.fail('{row[0]}', 'no such \"x\"', 'Do y.')")
    ours = from_database_error(error)
    assert type(ours) is row[2]
    assert (ours.name, ours.sqlstate) == row[:2]
    assert ours.message == f'{row[0]}: no such "x"'
    assert ours.hint == "Do y."
    assert str(ours) == f'{row[0]}: no such "x" (Do y.)'
    assert fate(error) is Fate.REJECTED


def raised(statement: str) -> str:
    return f"DO $$ BEGIN RAISE EXCEPTION 'told' USING ERRCODE = '{statement}'; END $$"


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("40001", Fate.ROLLED_BACK),
        ("40P01", Fate.ROLLED_BACK),
        ("55P03", Fate.ROLLED_BACK),
        ("08006", Fate.IN_DOUBT),
        ("57P01", Fate.IN_DOUBT),
        ("57P03", Fate.IN_DOUBT),
        ("25006", Fate.IN_DOUBT),
        ("40003", Fate.IN_DOUBT),
        ("53300", Fate.OVERLOADED),
        ("53100", Fate.OVERLOADED),
        ("57014", Fate.OVERLOADED),
        ("XX000", Fate.REJECTED),
        ("23505", Fate.REJECTED),
    ],
)
def test_what_is_known_after_an_error(tx_conn: Connection, sqlstate: str, expected: Fate) -> None:
    error = reported(tx_conn, raised(sqlstate))
    assert fate(error) is expected
    # None of these is about the call: whoever owns the connection or the retry has to see them as they are.
    assert from_database_error(error) is None


def test_errors_of_the_driver_itself() -> None:
    assert fate(psycopg.OperationalError("server closed the connection unexpectedly")) is Fate.IN_DOUBT
    assert fate(psycopg.InterfaceError("the connection is closed")) is Fate.IN_DOUBT
    assert fate(psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")) is Fate.REJECTED
    assert isinstance(from_database_error(psycopg.DataError("no")), InvalidArgument)
    assert from_database_error(psycopg.OperationalError("gone")) is None


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT 'x'::uuid", InvalidArgument),
        ("SELECT 'x'::numeric", InvalidArgument),
        ("SELECT '\"\\u0000\"'::jsonb", InvalidArgument),
        ("SELECT nowhere.reserve()", SchemaMismatch),
        ("SELECT quota.no_such_function()", SchemaMismatch),
        (raised("42501"), NotAllowed),
        (raised("QT999"), Misuse),  # of a newer schema
    ],
)
def test_other_reports_that_are_about_the_call(tx_conn: Connection, statement: str, expected: type[QuotaError]) -> None:
    assert type(from_database_error(reported(tx_conn, statement))) is expected


def test_errors_survive_a_process_boundary() -> None:
    refusal = Reservation(granted=False, reservation=None, state=None, reason="frozen", limit_subject="org:acme")
    originals: list[QuotaError] = [row.type("message", "hint") for row in ERRORS]
    originals += [Unavailable("gone", True), Refused(refusal), SchemaMismatch("old", "0001", "0002"), NotAllowed("no")]
    for original in originals:
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is type(original)
        assert vars(copy) == vars(original)
        assert str(copy) == str(original)


def test_a_refusal_tells_what_binds() -> None:
    frozen = Reservation(granted=False, reservation=None, state=None, reason="frozen", limit_subject="org:acme")
    with pytest.raises(Refused, match=r"refused, frozen \(org:acme\)") as caught:
        frozen.raise_if_refused()
    assert caught.value.refusal is frozen
    assert Unavailable("x").in_doubt is False
