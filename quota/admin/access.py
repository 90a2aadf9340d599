"""Who may do what: tokens, their roles and tenants, and the brake on guessing.

Every route declares its access; one that does not is closed to everybody, and a test finds it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from quota import credentials
from quota.authentication import CACHE_S, Remembered
from quota.calls import EnsureSubject, Reserve, Settle, TokenHolder, VerifyToken, pages
from quota.client import Client
from quota.errors import UnknownSubject, UnknownTenant
from quota.http.problems import Problem

__all__ = ["CLOSE", "NOBODY", "OPERATE", "OWN", "PUBLIC", "READ", "VERIFY", "WORK", "Access", "Guard", "Principal"]

F = TypeVar("F", bound=Callable[..., object])

# Failed logins are counted by the ledger itself, in a tenant of their own.
THROTTLE_TENANT = "quota-api"
_SLOTS = 1 << 14
_BLOCKED_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Access:
    """Which roles may call a route. `public`: everybody, without a token."""

    roles: frozenset[str]
    public: bool = False


READ = Access(frozenset({"viewer", "operator", "owner"}))
OPERATE = Access(frozenset({"operator", "owner"}))
OWN = Access(frozenset({"owner"}))
WORK = Access(frozenset({"worker"}))
CLOSE = Access(frozenset({"worker", "operator", "owner"}))
VERIFY = Access(frozenset({"worker", "operator", "owner"}))
PUBLIC = Access(frozenset(), public=True)
NOBODY = Access(frozenset())


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls.

    Fields:
        token: the public id of the token.
        role: worker, viewer, operator or owner.
        scope: the tenant that it is confined to; None: every one.
        tenant: the tenant of this request.
    """

    token: str
    role: str
    scope: str | None
    tenant: str

    @property
    def actor(self) -> str:
        """How the log names it."""
        return f"token:{self.token}"

    def require_every_tenant(self, what: str) -> None:
        """Refuses a token that is confined to one tenant. Errors: `Problem` 403."""
        if self.scope is not None:
            raise Problem(403, "wrong_scope", f"{what} concerns every tenant; this token is for one of them.")


class _Blocked:
    """Addresses that have to wait, as this process has seen it: they cost the database nothing meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def wait_s(self, slot: str) -> float:
        until = self._until.get(slot)
        return 0.0 if until is None else until - time.monotonic()

    def block(self, slot: str, seconds: float) -> None:
        with self._lock:
            if len(self._until) >= _BLOCKED_MOST:
                now = time.monotonic()
                self._until = {one: until for one, until in self._until.items() if until > now}
            self._until[slot] = time.monotonic() + seconds


class Guard:
    """Finds out who calls.

    Arguments:
        client: the ledger.
        cache_s: how long a token that was good is believed, in seconds: within that time a revocation is effective.
    """

    def __init__(self, client: Client, cache_s: float = CACHE_S) -> None:
        self._client = client
        self._known: Remembered[Principal] = Remembered(cache_s)
        self._blocked = _Blocked()

    def principal(self, authorization: str | None, tenant: str | None, address: str) -> Principal:
        """Returns who calls.

        Arguments:
            authorization: the header.
            tenant: the tenant that the request names; None: that of the token, else `default`.
            address: where it comes from.

        Errors: `Problem` 401 for every token that is not good, the same for each; 429 after many; 404 for a tenant
        that this token does not see.
        """
        if authorization is None:
            raise _unauthenticated("This needs a token: Authorization: Bearer qt_...")

        def ask() -> Principal | None:
            self._must_not_wait(_slot(address))
            scheme, _, text = authorization.partition(" ")
            found = credentials.read(text.strip(), credentials.TOKEN) if scheme.lower() == "bearer" else None
            # What cannot be a token takes the same way as one that is wrong.
            token = found or credentials.Credential(credentials.TOKEN, "none", "")
            holder = self._client.call(VerifyToken(token.id, token.hash))
            if holder is None:
                return None
            return Principal(token.id, holder.role, holder.tenant, self._tenant(holder, tenant))

        who = self._known.get((credentials.hash_of(authorization), tenant), ask)
        if who is None:
            self._count_failure(_slot(address))
            raise _unauthenticated("This token is not good.")
        return who

    def _tenant(self, holder: TokenHolder, named: str | None) -> str:
        if holder.tenant is not None:
            if named not in (None, holder.tenant):
                raise _no_tenant()
            return holder.tenant
        tenant = "default" if named is None else named
        if "\0" in tenant or len(tenant) > 200:
            raise _no_tenant()
        if not self._client.call(pages.tenant(tenant)):
            raise _no_tenant()
        return tenant

    def _must_not_wait(self, slot: str) -> None:
        wait_s = self._blocked.wait_s(slot)
        if wait_s > 0:
            raise _too_many(wait_s)

    def _count_failure(self, slot: str) -> None:
        subject = f"address:{slot}"
        try:
            answer = self._client.call(_attempt(subject))
        except UnknownSubject:
            self._client.call(EnsureSubject(subject, tenant=THROTTLE_TENANT))
            answer = self._client.call(_attempt(subject))
        if answer.refused:
            wait_s = float(answer.retry_after_s or 1)
            self._blocked.block(slot, wait_s)
            raise _too_many(wait_s)
        if answer.reservation is not None:
            self._client.call(Settle(answer.reservation, tenant=THROTTLE_TENANT))


def _attempt(subject: str) -> Reserve:
    return Reserve(subject, {"requests": 1}, tenant=THROTTLE_TENANT)


def _slot(address: str) -> str:
    """The bucket of an address: one of a bounded number, so that nobody fills the ledger with addresses.

    An IPv6 network of 64 bits is one address: who has one of them has them all.
    """
    try:
        found = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address):
            found = found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False).network_address
        address = str(found)
    except ValueError:
        pass  # a Unix socket: all of its users are one
    digest = hashlib.sha256(address.encode("utf-8", "replace")).digest()
    return str(int.from_bytes(digest[:4], "big") % _SLOTS)


def _unauthenticated(detail: str) -> Problem:
    return Problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": 'Bearer realm="quota"'})


def _no_tenant() -> Problem:
    return Problem(404, UnknownTenant.name, "There is no such tenant for this token.")


def _too_many(wait_s: float) -> Problem:
    seconds = max(1, math.ceil(wait_s))
    detail = "Too many tokens from this address were not good; wait."
    return Problem(
        429, "too_many_failures", detail, members={"retry_after": seconds}, headers={"Retry-After": str(seconds)}
    )
