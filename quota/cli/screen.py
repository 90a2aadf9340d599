"""What commands say: documents and lines of JSON for programs, tables where a person looks, plain lines otherwise."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from quota.http.values import plain

__all__ = ["Screen", "number", "when"]

_AMOUNT = re.compile(r"-|unlimited|\$?\d+(\.\d+)?")


def number(value: Decimal | str | None, nothing: str = "-") -> str:
    """Returns an amount in plain digits, never with an exponent; over HTTP it came so. `nothing` for None."""
    return nothing if value is None else value if isinstance(value, str) else format(value, "f")


def when(value: datetime | str | None, nothing: str = "-") -> str:
    """Returns a time to the second, in UTC; over HTTP it came as text. `nothing` for None."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return nothing if found is None else f"{found.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


class Screen:
    """Where a command's answer goes.

    Fields:
        json: programs read it: JSON on standard output, and nothing else there.
    """

    def __init__(self, as_json: bool) -> None:
        self.json = as_json

    @property
    def lively(self) -> bool:
        """True where a person looks at standard output: a terminal, and not JSON."""
        return not self.json and sys.stdout.isatty()

    def document(self, value: object) -> None:
        """Prints the one JSON document of a command, or one line of several; nothing for people."""
        if self.json:
            click.echo(json.dumps(plain(value), ensure_ascii=False))

    def line(self, text: str = "") -> None:
        """Prints a line for people."""
        if not self.json:
            click.echo(text)

    def note(self, text: str) -> None:
        """Says something beside the answer: on standard error, whoever reads."""
        click.echo(text, err=True)

    def rows(self, rows: Iterable[object], columns: Mapping[str, Sequence[str]], empty: str) -> None:
        """Prints a list: a JSON object per line, or a table.

        Arguments:
            rows: what JSON shows, one object each.
            columns: what people see: title to cells, a cell per row.
            empty: what people are told when there is no row.
        """
        listed = list(rows)
        for row in listed:
            self.document(row)
        if not self.json:
            if listed:
                self.table(columns)
            else:
                click.echo(empty)

    def table(self, columns: Mapping[str, Sequence[str]], title: str | None = None) -> None:
        """Prints a table for people: framed on a terminal, aligned columns otherwise."""
        if self.json:
            return
        if self.lively:
            from rich.console import Console

            Console().print(framed(columns, title))
            return
        if title is not None:
            click.echo(title)
        lines = list(zip(*([name, *cells] for name, cells in columns.items()), strict=True))
        widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
        for line in lines:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def framed(columns: Mapping[str, Sequence[str]], title: str | None = None) -> Any:
    """Returns a rich table of these columns; cells are text, never markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name, cells in columns.items():
        amounts = all(_AMOUNT.fullmatch(cell) for cell in cells)
        table.add_column(Text(name), justify="right" if amounts else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table
