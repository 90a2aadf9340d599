"""What passes the gateway and what does not: which requests are refused as they stand, and which headers go where.

Two programs that read one request differently are how requests are smuggled and routes are bypassed. So whatever can be
read in two ways is refused, the body is framed anew, and the headers by which the gateway speaks to the upstream are
taken from nobody else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from quota.http.problems import Problem
from quota.metering.answers import no_websockets

__all__ = ["CREDENTIALS", "Headers", "cleaned", "fault_of", "passed_back"]

Headers = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1, what older programs treat so, and what the server answers itself. They are about one connection, and
# there are two.
_HOP_BY_HOP = frozenset({
    b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
# By these the gateway tells the upstream who asks and whence; from a client they would be a lie. An upstream that goes
# by another name for it says so in the configuration (`headers.drop`).
_SPOOFED = frozenset({
    b"x-agent-cost", b"forwarded", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip",
    b"x-original-url", b"x-original-host", b"x-rewrite-url", b"x-http-method", b"x-http-method-override",
    b"x-method-override", b"remote-user", b"x-remote-user", b"x-user", b"x-user-id", b"x-ssl-client-cert",
})  # fmt: skip
_SPOOFED_PREFIXES = (b"quota-", b"x-quota-", b"x-forwarded-", b"x-auth-", b"x-authenticated-", b"x-consumer-")
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""The gateway's own business: an upstream does not see them."""

# What a URI is written with (RFC 3986); the query as leniently as browsers do.
_PATH = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?\[\]|{}^`\"<>\\-]|%(?:[0-9A-Fa-f]{2})?)*")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_BAD_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SINGLE = frozenset({b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key"})
_RELIED_ON = frozenset({b"content-length", b"content-type", b"x-agent-cost"})
_METHODS_REFUSED = frozenset({"CONNECT", "TRACE"})


def fault_of(scope: Mapping[str, Any]) -> Problem | None:
    """Returns why a request is refused as it stands; None: it may pass.

    Arguments: `scope`, of an ASGI server, type `http`. Result: 400 for what can be read in two ways, 405 for CONNECT
    and TRACE, 501 for an upgrade to WebSocket.
    """
    if scope["method"] in _METHODS_REFUSED:
        return Problem(405, "method_not_allowed", f"{scope['method']} is not passed on.")
    path = scope["raw_path"]
    return _fault_of_target(path, scope["query_string"]) or _fault_of_headers(scope)


def _fault_of_target(path: bytes, query: bytes) -> Problem | None:
    if _PATH.fullmatch(path) is None:
        return _malformed("the path has characters that do not belong there; percent-encode them")
    if _QUERY.fullmatch(query) is None:
        return _malformed("the query has characters that do not belong there; percent-encode them")
    if b"%" in path or b"/." in path or b"//" in path:
        decoded = unquote_to_bytes(path)
        if decoded.count(b"/") != path.count(b"/") or b"\\" in decoded:
            return _malformed("the path has an encoded slash or a backslash")
        segments = decoded.split(b"/")
        if b"." in segments or b".." in segments or b"" in segments[1:-1]:
            return _malformed("the path has an empty segment, or one of dots; write it without")
        try:
            text = decoded.decode("utf-8")
        except UnicodeDecodeError:
            return _malformed("the path is not UTF-8")
        if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text):
            return _malformed("the path has control characters")
    return None


def _fault_of_headers(scope: Mapping[str, Any]) -> Problem | None:
    headers: Headers = scope["headers"]
    # All values at once: nearly every request is in order.
    together = b"\t".join([value for _, value in headers])
    if _BAD_IN_VALUE.search(together) is not None or not _is_text(together):
        named = next(name for name, value in headers if _BAD_IN_VALUE.search(value) or not _is_text(value))
        return _malformed(
            f"the header {named.decode('latin-1')} has control characters, a second line, or is not UTF-8"
        )
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE:
            if name in found:
                return _malformed(f"the header {name.decode('latin-1')} stands twice")
            found[name] = value
        elif name == b"upgrade" and b"websocket" in value.lower():
            return no_websockets()
    return _fault_of_framing(found, scope["http_version"])


def _is_text(value: bytes) -> bool:
    if value.isascii():
        return True
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _fault_of_framing(found: Mapping[bytes, bytes], version: str) -> Problem | None:
    coding, length = found.get(b"transfer-encoding"), found.get(b"content-length")
    if coding is not None:
        if length is not None:
            return _malformed("Content-Length and Transfer-Encoding stand together")
        if coding.lower() != b"chunked" or version == "1.0":
            return _malformed("Transfer-Encoding is not chunked, or not for this version of HTTP")
    if length is not None and not (length.isdigit() and len(length) <= 18):
        return _malformed("Content-Length is no number")
    host = found.get(b"host")
    if host is None and version == "1.1":
        return _malformed("the header host is missing")
    if host is not None and _HOST.fullmatch(host) is None:
        return _malformed("the header host names no host")
    return None


def _malformed(what: str) -> Problem:
    return Problem(400, "malformed", f"This request cannot be passed on: {what}.")


def cleaned(headers: Headers, spoofed: Container[bytes] = ()) -> Headers:
    """Returns a request's headers without what is about the connection, and without what the gateway alone may say.

    Arguments:
        headers: as the server gives them, names in lower case.
        spoofed: further names, in lower case, that a client may not send.
    """
    dropped = _named_in_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in dropped and name not in spoofed and not _is_for_nobody(name)
    ]


@functools.lru_cache(maxsize=256)  # names are the caller's, up to 16 KiB each
def _is_for_nobody(name: bytes) -> bool:
    """True for what never reaches an upstream from a client.

    Names with an underscore neither: a WSGI or CGI upstream takes them for those with a hyphen.
    """
    return name in _HOP_BY_HOP or name in _SPOOFED or b"_" in name or name.startswith(_SPOOFED_PREFIXES)


def passed_back(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns an answer's headers for the client: those that are not about the connection to the upstream."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = _named_in_connection(lowered)
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name not in dropped]


def _named_in_connection(headers: Headers) -> Container[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return ()
    # What the gateway relies on is not to be taken out of its hands by naming it.
    return {token.strip().lower() for value in values for token in value.split(b",")} - _RELIED_ON
