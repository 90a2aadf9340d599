"""One attempt of one call: what it holds, and what becomes of the hold; see `quota.integrations.guard`. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal

from quota.calls import Amount
from quota.costs.estimate import Demand
from quota.costs.prices import PriceBook, PriceEntry
from quota.costs.tokens import HoldFormula, QuotaTokens, Usage
from quota.errors import MalformedUsage, QuotaError, UnpricedModel

__all__ = ["Attempt", "Closing", "Pool"]

logger = logging.getLogger("quota.integrations")

# The provider turned the call away before it did any work.
_TURNED_AWAY = frozenset({503, 529})


@dataclass(frozen=True, slots=True)
class Pool:
    """The provider's quota that calls draw on, beside the spender's money.

    Fields:
        subject: `pool:ACCOUNT/REGION/MODEL/ENDPOINT`, as `quota pool import` names it.
        endpoint: whose multipliers count, such as `bedrock-runtime`.
        formula: `worst`: the quota itself holds; `provider`: what the provider would admit.
        tokens: the model's formula; None: by the table `quota.costs.tokens.BURNDOWNS`.
    """

    subject: str
    endpoint: str = "bedrock-runtime"
    formula: HoldFormula = "worst"
    tokens: QuotaTokens | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """How a hold ends: `costs` None settles it as a whole; `released` returns it."""

    costs: Mapping[str, Amount] | None = None
    outcome: str = "ok"
    details: Mapping[str, object] = field(default_factory=dict)
    released: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one call: what it holds, and what it settles at.

    Fields:
        subject: who spends.
        also: the pool, and what else is charged.
        costs: the worst case, by unit.
        details: what the reservation keeps: the model, the price's version, the ceiling.
        entry: the price that it was held at.
        quota: the formula of the pool, None without one.
        formula: what of it is held.
        demand: what the request may use.
    """

    subject: str
    also: tuple[str, ...]
    costs: Mapping[str, Amount]
    details: Mapping[str, object]
    entry: PriceEntry
    quota: QuotaTokens | None
    formula: HoldFormula
    demand: Demand
    book: PriceBook
    at: datetime

    def answered(
        self,
        read: Callable[[object], Usage],
        usage: object,
        *,
        variant: str | None = None,
        truncated: bool | None = None,
    ) -> Closing:
        """Returns how the hold ends after an answer.

        Arguments:
            read: reads the provider's usage.
            usage: what the provider reported; None: nothing.
            variant: how the provider served the request, where it says so and it decides about the price.
            truncated: the answer ended at its ceiling; None: the provider does not say.
        """
        if usage is None:
            return self.flagged("usage_missing")
        try:
            used = read(usage)
            ended = {} if truncated is None else {"truncated": truncated}
            return Closing(self._costs(used, self._served(variant)), details={**_reported(used), **ended})
        except MalformedUsage as error:
            return self.flagged("usage_malformed", error.message)
        except UnpricedModel as error:
            return self.flagged("served_unpriced", error.message)

    def _served(self, variant: str | None) -> PriceEntry:
        if variant is None or variant == self.demand.variant:
            return self.entry
        return self.book.find(self.entry.provider, self.demand.model, self.at, variant)

    def _costs(self, used: Usage, entry: PriceEntry) -> dict[str, Amount]:
        costs: dict[str, Amount] = {"usd": entry.price.cost(used)}
        if "tokens" in self.costs:
            costs["tokens"] = used.billed_tokens
        if self.quota is not None:
            costs |= self.quota.settled(used)
        return costs

    def lowered(self, read: Callable[[object], Usage], so_far: object) -> dict[str, Amount] | None:
        """Returns what a stream still needs to hold once its input is known: that input, and the ceiling on output.

        None when the provider has not said enough, or when it would not be less.
        """
        try:
            used = read(so_far)
            costs = self._costs(replace(used, output=self.demand.ceiling.total), self.entry)
        except QuotaError:
            return None
        if self.formula == "provider" and self.quota is not None:
            costs |= self.quota.held(used.total_input - used.cached_input, self.demand.ceiling.total, "provider")
        return costs if all(Decimal(costs[unit]) <= Decimal(held) for unit, held in self.costs.items()) else None

    def flagged(self, flag: str, why: str = "", outcome: str = "ok") -> Closing:
        """Returns the end at the hold, with the reason in the details."""
        logger.warning("a call to %s is settled at its hold: %s %s", self.demand.model, flag, why)
        return Closing(None, outcome, {"flag": flag, **({"why": why} if why else {})})

    def turned_away(self, status: int) -> Closing:
        """Returns the end after an HTTP error of the provider."""
        if status < 500 or status in _TURNED_AWAY:
            return Closing(dict.fromkeys(self.costs, 0), "error", {"status": status})
        return Closing(None, "error", {"status": status, "flag": "provider_failed"})

    def cut(self, read: Callable[[object], Usage], so_far: object, policy: str, outcome: str) -> Closing:
        """Returns the end of a stream that was cut."""
        if policy == "usage" and so_far is not None:
            return replace(self.answered(read, so_far), outcome=outcome)
        return Closing(None, outcome, {"flag": "stream_cut"})


def _reported(used: Usage) -> dict[str, object]:
    parts = ("input", "cached_input", "cache_write_5m", "cache_write_1h", "output", "input_audio", "output_audio")
    return {"usage": {part: count for part in parts if (count := getattr(used, part))}}
