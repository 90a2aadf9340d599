"""The decisions of a leased budget: who gets what of the lease. A lock and a clock, no I/O.

Nothing is granted beyond what is free in the lease, and nothing from the instant on at which the database may take it
for expired. What the database has answered about leases is told by `Leases`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation, getcontext
from enum import Enum
from typing import Any
from uuid import UUID

from quota.calls import Costs, Released, Reservation, Settlement
from quota.errors import (
    AlreadyReleased,
    AlreadySettled,
    Expired,
    IdConflict,
    InvalidAmount,
    InvalidArgument,
    Misuse,
    TotalDecreased,
    UnitNotHeld,
)
from quota.lease.amounts import PLAIN_DIGITS, STEP, ZERO, Amounts, add, exact_amount, remainder, subtract
from quota.lease.lease import Lease
from quota.lease.leases import Leases
from quota.lease.local import Granted, Local, first_key, identity, standings
from quota.lease.terms import COUNTED, Terms

__all__ = ["TTL_S", "Escrow", "Need", "Verdict", "key_of"]

# Ids that were decided elsewhere and are remembered.
_ELSEWHERE = 10_000
TTL_S = 600.0
"""How long a call lives when nobody says otherwise, in seconds."""

_SETTLED = Settlement(state="settled")
_RELEASED = Released(state="released")
_OUTCOMES = ("ok", "error", "timeout", "cancelled", "unknown")


class Verdict(Enum):
    """What a call needs that cannot be decided here."""

    LEASE = "a lease, or more of it"
    DATABASE = "the database itself"


@dataclass(frozen=True, slots=True)
class Need:
    """An adjust that needs more of a lease: how much of each unit must become free."""

    lease: Lease
    amounts: Amounts


class Escrow(Leases):
    """The calls under the leases of one process. Thread-safe. Field: `direct` counts those the database decides."""

    def __init__(self, terms: Terms, clock: Callable[[], float]) -> None:
        super().__init__(terms, clock)
        self.direct = 0
        self._open: dict[int, Local] = {}
        # Closed calls: the newer ones, and as many older ones, forgotten together.
        self._done: dict[int, Local] = {}
        self._done_before: dict[int, Local] = {}
        self._elsewhere: OrderedDict[int, None] = OrderedDict()
        self._key = self._first = first_key()
        self._others = 0
        # No call's time passes before that; what `take` grants later passes later.
        self._earliest_s = clock() + TTL_S

    @property
    def local(self) -> int:
        """How many calls were granted here."""
        return self._key - self._first + self._others

    # -- reserve ------------------------------------------------------------------------------------------------------

    # `take` and `close` are `reserve` and `settle` for the plain case, in as few steps as there can be; whatever is out
    # of the ordinary they leave to those, and everything as it was.

    def take(self, costs: Costs) -> Reservation | None:
        """Grants a new call of the usual time if that is plain; None: `reserve` decides, and says what is wrong."""
        lease = self._lease
        if lease is None or not lease.plain or getcontext().prec < PLAIN_DIGITS:
            return None
        try:
            asked: dict[str, Any] = {**lease.counted, **costs}  # no map at all: a TypeError, as it should be
            if len(asked) != len(lease.free) or (lease.slots and not lease.slots.isdisjoint(costs)):
                return None
            left = {}
            with self._lock:
                # Read under the lock: whoever waited for it waited a while.
                now_s = self._clock()
                if now_s >= lease.until:
                    return None
                free = lease.free
                for unit, amount in asked.items():
                    if type(amount) is not Decimal:
                        asked[unit] = amount = exact_amount(unit, amount)  # noqa: PLW2901
                    if not ZERO <= amount <= free[unit] or amount % STEP:
                        return None
                    left[unit] = free[unit] - amount
                free.update(left)
                self._key = key = self._key + 1
                self._open[key] = local = Local()
                local.lease = lease
                local.asked = local.first = asked
                local.deadline_s = now_s + TTL_S
        except (InvalidOperation, KeyError):  # NaN, or more digits than the caller's context has; a unit not leased
            return None
        return Granted.to(key, local)

    def reserve(self, given: Amounts, ttl_s: float, key: int) -> Reservation | Verdict:
        """Decides a call: granted, refused because it is closed, or what it needs.

        Arguments: `given`, its costs; `ttl_s`, how long it lives; `key`, its id. Errors: `IdConflict`, `InvalidAmount`.
        """
        with self._lock:
            now_s = self._clock()
            if (known := self._find(key)) is not None:
                return self._replay(key, known, given, now_s)
            if self._closed:
                raise RuntimeError("this leased budget is closed")
            if key in self._elsewhere:
                return Verdict.DATABASE
            lease = self._usable(now_s)
            if lease is None:
                passing = now_s < self._direct_until_s or not self.terms.suits(given)
                return self._to_database(key) if passing else Verdict.LEASE
            asked = lease.complete(given)
            if asked is None:
                return self._to_database(key)
            self._require_whole(lease, asked)
            if not lease.fits(asked):
                return Verdict.LEASE if lease.within(asked) and not lease.sealed else self._to_database(key)
            for unit, amount in asked.items():
                lease.free[unit] = subtract(lease.free[unit], amount)
            self._open[key] = local = Local()
            local.lease = lease
            local.asked = local.first = asked
            local.deadline_s = now_s + ttl_s
            self._earliest_s = min(self._earliest_s, local.deadline_s)
            self._others += 1
            return Granted.to(key, local)

    def _to_database(self, key: int) -> Verdict:
        # Once asked there, an id is always asked there: here it would be granted a second time.
        self._elsewhere[key] = None
        if len(self._elsewhere) > _ELSEWHERE:
            self._elsewhere.popitem(last=False)
        self.direct += 1
        return Verdict.DATABASE

    def _replay(self, key: int, local: Local, given: Amounts, now_s: float) -> Reservation:
        if (asked := local.lease.complete(given)) != local.first:
            raise IdConflict(
                f"id_conflict: reservation {identity(key)} is known with another request: costs {asked}, "
                f"first {local.first}",
                "Use a new id for a new request, or repeat the first one unchanged.",
            )
        if local.state == "held" and now_s >= local.deadline_s:
            self._expire(key, local)
        return self._standing(key, local, replayed=True)

    @staticmethod
    def _standing(key: int, local: Local, *, replayed: bool) -> Reservation:
        open_ = local.state == "held"
        return Reservation(
            granted=open_,
            reservation=identity(key),
            state=local.state,
            expires_at=local.lease.instant(local.deadline_s),
            replayed=open_ and replayed,
            reason=None if open_ else "closed",
            remaining=standings(local.lease) if open_ else (),
        )

    @staticmethod
    def _require_whole(lease: Lease, asked: Amounts) -> None:
        for unit in lease.slots & asked.keys():
            if remainder(asked[unit], Decimal(1)):
                raise InvalidAmount(
                    f'invalid_amount: {asked[unit]} of "{unit}" is not a whole number of slots',
                    "Concurrency is counted in whole slots.",
                )

    # -- settle, release, adjust, extend ------------------------------------------------------------------------------

    def close(self, key: int, costs: Costs | None) -> Settlement | None:
        """Settles an open call finally if that is plain; None: `settle` does."""
        given: dict[str, Any] = {} if costs is None else {**costs}
        if (not given and costs is not None) or getcontext().prec < PLAIN_DIGITS:
            return None
        matched = 0
        used, free = {}, {}
        try:
            with self._lock:
                local = self._open.get(key)
                if local is None or local.booked or self._clock() >= local.deadline_s or not local.lease.plain:
                    return None
                lease = local.lease
                for unit, amount in local.asked.items():
                    total = given.get(unit)
                    if total is None:
                        total = amount
                    else:
                        matched += 1
                        if type(total) is not Decimal:
                            given[unit] = total = exact_amount(unit, total)
                        if not ZERO <= total <= amount or total % STEP:
                            return None
                    if unit in lease.slots:
                        free[unit] = lease.free[unit] + amount
                    else:
                        used[unit] = lease.used[unit] + total
                        free[unit] = lease.free[unit] + (amount - total)
                if matched != len(given):
                    return None
                lease.used.update(used)
                lease.free.update(free)
                local.booked = given
                local.state = "settled"
                del self._open[key]
                self._remember(key, local)
        except InvalidOperation:
            return None
        return _SETTLED

    def settle(self, key: int, given: Amounts | None, final: bool, outcome: str) -> tuple[Settlement, Amounts] | None:
        """Books totals of a call. Arguments as in `Client.settle`, judged.

        Result: the answer, and what its lease can no longer book and is to be recorded; None for an id not known here.
        Errors: those of `Client.settle`.
        """
        _require_settle_arguments(given, final, outcome)
        with self._lock:
            local = self._known(key)
            if local is None:
                return None
            totals = self._totals(key, local, given, final)
            if local.state == "released":
                raise AlreadyReleased(
                    f"already_released: reservation {identity(key)} was released",
                    "Book usage that has no hold with record.",
                )
            if local.state == "settled":
                return self._settle_again(key, local, totals, final, outcome), local.unbooked or {}
            if local.state == "expired" and not final:
                raise Expired(
                    f"expired: reservation {identity(key)} expired",
                    "Settle it finally: late usage is booked in full.",
                )
            self._require_not_decreased(key, local, totals)
            over = {u: subtract(t, local.asked[u]) for u, t in totals.items() if t > local.asked[u]}
            if local.state == "expired":
                before = self._whole(local) if local.charged else self._so_far(local)
                self._correct(local, before, totals)
                local.late = True
            elif not final and totals == self._so_far(local):
                return Settlement(state="held", replayed=True, overage=over), {}
            else:
                self._book(local, totals, final)
            local.booked = totals
            if final:
                late = local.late
                if not late:
                    self._finished(key, local)
                local.state, local.unknown = "settled", outcome == "unknown"
            return Settlement(state=local.state, late=local.late, overage=over), local.unbooked or {}

    def release(self, key: int) -> Released | None:
        """Returns what a call still holds; None for an id not known here. Errors: `AlreadySettled`."""
        with self._lock:
            local = self._known(key)
            if local is None:
                return None
            if local.state == "settled":
                raise self._already_settled(key, local)
            if local.state != "held":
                return Released(state=local.state, replayed=True)
            self._book(local, self._so_far(local), True)
            self._finished(key, local)
            local.state = "released"
            return _RELEASED

    def adjust(self, key: int, given: Amounts) -> Reservation | Need | None:
        """Changes what a call holds to these totals, or says what of its lease that needs; None: not known here.

        Errors: those of `Client.adjust`.
        """
        with self._lock:
            local = self._known(key)
            if local is None:
                return None
            self._require_open(key, local)
            self._require_units(key, local, given)
            asked = local.asked | {u: a for u, a in given.items() if u in local.asked}
            self._require_not_decreased(key, local, asked)
            lease = local.lease
            self._require_whole(lease, asked)
            steps = {
                u: subtract(max(a, local.booked.get(u, ZERO)), max(local.asked[u], local.booked.get(u, ZERO)))
                for u, a in asked.items()
            }
            raises = {u: step for u, step in steps.items() if step > ZERO}
            if not lease.fits(raises):
                return Need(lease, raises)
            for unit, step in steps.items():
                lease.free[unit] = subtract(lease.free[unit], step)
            replayed = asked == local.asked
            local.asked = asked
            return self._standing(key, local, replayed=replayed)

    def extend(self, key: int, ttl_s: float) -> datetime | None:
        """Lets a call live for `ttl_s` from now on, never shorter than before; None: not known here."""
        with self._lock:
            local = self._known(key)
            if local is None:
                return None
            self._require_open(key, local)
            local.deadline_s = max(local.deadline_s, self._clock() + ttl_s)
            return local.lease.instant(local.deadline_s)

    def recorded(self, key: int) -> None:
        """What the lease of a call could not book has been recorded."""
        with self._lock:
            if (local := self._find(key)) is not None:
                local.unbooked = None

    def _known(self, key: int) -> Local | None:
        local = self._find(key)
        if local is not None and local.state == "held" and self._clock() >= local.deadline_s:
            self._expire(key, local)
        return local

    def _totals(self, key: int, local: Local, given: Amounts | None, final: bool) -> Amounts:
        """The totals of everything that is booked at all, units left out filled in."""
        self._require_units(key, local, given or {})
        slots = local.lease.slots
        so_far = self._so_far(local)
        if final:
            so_far = {**local.asked, **local.booked} if local.state == "settled" else self._whole(local)
        return {u: (given or {}).get(u, amount) for u, amount in so_far.items() if u not in slots}

    @staticmethod
    def _so_far(local: Local) -> Amounts:
        return {u: local.booked.get(u, ZERO) for u in local.asked if u not in local.lease.slots}

    @staticmethod
    def _whole(local: Local) -> Amounts:
        """The whole of it by unit, never below what is booked."""
        return {u: max(a, local.booked.get(u, ZERO)) for u, a in local.asked.items() if u not in local.lease.slots}

    def _settle_again(self, key: int, local: Local, totals: Amounts, final: bool, outcome: str) -> Settlement:
        first = {u: local.booked.get(u, a) for u, a in local.asked.items() if u not in local.lease.slots}
        over = {u: subtract(t, local.asked[u]) for u, t in first.items() if t > local.asked[u]}
        if local.unknown and final and outcome != "unknown":
            self._correct(local, first, totals)
            local.unknown, local.booked = False, totals
            return Settlement(
                state="settled",
                late=local.late,
                overage={u: subtract(t, local.asked[u]) for u, t in totals.items() if t > local.asked[u]},
            )
        if final and (totals == first or (local.unknown and outcome == "unknown")):
            return Settlement(state="settled", late=local.late, replayed=True, overage=over)
        raise self._already_settled(key, local)

    def _book(self, local: Local, totals: Amounts, final: bool) -> None:
        """What is booked up to `totals` comes out of the call's own part first; finally the rest of it goes back."""
        lease = local.lease
        for unit, amount in local.asked.items():
            if unit in lease.slots:
                lease.free[unit] = add(lease.free[unit], amount if final else ZERO)
                continue
            before = local.booked.get(unit, ZERO)
            step = subtract(totals[unit], before)
            kept = ZERO if final else max(ZERO, subtract(amount, totals[unit]))
            freed = subtract(max(ZERO, subtract(amount, before)), kept)
            lease.used[unit] = add(lease.used[unit], step)
            lease.free[unit] = add(lease.free[unit], subtract(freed, step))
        lease.note_size()

    @staticmethod
    def _correct(local: Local, before: Amounts, totals: Amounts) -> None:
        """What was booked as `before` comes to `totals`. What was posted already is never taken back."""
        lease = local.lease
        for unit, total in totals.items():
            step = subtract(total, before[unit])
            if step < ZERO:
                step = ZERO if lease.closing else max(step, subtract(lease.sent[unit], lease.used[unit]))
            elif step and lease.closing:
                local.unbooked = {**(local.unbooked or {}), unit: step}
                continue
            lease.used[unit] = add(lease.used[unit], step)
            lease.free[unit] = subtract(lease.free[unit], step)
        lease.note_size()

    def _sweep(self, now_s: float) -> None:
        if now_s < self._earliest_s:
            return
        for key, local in list(self._open.items()):
            if now_s >= local.deadline_s:
                self._expire(key, local)
        self._earliest_s = min([now_s + TTL_S, *(local.deadline_s for local in self._open.values())])

    def _expire(self, key: int, local: Local) -> None:
        local.charged = self.terms.on_expiry == "charge"
        self._book(local, self._whole(local) if local.charged else self._so_far(local), True)
        self._finished(key, local)
        local.state = "expired"

    def _finished(self, key: int, local: Local) -> None:
        del self._open[key]
        self._remember(key, local)

    def _remember(self, key: int, local: Local) -> None:
        self._done[key] = local
        if len(self._done) >= self.terms.remember:
            self._done_before, self._done = self._done, {}

    def _find(self, key: int) -> Local | None:
        return self._open.get(key) or self._done.get(key) or self._done_before.get(key)

    def _in_use(self, lease: Lease) -> bool:
        return any(local.lease is lease for local in self._open.values())

    @staticmethod
    def _require_open(key: int, local: Local) -> None:
        errors: dict[str, type[Misuse]] = {"settled": AlreadySettled, "released": AlreadyReleased, "expired": Expired}
        if local.state != "held":
            error = errors[local.state]
            raise error(f"{error.name}: reservation {identity(key)} is {local.state}", "Reserve anew under a new id.")

    @staticmethod
    def _already_settled(key: int, local: Local) -> AlreadySettled:
        first = {u: str(a) for u, a in local.booked.items()} or "its hold"
        return AlreadySettled(
            f"already_settled: reservation {identity(key)} was settled with {first}",
            "The first totals stand; record what was missing.",
        )

    @staticmethod
    def _require_units(key: int, local: Local, given: Amounts) -> None:
        if foreign := given.keys() - local.asked.keys() - set(COUNTED):
            raise UnitNotHeld(
                f'unit_not_held: reservation {identity(key)} does not hold "{min(foreign)}"',
                f"Settle and adjust the units it was reserved with: {', '.join(sorted(local.asked))}.",
            )

    @staticmethod
    def _require_not_decreased(key: int, local: Local, totals: Amounts) -> None:
        for unit, booked in local.booked.items():
            if unit in totals and totals[unit] < booked:
                raise TotalDecreased(
                    f'total_decreased: {totals[unit]} of "{unit}" is below the {booked} that reservation '
                    f"{identity(key)} has booked",
                    "Totals are of the reservation so far, never steps: send the sum of everything used.",
                )


def key_of(identity: UUID | str) -> int:
    """Returns the key of an id. Errors: `InvalidArgument` when it is no UUID."""
    if isinstance(identity, UUID):
        return identity.int
    try:
        return UUID(identity).int
    except ValueError:
        raise InvalidArgument(f"invalid_argument: id {identity!a} is no UUID", "pass one, v7 advised") from None


def _require_settle_arguments(given: Amounts | None, final: bool, outcome: str) -> None:
    if outcome not in _OUTCOMES:
        raise InvalidArgument(
            f'invalid_argument: outcome "{outcome}" is unknown', "Pass ok, error, timeout, cancelled or unknown."
        )
    if outcome == "unknown" and (given is not None or not final):
        raise InvalidArgument(
            "invalid_argument: an unknown outcome books the whole hold and takes no costs",
            "Leave costs out and settle finally; settle once more when the true totals are known.",
        )
