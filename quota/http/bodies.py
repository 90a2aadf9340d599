"""How JSON is read from strangers: everything that parsers disagree about is refused before it means something.

Bytes are looked at before they are parsed: a deep nesting would exhaust a parser's stack, a long number its patience.
Numbers are judged by their digits, so that none is a binary fraction and none is too long to convert.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

__all__ = ["BODY_BYTES_MAX", "DEPTH_MAX", "Malformed", "parse"]

BODY_BYTES_MAX = 64 << 10
DEPTH_MAX = 32
_DIGITS_MAX = 100
_INT_DIGITS_MAX = 18

# Strings (with their escapes) are skipped; what is left of brackets is structure.
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class Malformed(ValueError):  # noqa: N818 - what the input is
    """The bytes are no JSON that this service takes; the message says what is wrong and never quotes them."""


def _must_be_shallow(raw: bytes) -> None:
    depth = 0
    for found in _STRUCTURE.finditer(raw):
        token = found[0][:1]
        if token in b"[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise Malformed(f"it is nested deeper than {DEPTH_MAX} levels")
        elif token in b"]}":
            depth -= 1


def _constant(name: str) -> Any:
    raise Malformed(f"{name} is no JSON number")


def _number(text: str) -> Decimal:
    if len(text) > _DIGITS_MAX:
        raise Malformed(f"it has a number of more than {_DIGITS_MAX} characters")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise Malformed("it has a number with an exponent out of range") from None


def _integer(text: str) -> int | Decimal:
    # What does not fit into 64 bits is no integer for anybody downstream; as an amount it is still exact.
    return int(text) if len(text) <= _INT_DIGITS_MAX else _number(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed("it names a key twice")
        found[key] = value
    return found


def _must_be_text(value: Any) -> None:
    """Refuses what no text column stores: NUL, and half of a surrogate pair."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise Malformed("it has a NUL or half of a surrogate pair in a string")
    elif isinstance(value, dict):
        for key, item in value.items():
            _must_be_text(key)
            _must_be_text(item)
    elif isinstance(value, list):
        for item in value:
            _must_be_text(item)


def parse(raw: bytes) -> Any:
    """Reads a JSON text.

    Arguments: `raw`, UTF-8 without a byte order mark, at most 64 KiB.
    Result: its value; whole numbers of up to 18 digits are `int`, all others `Decimal`.
    Errors: `Malformed` for no JSON, too large, nested deeper than 32, duplicate keys, NaN and Infinity, numbers of more
    than 100 characters, NUL and lone surrogates.
    """
    if len(raw) > BODY_BYTES_MAX:
        raise Malformed(f"it has more than {BODY_BYTES_MAX} bytes")
    if not raw.strip():
        raise Malformed("it is empty")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8 at byte {error.start}") from None
    _must_be_shallow(raw)
    try:
        value = json.loads(
            text,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
            object_pairs_hook=_unique,
        )
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        raise Malformed(f"{error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise Malformed("it cannot be parsed") from None
    _must_be_text(value)
    return value
