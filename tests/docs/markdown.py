"""The little Markdown that the tests of the documentation read: headings, fenced blocks and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, and the line of the file where the text starts."""

    language: str
    text: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a text, in order."""
    for found in _FENCE.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


def sections(text: str, level: int) -> dict[str, str]:
    """Returns what stands below each heading of a level, by heading, up to the next heading of that level or above."""
    bare = _FENCE.sub(lambda found: re.sub(r"(?m)^#", " ", found[0]), text)
    starts = [(m.start(), m.end(), len(m[1]), m[2].strip()) for m in re.finditer(r"(?m)^(#+) (.*)$", bare)]
    found: dict[str, str] = {}
    for number, (_, end, depth, title) in enumerate(starts):
        if depth == level:
            following = [start for start, _, other, _ in starts[number + 1 :] if other <= level]
            assert title not in found, f'two headings "{title}"'
            found[title] = text[end : following[0] if following else len(text)]
    return found


def tables(text: str) -> list[list[list[str]]]:
    """Returns the tables of a text: rows of cells, the header first, without the line below it."""
    found: list[list[list[str]]] = []
    for table in re.findall(r"(?m)(?:^\|.*\|$\n?)+", _FENCE.sub("", text)):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in table.strip().splitlines()
        ]
        found.append([rows[0], *rows[2:]])
    return found
