"""Random histories: one tenant lived through twice, in the engine and in the model, every answer compared.

The rules are drawn so that most steps do something: reservations are picked among the known ones, totals near what is
held, costs near what is left, and the clock often stops exactly where something ends.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from fractions import Fraction
from itertools import count
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.model import engine as real
from tests.model.engine import Answer, Engine, Json
from tests.model.errors import ModelError
from tests.model.ledger import Ledger, ReserveAnswer

TREE = {
    "org:acme": None,
    "user:7": "org:acme",
    "key:42": "user:7",
    "key:43": "user:7",
    "oauth:a": "org:acme",
    "pool:p": None,
    "run:r": "key:42",
}
SUBJECTS = tuple(TREE)
OWNERS = ("org:acme", "user:7", "key:42", "pool:p", "run:r", "user:*", "key:*")
LIMITS: dict[str, dict[str, Any]] = {
    "cap": {"unit": "usd", "kind": "budget"},
    "daily": {"unit": "usd", "kind": "budget", "period": "day", "time_zone": "America/Havana"},
    "monthly": {"unit": "tokens", "kind": "budget", "period": "month", "time_zone": "Asia/Tokyo"},
    "span": {"unit": "tokens", "kind": "budget", "period": "1 hour", "time_zone": "America/New_York"},
    "rate": {"unit": "tokens", "kind": "bucket", "refill_per_s": Decimal("0.37")},
    "trickle": {"unit": "usd", "kind": "bucket", "refill_per_s": Decimal("0.000013000007")},
    "rpm": {"unit": "requests", "kind": "bucket", "refill_per_s": Decimal(0)},
    "calls": {"unit": "requests", "kind": "budget", "period": "week"},
    "slots": {"unit": "concurrency", "kind": "concurrency"},
}
STARTS = (
    datetime(2026, 3, 2, 12, tzinfo=UTC),
    datetime(2026, 11, 1, 3, 59, 30, tzinfo=UTC),
    datetime(2026, 11, 1, 5, 30, tzinfo=UTC),
    datetime(2026, 3, 8, 4, 59, 59, 999_999, tzinfo=UTC),
    datetime(2026, 1, 31, 14, 59, 59, tzinfo=UTC),
)
SPANS = tuple(timedelta(seconds=s) for s in (0.000_001, 0.5, 1, 30, 60, 600, 3_600, 86_400, 2_678_400))
LONGEST_WAIT_S = 400 * 86_400
TICK = timedelta(microseconds=1)
TINY = Decimal("0.000000000001")

amounts = st.one_of(
    st.sampled_from(["1", "2", "3", "0.5", "7.25", "0.000000000001"]),
    st.sampled_from(["0", "1", "2", "5", "4.999999999999"]).map(Decimal),
    st.integers(0, 6),
)
costs = st.fixed_dictionaries(
    {"usd": amounts},
    optional={"tokens": amounts, "requests": st.integers(0, 3), "concurrency": st.integers(0, 3)},
)
other_costs = st.dictionaries(
    st.sampled_from(["usd", "tokens", "cost", "requests", "concurrency"]),
    st.sampled_from([0, 1, 2, Decimal("2.5"), 1_000_001]),
    min_size=1,
)
picks = st.integers(0, 7)
ttls = st.sampled_from([timedelta(seconds=1), timedelta(minutes=10), timedelta(hours=3)])
headrooms = st.sampled_from([Decimal(0), Decimal(0), Decimal("0.2"), Decimal("0.123456")])
policies = st.sampled_from([None, None, "release", "charge"])
subjects = st.sampled_from(SUBJECTS)
below_acme = st.sampled_from(["run:r", "key:42", "key:43", "user:7", "oauth:a", "org:acme"])
limit_names = st.sampled_from(sorted(LIMITS))
capacities = st.sampled_from(["1", "3", "5", "10", "12.5", "20", "7.000000000001", "0"]).map(Decimal)
factors = st.sampled_from([Decimal("0.5"), Decimal(1), Decimal(2), Decimal(0)])

_serial = count()


class Histories(RuleBasedStateMachine):
    """One history in a tenant of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.tenant = f"history-{next(_serial)}"
        self.model = Ledger(STARTS[0])
        self.model.create_tenant(self.tenant)
        engine.call("create_tenant", {"name": self.tenant})
        self.ids = [uuid5(NAMESPACE_OID, f"{self.tenant}/{number}") for number in range(8)]
        self.requests: dict[UUID, dict[str, Any]] = {}

    # --- both sides -----------------------------------------------------------------------------------------------

    def both(
        self,
        function: str,
        arguments: dict[str, Any],
        modelled: Callable[[Answer | None], object],
        read: Callable[[Answer], object],
    ) -> None:
        """Call the engine, then the model with the engine's row (None after an error), and compare."""
        arguments = {"tenant": self.tenant} | arguments
        row: Answer | None = None
        try:
            row = self.engine.call(function, arguments)[0]
            found: object = read(row)
        except ModelError as error:
            found = _judged_together(error.name)
        try:
            expected = modelled(row)
        except ModelError as error:
            expected = _judged_together(error.name)
        assert found == expected, f"{function} {arguments} at {self.model.now}: {real.difference(found, expected)}"

    def admin(self, function: str, **arguments: Any) -> None:
        """An administrative call, whose only answer is whether it was accepted."""
        operation = getattr(self.model, function)
        self.both(function, arguments, lambda _: operation(**arguments, tenant=self.tenant), lambda _: None)

    def set_clock(self, now: datetime) -> None:
        self.model.now = now
        self.engine.set_clock(now)
        # Beyond 20 overdue holds the engine's answers show what is stored, which the model does not.
        if sum(hold.overdue(now) for hold in self.model.tenants[self.tenant].holds.values()) > 20:
            self._reap(1000)

    def some(self, pick: int) -> UUID:
        """A known reservation, the latest first; an unknown id while there is none."""
        known = [hold.id for hold in self.model.tenants[self.tenant].holds.values()][::-1]
        return known[pick % len(known)] if known else self.ids[pick]

    def near(self, known: UUID, factor: Decimal, only: int) -> dict[str, Any] | None:
        """Totals near what a reservation holds: all of its units, or the first few."""
        hold = self.model.tenants[self.tenant].holds.get(known)
        if hold is None:
            return {"usd": 1}
        chosen = sorted(hold.held)[: only or None]
        totals = {unit: _cut(hold.held[unit] * Fraction(factor)) for unit in chosen}
        return {unit: amount // 1 if unit == "concurrency" else amount for unit, amount in totals.items()}

    # --- the world ------------------------------------------------------------------------------------------------

    @initialize(
        start=st.sampled_from(STARTS),
        chosen=st.dictionaries(
            st.tuples(st.sampled_from(OWNERS), limit_names), st.tuples(capacities, policies), min_size=2, max_size=8
        ),
    )
    def begin(self, start: datetime, chosen: dict[tuple[str, str], tuple[Decimal, str | None]]) -> None:
        self.set_clock(start)
        for name, parent in TREE.items():
            self.admin("create_subject", name=name, parent=parent)
        for name in ("cap", "monthly"):
            self.set_limit("org:acme", name, None, "release", False)
        self.set_limit("pool:p", "cap", Decimal(20), "release", False)
        for (owner, name), (capacity, policy) in chosen.items():
            self.set_limit(owner, name, capacity, policy or "release", False)

    def set_limit(self, owner: str, name: str, capacity: Decimal | None, policy: str, required: bool) -> None:
        """One of the limits above; what its kind does not allow is bent so that it is allowed."""
        kind = LIMITS[name]["kind"]
        if kind != "budget":
            capacity = Decimal(1) if capacity is None else capacity
        if kind == "concurrency" and capacity is not None:
            capacity = capacity // 1
        self.admin(
            "set_limit",
            subject=owner,
            name=name,
            capacity=capacity,
            on_expiry=policy,
            required=required,
            **LIMITS[name],
        )

    @rule(by=st.sampled_from(SPANS), back=st.sampled_from([False, False, False, True]))
    def clock_steps(self, by: timedelta, back: bool) -> None:
        self.set_clock(self.model.now - by if back else self.model.now + by)

    @rule(pick=st.integers(0, 20), early=st.booleans())
    def clock_meets_an_end(self, pick: int, early: bool) -> None:
        """Exactly where a hold expires or a window ends, or just before."""
        tenant = self.model.tenants[self.tenant]
        ends = {hold.expires_at for hold in tenant.holds.values() if hold.state == "held"}
        ends |= {account.window.end for account in tenant.accounts.values() if account.window}
        if coming := sorted(end for end in ends if end > self.model.now):
            self.set_clock(coming[pick % len(coming)] - (TICK if early else timedelta(0)))

    # --- reserve --------------------------------------------------------------------------------------------------

    @rule(
        slot=st.one_of(st.none(), st.none(), picks),
        subject=st.one_of(below_acme, below_acme, subjects),
        asked=st.one_of(costs, costs, costs, other_costs),
        ttl=ttls,
        also=st.lists(subjects, max_size=2),
        headroom=headrooms,
        on_expiry=policies,
        patient=st.booleans(),
    )
    def reserve(self, slot: int | None, asked: dict[str, Any], patient: bool, **arguments: Any) -> None:
        arguments["id"] = None if slot is None else self.ids[slot]
        self._reserve(arguments, asked, patient)

    @rule(
        subject=below_acme,
        pick=st.integers(0, 30),
        above=st.sampled_from([0, 0, 0, 1]),
        ttl=ttls,
        patient=st.booleans(),
    )
    def reserve_what_is_left(self, subject: str, pick: int, above: int, ttl: timedelta, patient: bool) -> None:
        """An exact fit of one limit of the lineage, or the smallest step above it."""
        rows = [row for row in self.model.balance(subject, self.tenant) if row.available is not None]
        if not rows:
            return
        row = rows[pick % len(rows)]
        assert row.available is not None
        amount = _cut(row.available) + above * (1 if row.kind == "concurrency" else TINY)
        asked = {"usd": 0} | {row.unit: amount}
        self._reserve({"subject": subject, "ttl": ttl, "id": None}, asked, patient)

    @rule(pick=picks)
    def reserve_again(self, pick: int) -> None:
        """The same request: a replay, a closed one, or another try after a refusal."""
        if self.requests:
            known = list(self.requests)[::-1][pick % len(self.requests)]
            arguments = self.requests[known]
            self._reserve({**arguments["how"], "id": known}, arguments["asked"], False)

    def _reserve(self, arguments: dict[str, Any], asked: dict[str, Any], patient: bool) -> None:
        answers: list[ReserveAnswer] = []

        def modelled(row: Answer | None) -> object:
            assigned = real.reservation_of(row) if row else None
            answer = self.model.reserve(**arguments, costs=asked, tenant=self.tenant, assigned=assigned)
            answers.append(answer)
            return real.model_reserve(answer)

        self.both("reserve", arguments | {"costs": Json.of(asked)}, modelled, real.engine_reserve)
        if not answers:
            return
        answer = answers[0]
        known = answer.reservation or arguments["id"]
        if known is not None and answer.reason != "closed":
            self.requests[known] = {"how": arguments, "asked": asked}
        waiting = {row.reason for row in answer.violations} <= {"rate", "exhausted"}
        wait_s = answer.retry_after_s
        if patient and waiting and not answer.granted and wait_s is not None and wait_s < LONGEST_WAIT_S:
            self._wait_as_told(arguments, asked, wait_s)

    def _wait_as_told(self, arguments: dict[str, Any], asked: dict[str, Any], wait_s: Fraction) -> None:
        """With nobody else active, a refused request fits after exactly that long."""
        ticks = wait_s * 1_000_000
        assert ticks.denominator == 1
        self.set_clock(self.model.now + int(ticks) * TICK)
        self._reserve(arguments, asked, False)
        latest = list(self.model.tenants[self.tenant].holds.values())[-1:]
        assert latest, "waiting exactly as long as told did not help"
        assert latest[0].asked == {unit: Fraction(amount) for unit, amount in asked.items()}

    # --- what becomes of a hold -----------------------------------------------------------------------------------

    @rule(
        pick=picks,
        factor=factors,
        only=st.integers(0, 3),
        other=st.one_of(st.none(), st.none(), other_costs),
    )
    def adjust(self, pick: int, factor: Decimal, only: int, other: dict[str, Any] | None) -> None:
        known = self.some(pick)
        self._adjust(known, other or self.near(known, factor, only))

    @rule(pick=picks, which=st.integers(0, 30), above=st.sampled_from([0, 0, 1]))
    def adjust_to_the_brim(self, pick: int, which: int, above: int) -> None:
        """Raise an open hold by exactly what one of its limits has left, or by the smallest step more."""
        holds = [hold for hold in self.model.tenants[self.tenant].holds.values() if hold.state == "held"]
        if not holds:
            return
        hold = holds[-1 - pick % len(holds)]
        rows = [row for row in self.model.balance(hold.subject, self.tenant) if row.unit in hold.held]
        rows = [row for row in rows if row.available is not None]
        if not rows:
            return
        row = rows[which % len(rows)]
        assert row.available is not None
        step = 1 if row.kind == "concurrency" else TINY
        self._adjust(hold.id, {row.unit: _cut(hold.held[row.unit] + row.available) + above * step})

    def _adjust(self, known: UUID, totals: dict[str, Any] | None) -> None:
        self.both(
            "adjust",
            {"id": known, "costs": Json.of(totals)},
            lambda _: real.model_reserve(self.model.adjust(known, totals, self.tenant)),
            real.engine_reserve,
        )

    @rule(
        pick=picks,
        factor=factors,
        only=st.integers(0, 3),
        final=st.booleans(),
        outcome=st.sampled_from(["ok", "ok", "ok", "unknown", "timeout"]),
        all_of_it=st.sampled_from([False, False, False, True]),
    )
    def settle(self, pick: int, factor: Decimal, only: int, final: bool, outcome: str, all_of_it: bool) -> None:
        known = self.some(pick)
        if outcome == "unknown":
            self._settle(known, None, True, outcome)
        else:
            self._settle(known, None if all_of_it else self.near(known, factor, only), final, outcome)

    @rule(
        pick=picks,
        totals=st.one_of(st.none(), other_costs),
        final=st.booleans(),
        outcome=st.sampled_from(["error", "unknown"]),
    )
    def settle_otherwise(self, pick: int, totals: dict[str, Any] | None, final: bool, outcome: str) -> None:
        self._settle(self.some(pick), totals, final, outcome)

    def _settle(self, known: UUID, totals: dict[str, Any] | None, final: bool, outcome: str) -> None:
        self.both(
            "settle",
            {"id": known, "costs": Json.of(totals), "final": final, "outcome": outcome},
            lambda _: real.model_settle(self.model.settle(known, totals, final, outcome, self.tenant)),
            real.engine_settle,
        )

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        known = self.some(pick)
        self.both(
            "release",
            {"id": known},
            lambda _: self.model.release(known, self.tenant),
            lambda row: (row["state"], row["replayed"]),
        )

    @rule(pick=picks, ttl=ttls)
    def extend(self, pick: int, ttl: timedelta) -> None:
        known = self.some(pick)
        self.both(
            "extend",
            {"id": known, "ttl": ttl},
            lambda _: self.model.extend(known, ttl, self.tenant),
            lambda row: next(iter(row.values())),
        )

    @rule(
        slot=st.one_of(st.none(), picks),
        subject=subjects,
        used=st.one_of(costs, other_costs),
        also=st.lists(subjects, max_size=1),
    )
    def record(self, slot: int | None, subject: str, used: dict[str, Any], also: list[str]) -> None:
        # Always with an id: a record does not say which one it was given.
        known = self.ids[slot] if slot is not None else uuid5(NAMESPACE_OID, f"{self.tenant}/record {next(_serial)}")
        self.both(
            "record",
            {"subject": subject, "costs": Json.of(used), "id": known, "also": also},
            lambda _: self.model.record(subject, used, known, also, self.tenant),
            lambda row: row["replayed"],
        )

    @rule(pick=picks, factor=factors, only=st.integers(0, 2), slot=st.one_of(st.none(), picks))
    def credit(self, pick: int, factor: Decimal, only: int, slot: int | None) -> None:
        known = self.some(pick)
        totals = self.near(known, factor, only)
        request = None if slot is None else uuid5(self.ids[slot], "credit")
        self.both(
            "credit",
            {"reservation": known, "costs": Json.of(totals), "reason": "goodwill", "id": request},
            lambda _: self.model.credit(known, totals, request, self.tenant),
            lambda row: row["replayed"],
        )

    @rule(maximum=st.sampled_from([1, 2, 1000]))
    def reap(self, maximum: int) -> None:
        self._reap(maximum)

    def _reap(self, maximum: int) -> None:
        self.both(
            "reap",
            {"max": maximum},
            lambda _: self.model.reap(maximum, self.tenant),
            lambda row: (row["released"], row["charged"]),
        )

    # --- administration under load --------------------------------------------------------------------------------

    @rule(
        owner=st.sampled_from(OWNERS),
        name=limit_names,
        capacity=st.one_of(st.none(), capacities),
        policy=st.sampled_from(["release", "charge"]),
        required=st.sampled_from([False, False, False, True]),
        gone=st.sampled_from([False, False, True]),
    )
    def limit_changes(
        self, owner: str, name: str, capacity: Decimal | None, policy: str, required: bool, gone: bool
    ) -> None:
        if gone:
            self.admin("remove_limit", subject=owner, name=name)
        else:
            self.set_limit(owner, name, capacity, policy, required)

    @rule(
        what=st.sampled_from(["move", "define", "define", "retire"]),
        subject=st.sampled_from(["key:42", "key:43", "oauth:a"]),
        tier=st.sampled_from(["basic", "extended", "gold"]),
        name=st.sampled_from(["bucket", "hourly"]),
        capacity=st.sampled_from([5, 1_000_000]),
    )
    def tier_changes(self, what: str, subject: str, tier: str, name: str, capacity: int) -> None:
        if what == "move":
            self.admin("set_rate_tier", subject=subject, tier=tier)
        elif what == "retire":
            self.admin("retire_tier", tier=tier)
        elif name == "bucket":
            self.admin(
                "set_tier_limit", tier=tier, name=name, unit="cost", kind="bucket", capacity=capacity, refill_per_s=2
            )
        else:
            self.admin(
                "set_tier_limit", tier=tier, name=name, unit="cost", kind="budget", capacity=capacity, period="1 hour"
            )

    @rule(
        what=st.sampled_from(["freeze", "unfreeze", "unfreeze", "move", "ensure"]),
        name=subjects,
        parent=st.one_of(st.none(), subjects),
    )
    def subject_changes(self, what: str, name: str, parent: str | None) -> None:
        if what == "freeze":
            self.admin("freeze", name=name, reason="runaway")
        elif what == "unfreeze":
            for each in SUBJECTS:
                self.admin("unfreeze", name=each)
        elif what == "move":
            self.admin("move_subject", name=name, parent=parent)
        else:
            self.both(
                "ensure_subject",
                {"name": name, "parent": parent},
                lambda _: self.model.ensure_subject(name, parent, self.tenant),
                lambda row: next(iter(row.values())),
            )

    # --- after every step -----------------------------------------------------------------------------------------

    @invariant()
    def balances_agree(self) -> None:
        if not self.model.tenants[self.tenant].subjects:
            return
        found: dict[str, list[object]] = {subject: [] for subject in SUBJECTS}
        rows = self.engine.balances(SUBJECTS, self.tenant)
        for row in sorted(rows, key=lambda each: (each["subject"].encode(), each["limit_name"].encode())):
            found[row["asked"]].append(real.engine_balance(row))
        for subject in SUBJECTS:
            expected = [real.model_balance(row) for row in self.model.balance(subject, self.tenant)]
            assert found[subject] == expected, f"balance {subject}: {real.difference(found[subject], expected)}"

    @invariant()
    def books_are_right(self) -> None:
        assert self.engine.check(self.tenant) == []
        assert self.model.check(self.tenant) == []


def _judged_together(error: str) -> str:
    """A request may break several rules about its units at once; which is named first is nobody's business."""
    together = ("unit_missing", "no_limit", "invalid_amount")
    return " or ".join(together) if error in together else error


def _cut(amount: Fraction) -> Decimal:
    """Down to the 12 digits that an amount may have."""
    exact = Decimal(amount.numerator) / Decimal(amount.denominator)
    return exact.quantize(TINY, rounding=ROUND_DOWN)
