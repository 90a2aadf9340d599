"""Roles, by logging in as each: a worker calls the worker functions and nothing else; a bound login sees one tenant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    advance,
    budget,
    call,
    hold,
    nothing_changes,
    reserve,
    rows,
    set_clock,
    snapshot,
    value,
    word_of,
)

WORKER = {
    "adjust", "balance", "create_run", "end_run", "ensure_subject", "extend", "limits_of", "price", "price_book",
    "record", "release", "release_many", "reserve", "reserve_in_turn", "reserve_many", "settle", "settle_many",
    "verify_key",
}  # fmt: skip
READER = {
    "balance", "check", "limits_of", "price", "price_book", "report_calibration", "report_models", "report_pools",
}  # fmt: skip
REAPER = {"reap"}
API = {
    "create_tenant", "configure_tenant", "create_unit", "create_subject", "move_subject", "retire_subject", "freeze",
    "unfreeze", "set_limit", "remove_limit", "set_rate_tier", "set_rate_tiers", "set_tier_limit", "retire_tier",
    "credit", "repair", "create_key", "rename_key", "set_key_expiry", "rotate_key", "revoke_key", "create_token",
    "revoke_token", "verify_token", "begin_change", "begin_request", "end_request", "operator_settle",
    "operator_release", "logged_check", "set_price", "end_price",
}  # fmt: skip
ROLES = {
    "quota_worker": WORKER, "quota_reader": READER, "quota_reaper": REAPER, "quota_api": WORKER | READER | API,
}  # fmt: skip
ALL_ROLES = [*ROLES, "quota_admin"]


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


@pytest.mark.parametrize("role", ALL_ROLES)
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
    assert reads == (views if role in ("quota_reader", "quota_admin", "quota_api") else set())
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


# -- a bound login -----------------------------------------------------------------------------------------------------

HELD, SETTLED, OVERDUE = (UUID(f"00000000-0000-7000-8000-00000000000{n}") for n in (1, 2, 3))
TURN = UUID("00000000-0000-7000-8000-000000000009")
USD = {"usd": 1}
GOLD = {"tier": "gold", "name": "gold", "unit": "cost", "kind": "budget", "capacity": 9}
# What every tenant shares is not for a bound login at all, whichever tenant it names.
SHARED = {"bind_login", "create_tenant", "create_unit"}
# Calls that would change nothing if they got through.
READS = {"begin_change", "end_request"} | READER
# They take a secret in place of a tenant: whoever has it may know whose it is, except from another tenant's login.
SECRETS = {"verify_key", "verify_token"}
HASH = b"\x01" * 32
RATES = {"input": "1", "output": "2"}


def calls(login: str) -> dict[str, dict[str, Any]]:
    """A call of every public function that would succeed in tenant b (see `b_has_it_all`), less the tenant."""
    return {
        "adjust": {"id": HELD, "costs": {"usd": 2}},
        "balance": {"subject": "org:x"},
        "begin_change": {"actor": "me", "request_id": "r", "reason": ""},
        "begin_request": {"token": "t", "key": "k", "fingerprint": HASH},
        "bind_login": {"role": login},
        "check": {},
        "configure_tenant": {"polling_hint_s": 2},
        "create_key": {"id": "new", "name": "new", "secret_hash": HASH},
        "create_run": {"name": "run:new", "parent": "org:x", "budget": USD},
        "create_subject": {"name": "org:new"},
        "create_tenant": {"name": "c"},
        "create_token": {"id": "new", "name": "new", "role": "viewer", "secret_hash": HASH},
        "create_unit": {"name": "gpu"},
        "credit": {"reservation": SETTLED, "costs": USD, "reason": "why"},
        "end_price": {"version": 1},
        "end_request": {"token": "t", "key": "k", "status": 200, "answer_text": "{}"},
        "end_run": {"name": "run:known"},
        "ensure_subject": {"name": "org:new"},
        "extend": {"id": HELD, "ttl": "2 hours"},
        "freeze": {"name": "org:x", "reason": "why"},
        "limits_of": {"subject": "org:x"},
        "logged_check": {},
        "move_subject": {"name": "key:k", "parent": "org:y"},
        "operator_release": {"id": HELD, "reason": "why"},
        "operator_settle": {"id": HELD, "costs": None, "reason": "why"},
        "price": {"provider": "p", "model": "m"},
        "price_book": {},
        "reap": {},
        "record": {"subject": "org:x", "costs": USD},
        "release": {"id": HELD},
        "release_many": {"ids": [HELD]},
        "remove_limit": {"subject": "org:x", "name": "cap"},
        "rename_key": {"id": "known", "name": "another"},
        "repair": {},
        "report_calibration": {},
        "report_models": {},
        "report_pools": {},
        "reserve_in_turn": {"subject": "org:x", "costs": USD, "id": TURN},
        "reserve": {"subject": "org:x", "costs": USD},
        "reserve_many": {"subjects": ["org:x"], "costs": [Jsonb(USD)]},
        "retain": {},
        "retire_subject": {"name": "org:y"},
        "retire_tier": {"tier": "gold"},
        "revoke_key": {"id": "known", "reason": "why"},
        "revoke_token": {"id": "known", "reason": "why"},
        "rotate_key": {"id": "known", "secret_hash": b"\x02" * 32},
        "set_key_expiry": {"id": "known", "expires_at": "2100-01-01"},
        "set_limit": {"subject": "org:x", "name": "cap", "unit": "usd", "kind": "budget", "capacity": 99},
        "set_price": {"provider": "p", "model": "new", "rates": Jsonb(RATES)},
        "set_rate_tier": {"subject": "key:k", "tier": "gold"},
        "set_rate_tiers": {"subjects": ["key:k"], "tier": "gold"},
        "set_tier_limit": GOLD | {"capacity": 99},
        "settle": {"id": HELD},
        "settle_many": {"ids": [HELD]},
        "unfreeze": {"name": "org:y"},
        "verify_key": {"id": "known", "secret_hash": HASH},
        "verify_token": {"id": "known", "secret_hash": HASH},
    }


def b_has_it_all(conn: Connection) -> None:
    """Tenants a and b; in b something for every function to do, and a counter that is wrong."""
    set_clock(conn, NOON)
    for tenant in ("a", "b"):
        call(conn, "create_tenant", tenant)
    call(conn, "set_tier_limit", **GOLD, tenant="b")
    budget(conn, "org:x", 10, tenant="b")
    for name in ("org:y", "key:k"):
        call(conn, "create_subject", name, tenant="b")
    call(conn, "freeze", "org:y", "why", tenant="b")
    call(conn, "create_key", "known", "known", HASH, tenant="b")
    call(conn, "create_token", "known", "known", "viewer", HASH, tenant="b")
    refusal = {"provider": "p", "model": "m", "reason": "rate", "refused": 1}
    call(conn, "record", "org:x", USD, details=Jsonb({"refusals": [refusal]}), tenant="b")
    assert call(conn, "set_price", "p", "m", Jsonb(RATES), tenant="b")["version"] == 1
    advance(conn, "40 days")  # older than what is kept
    hold(conn, "org:x", USD, id=OVERDUE, ttl="1 minute", tenant="b")
    advance(conn, "2 minutes")
    hold(conn, "org:x", USD, id=HELD, ttl="1 hour", tenant="b")
    told = {"provider": "p", "model": "m", "ceiling": 1, "route": "r", "cost": 1, "outcome": "answered"}
    hold(conn, "org:x", USD, id=SETTLED, ttl="1 hour", details=Jsonb(told), tenant="b")
    call(conn, "settle", SETTLED, tenant="b")
    assert call(conn, "create_run", "run:known", "org:x", Jsonb(USD), tenant="b")["granted"]
    call(conn, "set_limit", "key:k", "rate", "tokens", "bucket", 1, 1, tenant="b")
    call(conn, "record", "key:k", Jsonb({"tokens": 1}), tenant="b")
    assert call(conn, "reserve_in_turn", "key:k", Jsonb({"tokens": 1}), TURN, tenant="b")["look_after_s"] == 1
    conn.execute("UPDATE quota_internal.accounts SET reserved = reserved + 1 WHERE tenant = 'b' AND subject = 'org:x'")


@pytest.fixture
def bound(database: str, conn: Connection, login: str) -> Iterator[Connection]:
    """A login with every role, bound to tenant a."""
    b_has_it_all(conn)
    for role in ALL_ROLES:
        grant(conn, role, login)
    call(conn, "bind_login", login, "a")
    with as_login(database, login) as connection:
        yield connection
    rows(conn, "repair", "b")


def public_functions(conn: Connection) -> dict[str, tuple[bool, list[str]]]:
    """Name -> whether it takes a tenant, and the roles that may call it."""
    found = conn.execute(
        "SELECT p.proname, 'tenant' = ANY (p.proargnames[:p.pronargs]),"
        " ARRAY(SELECT r FROM unnest(%s::text[]) r WHERE has_function_privilege(r, p.oid, 'EXECUTE'))"
        " FROM pg_proc p WHERE p.pronamespace = 'quota'::regnamespace",
        [ALL_ROLES],
    ).fetchall()
    functions = {name: (takes_tenant, roles) for name, takes_tenant, roles in found}
    assert len(functions) == len(found), "no public name stands for two functions"
    return functions


def word(connection: Connection, function: str, named: dict[str, Any]) -> str:
    """What the call came to: the name of its error, raised or (batches) in every row of the answer; else `ok`."""
    try:
        answers = rows(connection, function, **named)
    except psycopg.Error as error:
        return word_of(error)
    if function in SECRETS and not answers:
        return "nobody"
    errors = {str(answer.get("error") or "ok") for answer in answers} or {"ok"}
    return errors.pop() if len(errors) == 1 else f"several: {sorted(errors)}"


def test_every_public_function_has_a_call_that_works_in_the_other_tenant(conn: Connection, login: str) -> None:
    """Else its refusal below would prove nothing. A new function needs an entry in `calls`."""
    b_has_it_all(conn)
    found = public_functions(conn)
    assert calls(login).keys() == found.keys()
    assert {name for name, (takes_tenant, roles) in found.items() if not takes_tenant or not roles} < SHARED | SECRETS
    before = snapshot(conn)
    for name, named in calls(login).items():
        with conn.transaction(force_rollback=True):
            assert word(conn, name, named | ({"tenant": "b"} if found[name][0] else {})) == "ok", name
            assert (snapshot(conn) != before) == (name not in READS | SECRETS), name
    call(conn, "repair", "b")


def test_a_bound_login_reaches_no_other_tenant_through_any_function(
    conn: Connection, login: str, bound: Connection
) -> None:
    leaks = []
    before = snapshot(conn)
    for name, (takes_tenant, roles) in public_functions(conn).items():
        expected = "42501" if name in SHARED else "nobody" if name in SECRETS else "unknown_tenant"
        for role in roles:
            bound.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))  # no way out of the bond either
            answer = word(bound, name, calls(login)[name] | ({"tenant": "b"} if takes_tenant else {}))
            if answer != expected:
                leaks.append(f"{name} as {role}: {answer}")
        if snapshot(conn) != before:
            leaks.append(f"{name} changed something")
            before = snapshot(conn)
    assert leaks == []


def test_a_bound_login_is_kept_to_its_tenant_by_what_means_all_tenants(conn: Connection, bound: Connection) -> None:
    with nothing_changes(conn):
        assert call(bound, "reap") == {"released": 0, "charged": 0}
        assert rows(bound, "check") == []
        for name in ("set_tier_limit", "retire_tier"):  # a null tenant is the built-in set, which all share
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                rows(bound, name, **(GOLD if name == "set_tier_limit" else {"tier": "bulk"}))
    assert rows(conn, "check") != []


def test_a_bound_login_works_in_its_own_tenant(conn: Connection, bound: Connection) -> None:
    budget(bound, "org:x", 10, tenant="a")
    assert reserve(bound, "org:x", USD, tenant="a")["granted"]


def test_a_bound_login_sees_its_tenant_only_in_every_view(conn: Connection, bound: Connection) -> None:
    views = conn.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant'"
        " WHERE c.relnamespace = 'quota'::regnamespace AND c.relkind = 'v'"
    ).fetchall()
    # Units belong to everybody, and of tenants the name is the tenant.
    assert len(views) == value(
        conn,
        "SELECT count(*) FROM pg_class WHERE relnamespace = 'quota'::regnamespace AND relkind IN ('v', 'm')"
        " AND relname NOT IN ('units', 'tenants')",
    )
    assert bound.execute("SELECT name FROM quota.tenants").fetchall() == [("a",)]
    for (view,) in views:
        query = sql.SQL("SELECT DISTINCT tenant FROM {}").format(sql.Identifier("quota", view))
        assert ("b",) in conn.execute(query).fetchall(), f"{view} has nothing to hide"
        assert set(bound.execute(query).fetchall()) <= {("a",), (None,)}, view


def test_a_bond_that_is_lifted_is_news_of_its_tenant_only(conn: Connection, login: str, bound: Connection) -> None:
    """`quota.log` shows a bound login what concerns no tenant: names of other tenants' logins are not that."""
    for tenant in ("b", None):
        call(conn, "bind_login", "quota_worker", tenant)
    seen = "SELECT target, tenant FROM quota.log WHERE action = 'bind_login' ORDER BY id"
    assert bound.execute(seen.encode()).fetchall() == [(login, "a")]
    assert conn.execute(seen.encode()).fetchall()[1:] == [("quota_worker", "b")] * 2


# -- the ledger only grows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["entries", "admin_log"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET kind = kind", "DELETE FROM {}", "TRUNCATE {}"])
def test_the_ledger_only_grows(tx_conn: Connection, table: str, statement: str) -> None:
    tx_conn.execute("SELECT quota.create_subject('org:acme')")
    tx_conn.execute("SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 10)")
    tx_conn.execute("SELECT quota.record('org:acme', '{\"usd\": 1}')")
    text = statement.replace("kind", "action") if table == "admin_log" else statement
    with pytest.raises(psycopg.errors.InsufficientPrivilege), tx_conn.transaction():
        tx_conn.execute(text.format(f"quota_internal.{table}").encode())
