"""What README and docs/ show is run: SQL, Python and shell blocks, in order, each language on a database of its own.

Languages: `sql`, `python` and `sh` run; `console` and `text` only show. The set-up commands are what this run came
from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tests.docs.markdown import DOCS, ROOT, Block, blocks
from tests.server import connect

README = ROOT / "README.md"
FILES = [README, *sorted(DOCS.rglob("*.md"))]
SHOWN_ONLY = {"console", "text", "json", "toml", "yaml", "ini"}
SET_UP = ("scripts/quickstart", "scripts/test")
MADE_ROLE = re.compile(r"(?i)\bCREATE ROLE (quota_docs_\w+)")

CASES = [
    pytest.param(file, language, id=f"{file.relative_to(ROOT)}-{language}")
    for file in FILES
    for language in ("sql", "python", "sh")
    if any(block.language == language for block in blocks(file.read_text(encoding="utf-8")))
]


def is_set_up(block: Block) -> bool:
    return any(command in block.text for command in SET_UP)


def joined(file: Path, language: str) -> str:
    """The blocks of a language as one program whose lines have the numbers that they have in the file."""
    program = ""
    for block in blocks(file.read_text(encoding="utf-8")):
        if block.language == language and not is_set_up(block):
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text
    return program


def run(command: list[str], program: str, database: str, folder: Path) -> None:
    """Runs a program on its standard input; fails with what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUOTA_")},
        "PATH": path,
        "QUOTA_DATABASE_URL": database,
        "QUOTA_TIMEOUT_S": "30",  # documentation is no benchmark
    }
    done = subprocess.run(
        command, input=program, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def run_sql(file: Path, database: str) -> None:
    """Runs the blocks one by one. Roles outlive a database, so those that the text makes are taken away again."""
    text = file.read_text(encoding="utf-8")
    with connect(database) as connection:
        try:
            for block in blocks(text):
                if block.language == "sql":
                    connection.execute(block.text.encode())
        finally:
            for role in MADE_ROLE.findall(text):
                connection.execute(f'DROP ROLE IF EXISTS "{role}"'.encode())


@pytest.mark.parametrize(("file", "language"), CASES)
def test_blocks_run(file: Path, language: str, database: str, tmp_path: Path) -> None:
    match language:
        case "sql":
            run_sql(file, database)
        case "python":
            run([sys.executable, "-W", "error", "-"], joined(file, language), database, tmp_path)
        case _:
            run(["bash", "-euo", "pipefail", "-s"], joined(file, language), database, tmp_path)
    if file == README:
        with connect(database) as connection:
            found = connection.execute(
                "SELECT subject, limit_name, spent, reserved, available FROM quota.balance('user:ann')"
            ).fetchall()
        assert found == [("org:acme", "total", Decimal("0.11"), 0, Decimal("49.89"))]


def test_the_two_commands_are_there() -> None:
    set_up = [block for block in blocks(README.read_text(encoding="utf-8")) if is_set_up(block)]
    assert len(set_up) == 1
    commands = [line.split("#")[0].strip() for line in set_up[0].text.splitlines()]
    assert commands == list(SET_UP)
    for command in commands:
        assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_block_says_what_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(list(blocks(text)))
    assert {block.language for block in blocks(text)} <= SHOWN_ONLY | {"sql", "python", "sh"}


def anchors(file: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target
