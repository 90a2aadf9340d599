"""Which schema a command meets, and what it does about it; the embedded server, up and down."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql

from quota import migrate
from quota.cli.store import newest_revision
from quota.embedded import status, stop_server
from tests.cli.conftest import QUOTA, Ended, Quota, environment, run_quota
from tests.server import connect, create_database, drop_database, with_database

VERSION = f"{migrate.VERSION_TABLE_SCHEMA}.{migrate.VERSION_TABLE}"


@pytest.fixture
def empty(admin_dsn: str, run_id: str) -> Iterator[str]:
    """URL of a database without a ledger."""
    name = f"quota_test_{run_id}_{secrets.token_hex(4)}"
    yield create_database(admin_dsn, name)
    drop_database(admin_dsn, name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for an embedded server, which is stopped at the end."""
    path = Path(tempfile.mkdtemp(prefix="qc-"))
    yield path
    stop_server(path, force=True)
    shutil.rmtree(path)


def test_the_quick_way_to_head_is_the_true_one() -> None:
    assert newest_revision() == migrate.head()


def test_a_command_on_a_schema_that_is_right_imports_no_migrations(database: str) -> None:
    """Alembic and SQLAlchemy take as long to import as everything else that a command does."""
    code = "import sys; from quota.cli import main; print(main(['check']), {'alembic', 'sqlalchemy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(database), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_from_empty_to_head_and_back(empty: str) -> None:
    refused = run_quota("check", url=empty)
    assert refused.code == 4
    assert f"schema revision none, this release needs {migrate.head()}. Run: quota migrate" in refused.complaint

    shown = run_quota("migrate", "--show", "--json", url=empty)
    assert shown.document == {"current": None, "head": migrate.head(), "at_head": False}

    done = run_quota("migrate", url=empty)
    assert done.code == 0
    assert f"at none, head is {migrate.head()}" in done.out
    assert done.out.endswith(f"now at {migrate.head()}\n")
    assert run_quota("check", url=empty).code == 0
    # Again: nothing to do, and it says where it is.
    assert run_quota("migrate", "--json", url=empty).document["at_head"] is True


def test_an_older_schema_is_refused_and_migrated(database: str, quota: Quota) -> None:
    with_down = quota("migrate", "0001", "--down")
    assert (with_down.code, with_down.out.endswith("now at 0001\n")) == (0, True)
    refused = quota("balance", "key:42", "--json")
    assert refused.code == 4
    assert refused.document["error"]["name"] == "schema_mismatch"
    assert "Run: quota migrate" in refused.complaint
    assert "the ledger would be lost with all data" in quota("migrate", "base").complaint
    assert quota("migrate", "head", "--down").code == 2
    assert quota("migrate").code == 0
    assert "data would be lost" in quota("migrate", "0001").complaint
    assert quota("check").code == 0


def test_a_newer_schema_is_refused_by_everything(database: str, quota: Quota) -> None:
    with connect(database) as connection:
        connection.execute(f"UPDATE {VERSION} SET version_num = '9999'".encode())
    for command in (("check",), ("migrate",), ("migrate", "--show"), ("reap", "--every", "1s")):
        refused = quota(*command)
        assert refused.code == 4
        assert "9999" in refused.complaint
        assert "upgrade quota-ledger" in refused.complaint


def test_a_database_that_is_not_in_utf_8_is_refused_with_a_remedy(admin_dsn: str, run_id: str, quota: Quota) -> None:
    """As a server makes them where the locale is C and nobody has said otherwise."""
    name = f"quota_test_{run_id}_{secrets.token_hex(4)}"
    with connect(admin_dsn) as connection:
        order = "CREATE DATABASE {} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C'"
        connection.execute(sql.SQL(order).format(sql.Identifier(name)))
    try:
        refused = quota("migrate", QUOTA_DATABASE_URL=with_database(admin_dsn, name))
        assert refused.code == 2
        assert "SQL_ASCII" in refused.complaint
        assert "ENCODING 'UTF8'" in refused.complaint
    finally:
        drop_database(admin_dsn, name)


def test_offline_sql_needs_no_server(quota: Quota) -> None:
    away = "postgresql://nobody@127.0.0.1:9/none"
    assert quota("migrate", "--sql", QUOTA_DATABASE_URL=away).out == migrate.sql()
    part = quota("migrate", "--sql", "--from", "0001", QUOTA_DATABASE_URL=away)
    assert part.out == migrate.sql("0001")
    assert quota("migrate", "--from", "0001").code == 2


# -- the embedded server --------------------------------------------------------------------------------------------


def at(folder: Path, *arguments: str) -> Ended:
    return run_quota(*arguments, "--data", str(folder), url=None)


def test_the_embedded_server_comes_and_goes_with_commands(folder: Path) -> None:
    # Two first commands at once: one server, one migration, two answers.
    both = [
        subprocess.Popen(
            [QUOTA, "check", "--json", "--data", str(folder)],
            env=environment(None), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    ended = [(*process.communicate(timeout=120), process.returncode) for process in both]
    assert [code for *_, code in ended] == [0, 0], ended
    assert [out for out, *_ in ended] == ['{"ok": true, "violations": []}\n'] * 2
    assert f"schema brought from none to {migrate.head()}" in ended[0][1] + ended[1][1]
    assert not status(folder).running


def test_up_down_and_an_embedded_schema_that_is_older_or_newer(folder: Path) -> None:
    up = at(folder, "up", "--detach", "--json", "--port", "0")
    assert up.code == 0
    found = up.document
    assert (found["data"], found["revision"]) == (str(folder), migrate.head())
    assert "@127.0.0.1:" in found["tcp_url"]
    password = (folder / "password").read_text().strip()
    assert password not in up.out + up.err
    assert at(folder, "up", "--detach").out.splitlines()[1] == f"  url:   {found['url']}"
    assert status(folder).detached

    migrate.downgrade(found["url"], "0001")
    older = at(folder, "check")
    assert (older.code, "schema brought from 0001 to" in older.err) == (0, True)
    with connect(found["url"]) as connection:
        connection.execute(f"UPDATE {VERSION} SET version_num = '9999'".encode())
    newer = at(folder, "check")
    assert (newer.code, "upgrade quota-ledger" in newer.complaint) == (4, True)
    assert at(folder, "up", "--detach").code == 4

    assert at(folder, "down", "--json").document == {"data": str(folder), "was_running": True, "stopped": True}
    assert at(folder, "down").out == f"no server runs in {folder}\n"


def test_up_leaves_other_servers_alone(quota: Quota) -> None:
    for command in ("up", "down"):
        refused = quota(command)
        assert refused.code == 2
        assert refused.complaint.startswith("quota: QUOTA_DATABASE_URL: ")
        assert "not quota's to start or stop" in refused.complaint
