"""The decisions of leased budgets, without a database: a clock that the test holds, and answers that it makes up."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quota.calls import BalanceRow, Released, Reservation, Standing
from quota.config import ConfigError
from quota.errors import (
    AlreadyReleased,
    AlreadySettled,
    Expired,
    IdConflict,
    InvalidAmount,
    TotalDecreased,
    UnitNotHeld,
)
from quota.ids import uuid7
from quota.lease.escrow import Escrow, Need, Verdict
from quota.lease.lease import Lease, earliest_end, fitting
from quota.lease.local import identity
from quota.lease.terms import CAUTION, Terms

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
TTL_S = 30.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def terms(size: dict[str, Any] | None = None, **named: Any) -> Terms:
    given: dict[str, Any] = {
        "at_least": None, "most": None, "ttl": timedelta(seconds=TTL_S), "idle": timedelta(seconds=10),
        "post_every": timedelta(seconds=1), "also": (), "headroom": 0, "on_expiry": "charge", "details": None,
    }  # fmt: skip
    return Terms.of("user:1", size or {"usd": 10}, **{**given, **named})


def standing(unit: str = "usd", kind: str = "budget", **named: Any) -> Standing:
    given: dict[str, Any] = {
        "subject": "user:1", "limit_name": "cap", "capacity": Decimal(100), "spent": Decimal(0), "reserved": Decimal(0),
        "level": None, "available": Decimal(100),
    }  # fmt: skip
    return Standing(unit=unit, kind=kind, **{**given, **named})


def granted(*standings: Standing, at: datetime = NOON) -> Reservation:
    return Reservation(
        granted=True,
        reservation=uuid7(),
        state="held",
        expires_at=at + timedelta(seconds=TTL_S),
        remaining=standings or (standing(),),
    )


def opened(escrow: Escrow, *standings: Standing) -> Lease:
    lease = Lease(uuid7(), escrow.terms, escrow.terms.size, granted(*standings), escrow.now_s())
    escrow.opened(lease, 0.1)
    return lease


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def escrow(clock: Clock) -> Escrow:
    return Escrow(terms(), clock)


def key(answer: Reservation | Verdict | None) -> int:
    assert isinstance(answer, Reservation)
    assert answer.granted
    assert answer.reservation is not None
    return answer.reservation.int


def usd(amount: Any) -> dict[str, Decimal]:
    return {"usd": Decimal(amount)}


# -- what is granted --------------------------------------------------------------------------------------------------


def test_nothing_without_a_lease(escrow: Escrow) -> None:
    assert escrow.take(usd(1)) is None
    assert escrow.reserve(usd(1), 600, 1) is Verdict.LEASE


def test_what_is_free_is_granted_exactly_to_the_last_bit(escrow: Escrow) -> None:
    lease = opened(escrow)
    assert key(escrow.take({"usd": "9.999999999999"}))
    assert escrow.take({"usd": "0.000000000002"}) is None
    assert key(escrow.take({"usd": Decimal("0.000000000001")}))
    assert lease.free == usd(0)
    assert key(escrow.take({"usd": 0})), "0 fits anywhere"


def test_nothing_is_granted_once_the_lease_may_have_expired(escrow: Escrow, clock: Clock) -> None:
    opened(escrow)
    clock.s += TTL_S * CAUTION - 0.001
    assert key(escrow.take(usd(1)))
    clock.s += 0.001
    assert escrow.take(usd(1)) is None
    assert escrow.reserve(usd(1), 600, 1) is Verdict.LEASE


def test_an_extension_counts_from_when_it_was_asked_for(escrow: Escrow, clock: Clock) -> None:
    lease = opened(escrow)
    clock.s += 10
    sent_s = clock.s
    clock.s += 5  # the answer took its time; the database's clock has another opinion of the date
    escrow.anchored(lease, sent_s, NOON + timedelta(days=3, seconds=TTL_S))
    assert lease.until == sent_s + TTL_S * CAUTION


def test_a_lease_ends_with_the_first_of_its_windows(escrow: Escrow, clock: Clock) -> None:
    lease = Lease(uuid7(), escrow.terms, escrow.terms.size, granted(), clock.s)
    lease.ends(NOON + timedelta(seconds=4), clock.s)
    escrow.opened(lease, 0.1)
    assert lease.until == clock.s + 4 * CAUTION
    clock.s += 4 * CAUTION
    assert escrow.take(usd(1)) is None
    assert escrow.current() is None


def row(**named: Any) -> BalanceRow:
    given: dict[str, Any] = {
        "subject": "user:1", "limit_name": "cap", "unit": "usd", "kind": "budget", "capacity": Decimal(100),
        "spent": Decimal(0), "reserved": Decimal(10), "level": None, "available": Decimal(90),
        "window_start": NOON, "window_end": NOON + timedelta(seconds=9), "full_after_s": None,
    }  # fmt: skip
    return BalanceRow(**{**given, **named})


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (row(), NOON + timedelta(seconds=9)),
        (row(window_start=None, window_end=None), None),  # a lifetime budget has the lease in it
        (row(window_start=None, window_end=None, reserved=Decimal(0)), NOON),  # a window that has turned has not
        (row(window_start=NOON + timedelta(seconds=1)), NOON),  # the next one is open already
    ],
)
def test_the_window_that_a_lease_stands_in(found: BalanceRow, end: datetime | None) -> None:
    answer = granted()
    lease = Lease(uuid7(), terms(), terms().size, answer, 1000.0)
    assert earliest_end(lease, answer, [found]) == end


def test_a_lease_that_is_over_when_it_comes_sends_its_calls_to_the_database(escrow: Escrow, clock: Clock) -> None:
    lease = Lease(uuid7(), escrow.terms, escrow.terms.size, granted(), clock.s)
    lease.ends(NOON, clock.s)
    escrow.opened(lease, 0.1)
    assert escrow.reserve(usd(1), 600, 1) is Verdict.DATABASE
    assert escrow.final_totals(lease) == usd(0), "and is given back"
    clock.s += 0.1
    assert escrow.reserve(usd(1), 600, 2) is Verdict.LEASE
    assert escrow.reserve(usd(1), 600, 1) is Verdict.DATABASE, "an id stays where it was asked for"


def test_requests_and_slots_count_by_themselves(clock: Clock) -> None:
    escrow = Escrow(terms({"usd": 10, "requests": 3, "concurrency": 2}), clock)
    lease = opened(escrow, standing(), standing("requests"), standing("concurrency", "concurrency"))
    first, second = key(escrow.take(usd(1))), key(escrow.take(usd(1)))
    assert escrow.take(usd(1)) is None, "no slot"
    escrow.close(first, None)
    assert lease.free == {"usd": Decimal(8), "requests": Decimal(1), "concurrency": Decimal(1)}
    escrow.settle(second, {"requests": Decimal(0), "concurrency": Decimal(1)}, True, "ok")
    assert lease.booked() == {"usd": Decimal(2), "requests": Decimal(1)}, "slots are never booked"
    assert lease.free["concurrency"] == 2
    with pytest.raises(InvalidAmount, match="whole number"):
        escrow.reserve({"usd": Decimal(1), "concurrency": Decimal("0.5")}, 600, 1)


def test_only_the_database_knows_what_a_unit_left_out_means(clock: Clock) -> None:
    escrow = Escrow(terms({"usd": 10, "tokens": 100}), clock)
    opened(escrow, standing(), standing("tokens"))
    assert escrow.take(usd(1)) is None
    assert escrow.reserve(usd(1), 600, 1) is Verdict.DATABASE
    assert escrow.reserve({"usd": Decimal(1), "euro": Decimal(1)}, 600, 2) is Verdict.DATABASE
    both = {"usd": Decimal(1), "tokens": Decimal(0)}
    assert key(escrow.reserve({**both, "requests": Decimal(5)}, 600, 3)), "no limit counts requests here"


def test_more_than_the_terms_allow_is_the_databases(escrow: Escrow) -> None:
    opened(escrow)
    assert escrow.reserve(usd(80), 600, 1) is Verdict.LEASE
    assert escrow.reserve(usd("80.01"), 600, 2) is Verdict.DATABASE


@pytest.mark.parametrize("amount", ["NaN", "-1", "0.0000000000001", "1e18", "Infinity", "sNaN"])
def test_amounts_that_are_none_are_left_to_be_refused(escrow: Escrow, amount: str) -> None:
    lease = opened(escrow)
    assert escrow.take(usd(amount)) is None
    open_ = key(escrow.take(usd(1)))
    assert escrow.close(open_, usd(amount)) is None
    assert lease.free == usd(9)


def test_a_context_of_few_digits_rounds_nothing(escrow: Escrow) -> None:
    lease = opened(escrow)
    with localcontext(prec=3):
        assert escrow.take(usd("1.23456789")) is None
        open_ = key(escrow.reserve(usd("1.23456789"), 600, 1))
        assert escrow.close(open_, usd("1.11111111")) is None
        escrow.settle(open_, usd("1.11111111"), True, "ok")
    assert lease.used == usd("1.11111111")
    assert lease.free == usd("8.88888889")


def test_sums_have_more_digits_than_amounts(clock: Clock) -> None:
    escrow = Escrow(terms({"usd": 10**10}), clock)
    lease = opened(escrow)
    open_ = key(escrow.take(usd("0.000000000003")))
    with localcontext(prec=16):
        assert escrow.take(usd("0.000000000001")) is None
        assert escrow.close(open_, usd("0.000000000001")) is None
        escrow.settle(open_, usd("0.000000000001"), True, "ok")
        key(escrow.reserve(usd("0.000000000001"), 600, 1))
    assert lease.used == usd("0.000000000001")
    assert lease.free == usd("9999999999.999999999998")


# -- closing ----------------------------------------------------------------------------------------------------------


def test_the_rest_returns_and_a_repeated_close_is_a_replay(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    assert escrow.close(open_, usd(1))
    assert (lease.used, lease.free) == (usd(1), usd(9))
    assert escrow.close(open_, usd(1)) is None
    again = escrow.settle(open_, usd(1), True, "ok")
    assert again is not None
    assert again[0].replayed
    with pytest.raises(AlreadySettled):
        escrow.settle(open_, usd(2), True, "ok")
    with pytest.raises(AlreadySettled):
        escrow.release(open_)
    with pytest.raises(AlreadySettled):
        escrow.adjust(open_, usd(2))
    closed = escrow.reserve(usd(4), 600, open_)
    assert isinstance(closed, Reservation)
    assert (closed.granted, closed.reason, closed.state) == (False, "closed", "settled")
    assert (lease.used, lease.free) == (usd(1), usd(9))


def test_an_overage_is_booked_in_full_and_asked_for_afterwards(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    assert escrow.close(open_, usd(13)) is None
    found = escrow.settle(open_, usd(13), True, "ok")
    assert found is not None
    assert found[0].overage == usd(9)
    assert (lease.used, lease.free) == (usd(13), usd(-3))
    assert escrow.take(usd(1)) is None
    assert escrow.uncovered(lease) == usd(13)
    assert escrow.to_post(lease) == usd(13)


def test_partial_totals_stay_booked(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    escrow.settle(open_, usd(1), False, "ok")
    assert (lease.used, lease.free) == (usd(1), usd(6))
    assert escrow.close(open_, usd(3)) is None
    with pytest.raises(TotalDecreased):
        escrow.settle(open_, usd("0.5"), True, "ok")
    again = escrow.settle(open_, usd(1), False, "ok")
    assert again is not None
    assert again[0].replayed
    assert escrow.release(open_)
    assert (lease.used, lease.free) == (usd(1), usd(9))
    assert escrow.release(open_) == Released(state="released", replayed=True)
    with pytest.raises(AlreadyReleased):
        escrow.settle(open_, usd(1), True, "ok")


def test_an_unknown_outcome_books_everything_and_is_corrected_once(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    escrow.settle(open_, None, True, "unknown")
    assert lease.used == usd(4)
    escrow.settle(open_, usd(1), True, "ok")
    assert (lease.used, lease.free) == (usd(1), usd(9))
    with pytest.raises(AlreadySettled):
        escrow.settle(open_, usd(2), True, "ok")


def test_a_correction_never_takes_back_what_was_posted(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    escrow.settle(open_, None, True, "unknown")
    assert escrow.to_post(lease) == usd(4)
    escrow.settle(open_, usd(1), True, "ok")
    assert lease.used == usd(4)


@pytest.mark.parametrize(("on_expiry", "used"), [("charge", 4), ("release", 0)])
def test_a_call_whose_time_has_passed(clock: Clock, on_expiry: str, used: int) -> None:
    escrow = Escrow(terms(on_expiry=on_expiry, ttl=timedelta(seconds=3000)), clock)
    lease = opened(escrow)
    open_ = key(escrow.reserve(usd(4), 5, 7))
    clock.s += 5
    assert escrow.close(open_, usd(1)) is None, "expired, swept or not"
    escrow.leases()
    assert lease.used == usd(used)
    with pytest.raises(Expired):
        escrow.settle(open_, usd(1), False, "ok")
    with pytest.raises(Expired):
        escrow.extend(open_, 60)
    late = escrow.settle(open_, usd(1), True, "ok")
    assert late is not None
    assert late[0].late
    assert (lease.used, lease.free) == (usd(1), usd(9))


def test_what_comes_after_the_lease_was_closed_is_to_be_recorded(escrow: Escrow, clock: Clock) -> None:
    lease = opened(escrow)
    open_ = key(escrow.reserve(usd(4), 5, 7))
    clock.s += 5
    escrow.leases()
    escrow.retire(lease)
    assert escrow.final_totals(lease) == usd(4)
    for _ in range(2):  # until it was recorded
        late = escrow.settle(open_, usd(6), True, "ok")
        assert late is not None
        assert late[1] == usd(2)
    assert escrow.final_totals(lease) == usd(4), "final totals are final"
    escrow.recorded(open_)
    late = escrow.settle(open_, usd(6), True, "ok")
    assert late is not None
    assert not late[1]


def test_adjust_takes_from_the_lease_or_says_what_it_needs(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(4)))
    assert isinstance(escrow.adjust(open_, usd(6)), Reservation)
    assert lease.free == usd(4)
    need = escrow.adjust(open_, usd(11))
    assert need == Need(lease, usd(5))
    assert isinstance(escrow.adjust(open_, usd(1)), Reservation)
    assert lease.free == usd(9)
    with pytest.raises(UnitNotHeld):
        escrow.adjust(open_, {"tokens": Decimal(1)})


def test_the_same_id_is_the_same_call(escrow: Escrow) -> None:
    lease = opened(escrow)
    assert key(escrow.reserve(usd(4), 600, 7))
    again = escrow.reserve(usd(4), 600, 7)
    assert isinstance(again, Reservation)
    assert again.replayed
    assert lease.free == usd(6)
    with pytest.raises(IdConflict):
        escrow.reserve(usd(5), 600, 7)


# -- what is returned -------------------------------------------------------------------------------------------------


def test_what_is_idle_returns(escrow: Escrow, clock: Clock) -> None:
    lease = opened(escrow)
    escrow.grown(lease, usd(70))
    open_ = key(escrow.take(usd(5)))
    assert escrow.to_return(lease) is None
    clock.s += 10
    assert escrow.to_return(lease) == usd(15), "in use: it keeps its size"
    clock.s += 10
    assert escrow.to_return(lease) == usd(5), "idle: only what is open"
    escrow.close(open_, usd(2))
    clock.s += 10
    assert escrow.to_return(lease) is None
    assert escrow.final_totals(lease) == usd(2)
    assert escrow.current() is None


def test_what_calls_have_taken_outlives_their_leases(escrow: Escrow, clock: Clock) -> None:
    """It counts what is used and what is held, from the first lease on; what a call returns counts no more."""
    lease = opened(escrow)
    assert escrow.standing() == (usd(10), usd(0))
    open_, other = key(escrow.take(usd(5))), key(escrow.take(usd(3)))
    assert escrow.standing() == (usd(2), usd(8))
    escrow.close(open_, usd(2))
    assert escrow.standing() == (usd(5), usd(5))
    escrow.retire(lease)
    assert escrow.standing() == ({}, usd(5)), "nothing is free of a lease that has ended"
    escrow.close(other, usd(1))
    assert escrow.final_totals(lease) == usd(3)
    escrow.gone(lease)
    assert escrow.standing() == ({}, usd(3))
    opened(escrow)
    escrow.take(usd(4))
    assert escrow.standing() == (usd(6), usd(7))


def test_so_many_closed_calls_are_remembered_and_no_more(clock: Clock) -> None:
    escrow = Escrow(terms(remember=2), clock)
    opened(escrow)
    keys = [key(escrow.take(usd(1))) for _ in range(5)]
    for one in keys:
        escrow.close(one, usd(1))
    known = [escrow.settle(one, usd(1), True, "ok") is not None for one in keys]
    assert known == [False, False, True, True, True]


def test_a_lowering_in_doubt_seals_the_lease_and_one_that_failed_does_not(escrow: Escrow, clock: Clock) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(5)))
    clock.s += 10
    escrow.to_return(lease)
    clock.s += 10
    assert escrow.to_return(lease) == usd(5)
    assert escrow.take(usd(1)) is None, "given up before it is asked for"
    escrow.kept(lease, usd(10))
    assert key(escrow.take(usd(1)))
    escrow.retire(lease, sealed=True)
    assert escrow.take(usd(1)) is None
    assert escrow.adjust(open_, usd(10)) == Need(lease, usd(5)), "which nobody may fill: it is sealed"
    assert escrow.uncovered(lease) == {}


def test_closed_is_closed(escrow: Escrow) -> None:
    lease = opened(escrow)
    open_ = key(escrow.take(usd(5)))
    escrow.closed()
    with pytest.raises(RuntimeError, match="closed"):
        escrow.reserve(usd(1), 600, 1)
    assert escrow.final_totals(lease) is None
    assert escrow.close(open_, usd(1))
    assert escrow.final_totals(lease) == usd(1)


def test_what_of_a_refusal_fits() -> None:
    refusal = Reservation(
        granted=False,
        reservation=None,
        state=None,
        remaining=(
            standing(available=Decimal(30)),
            standing(available=Decimal("12.1234567890129")),
            standing("requests", "bucket", capacity=Decimal(10), available=Decimal("3.7")),
            standing("tokens", capacity=None, available=None),
        ),
    )
    assert fitting(refusal, Decimal(0)) == {"usd": Decimal("12.123456789012"), "requests": Decimal(3)}
    assert fitting(refusal, Decimal("0.25")) == {"usd": Decimal(0), "requests": Decimal(1)}
    assert fitting(replace(refusal, remaining=()), Decimal(0)) is None


# -- terms and answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "named", "problem"),
    [
        ({"usd": 0}, {}, "leases nothing"),
        ({"usd": 10}, {"most": {"usd": 9}}, "less than size"),
        ({"usd": 10}, {"most": {"eur": 99}}, "no unit of size"),
        ({"usd": 10}, {"at_least": {"eur": 1}}, "no unit of size"),
        ({"usd": 10}, {"ttl": timedelta(0)}, "not more than 0"),
        ({"usd": 10}, {"idle": timedelta(days=2)}, "at most 24 hours"),
        ({"usd": 10}, {"on_expiry": "forget"}, "neither"),
        ({"usd": 10}, {"remember": 0}, "less than 1"),
    ],
)
def test_terms_that_cannot_mean_anything(size: dict[str, Any], named: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        terms(size, **named)


def test_a_grant_reads_like_any_reservation(escrow: Escrow, clock: Clock) -> None:
    opened(escrow)
    answer = escrow.take(usd(4))
    assert answer is not None
    assert answer.raise_if_refused() is answer
    assert isinstance(answer.reservation, UUID)
    assert answer.reservation.version == 7
    assert answer.reservation == identity(answer.reservation.int) == UUID(str(answer.reservation))
    assert (answer.state, answer.reason, answer.violations) == ("held", None, ())
    assert answer.expires_at == NOON + timedelta(seconds=600)
    assert [(s.unit, s.available) for s in answer.remaining] == [("usd", Decimal(6))]
    copy = pickle.loads(pickle.dumps(answer))
    assert type(copy) is Reservation
    assert copy == replace(answer)
    assert "granted=True" in repr(answer)
    with pytest.raises(AttributeError):
        answer.granted = False  # type: ignore[misc]


def test_threads_share_an_escrow(escrow: Escrow) -> None:
    lease = opened(escrow)
    escrow.grown(lease, usd(40))
    won: list[int] = []

    def spend() -> None:
        while (answer := escrow.take(usd("0.01"))) is not None:
            escrow.close(key(answer), None)
            won.append(1)

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 4000
    assert (lease.used, lease.free) == (usd(40), usd(0))


# -- any history ------------------------------------------------------------------------------------------------------

AMOUNTS = st.decimals(min_value=0, max_value=20, places=2)


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order: never more is out than is held, nothing is granted late, totals only grow."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.escrow = Escrow(terms(), self.clock)
        self.open: list[int] = []
        self.dead: list[int] = []
        self.overage = Decimal(0)
        self.posted: dict[UUID, Decimal] = {}
        self.all: list[Lease] = []
        self.lease: Lease | None = None

    @initialize()
    def begin(self) -> None:
        self.open_lease()

    @precondition(lambda self: self.escrow.current() is None)
    @rule()
    def open_lease(self) -> None:
        self.lease = opened(self.escrow)
        self.all.append(self.lease)

    @rule(amount=AMOUNTS, ttl_s=st.sampled_from([3, 600]), fast=st.booleans())
    def reserve(self, amount: Decimal, ttl_s: float, fast: bool) -> None:
        lease = self.escrow.current()
        free = lease.free["usd"] if lease is not None else None
        answer = self.escrow.take(usd(amount)) if fast else self.escrow.reserve(usd(amount), ttl_s, uuid7().int)
        if isinstance(answer, Reservation):
            assert lease is not None
            assert free is not None
            assert self.clock.s < lease.until <= lease.expiry
            assert amount <= free or amount == 0
            self.open.append(key(answer))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), total=AMOUNTS, final=st.booleans())
    def settle(self, data: st.DataObject, total: Decimal, final: bool) -> None:
        chosen = data.draw(st.sampled_from(self.open))
        try:
            if final and self.escrow.close(chosen, usd(total)) is None:
                self.escrow.settle(chosen, usd(total), True, "ok")
            elif not final:
                self.escrow.settle(chosen, usd(total), False, "ok")
        except (TotalDecreased, Expired):
            return
        if final:
            self.open.remove(chosen)
            self.dead.append(chosen)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.open))
        self.escrow.release(chosen)
        self.open.remove(chosen)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), total=AMOUNTS)
    def adjust(self, data: st.DataObject, total: Decimal) -> None:
        try:
            self.escrow.adjust(data.draw(st.sampled_from(self.open)), usd(total))
        except (TotalDecreased, Expired):
            return

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.s += seconds

    @rule(more=AMOUNTS)
    def grow(self, more: Decimal) -> None:
        lease = self.escrow.current()
        if lease is not None:
            self.escrow.grown(lease, {"usd": lease.held["usd"] + more})

    @rule()
    def extend(self) -> None:
        lease = self.escrow.current()
        if lease is not None:
            self.escrow.anchored(lease, self.clock.s, NOON + timedelta(seconds=self.clock.s + TTL_S))

    @rule()
    def tend(self) -> None:
        for lease in self.escrow.leases():
            totals = self.escrow.to_post(lease) if not lease.closing else None
            if totals is not None:
                assert totals["usd"] >= self.posted.get(lease.id, Decimal(0))
                self.posted[lease.id] = totals["usd"]
                self.escrow.posted(lease, totals)
            self.escrow.to_return(lease)
            final = self.escrow.final_totals(lease)
            if final is not None:
                assert final["usd"] >= self.posted.get(lease.id, Decimal(0))
                self.posted[lease.id] = final["usd"]

    @invariant()
    def amounts_add_up(self) -> None:
        for lease in self.all:
            calls = [c for c in self.escrow._open.values() if c.lease is lease]
            out = sum((max(Decimal(0), c.asked["usd"] - c.booked.get("usd", Decimal(0))) for c in calls), Decimal(0))
            assert lease.used["usd"] + out + lease.free["usd"] == lease.held["usd"]
            assert lease.used["usd"] >= 0
            if lease.closing:
                assert not calls
                assert lease.sent["usd"] == self.posted[lease.id]


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
