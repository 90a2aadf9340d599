"""Server-sent events, cut out of a stream of bytes as it passes by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["Events"]

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
# An event that is longer is passed on, and not looked at.
_LOOKED_AT_MAX = 16 * 1024 * 1024


class Events:
    """Cuts a stream into events, each with the bytes it came in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, Any]]:
        """Yields (bytes, parsed data or None) for every event that is whole now."""
        self._rest += chunk
        while True:
            end = _END.search(self._rest)
            if end is None:
                if len(self._rest) > _LOOKED_AT_MAX:
                    yield self._rest, None
                    self._rest = b""
                return
            event, self._rest = self._rest[: end.end()], self._rest[end.end() :]
            yield event, _data(event)

    def rest(self) -> bytes:
        """What is left when the stream has ended."""
        left, self._rest = self._rest, b""
        return left


def _data(event: bytes) -> Any:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    try:
        return json.loads(b"\n".join(lines)) if lines else None
    except ValueError:
        return None
