"""Tenants, units, subjects, tiers and limits: who exists, who is below whom, and which limits are in force for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from tests.model.amounts import (
    ZERO,
    amount,
    check_name,
    check_on_expiry,
    check_subject,
    kind_of,
    whole,
)
from tests.model.errors import ModelError
from tests.model.holds import Entry, Hold, Line, Note
from tests.model.limits import Account, Limit, Shape
from tests.model.windows import check_period, check_zone

MAXIMUM_LINEAGE = 8
BUILT_IN_UNITS = {"usd": True, "tokens": False, "requests": False, "cost": False, "concurrency": False}
BUILT_IN_TIERS = {
    "basic": (1_000_000, 3_000, 2_000_000),
    "extended": (5_000_000, 15_000, 10_000_000),
    "bulk": (20_000_000, 60_000, 40_000_000),
}
IMPLIED_UNITS = ("requests", "concurrency")

Number = Decimal | int | str | Fraction


@dataclass
class Subject:
    """Who spends."""

    name: str
    parent: str | None = None
    rate_tier: str = "basic"
    frozen: str | None = None
    retired: bool = False


@dataclass
class Tier:
    """A named set of limits; a retired one acts as `basic`."""

    limits: dict[str, Limit] = field(default_factory=dict)
    retired: bool = False


@dataclass
class Tenant:
    """The outer boundary. Limits stand by owner, which is a subject (`key:42`) or a kind (`key:*`)."""

    name: str
    subjects: dict[str, Subject] = field(default_factory=dict)
    tiers: dict[str, Tier] = field(default_factory=dict)
    limits: dict[str, dict[str, Limit]] = field(default_factory=dict)
    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)
    accounts: dict[tuple[str, str], Account] = field(default_factory=dict)
    holds: dict[object, Hold] = field(default_factory=dict)
    notes: dict[object, Note] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


class Catalog:
    """The administrative half of the model. `now` is the clock; a test sets it, forward and backward."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.units: dict[str, bool] = dict(BUILT_IN_UNITS)
        self.tenants: dict[str, Tenant] = {"default": Tenant("default")}
        self.built_in: dict[str, Tier] = {name: _built_in(*numbers) for name, numbers in BUILT_IN_TIERS.items()}

    # --- tenants, units, subjects -------------------------------------------------------------------------------

    def create_tenant(self, name: str) -> None:
        """A new, empty tenant."""
        if check_name(name) in self.tenants:
            raise ModelError("already_exists", name)
        self.tenants[name] = Tenant(name)

    def create_unit(self, name: str, money: bool = False) -> None:
        """Register what may be counted."""
        if check_name(name) in self.units:
            raise ModelError("already_exists", name)
        self.units[name] = money

    def create_subject(
        self, name: str, parent: str | None = None, rate_tier: str | None = None, tenant: str = "default"
    ) -> None:
        """A new subject. Names are never reused, not even those of retired subjects."""
        check_subject(name)
        if parent is not None:
            check_subject(parent)
        owner = self._tenant(tenant)
        if name in owner.subjects:
            raise ModelError("already_exists", name)
        self._check_tier(owner, name, rate_tier)
        if parent is not None and len(self._lineage(owner, parent)) >= MAXIMUM_LINEAGE:
            raise ModelError("too_deep", name)
        owner.subjects[name] = Subject(name, parent, rate_tier or "basic")

    def ensure_subject(self, name: str, parent: str | None = None, tenant: str = "default") -> bool:
        """Create it unless it is there. A parent that differs from the known one is an error, never a move."""
        check_subject(name)
        if parent is not None:
            check_subject(parent)
        owner = self._tenant(tenant)
        known = owner.subjects.get(name)
        if known is None:
            self.create_subject(name, parent, tenant=tenant)
            return True
        if known.retired:
            raise ModelError("unknown_subject", name)
        if parent is not None and parent != known.parent:
            raise ModelError("parent_differs", name)
        return False

    def move_subject(self, name: str, parent: str | None, tenant: str = "default") -> None:
        """Put a subject, with everything below it, under another parent. Refused while holds are open there."""
        check_subject(name)
        owner = self._tenant(tenant)
        subject = self._subject(owner, name)
        above = self._lineage(owner, parent) if parent is not None else []
        if name in above:
            raise ModelError("cycle", name)
        if len(above) + self._height(owner, name) > MAXIMUM_LINEAGE:
            raise ModelError("too_deep", name)
        self._settle_down(owner, name)
        subject.parent = parent

    def retire_subject(self, name: str, tenant: str = "default") -> None:
        """No new holds on it or below, ever; its ledger lines stay. Refused while holds are open there."""
        check_subject(name)
        owner = self._tenant(tenant)
        subject = self._subject(owner, name)
        self._settle_down(owner, name)
        subject.retired = True

    def freeze(self, name: str, reason: str, tenant: str = "default") -> None:
        """No new holds on it or below."""
        self._subject(self._tenant(tenant), check_subject(name)).frozen = reason

    def unfreeze(self, name: str, tenant: str = "default") -> None:
        """The end of a freeze."""
        self._subject(self._tenant(tenant), check_subject(name)).frozen = None

    # --- limits and tiers ---------------------------------------------------------------------------------------

    def set_limit(
        self,
        subject: str,
        name: str,
        unit: str,
        kind: str,
        capacity: Number | None,
        refill_per_s: Number | None = None,
        period: str | None = None,
        time_zone: str = "UTC",
        on_expiry: str = "release",
        required: bool = False,
        tenant: str = "default",
    ) -> None:
        """Define or change a limit of a subject or of a kind (`key:*`). Its shape never changes."""
        if not subject.endswith(":*"):
            check_subject(subject)
        limit = self._limit(name, unit, kind, capacity, refill_per_s, period, time_zone)
        if check_on_expiry(on_expiry) is None:
            raise ModelError("invalid_argument", "on_expiry")
        owner = self._tenant(tenant)
        if not subject.endswith(":*"):
            self._subject(owner, subject)
        self._check_shape(owner, subject, limit)
        owner.shapes[subject, name] = limit.shape
        owner.limits.setdefault(subject, {})[name] = replace(limit, on_expiry=on_expiry, required=required)
        self._rebind(owner)

    def remove_limit(self, subject: str, name: str, tenant: str = "default") -> None:
        """It takes no new holds; the next in precedence shows again. The counters stay, and so does the shape."""
        owner = self._tenant(tenant)
        if not subject.endswith(":*"):
            self._subject(owner, check_subject(subject))
        if name not in owner.limits.get(subject, {}):
            raise ModelError("unknown_limit", name)
        del owner.limits[subject][name]
        self._rebind(owner)

    def set_tier_limit(
        self,
        tier: str,
        name: str,
        unit: str,
        kind: str,
        capacity: Number | None,
        refill_per_s: Number | None = None,
        period: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Define or change a limit of a tier, which comes to be with its first limit. No tenant: a built-in tier."""
        check_name(tier)
        limit = self._limit(name, unit, kind, capacity, refill_per_s, period, "UTC")
        owners = [self._tenant(tenant)] if tenant is not None else list(self.tenants.values())
        for owner in owners:
            self._check_shape(owner, None, limit)
        home = owners[0].tiers if tenant is not None else self.built_in
        home.setdefault(tier, Tier()).limits[name] = limit
        home[tier].retired = False
        self._rebind(*owners)

    def set_rate_tier(self, subject: str, tier: str, tenant: str = "default") -> None:
        """From the next reservation on the key has the limits of this tier; what it used stays."""
        check_name(tier)
        owner = self._tenant(tenant)
        found = self._subject(owner, check_subject(subject))
        self._check_tier(owner, subject, tier)
        found.rate_tier = tier
        self._rebind(owner)

    def retire_tier(self, tier: str, tenant: str | None = None) -> None:
        """Keys that name it act as `basic` from now on."""
        home = self.built_in if tenant is None else self._tenant(tenant).tiers
        if tier == "basic" and tenant is None:
            raise ModelError("invalid_argument", "every key without a tier of its own acts as basic")
        if tier not in home or home[tier].retired:
            raise ModelError("unknown_tier", tier)
        home[tier].retired = True
        self._rebind(*([self._tenant(tenant)] if tenant is not None else self.tenants.values()))

    # --- resolution ---------------------------------------------------------------------------------------------

    def effective(self, owner: Tenant, subject: str) -> dict[str, Limit]:
        """The limits in force on one subject: its own, else its tier's, else its kind's, name by name."""
        merged = dict(owner.limits.get(f"{kind_of(subject)}:*", {}))
        merged.update(self._tier_limits(owner, subject))
        merged.update(owner.limits.get(subject, {}))
        return merged

    def _tier_limits(self, owner: Tenant, subject: str) -> dict[str, Limit]:
        """The limits of the tier in force: only keys and oauth have one, oauth always `basic`. Unknown: `basic`."""
        kind = kind_of(subject)
        if kind not in ("key", "oauth"):
            return {}
        wanted = owner.subjects[subject].rate_tier if kind == "key" else "basic"
        tiers = self._tiers(owner, wanted) or self._tiers(owner, "basic")
        return {name: limit for tier in tiers for name, limit in tier.limits.items()}

    def _tiers(self, owner: Tenant, name: str) -> list[Tier]:
        """What a name means: the built-in tier, then the tenant's own, which wins limit by limit. Retired: nothing."""
        found = [tiers[name] for tiers in (self.built_in, owner.tiers) if name in tiers]
        return [tier for tier in found if not tier.retired]

    def _resolve(self, owner: Tenant, names: list[str]) -> list[str]:
        """Every subject named and all their ancestors, each once, in byte order."""
        return sorted({each for name in names for each in self._lineage(owner, name)}, key=str.encode)

    def _lineage(self, owner: Tenant, name: str) -> list[str]:
        """Itself first, then its ancestors. A retired subject is unknown, and so is all that is below it."""
        found = [name]
        parent = self._subject(owner, name).parent
        while parent is not None:
            found.append(parent)
            parent = self._subject(owner, parent).parent
        return found

    def _below(self, owner: Tenant, name: str) -> Iterator[str]:
        return (each.name for each in owner.subjects.values() if each.parent == name)

    def _height(self, owner: Tenant, name: str) -> int:
        return 1 + max((self._height(owner, each) for each in self._below(owner, name)), default=0)

    def _tenant(self, name: str) -> Tenant:
        if name not in self.tenants:
            raise ModelError("unknown_tenant", name)
        return self.tenants[name]

    def _subject(self, owner: Tenant, name: str) -> Subject:
        found = owner.subjects.get(name)
        if found is None or found.retired:
            raise ModelError("unknown_subject", name)
        return found

    def _account(self, owner: Tenant, subject: str, limit: Limit) -> Account:
        """The stored account, or the blank one that its first use would create, with the numbers in force."""
        blank = Account(subject, limit.name, limit.shape, limit)
        return owner.accounts.get((subject, limit.name), blank)

    def _rebind(self, *owners: Tenant) -> None:
        """After every change of definitions: accounts follow; one without a definition keeps the numbers it had."""
        for owner in owners:
            for (subject, name), account in owner.accounts.items():
                account.limit = self.effective(owner, subject).get(name, account.limit)

    def _check_tier(self, owner: Tenant, subject: str, tier: str | None) -> None:
        if tier is None:
            return
        if kind_of(subject) != "key":
            raise ModelError("invalid_argument", f"{subject} has no tier to choose")
        if not self._tiers(owner, tier):
            raise ModelError("unknown_tier", tier)

    def _limit(
        self,
        name: str,
        unit: str,
        kind: str,
        capacity: Number | None,
        refill_per_s: Number | None,
        period: str | None,
        zone: str,
    ) -> Limit:
        """A limit as it is asked for, after every check that needs no tenant."""
        check_name(name)
        if kind not in ("budget", "bucket", "concurrency"):
            raise ModelError("invalid_argument", f"kind {kind}")
        if capacity is None and kind != "budget":
            raise ModelError("invalid_argument", "only budgets are unlimited")
        if (refill_per_s is None) == (kind == "bucket"):
            raise ModelError("invalid_argument", "buckets refill, and only buckets")
        if period is not None and kind != "budget":
            raise ModelError("invalid_argument", "only budgets have a period")
        shape = Shape(unit, kind, check_period(period), check_zone(zone))
        if unit not in self.units:
            raise ModelError("unknown_unit", unit)
        exact = None if capacity is None else amount(capacity)
        if kind == "concurrency" and exact is not None:
            whole(exact, unit)
        return Limit(name, shape, exact, ZERO if refill_per_s is None else amount(refill_per_s))

    def _check_shape(self, owner: Tenant, subject: str | None, limit: Limit) -> None:
        """All definitions of one name that can reach the same subject share one shape; None stands for a tier.

        A removed definition still counts: its accounts keep their counters, which another shape could not read.
        """
        others = {
            shape for (place, name), shape in owner.shapes.items() if name == limit.name and _meets(place, subject)
        }
        if subject is None or kind_of(subject) in ("key", "oauth"):
            tiers = [*owner.tiers.values(), *self.built_in.values()]
            others |= {tier.limits[limit.name].shape for tier in tiers if limit.name in tier.limits}
        if others - {limit.shape}:
            raise ModelError("limit_differs", limit.name)

    # --- what the other half provides ---------------------------------------------------------------------------

    def _settle_down(self, owner: Tenant, name: str) -> None:
        """No hold may be open on a subject or below it; overdue ones close here."""
        raise NotImplementedError

    def _lines(self, owner: Tenant, account: Account) -> Iterator[tuple[Hold, Line]]:
        """Every line that any reservation has on an account."""
        for hold in owner.holds.values():
            for line in hold.lines:
                if line.account is account:
                    yield hold, line


def _built_in(capacity: int, refill_per_s: int, hourly: int) -> Tier:
    bucket = Limit("bucket", Shape("cost", "bucket", None, "UTC"), Fraction(capacity), Fraction(refill_per_s))
    total = Limit("hourly", Shape("cost", "budget", "1 hour", "UTC"), Fraction(hourly))
    return Tier({"bucket": bucket, "hourly": total})


def _meets(place: str, subject: str | None) -> bool:
    """Whether a definition at `place` can reach a subject that one at `subject` (None: a tier) reaches, too."""
    if subject is None:
        return kind_of(place) in ("key", "oauth")
    if place.endswith(":*") or subject.endswith(":*"):
        return kind_of(place) == kind_of(subject)
    return place == subject
