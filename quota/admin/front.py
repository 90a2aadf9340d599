"""What every request and every answer has, whatever comes of it: an id, a path that can be read, headers, a log line.

It stands around the application as WSGI middleware: outside of it, nothing that fails inside is left out.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quota.admin.paths import decode_path
from quota.ids import uuid7

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["PRINCIPAL", "REQUEST_ID", "ROUTE", "Front"]

logger = logging.getLogger("quota.admin")

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
# Made once: json.dumps looks at its arguments first.
_write = json.JSONEncoder().encode

# Answers are for who asked; what they show may change with the next hold.
_CACHE_CONTROL = "Cache-Control"


class Front:
    """WSGI middleware around the application."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serves a request."""
        began_s = time.monotonic()
        given = environ.get("HTTP_X_REQUEST_ID", "")
        identity = environ[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else str(uuid7())
        decode_path(environ)

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            headers += _HEADERS
            headers.append(("X-Request-Id", identity))
            if all(name != _CACHE_CONTROL for name, _ in headers):
                headers.append((_CACHE_CONTROL, "no-store"))
            _log(environ, identity, status, began_s)
            return start_response(status, headers, exc_info)

        return self._application(environ, start)


def _log(environ: WSGIEnvironment, identity: str, status: str, began_s: float) -> None:
    """Says who has asked for what kind of thing, and what came of it; never a path, a body or a header."""
    who = environ.get(PRINCIPAL)
    line = {
        "request_id": identity,
        "method": environ["REQUEST_METHOD"],
        "route": environ.get(ROUTE),
        "status": int(status[:3]),
        "token": who.token if who else None,
        "tenant": who.tenant if who else None,
        "ms": round((time.monotonic() - began_s) * 1000, 1),
    }
    logger.info(_write(line))
