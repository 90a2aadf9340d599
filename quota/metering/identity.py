"""Whose request is it? One credential and what it stands for; several are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quota import credentials
from quota.authentication import CACHE_S
from quota.authentication import Authenticator as KeyMemory
from quota.client.attempts import Plan
from quota.client.core import Core
from quota.http.problems import Problem

__all__ = ["Authenticator", "Headers", "Identity", "Keys", "credential_of", "unauthenticated"]

Headers = Mapping[str, Sequence[str]]
"""Values by lower-case name, each as often as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who spends.

    Fields:
        subject: `key:42`, `oauth:connection-a`: the kind keeps those apart that are counted apart.
        tenant: whose subject it is; None: the client's.
        parent: of a subject that the ledger meets for the first time.
        first_contact: whether a subject that the ledger does not know is made: it was authenticated elsewhere.
    """

    subject: str
    tenant: str | None = None
    parent: str | None = None
    first_contact: bool = False


class Authenticator(Protocol):
    """Finds out who asks.

    Called with the request's headers; `while_away`: the route is let through while the ledger is away, and so may be
    whoever is known from before. Answers an `Identity`, or a plan of one where the ledger has to be asked.
    Errors: `Problem`, most often `unauthenticated(…)`; `Unavailable`.
    """

    def __call__(self, headers: Headers, *, while_away: bool) -> Identity | Plan[Identity]:
        """Returns who asks."""


def unauthenticated(detail: str) -> Problem:
    """Returns the answer to who is not let in. `detail`: why, and what to do; never a secret."""
    return Problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": 'Bearer realm="quota"'})


def credential_of(headers: Headers) -> str:
    """Returns the one credential of a request, from `Authorization: Bearer …` or `X-API-Key: …`.

    Errors: `Problem` 401 when there is none; 400 when there are several, the same twice included: which of them counts
    would be anybody's guess.
    """
    bearer, key = headers.get("authorization", ()), headers.get("x-api-key", ())
    if len(bearer) + len(key) > 1:
        detail = "Send one credential: an Authorization header or an X-API-Key header, once."
        raise Problem(400, "ambiguous_credentials", detail)
    if key:
        return key[0].strip()
    if not bearer:
        raise unauthenticated("This needs a key: Authorization: Bearer qk_..., or X-API-Key: qk_...")
    scheme, _, text = bearer[0].strip().partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise unauthenticated("The Authorization header has another scheme than Bearer.")
    return text.strip()


class Keys:
    """Authenticates API keys.

    Arguments:
        client: the ledger.
        cache_s: how long an answer is remembered, in seconds; see `quota.authentication`.
    """

    def __init__(self, client: Core, cache_s: float = CACHE_S) -> None:
        self._memory = KeyMemory(client, cache_s)

    def __call__(self, headers: Headers, *, while_away: bool) -> Plan[Identity]:
        """Plans who asks. Errors: as `Authenticator`."""
        return (yield from self.named(credential_of(headers), while_away=while_away))

    def named(self, secret: str, *, while_away: bool = False) -> Plan[Identity]:
        """Plans whose secret it is. Errors: `Problem` 401, the same for every wrong one; `Unavailable`."""
        key = credentials.read(secret, credentials.KEY)
        if key is None:
            raise unauthenticated("This is no key.")
        holder = yield from self._memory.verifying(key, while_away=while_away)
        if holder is None:
            raise unauthenticated("This key is not good.")
        if not holder.active:
            raise unauthenticated(f"This key is {holder.state}.")
        return Identity(subject=holder.subject, tenant=holder.tenant)
