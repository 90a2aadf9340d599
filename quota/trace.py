"""Request traces, and what their requests cost: the worst case that is held, and the true cost that is settled.

A trace is a CSV file with a header line. Of its columns `ContextTokens` and `GeneratedTokens` are read, whole numbers
of tokens; others, such as `TIMESTAMP`, may stand beside them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path

from quota.errors import QuotaError

__all__ = ["Prices", "Request", "TraceError", "read_trace", "sample_trace"]

CONTEXT, GENERATED = "ContextTokens", "GeneratedTokens"
_TOKENS = re.compile(r"[0-9]{1,9}")
_SHOWN = 60


class TraceError(QuotaError):
    """The file is no trace. The message names the file, the line, the column, the value and the rule."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace: the tokens that were sent, and those that came back."""

    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens, exact.

    Fields:
        dollars_in: for tokens that are sent.
        dollars_out: for tokens that come back.
    """

    dollars_in: Decimal
    dollars_out: Decimal

    def cost(self, context_tokens: int, generated_tokens: int) -> Decimal:
        """Returns the dollars for so many tokens: input x price + output x price (per million)."""
        return (context_tokens * self.dollars_in + generated_tokens * self.dollars_out).scaleb(-6)

    def worst(self, request: Request, ceiling_tokens: int) -> Decimal:
        """Returns what a request may cost at most, as known before it is made: its input, and the output ceiling."""
        return self.cost(request.context_tokens, ceiling_tokens)

    def true(self, request: Request) -> Decimal:
        """Returns what the request did cost."""
        return self.cost(request.context_tokens, request.generated_tokens)


def sample_trace() -> list[Request]:
    """Returns the made-up trace that the package ships (scripts/make-trace wrote it)."""
    text = (files("quota") / "data" / "trace.csv").read_text(encoding="ascii")
    return _parsed("the packaged trace", text.splitlines(keepends=True))


def read_trace(path: Path) -> list[Request]:
    """Reads a trace.

    Arguments:
        path: the file, UTF-8.

    Result: its requests, in their order. Errors: `TraceError`.
    """
    try:
        # newline="": the csv module sees line ends as they are.
        # surrogateescape: bytes that are no UTF-8 are found, with line and column, by the check of the value.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            return _parsed(str(path), lines)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; give a CSV file") from None


def _parsed(name: str, lines: Iterable[str]) -> list[Request]:
    # strict: an unbalanced quote is an error, and does not swallow the rest of the file as one value.
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise TraceError(
                f"{name}: empty; the first line must name the columns, {CONTEXT} and {GENERATED} among them"
            )
        at = {column: _column(name, header, column) for column in (CONTEXT, GENERATED)}
        requests = [
            Request(
                _tokens(name, reader.line_num, row, at, CONTEXT), _tokens(name, reader.line_num, row, at, GENERATED)
            )
            for row in _filled(reader)
        ]
    except csv.Error as error:
        raise TraceError(f"{name}, line {reader.line_num}: not CSV ({error}); correct the line") from None
    if not requests:
        raise TraceError(f"{name}: no request below the header line; give a trace with at least one")
    return requests


def _filled(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    return (row for row in rows if row)


def _column(name: str, header: list[str], column: str) -> int:
    names = [cell.strip() for cell in header]
    if names.count(column) != 1:
        what = "twice" if column in names else "not there"
        found = _shown(", ".join(names))
        raise TraceError(f'{name}, line 1: column {column} is {what} (found "{found}"); name it once in the first line')
    return names.index(column)


def _tokens(name: str, line: int, row: list[str], at: dict[str, int], column: str) -> int:
    where = f"{name}, line {line}, column {column}"
    if at[column] >= len(row):
        raise TraceError(f"{where}: missing, the line has only {len(row)} of its values; complete it")
    cell = row[at[column]].strip()
    if _TOKENS.fullmatch(cell) is None:
        raise TraceError(f'{where}: "{_shown(cell)}" is not a whole number of tokens below 10^9; correct it')
    return int(cell)


def _shown(text: str) -> str:
    safe = text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= _SHOWN else f"{safe[: _SHOWN - 3]}..."
