"""Keys and tiers, wherever they are: in a database that this machine reaches, or behind the HTTP API."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click

from quota import credentials
from quota.calls import (
    CreateKey,
    RenameKey,
    RetireTier,
    RevokeKey,
    RotateKey,
    SetKeyExpiry,
    SetRateTier,
    SetTierLimit,
    VerifyKey,
    pages,
    views,
)
from quota.cli.remote import Remote, place
from quota.cli.screen import Screen
from quota.cli.store import Session, Target, json_option, opened, target_options
from quota.errors import InvalidArgument, UnknownKey

__all__ = ["Desk", "with_desk"]

P = ParamSpec("P")
Row = dict[str, Any]

_MOST = 1_000_000


@dataclass(frozen=True)
class Desk:
    """One command's use of keys and tiers.

    Fields:
        screen: where the answer goes.
        session: the database; None: over HTTP.
        remote: the API; None: in the database.
    """

    screen: Screen
    session: Session | None
    remote: Remote | None

    def _database(self) -> Session:
        assert self.session is not None
        return self.session

    # -- keys -------------------------------------------------------------------------------------------------------

    def create_key(
        self, name: str, identity: str | None, parent: str | None, tier: str | None, expires_in: timedelta | None
    ) -> tuple[Row, str]:
        """Makes a key; returns it and its secret."""
        expires_at = None if expires_in is None else datetime.now(UTC) + expires_in
        if self.remote is not None:
            given = {"name": name, "id": identity, "parent": parent, "rate_tier": tier, "expires_at": expires_at}
            row: Row = self.remote.call(
                "POST", "/keys", {member: value for member, value in given.items() if value is not None}
            )
            return row, row.pop("secret")
        session = self._database()
        made = credentials.Credential.new(credentials.KEY, identity)
        session.call(CreateKey(made.id, name, made.hash, parent, tier, expires_at, session.tenant))
        return self.key(made.id), made.secret

    def keys(self, search: str | None, parent: str | None, tier: str | None) -> list[Row]:
        """Lists keys by id."""
        if self.remote is not None:
            return list(self.remote.every("/keys", search=search, parent=parent, tier=tier))
        session = self._database()
        call = pages.keys(session.tenant, most=_MOST, search=search, parent=parent, tier=tier)
        return session.call(call)

    def key(self, identity: str) -> Row:
        """Reads one key. Errors: `UnknownKey`."""
        if self.remote is not None:
            found: Row = self.remote.call("GET", place("keys", identity))
            return found
        session = self._database()
        rows = session.call(pages.key(session.tenant, identity))
        if not rows:
            raise UnknownKey(f'unknown_key: there is no key "{identity}"', "See: quota key list")
        return rows[0]

    def rename_key(self, identity: str, name: str) -> Row:
        """Gives a key another name."""
        if self.remote is not None:
            return self._patch(identity, {"name": name})
        session = self._database()
        session.call(RenameKey(identity, name, session.tenant))
        return self.key(identity)

    def expire_key(self, identity: str, expires_in: timedelta | None) -> Row:
        """Sets when a key stops letting in; None: never."""
        expires_at = None if expires_in is None else datetime.now(UTC) + expires_in
        if self.remote is not None:
            return self._patch(identity, {"expires_at": expires_at})
        session = self._database()
        session.call(SetKeyExpiry(identity, expires_at, session.tenant))
        return self.key(identity)

    def _patch(self, identity: str, change: Row) -> Row:
        assert self.remote is not None
        row: Row = self.remote.call("PATCH", place("keys", identity), change)
        return row

    def rotate_key(self, identity: str, overlap: timedelta) -> tuple[Row, str]:
        """Gives a key a new secret; returns the key and the secret."""
        if self.remote is not None:
            seconds = Decimal(overlap // timedelta(microseconds=1)) / 1_000_000
            row: Row = self.remote.call("POST", place("keys", identity, "rotate"), {"overlap_s": _number(seconds)})
            return row, row.pop("secret")
        session = self._database()
        made = credentials.Credential.new(credentials.KEY, identity)
        session.call(RotateKey(identity, made.hash, overlap, session.tenant))
        return self.key(identity), made.secret

    def revoke_key(self, identity: str, reason: str) -> Row:
        """Ends a key for ever."""
        if self.remote is not None:
            row: Row = self.remote.call("POST", place("keys", identity, "revoke"), {"reason": reason})
            return row
        session = self._database()
        session.call(RevokeKey(identity, reason, session.tenant))
        return self.key(identity)

    def verify(self, secret: str) -> Row:
        """Says whose secret it is."""
        if self.remote is not None:
            row: Row = self.remote.call("POST", "/keys/verify", {"secret": secret})
            return row
        found = credentials.read(secret, credentials.KEY)
        holder = None if found is None else self._database().call(VerifyKey(found.id, found.hash))
        if holder is None:
            return {"valid": False, "state": "unknown"}
        names = ("state", "tenant", "subject", "name", "parent", "rate_tier", "frozen", "expires_at")
        return {"valid": holder.active, **{name: getattr(holder, name) for name in names}}

    # -- tiers ------------------------------------------------------------------------------------------------------

    def tiers(self) -> list[Row]:
        """Lists the tiers that the tenant sees, a row per limit."""
        if self.remote is None:
            session = self._database()
            return session.call(views.tiers(session.tenant))
        return [
            {
                "tenant": None if tier["builtin"] else self.remote.tenant or "own",
                "tier": tier["name"],
                "retired": tier["retired"],
                **{name: limit[name] for name in ("unit", "kind", "period")},
                "limit_name": limit["name"],
                "capacity": _decimal(limit["capacity"]),
                "refill_per_s": _decimal(limit["refill_per_s"]),
            }
            for tier in self.remote.call("GET", "/tiers")["items"]
            for limit in tier["limits"]
            or [dict.fromkeys(("name", "unit", "kind", "period", "capacity", "refill_per_s"))]
        ]

    def set_tier(self, subject: str, tier: str) -> None:
        """Moves a key to a tier."""
        if self.remote is None:
            session = self._database()
            session.call(SetRateTier(subject, tier, session.tenant))
            return
        kind, _, identity = subject.partition(":")
        if kind != "key":
            raise InvalidArgument(f'invalid_argument: "{subject}" has no tier of its own', "Only keys have one")
        self.remote.call("POST", "/keys/set-tier", {"ids": [identity], "rate_tier": tier})

    def set_tier_limit(self, call: SetTierLimit) -> None:
        """Sets a limit of a tier; its first one makes the tier."""
        if self.remote is None:
            self._database().call(call)
            return
        numbers = {name: getattr(call, name) for name in ("unit", "kind", "capacity", "refill_per_s", "period")}
        builtin = call.tenant is None
        known = any(row["tier"] == call.tier and (row["tenant"] is None) == builtin for row in self.tiers())
        if known:
            path = place("tiers", call.tier, "limits", call.name)
            self.remote.call("PUT", path, {**numbers, "builtin": builtin})
        else:
            draft = {"name": call.tier, "builtin": builtin, "limits": [{"name": call.name, **numbers}]}
            self.remote.call("POST", "/tiers", draft)

    def retire_tier(self, tier: str, builtin: bool) -> None:
        """Ends a tier."""
        if self.remote is not None:
            self.remote.call("POST", place("tiers", tier, "retire"), {"builtin": builtin})
            return
        session = self._database()
        session.call(RetireTier(tier, None if builtin else session.tenant))

    @property
    def tenant(self) -> str:
        """The tenant of the command, for what the database is told."""
        return self.session.tenant if self.session is not None else self.remote.tenant or "" if self.remote else ""


def _decimal(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


def _number(seconds: Decimal) -> int | float:
    return int(seconds) if seconds == int(seconds) else float(seconds)


def with_desk(function: Callable[Concatenate[Desk, P], None]) -> Callable[..., None]:
    """Gives a command a `Desk`: over HTTP when QUOTA_API_URL is set and no server is named, else in the database."""

    @click.option("--tenant", metavar="NAME", help="The tenant. [default: QUOTA_TENANT, else default]")
    @json_option
    @target_options
    @functools.wraps(function)
    def run(
        *args: Any, database_url: str | None, data: Path | None, as_json: bool, tenant: str | None, **kwargs: Any
    ) -> None:
        screen = Screen(as_json)
        remote = Remote.from_env(tenant) if database_url is None and data is None else None
        if remote is not None:
            function(Desk(screen, None, remote), *args, **kwargs)
            return
        with opened(Target.of(database_url, data), screen, tenant) as session:
            function(Desk(screen, session, None), *args, **kwargs)

    return run
