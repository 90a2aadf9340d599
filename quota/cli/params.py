"""What people type: amounts, costs, durations. Each refuses with the value and what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

__all__ = ["AMOUNT", "CAPACITY", "DETAILS", "DURATION", "INSTANT", "PRICE", "UNLIMITED", "costs_of", "text_of"]

UNLIMITED = "unlimited"
_DIGITS = re.compile(r"\d+(\.\d+)?", re.ASCII)
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", re.ASCII)
_PRICE_DIGITS = 6


if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic only since click 8.4


class _Text(_Type):
    """A kind of value: its name in `--help`, and how to read it."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Amount(_Text):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # Only the form is judged here; how large and how precise is the ledger's to say.
        if isinstance(value, str) and _DIGITS.fullmatch(value) is None:
            self.fail(f'"{value}" is no amount; write digits, such as 0.25', param, ctx)
        return value if isinstance(value, Decimal) else Decimal(value)


class _Capacity(_Amount):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == UNLIMITED else super().convert(value, param, ctx)


class _Price(_Amount):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        price: Decimal = super().convert(value, param, ctx)
        exponent = price.normalize().as_tuple().exponent
        if price >= 10**_PRICE_DIGITS or not isinstance(exponent, int) or exponent < -_PRICE_DIGITS:
            self.fail(
                f'"{value}" is no price; write dollars per million tokens, below 1000000, with at most '
                f"{_PRICE_DIGITS} decimals, such as 3 or 0.15",
                param,
                ctx,
            )
        return price


class _Duration(_Text):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, timedelta):
            return value
        match = _SPAN.fullmatch(value)
        if match is None or not value:
            self.fail(
                f'"{value}" is no duration; write a number with its unit, such as 10s, 5m, 1h30m or 2d', param, ctx
            )
        days, hours, minutes, seconds = (Decimal(part or 0) for part in match.groups())
        micros = int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000)
        try:
            return timedelta(microseconds=micros)
        except OverflowError:
            self.fail(f'"{value}" is longer than there is time; write a shorter one, such as 1h', param, ctx)


class _Instant(_Text):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, datetime):
            return value
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f'"{value}" is no time; write a day or a time in UTC, such as 2026-12-01', param, ctx)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


class _Details(_Text):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self.fail(f'"{value}" is no JSON ({error}); write an object, such as \'{{"job": "7"}}\'', param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f'"{value}" is no JSON object; write one, such as \'{{"job": "7"}}\'', param, ctx)
        return parsed


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'the key "{key}" stands twice')
        found[key] = value
    return found


AMOUNT = _Amount("amount")
CAPACITY = _Capacity("amount|unlimited")
PRICE = _Price("dollars")
DURATION = _Duration("duration")
INSTANT = _Instant("time")
DETAILS = _Details("json")


def text_of(file: Path) -> str:
    """Reads a file that a command was given, UTF-8. Errors: `click.UsageError` naming it."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise click.UsageError(f"{file}: {reason}; give a JSON file") from None


def costs_of(words: Iterable[str]) -> dict[str, Decimal]:
    """Reads `unit=amount` words, such as `usd=0.25 tokens=1200`.

    Errors: `click.UsageError` naming the word.
    """
    costs: dict[str, Decimal] = {}
    for word in words:
        unit, separator, amount = word.rpartition("=")  # a unit's name may hold a "=", an amount cannot
        if not separator or not unit:
            raise click.UsageError(f'"{word}" is no cost; write unit=amount, such as usd=0.25')
        if unit in costs:
            raise click.UsageError(f'the unit "{unit}" stands twice; name each once')
        if _DIGITS.fullmatch(amount) is None:
            raise click.UsageError(f'"{amount}" in "{word}" is no amount; write digits, such as {unit}=0.25')
        costs[unit] = Decimal(amount)
    return costs
