"""Migrations: frozen copies, one chain, up and down, and an upgrade of a live database that nobody notices."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from quota import migrate
from quota import sql as engine
from quota.errors import Unavailable
from quota.tables import metadata
from tests.server import Connection, connect, create_database, drop_database

FOLDER = Path(__file__).parent.parent / "migrations"

# What a schema is, whoever made it: relations, columns, constraints, indexes, functions, types, triggers, grants,
# comments.
CATALOG = """
SELECT 'column', c.oid::regclass::text, a.attnum || ' ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
    || ' ' || coalesce(a.attcollation::regcollation::text, '') || ' ' || a.attnotnull || ' ' || a.attidentity::text
    || ' ' || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum =
a.attnum
WHERE c.relnamespace IN ('quota'::regnamespace, 'quota_internal'::regnamespace) AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL SELECT 'relation', c.oid::regclass::text, c.relkind::text || ' ' || coalesce(c.reloptions::text, '') || ' '
    || coalesce((SELECT string_agg(x::text, ' ' ORDER BY x::text) FROM unnest(c.relacl) x), '') || ' '
    || coalesce(obj_description(c.oid, 'pg_class'), '') || CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) ELSE
    '' END
FROM pg_class c WHERE c.relnamespace IN ('quota'::regnamespace, 'quota_internal'::regnamespace)
UNION ALL SELECT 'constraint', conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace IN ('quota'::regnamespace, 'quota_internal'::regnamespace) AND contype <> 'n'
UNION ALL SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index
WHERE split_part(indexrelid::regclass::text, '.', 1) IN ('quota', 'quota_internal')
UNION ALL SELECT 'function', p.oid::regprocedure::text, pg_get_functiondef(p.oid) || ' '
    || coalesce((SELECT string_agg(x::text, ' ' ORDER BY x::text) FROM unnest(p.proacl) x), '') || ' '
    || coalesce(obj_description(p.oid, 'pg_proc'), '')
FROM pg_proc p WHERE p.pronamespace IN ('quota'::regnamespace, 'quota_internal'::regnamespace)
UNION ALL SELECT 'trigger', tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger
WHERE NOT tgisinternal AND tgrelid::regclass::text LIKE 'quota%'
UNION ALL SELECT 'schema', nspname, coalesce((SELECT string_agg(x::text, ' ' ORDER BY x::text) FROM unnest(nspacl)
x), '')
FROM pg_namespace WHERE nspname IN ('quota', 'quota_internal')
"""


def catalog(url: str) -> set[tuple[str, str, str]]:
    """Everything in both schemas, as text."""
    with connect(url) as connection:
        return {(str(a), str(b), str(c)) for a, b, c in connection.execute(CATALOG.encode())}


@pytest.fixture
def empty(admin_dsn: str, run_id: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a database with nothing in it."""
    name = f"quota_empty_{run_id}_{abs(hash(request.node.name)) % 10**8}"
    drop_database(admin_dsn, name)
    yield create_database(admin_dsn, name)
    drop_database(admin_dsn, name)


def truth(url: str) -> None:
    """Installs what the working tree says, without any migration."""
    made = sqlalchemy.create_engine(migrate._driver_url(url), poolclass=sqlalchemy.pool.NullPool)
    with made.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE SCHEMA quota"))
        connection.execute(sqlalchemy.text("CREATE SCHEMA quota_internal"))
        metadata.create_all(connection)
        cursor = connection.connection.cursor()
        for name in engine.FILES:
            cursor.execute(engine.text(name).encode())


def test_newest_frozen_copies_are_the_truth() -> None:
    for name in engine.FILES:
        copies = sorted(FOLDER.glob(f"sql/*/{name}.sql"))
        assert copies, f"{name}.sql was never frozen"
        assert copies[-1].read_text() == engine.text(name), (
            f"{copies[-1]} is not quota/sql/{name}.sql: scripts/freeze it"
        )
    assert {file.stem for file in FOLDER.glob("sql/*/*.sql")} - {"tables"} == set(engine.FILES)


def test_one_chain_with_one_head() -> None:
    assert migrate.revisions() == tuple(sorted(migrate.revisions()))
    assert migrate.head() == migrate.revisions()[-1]


def test_a_second_head_is_noticed(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    versions.mkdir()
    for file in (FOLDER / "versions").glob("*.py"):
        (versions / file.name).write_text(file.read_text())
    newest = sorted(versions.glob("*.py"))[-1]
    (versions / "sibling.py").write_text(newest.read_text().replace(f'"{migrate.head()}"', '"sibling"'))
    (tmp_path / "env.py").write_text("")
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    with pytest.raises(CommandError, match="multiple heads"):
        ScriptDirectory.from_config(config).get_current_head()


def test_migrated_equals_truth_online_and_offline(admin_dsn: str, run_id: str, empty: str) -> None:
    names = [f"quota_{kind}_{run_id}" for kind in ("truth", "offline")]
    urls = [create_database(admin_dsn, name) for name in names]
    try:
        migrate.upgrade(empty)
        truth(urls[0])
        with connect(urls[1]) as connection:
            connection.execute(migrate.sql().encode())
        assert catalog(empty) == catalog(urls[0])
        assert catalog(empty) == catalog(urls[1])
    finally:
        for name in names:
            drop_database(admin_dsn, name)


def test_every_revision_up_down_up(empty: str) -> None:
    seen: dict[str, set[tuple[str, str, str]]] = {}
    for revision in migrate.revisions():
        migrate.upgrade(empty, revision)
        assert migrate.current(empty) == revision
        seen[revision] = catalog(empty)
    for revision in reversed(migrate.revisions()[:-1]):
        migrate.downgrade(empty, revision)
        assert migrate.current(empty) == revision
        assert catalog(empty) == seen[revision]
    migrate.downgrade(empty, "base")
    migrate.upgrade(empty)
    assert catalog(empty) == seen[migrate.head()]


def populate(connection: Connection) -> None:
    """Subjects, limits, open holds and bookings, by statements of revision 0001."""
    for statement in (
        "SELECT quota.create_subject('org:acme')",
        "SELECT quota.create_subject('key:42', 'org:acme')",
        "SELECT quota.ensure_subject('oauth:a')",
        "SELECT quota.set_limit('org:acme', 'cap', 'usd', 'budget', 50)",
        "SELECT quota.set_limit('key:*', 'calls', 'requests', 'budget', 100, period => '1 hour')",
        "SELECT quota.reserve('key:42', '{\"usd\": 5}', id => '00000000-0000-7000-8000-000000000001')",
        "SELECT quota.reserve('key:42', '{\"usd\": 7}', id => '00000000-0000-7000-8000-000000000002')",
        "SELECT quota.settle('00000000-0000-7000-8000-000000000002', '{\"usd\": 3}')",
        "SELECT quota.record('key:42', '{\"usd\": 1}')",
    ):
        connection.execute(statement.encode())


def balances(connection: Connection) -> list[tuple[object, ...]]:
    """What the limits of the first revision say."""
    return connection.execute(
        "SELECT subject, limit_name, spent, reserved, window_start FROM quota.balance('key:42')"
        " WHERE limit_name NOT IN ('bucket', 'hourly') ORDER BY 1, 2"
    ).fetchall()


def test_an_upgrade_keeps_balances_and_makes_existing_keys_basic(empty: str) -> None:
    migrate.upgrade(empty, "0001")
    with connect(empty) as connection:
        populate(connection)
        before = balances(connection)
        migrate.upgrade(empty)
        assert balances(connection) == before
        tiers = connection.execute("SELECT name, rate_tier FROM quota.subjects ORDER BY 1").fetchall()
        assert tiers == [("key:42", "basic"), ("oauth:a", "basic"), ("org:acme", "basic")]
        numbers = connection.execute("SELECT limit_name, capacity FROM quota.balance('oauth:a') ORDER BY 1").fetchall()
        assert numbers == [("bucket", Decimal(1000000)), ("hourly", Decimal(2000000))]
        # The statements of the release before still work, on the holds it left behind too.
        connection.execute("SELECT quota.create_subject('key:43', 'org:acme')")
        state = connection.execute(
            "SELECT state FROM quota.settle('00000000-0000-7000-8000-000000000001', '{\"usd\": 5}')"
        ).fetchone()
        assert state == ("settled",)
        assert connection.execute("SELECT * FROM quota.check()").fetchall() == []
        connection.execute(
            "INSERT INTO quota_internal.subjects (tenant, name, kind, lineage, created_at)"
            " VALUES ('default', 'key:raw', 'key', '{key:raw}', now())"
        )
        row = connection.execute("SELECT rate_tier FROM quota.subjects WHERE name = 'key:raw'").fetchone()
        assert row == ("basic",)


def test_reserves_go_on_while_tiers_arrive(empty: str) -> None:
    migrate.upgrade(empty, "0001")
    with connect(empty) as connection:
        populate(connection)
    stop = threading.Event()
    granted: list[int] = []
    errors: list[Exception] = []

    def worker() -> None:
        done = 0
        with connect(empty) as mine:
            while not stop.is_set():
                try:
                    row = mine.execute("SELECT granted FROM quota.reserve('key:42', '{\"usd\": 0}')").fetchone()
                    done += row == (True,)
                except Exception as error:
                    errors.append(error)
                    return
        granted.append(done)

    with connect(empty) as connection:
        connection.execute(
            "SELECT quota.set_limit('key:*', 'calls', 'requests', 'budget', 1000000, period => '1 hour')"
        )
    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    migrate.upgrade(empty)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(granted) == 4
    with connect(empty) as connection:
        assert connection.execute("SELECT * FROM quota.check()").fetchall() == []


def test_a_migration_gives_way_to_a_long_transaction_and_comes_back(empty: str) -> None:
    migrate.upgrade(empty, "0001")
    told: list[str] = []
    with connect(empty) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM quota_internal.subjects")

        def report(line: str) -> None:
            told.append(line)
            # The second attempt finds the lock free.
            reader.execute("COMMIT")

        migrate.upgrade(empty, report=report)
    assert len(told) == 1
    assert re.search("lock", told[0])
    assert migrate.current(empty) == migrate.head()


# -- one at a time ----------------------------------------------------------------------------------------------------

# A process that says when it waits for another migration; its arguments: the URL, and how long it may wait, in seconds.
MIGRATES = """
import sys
from quota import migrate
migrate.upgrade(sys.argv[1], wait_s=float(sys.argv[2]), report=lambda line: print(line, flush=True))
print("done", flush=True)
"""


def migrating(url: str, wait_s: float = 60.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MIGRATES, url, str(wait_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_second_migration_waits_and_finds_nothing_to_do(empty: str) -> None:
    """The first is stopped in the middle of its work, by a table that it needs, until the second is seen to wait."""
    migrate.upgrade(empty, "0001")
    with connect(empty) as reader:
        reader.execute("BEGIN; LOCK TABLE quota_internal.subjects IN ACCESS SHARE MODE")
        first = migrating(empty)
        assert first.stdout is not None
        assert "a lock was not free" in first.stdout.readline()
        second = migrating(empty)
        assert second.stdout is not None
        assert "another migration of this database is at work" in second.stdout.readline()
        assert migrate.current(empty) == "0001"
        reader.execute("COMMIT")
    for process in (first, second):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.splitlines()[-1:], err) == (0, ["done"], "")
    assert migrate.current(empty) == migrate.head()
    with connect(empty) as connection:
        assert connection.execute("SELECT pg_try_advisory_lock(%s)", [migrate._GUARD]).fetchone() == (True,)


def test_the_wait_for_another_migration_is_bounded(empty: str) -> None:
    with connect(empty) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [migrate._GUARD])
        for way in (migrate.upgrade, migrate.downgrade):
            with pytest.raises(Unavailable, match="at work for more than 0.1 s"):
                way(empty, "0001", wait_s=0.1)
    assert migrate.current(empty) is None


def test_threads_migrate_two_databases_at_once(empty: str, admin_dsn: str, run_id: str) -> None:
    """Alembic's context is global: what one thread runs must not reach the other's database."""
    name = f"quota_second_{run_id}"
    urls = [empty, create_database(admin_dsn, name)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(migrate.upgrade, urls))
        assert catalog(urls[0]) == catalog(urls[1])
    finally:
        drop_database(admin_dsn, name)
