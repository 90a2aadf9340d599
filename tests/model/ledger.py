"""The reference model of the quota ledger: the whole contract, single-threaded, exact, in plain Python.

It is the oracle of the tests, so it is written from the contract and for reading; speed is no concern. One clock
(`now`) set by the test, forward and backward; one `Ledger` for all tenants; every operation either answers, or raises
`ModelError` and has changed nothing.

**Expiry.** A hold is expired from `expires_at` on, swept or not. Overdue holds are closed exactly here:

- by every operation that names one: settle, release, reserve with its id, credit (never when the operation ends in an
  error, because an error undoes everything, the close included);
- by a reserve, or an adjust that raises, that would be refused: see `Booking._violations` for which;
- by moving or retiring a subject, for the holds on it and below;
- by `reap`.

`balance` and the numbers in answers show overdue holds as their expiry will book them, so no answer depends on whether
the reaper has run. The exception is the level of a bucket: a refund counts when it is swept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from uuid import UUID, uuid4

from tests.model.amounts import (
    ZERO,
    Costs,
    check_headroom,
    check_name,
    check_on_expiry,
    check_subject,
    check_ttl,
    costs_of,
    whole,
)
from tests.model.booking import Booking, Demand
from tests.model.catalog import IMPLIED_UNITS, Tenant
from tests.model.errors import ModelError
from tests.model.holds import Hold, Line, Note, total
from tests.model.limits import Account, Row, binding, longest_wait

OUTCOMES = ("ok", "error", "timeout", "cancelled", "unknown")


@dataclass(frozen=True)
class ReserveAnswer:
    """The row of `reserve` and `adjust`."""

    granted: bool
    reservation: UUID | None = None
    state: str | None = None
    expires_at: datetime | None = None
    replayed: bool = False
    reason: str | None = None
    limit_subject: str | None = None
    limit_name: str | None = None
    unit: str | None = None
    capacity: Fraction | None = None
    spent: Fraction | None = None
    reserved: Fraction | None = None
    requested: Fraction | None = None
    retry_after_s: Fraction | None = None
    remaining: list[Row] = field(default_factory=list)
    violations: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class SettleAnswer:
    """The row of `settle`."""

    state: str
    late: bool
    replayed: bool
    overage: dict[str, Fraction]


class Ledger(Booking):
    """Every operation of the contract. Administrative ones are inherited from `Catalog`."""

    # --- reserve ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        subject: str,
        costs: Costs | None,
        ttl: timedelta | None = timedelta(minutes=10),
        id: UUID | None = None,  # noqa: A002 - the contract's name
        also: Sequence[str] = (),
        headroom: Decimal | int = 0,
        on_expiry: str | None = None,
        tenant: str = "default",
        assigned: UUID | None = None,
    ) -> ReserveAnswer:
        """Hold the costs on every account of the lineages, all or nothing.

        `assigned` is the id that the engine chose where the caller gave none.
        """
        exact_ttl, exact_headroom = check_ttl(ttl), check_headroom(headroom)
        check_on_expiry(on_expiry)
        names = _names(subject, also)
        asked = costs_of(costs)
        owner = self._tenant(tenant)
        if (known := self._known(owner, id, names, asked)) is not None:
            return self._replay(owner, known)
        demands, units = self._demands(owner, names, asked, IMPLIED_UNITS)
        if (refusal := self._refusal(owner, names, demands, exact_headroom)) is not None:
            return refusal
        hold = self._new_hold(owner, id or assigned or uuid4(), names, asked, units)
        hold.headroom, hold.on_expiry, hold.expires_at = exact_headroom, on_expiry, self.now + exact_ttl
        for demand in demands:
            self._take(owner, hold, demand)
        return self._granted(owner, hold, replayed=False)

    def _known(
        self, owner: Tenant, known_id: UUID | None, names: list[str], asked: dict[str, Fraction], record: bool = False
    ) -> Hold | None:
        """The reservation (or the record) that this id already is, if the request is the same."""
        if known_id is None:
            return None
        hold = owner.holds.get(known_id)
        if hold is None:
            return None
        if record != hold.record or (hold.subject, set(hold.also), hold.asked) != (names[0], set(names[1:]), asked):
            raise ModelError("id_conflict", f"{known_id} was another request")
        return hold

    def _new_hold(
        self, owner: Tenant, new_id: UUID, names: list[str], asked: dict[str, Fraction], units: dict[str, Fraction]
    ) -> Hold:
        """A reservation that has no lines yet."""
        lineages = frozenset(self._resolve(owner, names))
        hold = Hold(new_id, names[0], tuple(names[1:]), asked, units, expires_at=self.now, subjects=lineages)
        owner.holds[new_id] = hold
        return hold

    def _replay(self, owner: Tenant, hold: Hold) -> ReserveAnswer:
        """The same request again: the stored facts while it is open, `closed` afterwards."""
        if hold.overdue(self.now):
            self._expire(owner, hold)
        if hold.state == "held":
            return self._granted(owner, hold, replayed=True)
        return ReserveAnswer(
            granted=False,
            reservation=hold.id,
            state=hold.state,
            expires_at=hold.expires_at,
            reason="closed",
        )

    def _demands(
        self, owner: Tenant, names: list[str], asked: dict[str, Fraction], implied: Sequence[str]
    ) -> tuple[list[Demand], dict[str, Fraction]]:
        """What a request asks of each account, in lock order, and its units with the implied ones."""
        found = [
            (self._account(owner, subject, limit), limit)
            for subject in self._resolve(owner, names)
            for limit in self.effective(owner, subject).values()
        ]
        covered = {limit.unit for _, limit in found}
        units = dict(asked)
        for unit in implied:
            if unit in covered:
                units.setdefault(unit, Fraction(1))
        for unit in asked:
            if unit not in self.units:
                raise ModelError("unknown_unit", unit)
        for unit in asked:
            if unit not in covered and unit not in IMPLIED_UNITS:
                raise ModelError("no_limit", unit)
        for _, limit in found:
            if limit.required and limit.unit not in units and limit.unit not in IMPLIED_UNITS:
                raise ModelError("unit_missing", limit.unit)
        demands = [Demand(account, units[limit.unit]) for account, limit in found if limit.unit in units]
        for demand in demands:
            if demand.account.shape.kind == "concurrency":
                whole(demand.cost, demand.account.shape.unit)
        return sorted(demands, key=lambda each: each.account.key), units

    def _refusal(
        self, owner: Tenant, names: list[str], demands: list[Demand], headroom: Fraction
    ) -> ReserveAnswer | None:
        """The refusal, if something refuses."""
        for name in names:
            for ancestor in self._lineage(owner, name):
                if owner.subjects[ancestor].frozen is not None:
                    row = Row(ancestor, "", "", "", None, None, None, None, None, reason="frozen")
                    return ReserveAnswer(False, reason="frozen", limit_subject=ancestor, violations=[row])
        violations = self._violations(owner, demands, headroom)
        if not violations:
            return None
        worst = binding(violations)
        violated = {(row.subject, row.limit_name): row for row in violations}
        standing = self._rows(owner, [demand.account for demand in demands])
        cost = {demand.account.key: demand.cost for demand in demands}
        return ReserveAnswer(
            granted=False,
            reason=worst.reason,
            limit_subject=worst.subject,
            limit_name=worst.limit_name,
            unit=worst.unit,
            capacity=worst.capacity,
            spent=worst.spent,
            reserved=worst.reserved,
            requested=cost[worst.subject.encode(), worst.limit_name.encode()],
            retry_after_s=longest_wait(violations),
            remaining=[violated.get((row.subject, row.limit_name), row) for row in standing],
            violations=violations,
        )

    def _granted(self, owner: Tenant, hold: Hold, replayed: bool) -> ReserveAnswer:
        """A grant shows the tightest limit after the hold, and what is held of its unit in all."""
        rows = self._rows(owner, _accounts(hold))
        tightest = min(rows, key=lambda row: row.tightness, default=None)
        return ReserveAnswer(
            granted=True,
            reservation=hold.id,
            state=hold.state,
            expires_at=hold.expires_at,
            replayed=replayed,
            limit_subject=tightest.subject if tightest else None,
            limit_name=tightest.limit_name if tightest else None,
            unit=tightest.unit if tightest else None,
            capacity=tightest.capacity if tightest else None,
            spent=tightest.spent if tightest else None,
            reserved=tightest.reserved if tightest else None,
            requested=hold.held[tightest.unit] if tightest else None,
            remaining=rows,
        )

    # --- settle and release -------------------------------------------------------------------------------------

    def settle(
        self,
        id: UUID,  # noqa: A002 - the contract's name
        costs: Costs | None = None,
        final: bool = True,
        outcome: str = "ok",
        tenant: str = "default",
    ) -> SettleAnswer:
        """Book the true totals in place of the hold; not final: book up to them, and hold the rest on."""
        if outcome not in OUTCOMES or (outcome == "unknown" and (costs is not None or not final)):
            raise ModelError("invalid_argument", f"outcome {outcome}")
        if costs is None and not final:
            raise ModelError("invalid_costs", "a settle that is not final says how far it is")
        named = {} if costs is None else costs_of(costs)
        owner = self._tenant(tenant)
        hold = self._hold(owner, id)
        self._check_totals(hold, named)
        if hold.state == "settled":
            return self._settle_again(owner, hold, named, final, outcome)
        if hold.state == "released":
            raise ModelError("already_released", str(id))
        overdue = hold.overdue(self.now)
        expired = hold.state == "expired" or overdue
        if expired and not final:
            raise ModelError("expired", str(id))
        if not final:
            return self._settle_partly(owner, hold, named)
        totals = hold.filled(named)
        self._check_not_decreased(hold, totals)
        self._check_not_credited(hold, totals)
        if overdue:
            self._expire(owner, hold)
        if expired:
            self._correct(owner, hold, totals, more="late", late=True)
        else:
            self._book(owner, hold, totals, close=True)
        hold.state, hold.late, hold.totals = "settled", expired, totals
        hold.correctable = outcome == "unknown"
        hold.overage = _overage(hold, totals)
        return SettleAnswer("settled", hold.late, False, hold.overage)

    def _settle_partly(self, owner: Tenant, hold: Hold, named: dict[str, Fraction]) -> SettleAnswer:
        """Units left out stay at what is booked. The same totals again are a replay."""
        totals = {unit: named.get(unit, hold.booked.get(unit, ZERO)) for unit in hold.held}
        self._check_not_decreased(hold, totals)
        replayed = all(totals[unit] == hold.booked.get(unit, ZERO) for unit in totals if hold.books(unit))
        if not replayed:
            self._book(owner, hold, totals, close=False)
        hold.booked = {unit: amount for unit, amount in totals.items() if hold.books(unit)}
        return SettleAnswer("held", False, replayed, _overage(hold, totals))

    def _settle_again(
        self, owner: Tenant, hold: Hold, named: dict[str, Fraction], final: bool, outcome: str
    ) -> SettleAnswer:
        """On a settled reservation: the same totals are a replay; others correct an unknown outcome, once."""
        totals = hold.filled(named)
        assert hold.totals is not None
        same = all(totals[unit] == hold.totals[unit] for unit in totals if hold.books(unit))
        if not final or (not same and not hold.correctable):
            raise ModelError("already_settled", str(hold.id))
        if outcome == "unknown" or (same and not hold.correctable):
            return SettleAnswer("settled", hold.late, True, hold.overage)
        self._check_not_credited(hold, totals)
        self._correct(owner, hold, totals, more="correction_up", late=False)
        hold.totals, hold.correctable = totals, False
        hold.overage = _overage(hold, totals)
        return SettleAnswer("settled", hold.late, False, hold.overage)

    def _check_totals(self, hold: Hold, named: dict[str, Fraction]) -> None:
        """Only units that the reservation has; whole slots."""
        for unit in named:
            if unit not in hold.held:
                raise ModelError("unit_not_held", unit)
        for line in hold.lines:
            unit = line.account.shape.unit
            if line.account.shape.kind == "concurrency" and unit in named:
                whole(named[unit], unit)

    def _check_not_decreased(self, hold: Hold, totals: dict[str, Fraction]) -> None:
        for unit, amount in totals.items():
            if hold.books(unit) and amount < hold.booked.get(unit, ZERO):
                raise ModelError("total_decreased", unit)

    def release(self, id: UUID, tenant: str = "default") -> tuple[str, bool]:  # noqa: A002 - the contract's name
        """The call never left: what is still held returns, what was booked stays. -> (state, replayed)."""
        owner = self._tenant(tenant)
        hold = self._hold(owner, id)
        if hold.state == "settled":
            raise ModelError("already_settled", str(id))
        if hold.overdue(self.now):
            self._expire(owner, hold)
        if hold.state != "held":
            return hold.state, True
        self._return(hold)
        hold.state = "released"
        return "released", False

    # --- adjust and extend --------------------------------------------------------------------------------------

    def adjust(self, id: UUID, costs: Costs | None, tenant: str = "default") -> ReserveAnswer:  # noqa: A002
        """Change what is held to new totals. Raising is tested like a reserve; lowering is never refused."""
        named = costs_of(costs)
        owner = self._tenant(tenant)
        hold = self._hold(owner, id)
        self._check_totals(hold, named)
        self._check_open(hold)
        self._check_not_decreased(hold, named)
        replayed = all(hold.held[unit] == amount for unit, amount in named.items())
        changes = self._changes(hold, named)
        demands = [
            Demand(account, change, in_force=account.name in self.effective(owner, account.subject))
            for account, change in changes
            if change > 0
        ]
        if demands:
            refusal = self._refusal(owner, [hold.subject, *hold.also], demands, hold.headroom)
            if refusal is not None:
                return replace(refusal, reservation=hold.id, state=hold.state, expires_at=hold.expires_at)
        for account, change in changes:
            lines = [line for line in hold.lines if line.account is account]
            if account.shape.kind != "concurrency" and account.shape.unit in named:
                for line in lines:
                    line.held = line.taken
            if change > 0:
                self._take(owner, hold, next(demand for demand in demands if demand.account is account))
            else:
                self._lower(lines, -change)
        hold.held.update(named)
        return self._granted(owner, hold, replayed)

    def _changes(self, hold: Hold, named: dict[str, Fraction]) -> list[tuple[Account, Fraction]]:
        """How much more (or less) each account has to hold, in lock order."""
        found = []
        for account in sorted(_accounts(hold), key=lambda each: each.key):
            unit = account.shape.unit
            if unit in named:
                lines = [line for line in hold.lines if line.account is account]
                found.append((account, named[unit] - total(line.taken for line in lines)))
        return found

    def extend(self, id: UUID, ttl: timedelta | None, tenant: str = "default") -> datetime:  # noqa: A002
        """now + ttl, never earlier than before."""
        exact_ttl = check_ttl(ttl)
        hold = self._hold(self._tenant(tenant), id)
        self._check_open(hold)
        hold.expires_at = max(hold.expires_at, self.now + exact_ttl)
        return hold.expires_at

    def _hold(self, owner: Tenant, known_id: UUID) -> Hold:
        if known_id not in owner.holds:
            raise ModelError("unknown_reservation", str(known_id))
        return owner.holds[known_id]

    def _check_open(self, hold: Hold) -> None:
        if hold.state == "settled":
            raise ModelError("already_settled", str(hold.id))
        if hold.state == "released":
            raise ModelError("already_released", str(hold.id))
        if hold.state == "expired" or hold.overdue(self.now):
            raise ModelError("expired", str(hold.id))

    # --- usage without a hold, and credit -----------------------------------------------------------------------

    def record(
        self,
        subject: str,
        costs: Costs | None,
        id: UUID | None = None,  # noqa: A002 - the contract's name
        also: Sequence[str] = (),
        tenant: str = "default",
        assigned: UUID | None = None,
    ) -> bool:
        """Book usage that had no hold, in full, never refused. -> replayed."""
        names = _names(subject, also)
        asked = costs_of(costs)
        owner = self._tenant(tenant)
        if self._known(owner, id, names, asked, record=True) is not None:
            return True
        demands, units = self._demands(owner, names, asked, ("requests",))
        hold = self._new_hold(owner, id or assigned or uuid4(), names, asked, units)
        for demand in demands:
            account = owner.accounts.setdefault((demand.account.subject, demand.account.name), demand.account)
            if account.shape.kind == "concurrency":
                continue
            account.turn_window(self.now)
            line = Line(account, account.window, demand.cost, charge=False, booked=demand.cost)
            hold.lines.append(line)
            self._enter(owner, line, "record", demand.cost, hold.id)
            self._shift(account, -demand.cost)
        hold.state, hold.record, hold.totals = "settled", True, units
        return False

    def credit(
        self,
        reservation: UUID,
        costs: Costs | None,
        id: UUID | None = None,  # noqa: A002 - the contract's name
        tenant: str = "default",
    ) -> bool:
        """Take back a part of what a reservation booked, on all its accounts, in their windows. -> replayed.

        The ledger line remembers the id: a credit that takes nothing writes none, and its id stays free.
        """
        asked = costs_of(costs)
        owner = self._tenant(tenant)
        hold = self._hold(owner, reservation)
        self._check_totals(hold, asked)
        note = Note(reservation, asked)
        if id is not None and id in owner.notes:
            if owner.notes[id] != note:
                raise ModelError("id_conflict", str(id))
            return True
        for unit, amount in asked.items():
            if hold.lines_of(unit) and amount > self._creditable(hold, unit):
                raise ModelError("amount_out_of_range", f"{unit}: more than was booked")
        if hold.overdue(self.now):
            self._expire(owner, hold)
        before = len(owner.entries)
        for unit, amount in asked.items():
            for lines in hold.lines_of(unit):
                rest = amount
                for line in reversed(lines):
                    part = min(rest, line.booked - line.credited)
                    line.credited += part
                    rest -= part
                    self._enter(owner, line, "credit", part, hold.id)
        if id is not None and len(owner.entries) > before:
            owner.notes[id] = note
        return False

    def _creditable(self, hold: Hold, unit: str) -> Fraction:
        """What of a unit is booked and not yet credited, on the account where that is least."""
        overdue = hold.overdue(self.now)

        def net(line: Line) -> Fraction:
            return line.booked - line.credited + (line.remaining if overdue and line.charge else ZERO)

        return min(total(net(line) for line in lines) for lines in hold.lines_of(unit))

    # --- reading and reaping ------------------------------------------------------------------------------------

    def balance(self, subject: str, tenant: str = "default") -> list[Row]:
        """Every limit in force on the lineage, now, overdue holds counted as their expiry will book them."""
        check_name(subject)
        owner = self._tenant(tenant)
        accounts = [
            self._account(owner, each, limit)
            for each in self._resolve(owner, [subject])
            for limit in self.effective(owner, each).values()
        ]
        return self._rows(owner, accounts)

    def reap(self, maximum: int = 1000, tenant: str | None = None) -> tuple[int, int]:
        """Close at most `maximum` overdue holds, oldest first. -> (released, charged), in holds."""
        if maximum < 1:
            raise ModelError("invalid_argument", f"max {maximum}")
        owners = [self._tenant(tenant)] if tenant is not None else list(self.tenants.values())
        queue = [(hold.expires_at, hold.id, owner, hold) for owner in owners for hold in self._overdue(owner)]
        queue.sort(key=lambda item: item[:2])
        charged = sum(self._expire(owner, hold) for _, _, owner, hold in queue[:maximum])
        return min(maximum, len(queue)) - charged, charged


def _names(subject: str, also: Sequence[str]) -> list[str]:
    """The subjects of a request: the first, then the set of the others in byte order."""
    return [check_subject(subject), *sorted({check_subject(name) for name in also} - {subject}, key=str.encode)]


def _accounts(hold: Hold) -> list[Account]:
    return list({line.account.key: line.account for line in hold.lines}.values())


def _overage(hold: Hold, totals: dict[str, Fraction]) -> dict[str, Fraction]:
    """What exceeds the amount once held, unit by unit."""
    return {
        unit: amount - hold.held[unit]
        for unit, amount in totals.items()
        if hold.books(unit) and amount > hold.held[unit]
    }
