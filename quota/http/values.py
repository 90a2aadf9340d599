"""How values are written: as JSON (amounts and ids as strings, times as RFC 3339, no binary fraction), and in paths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

__all__ = ["path_of", "plain", "written"]


def plain(value: object) -> Any:
    """Returns what JSON can say: amounts and ids as strings, times as RFC 3339 in UTC, dataclasses as objects."""
    if value is None or isinstance(value, str | int):  # most of them
        return value
    if isinstance(value, datetime):
        return (value if value.tzinfo in (None, UTC) else value.astimezone(UTC)).isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, UUID | Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return value


def _made_plain(value: object) -> Any:
    """What the encoder asks for when it meets a value that JSON has not."""
    if isinstance(value, datetime) and value.tzinfo is UTC:  # most of them
        return value.isoformat()
    found = plain(value)
    if found is value:
        raise TypeError(f"a {type(value).__name__} is no JSON value")
    return found


# Made once: json.dumps makes an encoder anew where a text is not written by its defaults. No answer contains itself.
_write = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), default=_made_plain).encode


def written(value: object) -> str:
    """Returns the JSON text of an answer: of what `plain` makes of it, where its keys are strings."""
    return _write(value)


def path_of(*parts: str) -> str:
    """Returns the path that these parts make; a slash inside of one stays in it, as `%2F`."""
    return "".join(f"/{quote(part, safe=':')}" for part in parts)
