"""Roles, by logging in as each: a worker calls the worker functions and nothing else; a bound login sees one tenant."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.server import Connection, connect

WORKER = {
    "adjust", "balance", "create_run", "end_run", "ensure_subject", "extend", "price", "price_book", "record",
    "release", "release_many", "reserve", "reserve_many", "settle", "settle_many",
}  # fmt: skip
READER = {"balance", "check", "price", "price_book"}
REAPER = {"reap"}
ROLES = {"quota_worker": WORKER, "quota_reader": READER, "quota_reaper": REAPER}


@pytest.fixture
def login(database: str, conn: Connection, run_id: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh login without any role; its connection string is the database's with its name and password."""
    name = f"login_{run_id}_{abs(hash(request.node.nodeid)) % 10**8}"
    conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(sql.Identifier(name)))
    yield name
    conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def as_login(database: str, login: str) -> Connection:
    """Connects as the login; where only the server's own user may come in, takes its place in the session."""
    try:
        return connect(make_conninfo(database, user=login, password="secret"))
    except psycopg.OperationalError:
        connection = connect(database)
        connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(login)))
        return connection


def grant(conn: Connection, role: str, login: str) -> None:
    conn.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(login)))


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_role_calls_its_functions_and_nothing_else(conn: Connection, login: str, role: str) -> None:
    grant(conn, role, login)
    rows = conn.execute(
        "SELECT n.nspname, p.proname, has_schema_privilege(%(login)s, n.oid, 'USAGE')"
        " AND has_function_privilege(%(login)s, p.oid, 'EXECUTE')"
        " FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ('quota', 'quota_internal')",
        {"login": login},
    ).fetchall()
    assert {(schema, name) for schema, name, may in rows if may} == {("quota", name) for name in ROLES[role]}
    assert not any(may for schema, _, may in rows if schema == "quota_internal")


@pytest.mark.parametrize("role", ["quota_worker", "quota_reader", "quota_reaper", "quota_admin"])
def test_no_role_reaches_a_table_and_readers_reach_every_view(conn: Connection, login: str, role: str) -> None:
    grant(conn, role, login)
    rows = conn.execute(
        "SELECT n.nspname, c.relname, has_schema_privilege(%(login)s, n.oid, 'USAGE')"
        " AND has_table_privilege(%(login)s, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE'),"
        " has_table_privilege(%(login)s, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('quota', 'quota_internal') AND c.relkind IN ('r', 'v')",
        {"login": login},
    ).fetchall()
    reads = {name for schema, name, may, _ in rows if may and schema == "quota"}
    views = {name for schema, name, _, _ in rows if schema == "quota"}
    assert reads == (views if role in ("quota_reader", "quota_admin") else set())
    assert not any(may or writes for schema, _, may, writes in rows if schema == "quota_internal")
    assert not any(writes for _, _, _, writes in rows)


def test_a_worker_works_and_is_turned_away_elsewhere(database: str, conn: Connection, login: str) -> None:
    grant(conn, "quota_worker", login)
    conn.execute("SELECT quota.create_subject('org:acme')")
    conn.execute("SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 10)")
    with as_login(database, login) as worker:
        row = worker.execute("SELECT granted, reservation FROM quota.reserve('org:acme', '{\"usd\": 4}')").fetchone()
        assert row is not None
        assert row[0] is True
        assert worker.execute("SELECT state FROM quota.settle(%s)", [row[1]]).fetchone() == ("settled",)
        for statement in (
            "SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 1000)",
            "SELECT * FROM quota.reap()",
            "SELECT * FROM quota.check()",
            "SELECT * FROM quota.entries",
            "SELECT * FROM quota_internal.accounts",
            "UPDATE quota_internal.accounts SET spent = 0",
            "SELECT quota_internal.expire('default', '{}')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                worker.execute(statement.encode())


def test_a_bound_login_sees_its_tenant_only(database: str, conn: Connection, login: str) -> None:
    for role in ("quota_worker", "quota_reader", "quota_reaper", "quota_admin"):
        grant(conn, role, login)
    conn.execute("SELECT quota.create_tenant('acme')")
    for tenant in ("default", "acme"):
        conn.execute("SELECT quota.create_subject('org:x', tenant => %s)", [tenant])
        conn.execute("SELECT quota.set_limit('org:x', 'cap', 'usd', 'budget', 10, tenant => %s)", [tenant])
    conn.execute("SELECT quota.reserve('org:x', '{\"usd\": 1}', id => '00000000-0000-7000-8000-000000000001')")
    conn.execute("SELECT quota.bind_login(%s, 'acme')", [login])
    with as_login(database, login) as bound:
        granted = bound.execute("SELECT granted FROM quota.reserve('org:x', '{\"usd\": 1}', tenant => 'acme')")
        assert granted.fetchone() == (True,)
        for statement in (
            "SELECT * FROM quota.reserve('org:x', '{\"usd\": 1}')",
            "SELECT * FROM quota.settle('00000000-0000-7000-8000-000000000001')",
            "SELECT * FROM quota.release('00000000-0000-7000-8000-000000000001')",
            "SELECT * FROM quota.adjust('00000000-0000-7000-8000-000000000001', '{\"usd\": 2}')",
            "SELECT * FROM quota.extend('00000000-0000-7000-8000-000000000001', '1 minute')",
            "SELECT * FROM quota.record('org:x', '{\"usd\": 1}')",
            "SELECT * FROM quota.credit('00000000-0000-7000-8000-000000000001', '{\"usd\": 1}', 'why')",
            "SELECT * FROM quota.balance('org:x')",
            "SELECT quota.ensure_subject('org:y')",
            "SELECT quota.create_subject('org:y')",
            "SELECT quota.freeze('org:x', 'why')",
            "SELECT quota.set_limit('org:x', 'cap', 'usd', 'budget', 99)",
            "SELECT * FROM quota.reap(tenant => 'default')",
            "SELECT * FROM quota.check('default')",
            "SELECT * FROM quota.repair()",
        ):
            with pytest.raises(psycopg.DatabaseError) as caught:
                bound.execute(statement.encode())
            assert caught.value.sqlstate == "QT001", statement
        for view in ("balances", "holds", "reservations", "entries", "usage", "subjects", "limits"):
            rows = bound.execute(f"SELECT DISTINCT tenant FROM quota.{view}".encode()).fetchall()
            assert set(rows) <= {("acme",)}, view
        for statement in ("SELECT quota.create_tenant('other')", "SELECT quota.create_unit('gpu')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                bound.execute(statement.encode())


@pytest.mark.parametrize("table", ["entries", "admin_log"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET kind = kind", "DELETE FROM {}", "TRUNCATE {}"])
def test_the_ledger_only_grows(tx_conn: Connection, table: str, statement: str) -> None:
    tx_conn.execute("SELECT quota.create_subject('org:acme')")
    tx_conn.execute("SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 10)")
    tx_conn.execute("SELECT quota.record('org:acme', '{\"usd\": 1}')")
    text = statement.replace("kind", "action") if table == "admin_log" else statement
    with pytest.raises(psycopg.errors.InsufficientPrivilege), tx_conn.transaction():
        tx_conn.execute(text.format(f"quota_internal.{table}").encode())
