"""Paths in which a part may hold a slash: `pool:aws-1/us-east-1` is one name, sent as `pool:aws-1%2Fus-east-1`.

WSGI hands paths over decoded, when it is too late to tell the slash of a name from one that separates. So the path is
decoded here, part by part, and a slash inside of a part travels to the router as a control character, which no path may
hold.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from werkzeug.routing import BaseConverter

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

__all__ = ["MALFORMED", "SegmentConverter", "decode_path"]

MALFORMED = "quota.malformed_path"
_SLASH = "\x1f"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# As nearly every path is sent: nothing in it is encoded.
_PLAIN = re.compile(r"(/[!-$&->@-~]*)(?:\?|\Z)")
_ORIGIN = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")


class SegmentConverter(BaseConverter):
    """One part of a path, slashes included."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        """The part as it was meant."""
        return value.replace(_SLASH, "/")

    def to_url(self, value: Any) -> str:
        """The part as it is sent."""
        return quote(str(value), safe=":")


def decode_path(environ: WSGIEnvironment) -> None:
    """Decodes the path of a request anew; what is no UTF-8 or holds control characters is marked as `MALFORMED`."""
    raw = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    plain = _PLAIN.match(raw)
    if plain is not None:
        environ["PATH_INFO"] = plain[1]
        return
    try:
        parts = _parts(environ, raw)
    except UnicodeDecodeError:
        environ[MALFORMED] = "it is not UTF-8"
        return
    if any(map(_CONTROL.search, parts)):
        environ[MALFORMED] = "it has control characters"
    else:
        path = "/".join(part.replace("/", _SLASH) for part in parts)
        environ["PATH_INFO"] = path.encode().decode("latin-1")


def _parts(environ: WSGIEnvironment, raw: str) -> list[str]:
    """The path's parts, decoded one by one; of a request in absolute form (RFC 9112, 3.2.2) too."""
    raw = _ORIGIN.sub("", raw, count=1)
    if not raw.startswith("/"):  # a server that does not tell: what it has decoded
        return str(environ["PATH_INFO"]).encode("latin-1").decode("utf-8").split("/")
    sent = raw.partition("?")[0].encode("latin-1", "replace")
    return [unquote_to_bytes(part).decode("utf-8") for part in sent.split(b"/")]
