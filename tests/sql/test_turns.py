"""reserve_in_turn: places in a queue, who comes first, what ends a place; and that no cap depends on it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from tests.server import Connection
from tests.sql.kit import (
    NOON,
    Row,
    advance,
    bucket,
    budget,
    call,
    hold,
    misuse,
    new_id,
    nothing_changes,
    reserve,
    set_clock,
    slots,
    value,
)

KEY = "key:1"


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    """`key:1` has a bucket of 10 that is empty, and refills 1 a second."""
    set_clock(tx_conn, NOON)
    call(tx_conn, "create_tenant", "other")
    bucket(tx_conn, KEY, 10, 1)
    hold(tx_conn, KEY, {"cost": 10})
    return tx_conn


def ask(conn: Connection, cost: Any = 1, id_: UUID | None = None, subject: str = KEY, **named: Any) -> tuple[UUID, Row]:
    """Asks once; returns the id and the answer."""
    name = id_ or new_id()
    return name, call(conn, "reserve_in_turn", subject, {"cost": cost}, name, **named)


def again(conn: Connection, name: UUID, cost: Any = 1, **named: Any) -> Row:
    return ask(conn, cost, name, **named)[1]


def places(conn: Connection) -> int:
    return int(value(conn, "SELECT count(*) FROM quota_internal.waiters"))


def test_each_waits_for_what_those_before_it_will_take(ledger: Connection) -> None:
    answers = []
    for cost in (1, 2, 3):
        advance(ledger, "1 microsecond")
        answers.append(ask(ledger, cost)[1])
    assert [answer["granted"] for answer in answers] == [False] * 3
    assert [answer["reason"] for answer in answers] == ["rate"] * 3
    assert [answer["ahead"] for answer in answers] == [0, 1, 2]
    # Not 1, 2 and 3, as each would be told that came alone.
    told = [answer["retry_after_s"] for answer in answers]
    assert told == [Decimal("0.999999"), Decimal("2.999998"), Decimal("5.999997")]
    assert [answer["look_after_s"] for answer in answers] == told
    assert [answer["requested"] for answer in answers] == [1, 2, 3]


def test_who_waits_as_told_is_granted_in_order(ledger: Connection) -> None:
    waiters = []
    for _ in range(3):
        advance(ledger, "1 microsecond")
        waiters.append(ask(ledger)[0])
    for name in waiters:
        advance(ledger, "1 second")
        assert again(ledger, name)["granted"]
    assert places(ledger) == 0


def test_who_comes_later_does_not_take_what_the_first_waits_for(ledger: Connection) -> None:
    first, _ = ask(ledger, 5)
    advance(ledger, "4 seconds")
    late, refused = ask(ledger, 1)
    assert (refused["granted"], refused["reason"], refused["ahead"]) == (False, "rate", 1), (
        "4 are there, but not for it"
    )
    advance(ledger, "1 second")
    assert not again(ledger, late)["granted"]
    assert again(ledger, first, 5)["granted"]
    advance(ledger, "1 second")
    assert again(ledger, late)["granted"]


def test_who_fits_beside_those_ahead_goes_at_once(ledger: Connection) -> None:
    first, _ = ask(ledger, 5)
    advance(ledger, "6 seconds")
    assert ask(ledger, 1)[1]["granted"]
    assert again(ledger, first, 5)["granted"]


def test_who_leaves_nothing_to_others_goes_before_who_does(ledger: Connection) -> None:
    """Batch work asks with headroom; it waits behind interactive work that came later."""
    batch, _ = ask(ledger, 1, headroom="0.2")
    advance(ledger, "1 second")
    quick, answer = ask(ledger, 1)
    assert answer["granted"]
    quick, answer = ask(ledger, 2)
    assert (answer["ahead"], answer["retry_after_s"]) == (0, 2)
    advance(ledger, "2 seconds")
    # 3 would do for it alone: one and what it leaves.
    refused = again(ledger, batch, 1, headroom="0.2")
    assert (refused["ahead"], refused["retry_after_s"]) == (1, 3)
    assert again(ledger, quick, 2)["granted"]
    advance(ledger, "3 seconds")
    assert again(ledger, batch, 1, headroom="0.2")["granted"]


def test_the_place_is_on_the_binding_limit_and_in_nobodys_way_elsewhere(ledger: Connection) -> None:
    bucket(ledger, "pool:1", 100, 1)
    ask(ledger, 5, also=["pool:1"])  # waits for the key's bucket
    hold(ledger, "pool:1", {"cost": 99})
    bucket(ledger, "key:2", 100, 1)
    advance(ledger, "1 microsecond")
    assert ask(ledger, 1, subject="key:2", also=["pool:1"])[1]["granted"]


def test_a_place_that_nobody_keeps_is_in_nobodys_way(ledger: Connection) -> None:
    dead, answer = ask(ledger, 10)
    assert answer["look_after_s"] == 10
    advance(ledger, "7 seconds")
    alive, refused = ask(ledger, 7)
    assert (refused["granted"], refused["ahead"]) == (False, 1)
    advance(ledger, "8 seconds")  # 10 to look, 5 more out of kindness
    assert again(ledger, alive, 7)["granted"]
    # It is there again for a minute, if its owner comes after all: before those who came later.
    late, _ = ask(ledger, 9)
    assert again(ledger, dead, 10)["ahead"] == 0
    assert again(ledger, late, 9)["ahead"] == 1
    advance(ledger, "80 seconds")
    hold(ledger, KEY, {"cost": 10})
    ask(ledger, 1)
    assert places(ledger) == 1, "swept by whoever comes next"


def test_waiters_for_slots_look_the_more_seldom_the_further_behind(ledger: Connection) -> None:
    slots(ledger, "user:1")
    busy = hold(ledger, "user:1", {"concurrency": 1})

    def wait(name: UUID | None = None) -> tuple[UUID, Row]:
        mine = name or new_id()
        return mine, call(ledger, "reserve_in_turn", "user:1", {"concurrency": 1}, mine)

    first, answer = wait()
    assert (answer["reason"], answer["ahead"], answer["look_after_s"]) == ("concurrency", 0, 1)
    advance(ledger, "1 microsecond")
    second, answer = wait()
    assert (answer["reason"], answer["ahead"], answer["look_after_s"]) == ("concurrency", 1, 2)
    call(ledger, "release", busy)
    refused = wait(second)[1]
    assert (refused["granted"], refused["reason"]) == (False, "concurrency"), "the slot is the first one's"
    assert wait(first)[1]["granted"]
    refused = call(ledger, "reserve_in_turn", "user:1", {"concurrency": 1}, second, patience="0")
    assert (refused["reason"], refused["look_after_s"], places(ledger)) == ("concurrency", None, 0)


def test_waiters_for_a_budget_that_others_hold(ledger: Connection) -> None:
    budget(ledger, "user:1", 10)
    busy = hold(ledger, "user:1", {"usd": 8})

    def wait(usd: int, name: UUID | None = None) -> tuple[UUID, Row]:
        mine = name or new_id()
        return mine, call(ledger, "reserve_in_turn", "user:1", {"usd": usd}, mine)

    first, answer = wait(10)
    assert (answer["reason"], answer["look_after_s"]) == ("held", 1)
    advance(ledger, "1 microsecond")
    second, answer = wait(2)
    assert (answer["granted"], answer["reason"], answer["ahead"]) == (False, "held", 1), "there is room, but not for it"
    call(ledger, "settle", busy, {"usd": 1})
    refused = wait(10, first)[1]
    assert (refused["reason"], refused["look_after_s"]) == ("exhausted", None), "and so its place is free"
    assert wait(2, second)[1]["granted"]


def test_a_window_opens_for_one_after_the_other(ledger: Connection) -> None:
    budget(ledger, "user:1", 10, period="1 hour")
    hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", value(ledger, "SELECT reservation FROM quota.reservations WHERE subject = 'user:1'"))
    looks = []
    for _ in range(3):
        advance(ledger, "1 microsecond")
        answer = call(ledger, "reserve_in_turn", "user:1", {"usd": 1}, new_id(), patience="2 hours")
        assert answer["reason"] == "exhausted"
        looks.append((answer["ahead"], answer["look_after_s"]))
    assert looks == [(0, 10), (1, 10), (2, 10)], "never later than a place is kept"
    advance(ledger, "59 minutes 55 seconds")
    looks = []
    for _ in range(3):
        advance(ledger, "1 microsecond")
        answer = call(ledger, "reserve_in_turn", "user:1", {"usd": 1}, new_id(), patience="2 hours")
        looks.append((answer["ahead"], round(answer["look_after_s"], 2)))
    assert looks == [(0, Decimal("5.00")), (1, Decimal("5.01")), (2, Decimal("5.02"))], "the first ones kept no place"


def test_a_hold_whose_time_has_passed_is_in_nobodys_way(ledger: Connection) -> None:
    slots(ledger, "user:1")
    hold(ledger, "user:1", {"concurrency": 1}, ttl="1 second")
    ask(ledger)
    advance(ledger, "2 seconds")
    assert call(ledger, "reserve_in_turn", "user:1", {"concurrency": 1}, new_id())["granted"]


@pytest.mark.parametrize(
    ("costs", "reason"), [({"cost": 11}, "too_large"), ({"cost": 1, "usd": 6}, "exhausted")], ids=["large", "spent"]
)
def test_no_place_where_waiting_cannot_help(ledger: Connection, costs: dict[str, int], reason: str) -> None:
    budget(ledger, KEY, 5)
    call(ledger, "set_limit", KEY, "cap", "usd", "budget", 10)
    call(ledger, "record", KEY, {"usd": 5})
    ask(ledger)
    advance(ledger, "1 microsecond")
    with nothing_changes(ledger):
        answer = call(ledger, "reserve_in_turn", KEY, costs, new_id())
    assert (answer["granted"], answer["reason"], answer["look_after_s"]) == (False, reason, None)


def test_a_freeze_sends_waiters_away_wherever_they_stand(ledger: Connection) -> None:
    waiters = [ask(ledger)[0] for _ in range(3)]
    call(ledger, "freeze", KEY, "runaway")
    for name in reversed(waiters):
        answer = again(ledger, name)
        assert (answer["reason"], answer["look_after_s"]) == ("frozen", None)
    assert places(ledger) == 0


def test_who_waits_for_what_is_shown(ledger: Connection) -> None:
    for cost in (1, 2):
        ask(ledger, cost)
        advance(ledger, "1 microsecond")
    slots(ledger, "user:1")
    hold(ledger, "user:1", {"concurrency": 1})
    call(ledger, "reserve_in_turn", "user:1", {"concurrency": 1}, new_id())
    shown = "SELECT subject, limit_name, unit, waiting, amount, since::text FROM quota.waiting ORDER BY subject"
    assert ledger.execute(shown.encode()).fetchall() == [
        (KEY, "rate", "cost", 2, 3, NOON),
        ("user:1", "slots", "concurrency", 1, 1, "2026-05-04 12:00:00.000002+00"),
    ]
    advance(ledger, "1 minute")
    assert ledger.execute(shown.encode()).fetchall() == [], "places that were not kept"


def test_patience(ledger: Connection) -> None:
    with nothing_changes(ledger):
        hasty = ask(ledger, 5, patience="4.9 seconds")[1]
    assert (hasty["retry_after_s"], hasty["look_after_s"]) == (5, None), "even alone it would have to wait for longer"
    name, answer = ask(ledger, 5, patience="5 seconds")
    assert answer["look_after_s"] == 5
    advance(ledger, "1 microsecond")
    # The queue may well move faster than the refill: it is worth waiting.
    assert ask(ledger, 1, patience="5 seconds")[1]["look_after_s"] == Decimal("5.999999")
    assert again(ledger, name, 5, patience="0")["look_after_s"] is None
    assert places(ledger) == 1, "who has no time any more leaves its place"


def test_a_known_id_is_answered_whoever_waits(ledger: Connection) -> None:
    advance(ledger, "1 second")
    name, answer = ask(ledger)
    assert (answer["granted"], answer["replayed"]) == (True, False)
    ask(ledger)
    advance(ledger, "1 microsecond")
    answer = again(ledger, name)
    assert (answer["granted"], answer["replayed"], answer["reservation"]) == (True, True, name)
    call(ledger, "settle", name, {"cost": 1})
    assert again(ledger, name)["reason"] == "closed"


def test_reserve_asks_nobody_and_the_cap_holds(ledger: Connection) -> None:
    first, _ = ask(ledger, 1)
    advance(ledger, "1 second")
    hold(ledger, KEY, {"cost": 1})
    refused = again(ledger, first)
    assert (refused["granted"], refused["retry_after_s"], refused["ahead"]) == (False, 1, 0)
    with nothing_changes(ledger):
        reserve(ledger, KEY, {"cost": 1})


@pytest.mark.parametrize("patience", [None, "-1 second", "2 days"])
def test_a_patience_that_is_none(ledger: Connection, patience: str | None) -> None:
    with misuse(ledger, "invalid_argument", "patience"):
        ask(ledger, patience=patience)


def test_an_ask_without_an_id(ledger: Connection) -> None:
    with misuse(ledger, "invalid_argument", "id null"):
        call(ledger, "reserve_in_turn", KEY, {"cost": 1}, None)


@pytest.mark.parametrize(("subject", "error"), [("key:9", "unknown_subject"), ("nonsense", "invalid_name")])
def test_misuse_is_told_at_once_with_a_queue_too(ledger: Connection, subject: str, error: str) -> None:
    ask(ledger)
    advance(ledger, "1 microsecond")
    with misuse(ledger, error):
        ask(ledger, also=[subject])


def test_stale_snapshots_are_not_answered_wrongly(database: str, conn: Connection) -> None:
    """Above READ COMMITTED the ask fails, to be repeated, or decides by what is so."""
    bucket(conn, KEY, 10, 1)
    set_clock(conn, NOON)
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert ask(conn)[1]["granted"]
