"""The engine against the model: random histories, every answer compared, every balance compared after every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.model import engine as real
from tests.model.engine import Answer, Engine, Json
from tests.model.errors import ModelError
from tests.model.ledger import Ledger

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
LIMITS: dict[str, dict[str, str | None]] = {
    "cap": {"unit": "usd", "kind": "budget", "period": None, "time_zone": "UTC"},
    "daily": {"unit": "usd", "kind": "budget", "period": "day", "time_zone": "America/Havana"},
    "monthly": {"unit": "tokens", "kind": "budget", "period": "month", "time_zone": "Asia/Tokyo"},
    "span": {"unit": "tokens", "kind": "budget", "period": "1 hour", "time_zone": "America/New_York"},
    "rate": {"unit": "tokens", "kind": "bucket", "period": None, "time_zone": "UTC"},
    "rpm": {"unit": "requests", "kind": "bucket", "period": None, "time_zone": "UTC"},
    "calls": {"unit": "requests", "kind": "budget", "period": "week", "time_zone": "UTC"},
    "slots": {"unit": "concurrency", "kind": "concurrency", "period": None, "time_zone": "UTC"},
}
STARTS = (
    datetime(2026, 3, 2, 12, tzinfo=UTC),
    datetime(2026, 11, 1, 3, 59, 30, tzinfo=UTC),
    datetime(2026, 11, 1, 5, 30, tzinfo=UTC),
    datetime(2026, 3, 8, 4, 59, 59, 999_999, tzinfo=UTC),
    datetime(2026, 1, 31, 14, 59, 59, tzinfo=UTC),
)
SPANS = tuple(
    timedelta(seconds=seconds) for seconds in (0.000_001, 0.5, 1, 30, 60, 300, 600, 3_600, 7_200, 86_400, 2_678_400)
)

small = st.sampled_from(["0", "1", "2", "3", "5", "10", "0.5", "7.25", "0.000000000001", "4.999999999999"])
amounts = st.one_of(small.map(Decimal), small, st.integers(0, 12))
slots = st.integers(0, 3)
costs = st.fixed_dictionaries(
    {},
    optional={
        "usd": amounts,
        "tokens": amounts,
        "requests": st.integers(0, 3),
        "concurrency": slots,
        "cost": st.sampled_from([0, 1, 300_000, 1_000_000, 1_000_001]),
    },
).filter(bool)
ids = st.integers(0, 11)
ttls = st.sampled_from([timedelta(seconds=1), timedelta(minutes=1), timedelta(minutes=10), timedelta(hours=3)])
headrooms = st.sampled_from([Decimal(0), Decimal(0), Decimal("0.2"), Decimal("0.5"), Decimal("0.123456")])
policies = st.sampled_from([None, None, "release", "charge"])
subjects = st.sampled_from(SUBJECTS)
capacities = st.sampled_from(["0", "1", "3", "5", "10", "12.5", "20", "7.000000000001"]).map(Decimal)

_serial = count()


class Histories(RuleBasedStateMachine):
    """One history in a tenant of its own, in the engine and in the model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.tenant = f"history-{next(_serial)}"
        self.model = Ledger(STARTS[0])
        self.model.create_tenant(self.tenant)
        engine.call("create_tenant", {"name": self.tenant})
        self.ids = [uuid5(NAMESPACE_OID, f"{self.tenant}/{number}") for number in range(12)]
        self.first: dict[UUID, dict[str, Any]] = {}

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
            found = error.name
        try:
            expected = modelled(row)
        except ModelError as error:
            expected = error.name
        assert found == expected, f"{function} {arguments} at {self.model.now}: {real.difference(found, expected)}"

    def admin(self, function: str, **arguments: Any) -> None:
        """An administrative call, whose only answer is whether it was accepted."""
        operation = getattr(self.model, function)
        self.both(function, arguments, lambda _: operation(**arguments, tenant=self.tenant), lambda _: None)

    def set_clock(self, now: datetime) -> None:
        self.model.now = now
        self.engine.set_clock(now)

    # --- the world ------------------------------------------------------------------------------------------------

    @initialize(
        start=st.sampled_from(STARTS),
        chosen=st.dictionaries(
            st.tuples(st.sampled_from(OWNERS), st.sampled_from(sorted(LIMITS))),
            st.tuples(capacities, policies),
            min_size=3,
            max_size=9,
        ),
        unlimited=st.booleans(),
    )
    def begin(
        self, start: datetime, chosen: dict[tuple[str, str], tuple[Decimal, str | None]], unlimited: bool
    ) -> None:
        self.set_clock(start)
        for name, parent in TREE.items():
            self.admin("create_subject", name=name, parent=parent)
        if unlimited:
            self.set_limit("org:acme", "cap", None, "release", False)
            self.set_limit("org:acme", "monthly", None, "release", False)
        for (owner, name), (capacity, policy) in chosen.items():
            self.set_limit(owner, name, capacity, policy or "release", False)

    def set_limit(self, owner: str, name: str, capacity: Decimal | None, policy: str, required: bool) -> None:
        shape = LIMITS[name]
        if shape["kind"] == "concurrency" and capacity is not None:
            capacity = Decimal(int(capacity))
        if shape["kind"] != "budget" and capacity is None:
            capacity = Decimal(1)
        refill = Decimal("0.37") if shape["kind"] == "bucket" else None
        self.admin(
            "set_limit",
            subject=owner,
            name=name,
            unit=shape["unit"],
            kind=shape["kind"],
            capacity=capacity,
            refill_per_s=refill,
            period=shape["period"],
            time_zone=shape["time_zone"],
            on_expiry=policy,
            required=required,
        )

    @rule(by=st.sampled_from(SPANS), back=st.sampled_from([False, False, False, True]))
    def clock_steps(self, by: timedelta, back: bool) -> None:
        self.set_clock(self.model.now - by if back else self.model.now + by)

    # --- reservations ---------------------------------------------------------------------------------------------

    @rule(
        slot=st.one_of(st.none(), ids, ids, ids),
        subject=subjects,
        asked=costs,
        ttl=ttls,
        also=st.lists(subjects, max_size=2),
        headroom=headrooms,
        on_expiry=policies,
    )
    def reserve(
        self,
        slot: int | None,
        subject: str,
        asked: dict[str, Any],
        ttl: timedelta,
        also: list[str],
        headroom: Decimal,
        on_expiry: str | None,
    ) -> None:
        arguments = {
            "subject": subject,
            "ttl": ttl,
            "id": None if slot is None else self.ids[slot],
            "also": also,
            "headroom": headroom,
            "on_expiry": on_expiry,
        }
        self._reserve(arguments, asked)

    @rule(slot=ids)
    def reserve_again(self, slot: int) -> None:
        """The same request: a replay, a closed one, or another try after a refusal."""
        if (arguments := self.first.get(self.ids[slot])) is not None:
            self._reserve({**arguments, "ttl": timedelta(minutes=5)}, arguments["asked"])

    def _reserve(self, arguments: dict[str, Any], asked: dict[str, Any]) -> None:
        arguments = {name: value for name, value in arguments.items() if name != "asked"}
        if arguments["id"] is not None:
            self.first.setdefault(arguments["id"], arguments | {"asked": asked})

        def modelled(row: Answer | None) -> object:
            assigned = real.reservation_of(row) if row else None
            answer = self.model.reserve(**arguments, costs=asked, tenant=self.tenant, assigned=assigned)
            if answer.reservation is not None and answer.reservation not in self.ids:
                self.ids[len(self.first) % len(self.ids)] = answer.reservation
            return real.model_reserve(answer)

        self.both("reserve", arguments | {"costs": Json.of(asked)}, modelled, real.engine_reserve)

    @rule(slot=ids, asked=costs)
    def adjust(self, slot: int, asked: dict[str, Any]) -> None:
        self._adjust(self.ids[slot], asked)

    def _adjust(self, known: UUID, asked: dict[str, Any]) -> None:
        self.both(
            "adjust",
            {"id": known, "costs": Json.of(asked)},
            lambda _: real.model_reserve(self.model.adjust(known, asked, self.tenant)),
            real.engine_reserve,
        )

    @rule(slot=ids, more=st.sampled_from([Decimal(0), Decimal("0.5"), Decimal(1), Decimal(2)]), only=st.integers(0, 3))
    def adjust_what_is_held(self, slot: int, more: Decimal, only: int) -> None:
        """Totals near the present ones: most random ones name units that are not held."""
        if totals := self._near(slot, more, only):
            self._adjust(self.ids[slot], totals)

    @rule(
        slot=ids,
        more=st.sampled_from([Decimal(0), Decimal("0.5"), Decimal(1), Decimal(2)]),
        only=st.integers(0, 3),
        final=st.booleans(),
    )
    def settle_what_is_held(self, slot: int, more: Decimal, only: int, final: bool) -> None:
        """Totals near the hold, below and above it."""
        if totals := self._near(slot, more, only):
            self._settle(self.ids[slot], totals, final, "ok")

    def _near(self, slot: int, factor: Decimal, only: int) -> dict[str, Any]:
        hold = self.model.tenants[self.tenant].holds.get(self.ids[slot])
        if hold is None:
            return {}
        held = {u: Decimal(a.numerator) / Decimal(a.denominator) for u, a in hold.held.items()}
        chosen = sorted(held)[: only or None]
        return {
            unit: (held[unit] * factor).to_integral_value() if unit == "concurrency" else _scaled(held[unit], factor)
            for unit in chosen
        }

    @rule(
        slot=ids,
        totals=st.one_of(st.none(), costs),
        final=st.booleans(),
        outcome=st.sampled_from(["ok", "ok", "error", "timeout", "cancelled", "unknown"]),
    )
    def settle(self, slot: int, totals: dict[str, Any] | None, final: bool, outcome: str) -> None:
        self._settle(self.ids[slot], totals, final, outcome)

    @rule(slot=ids)
    def settle_unknown(self, slot: int) -> None:
        self._settle(self.ids[slot], None, True, "unknown")

    def _settle(self, known: UUID, totals: dict[str, Any] | None, final: bool, outcome: str) -> None:
        self.both(
            "settle",
            {"id": known, "costs": Json.of(totals), "final": final, "outcome": outcome},
            lambda _: real.model_settle(self.model.settle(known, totals, final, outcome, self.tenant)),
            real.engine_settle,
        )

    @rule(slot=ids)
    def release(self, slot: int) -> None:
        known = self.ids[slot]
        self.both(
            "release",
            {"id": known},
            lambda _: self.model.release(known, self.tenant),
            lambda row: (row["state"], row["replayed"]),
        )

    @rule(slot=ids, ttl=ttls)
    def extend(self, slot: int, ttl: timedelta) -> None:
        known = self.ids[slot]
        self.both(
            "extend",
            {"id": known, "ttl": ttl},
            lambda _: self.model.extend(known, ttl, self.tenant),
            lambda row: next(iter(row.values())),
        )

    @rule(slot=st.one_of(st.none(), ids), subject=subjects, used=costs, also=st.lists(subjects, max_size=1))
    def record(self, slot: int | None, subject: str, used: dict[str, Any], also: list[str]) -> None:
        known = None if slot is None else self.ids[slot]
        self.both(
            "record",
            {"subject": subject, "costs": Json.of(used), "id": known, "also": also},
            lambda _: self.model.record(subject, used, known, also, self.tenant),
            lambda row: row["replayed"],
        )

    @rule(slot=ids, share=st.sampled_from([Decimal("0.5"), Decimal(1), Decimal(2)]), only=st.integers(0, 2))
    def credit(self, slot: int, share: Decimal, only: int) -> None:
        totals = {unit: amount for unit, amount in self._near(slot, share, only).items() if unit != "concurrency"}
        if totals:
            known = self.ids[slot]
            self.both(
                "credit",
                {"reservation": known, "costs": Json.of(totals), "reason": "goodwill"},
                lambda _: self.model.credit(known, totals, tenant=self.tenant),
                lambda row: row["replayed"],
            )

    @rule(maximum=st.sampled_from([1, 2, 1000]))
    def reap(self, maximum: int) -> None:
        self.both(
            "reap",
            {"max": maximum},
            lambda _: self.model.reap(maximum, self.tenant),
            lambda row: (row["released"], row["charged"]),
        )

    # --- administration under load --------------------------------------------------------------------------------

    @rule(
        owner=st.sampled_from(OWNERS),
        name=st.sampled_from(sorted(LIMITS)),
        capacity=st.one_of(st.none(), capacities),
        policy=st.sampled_from(["release", "charge"]),
        required=st.sampled_from([False, False, False, True]),
    )
    def cap_changes(self, owner: str, name: str, capacity: Decimal | None, policy: str, required: bool) -> None:
        self.set_limit(owner, name, capacity, policy, required)

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(sorted(LIMITS)))
    def limit_goes(self, owner: str, name: str) -> None:
        self.admin("remove_limit", subject=owner, name=name)

    @rule(subject=st.sampled_from(["key:42", "key:43", "oauth:a"]), tier=st.sampled_from(["basic", "extended", "gold"]))
    def tier_changes(self, subject: str, tier: str) -> None:
        self.admin("set_rate_tier", subject=subject, tier=tier)

    @rule(
        tier=st.sampled_from(["basic", "extended", "gold"]),
        name=st.sampled_from(["bucket", "hourly"]),
        capacity=st.sampled_from([5, 1_000_000]),
    )
    def tier_is_defined(self, tier: str, name: str, capacity: int) -> None:
        bucket = name == "bucket"
        self.admin(
            "set_tier_limit",
            tier=tier,
            name=name,
            unit="cost",
            kind="bucket" if bucket else "budget",
            capacity=capacity,
            refill_per_s=2 if bucket else None,
            period=None if bucket else "1 hour",
        )

    @rule(tier=st.sampled_from(["basic", "extended", "gold"]))
    def tier_retires(self, tier: str) -> None:
        self.admin("retire_tier", tier=tier)

    @rule(name=subjects)
    def freeze(self, name: str) -> None:
        self.admin("freeze", name=name, reason="runaway")

    @rule(name=subjects)
    def unfreeze(self, name: str) -> None:
        self.admin("unfreeze", name=name)

    @rule(name=st.sampled_from(["key:43", "run:r"]), parent=st.one_of(st.none(), subjects))
    def move(self, name: str, parent: str | None) -> None:
        self.admin("move_subject", name=name, parent=parent)

    @rule(name=subjects, parent=st.one_of(st.none(), subjects))
    def ensure(self, name: str, parent: str | None) -> None:
        self.both(
            "ensure_subject",
            {"name": name, "parent": parent},
            lambda _: self.model.ensure_subject(name, parent, self.tenant),
            lambda row: next(iter(row.values())),
        )

    # --- misuse ---------------------------------------------------------------------------------------------------

    @rule(
        wrong=st.sampled_from(
            [
                {"costs": {}},
                {"costs": None},
                {"costs": {"usd": -1}},
                {"costs": {"usd": "1e3"}},
                {"costs": {"usd": True}},
                {"costs": {"usd": Decimal("0.0000000000001")}},
                {"costs": {"usd": 10**18}},
                {"costs": {"eur": 1}},
                {"ttl": timedelta(0)},
                {"ttl": timedelta(hours=24, microseconds=1)},
                {"headroom": Decimal(1)},
                {"headroom": Decimal("-0.1")},
                {"on_expiry": "keep"},
                {"subject": "org:nobody"},
                {"subject": "acme"},
                {"also": ["org:nobody"]},
                {"tenant": "nowhere"},
            ]
        )
    )
    def misuse(self, wrong: dict[str, Any]) -> None:
        self.set_limit("org:acme", "cap", None, "release", False)
        right = {"subject": "org:acme", "costs": {"usd": 0}, "tenant": self.tenant}
        arguments = {**right, **wrong}
        self.both(
            "reserve",
            arguments | {"costs": Json.of(arguments["costs"])},
            lambda _: self.model.reserve(**arguments).granted,
            lambda row: row["granted"],
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


def _scaled(amount: Decimal, factor: Decimal) -> Decimal:
    return (amount * factor).quantize(Decimal("0.000000000001"))


class ModelAlone(Histories):
    """The same histories without an engine: the oracle itself must keep its books whatever happens."""

    def both(
        self,
        function: str,
        arguments: dict[str, Any],
        modelled: Callable[[Answer | None], object],
        read: Callable[[Answer], object],
    ) -> None:
        with suppress(ModelError):
            modelled(None)

    @invariant()
    def balances_agree(self) -> None:
        for row in self.model.balance("run:r", self.tenant) if self.model.tenants[self.tenant].subjects else ():
            assert row.available is None or row.available >= 0

    @invariant()
    def books_are_right(self) -> None:
        assert self.model.check(self.tenant) == []


class NoEngine(Engine):
    """Stands in where only the model is exercised."""

    def __init__(self) -> None:
        """Needs no connection."""

    def set_clock(self, now: datetime) -> None:
        """Nobody reads it."""

    def call(self, function: str, arguments: Mapping[str, object]) -> list[Answer]:
        """Accepts everything."""
        return []


def histories(examples: int, steps: int = 30) -> settings:
    """The same histories every time, unless soaking: then new ones."""
    soak = os.environ.get("QUOTA_SOAK") == "1"
    return settings(
        derandomize=not soak,
        max_examples=examples * (50 if soak else 1),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_the_model_keeps_its_own_books() -> None:
    run_state_machine_as_test(lambda: ModelAlone(NoEngine()), settings=histories(40))  # type: ignore[arg-type]
