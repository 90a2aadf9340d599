"""How amounts move between holds, accounts and the ledger: taking, booking, returning, expiring.

Nothing here decides or refuses; that is done before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from uuid import UUID

from tests.model.amounts import ZERO
from tests.model.catalog import Catalog, Tenant
from tests.model.errors import ModelError
from tests.model.holds import Entry, Hold, Line, spread, total
from tests.model.limits import Account, Numbers, Row, judge, row_of


@dataclass(frozen=True)
class Demand:
    """What one request asks of one account. Nothing is compared with a limit that is no longer in force."""

    account: Account
    cost: Fraction
    in_force: bool = True


class Booking(Catalog):
    """The mechanical half of the operations."""

    # --- seeing -------------------------------------------------------------------------------------------------

    def _rows(self, owner: Tenant, accounts: Iterable[Account]) -> list[Row]:
        """Accounts as anyone may see them now: an overdue hold counts as its expiry will book it."""
        return [
            row_of(account, self._expiry_view(owner, account), self.now)
            for account in sorted(accounts, key=lambda each: each.key)
        ]

    def _expiry_view(self, owner: Tenant, account: Account) -> Numbers:
        """The numbers with every overdue hold counted as its expiry will book it."""
        numbers = account.numbers(self.now)
        spent, reserved, level = numbers.spent, numbers.reserved, numbers.level
        for hold, line in self._lines(owner, account):
            if not hold.overdue(self.now) or not self._counts(line):
                continue
            reserved -= line.remaining
            if line.charge:
                spent += line.remaining
            else:
                level += line.remaining
        capacity = account.limit.capacity
        return Numbers(spent, reserved, level if capacity is None else min(capacity, level), numbers.window)

    def _counts(self, line: Line) -> bool:
        """Whether a line still holds something of what its account counts now."""
        ended = line.window is not None and line.account.open_window(self.now) is None
        return line.remaining > 0 and line.current and not ended

    def _judge(self, demands: list[Demand], headroom: Fraction) -> list[Row]:
        """The violated limits, on the stored numbers: holds that nobody has closed yet still stand in them."""
        rows = [
            judge(demand.account, demand.account.numbers(self.now), demand.cost, headroom, self.now)
            for demand in demands
            if demand.in_force
        ]
        return [row for row in rows if row is not None]

    def _violations(self, owner: Tenant, demands: list[Demand], headroom: Fraction) -> list[Row]:
        """Judge; if something does not fit, close the overdue holds in its way and judge again.

        Exactly these are closed: all overdue holds that still hold something on an account that was violated on the
        stored numbers, in the window that counts there now. A request that fits on the stored numbers closes none; a
        frozen one is never judged and closes none. It matters for buckets only, where a refund counts when it is swept.
        """
        violated = self._judge(demands, headroom)
        if not violated:
            return []
        places = {(row.subject, row.limit_name) for row in violated}
        for hold in self._overdue(owner):
            if any((line.account.subject, line.account.name) in places and self._counts(line) for line in hold.lines):
                self._expire(owner, hold)
        return self._judge(demands, headroom)

    # --- taking and returning -----------------------------------------------------------------------------------

    def _take(self, owner: Tenant, hold: Hold, demand: Demand) -> None:
        """Hold an amount on an account: the last line grows while its window lasts, else a further line begins."""
        account = owner.accounts.setdefault((demand.account.subject, demand.account.name), demand.account)
        own = [line for line in hold.lines if line.account is account]
        account.turn_window(self.now)
        account.reserved += demand.cost
        self._shift(account, -demand.cost)
        if own and own[-1].current:
            own[-1].held += demand.cost
        else:
            charge = account.shape.kind != "concurrency" and "charge" in (hold.on_expiry, account.limit.on_expiry)
            hold.lines.append(Line(account, account.window, demand.cost, own[-1].charge if own else charge))

    def _shift(self, account: Account, change: Fraction) -> None:
        """Touch a bucket."""
        if account.shape.kind == "bucket":
            account.shift_level(self.now, change)

    def _unhold(self, line: Line, amount: Fraction) -> None:
        """An amount is held no more: the counter follows while the line's window is the stored one."""
        if line.current:
            line.account.reserved -= amount

    def _lower(self, lines: list[Line], amount: Fraction) -> None:
        """Take a part of a hold back, from the last line first, never below what is booked."""
        for line in reversed(lines):
            given = min(amount, line.remaining)
            line.held -= given
            amount -= given
            self._unhold(line, given)
            self._shift(line.account, given)

    # --- booking ------------------------------------------------------------------------------------------------

    def _enter(self, owner: Tenant, line: Line, kind: str, amount: Fraction, reservation: UUID | None) -> None:
        """Write one entry into the line's own window; zero is not written. The counter follows if it is that window."""
        if not amount:
            return
        entry = Entry(line.account, line.window, kind, amount, reservation)
        owner.entries.append(entry)
        if line.account.shape.kind == "budget" and line.current:
            line.account.spent += entry.signed

    def _book(self, owner: Tenant, hold: Hold, totals: dict[str, Fraction], close: bool) -> None:
        """Book an open hold up to its totals; at the close the rest returns, and the slots are free."""
        for line, share in _shares(hold, totals):
            within = min(share, line.held) - min(line.booked, line.held)
            beyond = max(share - line.held, ZERO) - max(line.booked - line.held, ZERO)
            taken, remaining = line.taken, line.remaining
            line.booked = share
            self._enter(owner, line, "settle", within, hold.id)
            self._enter(owner, line, "overage", beyond, hold.id)
            self._unhold(line, remaining if close else remaining - line.remaining)
            self._shift(line.account, taken - (share if close else line.taken))
        if close:
            self._free_slots(hold)

    def _free_slots(self, hold: Hold) -> None:
        for line in hold.lines:
            if line.account.shape.kind == "concurrency":
                self._unhold(line, line.held)

    def _correct(self, owner: Tenant, hold: Hold, totals: dict[str, Fraction], more: str, late: bool) -> None:
        """Bring what a closed hold has booked to its true totals. A late settle never gives to a bucket."""
        for line, share in _shares(hold, totals):
            change = share - line.booked
            line.booked = share
            self._enter(owner, line, more if change > 0 else "correction_down", abs(change), hold.id)
            self._shift(line.account, -max(change, ZERO) if late else -change)

    def _check_not_credited(self, hold: Hold, totals: dict[str, Fraction]) -> None:
        """What has been credited stays booked: a later total below it would take it back twice."""
        for line, share in _shares(hold, totals):
            if share < line.credited:
                raise ModelError("total_decreased", f"{line.credited} of {line.account.name} is credited already")

    # --- closing ------------------------------------------------------------------------------------------------

    def _overdue(self, owner: Tenant) -> list[Hold]:
        """Open holds whose time has passed, oldest first."""
        found = [hold for hold in owner.holds.values() if hold.overdue(self.now)]
        return sorted(found, key=lambda hold: (hold.expires_at, hold.id))

    def _expire(self, owner: Tenant, hold: Hold) -> bool:
        """What the reaper does to one hold: each line returns or books what it still holds. True if any was booked."""
        charged = False
        for line in hold.lines:
            rest = line.remaining
            self._unhold(line, rest)
            if line.charge:
                charged = charged or rest > 0
                line.booked += rest
                self._enter(owner, line, "charge", rest, hold.id)
            self._shift(line.account, ZERO if line.charge else rest)
        hold.state = "expired"
        return charged

    def _return(self, hold: Hold) -> None:
        """What a hold still holds goes back. `held` itself stays: a late settle is compared with it."""
        for line in hold.lines:
            self._unhold(line, line.remaining)
            self._shift(line.account, line.remaining)

    def _settle_down(self, owner: Tenant, name: str) -> None:
        """No hold may be open on a subject or below it; overdue ones close here."""
        touched = [hold for hold in owner.holds.values() if hold.state == "held" and name in hold.subjects]
        if any(not hold.overdue(self.now) for hold in touched):
            raise ModelError("has_open_holds", name)
        for hold in sorted(touched, key=lambda each: (each.expires_at, each.id)):
            self._expire(owner, hold)

    # --- proof --------------------------------------------------------------------------------------------------

    def check(self, tenant: str | None = None) -> list[str]:
        """The invariants of the contract, over one tenant or all; a sentence per violation."""
        owners = [self._tenant(tenant)] if tenant is not None else list(self.tenants.values())
        return [f"{owner.name}: {found}" for owner in owners for found in self._check(owner)]

    def _check(self, owner: Tenant) -> list[str]:
        found: list[str] = []
        for account in owner.accounts.values():
            where = f"{account.subject} {account.name}"
            open_lines = [line for hold, line in self._lines(owner, account) if hold.state == "held" and line.current]
            held = total(line.remaining for line in open_lines)
            mine = [e for e in owner.entries if e.account is account and e.window == account.window]
            spent = total(entry.signed for entry in mine)
            if account.reserved != held:
                found.append(f"{where}: reserved {account.reserved}, open holds {held}")
            if account.shape.kind == "budget" and account.spent != spent:
                found.append(f"{where}: spent {account.spent}, entries {spent}")
            if min(account.spent, account.reserved, account.level or ZERO) < 0:
                found.append(f"{where}: something is negative")
            if account.shape.kind == "bucket":
                level, capacity = account.level_now(self.now), account.limit.capacity
                if capacity is None or not 0 <= level <= capacity:
                    found.append(f"{where}: level {level} outside 0..{capacity}")
        for hold in owner.holds.values():
            found.extend(self._check_outcome(owner, hold))
        return found

    def _check_outcome(self, owner: Tenant, hold: Hold) -> list[str]:
        """The entries of a reservation sum to what it says it booked; settled, to its totals."""
        found = []
        for unit in hold.held:
            for lines in hold.lines_of(unit):
                account = lines[0].account
                booked = total(
                    e.signed
                    for e in owner.entries
                    if e.reservation == hold.id and e.account is account and e.kind != "credit"
                )
                said = total(line.booked for line in lines)
                if booked != said or (hold.totals is not None and said != hold.totals[unit]):
                    found.append(f"{hold.id} {account.name}: entries {booked}, lines {said}, totals {hold.totals}")
        return found


def _shares(hold: Hold, totals: dict[str, Fraction]) -> list[tuple[Line, Fraction]]:
    """Every booking line with its share of its unit's total."""
    found: list[tuple[Line, Fraction]] = []
    for unit in totals:
        for lines in hold.lines_of(unit):
            found.extend(zip(lines, spread(lines, totals[unit]), strict=True))
    return found
