"""Which PostgreSQL the tests run on, and databases on it.

`QUOTA_TEST_DSN` if set; else a container where a Docker engine answers and the image is there or pulls in time; else
the embedded server, in a folder of its own that is removed at the end. One per run, shared by all xdist workers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

IMAGE = os.environ.get("QUOTA_TEST_IMAGE", "postgres:17")
PULL_TIMEOUT_S = 30
# Tests hold many connections: fleets of processes beside each other.
SETTINGS = {"max_connections": "300"}
_STALE_S = 3600

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class TestServer:
    """A server for the run: its maintenance database's URL, what to say about it, and how to get rid of it."""

    __test__ = False  # not a test class, whatever its name

    dsn: str
    origin: str
    stop: Callable[[], None]

    def describe(self) -> str:
        """Returns the line for the header of the run."""
        with connect(self.dsn) as connection:
            row = connection.execute("SELECT current_setting('server_version')").fetchone()
        assert row is not None
        return f"PostgreSQL {row[0]} ({self.origin})"


def connect(dsn: str, **options: Any) -> Connection:
    """Connects in autocommit mode, unless `options` say otherwise; the caller closes it."""
    return psycopg.connect(dsn, **{"autocommit": True, "connect_timeout": 10, **options})


def with_database(dsn: str, name: str) -> str:
    """Returns the URL of another database on the same server; `dsn` may be a URL or a libpq connection string."""
    parts = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    parts.pop("dbname", None)
    user, password = parts.pop("user", ""), parts.pop("password", "")
    login = quote(user, safe="") + (":" + quote(password, safe="") if password else "")
    query = urlencode(parts, quote_via=quote, safe="/")
    return f"postgresql://{login + '@' if login else ''}/{quote(name, safe='')}{'?' + query if query else ''}"


def create_database(dsn: str, name: str, template: str = "template0") -> str:
    """Creates a database as a copy of `template`; returns its URL."""
    with connect(dsn) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    return with_database(dsn, name)


def drop_database(dsn: str, name: str) -> None:
    """Drops a database, under whatever connections a failed test left to it."""
    with connect(dsn) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def resolve() -> TestServer:
    """Finds or starts the server of the run."""
    dsn = os.environ.get("QUOTA_TEST_DSN", "").strip()
    if dsn:
        return TestServer(
            with_database(dsn, str(conninfo_to_dict(dsn).get("dbname") or "postgres")), "QUOTA_TEST_DSN", _nop
        )
    return _container() or _embedded()


def _nop() -> None:
    pass


def _embedded() -> TestServer:
    from quota import embedded

    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix="quota-test-"))
    try:
        server = embedded.start(folder, durable=False, settings=SETTINGS)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise

    def stop() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    return TestServer(with_database(server.url, "postgres"), "embedded", stop)


def _remove_stale() -> None:
    """Removes what runs that were killed left behind: their servers ended with them, their folders could not."""
    from quota import embedded

    for folder in Path(tempfile.gettempdir()).glob("quota-test-*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_S and not embedded.status(folder).running:
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, embedded.EmbeddedError):
            continue  # another user's


def _container() -> TestServer | None:
    """Starts a container; None where no engine answers, or the image is neither there nor pulled in time."""
    if not _image_ready():
        return None
    # The reaper container is a second image, which may not be there; the run stops its own container.
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    from testcontainers.community.postgres import PostgresContainer

    options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    container = PostgresContainer(IMAGE, username="quota", password="quota", dbname="quota", driver=None)
    container.with_command(f"postgres -c fsync=off -c synchronous_commit=off -c full_page_writes=off {options}")
    try:
        container.start()
    except Exception as error:  # an engine that answers pings may still be unable to run or to reach a container
        with contextlib.suppress(Exception):
            container.stop()
        print(f"no container of {IMAGE}, the embedded server instead: {error}", file=sys.stderr)
        return None

    def stop() -> None:
        container.stop()

    return TestServer(with_database(container.get_connection_url(), "postgres"), f"container {IMAGE}", stop)


def _docker() -> Any:
    """Returns a client of the Docker engine, or None where none answers."""
    import docker

    with warnings.catch_warnings():
        # A client that finds no engine leaves its socket to the collector, which complains to whoever comes next.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return docker.from_env(timeout=5)
        except docker.errors.DockerException:
            pass
        gc.collect()
    return None


def _image_ready() -> bool:
    import docker

    client = _docker()
    if client is None:
        return False
    try:
        client.ping()
        try:
            client.images.get(IMAGE)
        except docker.errors.ImageNotFound:
            return _pulled()
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()
    return True


def _pulled() -> bool:
    """Pulls the image, for at most PULL_TIMEOUT_S; a pull that takes longer goes on in vain until the run ends."""
    import docker

    done = threading.Event()

    def pull() -> None:
        client = docker.from_env(timeout=PULL_TIMEOUT_S)
        try:
            client.images.pull(IMAGE)
            done.set()
        except (docker.errors.DockerException, OSError):
            pass
        finally:
            client.close()

    puller = threading.Thread(target=pull, daemon=True)
    puller.start()
    puller.join(PULL_TIMEOUT_S)
    return done.is_set()
