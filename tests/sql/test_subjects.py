"""Subjects: births, moves, retirements, freezes."""

from __future__ import annotations

import pytest

from tests.server import Connection
from tests.sql.kit import NOON, advance, budget, call, hold, misuse, outcome, reserve, set_clock, spent_reserved, value


@pytest.fixture
def tree(tx_conn: Connection) -> Connection:
    """org:a > user:1 > key:1, and org:b; a budget on each."""
    set_clock(tx_conn, NOON)
    for name, parent in (("org:a", None), ("user:1", "org:a"), ("key:1", "user:1"), ("org:b", None)):
        call(tx_conn, "create_subject", name, parent)
        budget(tx_conn, name, 50)
    return tx_conn


def test_a_subject_is_created_once(tree: Connection) -> None:
    with misuse(tree, "already_exists", "user:1"):
        call(tree, "create_subject", "user:1")
    with misuse(tree, "already_exists", "user:1"):
        call(tree, "create_subject", "user:1", "org:b")


def test_ensure_creates_once_and_never_moves(tree: Connection) -> None:
    assert call(tree, "ensure_subject", "user:2", "org:a") == {"created": True}
    assert call(tree, "ensure_subject", "user:2", "org:a") == {"created": False}
    assert call(tree, "ensure_subject", "user:2") == {"created": False}
    with misuse(tree, "parent_differs", "user:2", "org:a", "org:b"):
        call(tree, "ensure_subject", "user:2", "org:b")
    with misuse(tree, "parent_differs", "org:b", "org:a"):
        call(tree, "ensure_subject", "org:b", "org:a")


@pytest.mark.parametrize("function", ["create_subject", "ensure_subject"])
def test_an_unknown_or_retired_parent(tree: Connection, function: str) -> None:
    with misuse(tree, "unknown_subject", "org:x"):
        call(tree, function, "user:9", "org:x")
    call(tree, "retire_subject", "org:b")
    with misuse(tree, "unknown_subject", "org:b"):
        call(tree, function, "user:9", "org:b")


@pytest.mark.parametrize("function", ["create_subject", "ensure_subject"])
def test_a_subject_is_not_its_own_parent(tree: Connection, function: str) -> None:
    """D10."""
    with misuse(tree, "cycle", "user:9"):
        call(tree, function, "user:9", "user:9")


@pytest.mark.parametrize("parent", ["org:a", "user:1", "key:1"])
def test_a_move_makes_no_cycle(tree: Connection, parent: str) -> None:
    with misuse(tree, "cycle", parent, "org:a"):
        call(tree, "move_subject", "org:a", parent)


def test_a_lineage_has_at_most_eight(tree: Connection) -> None:
    parent = None
    for n in range(1, 9):
        call(tree, "create_subject", f"run:{n}", parent)
        parent = f"run:{n}"
    for function in ("create_subject", "ensure_subject"):
        with misuse(tree, "too_deep", "run:9", "9"):
            call(tree, function, "run:9", "run:8")
    with misuse(tree, "too_deep"):
        call(tree, "move_subject", "run:1", "org:b")
    call(tree, "move_subject", "run:2", "org:b")
    with misuse(tree, "too_deep"):
        call(tree, "move_subject", "run:2", "key:1")


def test_a_move_is_refused_while_a_hold_is_open_on_or_below(tree: Connection) -> None:
    key = hold(tree, "key:1", {"usd": 1}, ttl="1 minute")
    for name in ("key:1", "user:1", "org:a"):
        with misuse(tree, "has_open_holds", name, str(key)):
            call(tree, "move_subject", name, "org:b")
        with misuse(tree, "has_open_holds", name, str(key)):
            call(tree, "retire_subject", name)
    advance(tree, "1 minute")
    call(tree, "move_subject", "user:1", "org:b")
    assert value(tree, "SELECT state FROM quota.reservations") == "expired"
    hold(tree, "key:1", {"usd": 1})
    assert (spent_reserved(tree, "org:b"), spent_reserved(tree, "org:a")) == ((0, 1), (0, 0))


def test_a_hold_that_names_a_subject_beside_its_own_counts_as_open(tree: Connection) -> None:
    hold(tree, "org:b", {"usd": 1}, also=["key:1"])
    with misuse(tree, "has_open_holds"):
        call(tree, "move_subject", "user:1", "org:b")


@pytest.mark.parametrize("function", ["move_subject", "retire_subject", "freeze", "unfreeze"])
def test_an_unknown_subject(tree: Connection, function: str) -> None:
    args = {"move_subject": ["user:9", "org:b"], "freeze": ["user:9", "why"]}.get(function, ["user:9"])
    with misuse(tree, "unknown_subject", "user:9"):
        call(tree, function, *args)


def test_a_move_to_an_unknown_parent(tree: Connection) -> None:
    with misuse(tree, "unknown_subject", "org:x"):
        call(tree, "move_subject", "user:1", "org:x")


def test_a_retired_name_is_never_used_again(tree: Connection) -> None:
    call(tree, "record", "key:1", {"usd": 3})
    call(tree, "retire_subject", "user:1")
    for name in ("user:1", "key:1"):
        with misuse(tree, "unknown_subject", name):
            reserve(tree, name, {"usd": 1})
        with misuse(tree, "already_exists", name):
            call(tree, "create_subject", name)
        with misuse(tree, "unknown_subject", name):
            call(tree, "ensure_subject", name)
    assert value(tree, "SELECT count(*) FROM quota.entries") == 3, "its ledger stays"


def test_frozen_names_the_nearest_frozen_subject(tree: Connection) -> None:
    call(tree, "freeze", "org:a", "runaway")
    answer = reserve(tree, "key:1", {"usd": 1})
    assert (answer["reason"], answer["limit_subject"], answer["retry_after_s"]) == ("frozen", "org:a", None)
    assert [answer[key] for key in ("limit_name", "unit", "capacity", "spent", "reserved")] == [None] * 5
    call(tree, "freeze", "user:1", "too")
    assert reserve(tree, "key:1", {"usd": 1})["limit_subject"] == "user:1"
    assert reserve(tree, "org:b", {"usd": 1}, also=["key:1"])["limit_subject"] == "user:1"
    assert outcome(tree, "reserve", "org:b", {"usd": 1}) == "ok"
    call(tree, "unfreeze", "user:1")
    call(tree, "unfreeze", "org:a")
    assert outcome(tree, "reserve", "key:1", {"usd": 1}) == "ok"


@pytest.mark.parametrize("reason", ["", "  ", None, "x" * 2001])
def test_a_freeze_says_why(tree: Connection, reason: str | None) -> None:
    with misuse(tree, "invalid_argument", "reason"):
        call(tree, "freeze", "user:1", reason)


def test_what_admins_do_is_logged_with_actor_and_reason(tree: Connection) -> None:
    tree.execute("SET LOCAL quota.actor = 'alice'")
    call(tree, "freeze", "user:1", "runaway")
    tree.execute("SET LOCAL quota.actor = ''")
    row = tree.execute(
        "SELECT actor = session_user, on_behalf_of, target, reason FROM quota.log ORDER BY id DESC"
    ).fetchone()
    assert row == (True, "alice", "user:1", "runaway")
