"""What every request and every answer has, whatever comes of it: an id, a path that can be read, headers, a log line.

It stands around the application as WSGI middleware: outside of it, nothing that fails inside is left out.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from quota.admin.paths import decode_path

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["PRINCIPAL", "REQUEST_ID", "ROUTE", "Front"]

# What the application finds in the environment, and what it leaves there for the log.
REQUEST_ID, ROUTE, PRINCIPAL = "quota.request_id", "quota.route", "quota.principal"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]
# Methods, routes, tokens and tenants come again and again.
_quoted = functools.lru_cache(maxsize=256)(json.JSONEncoder().encode)

# Answers are for who asked; what they show may change with the next hold.
_CACHE_CONTROL = "Cache-Control"


class Front:
    """WSGI middleware around the application. `log`: takes the line of a request, an object of JSON."""

    def __init__(self, application: WSGIApplication, log: Callable[[str], None]) -> None:
        self._application = application
        self._log = log

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serves a request."""
        began_s = time.monotonic()
        given = environ.get("HTTP_X_REQUEST_ID", "")
        identity = environ[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        decode_path(environ)

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            headers += _HEADERS
            headers.append(("X-Request-Id", identity))
            if _CACHE_CONTROL not in dict(headers):
                headers.append((_CACHE_CONTROL, "no-store"))
            self._log(_line(environ, identity, status, began_s))
            return start_response(status, headers, exc_info)

        return self._application(environ, start)


def _line(environ: WSGIEnvironment, identity: str, status: str, began_s: float) -> str:
    """Who has asked for what kind of thing, and what came of it; never a path, a body or a header."""
    who = environ.get(PRINCIPAL)
    token, tenant = (who.token, who.tenant) if who else (None, None)
    method, route = _quoted(environ["REQUEST_METHOD"]), _quoted(environ.get(ROUTE))
    return (
        f'{{"request_id": "{identity}", "method": {method}, "route": {route}, "status": {status[:3]}, '
        f'"token": {_quoted(token)}, "tenant": {_quoted(tenant)}, "ms": {(time.monotonic() - began_s) * 1000:.1f}}}'
    )
