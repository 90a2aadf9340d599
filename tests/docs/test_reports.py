"""docs/reports.md: each of the eight ways to fail names columns that there are."""

from __future__ import annotations

import re

from tests.docs.markdown import DOCS, sections, tables
from tests.docs.test_sql_reference import columns
from tests.server import Connection

TEXT = (DOCS / "reports.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(report_\w+)\.(\w+)`")


def column_names(connection: Connection) -> dict[str, set[str]]:
    """The columns of every report in the catalog."""
    found = connection.execute(
        "SELECT proname, oid FROM pg_proc WHERE pronamespace = 'quota'::regnamespace AND proname LIKE 'report\\_%'"
    ).fetchall()
    return {str(name): {column for column, _ in columns(connection, oid)} for name, oid in found}


def test_every_way_to_fail_names_the_columns_that_show_it(tx_conn: Connection) -> None:
    there = column_names(tx_conn)
    (header, *lines) = tables(sections(TEXT, 3)["Which report shows what is wrong"])[0]
    assert header == ["what is seen", "why", "where it shows"]
    assert len(lines) == 8
    for seen, _, where in lines:
        named = NAMED.findall(where)
        assert named, seen
        assert all(column in there[report] for report, column in named), seen


def test_every_column_that_is_named_anywhere_is_there(tx_conn: Connection) -> None:
    there = column_names(tx_conn)
    assert all(column in there[report] for report, column in NAMED.findall(TEXT))
    (header, *lines) = tables(sections(TEXT, 2)["Calibration of row costs"])[0]
    assert header[0] == "column"
    told = {name for line in lines for name in re.findall(r"`(\w+)`", line[0])}
    assert told == {name for name in there["report_calibration"] if name.startswith("suggested_")}
