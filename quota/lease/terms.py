"""The terms of a leased budget: what is leased, how much at a time, and for how long. Judged once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Self

from quota.calls import Amount, Costs
from quota.config import ConfigError
from quota.lease.amounts import ZERO, Amounts, amounts_of, divide, multiply

__all__ = ["CAUTION", "COUNTED", "REMEMBERED", "Terms"]

COUNTED = ("requests", "concurrency")
"""The units of which every reserve counts 1 by itself, where a limit counts them."""

REMEMBERED = 10_000
"""Closed calls that are remembered, where nobody says how many."""

CAUTION = 0.95
"""The share of a span of the database's clock that is relied upon here: clocks run apart."""

# How many of a unit that counts by itself are taken at a time, where nobody has said how many: whatever leases most of
# a small limit starves everybody else.
_COUNTED_MOST = {"requests": 1000, "concurrency": 16}
_COUNTED_SHARE = Decimal(8)

_MOST = Decimal(8)
_TTL_MOST_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a leased budget asks for. The meaning of each field is told by `LeasedBudget`; spans are in seconds."""

    subject: str
    also: tuple[str, ...]
    size: Amounts
    at_least: Amounts | None
    most: Amounts
    ttl_s: float
    idle_s: float
    post_every_s: float
    headroom: Amount
    on_expiry: str
    remember: int = REMEMBERED
    details: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        subject: str,
        size: Costs,
        *,
        at_least: Costs | None,
        most: Costs | None,
        ttl: timedelta,
        idle: timedelta,
        post_every: timedelta,
        also: Collection[str],
        headroom: Amount,
        on_expiry: str,
        remember: int = REMEMBERED,
        details: Mapping[str, object] | None,
    ) -> Self:
        """Judges the arguments. Errors: `ConfigError`, and those of a cost map."""
        sizes = amounts_of(size)
        for unit, amount in sizes.items():
            if not amount:
                raise ConfigError(f'size: 0 of "{unit}" leases nothing; give the amount to take at a time')
        limits = {unit: multiply(amount, _MOST) for unit, amount in sizes.items()}
        for name, given in (("at_least", at_least), ("most", most)):
            if given is not None and (foreign := amounts_of(given).keys() - sizes.keys()):
                raise ConfigError(f'{name}: "{min(foreign)}" is no unit of size; name it there too')
        if most is not None:
            limits |= amounts_of(most)
        for unit, amount in limits.items():
            if amount < sizes[unit]:
                raise ConfigError(f'most: {amount} of "{unit}" is less than size, {sizes[unit]}')
        spans = {"ttl": ttl, "idle": idle, "post_every": post_every}
        for name, span in spans.items():
            if not 0 < span.total_seconds() <= _TTL_MOST_S:
                raise ConfigError(f"{name}: {span} is not more than 0 and at most 24 hours")
        if on_expiry not in ("charge", "release"):
            raise ConfigError(f'on_expiry: "{on_expiry}" is neither "charge" nor "release"')
        if remember < 1:
            raise ConfigError(f"remember: {remember} is less than 1; give how many closed calls to remember")
        return cls(
            subject=subject,
            also=tuple(also),
            size=sizes,
            at_least=None if at_least is None else amounts_of(at_least),
            most=limits,
            ttl_s=ttl.total_seconds(),
            idle_s=idle.total_seconds(),
            post_every_s=post_every.total_seconds(),
            headroom=headroom,
            on_expiry=on_expiry,
            remember=remember,
            details=dict(details or {}),
        )

    @property
    def interval_s(self) -> float:
        """How often a lease is looked after: often enough to post, to extend and to see that it is idle."""
        return min(self.post_every_s, self.ttl_s / 6, self.idle_s)

    def size_of(self, unit: str, available: Decimal | None) -> Decimal:
        """Returns how much of a unit is taken at a time; of one that counts by itself, a share of what is available."""
        if unit in self.size:
            return self.size[unit]
        most = Decimal(_COUNTED_MOST.get(unit, 1))
        if available is None:
            return most
        return max(Decimal(1), min(most, divide(available, _COUNTED_SHARE)))

    def most_of(self, unit: str) -> Decimal:
        """Returns how much of a unit may be held and not used at any time."""
        return self.most[unit] if unit in self.most else multiply(Decimal(_COUNTED_MOST.get(unit, 1)), _MOST)

    def suits(self, given: Amounts) -> bool:
        """True when a lease of these terms can decide a call with these costs: the same units, not too much of any."""
        named = given.keys() - set(COUNTED)
        return named == self.size.keys() - set(COUNTED) and all(given[unit] <= self.most_of(unit) for unit in given)

    def floor(self, given: Amounts) -> Amounts:
        """Returns the least that a new lease must have to be worth taking for a call."""
        least = self.at_least or {}
        return {unit: max(least.get(unit, ZERO), given.get(unit, ZERO)) for unit in self.size}
