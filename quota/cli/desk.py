"""Where operators' commands are carried out: in a database that this machine reaches, or over the HTTP API."""

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
    Balance,
    BalanceRow,
    Call,
    CreateKey,
    CreateSubject,
    CreateToken,
    EnsureSubject,
    RotateKey,
    SetTierLimit,
    VerifyKey,
    pages,
    views,
)
from quota.calls.views import View
from quota.cli.remote import Remote
from quota.cli.requests import request_of
from quota.cli.screen import Screen
from quota.cli.store import Session, Target, json_option, opened, target_options
from quota.errors import ParentDiffers, UnknownKey, UnknownSubject, UnknownTier, UnknownToken
from quota.http.values import path_of

__all__ = ["Desk", "with_desk", "with_plain_desk"]

P = ParamSpec("P")
Row = dict[str, Any]

_MOST = 1_000_000


@dataclass(frozen=True)
class Desk:
    """One command's use of the ledger, for what both the database and the HTTP API can do.

    Fields:
        screen: where the answer goes.
        session: the database; None: over HTTP.
        remote: the API; None: in the database.
        named_tenant: the tenant if the command line named one.
    """

    screen: Screen
    session: Session | None
    remote: Remote | None
    named_tenant: str | None

    @property
    def database(self) -> Session:
        """The database."""
        assert self.session is not None
        return self.session

    @property
    def tenant(self) -> str:
        """The tenant of the command, for what the database is told; over HTTP the request says it."""
        return self.remote.tenant or "" if self.remote is not None else self.database.tenant

    def call(self, command: Call[Any]) -> None:
        """Carries out a command that answers nothing."""
        if self.remote is not None:
            self.remote.call(*request_of(command))
        else:
            self.database.call(command)

    def _list(self, view: Callable[[], View], path: str, **query: str | None) -> list[Row]:
        if self.remote is not None:
            return list(self.remote.every(path, **query))
        return self.database.call(view())

    # -- keys -------------------------------------------------------------------------------------------------------

    def create_key(
        self, name: str, identity: str | None, parent: str | None, tier: str | None, expires_in: timedelta | None
    ) -> tuple[Row, str]:
        """Makes a key; returns it and its secret."""
        expires_at = _from_now(expires_in)
        if self.remote is not None:
            given = {"name": name, "id": identity, "parent": parent, "rate_tier": tier, "expires_at": expires_at}
            return self._made("/keys", given)
        made = credentials.Credential.new(credentials.KEY, identity)
        self.database.call(CreateKey(made.id, name, made.hash, parent, tier, expires_at, self.tenant))
        return self.key(made.id), made.secret

    def _made(self, path: str, given: Row) -> tuple[Row, str]:
        """Makes something that has a secret, over HTTP; returns it and its secret."""
        assert self.remote is not None
        row: Row = self.remote.call("POST", path, {name: value for name, value in given.items() if value is not None})
        return row, row.pop("secret")

    def keys(self, search: str | None, parent: str | None, tier: str | None) -> list[Row]:
        """Lists keys by id."""
        view = functools.partial(pages.keys, self.tenant, most=_MOST, search=search, parent=parent, tier=tier)
        return self._list(view, "/keys", search=search, parent=parent, tier=tier)

    def key(self, identity: str) -> Row:
        """Reads one key. Errors: `UnknownKey`."""
        if self.remote is not None:
            found: Row = self.remote.call("GET", path_of("keys", identity))
            return found
        rows = self.database.call(pages.key(self.tenant, identity))
        if not rows:
            raise UnknownKey(f'unknown_key: there is no key "{identity}"', "See: quota key list")
        return rows[0]

    def rotate_key(self, identity: str, overlap: timedelta) -> tuple[Row, str]:
        """Gives a key a new secret; returns the key and the secret."""
        if self.remote is not None:
            seconds = Decimal(overlap // timedelta(microseconds=1)) / 1_000_000
            return self._made(path_of("keys", identity, "rotate"), {"overlap_s": _number(seconds)})
        made = credentials.Credential.new(credentials.KEY, identity)
        self.database.call(RotateKey(identity, made.hash, overlap, self.tenant))
        return self.key(identity), made.secret

    def verify(self, secret: str) -> Row:
        """Says whose secret it is."""
        if self.remote is not None:
            row: Row = self.remote.call("POST", "/keys/verify", {"secret": secret})
            return row
        found = credentials.read(secret, credentials.KEY)
        holder = None if found is None else self.database.call(VerifyKey(found.id, found.hash))
        if holder is None:
            return {"valid": False, "state": "unknown"}
        names = ("state", "tenant", "subject", "name", "parent", "rate_tier", "frozen", "expires_at")
        return {"valid": holder.active, **{name: getattr(holder, name) for name in names}}

    # -- tokens -----------------------------------------------------------------------------------------------------

    def create_token(self, name: str, role: str, expires_in: timedelta | None) -> tuple[Row, str]:
        """Makes a token, for the tenant that the command line names, else for every one; returns it and its secret."""
        if self.remote is not None:
            every = True if self.named_tenant is None else None
            return self._made(
                "/tokens", {"name": name, "role": role, "expires_at": _from_now(expires_in), "every_tenant": every}
            )
        return make_token(self.database, name, role, expires_in)

    def tokens(self) -> list[Row]:
        """Lists a tenant's tokens and those for every tenant, by id."""
        return self._list(functools.partial(pages.tokens, self.tenant, shared=True, most=_MOST), "/tokens")

    def token(self, identity: str) -> Row:
        """Reads one token. Errors: `UnknownToken`."""
        if self.remote is not None:
            found: Row = self.remote.call("GET", path_of("tokens", identity))
            return found
        return token_of(self.database, identity)

    # -- subjects and limits ----------------------------------------------------------------------------------------

    def ensure_subject(self, name: str, parent: str | None) -> bool:
        """Makes a subject unless it is there, below that parent; returns whether it was made."""
        if self.remote is None:
            return self.database.call(EnsureSubject(name, parent, self.tenant))
        try:
            known = self.subject(name)
        except UnknownSubject:
            known = None
        if known is None:
            self.call(CreateSubject(name, parent, None, self.tenant))
            return True
        if known["retired"]:
            raise UnknownSubject(f'unknown_subject: subject "{name}" is retired', "Names are never used again.")
        if parent not in (None, known["parent"]):
            raise ParentDiffers(
                f'parent_differs: "{name}" is below {known["parent"] or "nobody"}, not "{parent}"',
                "Move it with quota subject move if that is meant.",
            )
        return False

    def subjects(self, kind: str | None, below: str | None, retired: bool) -> list[Row]:
        """Lists subjects by name."""
        view = functools.partial(views.subjects, self.tenant, kind=kind, below=below, retired=retired)
        rows = self._list(view, "/subjects", kind=kind, below=below, retired="true" if retired else None)
        return [_with_tier(row) for row in rows]

    def subject(self, name: str) -> Row:
        """Reads one subject, retired or not. Errors: `UnknownSubject`."""
        if self.remote is not None:
            found: Row = self.remote.call("GET", path_of("subjects", name))
            return found
        rows = self.database.call(views.subjects(self.tenant, name=name, retired=True))
        if not rows:
            raise UnknownSubject(
                f'unknown_subject: no subject "{name}" in tenant "{self.tenant}"', "See: quota subject list"
            )
        return _with_tier(rows[0])

    def balance(self, name: str) -> list[BalanceRow]:
        """Reads where the limits of a subject stand."""
        if self.remote is None:
            return self.database.call(Balance(name, self.tenant))
        return [BalanceRow(**row) for row in self.remote.call("GET", path_of("subjects", name, "balance"))["items"]]

    def limits(self, owner: str | None) -> list[Row]:
        """Lists limits as they were set."""
        return self._list(functools.partial(views.limits, self.tenant, owner), "/limits", owner=owner)

    # -- tiers ------------------------------------------------------------------------------------------------------

    def tiers(self) -> list[Row]:
        """Lists the tiers that the tenant sees, a row per limit."""
        if self.remote is None:
            return self.database.call(views.tiers(self.tenant))
        nothing = dict.fromkeys(("name", "unit", "kind", "capacity", "refill_per_s", "period"))
        return [
            {
                "tenant": None if tier["builtin"] else self.remote.tenant or "own",
                "tier": tier["name"],
                "retired": tier["retired"],
                **{"limit_name" if name == "name" else name: value for name, value in limit.items()},
            }
            for tier in self.remote.call("GET", "/tiers")["items"]
            for limit in tier["limits"] or [nothing]
        ]

    def set_tier_limit(self, call: SetTierLimit) -> None:
        """Sets a limit of a tier; its first one makes the tier."""
        if self.remote is None:
            self.database.call(call)
            return
        numbers = {name: getattr(call, name) for name in ("unit", "kind", "capacity", "refill_per_s", "period")}
        whose = {"builtin": call.tenant is None}
        try:
            self.remote.call("PUT", path_of("tiers", call.tier, "limits", call.name), {**numbers, **whose})
        except UnknownTier:
            first = {"name": call.tier, "limits": [{"name": call.name, **numbers}]}
            self.remote.call("POST", "/tiers", {**first, **whose})


def make_token(session: Session, name: str, role: str, expires_in: timedelta | None) -> tuple[Row, str]:
    """Makes a token for the tenant that the command named, else for every one; returns it and its secret."""
    made = credentials.Credential.new(credentials.TOKEN)
    session.call(CreateToken(made.id, name, role, made.hash, _from_now(expires_in), session.named_tenant))
    return token_of(session, made.id), made.secret


def token_of(session: Session, identity: str) -> Row:
    """Reads one token from the database. Errors: `UnknownToken`."""
    rows = session.call(pages.token(session.tenant, identity, shared=True))
    if not rows:
        raise UnknownToken(f'unknown_token: there is no token "{identity}"', "See: quota token list")
    return rows[0]


def _with_tier(row: Row) -> Row:
    """A subject as it is shown: only a key has a tier."""
    return {**row, "rate_tier": row["rate_tier"] if row["kind"] == "key" else None}


def _from_now(span: timedelta | None) -> datetime | None:
    return None if span is None else datetime.now(UTC) + span


def _number(seconds: Decimal) -> int | float:
    return int(seconds) if seconds == int(seconds) else float(seconds)


def with_plain_desk(function: Callable[Concatenate[Desk, P], None]) -> Callable[..., None]:
    """Gives a command a `Desk`: over HTTP when QUOTA_API_URL is set and no server is named, else in the database.

    An option `tenant` of the command's own says whose things are meant.
    """

    @json_option
    @target_options
    @functools.wraps(function)
    def run(
        *args: Any, database_url: str | None, data: Path | None, as_json: bool, tenant: str | None = None, **kwargs: Any
    ) -> None:
        screen = Screen(as_json)
        remote = Remote.from_env(tenant) if database_url is None and data is None else None
        if remote is not None:
            function(Desk(screen, None, remote, tenant), *args, **kwargs)
            return
        with opened(Target.of(database_url, data), screen, tenant) as session:
            function(Desk(screen, session, None, tenant), *args, **kwargs)

    return run


def with_desk(function: Callable[Concatenate[Desk, P], None]) -> Callable[..., None]:
    """`with_plain_desk`, and --tenant."""
    return click.option("--tenant", metavar="NAME", help="The tenant. [default: QUOTA_TENANT, else default]")(
        with_plain_desk(function)
    )
