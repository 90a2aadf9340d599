"""Batches in the model, and histories that go through the batch functions.

What a batch means, beyond its members one after the other (docs/concepts.md):

- Requests that take nothing wherever they stand (errors, known ids, frozen subjects) are answered after the others.
- Overdue holds that a batch names are closed first; then those in the way of the *sum* of all that is asked.
- If the sum fits, every grant shows its accounts after the whole batch; else each shows them as they were at its turn.
- With `atomic`, one refusal makes every grant `linked`; an error is the error of all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model import engine as real
from tests.model.booking import Demand
from tests.model.catalog import IMPLIED_UNITS, Tenant
from tests.model.engine import Answer, Engine, Json
from tests.model.errors import ModelError, sqlstate_name
from tests.model.histories import Histories, headrooms, picks, policies, subjects, ttls
from tests.model.holds import Hold, total
from tests.model.ledger import Ledger, ReserveAnswer, SettleAnswer
from tests.model.limits import Account, Row

Request = dict[str, Any]
LINKED = ReserveAnswer(granted=False, reason="linked")

RESERVE_ARRAYS = {
    "subject": "subjects text[]",
    "costs": "costs jsonb[]",
    "id": "ids uuid[]",
    "ttl": "ttls interval[]",
    "also": "also jsonb[]",
    "headroom": "headrooms numeric[]",
    "on_expiry": "on_expiries text[]",
}
SETTLE_ARRAYS = {
    "id": "ids uuid[]",
    "costs": "costs jsonb[]",
    "final": "finals boolean[]",
    "outcome": "outcomes text[]",
}
RELEASE_ARRAYS = {"id": "ids uuid[]"}
ARRAYS = {"reserve": RESERVE_ARRAYS, "settle": SETTLE_ARRAYS, "release": RELEASE_ARRAYS}


class BatchEngine(Engine):
    """The engine through its batch functions: a single call is a batch of one."""

    def call(self, function: str, arguments: Mapping[str, object]) -> list[Answer]:
        """reserve, settle and release as batches of one; everything else as it is."""
        if function not in ARRAYS:
            return super().call(function, arguments)
        members = dict(arguments)
        tenant = str(members.pop("tenant", "default"))
        if function == "reserve" and members.get("costs") is None:
            return super().call(function, arguments)  # a null member is misuse of the batch, with a name of its own
        row = self.many(function, [members], tenant)[0]
        if isinstance(row, ModelError):
            raise row
        return [row]

    def many(
        self, function: str, members: Sequence[Mapping[str, Any]], tenant: str, atomic: bool = False
    ) -> list[Answer | ModelError]:
        """One call of `reserve_many`, `settle_many` or `release_many`; a member's error in its place."""
        arrays, values = [], {"tenant": tenant, "atomic": atomic}
        for name, declared in ARRAYS[function].items():
            array, cast = declared.split()
            arrays.append(f"{array} => %({array})s::{'text[]::' if cast == 'jsonb[]' else ''}{cast}")
            values[array] = [_member(name, member.get(name)) for member in members]
        text = f"SELECT * FROM quota.{function}_many({', '.join(arrays)}, tenant => %(tenant)s, atomic => %(atomic)s)"
        rows = self.rows(text, values)
        assert [row["position"] for row in rows] == list(range(1, len(members) + 1))
        return [_error(row) or row for row in rows]


def _member(name: str, value: Any) -> Any:
    if name == "also":
        return real.Json.of(list(value or ()))
    return value


def _error(row: Answer) -> ModelError | None:
    if row["error"] is None:
        return None
    name = sqlstate_name(row["error_code"])
    assert name is not None
    assert name == row["error"]
    assert row["error_message"].startswith(f"{name}: ")
    assert row["error_remedy"]
    return ModelError(name, row["error_message"])


# --- the model ----------------------------------------------------------------------------------------------------


def reserve_many(
    model: Ledger, tenant: str, requests: Sequence[Request], atomic: bool, assigned: Sequence[UUID | None]
) -> list[ReserveAnswer | ModelError]:
    """What `quota.reserve_many` answers. With `atomic` an error is raised and nothing has changed."""
    sorted_out = [_sort_out(model, tenant, request) for request in requests]
    if atomic and (errors := [each for each in sorted_out if isinstance(each, ModelError)]):
        raise errors[0]
    before = copy.deepcopy(model) if atomic else None
    owner = model._tenant(tenant)
    plain = [n for n, each in enumerate(sorted_out) if each == "plain"]
    # Frozen, or closed: refused whatever is free.
    linked = atomic and "refused" in sorted_out
    answers = _decide(model, owner, tenant, requests, plain, atomic, linked, assigned)
    linked = linked or (atomic and any(not answer.granted for answer in answers.values()))
    told: dict[int, ReserveAnswer | ModelError] = dict(answers)
    for n in range(len(requests)):
        if n in told:
            continue
        if linked and any(m < n and requests[m]["id"] == requests[n]["id"] for m in plain):
            told[n] = LINKED
            continue
        try:
            told[n] = model.reserve(**requests[n], tenant=tenant)
        except ModelError as error:
            if before is not None:
                model.__dict__.update(before.__dict__)
                raise
            told[n] = error
    return [told[n] for n in range(len(requests))]


def _sort_out(model: Ledger, tenant: str, request: Request) -> str | ModelError:
    """Alone and before all others, on a copy: an error, a known id, something refused whatever is free, or plain."""
    if request["id"] in model._tenant(tenant).holds:
        trial = copy.deepcopy(model)
        try:
            return "known" if trial.reserve(**request, tenant=tenant).granted else "refused"
        except ModelError as error:
            return error
    try:
        answer = copy.deepcopy(model).reserve(**request, tenant=tenant)
    except ModelError as error:
        return error
    return "refused" if answer.reason == "frozen" else "plain"


def _decide(
    model: Ledger,
    owner: Tenant,
    tenant: str,
    requests: Sequence[Request],
    plain: list[int],
    atomic: bool,
    linked: bool,
    assigned: Sequence[UUID | None],
) -> dict[int, ReserveAnswer]:
    """Answers the plain requests; repeated ids after a grant are left to the caller."""
    first: dict[object, int] = {}
    for n in plain:
        first.setdefault(requests[n]["id"] or n, n)
    sums = _sums(model, owner, [requests[n] for n in first.values()])
    in_the_way = _violated(model, sums)
    places = {(row.subject, row.limit_name) for row in in_the_way}
    named = {request["id"] for request in requests}
    for hold in list(model._overdue(owner)):
        stands = any((line.account.subject, line.account.name) in places and model._counts(line) for line in hold.lines)
        if hold.id in named or stands:
            model._expire(owner, hold)
    answers: dict[int, ReserveAnswer] = {}
    if not linked and not _violated(model, sums):
        for n in first.values():
            answers[n] = model.reserve(**requests[n], tenant=tenant, assigned=assigned[n])
        for n, answer in answers.items():
            assert answer.reservation is not None
            answers[n] = model._granted(owner, owner.holds[answer.reservation], replayed=False)
        return answers
    trial = copy.deepcopy(model) if atomic else model
    granted: set[object] = set()
    for n in plain:
        if requests[n]["id"] is not None and requests[n]["id"] in granted:
            continue
        answers[n] = trial.reserve(**requests[n], tenant=tenant, assigned=assigned[n])
        if answers[n].granted:
            granted.add(requests[n]["id"])
    if linked or (atomic and any(not answer.granted for answer in answers.values())):
        return {n: LINKED if answer.granted else answer for n, answer in answers.items()}
    if atomic:
        model.__dict__.update(trial.__dict__)
    return answers


def _sums(model: Ledger, owner: Tenant, requests: Sequence[Request]) -> list[tuple[Demand, Fraction]]:
    """Per account, what is asked in all, and the largest headroom."""
    found: dict[object, tuple[Demand, Fraction]] = {}
    for request in requests:
        names = [request["subject"], *request["also"]]
        asked = {unit: Fraction(amount) for unit, amount in request["costs"].items()}
        for demand in model._demands(owner, names, asked, IMPLIED_UNITS)[0]:
            before, headroom = found.get(demand.account.key, (replace(demand, cost=Fraction(0)), Fraction(0)))
            both = replace(demand, cost=demand.cost + before.cost)
            found[demand.account.key] = both, max(headroom, Fraction(request["headroom"]))
    return list(found.values())


def _violated(model: Ledger, sums: list[tuple[Demand, Fraction]]) -> list[Row]:
    return [row for demand, headroom in sums for row in model._judge([demand], headroom)]


def settle_many(
    model: Ledger, tenant: str, members: Sequence[Request], atomic: bool
) -> list[SettleAnswer | ModelError]:
    """What `quota.settle_many` answers: plain members first, in order, then the others."""
    before = copy.deepcopy(model) if atomic else None
    owner = model._tenant(tenant)
    for member in members:
        hold = owner.holds.get(member["id"])
        if hold is not None and hold.overdue(model.now):
            model._expire(owner, hold)
    seen: set[UUID] = set()
    plain = []
    for n, member in enumerate(members):
        if member["id"] not in seen and _is_plain(model, tenant, owner.holds.get(member["id"]), member):
            plain.append(n)
        seen.add(member["id"])
    if _needs_order(model, owner, [members[n] for n in plain]):
        plain = []
    answers: dict[int, SettleAnswer | ModelError] = {}
    for n in [*plain, *(n for n in range(len(members)) if n not in plain)]:
        try:
            answers[n] = model.settle(**members[n], tenant=tenant)
        except ModelError as error:
            if before is not None:
                model.__dict__.update(before.__dict__)
                raise
            answers[n] = error
    return [answers[n] for n in range(len(members))]


def _is_plain(model: Ledger, tenant: str, hold: Hold | None, member: Request) -> bool:
    if hold is None or hold.state != "held" or hold.booked or not member["final"] or member["outcome"] == "unknown":
        return False
    if len({line.account.key for line in hold.lines}) < len(hold.lines):
        return False
    try:
        copy.deepcopy(model).settle(**member, tenant=tenant)
    except ModelError:
        return False
    return True


def _needs_order(model: Ledger, owner: Tenant, members: Sequence[Request]) -> bool:
    """Whether a bucket's level would be cut on the way, so that the sum is not what one after the other gives."""
    changes: dict[tuple[bytes, bytes], list[Fraction]] = {}
    accounts: dict[tuple[bytes, bytes], Account] = {}
    for member in members:
        hold = owner.holds[member["id"]]
        totals = hold.filled({unit: Fraction(amount) for unit, amount in (member["costs"] or {}).items()})
        for line in hold.lines:
            if line.account.shape.kind == "bucket":
                accounts[line.account.key] = line.account
                change = line.held - totals[line.account.shape.unit]
                changes.setdefault(line.account.key, []).append(change)
    for key, found in changes.items():
        level, capacity = accounts[key].numbers(model.now).level, accounts[key].limit.capacity
        gives, takes = total(x for x in found if x > 0), -total(x for x in found if x < 0)
        assert capacity is not None
        if gives and takes and (level + gives > capacity or level < takes):
            return True
    return False


# --- the histories ------------------------------------------------------------------------------------------------

# Few choices a request: a history has only so much randomness.
requests = st.tuples(
    st.sampled_from(["key:42", "key:43", "user:7", "org:acme", "oauth:a", "pool:p", "run:r", "org:nobody"]),
    st.sampled_from(
        [
            {"usd": "1"},
            {"usd": 2},
            {"usd": Decimal("0.5"), "tokens": 1},
            {"usd": "2.5", "concurrency": 1},
            {"usd": 0, "requests": 2},
            {"cost": 2},
            {"usd": "1e3"},
        ]
    ),
    st.one_of(st.none(), st.none(), picks),
)
members = st.fixed_dictionaries(
    {
        "pick": picks,
        "factor": st.sampled_from([Decimal("0.5"), Decimal(1), Decimal(2), Decimal(0)]),
        "final": st.sampled_from([True, True, True, False]),
        "outcome": st.sampled_from(["ok", "ok", "timeout", "unknown"]),
    }
)


class BatchHistories(Histories):
    """Everything that a history does, through the batch functions, and batches of several."""

    engine: BatchEngine

    @rule(
        asked=st.lists(requests, min_size=2, max_size=5),
        how=st.fixed_dictionaries({"ttl": ttls, "headroom": headrooms, "on_expiry": policies}),
        also=st.lists(subjects, max_size=1),
        again=st.booleans(),
        atomic=st.sampled_from([False, False, True]),
    )
    def reserve_many(
        self, asked: list[tuple[Any, ...]], how: dict[str, Any], also: list[str], again: bool, atomic: bool
    ) -> None:
        batch = [
            {"subject": subject, "costs": costs, "id": None if slot is None else self.ids[slot], "also": []} | how
            for subject, costs, slot in asked
        ]
        batch[0] |= {"also": also, "headroom": Decimal(0)}
        if again:
            batch.append(batch[0])
        self._reserve_many(batch, atomic)

    @rule(
        subject=st.sampled_from(["key:42", "user:7", "oauth:a", "run:r"]),
        units=st.sampled_from([("usd",), ("usd", "tokens"), ("cost",), ("usd", "requests")]),
        amounts=st.lists(st.sampled_from(["1", 2, "0.5", "0", "0.25"]), min_size=2, max_size=5),
        ttl=ttls,
        shares=st.lists(st.sampled_from([Decimal(1), Decimal("0.5"), Decimal(2)]), min_size=5, max_size=5),
        only=st.integers(0, 1),
    )
    def alike(
        self,
        subject: str,
        units: tuple[str, ...],
        amounts: list[str | int],
        ttl: timedelta,
        shares: list[Decimal],
        only: int,
    ) -> None:
        """What a process sends that serves one key: the same units of one subject, and later their settles."""
        how = {"ttl": ttl, "headroom": Decimal(0), "on_expiry": None, "also": [], "id": None}
        batch = [how | {"subject": subject, "costs": dict.fromkeys(units, amount)} for amount in amounts]
        granted = [known for known in self._reserve_many(batch, False) if known is not None]
        if granted:
            self._settle_many(
                [
                    {"id": known, "costs": self.near(known, share, only), "final": True, "outcome": "ok"}
                    for known, share in zip(granted, shares, strict=False)
                ],
                False,
            )

    def _reserve_many(self, batch: list[dict[str, Any]], atomic: bool) -> list[UUID | None]:
        found: list[object] | str
        rows: list[Answer | ModelError] = []
        try:
            rows = self.engine.many(
                "reserve", [each | {"costs": Json.of(each["costs"])} for each in batch], self.tenant, atomic
            )
            found = [_told(row) for row in rows]
        except ModelError as error:
            found = error.name
        assigned = [None if isinstance(row, ModelError) else row["reservation"] for row in rows] or [None] * len(batch)
        expected: list[object] | str
        try:
            expected = [_expected(answer) for answer in reserve_many(self.model, self.tenant, batch, atomic, assigned)]
        except ModelError as error:
            expected = error.name
        assert _alike(found, expected), f"reserve_many {batch} atomic={atomic}: {real.difference(found, expected)}"
        return assigned

    @rule(
        chosen=st.lists(members, min_size=1, max_size=5),
        only=st.integers(0, 2),
        atomic=st.sampled_from([False, False, True]),
    )
    def settle_many(self, chosen: list[dict[str, Any]], only: int, atomic: bool) -> None:
        batch = []
        for each in chosen:
            known = self.some(each["pick"])
            totals = None if each["outcome"] == "unknown" else self.near(known, each["factor"], only)
            final = each["final"] or totals is None
            batch.append({"id": known, "costs": totals, "final": final, "outcome": each["outcome"]})
        self._settle_many(batch, atomic)

    def _settle_many(self, batch: list[dict[str, Any]], atomic: bool) -> None:
        try:
            rows = self.engine.many(
                "settle", [each | {"costs": Json.of(each["costs"])} for each in batch], self.tenant, atomic
            )
            found: object = [row.name if isinstance(row, ModelError) else real.engine_settle(row) for row in rows]
        except ModelError as error:
            found = error.name
        try:
            expected: object = [
                answer.name if isinstance(answer, ModelError) else real.model_settle(answer)
                for answer in settle_many(self.model, self.tenant, batch, atomic)
            ]
        except ModelError as error:
            expected = error.name
        assert found == expected, f"settle_many {batch} atomic={atomic}: {real.difference(found, expected)}"


def _told(row: Answer | ModelError) -> object:
    return row.name if isinstance(row, ModelError) else real.engine_reserve(row)


def _expected(answer: ReserveAnswer | ModelError) -> object:
    return answer.name if isinstance(answer, ModelError) else real.model_reserve(answer)


_TOGETHER = {"unit_missing", "no_limit", "invalid_amount"}


def _alike(found: object, expected: object) -> bool:
    """Equal, where errors that a request may break together count as one."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_alike, found, expected))
    return found == expected or (
        isinstance(found, str) and isinstance(expected, str) and {found, expected} <= _TOGETHER
    )
