"""Which server a command speaks to: the one given, else the embedded one; and only at this release's schema."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

import quota
from quota.calls import Call, views
from quota.cli.screen import Screen
from quota.client import Client
from quota.config import ConfigError, Settings, redact_url
from quota.errors import NotAllowed, SchemaMismatch, Unavailable

__all__ = [
    "Session",
    "Target",
    "json_option",
    "revision_of",
    "target_options",
    "with_server",
    "with_store",
]

A = TypeVar("A")
P = ParamSpec("P")

_AWAY = (
    "Start it, correct QUOTA_DATABASE_URL, or unset it for the embedded server; QUOTA_TIMEOUT_S sets how long to wait"
)


@dataclass(frozen=True)
class Target:
    """The server that the options and the environment name.

    Fields:
        settings: the environment, with what the options put in its place.
        url: how to connect; None until the embedded server runs.
        embedded: it is the embedded server.
    """

    settings: Settings
    url: str | None
    embedded: bool

    @property
    def shown(self) -> str:
        """Its name for people, without a password."""
        if self.embedded:
            return f"the embedded server in {self.settings.data_dir}"
        return redact_url(self.url or "")

    @classmethod
    def of(cls, database_url: str | None, data: Path | None) -> Target:
        """Reads options and environment. Errors: `ConfigError`, `click.UsageError`."""
        environ = dict(os.environ)
        if database_url is not None and data is not None:
            raise click.UsageError("--database-url and --data name two servers; give one of them")
        if database_url is not None:
            if not database_url.strip():
                raise click.UsageError("--database-url is empty; give a URL, or leave it out for the embedded server")
            environ["QUOTA_DATABASE_URL"] = database_url
        if data is not None:
            environ.pop("QUOTA_DATABASE_URL", None)
            environ["QUOTA_DATA_DIR"] = str(data.expanduser().absolute())
        try:
            settings = Settings.from_env(environ)
        except ConfigError as error:
            if database_url is None:
                raise
            raise ConfigError(str(error).replace("QUOTA_DATABASE_URL:", "--database-url:", 1)) from None
        return cls(settings, settings.database_url, settings.database_url is None)


@dataclass(frozen=True)
class Session:
    """One command's use of a ledger.

    Fields:
        target: the server, with its URL.
        client: the ledger.
        screen: where the answer goes.
        tenant: the tenant of the command.
        named_tenant: the tenant if the command line named one.
    """

    target: Target
    client: Client
    screen: Screen
    tenant: str
    named_tenant: str | None

    @property
    def url(self) -> str:
        """How to connect."""
        assert self.target.url is not None
        return self.target.url

    def call(self, call: Call[A]) -> A:
        """Carries out a call; returns its answer."""
        return self.client.call(call)


# -- opening --------------------------------------------------------------------------------------------------------


@contextmanager
def running(target: Target) -> Iterator[Target]:
    """Yields the target with its URL; the embedded server runs as long as the context lasts, or others use it."""
    if not target.embedded:
        yield target
        return
    try:
        from quota.embedded import EmbeddedServer
    except ImportError as error:  # not on this system
        raise ConfigError(str(error)) from None
    with EmbeddedServer(target.settings.data_dir) as server:
        yield Target(target.settings, server.url, embedded=True)


def client_of(target: Target, tenant: str | None = None) -> Client:
    """Returns a client for a target that runs. It never fails open: commands ask the ledger."""
    options = Client.settings_of(target.settings)
    return Client(
        **{**options, "url": target.url, "tenant": tenant or target.settings.tenant, "fail_open": False},
        application_name="quota cli",
    )


@contextmanager
def opened(target: Target, screen: Screen, tenant: str | None) -> Iterator[Session]:
    """Yields a session with a ledger at this release's schema.

    Errors: `SchemaMismatch`, `Unavailable`, `EmbeddedError`.
    """
    with running(target) as found, client_of(found, tenant) as client:
        _require_schema(found, client, screen)
        yield Session(found, client, screen, tenant or target.settings.tenant, tenant)


def revision_of(client: Client) -> str | None:
    """Returns the revision of the installed schema; None where there is none. Errors: `NotAllowed`, `Unavailable`."""
    try:
        rows = client.call(views.schema_revision(), timeout_s=client.timeout_s)
    except SchemaMismatch:  # no such table
        return None
    return str(rows[0]["version_num"]) if rows else None


def newest_revision() -> str:
    """Returns what `migrate.head()` does, read from the names of the revisions.

    Alembic's way takes longer to import than everything else that a command does.
    """
    package = Path(quota.__file__).parent
    folders = (package / "_migrations/versions", package.parent / "migrations/versions")
    return max(file.name.partition("_")[0] for folder in folders for file in folder.glob("[0-9]*_*.py"))


def _require_schema(target: Target, client: Client, screen: Screen) -> None:
    try:
        found = revision_of(client)
    except NotAllowed:
        return  # a login without the right to look; a function that is missing will say so itself
    except Unavailable as error:
        reason = str(error).removeprefix("quota.views: ").rstrip(".?")
        raise Unavailable(f"{target.shown} is away: {reason}. {_AWAY}") from error
    if found == newest_revision():
        return
    from quota import migrate

    needed = migrate.head()
    assert target.url is not None
    if target.embedded and (found is None or found in migrate.revisions()):
        screen.note(f"quota: {target.shown}: schema brought from {found or 'none'} to {needed}")
        migrate.upgrade(target.url, report=screen.note)
        return
    migrate.require_head(target.url)


# -- the options every command has ----------------------------------------------------------------------------------


def json_option(function: Callable[..., A]) -> Callable[..., A]:
    """Adds --json."""
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON; amounts are exact strings.")(function)


def target_options(function: Callable[..., A]) -> Callable[..., A]:
    """Adds --database-url and --data."""
    function = click.option(
        "--data",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Use the embedded server in this folder. [default: QUOTA_DATA_DIR, else your data folder]",
    )(function)
    return click.option(
        "--database-url",
        metavar="URL",
        help="Use this PostgreSQL; QUOTA_DATABASE_URL keeps a password out of the process list.",
    )(function)


def with_server(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Gives a command a `Session` as its first argument, and the options that it takes: the server's, and --json.

    An option `tenant` of the command's own goes into the session.
    """

    @json_option
    @target_options
    @functools.wraps(function)
    def run(
        *args: Any, database_url: str | None, data: Path | None, as_json: bool, tenant: str | None = None, **kwargs: Any
    ) -> None:
        with opened(Target.of(database_url, data), Screen(as_json), tenant) as session:
            function(session, *args, **kwargs)

    return run


def with_store(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """`with_server`, and --tenant."""
    return click.option("--tenant", metavar="NAME", help="The tenant. [default: QUOTA_TENANT, else default]")(
        with_server(function)
    )
