"""docs/errors.md against the classes and the database: the same names, codes, classes and statuses, in one order."""

from __future__ import annotations

import quota.config
import quota.errors
import quota.fleet
import quota.trace
from quota.errors import ERRORS, Misuse, QuotaError
from tests.docs.markdown import DOCS, tables
from tests.server import Connection

TABLE, OTHERS = tables((DOCS / "errors.md").read_text(encoding="utf-8"))


def test_the_classes_have_the_same_table() -> None:
    assert TABLE[0] == ["name", "SQLSTATE", "Python class", "HTTP", "remedy"]
    written = [
        (name.strip("`"), sqlstate, kind.strip("`"), int(status)) for name, sqlstate, kind, status, _ in TABLE[1:]
    ]
    assert written == [(row.name, row.sqlstate, row.type.__name__, row.http_status) for row in ERRORS]
    assert all(remedy for *_, remedy in TABLE[1:])
    for row in ERRORS:
        assert getattr(quota.errors, row.type.__name__) is row.type


def test_the_database_has_the_same_codes(tx_conn: Connection) -> None:
    for name, sqlstate, *_ in TABLE[1:]:
        found = tx_conn.execute("SELECT quota_internal.sqlstate_of(%s)", (name.strip("`"),)).fetchone()
        assert found == (sqlstate,)


def test_the_database_has_no_others(tx_conn: Connection) -> None:
    found = tx_conn.execute(
        "SELECT DISTINCT (regexp_matches(prosrc, '''(QT[0-9]{3})''', 'g'))[1] FROM pg_proc"
        " WHERE oid = 'quota_internal.sqlstate_of(text)'::regprocedure ORDER BY 1"
    ).fetchall()
    assert [sqlstate for (sqlstate,) in found] == [sqlstate for _, sqlstate, *_ in TABLE[1:]]


def test_the_rest_of_the_tree_is_told() -> None:
    told = {cells[1].strip("`").rpartition(".")[2] for cells in OTHERS[1:]}
    rest = {kind.__name__ for kind in QuotaError.__subclasses__()} - {Misuse.__name__}
    assert rest <= told
    assert told - rest == {"ConfigError", "TypeError"}
    assert issubclass(quota.config.ConfigError, ValueError)
