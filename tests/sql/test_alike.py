"""The usual batch, all of one subject: it takes the short way, or the general one, and both say the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    Background,
    advance,
    balance,
    budget,
    call,
    hold,
    new_id,
    rows,
    set_clock,
    slots,
    spent_reserved,
    value,
)

KEY = "key:1"
ASKED = {"usd": "0.25", "cost": 2}


def _books(conn: Connection) -> Connection:
    """A key below a user with buckets, windows, slots and calls that count by themselves; nothing is left to open."""
    set_clock(conn, NOON)
    budget(conn, "user:1", 50)
    call(conn, "create_subject", KEY, "user:1", "basic")
    call(conn, "set_limit", KEY, "day", "usd", "budget", 10, period="day")
    slots(conn, KEY, 8)
    call(conn, "set_limit", KEY, "calls", "requests", "budget", 100)
    call(conn, "release", hold(conn, KEY, ASKED))
    return conn


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    return _books(tx_conn)


@pytest.fixture
def own(conn: Connection) -> Connection:
    """The same in a database of its own, for what needs transactions."""
    return _books(conn)


def short(ledger: Connection, costs: list[Any], subject: str = KEY, **named: Any) -> list[Any] | None:
    """What the short way grants, or None."""
    arguments = {"ids": None, "ttls": None, "details": None} | named
    found = value(
        ledger,
        "SELECT to_jsonb(quota_internal.reserve_alike('default', %s, %s, %s, %s, %s))",
        subject,
        [Jsonb(each) for each in costs],
        arguments["ids"],
        arguments["ttls"],
        arguments["details"],
    )
    return None if found is None else list(found)


def settle_short(ledger: Connection, ids: list[UUID], costs: list[Any] | None, **named: Any) -> list[Any] | None:
    found = value(
        ledger,
        "SELECT to_jsonb(quota_internal.settle_alike('default', %s, %s, %s, %s))",
        ids,
        None if costs is None else [None if each is None else Jsonb(each) for each in costs],
        named.get("outcomes"),
        named.get("details"),
    )
    return None if found is None else list(found)


def test_it_grants_and_settles_what_a_process_usually_sends(ledger: Connection) -> None:
    ids = sorted(new_id() for _ in range(2))
    granted = short(
        ledger, [ASKED, {"cost": "3.5", "usd": 1}], ids=ids, ttls=[timedelta(minutes=1), timedelta(hours=1)]
    )
    assert granted is not None
    assert [row["position"] for row in granted] == [1, 2]
    assert [row["reservation"] for row in granted] == [str(each) for each in ids]
    assert spent_reserved(ledger, "user:1") == (0, 1.25)
    assert balance(ledger, KEY, "slots")["reserved"] == 2
    settled = settle_short(ledger, ids[::-1], [{"cost": 1}, {"cost": "0.5"}])
    assert settled is not None
    assert [row["reservation"] for row in settled] == [str(each) for each in ids[::-1]]
    assert spent_reserved(ledger, "user:1") == (1.25, 0)
    booked = "SELECT booked ->> 'cost' FROM quota_internal.reservations WHERE id = %s"
    assert [value(ledger, booked, each) for each in ids] == ["0.5", "1"]
    assert rows(ledger, "check") == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_both_ways_answer_and_write_the_same(ledger: Connection, size: int) -> None:
    """The general way gets the same batch with a further subject that changes nothing."""
    call(ledger, "create_subject", "tag:free")
    tables = ("reservations", "entries", "accounts")
    ids = sorted(new_id() for _ in range(size))
    seen: list[tuple[list[Any], dict[str, Any]]] = []
    for also in (None, [Jsonb(["tag:free"])] * size):
        with ledger.transaction(force_rollback=True):
            costs = [Jsonb({"usd": f"0.{n}0", "cost": n + 1}) for n in range(1, size + 1)]
            answers = rows(ledger, "reserve_many", [KEY] * size, costs, ids=ids, also=also)
            answers += rows(ledger, "settle_many", ids, [Jsonb({"usd": "0.05", "cost": 1})] * size)
            left = {
                table: value(
                    ledger, f"SELECT jsonb_agg(to_jsonb(x) - 'also' - 'id' ORDER BY x.id) FROM quota_internal.{table} x"
                )
                for table in tables
            }
            seen.append((answers, left))
    assert seen[0] == seen[1]


def _overdue_hold(c: Connection) -> None:
    hold(c, KEY, ASKED, ttl="1 minute")
    advance(c, "2 minutes")


UNPLAIN: dict[str, tuple[Callable[[Connection], object], list[Any], dict[str, Any]]] = {
    "it does not fit": (lambda c: None, [{"usd": 6, "cost": 1}] * 2, {}),
    "a bucket does not refill so fast": (lambda c: None, [{"usd": 1, "cost": 600_000}] * 2, {}),
    "no slot is left": (lambda c: None, [ASKED] * 9, {}),
    "slots by number": (lambda c: None, [ASKED | {"concurrency": 1}], {}),
    "other units": (lambda c: None, [ASKED, {"usd": 1}], {}),
    "further units": (lambda c: None, [{"usd": 1}, ASKED], {}),
    "a unit without a limit": (lambda c: None, [{"tokens": 1}], {}),
    "no cost map": (lambda c: None, [[]], {}),
    "no amount": (lambda c: None, [ASKED, {"usd": "1e3", "cost": 1}], {}),
    "a negative amount": (lambda c: None, [ASKED, {"usd": -1, "cost": 1}], {}),
    "too many digits": (lambda c: None, [{"usd": "0.0000000000001", "cost": 1}], {}),
    "a ttl above the maximum": (lambda c: None, [ASKED], {"ttls": [timedelta(days=2)]}),
    "a ttl of nothing": (lambda c: None, [ASKED], {"ttls": [timedelta(0)]}),
    "details that are none": (lambda c: None, [ASKED], {"details": [Jsonb([])]}),
    "frozen": (lambda c: call(c, "freeze", "user:1", "why"), [ASKED], {}),
    "retired": (lambda c: call(c, "retire_subject", KEY), [ASKED], {}),
    "other definitions": (lambda c: call(c, "set_limit", "key:*", "kind", "usd", "budget", 5), [ASKED], {}),
    "a missing required unit": (lambda c: budget(c, "user:1", 9, "must", "tokens", required=True), [ASKED], {}),
    "the day is over": (lambda c: advance(c, "1 day"), [ASKED], {}),
    "an overdue hold": (_overdue_hold, [ASKED], {}),
    "a known id": (lambda c: hold(c, KEY, ASKED, id=UUID(int=7)), [ASKED], {"ids": [UUID(int=7)]}),
    "an id twice": (lambda c: None, [ASKED] * 2, {"ids": [UUID(int=8)] * 2}),
}


@pytest.mark.parametrize("name", [*UNPLAIN])
def test_what_is_not_plain_is_left_to_the_general_way(ledger: Connection, name: str) -> None:
    prepare, costs, named = UNPLAIN[name]
    prepare(ledger)
    before = value(ledger, "SELECT jsonb_agg(to_jsonb(a) ORDER BY a.id) FROM quota_internal.accounts a")
    assert short(ledger, costs, **named) is None
    assert value(ledger, "SELECT jsonb_agg(to_jsonb(a) ORDER BY a.id) FROM quota_internal.accounts a") == before


def test_a_limit_that_charges_for_expiry_charges(ledger: Connection) -> None:
    call(ledger, "set_limit", KEY, "day", "usd", "budget", 10, period="day", on_expiry="charge")
    call(ledger, "release", hold(ledger, KEY, ASKED))
    assert short(ledger, [ASKED] * 2, ttls=[timedelta(minutes=1)] * 2) is not None
    advance(ledger, "2 minutes")
    call(ledger, "reap")
    assert spent_reserved(ledger, KEY, "day") == (0.5, 0)
    assert spent_reserved(ledger, "user:1") == (0, 0)


def test_the_earliest_expiry_of_a_batch_is_looked_for(ledger: Connection) -> None:
    assert short(ledger, [ASKED] * 2, ttls=[timedelta(hours=1), timedelta(minutes=1)]) is not None
    advance(ledger, "2 minutes")
    answers = rows(ledger, "reserve_many", [KEY] * 7, [Jsonb(ASKED)] * 7)
    assert [row["granted"] for row in answers] == [True] * 7


def test_what_is_left_after_a_settle_still_expires(ledger: Connection) -> None:
    hold(ledger, KEY, ASKED, ttl="1 minute")
    assert settle_short(ledger, [hold(ledger, KEY, ASKED)], None) is not None
    advance(ledger, "2 minutes")
    assert [row["granted"] for row in rows(ledger, "reserve_many", [KEY] * 8, [Jsonb(ASKED)] * 8)] == [True] * 8


def _hold_of_the_next_day(c: Connection, ids: list[UUID]) -> None:
    call(c, "extend", ids[0], "23 hours")
    advance(c, "13 hours")
    ids[1] = hold(c, KEY, ASKED)


def _holds_of_two_users(c: Connection, ids: list[UUID]) -> None:
    budget(c, "user:2", 10)
    ids[:] = [hold(c, user, {"usd": 1}) for user in ("user:1", "user:2")]


def _lines_of_two_days(c: Connection, ids: list[UUID]) -> None:
    call(c, "extend", ids[1], "23 hours")
    advance(c, "13 hours")
    call(c, "adjust", ids[1], {"usd": 1})
    del ids[0]


SETTLES: dict[str, tuple[Callable[[Connection, list[UUID]], object], list[Any] | None, dict[str, Any]]] = {
    "above its hold": (lambda c, ids: None, [{"cost": 1}, {"cost": 3}], {}),
    "nothing of a unit": (lambda c, ids: None, [{"cost": 1}, {"cost": 0}], {}),
    "a unit that it does not hold": (lambda c, ids: None, [{"tokens": 1}] * 2, {}),
    "slots by number": (lambda c, ids: None, [{"concurrency": 1}] * 2, {}),
    "other units": (lambda c, ids: None, [{"cost": 1}, {"usd": "0.1"}], {}),
    "further units": (lambda c, ids: None, [{"cost": 1}, {"cost": 1, "usd": "0.1"}], {}),
    "one without costs": (lambda c, ids: None, [{"cost": 1}, None], {}),
    "no amount": (lambda c, ids: None, [{"cost": 1}, {"cost": "-1"}], {}),
    "unknown": (lambda c, ids: None, None, {"outcomes": ["ok", "unknown"]}),
    "an outcome that is none": (lambda c, ids: None, None, {"outcomes": ["ok", "fine"]}),
    "details that are none": (lambda c, ids: None, None, {"details": [Jsonb({}), Jsonb(1)]}),
    "closed": (lambda c, ids: call(c, "settle", ids[0]), None, {}),
    "partial": (lambda c, ids: call(c, "settle", ids[0], {"cost": 1}, final=False), None, {}),
    "overdue": (lambda c, ids: advance(c, "11 minutes"), None, {}),
    "other windows": (_hold_of_the_next_day, None, {}),
    "fewer accounts": (lambda c, ids: ids.append(hold(c, "user:1", {"usd": 1})), None, {}),
    "other accounts": (_holds_of_two_users, None, {}),
    "an id that is not known": (lambda c, ids: ids.append(new_id()), None, {}),
    "an id twice": (lambda c, ids: ids.append(ids[1]), None, {}),
    "lines of two days": (_lines_of_two_days, None, {}),
}


@pytest.mark.parametrize("name", [*SETTLES])
def test_settles_that_are_not_plain_are_left_to_the_general_way(ledger: Connection, name: str) -> None:
    prepare, costs, named = SETTLES[name]
    ids = [hold(ledger, KEY, ASKED) for _ in range(2)]
    prepare(ledger, ids)
    before = value(ledger, "SELECT jsonb_agg(to_jsonb(r) ORDER BY r.id) FROM quota_internal.reservations r")
    assert settle_short(ledger, ids, costs, **named) is None
    assert value(ledger, "SELECT jsonb_agg(to_jsonb(r) ORDER BY r.id) FROM quota_internal.reservations r") == before


def test_a_window_that_ends_between_hold_and_settle_keeps_its_own_books(ledger: Connection) -> None:
    ids = [hold(ledger, KEY, ASKED, ttl="23 hours") for _ in range(2)]
    advance(ledger, "13 hours")
    hold(ledger, KEY, {"usd": 1, "cost": 1})
    assert settle_short(ledger, ids, None) is not None
    assert spent_reserved(ledger, KEY, "day") == (0, 1)
    assert spent_reserved(ledger, "user:1") == (0.5, 1)
    assert rows(ledger, "check") == []


def test_a_settle_returns_to_a_bucket_by_the_numbers_in_force(ledger: Connection) -> None:
    ids = [hold(ledger, KEY, {"usd": 1, "cost": 500_000}) for _ in range(2)]
    call(ledger, "set_tier_limit", "basic", "bucket", "cost", "bucket", 3_000_000, 10_000, tenant="default")
    advance(ledger, "1 minute")
    assert settle_short(ledger, ids, [{"cost": 1}] * 2) is not None
    assert balance(ledger, KEY, "bucket")["level"] == 1_599_998


def test_a_refusal_writes_nothing(own: Connection) -> None:
    with own.transaction():
        answers = rows(own, "reserve_many", [KEY] * 2, [Jsonb({"usd": 6, "cost": 1})] * 2, atomic=True)
        assert [row["reason"] or row["granted"] for row in answers] == ["linked", "held"]
    with own.transaction():
        answers = rows(own, "reserve_many", [KEY] * 2, [Jsonb({"usd": 11, "cost": 1})] * 2)
        assert [row["reason"] for row in answers] == ["too_large"] * 2
        assert value(own, "SELECT pg_current_xact_id_if_assigned() IS NULL")


def test_who_waited_for_the_account_is_judged_by_what_it_is_then(own: Connection, database: str) -> None:
    with connect(database) as other:
        with other.transaction():
            hold(other, KEY, {"usd": 6, "cost": 1})
            waiting = Background(database, "reserve", KEY, {"usd": 6, "cost": 1}, batch=True)
            waiting.must_block(own)
        assert waiting.word() == "refused:held"
    assert spent_reserved(own, KEY, "day") == (0, 6)


def test_a_tenant_that_a_login_does_not_see_is_not_there(own: Connection) -> None:
    ids = [hold(own, KEY, ASKED)]
    call(own, "create_tenant", "elsewhere")
    own.execute("INSERT INTO quota_internal.logins VALUES (session_user, 'elsewhere')")
    assert short(own, [ASKED]) is None
    assert settle_short(own, ids, None) is None
    own.execute("DELETE FROM quota_internal.logins")
