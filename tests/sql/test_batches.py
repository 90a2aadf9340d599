"""reserve_many, settle_many, release_many: many at once, each as if it were alone."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server import Connection
from tests.sql.kit import (
    NOON,
    Row,
    advance,
    assert_error,
    balance,
    bucket,
    budget,
    call,
    entries,
    hold,
    new_id,
    nothing_changes,
    outcome,
    rows,
    set_clock,
    slots,
    spent_reserved,
    state,
    value,
)


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    set_clock(tx_conn, NOON)
    budget(tx_conn, "org:a", 10)
    call(tx_conn, "create_subject", "user:1", "org:a")
    call(tx_conn, "create_subject", "user:2", "org:a")
    return tx_conn


def many(ledger: Connection, *asked: tuple[str, Any] | tuple[str, Any, UUID | None], **named: Any) -> list[Row]:
    ids = [each[2] if len(each) == 3 else None for each in asked]
    named.setdefault("ids", ids if any(ids) else None)
    return rows(ledger, "reserve_many", [each[0] for each in asked], [Jsonb(each[1]) for each in asked], **named)


def words(answers: list[Row]) -> list[str]:
    return [
        row["error"] or ("replayed" if row["replayed"] else "granted" if row["granted"] else row["reason"])
        for row in answers
    ]


def test_the_sum_fits(ledger: Connection) -> None:
    answers = many(ledger, ("user:1", {"usd": 3}), ("user:2", {"usd": "2.5"}), ("org:a", {"usd": 4.5}))
    assert words(answers) == ["granted"] * 3
    assert [row["position"] for row in answers] == [1, 2, 3]
    # Every grant shows the account after the whole batch.
    assert [(row["limit_subject"], row["spent"], row["reserved"], row["requested"]) for row in answers] == [
        ("org:a", 0, 10, 3),
        ("org:a", 0, 10, 2.5),
        ("org:a", 0, 10, 4.5),
    ]
    assert all(row["remaining"][0]["available"] == "0" for row in answers)
    assert spent_reserved(ledger, "org:a") == (0, 10)
    for row in answers:
        call(ledger, "settle", row["reservation"])
    assert spent_reserved(ledger, "org:a") == (10, 0)


def test_it_does_not_fit_decided_in_order_as_reserve_would(ledger: Connection) -> None:
    asked = [("user:1", {"usd": 6}), ("user:2", {"usd": 5}), ("user:2", {"usd": 4}), ("org:a", {"usd": 11})]
    answers = many(ledger, *asked)
    assert words(answers) == ["granted", "held", "granted", "too_large"]
    for row in answers:
        if row["granted"]:
            call(ledger, "release", row["reservation"])
    singly = [call(ledger, "reserve", subject, costs) for subject, costs in asked]
    told = ("granted", "reason", "limit_subject", "spent", "reserved", "requested", "retry_after_s", "remaining")
    assert [{name: row[name] for name in told} for row in answers] == [
        {name: row[name] for name in told} for row in singly
    ]


def test_one_bad_request_spoils_only_itself(ledger: Connection) -> None:
    known = hold(ledger, "user:1", {"usd": 1})
    call(ledger, "create_subject", "user:3")
    call(ledger, "freeze", "user:3", "runaway")
    call(ledger, "set_limit", "user:3", "cap", "usd", "budget", 10)
    answers = many(
        ledger,
        ("user:9", {"usd": 1}),
        ("user:1", {"usd": -1}),
        ("user:1", {"usd": "1e3"}),
        ("user:1", {"eur": 1}),
        ("user:1", {"tokens": 1}),
        ("user:1", {}),
        ("user:3", {"usd": 1}),
        ("user:1", {"usd": 1}, known),
        ("user:1", {"usd": 2}, known),
        ("user:1", {"usd": 1}),
    )
    assert words(answers) == [
        "unknown_subject",
        "invalid_amount",
        "invalid_amount",
        "unknown_unit",
        "no_limit",
        "invalid_costs",
        "frozen",
        "replayed",
        "id_conflict",
        "granted",
    ]
    assert "user:9" in answers[0]["error_message"]
    assert answers[0]["error_remedy"]
    assert answers[0]["error_code"] == "QT002"
    assert spent_reserved(ledger, "org:a") == (0, 2)


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"ttls": ["0 seconds"]}, "invalid_ttl"),
        ({"ttls": ["25 hours"]}, "invalid_ttl"),
        ({"headrooms": [1]}, "invalid_argument"),
        ({"on_expiries": ["keep"]}, "invalid_argument"),
        ({"details": [Jsonb([])]}, "invalid_argument"),
        ({"also": [Jsonb("user:2")]}, "invalid_argument"),
        ({"also": [Jsonb([None])]}, "invalid_argument"),
        ({"also": [Jsonb(["user:9"])]}, "unknown_subject"),
        ({"ttls": [None], "headrooms": [None], "on_expiries": [None], "details": [None], "also": [None]}, None),
    ],
    ids=repr,
)
def test_what_each_request_may_say(ledger: Connection, named: dict[str, Any], error: str | None) -> None:
    answer = many(ledger, ("user:1", {"usd": 1}), **named)[0]
    assert answer["error"] == error
    assert answer["granted"] == (None if error else True)


def test_settings_of_each_request(ledger: Connection) -> None:
    answers = many(
        ledger,
        ("user:1", {"usd": 1}),
        ("user:1", {"usd": 2}),
        ttls=["1 minute", "1 hour"],
        on_expiries=["charge", None],
        also=[None, Jsonb(["user:2", "user:2"])],
        headrooms=["0.5", None],
        details=[Jsonb({"call": 7}), None],
    )
    found = {
        row[0]: row[1:]
        for row in ledger.execute("SELECT reservation, expires_at - created_at, also, details FROM quota.reservations")
    }
    first, second = (found[row["reservation"]] for row in answers)
    assert (first[0].total_seconds(), first[1], first[2]) == (60, [], {"call": 7})
    assert (second[0].total_seconds(), second[1], second[2]) == (3600, ["user:2"], {})
    advance(ledger, "2 minutes")
    assert spent_reserved(ledger, "org:a") == (1, 2)
    assert words(many(ledger, ("user:1", {"usd": 3}), ("user:1", {"usd": 1}), headrooms=["0.5", None])) == [
        "held",
        "granted",
    ]


def test_the_same_id_twice_in_a_batch(ledger: Connection) -> None:
    one, two = new_id(), new_id()
    asked = [({"usd": 4}, one), ({"usd": 4}, one), ({"usd": 5}, one), ({"usd": 1}, two)]
    answers = many(ledger, *[("user:1", costs, key) for costs, key in asked])
    assert words(answers) == ["granted", "replayed", "id_conflict", "granted"]
    assert spent_reserved(ledger, "org:a") == (0, 5)
    # The first is refused and leaves nothing behind: the second is judged afresh, in its turn.
    three = new_id()
    answers = many(ledger, ("user:1", {"usd": 6}, three), ("user:1", {"usd": 5}, three), ("user:1", {"usd": 1}))
    assert words(answers) == ["held", "granted", "held"]
    # Near the cap, too: what was granted once is held once.
    five = new_id()
    asked = [({"usd": 3}, five), ({"usd": 3}, five), ({"usd": 1}, new_id()), ({"usd": 1}, new_id())]
    call(ledger, "release", three)
    answers = many(ledger, ("user:1", {"usd": 9}), *[("user:1", costs, key) for costs, key in asked])
    assert words(answers) == ["held", "granted", "replayed", "granted", "granted"]
    assert spent_reserved(ledger, "org:a") == (0, 10)
    call(ledger, "release", five)
    # The first is misuse: the second has the id to itself.
    four = new_id()
    answers = many(ledger, ("user:1", {"usd": "1e3"}, four), ("user:1", {"usd": 3}, four), ("user:1", {"usd": 3}, four))
    assert words(answers) == ["invalid_amount", "granted", "replayed"]


@pytest.mark.parametrize("sizes", [(3, 3, 3), (11, 1, 1)], ids=["one by one", "too large"])
def test_atomic_a_refusal_of_one_grants_nothing(ledger: Connection, sizes: tuple[int, ...]) -> None:
    hold(ledger, "org:a", {"usd": 2})
    with nothing_changes(ledger):
        answers = many(ledger, *[("user:1", {"usd": size}) for size in sizes], atomic=True)
    assert [row["granted"] for row in answers] == [False] * 3
    refused = [row["reason"] for row in answers if row["reason"] != "linked"]
    assert refused == (["held"] if sizes[0] == 3 else ["too_large"])


def test_atomic_all_or_nothing(ledger: Connection) -> None:
    one = new_id()
    assert words(many(ledger, ("user:1", {"usd": 3}, one), ("user:2", {"usd": 7}), atomic=True)) == ["granted"] * 2
    assert words(many(ledger, ("user:1", {"usd": 3}, one), ("user:1", {"usd": 0}), atomic=True)) == [
        "replayed",
        "granted",
    ]
    # Closed, frozen: refused whatever is free.
    call(ledger, "release", one)
    answers = many(ledger, ("user:1", {"usd": 3}, one), ("user:1", {"usd": 1}), ("user:1", {"usd": 1}), atomic=True)
    assert words(answers) == ["closed", "linked", "linked"]
    assert spent_reserved(ledger, "org:a") == (0, 7)


def test_atomic_an_error_is_the_error_of_all_and_names_the_position(ledger: Connection) -> None:
    with nothing_changes(ledger), pytest.raises(psycopg.DatabaseError) as caught, ledger.transaction():
        many(ledger, ("user:1", {"usd": 3}), ("user:9", {"usd": 3}), atomic=True)
    assert_error(caught.value, "unknown_subject", "user:9", "request 2 of the batch")


SOME_ID = UUID("01890000-0000-7000-8000-00000000000a")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("reserve_many", {"subjects": None, "costs": []}, ("subjects is null",)),
        ("reserve_many", {"subjects": ["user:1", "user:1"], "costs": [Jsonb({"usd": 1})]}, ("costs", "position 2")),
        ("reserve_many", {"subjects": ["user:1", None], "costs": [Jsonb({"usd": 1})] * 2}, ("subjects", "position 2")),
        ("reserve_many", {"subjects": ["user:1"] * 2, "costs": [None, Jsonb({})]}, ("costs", "position 1")),
        ("reserve_many", {"subjects": ["user:1"], "costs": [Jsonb({})], "ids": [None, None]}, ("ids", "position 2")),
        ("reserve_many", {"subjects": ["user:1"] * 10_001, "costs": [Jsonb({})] * 10_001}, ("10001", "10000")),
        ("reserve_many", {"subjects": ["user:1"], "costs": [Jsonb({"usd": 1})], "atomic": None}, ("atomic",)),
        ("settle_many", {"ids": None}, ("ids is null",)),
        ("settle_many", {"ids": [None]}, ("ids", "position 1")),
        ("settle_many", {"ids": [SOME_ID], "costs": []}, ("costs", "position 1")),
        ("settle_many", {"ids": [SOME_ID], "finals": [True, True]}, ("finals", "position 2")),
        ("release_many", {"ids": [SOME_ID, None]}, ("ids", "position 2")),
        ("release_many", {"ids": [SOME_ID] * 10_001}, ("10001",)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_arrays_that_do_not_belong_together(
    ledger: Connection, function: str, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with nothing_changes(ledger), pytest.raises(psycopg.DatabaseError) as caught, ledger.transaction():
        rows(ledger, function, **arguments)
    assert_error(caught.value, "invalid_argument", *words)


def test_an_unknown_tenant_is_the_error_of_the_batch(ledger: Connection) -> None:
    for function, arguments in (
        ("reserve_many", (["user:1"], [Jsonb({"usd": 1})])),
        ("settle_many", ([new_id()],)),
        ("release_many", ([new_id()],)),
    ):
        assert outcome(ledger, function, *arguments, tenant="nowhere") == "unknown_tenant"


def test_an_empty_batch_is_empty(ledger: Connection) -> None:
    for function, arguments in (("reserve_many", ([], [])), ("settle_many", ([],)), ("release_many", ([],))):
        assert rows(ledger, function, *arguments) == []


def test_nobody_gets_anything_and_nothing_is_written(ledger: Connection) -> None:
    hold(ledger, "org:a", {"usd": 10})
    with nothing_changes(ledger):
        assert words(many(ledger, *[("user:1", {"usd": 1})] * 3)) == ["held"] * 3
    assert value(ledger, "SELECT count(*) FROM quota.holds") == 1


def test_a_batch_closes_the_overdue_holds_in_its_way(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    old = hold(ledger, "user:1", {"cost": 8}, ttl="1 minute")
    advance(ledger, "2 minutes")
    assert words(many(ledger, ("user:1", {"cost": 5}), ("user:1", {"cost": 5}))) == ["granted"] * 2
    assert state(ledger, old) == "expired"
    assert balance(ledger, "user:1", "rate")["level"] == 0


def test_kinds_and_units_side_by_side(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    slots(ledger, "user:1", 3)
    call(ledger, "set_limit", "user:2", "calls", "requests", "budget", 2, period="day")
    answers = many(
        ledger,
        ("user:1", {"usd": 1, "cost": 4}),
        ("user:2", {"usd": 1}),
        ("user:1", {"cost": 4, "concurrency": 2}),
        ("user:2", {"usd": 1, "requests": 2}),
        ("user:1", {"cost": 1, "concurrency": "0.5"}),
        ("user:1", {"cost": 3}),
    )
    assert words(answers) == ["granted", "granted", "granted", "held", "invalid_amount", "rate"]
    assert balance(ledger, "user:1", "slots")["reserved"] == 3
    settled = rows(ledger, "settle_many", [answers[0]["reservation"], answers[1]["reservation"]])
    assert [row["state"] for row in settled] == ["settled"] * 2
    assert balance(ledger, "user:1", "slots")["reserved"] == 2
    assert balance(ledger, "user:2", "calls")["spent"] == 1


def test_a_subject_first_met_in_a_batch_is_bound(ledger: Connection) -> None:
    call(ledger, "set_limit", "key:*", "cap", "usd", "budget", 1)
    for n in range(5):
        call(ledger, "create_subject", f"key:{n}")
    asked = [(f"key:{n % 5}", {"usd": "0.6"}) for n in range(10)]
    assert words(many(ledger, *asked)) == ["granted"] * 5 + ["held"] * 5


def test_units_that_count_by_themselves_need_no_limit(ledger: Connection) -> None:
    call(ledger, "create_subject", "user:3")
    answers = many(
        ledger, ("user:3", {"requests": 2}), ("user:1", {"usd": 1}), ("user:3", {"concurrency": 1, "requests": 0})
    )
    assert words(answers) == ["granted"] * 3
    assert answers[0]["remaining"] == []
    settled = rows(ledger, "settle_many", [row["reservation"] for row in answers])
    assert [row["state"] for row in settled] == ["settled"] * 3


def test_settle_many(ledger: Connection) -> None:
    keys = [hold(ledger, "user:1", {"usd": 2}) for _ in range(4)]
    unknown = new_id()
    answers = rows(
        ledger,
        "settle_many",
        [keys[0], keys[1], keys[2], unknown, keys[0], keys[1]],
        [Jsonb({"usd": "0.5"}), None, Jsonb({"usd": 3}), None, Jsonb({"usd": "0.5"}), Jsonb({"usd": 1})],
    )
    assert [row["error"] or ("replayed" if row["replayed"] else row["state"]) for row in answers] == [
        "settled",
        "settled",
        "settled",
        "unknown_reservation",
        "replayed",
        "already_settled",
    ]
    assert [row["overage"] for row in answers[:3]] == [{}, {}, {"usd": "1"}]
    assert spent_reserved(ledger, "org:a") == (5.5, 2)
    assert entries(ledger, keys[0]) == [("settle", 0.5)]
    assert entries(ledger, keys[2]) == [("settle", 2), ("overage", 1)]
    assert "".join(str(row["error_message"] or "") for row in answers).count(str(unknown)) == 1


def test_settle_many_what_is_not_plain(ledger: Connection) -> None:
    partial, unknown, late, odd = (hold(ledger, "user:1", {"usd": 2}, ttl="1 hour") for _ in range(4))
    call(ledger, "settle", partial, {"usd": 1}, False)
    overdue = hold(ledger, "user:1", {"usd": 1}, ttl="1 minute")
    advance(ledger, "2 minutes")
    answers = rows(
        ledger,
        "settle_many",
        [partial, unknown, late, odd, overdue],
        [Jsonb({"usd": 2}), None, Jsonb({"usd": 1}), Jsonb({"eur": 1}), Jsonb({"usd": 1})],
        [True, True, False, True, True],
        ["ok", "unknown", "ok", "ok", "ok"],
        [Jsonb({"try": 1}), None, None, None, None],
    )
    assert [row["error"] or row["state"] for row in answers] == [
        "settled",
        "settled",
        "held",
        "unit_not_held",
        "settled",
    ]
    assert [row["late"] for row in answers] == [False, False, False, None, True]
    assert value(ledger, "SELECT details FROM quota.reservations WHERE reservation = %s", partial) == {"try": 1}
    assert spent_reserved(ledger, "org:a") == (6, 3)


def test_settle_many_atomic(ledger: Connection) -> None:
    key = hold(ledger, "user:1", {"usd": 2})
    with nothing_changes(ledger), pytest.raises(psycopg.DatabaseError) as caught, ledger.transaction():
        rows(ledger, "settle_many", [key, new_id()], atomic=True)
    assert_error(caught.value, "unknown_reservation", "request 2 of the batch")


def test_settles_whose_order_counts_are_done_in_order(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 0)
    more, less = hold(ledger, "user:1", {"cost": 1}), hold(ledger, "user:1", {"cost": 2})
    call(ledger, "record", "user:1", {"cost": 4})
    rows(ledger, "settle_many", [more, less], [Jsonb({"cost": 9}), Jsonb({"cost": 0})])
    # Level 3: 8 more than was held empties it, then 2 come back. The sum would leave 0.
    assert balance(ledger, "user:1", "rate")["level"] == 2


def test_release_many(ledger: Connection) -> None:
    keys = [hold(ledger, "user:1", {"usd": 2}) for _ in range(3)]
    call(ledger, "settle", keys[1])
    call(ledger, "settle", keys[2], {"usd": 1}, False)
    answers = rows(
        ledger, "release_many", [keys[0], keys[1], keys[2], keys[0]], [Jsonb({"why": "cancelled"}), None, None, None]
    )
    assert [row["error"] or row["state"] for row in answers] == ["released", "already_settled", "released", "released"]
    assert [row["replayed"] for row in answers] == [False, None, False, True]
    assert spent_reserved(ledger, "org:a") == (3, 0)
    assert value(ledger, "SELECT details FROM quota.reservations WHERE reservation = %s", keys[0]) == {
        "why": "cancelled"
    }


def test_ten_thousand_at_once(ledger: Connection) -> None:
    call(ledger, "set_limit", "org:a", "cap", "usd", "budget", 9_999)
    answers = many(ledger, *[("user:1", {"usd": 1})] * 10_000)
    assert words(answers) == ["granted"] * 9_999 + ["held"]
    rows(ledger, "settle_many", [row["reservation"] for row in answers if row["granted"]])
    assert spent_reserved(ledger, "org:a") == (9_999, 0)


def test_a_batch_that_passes_overdue_holds_shows_their_refund(ledger: Connection) -> None:
    bucket(ledger, "user:1", 10, 1)
    old = hold(ledger, "user:1", {"cost": 8}, ttl="1 minute")
    advance(ledger, "2 minutes")
    # 8 come back once somebody sweeps. The second batch does not fit and sweeps: 4 and 8 are cut to the capacity of 10.
    for asked, level in (([3, 3], "10"), ([2, 1, 9], "8")):
        answers = many(ledger, *[("user:1", {"cost": cost}) for cost in asked])
        assert answers[0]["remaining"][-1]["level"] == level
    assert state(ledger, old) == "expired"


def test_a_hold_that_is_over_at_once_spoils_no_batch(ledger: Connection) -> None:
    set_clock(ledger, None)
    answers = many(ledger, ("user:1", {"usd": 1}, new_id()), ("user:1", {"usd": 2}), ttls=["1 microsecond", None])
    assert words(answers) == ["granted"] * 2
    assert outcome(ledger, "reserve", "user:1", {"usd": 1}, ttl="1 microsecond", id=new_id()) == "ok"
    assert spent_reserved(ledger, "org:a") == (0, 2)
