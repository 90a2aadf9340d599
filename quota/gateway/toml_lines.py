"""On which line of a TOML file does something stand? The standard parser does not say; who mends it wants to know.

A reader of what configurations are written like: headers and keys, each at the start of a line. Where it finds nothing
more exact, such as inside of an inline table, it names the line of what contains it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

__all__ = ["Place", "line_of"]

Place = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_-]+)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*[.=]")


def line_of(text: str, place: Sequence[str | int]) -> int:
    """Returns the line, counted from 1, of what stands at `place` in the document, or of the nearest thing around it.

    Arguments: `text`, of the file; `place`, keys and indexes from the top, such as `("routes", 2, "path")`.
    """
    lines = _lines(text)
    for length in range(len(place), 0, -1):
        found = lines.get(tuple(place[:length]))
        if found is not None:
            return found
    return 1


def _lines(text: str) -> dict[Place, int]:
    table: Place = ()
    seen: Counter[str] = Counter()
    lines: dict[Place, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            name = header[2]
            table = (name, seen[name]) if header[1] == "[[" else (name,)
            seen[name] += 1
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, key[1].strip("\"'")), number)
    return lines
