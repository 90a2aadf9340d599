"""Client and AsyncClient against a real database: every verb, in transactions of one's own, across forks and loops."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import scalar_row
from psycopg.types.numeric import FloatLoader
from sqlalchemy.orm import Session

import quota.calls
from quota.calls import Call, CreateSubject, CreateTenant, Credit, Record, Reserve, Row, SetLimit, Settle
from quota.client import AsyncClient, Client, run, run_async
from quota.client.connections import PerProcess
from quota.config import ConfigError, Settings
from quota.errors import (
    AlreadyExists,
    AmountOutOfRange,
    IdConflict,
    InvalidAmount,
    InvalidArgument,
    InvalidCosts,
    InvalidName,
    InvalidTtl,
    Misuse,
    NoLimit,
    NotAllowed,
    Refused,
    SchemaMismatch,
    UnknownReservation,
    UnknownSubject,
    UnknownTenant,
    UnknownUnit,
)
from quota.ids import uuid7
from tests.client.conftest import CAPACITY
from tests.server import Connection, connect, create_database, drop_database

VERBS = [
    "reserve", "settle", "release", "adjust", "extend", "record", "balance", "ensure_subject", "credit", "reap",
    "check", "repair", "hold", "call", "close",
]  # fmt: skip


class BackendPid(Call[int]):
    """Not a function of the ledger: which server process serves the call."""

    writes = False
    function = quota.calls.Function("none", None)
    text = "SELECT pg_backend_pid() AS found"

    @property
    def statement(self) -> str:
        return self.text

    def answer(self, rows: Any) -> int:
        return int(rows[0]["found"])


def spent(url: str, subject: str = "user:1") -> Any:
    """Returns (spent, reserved) of the subject's one limit."""
    with connect(url) as connection:
        [row] = run(connection, quota.calls.Balance(subject))
    return row.spent, row.reserved


# -- verbs -----------------------------------------------------------------------------------------------------------


def test_statements_name_what_the_catalog_has(observer: Connection) -> None:
    """Every call names the arguments of its function, all of them, in order, with their types."""
    found = {
        name: list(zip(names, types, strict=True))
        for name, names, types in observer.execute(
            """SELECT p.proname, (p.proargnames)[1 : p.pronargs],
                      (SELECT array_agg(format_type(t.oid, NULL) ORDER BY t.nth)
                       FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY t(oid, nth))
               FROM pg_proc p WHERE p.pronamespace = 'quota'::regnamespace"""
        )
    }
    for kind in vars(quota.calls).values():
        if isinstance(kind, type) and issubclass(kind, Call) and kind.__name__ != "Call":
            longer = {"timestamptz": "timestamp with time zone"}
            takes = [(name, longer.get(taken.cast, taken.cast)) for name, taken in kind.function.takes.items()]
            assert takes == found[kind.function.name], kind.function.name


def test_reserve_and_settle(client: Client, ledger: str) -> None:
    answer = client.reserve("user:1", {"usd": "5"}).raise_if_refused()
    assert (answer.granted, answer.state, answer.replayed) == (True, "held", False)
    assert answer.reservation is not None
    assert answer.reservation.version == 7
    assert answer.expires_at is not None
    assert timedelta(minutes=9) < answer.expires_at - datetime.now(UTC) <= timedelta(minutes=10)
    assert (answer.limit_name, answer.capacity, answer.reserved) == ("cap", Decimal(CAPACITY), Decimal(5))
    settled = client.settle(answer.reservation, {"usd": Decimal("6.25")})
    assert (settled.state, settled.late, settled.replayed) == ("settled", False, False)
    assert settled.overage == {"usd": Decimal("1.25")}
    assert client.settle(answer.reservation, {"usd": "6.25"}).replayed
    assert spent(ledger) == (Decimal("6.25"), 0)


def test_the_other_verbs(client: Client, ledger: str) -> None:
    held = client.reserve("user:1", {"usd": 5}, ttl=timedelta(minutes=1), id=(known := uuid7()))
    assert held.reservation == known
    assert client.adjust(known, {"usd": 7}).reserved == 7
    assert client.extend(known, timedelta(minutes=30)) - datetime.now(UTC) > timedelta(minutes=29)
    assert client.settle(known, {"usd": 2}, final=False).state == "held"
    assert client.release(known).state == "released"
    assert client.release(known).replayed
    recorded = client.record("user:1", {"usd": "1.5"}, details={"why": "no hold"})
    assert recorded.entry is not None
    assert not recorded.replayed
    credited = client.credit(known, {"usd": 1}, "a courtesy")
    assert credited.entry is not None
    [row] = client.balance("user:1")
    assert (row.subject, row.limit_name, row.unit, row.kind) == ("user:1", "cap", "usd", "budget")
    assert (row.spent, row.reserved, row.available) == (Decimal("2.5"), Decimal(0), Decimal("47.5"))
    assert (row.window_start, row.window_end, row.level, row.full_after_s) == (None, None, None, None)
    assert client.ensure_subject("user:3", parent="user:2") is True
    assert client.ensure_subject("user:3", parent="user:2") is False
    assert (client.reap().released, client.reap(10, tenant="default").charged) == (0, 0)
    assert client.check() == []
    assert client.check("default") == []
    assert client.repair() == []


def test_a_refusal_is_a_value(client: Client, ledger: str) -> None:
    answer = client.reserve("user:1", {"usd": CAPACITY + 1})
    assert (answer.granted, answer.refused, answer.reason, answer.reservation) == (False, True, "too_large", None)
    assert [violation.limit_name for violation in answer.violations] == ["cap"]
    with pytest.raises(Refused, match='too_large by limit "cap" of user:1: capacity 50 usd'):
        answer.raise_if_refused()
    assert spent(ledger) == (0, 0)


def test_the_same_id_is_the_same_reservation(client: Client, ledger: str) -> None:
    known = uuid7()
    assert not client.reserve("user:1", {"usd": 5}, id=known).replayed
    assert client.reserve("user:1", {"usd": "5.00"}, id=str(known)).replayed
    with pytest.raises(IdConflict) as caught:
        client.reserve("user:1", {"usd": 6}, id=known)
    assert caught.value.hint
    assert client.record("user:1", {"usd": 1}, id=(once := uuid7())).replayed is False
    assert client.record("user:1", {"usd": 1}, id=once).replayed is True
    assert spent(ledger) == (1, 5)


def test_a_tenant_of_ones_own(ledger: str) -> None:
    with Client(ledger, timeout_s=30) as first, Client(ledger, tenant="acme", timeout_s=30) as client:
        with pytest.raises(UnknownTenant):
            client.reserve("user:1", {"usd": 1})
        first.call(CreateTenant("acme"))
        with pytest.raises(AlreadyExists):
            first.call(CreateTenant("acme"))
        with pytest.raises(UnknownSubject):
            client.reserve("user:1", {"usd": 1})
        client.call(CreateSubject("user:1", tenant="acme"))
        client.call(SetLimit("user:1", "cap", "usd", "budget", 1, tenant="acme"))
        assert client.reserve("user:1", {"usd": 1}).granted
    assert spent(ledger) == (0, 0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Reserve("user:9", {"usd": 1}), UnknownSubject),
        (Reserve("user:1", {"eur": 1}), UnknownUnit),
        (Reserve("user:1", {"tokens": 1}), NoLimit),
        (Reserve("user:1", {}), InvalidCosts),
        (Reserve("user:1", {"usd": Decimal("NaN")}), InvalidAmount),
        (Reserve("user:1", {"usd": Decimal("Infinity")}), InvalidAmount),
        (Reserve("user:1", {"usd": -1}), InvalidAmount),
        (Reserve("user:1", {"usd": "1e3"}), InvalidAmount),
        (Reserve("user:1", {"usd": Decimal("1E-13")}), InvalidAmount),
        (Reserve("user:1", {"usd": 10**18}), AmountOutOfRange),
        (Reserve("user:1", {"usd": 1}, ttl=timedelta(0)), InvalidTtl),
        (Reserve("user:1", {"usd": 1}, ttl=timedelta(days=400_000)), InvalidTtl),
        (Reserve("user:1", {"usd": 1}, headroom=1), InvalidArgument),
        (Reserve("user:1", {"usd": 1}, headroom=Decimal("NaN")), InvalidArgument),
        (Reserve("user:1", {"usd": 1}, on_expiry="keep"), InvalidArgument),
        (Settle(uuid7()), UnknownReservation),
        (Settle(uuid7(), outcome="fine"), InvalidArgument),
        (Credit(uuid7(), {"usd": 1}, "why"), UnknownReservation),
        (CreateSubject("user:a\u200bb"), InvalidName),
        (CreateSubject("nobody"), InvalidName),
        (SetLimit("user:1", "cap", "usd", "budget", Decimal("NaN")), Misuse),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value.function.name,
)
def test_misuse_is_typed_and_changes_nothing(
    client: Client, ledger: str, call: Call[Any], expected: type[Misuse]
) -> None:
    with pytest.raises(expected) as caught:
        client.call(call)
    assert caught.value.message.startswith(f"{caught.value.name}: ")
    assert caught.value.hint
    assert spent(ledger) == (0, 0)


def test_what_cannot_be_sent_never_gets_a_connection(ledger: str) -> None:
    with Client("postgresql://127.0.0.1:1/nowhere", timeout_s=30) as client:
        with pytest.raises(TypeError, match="'usd'"):
            client.reserve("user:1", {"usd": 0.5})  # type: ignore[dict-item]
        with pytest.raises(InvalidArgument):
            client.settle("not an id")


def test_both_clients_have_the_same_verbs(ledger: str) -> None:
    for verb in VERBS:
        blocking, awaited = getattr(Client, verb), getattr(AsyncClient, verb)
        assert blocking.__doc__
        assert verb == "close" or blocking.__doc__ == awaited.__doc__
        assert str(inspect.signature(blocking)).split("->")[0] == str(inspect.signature(awaited)).split("->")[0]
        assert inspect.iscoroutinefunction(awaited) is (verb != "hold")


async def test_the_asynchronous_client(ledger: str) -> None:
    async with AsyncClient(ledger, timeout_s=30) as client:
        answers = await asyncio.gather(*(client.reserve("user:1", {"usd": 5}) for _ in range(12)))
        assert sum(answer.granted for answer in answers) == 10
        assert {answer.reason for answer in answers if answer.refused} == {"held"}
        for answer in answers:
            if answer.reservation is not None:
                await client.settle(answer.reservation, {"usd": 1})
        with pytest.raises(UnknownSubject):
            await client.balance("user:9")
        [row] = await client.balance("user:1")
        assert (row.spent, row.reserved) == (Decimal(10), Decimal(0))
        assert await client.check() == []


def test_threads_share_a_client(client: Client, ledger: str) -> None:
    def work(_: int) -> bool:
        answer = client.reserve("user:1", {"usd": 2})
        if answer.reservation is not None:
            client.settle(answer.reservation, {"usd": 2})
        return answer.granted

    with ThreadPoolExecutor(16) as threads:
        granted = sum(threads.map(work, range(60)))
    assert spent(ledger) == (2 * granted, 0)
    assert granted <= 25
    assert len(client_sessions(ledger)) <= 8


def client_sessions(url: str, name: str = "quota") -> list[int]:
    """Returns the backend pids of this database's sessions with that application name."""
    asked = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    with connect(url) as connection:
        return [pid for (pid,) in connection.execute(asked, (name,))]


# -- settings --------------------------------------------------------------------------------------------------------


def test_nothing_connects_before_the_first_call_and_closing_closes(ledger: str) -> None:
    client = Client(ledger, application_name="quota-test-lazy", timeout_s=30)
    assert client_sessions(ledger, "quota-test-lazy") == []
    client.balance("user:1")
    assert len(client_sessions(ledger, "quota-test-lazy")) == 1
    client.close()
    client.close()
    wait_until_gone(ledger, "quota-test-lazy")
    with pytest.raises(RuntimeError, match="closed"):
        client.balance("user:1")


def wait_until_gone(url: str, name: str) -> None:
    pause = threading.Event()
    for _ in range(200):
        if not client_sessions(url, name):
            return
        pause.wait(0.05)
    pytest.fail(f"sessions of {name} are still there")


def test_the_url_names_the_application(ledger: str) -> None:
    joint = "&" if "?" in ledger else "?"
    with Client(f"{ledger}{joint}application_name=billing", timeout_s=30) as client:
        client.balance("user:1")
        assert len(client_sessions(ledger, "billing")) == 1


@pytest.mark.parametrize(("threshold", "prepared"), [(None, 0), (0, 1)])
def test_statements_are_prepared_only_where_that_is_wanted(ledger: str, threshold: int | None, prepared: int) -> None:
    class Prepared(BackendPid):
        text = "SELECT count(*) AS found FROM pg_prepared_statements WHERE statement LIKE 'SELECT subject%%'"

    with Client(ledger, prepare_threshold=threshold, pool_max=1, timeout_s=30) as client:
        for _ in range(8):
            client.balance("user:1")
        assert client.call(Prepared()) == prepared


def test_the_url_comes_from_the_environment(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTA_DATABASE_URL", ledger)
    with Client() as client:
        assert client.balance("user:1")
    monkeypatch.setenv("QUOTA_TENANT", "acme")
    with Client(**Client.settings_of(Settings.from_env())) as client:
        assert client.tenant == "acme"
    monkeypatch.delenv("QUOTA_DATABASE_URL")
    with pytest.raises(ConfigError, match="QUOTA_DATABASE_URL"):
        Client()


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout_s": 0},
        {"timeout_s": Decimal(-1)},
        {"timeout_s": Decimal("NaN")},
        {"timeout_s": 5000},
        {"pool_max": 0},
        {"retries": -1},
        {"url": "postgresql+psycopg://user:hush@host/db"},
        {"url": "postgres//user:hush@host"},
    ],
)
def test_settings_that_cannot_mean_anything(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(**{"url": "postgresql://localhost/quota", **arguments})
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_database_without_the_schema(admin_dsn: str) -> None:
    name = f"quota_test_empty_{uuid7().hex}"
    url = create_database(admin_dsn, name)
    try:
        with Client(url, timeout_s=30) as client, pytest.raises(SchemaMismatch, match="quota migrate"):
            client.balance("user:1")
    finally:
        drop_database(admin_dsn, name)


def test_a_login_without_rights(ledger: str) -> None:
    role = f"quota_test_{uuid7().hex}"
    with connect(ledger) as owner:
        owner.execute(f"CREATE ROLE {role} NOLOGIN".encode())
        try:
            with connect(ledger) as connection:
                connection.execute(f"SET ROLE {role}".encode())
                with pytest.raises(NotAllowed):
                    run(connection, Reserve("user:1", {"usd": 1}))
        finally:
            owner.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize(
    "setting",
    ["datestyle = 'SQL, DMY'", "timezone = 'Asia/Seoul'", "intervalstyle = 'sql_standard'", "bytea_output = 'escape'"],
)
def test_no_setting_of_the_database_changes_an_answer(ledger: str, setting: str, observer: Connection) -> None:
    observer.execute(f"ALTER DATABASE {observer.info.dbname} SET {setting}".encode())
    with Client(ledger, timeout_s=30) as client:
        answer = client.reserve("user:1", {"usd": "0.1"}, ttl=timedelta(hours=1, seconds=7))
        assert answer.expires_at is not None
        assert answer.reservation is not None
        assert timedelta(minutes=59) < answer.expires_at - datetime.now(UTC) <= timedelta(hours=1, seconds=7)
        client.settle(answer.reservation)


# -- forks -----------------------------------------------------------------------------------------------------------

FORKING = """
    import json, os, sys
    sys.path.insert(0, ROOT)
    from quota.client import Client
    from tests.client.test_client import BackendPid

    client = Client(URL, timeout_s=30, coalesce=COALESCE)
    parent = [client.call(BackendPid())]
    children = []
    for _ in range(2):
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            first = client.call(BackendPid())
            reserved = client.reserve("user:1", {"usd": 1})
            client.settle(reserved.reservation)
            os.write(writable, json.dumps([first, client.call(BackendPid())]).encode())
            client.close()
            sys.exit(0)  # with everything that an interpreter does on its way out
        os.close(writable)
        with os.fdopen(readable) as told:
            children.append(json.load(told))
        assert os.waitpid(child, 0)[1] == 0
        parent.append(client.call(BackendPid()))
    client.reserve("user:1", {"usd": 1})
    client.close()
    print(json.dumps({"parent": parent, "children": children}))
"""


@pytest.mark.parametrize("coalesce", [False, True], ids=["one by one", "coalescing"])
def test_a_fork_never_shares_a_connection(ledger: str, coalesce: bool) -> None:
    root = str(Path(__file__).parents[2])
    script = textwrap.dedent(FORKING).replace("ROOT", repr(root)).replace("URL", repr(ledger))
    script = script.replace("COALESCE", repr(coalesce))
    # Forking with threads about is what servers do; newer Pythons warn of it.
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Exception ignored" not in ran.stderr
    told = json.loads(ran.stdout)
    # The parent keeps its one session through both children; every child has one of its own.
    assert len(set(told["parent"])) == 1
    sessions = {told["parent"][0], *(pid for pids in told["children"] for pid in pids)}
    assert len(sessions) == 3
    assert spent(ledger) == (2, 1)


def test_a_value_of_a_process_is_not_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter(range(10))
    once = PerProcess(lambda: next(values))
    assert (once.get(), once.get(), once.get("loop"), once.get()) == (0, 0, 1, 0)
    child = os.getpid() + 1
    monkeypatch.setattr("os.getpid", lambda: child)
    assert (once.get(), once.get()) == (2, 2)
    # Even a child that has got the process id of an ancestor.
    monkeypatch.setattr("quota.client.connections._forks.behind", 1)
    assert once.get() == 3
    assert (once.pop(), once.pop(), once.get()) == (3, None, 4)


# -- transactions of the caller's own --------------------------------------------------------------------------------


def test_a_hold_vanishes_with_the_callers_transaction(ledger: str) -> None:
    with psycopg.connect(ledger) as connection:
        held = run(connection, Reserve("user:1", {"usd": 5}))
        assert held.granted
        assert spent(ledger) == (0, 0)
        connection.rollback()
        assert spent(ledger) == (0, 0)
        with pytest.raises(UnknownReservation):
            run(connection, Settle(held.reservation or ""))
        connection.rollback()
        held = run(connection, Reserve("user:1", {"usd": 5}))
        connection.commit()
        assert spent(ledger) == (0, 5)


def test_a_callers_connection_may_be_of_any_make(ledger: str) -> None:
    """Whatever rows, numbers and placeholders its owner has chosen, the answer is the same and exact."""
    with psycopg.connect(ledger, row_factory=scalar_row, cursor_factory=psycopg.RawCursor) as connection:
        connection.adapters.register_loader("numeric", FloatLoader)
        connection.execute("SET timezone = 'Asia/Seoul'")
        answer = run(connection, Reserve("user:1", {"usd": "0.1"}))
        assert answer.reserved == Decimal("0.1")
        assert answer.expires_at is not None
        assert answer.expires_at.utcoffset() == timedelta(0)
        connection.rollback()


def test_misuse_in_a_callers_transaction_leaves_the_transaction_to_the_caller(ledger: str) -> None:
    with psycopg.connect(ledger) as connection:
        kept = run(connection, Reserve("user:1", {"usd": 1}))
        with pytest.raises(UnknownSubject), connection.transaction():
            run(connection, Reserve("user:9", {"usd": 1}))
        assert run(connection, Settle(kept.reservation or "")).state == "settled"
    assert spent(ledger) == (1, 0)


def test_a_serialization_failure_is_the_callers_to_repeat(ledger: str) -> None:
    with psycopg.connect(ledger) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        run(connection, quota.calls.Balance("user:1"))  # takes the snapshot
        with connect(ledger) as other:
            run(other, Record("user:1", {"usd": 1}))
        with pytest.raises(psycopg.errors.SerializationFailure):
            run(connection, Reserve("user:1", {"usd": CAPACITY}))
        connection.rollback()
        assert run(connection, Reserve("user:1", {"usd": CAPACITY - 1})).granted


@pytest.fixture
def engine(ledger: str) -> Any:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(ledger))
    yield engine
    engine.dispose()


def test_a_sqlalchemy_connection(engine: sqlalchemy.Engine, ledger: str) -> None:
    with engine.connect() as connection:
        held = run(connection, Reserve("user:1", {"usd": "5.5"}, also=["user:2"], details={"n": 1}))
        assert held.reserved == Decimal("5.5")
        assert held.remaining[1].subject == "user:2"
        connection.rollback()
        assert spent(ledger) == (0, 0)
    with engine.begin() as connection:
        held = run(connection, Reserve("user:1", {"usd": 5}))
        run(connection, Settle(held.reservation or "", {"usd": 3}))
    assert spent(ledger) == (3, 0)


def test_a_sqlalchemy_session(engine: sqlalchemy.Engine, ledger: str) -> None:
    with Session(engine) as session:
        assert run(session, Reserve("user:1", {"usd": 5})).granted
        session.rollback()
        assert spent(ledger) == (0, 0)
        with pytest.raises(UnknownSubject) as caught, session.begin_nested():
            run(session, Reserve("user:9", {"usd": 1}))
        assert isinstance(caught.value.__cause__, sqlalchemy.exc.DBAPIError)
        assert run(session, Reserve("user:1", {"usd": 5})).granted
        session.commit()
    assert spent(ledger) == (0, 5)


async def test_an_asynchronous_transaction_of_ones_own(ledger: str) -> None:
    async with await psycopg.AsyncConnection.connect(ledger) as connection:
        assert (await run_async(connection, Reserve("user:1", {"usd": 5}))).granted
        await connection.rollback()
        with pytest.raises(UnknownSubject):
            await run_async(connection, Reserve("user:9", {"usd": 5}))
        await connection.rollback()
    assert spent(ledger) == (0, 0)


async def test_an_asynchronous_sqlalchemy_connection_and_session(ledger: str) -> None:
    pytest.importorskip("greenlet", reason="SQLAlchemy's asyncio needs greenlet, which is not installed")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine("postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(ledger))
    try:
        async with engine.connect() as connection:
            assert (await run_async(connection, Reserve("user:1", {"usd": 5}))).granted
            await connection.rollback()
        async with AsyncSession(engine) as session:
            assert (await run_async(session, Reserve("user:1", {"usd": 2}))).granted
            with pytest.raises(UnknownSubject):
                async with session.begin_nested():
                    await run_async(session, Reserve("user:9", {"usd": 5}))
            await session.commit()
    finally:
        await engine.dispose()
    assert spent(ledger) == (0, 2)


def test_a_call_answers_without_any_connection() -> None:
    """Whoever else executes statements can use the calls: rows are mappings, whatever made them."""
    row: Row = {"state": "settled", "late": False, "replayed": True, "overage": "{}"}
    assert Settle(uuid7()).answer([row]).replayed
