"""Fixtures: a server for the run, a template migrated once, and databases cloned from it.

| fixture | scope | what |
|---|---|---|
| `admin_dsn` | session | URL of the server's maintenance database |
| `template` | session | name of the migrated database, clock replaced by the test clock, one per run |
| `database` | test | URL of a fresh clone, dropped afterwards: where commit or concurrency is the point |
| `conn` | test | autocommit connection to `database` |
| `tx_conn` | test | connection in a transaction that is rolled back: the default |
| `fleet_s` | session | how long fleets run, in seconds |
| `soaked` | session | how often something is tried: `soaked(15, 500)` is 15, with --soak 500 |

`database` and `tx_conn` end with `quota.check()`: a row is a failure, unless the test is marked `unbalanced`.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.server import Connection, TestServer, connect, create_database, drop_database, resolve, with_database

_CLOCK = Path(__file__).with_name("clock.sql")
_SERVER = pytest.StashKey[TestServer]()
_RUN = pytest.StashKey[str]()
# Any number will do, as long as nothing else takes it on the maintenance database.
_TEMPLATE_LOCK = 5_170_001


# -- the run --------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help="run the soak tests, fleets for minutes, and cases as often as was reported"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the server in the process that leads the run; xdist's workers are told about it."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    try:
        config.stash[_SERVER] = resolve()
    except Exception as error:
        # Never skipped for want of a server: a run without one is a failed run.
        pytest.exit(f"no PostgreSQL for the tests: {error}", returncode=4)
    config.stash[_RUN] = secrets.token_hex(4)


def pytest_report_header(config: pytest.Config) -> str | None:
    server = config.stash.get(_SERVER, None)
    return None if server is None else server.describe()


class _TellWorkers:
    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """xdist's hook: what goes into `workerinput` arrives in the worker."""
        node.workerinput["quota_dsn"] = node.config.stash[_SERVER].dsn
        node.workerinput["quota_run"] = node.config.stash[_RUN]


def pytest_configure(config: pytest.Config) -> None:
    # Whoever starts the run in the background has SIGINT ignored, here and in every child: tests send some.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(_TellWorkers(), "quota-tell-workers")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Last of all, after xdist's workers have gone."""
    server = config.stash.get(_SERVER, None)
    if server is None:
        return
    del config.stash[_SERVER]
    try:
        drop_database(server.dsn, _template_name(config.stash[_RUN]))
    finally:
        server.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        skip = pytest.mark.skip(reason="runs for minutes: scripts/test --soak")
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def fleet_s(pytestconfig: pytest.Config) -> float:
    """How long a fleet of processes runs: 15 s, or three minutes with --soak."""
    return 180.0 if pytestconfig.getoption("--soak") else 15.0


@pytest.fixture(scope="session")
def soaked(pytestconfig: pytest.Config) -> Callable[[int, int], int]:
    """How often something is tried: the first number, or with --soak the second."""
    soak = bool(pytestconfig.getoption("--soak"))
    return lambda usual, full: full if soak else usual


# -- databases ------------------------------------------------------------------------------------------------------


def _template_name(run: str) -> str:
    return f"quota_template_{run}"


@pytest.fixture(scope="session")
def admin_dsn(pytestconfig: pytest.Config) -> str:
    """URL of the server's maintenance database."""
    if hasattr(pytestconfig, "workerinput"):
        return str(pytestconfig.workerinput["quota_dsn"])
    return pytestconfig.stash[_SERVER].dsn


@pytest.fixture(scope="session")
def run_id(pytestconfig: pytest.Config) -> str:
    """Distinguishes the databases of this run from those of others on the same server."""
    if hasattr(pytestconfig, "workerinput"):
        return str(pytestconfig.workerinput["quota_run"])
    return pytestconfig.stash[_RUN]


@pytest.fixture(scope="session")
def template(admin_dsn: str, run_id: str) -> str:
    """Name of the database that was migrated to head and has the test clock: made by the first who asks."""
    name = _template_name(run_id)
    with connect(admin_dsn) as admin:
        admin.execute("SELECT pg_advisory_lock(%s)", (_TEMPLATE_LOCK,))  # ends with the connection
        done = "SELECT 1 FROM pg_database WHERE datname = %s AND NOT datallowconn"
        if admin.execute(done, (name,)).fetchone() is None:
            drop_database(admin_dsn, name)  # half made, by a worker that was killed
            _make_template(create_database(admin_dsn, name))
            # A connection to the template would stand in the way of cloning it; it also marks it as whole.
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
    return name


def _make_template(url: str) -> None:
    from quota.migrate import upgrade

    upgrade(url)
    if _CLOCK.exists():
        with connect(url) as connection:
            # bytes: psycopg takes the text as it stands, "%" and all, and several statements at once.
            connection.execute(_CLOCK.read_bytes())


def assert_balanced(connection: Connection) -> None:
    """Fails with the rows of `quota.check()`, if there are any."""
    rows = connection.execute("SELECT * FROM quota.check()").fetchall()
    if rows:
        pytest.fail("quota.check() found:\n" + "\n".join(f"  {row}" for row in rows), pytrace=False)


@pytest.fixture
def database(request: pytest.FixtureRequest, admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    """URL of a database of the test's own."""
    name = f"quota_test_{run_id}_{secrets.token_hex(4)}"
    url = create_database(admin_dsn, name, template)
    try:
        yield url
        if request.node.get_closest_marker("unbalanced") is None:
            with connect(url) as connection:
                assert_balanced(connection)
    finally:
        drop_database(admin_dsn, name)


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    """Autocommit connection to the test's own database."""
    with connect(database) as connection:
        yield connection


@pytest.fixture(scope="session")
def shared_database(admin_dsn: str, template: str, run_id: str) -> Iterator[str]:
    """URL of a clone that all rolled-back tests of this worker use."""
    name = f"quota_test_{run_id}_shared_{secrets.token_hex(4)}"
    try:
        yield create_database(admin_dsn, name, template)
    finally:
        drop_database(admin_dsn, name)


@pytest.fixture
def tx_conn(request: pytest.FixtureRequest, shared_database: str) -> Iterator[Connection]:
    """Connection in a transaction that is rolled back; `with tx_conn.transaction():` makes savepoints in it.

    commit() and rollback() are refused: a test that needs them wants `conn`.
    """
    with connect(shared_database) as connection, connection.transaction(force_rollback=True):
        yield connection
        # A failed statement that the test did not wrap has undone everything already.
        failed = connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        if not failed and request.node.get_closest_marker("unbalanced") is None:
            assert_balanced(connection)


__all__ = ["assert_balanced", "with_database"]
