"""OAuth connections: who presents this access token? The subject `oauth:<sid>`, by a JWT whose signature, issuer,
audience and times are right. A refreshed token has the same `sid` and so the same budget; the tier is always `basic`.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jwt

from quota import credentials
from quota.authentication import Remembered
from quota.client.attempts import Plan
from quota.credentials import hash_of
from quota.gateway.jwks import KeySet
from quota.http.problems import Problem
from quota.metering import Identity, Keys, credential_of
from quota.metering.identity import Headers, unauthenticated

__all__ = ["KeysOrTokens", "Tokens"]

_LONGEST = 8192
_REMEMBERED_S = 60.0
_ID_MAX = 194  # with "oauth:" a name of at most 200 characters


@dataclass(frozen=True, slots=True)
class _Verified:
    identity: Identity
    ends_at_s: float


class Tokens:
    """Verifies access tokens (JWS with claims, RFC 7519 and 8725).

    Arguments:
        keys: of the issuer.
        issuer: what `iss` has to be, character by character.
        audience: what `aud` has to be or to hold.
        algorithms: which are accepted, asymmetric ones; a token cannot choose another.
        leeway_s: how far the issuer's clock may be off, in seconds.
        connection_claim: whose value is the id of the connection.
        user_claim: whose value names the user `user:<value>` above a connection that the ledger meets for the first
            time; None: connections stand alone, or below whom an admin has put them.
    """

    def __init__(
        self,
        keys: KeySet,
        *,
        issuer: str,
        audience: str,
        algorithms: Collection[str] = ("RS256",),
        leeway_s: float = 10.0,
        connection_claim: str = "sid",
        user_claim: str | None = None,
    ) -> None:
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._algorithms = frozenset(algorithms)
        self._leeway_s = leeway_s
        self._connection_claim = connection_claim
        self._user_claim = user_claim
        self._known: Remembered[_Verified] = Remembered(_REMEMBERED_S)

    def __call__(self, headers: Headers, *, while_away: bool) -> Plan[Identity]:  # noqa: ARG002 - no ledger is asked
        """Plans who asks. Errors: as `Authenticator`."""
        return (yield from self.named(credential_of(headers)))

    def named(self, token: str) -> Plan[Identity]:
        """Plans whose token it is.

        A good token is remembered for a minute, though never past its end or the removal of its key.
        Errors: `Problem` 401, which says what is wrong and nothing that is in the token; `Unavailable` when the
        issuer's keys cannot be read.
        """
        if len(token) > _LONGEST:
            raise _invalid(f"it is longer than {_LONGEST} characters")
        header = _header_of(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._algorithms:
            raise _invalid("its algorithm is not accepted here")
        if kid is not None and not isinstance(kid, str):
            raise _invalid("its key id is no text")
        key = yield from self._keys.finding(kid, algorithm)
        if key is None:
            raise _invalid("the issuer has no such key for this algorithm")
        found = self._known.get(hash_of(token), lambda: self._verified(token, key, algorithm))
        assert found is not None
        if found.ends_at_s + self._leeway_s <= time.time():
            raise _invalid("it has expired")
        return found.identity

    def _verified(self, token: str, key: jwt.PyJWK, algorithm: str) -> _Verified:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise _invalid("it has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise _invalid(f"it is not good: {type(error).__name__}") from None
        subject = f"oauth:{_id_of(claims, self._connection_claim)}"
        user = None if self._user_claim is None else f"user:{_id_of(claims, self._user_claim)}"
        return _Verified(Identity(subject=subject, parent=user, first_contact=True), float(claims["exp"]))


def _invalid(why: str) -> Problem:
    problem = unauthenticated(f"This access token is not good: {why}.")
    problem.headers["WWW-Authenticate"] = 'Bearer realm="quota", error="invalid_token"'
    return problem


def _header_of(token: str) -> dict[str, Any]:
    try:
        return jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise _invalid("it is no signed JWT") from None


def _id_of(claims: dict[str, Any], claim: str) -> str:
    """A claim that becomes a part of a subject's name, as the ledger takes names: never altered, refused instead."""
    value = claims.get(claim)
    if not isinstance(value, str) or not 1 <= len(value) <= _ID_MAX:
        raise _invalid(f'its claim "{claim}" is no text of 1 to {_ID_MAX} characters')
    fits = value == value.strip() and unicodedata.is_normalized("NFC", value)
    if not fits or any(unicodedata.category(character) in ("Cc", "Cf", "Cs") for character in value):
        raise _invalid(f'its claim "{claim}" has characters that no name of a subject has')
    return value


class KeysOrTokens:
    """Authenticates with API keys and access tokens: one or the other, told apart by how they are written.

    Arguments: `keys` and `tokens`, the two authenticators.
    """

    def __init__(self, keys: Keys, tokens: Tokens) -> None:
        self._keys = keys
        self._tokens = tokens

    def __call__(self, headers: Headers, *, while_away: bool) -> Plan[Identity]:
        """Plans who asks. Errors: as `Authenticator`; both a key and a token: `Problem` 400."""
        presented = credential_of(headers)
        if presented.startswith(f"{credentials.KEY}_"):
            return (yield from self._keys.named(presented, while_away=while_away))
        return (yield from self._tokens.named(presented))
