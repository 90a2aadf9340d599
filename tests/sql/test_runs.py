"""Runs: slices, what is promised, width and depth, ends; calls below a run charge the whole lineage once."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from quota.calls import CreateRun, EndRun, Freeze, RunDecision
from quota.client import run
from quota.errors import IdConflict, InvalidArgument, TooDeep, UnknownSubject
from tests.server import Connection, connect
from tests.sql.kit import Background, Row, balance, budget, hold, reserve, spent_reserved, value
from tests.sql.kit import call as call_function

USER = "user:7"


def start(conn: Connection, name: str, usd: Any, parent: str = USER, **more: Any) -> RunDecision:
    return run(conn, CreateRun(f"run:{name}", parent, {"usd": usd}, **more))


def settle(conn: Connection, id_: Any, usd: Any) -> Row:
    return call_function(conn, "settle", id_, {"usd": usd})


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    """`user:7` has 10 usd."""
    budget(tx_conn, USER, 10)
    return tx_conn


def test_slices_fill_what_the_parent_has_and_no_more(ledger: Connection) -> None:
    assert start(ledger, "a", 6).granted
    refused = start(ledger, "b", 5)
    assert (refused.granted, refused.reason) == (False, "held")
    assert (refused.limit_subject, refused.limit_name, refused.unit) == (USER, "cap", "usd")
    numbers = [refused.capacity, refused.available, refused.promised, refused.requested]
    assert numbers == [10, 10, 6, 5]
    assert refused.retry_after_s == 1
    assert start(ledger, "b", 4).granted, "exactly full fits, and a refused name may try again"


def test_a_call_charges_run_and_parent_once_and_the_run_ends_at_its_slice(ledger: Connection) -> None:
    start(ledger, "a", 6)
    one = hold(ledger, "run:a", {"usd": 5})
    assert spent_reserved(ledger, "run:a", "slice usd") == (0, 5)
    assert spent_reserved(ledger, USER) == (0, 5)
    over = reserve(ledger, "run:a", {"usd": 2})
    assert (over["granted"], over["limit_subject"], over["reason"]) == (False, "run:a", "held")
    settle(ledger, one, 1)
    assert spent_reserved(ledger, USER) == (1, 0)


def test_what_a_run_has_spent_is_not_promised_any_more(ledger: Connection) -> None:
    start(ledger, "a", 6)
    settle(ledger, hold(ledger, "run:a", {"usd": 5}), 5)
    assert start(ledger, "b", 4).granted, "5 spent, 1 promised, 4 free"
    refused = start(ledger, "c", "0.5")
    assert (refused.reason, refused.available, refused.promised) == ("held", Decimal(5), Decimal(5))


def test_a_run_above_its_slice_promises_nothing_negative(ledger: Connection) -> None:
    start(ledger, "a", 2)
    settle(ledger, hold(ledger, "run:a", {"usd": 2}), 4)
    assert not start(ledger, "b", "6.01").granted
    assert start(ledger, "b", 6).granted


def test_reasons_say_whether_waiting_helps(ledger: Connection) -> None:
    assert start(ledger, "a", 11).reason == "too_large"
    settle(ledger, hold(ledger, USER, {"usd": 8}), 8)
    refused = start(ledger, "a", 3)
    assert (refused.reason, refused.retry_after_s) == ("exhausted", None)


def test_a_run_that_has_ended_gives_its_slice_back_and_spends_no_more(ledger: Connection) -> None:
    start(ledger, "a", 6)
    one = hold(ledger, "run:a", {"usd": 2})
    assert run(ledger, EndRun("run:a"))
    assert not run(ledger, EndRun("run:a")), "once"
    assert reserve(ledger, "run:a", {"usd": 1})["reason"] == "frozen"
    refused = start(ledger, "b", 9)
    assert (refused.reason, refused.available, refused.promised) == ("held", Decimal(8), Decimal(0)), (
        "its open hold still counts"
    )
    settle(ledger, one, 1)
    assert start(ledger, "b", 9).granted
    assert start(ledger, "a", 6).reason == "closed"


def test_a_run_that_died_no_longer_counts(ledger: Connection) -> None:
    start(ledger, "a", 6, ttl=timedelta(microseconds=1))
    assert start(ledger, "b", 10).granted
    assert reserve(ledger, "run:a", {"usd": 1})["reason"] == "frozen", "what was given away cannot be spent twice"
    assert value(ledger, "SELECT state FROM quota.runs WHERE run = 'run:a'") == "ended"


def test_runs_of_runs(ledger: Connection) -> None:
    start(ledger, "a", 6)
    assert start(ledger, "b", 4, "run:a").granted
    assert start(ledger, "c", 3, "run:a").reason == "held"
    settle(ledger, hold(ledger, "run:b", {"usd": 3}), 3)
    for subject, limit in (("run:b", "slice usd"), ("run:a", "slice usd"), (USER, "cap")):
        assert spent_reserved(ledger, subject, limit) == (3, 0)
    assert run(ledger, EndRun("run:a"))
    assert value(ledger, "SELECT count(*) FROM quota.runs WHERE state = 'ended'") == 2, "what is below ends as well"
    assert start(ledger, "d", 1, "run:a").reason == "frozen"


def test_width_is_a_hard_limit_on_live_children(ledger: Connection) -> None:
    start(ledger, "a", 6, max_width=2)
    assert start(ledger, "b", 1, "run:a").granted
    assert start(ledger, "c", 1, "run:a").granted
    refused = start(ledger, "d", 1, "run:a")
    assert (refused.reason, refused.limit_subject, refused.capacity, refused.requested) == (
        "width",
        "run:a",
        Decimal(2),
        Decimal(3),
    )
    run(ledger, EndRun("run:b"))
    assert start(ledger, "d", 1, "run:a").granted


def test_depth_is_a_hard_limit_on_levels(ledger: Connection) -> None:
    start(ledger, "a", 6, max_depth=2)
    assert start(ledger, "b", 5, "run:a").granted
    assert start(ledger, "c", 4, "run:b", max_depth=5).granted
    refused = start(ledger, "d", 3, "run:c")
    assert (refused.reason, refused.limit_subject, refused.capacity, refused.requested) == (
        "depth",
        "run:a",
        Decimal(2),
        Decimal(3),
    )
    start(ledger, "z", 1, max_depth=0)
    assert start(ledger, "y", 1, "run:z").reason == "depth"


def test_a_lineage_still_has_at_most_8(ledger: Connection) -> None:
    above = USER
    for number in range(7):
        assert start(ledger, f"n{number}", 5, above).granted
        above = f"run:n{number}"
    with pytest.raises(TooDeep), ledger.transaction():
        start(ledger, "n8", 5, above)


def test_the_least_ceiling_above_holds(ledger: Connection) -> None:
    assert start(ledger, "a", 6, max_tokens=500).max_tokens == 500
    assert start(ledger, "b", 1, "run:a", max_tokens=900).max_tokens == 500
    assert start(ledger, "c", 1, "run:a", max_tokens=100).max_tokens == 100
    assert start(ledger, "d", 1, "run:b").max_tokens == 500


def test_starts_keep_their_distance(ledger: Connection) -> None:
    start(ledger, "a", 6, stagger_s="2.5")
    waits = [start(ledger, name, 1, "run:a").start_after_s for name in ("b", "c", "d")]
    assert waits[0] == 0
    assert Decimal(0) < waits[1] <= Decimal("2.5")  # type: ignore[operator]
    assert Decimal("2.5") < waits[2] <= 5  # type: ignore[operator]


def test_the_kill_switch_reaches_the_whole_tree(ledger: Connection) -> None:
    start(ledger, "a", 6)
    start(ledger, "b", 4, "run:a")
    run(ledger, Freeze("run:a", "runaway"))
    assert reserve(ledger, "run:b", {"usd": 1})["limit_subject"] == "run:a"
    assert start(ledger, "c", 1, "run:b").reason == "frozen"


def test_the_same_run_again_is_a_replay(ledger: Connection) -> None:
    first = start(ledger, "a", 6)
    again = start(ledger, "a", "6.0")
    assert (again.granted, again.replayed, again.expires_at) == (True, True, first.expires_at)
    with pytest.raises(IdConflict), ledger.transaction():
        start(ledger, "a", 5)
    assert start(ledger, "b", 4).granted, "it was promised once"


def test_units_that_the_parent_does_not_limit_are_limited_by_the_slice(ledger: Connection) -> None:
    assert run(ledger, CreateRun("run:a", USER, {"usd": 1, "tokens": 1000})).granted
    assert balance(ledger, "run:a", "slice tokens")["capacity"] == 1000
    assert reserve(ledger, "run:a", {"usd": 1, "tokens": 1001})["reason"] == "too_large"


@pytest.mark.parametrize(
    "wrong",
    [
        CreateRun("user:8", USER, {"usd": 1}),
        CreateRun("run:a", USER, {"usd": 1}, max_width=-1),
        CreateRun("run:a", USER, {"usd": 1}, max_tokens=0),
        CreateRun("run:a", USER, {"usd": 1}, ttl=timedelta(0)),
        CreateRun("run:a", USER, {"usd": 1}, stagger_s="3600.1"),
    ],
)
def test_what_is_no_run(ledger: Connection, wrong: CreateRun) -> None:
    with pytest.raises(InvalidArgument), ledger.transaction():
        run(ledger, wrong)


def test_a_parent_that_is_not_there(ledger: Connection) -> None:
    with pytest.raises(UnknownSubject), ledger.transaction():
        start(ledger, "a", 1, "user:8")


def test_two_at_once_do_not_get_the_same_slice(database: str, conn: Connection) -> None:
    """The second one waits for the first one's lock, and sees what it was promised."""
    budget(conn, USER, 10)
    with connect(database) as first, first.transaction():
        assert start(first, "a", 6).granted
        second = Background(database, "create_run", "run:b", USER, {"usd": 6})
        second.must_block(conn)
    assert second.row()["reason"] == "held"


def test_a_call_and_a_birth_do_not_slip_past_each_other(database: str, conn: Connection) -> None:
    """A hold that is not committed yet is waited for: what it takes is not promised."""
    budget(conn, USER, 10)
    with connect(database) as first, first.transaction():
        hold(first, USER, {"usd": 6})
        second = Background(database, "create_run", "run:b", USER, {"usd": 6})
        second.must_block(conn)
    assert second.row()["reason"] == "held"
