"""The acceptance table of docs/gateway.md: thirteen rows, each with tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.markdown import DOCS, ROOT, sections

ROWS = [
    line for line in sections((DOCS / "gateway.md").read_text(encoding="utf-8"), 2)["Checked"].splitlines()
    if line.startswith("|")
][2:]  # fmt: skip


def test_every_row_of_the_report_is_there() -> None:
    assert len(ROWS) == 13


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_the_tests_of_a_row_exist(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named, row
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in functions, f"{file} has no {test}"
