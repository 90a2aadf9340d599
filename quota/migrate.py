"""Migrations: the schema of a database, brought to the state that this release works with.

Alembic runs frozen SQL (``migrations/``). A revision that cannot get its lock within half a second is rolled back and
tried again, so that reserves on a live database wait for milliseconds, never for a queue. One process at a time
migrates a database; whoever comes meanwhile waits, and then finds the work done.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from alembic import command, op
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from quota.config import ConfigError
from quota.errors import SchemaMismatch, Unavailable

# lock_not_available, deadlock_detected
_TRY_AGAIN = frozenset({"55P03", "40P01"})
VERSION_TABLE_SCHEMA = "public"
VERSION_TABLE = "quota_alembic_version"
_VERSION_TABLE = f"{VERSION_TABLE_SCHEMA}.{VERSION_TABLE}"
# The key of the advisory lock that whoever migrates a database holds; the same in every release. "quota" in ASCII.
_GUARD = 0x71756F7461
_GUARD_POLL_S = 0.2
# Alembic keeps the migration under way in globals of its own: one at a time in a process, whichever the database.
_alembic = threading.Lock()


def _folder() -> Path:
    """Where the revisions are: beside the package in a checkout, within it when installed."""
    package = Path(__file__).parent
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def _config(url: str | None = None, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if url is not None:
        config.attributes["url"] = _driver_url(url)
    return config


def _driver_url(url: str) -> str:
    """The same database for SQLAlchemy: a URL with the psycopg driver, whether given as URL or as a libpq string."""
    if "://" not in url:
        return sqlalchemy.URL.create("postgresql+psycopg", query={}).render_as_string() + "?" + _query_of(url)
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _query_of(dsn: str) -> str:
    from urllib.parse import urlencode

    from psycopg.conninfo import conninfo_to_dict

    return urlencode({key: str(value) for key, value in conninfo_to_dict(dsn).items()})


def install(revision: str, *names: str) -> None:
    """Runs frozen SQL files in a migration: what `upgrade()` and `downgrade()` of a revision name.

    Arguments: ``revision``, the folder below ``migrations/sql``; ``names``, its files without ``.sql``, in order.
    Result: none; online the statements run in the migration's transaction, offline they are printed.
    Errors: ``FileNotFoundError`` for a file that was never frozen; the database's own.
    """
    for name in names:
        text = (_folder() / "sql" / revision / f"{name}.sql").read_text(encoding="utf-8")
        if op.get_context().as_sql:
            op.get_context().impl.static_output(text)
        else:
            # To text() a colon starts a parameter; these files mean it as it stands.
            op.execute(sqlalchemy.text(text.replace(":", r"\:")))


def head() -> str:
    """The newest revision of this release. Errors: more than one head is a broken release."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, "a release has at least one revision"
    return revision


def revisions() -> tuple[str, ...]:
    """All revisions of this release, oldest first."""
    script = ScriptDirectory.from_config(_config())
    return tuple(r.revision for r in reversed(list(script.walk_revisions())))


@contextlib.contextmanager
def _connected(url: str, **options: Any) -> Iterator[sqlalchemy.Connection]:
    """Yields a connection of its own. Errors: ``ConfigError`` for a database that does not keep text in UTF-8."""
    engine = sqlalchemy.create_engine(
        _driver_url(url), poolclass=sqlalchemy.pool.NullPool, connect_args={"client_encoding": "utf8"}, **options
    )
    with engine.connect() as connection:
        encoding = connection.execute(sqlalchemy.text("SHOW server_encoding")).scalar()
        if encoding != "UTF8":
            raise ConfigError(
                f"the database keeps text in {encoding}, and names are UTF-8: make another one, "
                "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
            )
        yield connection


def current(url: str) -> str | None:
    """The revision a database is at; None for one that has no ledger yet.

    Arguments: ``url``, a ``postgresql://`` URL or a libpq connection string. Errors: the driver's, when it cannot be
    reached.
    """
    with _connected(url) as connection:
        if connection.execute(sqlalchemy.text(f"SELECT to_regclass('{_VERSION_TABLE}')")).scalar() is None:
            return None
        row = connection.execute(
            sqlalchemy.select(sqlalchemy.column("version_num")).select_from(
                sqlalchemy.table(VERSION_TABLE, schema=VERSION_TABLE_SCHEMA)
            )
        ).scalar()
        return None if row is None else str(row)


def _quiet(_line: str) -> None:
    """Tells nobody."""


def upgrade(
    url: str,
    revision: str = "head",
    *,
    attempts: int = 30,
    wait_s: float = 300.0,
    report: Callable[[str], None] = _quiet,
) -> None:
    """Brings a database to a revision, one process at a time.

    Arguments: ``url``, of a direct connection, not through a pooler in transaction mode; ``revision``, default the
    newest; ``attempts``, how often a revision that does not get its lock is tried, about a second apart; ``wait_s``,
    how long to wait for another migration of the same database, in seconds; ``report``, told of every retry and wait.
    Errors: ``Unavailable`` when the other migration takes longer; ``OperationalError`` when the last attempt fails too.
    """
    with _alone(url, wait_s, report):
        _patiently(lambda: command.upgrade(_config(url), revision), attempts, report)


def downgrade(
    url: str, revision: str, *, attempts: int = 30, wait_s: float = 300.0, report: Callable[[str], None] = _quiet
) -> None:
    """Takes a database back to a revision (``base``: no ledger at all). Arguments and errors as in ``upgrade``."""
    with _alone(url, wait_s, report):
        _patiently(lambda: command.downgrade(_config(url), revision), attempts, report)


@contextlib.contextmanager
def _alone(url: str, wait_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Keeps every other migration of the database out: a session lock, gone with this process however that ends.

    It is asked for again and again rather than waited for: the snapshot of a statement that waits would in turn keep
    the other migration from what has to outwait snapshots, such as building an index concurrently.
    """
    with _connected(url, isolation_level="AUTOCOMMIT") as guard:
        guard.execute(sqlalchemy.text("SET idle_session_timeout = 0"))  # idle is all that this session will be
        deadline, told = time.monotonic() + wait_s, False
        while not guard.execute(sqlalchemy.text("SELECT pg_try_advisory_lock(:key)"), {"key": _GUARD}).scalar():
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"another migration of this database has been at work for more than {wait_s:g} s; nothing was "
                    "changed. Try again when it has ended (pg_locks shows its advisory lock)"
                )
            if not told:
                report("another migration of this database is at work; waiting for it to end")
                told = True
            time.sleep(_GUARD_POLL_S)
        yield


def _patiently(migrate: Callable[[], None], attempts: int, report: Callable[[str], None]) -> None:
    for attempt in range(1, attempts + 1):
        try:
            with _alembic:
                migrate()
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _TRY_AGAIN or attempt == attempts:
                raise
            report(f"a lock was not free within 500 ms; attempt {attempt + 1} of {attempts}")
            time.sleep(random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        else:
            return


def sql(start: str | None = None, end: str = "head") -> str:
    """The statements between two revisions, for somebody else to run.

    Arguments: ``start``, the revision a database is at (None: an empty one); ``end``. Result: SQL text.
    """
    output = io.StringIO()
    with _alembic, contextlib.redirect_stdout(output):
        command.upgrade(_config(output=output), f"{start}:{end}" if start else end, sql=True)
    return output.getvalue()


def require_head(url: str) -> None:
    """Refuses a database that this release does not work with.

    Errors: ``SchemaMismatch`` with the revision found, the one needed, and what to do: an older or empty one is to be
    migrated, a newer one needs a newer release.
    """
    found, needed = current(url), head()
    if found == needed:
        return
    if found is None or found in revisions():
        remedy = "Run: quota migrate"
    else:
        remedy = "The database was migrated by a newer release: upgrade quota-ledger."
    message = f"the database is at schema revision {found or 'none'}, this release needs {needed}. {remedy}"
    raise SchemaMismatch(message, found, needed)
