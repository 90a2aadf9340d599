"""The house rules that a program can see: imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quota

PACKAGE = Path(quota.__file__).parent

# From the bottom up; a module may import from its own layer's entry, or from layers below it, not beside or above.
LAYERS: list[list[str]] = [
    ["sql", "tables", "errors", "config", "costs", "ids", "credentials", "trace", "_pgwatch"],
    ["_pgbin", "trace"],
    ["embedded", "calls", "migrate"],
    ["http", "client"],
    ["batch", "lease", "authentication", "reaper", "runs", "prices", "fleet", "alerts", "reports", "metrics"],
    ["metering"],
    ["integrations", "gateway", "admin"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Inside the bottom layer, and on the way from calls to http to client, neighbours may lean on each other as named.
BESIDE = {
    ("client", "http"),
    ("costs", "errors"),
    ("gateway", "integrations"),
    ("migrate", "embedded"),
    ("tables", "sql"),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yields (top-level name inside quota, file) for every module of the package; quota/__init__ is the roof."""
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE)
        if relative.parts[0] not in ("__init__.py", "_migrations"):
            yield relative.parts[0].removesuffix(".py"), file


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, top-level name inside quota) for every import, wherever in the file it stands.

    Imports that only a type checker sees do not count: they bind nothing at run time.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = ("quota", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*start, *([node.module] if node.module else [])))
            # "from quota import x" imports the module x; "from quota.x import y" the module x as well.
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "quota" and len(parts) > 1:
                yield node.lineno, parts[1]


def violation(importer: str, name: str) -> str | None:
    """Returns what is wrong with `importer` importing `name` (both inside quota), or None."""
    if name not in LEVEL:
        return None if name.startswith("__") else f"{name} has no place in LAYERS"
    if name == importer or (importer, name) in BESIDE or LEVEL[name] < LEVEL[importer]:
        return None
    return f"{name} does not lie below {importer}"


def test_every_module_has_a_place() -> None:
    assert {name for name, _ in modules()} - LEVEL.keys() == set()


def test_imports_point_down_only() -> None:
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {problem}"
        for importer, file in modules()
        if importer in LEVEL
        for line, name in imported(file)
        if (problem := violation(importer, name)) is not None
    ]
    assert found == []


@pytest.mark.parametrize(
    ("importer", "name", "allowed"),
    [
        ("client", "calls", True),
        ("calls", "client", False),
        ("sql", "calls", False),
        ("cli", "reaper", True),
        ("reaper", "admin", False),
        ("http", "client", False),
        ("client", "unheard_of", False),
        ("cli", "__version__", True),
    ],
)
def test_the_rule_itself(importer: str, name: str, allowed: bool) -> None:
    assert (violation(importer, name) is None) is allowed


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    file = tmp_path / "client" / "core.py"
    file.parent.mkdir()
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "import quota.errors\n"
        "from quota import calls\n"
        "from quota.http.headers import x\n"
        "from . import pool\n"
        "from ..config import Settings\n"
        "from .. import tables\n"
        "if TYPE_CHECKING:\n    from quota import cli\n"
        "def late():\n    from quota import reaper\n"
    )
    assert [name for _, name in imported(file)] == ["errors", "calls", "http", "client", "config", "tables", "reaper"]
