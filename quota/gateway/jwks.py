"""The keys of an OAuth issuer (a JWK set, RFC 7517), from a file or an address: remembered for a bounded time, in
bounded size, and asked for again when a token names one that is not there."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from http.client import HTTPException
from pathlib import Path
from typing import Any

import jwt

from quota.client.attempts import Join, Plan
from quota.errors import Unavailable

__all__ = ["ALGORITHMS", "KeySet", "KeySetError", "read_keys"]

logger = logging.getLogger("quota.gateway")

# By the type and curve of the key. Nothing symmetric: who can check such a token can also make one.
ALGORITHMS: Mapping[tuple[str, str | None], tuple[str, ...]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
REFRESH_S = 300.0
STALE_S = 3600.0
COOLDOWN_S = 10.0
_FETCH_S = 5.0
_BYTES_MAX = 256 * 1024
_PIECE_BYTES = 16 * 1024
_KEYS_MAX = 100
_RSA_BITS_MIN = 2048


class KeySetError(ValueError):
    """What was read is no set of keys that can be used; the message says why."""


def read_keys(text: str | bytes) -> dict[str | None, Mapping[str, jwt.PyJWK]]:
    """Reads a JWK set.

    Result: by key id (None: the one key without an id), the key for each algorithm that it may be used with. Keys for
    encryption, symmetric ones and those of unknown kinds are left out.
    Errors: `KeySetError` when it cannot be read, has more than 100 keys, the same id twice, or none to be used.
    """
    try:
        document = json.loads(text)
        listed = document["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise KeySetError('it is no JSON object with "keys"') from None
    if not isinstance(listed, list) or len(listed) > _KEYS_MAX:
        raise KeySetError(f'"keys" is no list of at most {_KEYS_MAX}')
    found: dict[str | None, Mapping[str, jwt.PyJWK]] = {}
    for key in listed:
        usable = _usable(key)
        if not usable:
            continue
        if key.get("kid") in found:
            raise KeySetError(f'the key id "{key.get("kid")}" stands twice')
        found[key.get("kid")] = usable
    if not found:
        raise KeySetError("it has no key for signatures that can be used: RSA of 2048 bits or more, EC or Ed25519")
    return found


def _usable(key: object) -> dict[str, jwt.PyJWK]:
    """The key by algorithm; empty when it is not for us."""
    if not isinstance(key, dict) or key.get("use", "sig") != "sig" or "verify" not in key.get("key_ops", ["verify"]):
        return {}
    curve = key.get("crv") if key.get("kty") != "RSA" else None
    possible = ALGORITHMS.get((key.get("kty", ""), curve), ())
    try:
        made = {
            algorithm: jwt.PyJWK(key, algorithm) for algorithm in possible if key.get("alg", algorithm) == algorithm
        }
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise KeySetError(f"a key cannot be read: {error}") from None
    bits = [getattr(one.key, "key_size", _RSA_BITS_MIN) for one in made.values()] if key.get("kty") == "RSA" else []
    return {} if any(size < _RSA_BITS_MIN for size in bits) else made


class KeySet:
    """An issuer's keys, as they are now. Thread-safe.

    Arguments:
        source: a file, or an address that answers with the JWK set.

    They are read when first needed, again after five minutes, and at most every ten seconds for a key that is not
    there, so that tokens with made-up key ids ask nobody. Nobody waits for a key that is known. While the source is
    away the keys before are good for an hour.
    """

    def __init__(self, source: str | Path) -> None:
        self._source = source
        self._keys: dict[str | None, Mapping[str, jwt.PyJWK]] = {}
        self._read_at_s = self._tried_at_s = float("-inf")
        self._lock = threading.Lock()
        self._reading: Future[None] | None = None

    def finding(self, kid: str | None, algorithm: str) -> Plan[jwt.PyJWK | None]:
        """Plans the key that a token names, for that algorithm and no other; None when there is none.

        Errors: `Unavailable` when there are no keys, or none that are fresh enough.
        """
        now_s = time.monotonic()
        wanted = not self._known(kid)
        if wanted or now_s - self._read_at_s >= REFRESH_S:
            reading = self._refreshing(now_s)
            if wanted and reading is not None:
                yield Join(reading, now_s + _FETCH_S)
        if time.monotonic() - self._read_at_s > STALE_S:
            raise Unavailable("the keys of the OAuth issuer cannot be read", False)
        return self._known(kid).get(algorithm)

    def _known(self, kid: str | None) -> Mapping[str, jwt.PyJWK]:
        keys = self._keys
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        return keys.get(kid, {})

    def _refreshing(self, now_s: float) -> Future[None] | None:
        """Has the keys read beside whoever asks, once at a time; None when that was done a moment ago."""
        with self._lock:
            if self._reading is not None:
                return self._reading
            if now_s - self._tried_at_s < COOLDOWN_S:
                return None
            self._tried_at_s = now_s
            self._reading = Future()
            threading.Thread(target=self._refresh, args=(self._reading,), name="quota-jwks", daemon=True).start()
            return self._reading

    def _refresh(self, reading: Future[None]) -> None:
        try:
            self._keys = read_keys(self._text())
            self._read_at_s = time.monotonic()
        except (OSError, HTTPException, ValueError) as error:
            logger.warning("the keys of the OAuth issuer (%s) cannot be read: %s", self._source, error)
        finally:
            with self._lock:
                self._reading = None
            reading.set_result(None)

    def _text(self) -> bytes:
        if isinstance(self._source, Path):
            with self._source.open("rb") as file:
                return _read(file, time.monotonic() + _FETCH_S)
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(self._source, timeout=_FETCH_S) as answer:
            return _read(answer, time.monotonic() + _FETCH_S)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Keys are taken from where the configuration says, and from nowhere that an answer says."""

    def redirect_request(self, *_: Any) -> None:
        """None: the redirect is the error that its status is."""


def _read(source: Any, deadline_s: float) -> bytes:
    text = b""
    while piece := source.read(_PIECE_BYTES):
        text += piece
        if len(text) > _BYTES_MAX or time.monotonic() > deadline_s:
            raise KeySetError(f"it has more than {_BYTES_MAX} bytes, or takes longer than {_FETCH_S:g} s")
    return text
