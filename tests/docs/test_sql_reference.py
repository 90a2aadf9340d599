"""docs/sql-reference.md against the catalog: every function and view, and nothing that is not there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quota.errors import ERRORS
from tests.docs.markdown import DOCS, blocks, sections, tables
from tests.server import Connection

TEXT = (DOCS / "sql-reference.md").read_text(encoding="utf-8")
SECTIONS = {title.removeprefix("quota."): body for title, body in sections(TEXT, 3).items()}
FUNCTIONS = {name: body for name, body in SECTIONS.items() if "```text\nquota." in body}
VIEWS = {name: body for name, body in SECTIONS.items() if name not in FUNCTIONS}
ROLES = ("quota_worker", "quota_reader", "quota_admin", "quota_reaper", "quota_api")

# What the text of the functions below them could raise, and what they pass rules out.
RULED_OUT = {
    "adjust": {"invalid_name", "invalid_ttl", "unit_missing", "unknown_subject"},
    "extend": {"invalid_argument"},
    "record": {"invalid_ttl"},
}

Column = tuple[str, str]


def rows(connection: Connection, statement: str, *parameters: object) -> list[Any]:
    return connection.execute(statement.encode(), parameters or None).fetchall()


def short(type_name: str) -> str:
    return type_name.replace("timestamp with time zone", "timestamptz")


@pytest.fixture
def functions(tx_conn: Connection) -> dict[str, int]:
    """The functions of the schema quota by name: no name is overloaded, so that named calls are never ambiguous."""
    found = rows(tx_conn, "SELECT proname, oid FROM pg_proc WHERE pronamespace = 'quota'::regnamespace")
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.fixture
def views(tx_conn: Connection) -> dict[str, int]:
    """The views of the schema quota by name."""
    statement = "SELECT relname, oid FROM pg_class WHERE relnamespace = 'quota'::regnamespace AND relkind = %s"
    assert rows(tx_conn, statement, "r") == []
    return dict(rows(tx_conn, statement, "v"))


def arguments(connection: Connection, oid: int) -> list[tuple[str, str, str | None]]:
    """Name, type and default (as SQL) of every input argument, in order."""
    return [
        (name, short(type_name), default)
        for name, type_name, default in rows(
            connection,
            """SELECT a.name, format_type(a.type, NULL), pg_get_function_arg_default(p.oid, a.n::int)
            FROM pg_proc p
            CROSS JOIN unnest(p.proargnames[: p.pronargs], p.proargtypes::oid[]) WITH ORDINALITY a(name, type, n)
            WHERE p.oid = %s ORDER BY a.n""",
            oid,
        )
    ]


def columns(connection: Connection, oid: int) -> list[Column]:
    """Name and type of every result column, in order."""
    found = rows(
        connection,
        """SELECT a.name, format_type(a.type, NULL)
        FROM pg_proc p
        CROSS JOIN unnest(p.proargnames, p.proallargtypes, p.proargmodes) WITH ORDINALITY a(name, type, mode, n)
        WHERE p.oid = %s AND a.mode IN ('o', 't') ORDER BY a.n""",
        oid,
    )
    found = found or rows(
        connection,
        """SELECT a.attname, format_type(a.atttypid, NULL)
        FROM pg_proc p JOIN pg_type t ON t.oid = p.prorettype JOIN pg_attribute a ON a.attrelid = t.typrelid
        WHERE p.oid = %s AND a.attnum > 0 ORDER BY a.attnum""",
        oid,
    )
    return [(name, short(type_name)) for name, type_name in found]


def written(name: str) -> tuple[list[tuple[str, str, str | None]], str, list[Column]]:
    """What the reference says of a function: arguments, "row", "rows" or "nothing", and the result's columns."""
    block = next(b.text for b in blocks(FUNCTIONS[name]) if b.language == "text")
    shape = re.fullmatch(r"quota\.(\w+)\((.*)\) -> (?:(nothing)|(?:one )?(rows?) \((.*)\))\n", block, re.DOTALL)
    assert shape is not None, f"the signature of {name} cannot be read:\n{block}"
    assert shape[1] == name
    takes = []
    for line in filter(None, (part.strip().rstrip(",") for part in shape[2].splitlines() or [shape[2]])):
        argument = re.fullmatch(r"(\w+) ([\w\[\]]+)(?: = (.+))?", line)
        assert argument is not None, f"{name}: {line}"
        takes.append((argument[1], argument[2], argument[3]))
    gives = [tuple(part.split()) for part in re.split(r",\s*", (shape[5] or "").strip()) if part]
    return takes, shape[3] or shape[4], [(column, type_name) for column, type_name in gives]


def test_every_function_and_nothing_else(functions: dict[str, int]) -> None:
    assert set(FUNCTIONS) == set(functions)


def test_every_view_and_nothing_else(views: dict[str, int]) -> None:
    assert set(VIEWS) == set(views)


def value(connection: Connection, expression: str | None, type_name: str) -> str | None:
    """What a default comes to, as text."""
    if expression is None:
        return "no default"
    found: str | None = rows(connection, f"SELECT ({expression})::{type_name}::text")[0][0]
    return found


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signature(tx_conn: Connection, functions: dict[str, int], name: str) -> None:
    takes, shape, gives = written(name)
    real = arguments(tx_conn, functions[name])
    assert [argument[:2] for argument in takes] == [argument[:2] for argument in real]
    for (argument, type_name, said), (_, _, default) in zip(takes, real, strict=True):
        assert value(tx_conn, said, type_name) == value(tx_conn, default, type_name), argument
    assert gives == columns(tx_conn, functions[name])
    ((is_set, is_void),) = rows(
        tx_conn, "SELECT proretset, prorettype = 'void'::regtype FROM pg_proc WHERE oid = %s", functions[name]
    )
    assert shape == ("nothing" if is_void else "rows" if is_set else "row")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_tables_of_a_function(name: str) -> None:
    """Where arguments or columns are explained one by one, none is missing and all are there."""
    takes, _, gives = written(name)
    for header, *lines in tables(FUNCTIONS[name]):
        told = [line[0].strip("`") for line in lines]
        if header[0] == "argument":
            assert told == [argument for argument, _, _ in takes]
        elif header[0] == "column":
            assert told == [column for column, _ in gives]


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_columns_of_a_view(tx_conn: Connection, views: dict[str, int], name: str) -> None:
    header, *lines = tables(VIEWS[name])[0]
    assert header == ["column", "type", "meaning"]
    statement = """SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
        WHERE attrelid = %s AND attnum > 0 ORDER BY attnum"""
    real = rows(tx_conn, statement, views[name])
    assert [(line[0].strip("`"), line[1]) for line in lines] == [(column, short(kind)) for column, kind in real]
    assert all(line[2] for line in lines)


def roles_said(body: str) -> list[str]:
    line = re.search(r"(?m)^Roles: (.*)\.$", body)
    assert line is not None, "a line `Roles: …` is missing"
    return re.findall(r"`(\w+)`", line[1])


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_roles_of_a_function(tx_conn: Connection, functions: dict[str, int], name: str) -> None:
    statement = "SELECT has_function_privilege(%s::name, %s::oid, 'EXECUTE')"
    may = [role for role in ROLES if rows(tx_conn, statement, role, functions[name])[0][0]]
    assert roles_said(FUNCTIONS[name]) == may
    everybody = "SELECT count(*) FROM pg_proc CROSS JOIN aclexplode(proacl) WHERE oid = %s AND grantee = 0"
    assert rows(tx_conn, everybody, functions[name]) == [(0,)]


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_roles_of_a_view(tx_conn: Connection, views: dict[str, int], name: str) -> None:
    statement = "SELECT has_table_privilege(%s::name, %s::oid, 'SELECT')"
    assert roles_said(VIEWS[name]) == [role for role in ROLES if rows(tx_conn, statement, role, views[name])[0][0]]


def reachable(connection: Connection, name: str) -> set[str]:
    """The errors that a function, or what it calls, can raise by the text of its body."""
    bodies: dict[str, str] = dict(
        rows(
            connection,
            """SELECT n.nspname || '.' || p.proname, p.prosrc FROM pg_proc p
            JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ('quota', 'quota_internal')""",
        )
    )
    seen: set[str] = set()
    todo = [f"quota.{name}"]
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            called = re.findall(r"quota_internal\.\w+|quota\.\w+(?=\()", bodies[one])
            todo += [function for function in called if function in bodies]
    return {error for one in seen for error in re.findall(r"fail\('(\w+)'", bodies[one])}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_errors_of_a_function(tx_conn: Connection, name: str) -> None:
    line = re.search(r"(?m)^Errors: ((?:.|\n)*?)\.$", FUNCTIONS[name])
    assert line is not None, "a line `Errors: …` is missing"
    said = re.findall(r"`(\w+)`", line[1])
    assert set(said) <= {row.name for row in ERRORS}
    assert set(said) == reachable(tx_conn, name) - RULED_OUT.get(name, set())
