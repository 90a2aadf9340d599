"""The model itself against the numbers that the requirements give: an oracle that is wrong proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

import pytest

from tests.model.errors import ModelError
from tests.model.ledger import Ledger
from tests.model.limits import Row

START = datetime(2026, 3, 2, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
ONE, TWO, THREE = UUID(int=1), UUID(int=2), UUID(int=3)


@pytest.fixture
def books() -> Iterator[Ledger]:
    """A ledger that must prove itself at the end of every test."""
    ledger = Ledger(START)
    yield ledger
    assert ledger.check() == []


def row(ledger: Ledger, subject: str, name: str) -> Row:
    """One limit's row of `balance`."""
    return next(r for r in ledger.balance(subject) if (r.subject, r.limit_name) == (subject, name))


def facts(*values: object) -> tuple[object, ...]:
    """Values side by side, to compare them at once."""
    return values


def user_with(ledger: Ledger, capacity: int | Decimal | None, **more: object) -> None:
    """`user:7` with a usd budget `cap`."""
    ledger.create_subject("user:7")
    ledger.set_limit("user:7", "cap", "usd", "budget", capacity, **more)  # type: ignore[arg-type]


def error_of(call: Callable[[], object]) -> str | None:
    """The error name that a call ends in."""
    try:
        call()
    except ModelError as error:
        return error.name
    return None


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_ten_holds_of_5_fill_a_budget_of_50(books: Ledger) -> None:
    user_with(books, 50)
    assert [books.reserve("user:7", {"usd": 5}).granted for _ in range(11)] == [True] * 10 + [False]
    refused = books.reserve("user:7", {"usd": 5})
    assert facts(refused.reason, refused.limit_name, refused.spent, refused.reserved) == ("held", "cap", 0, 50)
    assert refused.retry_after_s == 1


def test_a_settled_budget_is_exhausted_and_never_names_a_wait(books: Ledger) -> None:
    user_with(books, 50)
    books.reserve("user:7", {"usd": 50}, id=ONE)
    books.settle(ONE, {"usd": 48})
    refused = books.reserve("user:7", {"usd": 3})
    assert facts(refused.reason, refused.retry_after_s) == ("exhausted", None)
    assert books.reserve("user:7", {"usd": 2}).granted


def test_300_held_and_40_rows_returns_260(books: Ledger) -> None:
    books.create_subject("key:42")
    books.reserve("key:42", {"cost": 300}, id=ONE)
    books.settle(ONE, {"cost": 40})
    assert row(books, "key:42", "bucket").level == 999_960
    assert row(books, "key:42", "hourly").spent == 40


def test_100_held_and_160_settled_takes_60_more(books: Ledger) -> None:
    books.create_subject("key:42")
    books.reserve("key:42", {"cost": 100}, id=ONE)
    assert books.settle(ONE, {"cost": 160}).overage == {"cost": 60}
    assert row(books, "key:42", "bucket").level == 999_840
    assert row(books, "key:42", "hourly").spent == 160


def test_with_300_left_one_of_two_calls_of_200_passes(books: Ledger) -> None:
    user_with(books, 300)
    assert [books.reserve("user:7", {"usd": 200}).granted for _ in range(2)] == [True, False]


def test_tenths_fill_a_cap_exactly(books: Ledger) -> None:
    user_with(books, Decimal("0.3"))
    for number in range(3):
        books.reserve("user:7", {"usd": "0.1"}, id=UUID(int=number))
        books.settle(UUID(int=number))
    assert row(books, "user:7", "cap").spent == Fraction(3, 10)
    assert books.reserve("user:7", {"usd": "0.000000000001"}).reason == "exhausted"


def test_a_refusal_charges_nobody(books: Ledger) -> None:
    user_with(books, 100)
    books.create_subject("key:42", "user:7")
    books.set_limit("key:42", "cap", "usd", "budget", 1_000)
    before = books.balance("key:42")
    assert books.reserve("key:42", {"usd": 101}).limit_subject == "user:7"
    assert books.balance("key:42") == before


def test_a_unit_without_limit_is_an_error_and_an_unlimited_one_is_counted(books: Ledger) -> None:
    user_with(books, None)
    assert books.reserve("user:7", {"usd": 10**17}).granted
    assert error_of(lambda: books.reserve("user:7", {"tokens": 1})) == "no_limit"
    assert error_of(lambda: books.reserve("user:7", {"eur": 1})) == "unknown_unit"
    assert error_of(lambda: books.reserve("user:8", {"usd": 1})) == "unknown_subject"


def test_headroom_leaves_the_last_fifth(books: Ledger) -> None:
    user_with(books, 100)
    assert books.reserve("user:7", {"usd": 80}, headroom=Decimal("0.2")).granted
    assert books.reserve("user:7", {"usd": 1}, headroom=Decimal("0.2")).reason == "held"
    assert books.reserve("user:7", {"usd": 81}, headroom=Decimal("0.2")).reason == "too_large"
    assert books.reserve("user:7", {"usd": 20}).granted


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "bucket", "refill", "hourly"),
    [
        ("basic", 1_000_000, 3_000, 2_000_000),
        ("extended", 5_000_000, 15_000, 10_000_000),
        ("bulk", 20_000_000, 60_000, 40_000_000),
    ],
)
def test_the_built_in_tiers(books: Ledger, tier: str, bucket: int, refill: int, hourly: int) -> None:
    books.create_subject("key:42", rate_tier=tier)
    assert row(books, "key:42", "bucket").capacity == bucket
    assert row(books, "key:42", "hourly").capacity == hourly
    books.reserve("key:42", {"cost": bucket})
    refused = books.reserve("key:42", {"cost": refill})
    assert facts(refused.reason, refused.retry_after_s) == ("rate", 1)
    books.now += timedelta(seconds=1)
    assert books.reserve("key:42", {"cost": refill}).granted


def test_a_tier_change_keeps_usage_and_cuts_the_level(books: Ledger) -> None:
    books.create_subject("key:42", rate_tier="bulk")
    books.reserve("key:42", {"cost": 1_500_000})
    books.set_rate_tier("key:42", "basic")
    assert row(books, "key:42", "bucket").level == 1_000_000
    assert row(books, "key:42", "hourly").reserved == 1_500_000
    assert books.reserve("key:42", {"cost": 500_001}).reason == "held"
    assert books.reserve("key:42", {"cost": 500_000}).granted


def test_oauth_is_basic_and_others_have_no_tier(books: Ledger) -> None:
    for name in ("oauth:connection-a", "user:7"):
        books.create_subject(name)
    assert [r.limit_name for r in books.balance("oauth:connection-a")] == ["bucket", "hourly"]
    assert books.balance("user:7") == []
    assert error_of(lambda: books.set_rate_tier("oauth:connection-a", "bulk")) == "invalid_argument"


def test_a_retired_tier_acts_as_basic(books: Ledger) -> None:
    books.create_subject("key:42")
    books.set_tier_limit("gold", "bucket", "cost", "bucket", 7, 1, tenant="default")
    books.set_rate_tier("key:42", "gold")
    assert [facts(r.limit_name, r.capacity) for r in books.balance("key:42")] == [("bucket", 7)]
    books.set_tier_limit("basic", "hourly", "cost", "budget", 9, period="1 hour", tenant="default")
    books.retire_tier("gold", "default")
    assert row(books, "key:42", "hourly").capacity == 9
    assert row(books, "key:42", "bucket").capacity == 1_000_000


def test_own_limits_go_before_the_tier_and_the_tier_before_the_kind(books: Ledger) -> None:
    books.create_subject("key:42")
    books.set_limit("key:*", "hourly", "cost", "budget", 5, period="1 hour")
    assert row(books, "key:42", "hourly").capacity == 2_000_000
    books.set_limit("key:42", "hourly", "cost", "budget", 6, period="1 hour")
    assert row(books, "key:42", "hourly").capacity == 6
    books.remove_limit("key:42", "hourly")
    assert row(books, "key:42", "hourly").capacity == 2_000_000
    assert error_of(lambda: books.set_limit("key:42", "hourly", "cost", "budget", 6, period="day")) == "limit_differs"


# --- windows and buckets ----------------------------------------------------------------------------------------------


def test_a_hold_remembers_its_window(books: Ledger) -> None:
    user_with(books, 5, period="1 hour")
    books.reserve("user:7", {"usd": 4}, ttl=2 * HOUR, id=ONE)
    books.now += HOUR
    assert row(books, "user:7", "cap").window is None
    books.reserve("user:7", {"usd": 2}, id=TWO)
    books.settle(ONE, {"usd": 5})
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (0, 2)
    books.settle(TWO, {"usd": 1})
    assert row(books, "user:7", "cap").spent == 1


def test_the_hour_opens_at_the_first_use_and_a_refusal_opens_none(books: Ledger) -> None:
    user_with(books, 5, period="1 hour")
    books.now += timedelta(minutes=17)
    assert books.reserve("user:7", {"usd": 6}).reason == "too_large"
    assert row(books, "user:7", "cap").window is None
    books.reserve("user:7", {"usd": 5}, id=ONE)
    books.settle(ONE)
    books.now += timedelta(minutes=50)
    refused = books.reserve("user:7", {"usd": 1})
    assert facts(refused.reason, refused.retry_after_s) == ("exhausted", 600)
    books.now += timedelta(minutes=10)
    assert books.reserve("user:7", {"usd": 5}).granted


def test_a_clock_that_steps_back_reopens_nothing(books: Ledger) -> None:
    user_with(books, 5, period="day")
    books.record("user:7", {"usd": 5})
    books.now -= 2 * timedelta(days=1)
    assert books.reserve("user:7", {"usd": 1}).reason == "exhausted"


def test_refunds_stop_at_the_capacity_and_extra_charges_at_zero(books: Ledger) -> None:
    books.create_subject("user:7")
    books.set_limit("user:7", "rate", "cost", "bucket", 10, 1)
    books.set_limit("user:7", "total", "cost", "budget", 100, period="1 hour")
    books.reserve("user:7", {"cost": 3}, id=ONE)
    books.now += MINUTE
    books.settle(ONE, {"cost": 0})
    assert row(books, "user:7", "rate").level == 10
    books.reserve("user:7", {"cost": 5}, id=TWO)
    books.settle(TWO, {"cost": 150})
    assert facts(row(books, "user:7", "rate").level, row(books, "user:7", "total").spent) == (0, 150)
    refused = books.reserve("user:7", {"cost": 1})
    assert [v.reason for v in refused.violations] == ["rate", "exhausted"]
    assert facts(refused.reason, refused.retry_after_s) == ("exhausted", 3540)


def test_a_clock_that_steps_back_refills_nothing(books: Ledger) -> None:
    books.create_subject("user:7")
    books.set_limit("user:7", "rate", "cost", "bucket", 10, 1)
    books.reserve("user:7", {"cost": 10})
    books.now -= timedelta(seconds=11)
    refused = books.reserve("user:7", {"cost": 1})
    assert facts(refused.spent, refused.retry_after_s) == (None, 12)
    books.now += timedelta(seconds=12)
    assert books.reserve("user:7", {"cost": 1}).granted


def test_waiting_exactly_as_long_as_told_succeeds(books: Ledger) -> None:
    books.create_subject("user:7")
    books.set_limit("user:7", "rate", "cost", "bucket", 10, "0.7")
    books.reserve("user:7", {"cost": 10})
    refused = books.reserve("user:7", {"cost": 5}, headroom=Decimal("0.2"))
    assert refused.retry_after_s == 10
    books.now += timedelta(seconds=10) - timedelta(microseconds=1)
    assert not books.reserve("user:7", {"cost": 5}, headroom=Decimal("0.2")).granted
    books.now += timedelta(microseconds=1)
    assert books.reserve("user:7", {"cost": 5}, headroom=Decimal("0.2")).granted


def test_slots_are_taken_while_held_and_a_refusal_takes_no_request(books: Ledger) -> None:
    books.create_subject("user:7")
    books.set_limit("user:7", "slots", "concurrency", "concurrency", 1)
    books.set_limit("user:7", "rpm", "requests", "bucket", 2, 0)
    books.set_limit("user:7", "cap", "usd", "budget", 10)
    books.reserve("user:7", {"usd": 1}, id=ONE)
    refused = books.reserve("user:7", {"usd": 1})
    assert facts(refused.reason, refused.retry_after_s, row(books, "user:7", "rpm").level) == ("concurrency", 1, 1)
    books.settle(ONE, {"usd": 1, "concurrency": 7})
    assert row(books, "user:7", "slots").available == 1
    assert books.reserve("user:7", {"usd": 1, "requests": 0}).granted
    assert row(books, "user:7", "rpm").level == 1


# --- states -----------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Ledger], object]] = {
    "same": lambda b: (a := b.reserve("user:7", {"usd": 4}, id=ONE)).reason or (a.granted, a.replayed),
    "other": lambda b: b.reserve("user:7", {"usd": 5}, id=ONE),
    "settle": lambda b: (a := b.settle(ONE, {"usd": 3})).state + ("+late" * a.late) + ("+replayed" * a.replayed),
    "settle more": lambda b: b.settle(ONE, {"usd": 4}).state,
    "partly": lambda b: b.settle(ONE, {"usd": 3}, final=False).state,
    "release": lambda b: b.release(ONE),
    "extend": lambda b: b.extend(ONE, HOUR) == b.now + HOUR,
    "adjust": lambda b: b.adjust(ONE, {"usd": 5}).granted,
}

STATE_TABLE: dict[str, list[object]] = {
    "held": [(True, True), "id_conflict", "settled", "settled", "held", ("released", False), True, True],
    "settled": ["closed", "id_conflict", "settled+replayed", *["already_settled"] * 5],
    "released": [
        "closed",
        "id_conflict",
        *["already_released"] * 3,
        ("released", True),
        *["already_released"] * 2,
    ],
    "expired": ["closed", "id_conflict", "settled+late", "settled", "expired", ("expired", True), *["expired"] * 2],
}


@pytest.mark.parametrize("swept", [True, False])
@pytest.mark.parametrize(
    ("state", "operation", "expected"),
    [(s, o, e) for s, answers in STATE_TABLE.items() for o, e in zip(OPERATIONS, answers, strict=True)],
)
def test_the_state_table(books: Ledger, state: str, operation: str, expected: object, swept: bool) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 4}, id=ONE)
    if state == "settled":
        books.settle(ONE, {"usd": 3})
    elif state == "released":
        books.release(ONE)
    elif state == "expired":
        books.now += HOUR
        if swept:
            assert books.reap() == (1, 0)
    try:
        answer = OPERATIONS[operation](books)
    except ModelError as error:
        answer = error.name
    assert answer == expected


def test_nothing_can_be_done_to_an_unknown_id(books: Ledger) -> None:
    for operation in ("settle", "partly", "release", "extend", "adjust"):
        assert error_of(lambda: OPERATIONS[operation](books)) == "unknown_reservation"  # noqa: B023 - called at once


def test_an_unknown_outcome_books_the_hold_and_is_corrected_once(books: Ledger) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 4}, id=ONE)
    books.settle(ONE, outcome="unknown")
    assert row(books, "user:7", "cap").spent == 4
    assert books.settle(ONE, outcome="unknown").replayed
    assert books.settle(ONE, {"usd": 6}).overage == {"usd": 2}
    assert row(books, "user:7", "cap").spent == 6
    assert books.settle(ONE, {"usd": 6}).replayed
    assert error_of(lambda: books.settle(ONE, {"usd": 5})) == "already_settled"


def test_partial_settles_are_totals(books: Ledger) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 6}, id=ONE)
    books.settle(ONE, {"usd": 2}, final=False)
    assert books.settle(ONE, {"usd": 2}, final=False).replayed
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (2, 4)
    assert error_of(lambda: books.settle(ONE, {"usd": 1})) == "total_decreased"
    assert error_of(lambda: books.adjust(ONE, {"usd": 1})) == "total_decreased"
    assert books.release(ONE) == ("released", False)
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (2, 0)


def test_what_adjust_adds_is_taken_in_the_present_window(books: Ledger) -> None:
    user_with(books, 10, period="1 hour")
    books.reserve("user:7", {"usd": 4}, ttl=3 * HOUR, id=ONE)
    books.settle(ONE, {"usd": 7}, final=False)
    books.now += HOUR
    assert books.adjust(ONE, {"usd": 18}).reason == "too_large"
    assert books.adjust(ONE, {"usd": 9}).granted
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (0, 2)
    books.settle(ONE, {"usd": 12})
    assert row(books, "user:7", "cap").spent == 5


def test_a_frozen_ancestor_refuses_new_holds_only(books: Ledger) -> None:
    user_with(books, 10)
    books.create_subject("key:42", "user:7")
    books.reserve("key:42", {"usd": 4}, id=ONE)
    books.freeze("user:7", "runaway")
    refused = books.reserve("key:42", {"usd": 1})
    assert facts(refused.reason, refused.limit_subject, refused.limit_name) == ("frozen", "user:7", None)
    assert books.adjust(ONE, {"usd": 5}).reason == "frozen"
    assert books.adjust(ONE, {"usd": 3}).granted
    assert books.settle(ONE).state == "settled"


# --- expiry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swept", [True, False])
def test_nobody_waits_for_an_overdue_hold(books: Ledger, swept: bool) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 10}, ttl=MINUTE)
    books.now += MINUTE
    if swept:
        books.reap()
    assert row(books, "user:7", "cap").available == 10
    assert books.reserve("user:7", {"usd": 10}).granted


@pytest.mark.parametrize("swept", [True, False])
def test_an_overdue_hold_may_count_as_spent(books: Ledger, swept: bool) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 8}, ttl=MINUTE, on_expiry="charge", id=ONE)
    books.now += MINUTE
    if swept:
        assert books.reap() == (0, 1)
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (8, 0)
    assert books.reserve("user:7", {"usd": 3}).reason == "exhausted"
    assert books.settle(ONE, {"usd": 5}).late
    assert row(books, "user:7", "cap").spent == 5


def test_a_late_settle_books_in_full_and_reports_the_excess(books: Ledger) -> None:
    user_with(books, 10)
    books.reserve("user:7", {"usd": 4}, ttl=MINUTE, id=ONE)
    books.now += MINUTE
    books.reserve("user:7", {"usd": 10}, id=TWO)
    answer = books.settle(ONE, {"usd": 7})
    assert facts(answer.state, answer.late, answer.overage) == ("settled", True, {"usd": 3})
    assert facts(row(books, "user:7", "cap").spent, row(books, "user:7", "cap").reserved) == (7, 10)


def test_the_reaper_takes_the_oldest_first_and_only_so_many(books: Ledger) -> None:
    user_with(books, 10)
    for number, ttl in ((1, 3), (2, 1), (3, 2)):
        books.reserve("user:7", {"usd": 1}, ttl=ttl * MINUTE, id=UUID(int=number))
    books.now += HOUR
    assert books.reap(2) == (2, 0)
    assert [hold.state for hold in books.tenants["default"].holds.values()] == ["held", "expired", "expired"]


# --- record, credit, subjects -----------------------------------------------------------------------------------------


def test_record_is_never_refused_and_credit_takes_back_what_was_booked(books: Ledger) -> None:
    user_with(books, 10)
    assert not books.record("user:7", {"usd": 15}, id=TWO)
    assert books.record("user:7", {"usd": 15}, id=TWO)
    assert error_of(lambda: books.record("user:7", {"usd": 16}, id=TWO)) == "id_conflict"
    assert row(books, "user:7", "cap").spent == 15
    books.set_limit("user:7", "cap", "usd", "budget", 100)
    books.reserve("user:7", {"usd": 4}, id=ONE)
    books.settle(ONE)
    assert not books.credit(ONE, {"usd": 3}, id=THREE)
    assert books.credit(ONE, {"usd": 3}, id=THREE)
    assert row(books, "user:7", "cap").spent == 16
    assert error_of(lambda: books.credit(ONE, {"usd": 2})) == "amount_out_of_range"


def test_lineages_have_at_most_eight_subjects_and_no_cycle(books: Ledger) -> None:
    for depth in range(8):
        books.create_subject(f"org:{depth}", f"org:{depth - 1}" if depth else None)
    assert error_of(lambda: books.create_subject("org:8", "org:7")) == "too_deep"
    assert error_of(lambda: books.move_subject("org:0", "org:7")) == "cycle"
    books.create_subject("org:x")
    assert error_of(lambda: books.move_subject("org:x", "org:7")) == "too_deep"
    assert error_of(lambda: books.ensure_subject("org:7", "org:0")) == "parent_differs"


def test_subjects_with_open_holds_stay_where_they_are(books: Ledger) -> None:
    user_with(books, 10)
    books.create_subject("key:42", "user:7")
    books.reserve("key:42", {"usd": 1}, ttl=MINUTE)
    assert error_of(lambda: books.retire_subject("user:7")) == "has_open_holds"
    assert error_of(lambda: books.move_subject("key:42", None)) == "has_open_holds"
    books.now += MINUTE
    books.retire_subject("user:7")
    assert error_of(lambda: books.reserve("user:7", {"usd": 1})) == "unknown_subject"
    assert error_of(lambda: books.create_subject("user:7")) == "already_exists"


@pytest.mark.parametrize(
    ("costs", "name"),
    [
        (None, "invalid_costs"),
        ({}, "invalid_costs"),
        ({"usd": -1}, "invalid_amount"),
        ({"usd": True}, "invalid_amount"),
        ({"usd": "-1"}, "invalid_amount"),
        ({"usd": "\uff11\uff12"}, "invalid_amount"),
        ({"usd": "1e3"}, "invalid_amount"),
        ({"usd": Decimal("NaN")}, "invalid_amount"),
        ({"usd": Decimal("0.0000000000001")}, "invalid_amount"),
        ({"usd": 10**18}, "amount_out_of_range"),
        ({"usd": Decimal("1.0000000000000000")}, None),
        ({"usd": Decimal("-0")}, None),
    ],
)
def test_costs_are_exact_or_refused(books: Ledger, costs: dict[str, object] | None, name: str | None) -> None:
    user_with(books, 10)
    assert error_of(lambda: books.reserve("user:7", costs)) == name


@pytest.mark.parametrize("name", ["", "user", "user:", "User:1", "user:*", " user:1", "user:a\u200bb", "user:e\u0301"])
def test_names_are_refused_never_altered(books: Ledger, name: str) -> None:
    assert error_of(lambda: books.create_subject(name)) == "invalid_name"
