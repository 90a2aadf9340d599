"""How lists are walked: a cursor is the key of the last row, opaque to whoever carries it."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from flask import Response, request

from quota.admin.changes import answer
from quota.http.problems import Problem

__all__ = ["page", "position"]

Row = Mapping[str, Any]


def position(after: str | None, *kinds: type[str] | type[int]) -> tuple[Any, ...] | None:
    """Returns the key that a cursor stands for; None at the start.

    Arguments: `after`, the cursor; `kinds`, the types of the key's parts. Errors: `Problem` 422 for what is no cursor
    of this list.
    """
    if after is None:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(after.encode("ascii") + b"=" * (-len(after) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise _no_cursor() from None
    if not isinstance(found, list) or len(found) != len(kinds):
        raise _no_cursor()
    for part, kind in zip(found, kinds, strict=True):
        if type(part) is not kind or (isinstance(part, int) and not -(2**63) <= part < 2**63):
            raise _no_cursor()
        # A name may hold whatever the database stores, spaces of every kind among it.
        if isinstance(part, str) and any(one == "\0" or "\ud800" <= one <= "\udfff" for one in part):
            raise _no_cursor()
    return tuple(found)


def _no_cursor() -> Problem:
    return Problem(422, "invalid_argument", "after: this is no `next` of this list; leave it out for the first page.")


def _cursor(key: Sequence[Any]) -> str:
    text = json.dumps(list(key), separators=(",", ":"), ensure_ascii=True)
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def page(rows: Sequence[Row], limit: int, key: Callable[[Row], Sequence[Any]]) -> Response:
    """Returns the response that shows one page.

    Arguments: `rows`, one more than the page has, if there are more; `limit`, the page's size; `key`, the sorting key
    of a row.
    """
    shown = rows[:limit]
    after = _cursor(key(shown[-1])) if len(rows) > limit else None
    response = answer({"items": list(shown), "next": after})
    if after is not None:
        query = urlencode({**request.args.to_dict(), "after": after})
        response.headers["Link"] = f'<{request.path}?{query}>; rel="next"'
    return response
