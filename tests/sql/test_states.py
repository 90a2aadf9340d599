"""Every edge of the state table: one after another, and from two connections at once."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    NOON,
    Background,
    advance,
    balance,
    budget,
    call,
    entries,
    hold,
    misuse,
    new_id,
    nothing_changes,
    outcome,
    reserve,
    set_clock,
    slots,
    spent_reserved,
    state,
)

# What is done to a hold of 10 usd: the function and its arguments after the id.
OPERATIONS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "settle": ("settle", ({"usd": 6},), {}),
    "settle_other": ("settle", ({"usd": 7},), {}),
    "settle_partial": ("settle", ({"usd": 3}, False), {}),
    "settle_unknown": ("settle", (), {"outcome": "unknown"}),
    "release": ("release", (), {}),
    "adjust": ("adjust", ({"usd": 12},), {}),
    "extend": ("extend", ("1 hour",), {}),
}


def request(operation: str, key: UUID, subject: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    if operation.startswith("reserve"):
        return "reserve", (subject, {"usd": 11 if operation == "reserve_other" else 10}), {"id": key}
    if operation == "reap":
        return "reap", (), {}
    function, args, named = OPERATIONS[operation]
    return function, (key, *args), named


def perform(connection: Connection, operation: str, key: UUID, subject: str = "user:1") -> str:
    function, args, named = request(operation, key, subject)
    return outcome(connection, function, *args, **named)


def make(connection: Connection, starting: str) -> UUID:
    """A reservation of 10 usd in one of the states."""
    key = hold(connection, "user:1", {"usd": 10}, ttl="10 minutes")
    if starting == "settled":
        call(connection, "settle", key, {"usd": 6})
    elif starting == "unknown":
        call(connection, "settle", key, outcome="unknown")
    elif starting == "released":
        call(connection, "release", key)
    elif starting == "partial":
        call(connection, "settle", key, {"usd": 3}, False)
    elif starting in {"expired", "overdue"}:
        set_clock(connection, NOON)
        advance(connection, "10 minutes")
        if starting == "expired":
            assert call(connection, "reap") == {"released": 1, "charged": 0}
    return key


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 50)
    return tx_conn


# operation: starting state -> (what it comes to, state afterwards, spent, reserved)
TABLE: dict[str, dict[str, tuple[str, str, int, int]]] = {
    "reserve": {
        "held": ("replayed", "held", 0, 10),
        "partial": ("replayed", "held", 3, 7),
        "settled": ("refused:closed", "settled", 6, 0),
        "unknown": ("refused:closed", "settled", 10, 0),
        "released": ("refused:closed", "released", 0, 0),
        "expired": ("refused:closed", "expired", 0, 0),
        "overdue": ("refused:closed", "expired", 0, 0),
    },
    "reserve_other": {
        "held": ("id_conflict", "held", 0, 10),
        "partial": ("id_conflict", "held", 3, 7),
        "settled": ("id_conflict", "settled", 6, 0),
        "unknown": ("id_conflict", "settled", 10, 0),
        "released": ("id_conflict", "released", 0, 0),
        "expired": ("id_conflict", "expired", 0, 0),
    },
    "settle": {
        "held": ("ok", "settled", 6, 0),
        "partial": ("ok", "settled", 6, 0),
        "settled": ("replayed", "settled", 6, 0),
        "unknown": ("ok", "settled", 6, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("late", "settled", 6, 0),
        "overdue": ("late", "settled", 6, 0),
    },
    "settle_other": {
        "held": ("ok", "settled", 7, 0),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("ok", "settled", 7, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("late", "settled", 7, 0),
        "overdue": ("late", "settled", 7, 0),
    },
    "settle_partial": {
        "held": ("ok", "held", 3, 7),
        "partial": ("replayed", "held", 3, 7),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("already_settled", "settled", 10, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("expired", "expired", 0, 0),
        "overdue": ("expired", "held", 0, 0),
    },
    "settle_unknown": {
        "held": ("ok", "settled", 10, 0),
        "partial": ("ok", "settled", 10, 0),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("replayed", "settled", 10, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("late", "settled", 10, 0),
        "overdue": ("late", "settled", 10, 0),
    },
    "release": {
        "held": ("ok", "released", 0, 0),
        "partial": ("ok", "released", 3, 0),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("already_settled", "settled", 10, 0),
        "released": ("replayed", "released", 0, 0),
        "expired": ("replayed", "expired", 0, 0),
        "overdue": ("replayed", "expired", 0, 0),
    },
    "adjust": {
        "held": ("ok", "held", 0, 12),
        "partial": ("ok", "held", 3, 9),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("already_settled", "settled", 10, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("expired", "expired", 0, 0),
        "overdue": ("expired", "held", 0, 0),
    },
    "extend": {
        "held": ("ok", "held", 0, 10),
        "partial": ("ok", "held", 3, 7),
        "settled": ("already_settled", "settled", 6, 0),
        "unknown": ("already_settled", "settled", 10, 0),
        "released": ("already_released", "released", 0, 0),
        "expired": ("expired", "expired", 0, 0),
        "overdue": ("expired", "held", 0, 0),
    },
    "reap": {
        "held": ("0", "held", 0, 10),
        "partial": ("0", "held", 3, 7),
        "settled": ("0", "settled", 6, 0),
        "released": ("0", "released", 0, 0),
        "expired": ("0", "expired", 0, 0),
        "overdue": ("1", "expired", 0, 0),
    },
}
EDGES = [(operation, starting) for operation, edges in TABLE.items() for starting in edges]


@pytest.mark.parametrize(("operation", "starting"), EDGES, ids=lambda x: x)
def test_an_edge_of_the_state_table(ledger: Connection, operation: str, starting: str) -> None:
    key = make(ledger, starting)
    word, then, spent, reserved = TABLE[operation][starting]
    assert perform(ledger, operation, key) == word
    # An error undoes the closing of an overdue hold with it: the hold is expired all the same.
    assert state(ledger, key) == then
    assert spent_reserved(ledger, "user:1") == (spent, reserved)


@pytest.mark.parametrize("operation", [*OPERATIONS])
def test_an_unknown_id_is_misuse(ledger: Connection, operation: str) -> None:
    function, args, named = OPERATIONS[operation]
    key = new_id()
    with misuse(ledger, "unknown_reservation", str(key)):
        call(ledger, function, key, *args, **named)


@pytest.mark.parametrize("operation", [*OPERATIONS])
def test_a_null_id_is_misuse(ledger: Connection, operation: str) -> None:
    function, args, named = OPERATIONS[operation]
    with misuse(ledger, "unknown_reservation", "null"):
        call(ledger, function, None, *args, **named)


CLOSED_EDGES = [
    (operation, starting)
    for operation, starting in EDGES
    if starting in {"settled", "unknown", "released", "expired"} and TABLE[operation][starting][0] not in {"ok", "late"}
]


@pytest.mark.parametrize(("operation", "starting"), CLOSED_EDGES, ids=lambda x: x)
def test_an_error_or_a_refusal_on_a_closed_reservation_changes_nothing(
    ledger: Connection, operation: str, starting: str
) -> None:
    key = make(ledger, starting)
    with nothing_changes(ledger):
        perform(ledger, operation, key)


def test_already_settled_tells_the_first_totals(ledger: Connection) -> None:
    key = make(ledger, "settled")
    with misuse(ledger, "already_settled", str(key), "6"):
        call(ledger, "settle", key, {"usd": 7})


def test_an_unknown_outcome_accepts_one_correction_and_no_second(ledger: Connection) -> None:
    key = make(ledger, "unknown")
    assert call(ledger, "settle", key, {"usd": 6})["replayed"] is False
    assert entries(ledger, key) == [("settle", 10), ("correction_down", 4)]
    assert perform(ledger, "settle", key) == "replayed"
    assert perform(ledger, "settle_other", key) == "already_settled"
    assert spent_reserved(ledger, "user:1") == (6, 0)


def test_a_correction_may_add(ledger: Connection) -> None:
    key = make(ledger, "unknown")
    answer = call(ledger, "settle", key, {"usd": 13})
    assert (answer["state"], answer["overage"]) == ("settled", {"usd": "3"})
    assert entries(ledger, key) == [("settle", 10), ("correction_up", 3)]
    assert spent_reserved(ledger, "user:1") == (13, 0)


def test_the_same_totals_are_compared_after_the_units_left_out_are_filled_in(ledger: Connection) -> None:
    budget(ledger, "user:1", 1000, "tokens", "tokens")
    key = hold(ledger, "user:1", {"usd": 10, "tokens": 100})
    call(ledger, "settle", key, {"usd": 6})
    assert outcome(ledger, "settle", key, {"usd": 6, "tokens": 100}) == "replayed"
    assert outcome(ledger, "settle", key, {"usd": "6.000"}) == "replayed"
    assert outcome(ledger, "settle", key) == "already_settled"
    assert outcome(ledger, "settle", key, {"usd": 6, "tokens": 99}) == "already_settled"


@pytest.mark.parametrize(
    ("also", "costs", "word"),
    [
        ([], {"usd": "10.00"}, "replayed"),
        (["user:1"], {"usd": 10}, "replayed"),
        (["user:2"], {"usd": 10}, "id_conflict"),
        ([], {"usd": 10, "requests": 1}, "id_conflict"),
        ([], {"usd": "10.000000000001"}, "id_conflict"),
    ],
)
def test_the_same_request_is_subject_and_also_as_a_set_and_costs_by_value(
    ledger: Connection, also: list[str], costs: Any, word: str
) -> None:
    budget(ledger, "user:2", 50)
    key = hold(ledger, "user:1", {"usd": 10})
    assert outcome(ledger, "reserve", "user:1", costs, id=key, also=also) == word


def test_a_replay_is_judged_by_the_first_request_even_after_an_adjust(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10}, details={"a": 1})
    call(ledger, "adjust", key, {"usd": 20})
    answer = reserve(ledger, "user:1", {"usd": 10}, id=key, ttl="1 hour", headroom="0.5", details={"b": 2})
    assert (answer["granted"], answer["replayed"], answer["reserved"]) == (True, True, 20)
    assert outcome(ledger, "reserve", "user:1", {"usd": 20}, id=key) == "id_conflict"


def test_a_refused_reserve_leaves_nothing_and_is_evaluated_afresh(ledger: Connection) -> None:
    full, key = hold(ledger, "user:1", {"usd": 50}), new_id()
    with nothing_changes(ledger):
        assert outcome(ledger, "reserve", "user:1", {"usd": 1}, id=key) == "refused:held"
    call(ledger, "release", full)
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}, id=key) == "ok"


def test_a_slot_is_freed_by_the_final_close_only(ledger: Connection) -> None:
    slots(ledger, "user:1", 1)
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", key, {"usd": 3}, False)
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}) == "refused:concurrency"
    call(ledger, "settle", key)
    assert balance(ledger, "user:1", "slots")["reserved"] == 0
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}) == "ok"


def test_expiry_is_half_open(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 10}, ttl="10 minutes")
    advance(ledger, "9 minutes 59.999999 seconds")
    assert call(ledger, "reap")["released"] == 0
    assert reserve(ledger, "user:1", {"usd": 10}, id=key)["granted"]
    advance(ledger, "0.000001 seconds")
    assert reserve(ledger, "user:1", {"usd": 10}, id=key)["state"] == "expired"


# -- from two connections at once -------------------------------------------------------------------------------------

PAIRED = [
    "settle",
    "settle_other",
    "settle_partial",
    "settle_unknown",
    "release",
    "adjust",
    "extend",
    "reserve",
    "reap",
]


def _books(connection: Connection, key: UUID, subject: str) -> tuple[Any, ...]:
    return (state(connection, key), *spent_reserved(connection, subject), entries(connection, key))


def _hold(connection: Connection, subject: str, overdue: bool) -> UUID:
    budget(connection, subject, 50)
    set_clock(connection, NOON)
    key = hold(connection, subject, {"usd": 10}, ttl="10 minutes")
    if overdue:
        advance(connection, "10 minutes")
    return key


@pytest.mark.parametrize("overdue", [False, True], ids=["open", "overdue"])
@pytest.mark.parametrize("first", PAIRED)
def test_two_at_once_do_what_they_do_one_after_another(
    conn: Connection, database: str, first: str, overdue: bool
) -> None:
    """The first has not committed yet when the second comes: the second waits, and then finds what the first has done.

    Only the reaper may pass: it skips what others have locked.
    """
    for second in PAIRED:
        label = f"{first} then {second}"
        key = _hold(conn, f"user:{second}-one", overdue)
        with conn.transaction(force_rollback=True):
            alone = perform(conn, second, key, f"user:{second}-one")
        with conn.transaction(force_rollback=True):
            expected = [perform(conn, each, key, f"user:{second}-one") for each in (first, second)]
            books = _books(conn, key, f"user:{second}-one")
        outcome(conn, "release", key)

        subject = f"user:{second}-two"
        key = _hold(conn, subject, overdue)
        with connect(database) as other:
            with other.transaction():
                assert perform(other, first, key, subject) == expected[0], label
                function, args, named = request(second, key, subject)
                waiting = Background(database, function, *args, **named)
                waited = waiting.blocked(conn)
            word = waiting.word()
        # An error has given up its locks; the reaper takes none on an open hold, and skips what others have locked.
        passes = expected[0] == "expired" or "reap" in {first, second}
        if not waited:
            assert passes, f"{label}: nobody waited"
            assert word in {alone, expected[1], "0"}, label
        else:
            assert word == expected[1], label
            assert _books(conn, key, subject) == books, label
        assert conn.execute("SELECT * FROM quota.check()").fetchall() == [], label
        outcome(conn, "release", key)


@pytest.mark.parametrize("operation", ["settle", "settle_partial", "release", "adjust", "extend"])
def test_the_same_call_twice_at_once_is_done_once(conn: Connection, database: str, operation: str) -> None:
    key = _hold(conn, "user:1", overdue=False)
    with connect(database) as other:
        with other.transaction():
            assert perform(other, operation, key) == "ok"
            function, args, named = request(operation, key, "user:1")
            waiting = Background(database, function, *args, **named)
            waiting.must_block(conn)
        assert waiting.word() == ("ok" if operation == "extend" else "replayed")
    assert len(entries(conn, key)) == (1 if operation.startswith("settle") else 0)


def test_two_first_reserves_with_one_id_make_one_hold(conn: Connection, database: str) -> None:
    budget(conn, "user:1", 50)
    key = new_id()
    with connect(database) as other:
        with other.transaction():
            assert reserve(other, "user:1", {"usd": 30}, id=key)["granted"]
            same = Background(database, "reserve", "user:1", {"usd": 30}, id=key)
            same.must_block(conn)
            different = Background(database, "reserve", "user:1", {"usd": 1}, id=key)
            different.must_block(conn)
        assert (same.row()["granted"], same.row()["replayed"]) == (True, True)
        assert different.word() == "id_conflict"
    assert spent_reserved(conn, "user:1") == (0, 30)


def test_a_reserve_whose_rival_with_the_same_id_vanishes_is_decided_afresh(conn: Connection, database: str) -> None:
    budget(conn, "user:1", 50)
    key = new_id()
    with connect(database) as other:
        with other.transaction(force_rollback=True):
            reserve(other, "user:1", {"usd": 30}, id=key)
            same = Background(database, "reserve", "user:1", {"usd": 30}, id=key)
            same.must_block(conn)
        assert same.word() == "ok"
    assert spent_reserved(conn, "user:1") == (0, 30)
