"""Guards of model calls: who spends, by which prices, and what becomes of the hold of one attempt.

No call leaves without a hold of the most that it can cost. Afterwards:

| what happened | the hold |
|---|---|
| refused before sending, or never sent | released |
| answered | settled at the true usage |
| answered with 4xx, 429, 503, 529 or a redirection | settled at 0; the request counts |
| timed out, reset after sending, cancelled, other 5xx | settled at the hold: the provider may have billed |
| a stream that was cut | settled at the hold, or at the usage so far if the guard says so |
| usage missing or malformed | settled at the hold, and flagged in the ledger's details |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from quota.calls import Amount, PricesOf
from quota.client import AsyncClient, AsyncHold, Client, Hold
from quota.costs.estimate import Demand, Tokenizer, clamped
from quota.costs.prices import PriceBook, PriceEntry
from quota.costs.tokens import HoldFormula, QuotaTokens, Usage, quota_tokens_of
from quota.errors import InvalidArgument, MalformedUsage, QuotaError, UnpricedModel
from quota.runs import AsyncRun, Run

__all__ = ["AsyncGuard", "Attempt", "Closing", "Guard", "Pool", "spending"]

logger = logging.getLogger("quota.integrations")

_REFRESH_S = 60.0
# The provider turned the call away before it did any work.
_TURNED_AWAY = frozenset({503, 529})

_spender: ContextVar[tuple[str | None, int | None]] = ContextVar("quota_spender", default=(None, None))


@contextmanager
def spending(who: str | Run | AsyncRun) -> Iterator[None]:
    """Within the block, and whatever it calls or awaits, guarded calls are charged to this subject.

    Arguments: `who`, `kind:id` of the user or key on whose behalf the calls are made, or a run: its `max_tokens` holds.
    """
    told = (who, None) if isinstance(who, str) else (who.subject, who.max_tokens)
    before = _spender.set(told)
    try:
        yield
    finally:
        _spender.reset(before)


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

    def answered(self, read: Callable[[object], Usage], usage: object, *, variant: str | None = None) -> Closing:
        """Returns how the hold ends after an answer.

        Arguments:
            read: reads the provider's usage.
            usage: what the provider reported; None: nothing.
            variant: how the provider served the request, where it says so and it decides about the price.
        """
        if usage is None:
            return self.flagged("usage_missing")
        try:
            used = read(usage)
            return Closing(self._costs(used, self._served(variant)), details=_reported(used))
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


class _Core:
    """What a guard decides; no I/O."""

    def __init__(
        self,
        ledger: Any,
        subject: str | None = None,
        *,
        prices: PriceBook | None = None,
        pool: Pool | Callable[[str], Pool | None] | None = None,
        also: Collection[str] = (),
        bill_tokens: bool = False,
        on_cut: Literal["hold", "usage"] = "hold",
        ttl: timedelta = timedelta(minutes=30),
        headroom: Amount = Decimal(0),
        wait: Decimal | float | None = None,
        input_tokens: int | None = None,
        max_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        if on_cut not in ("hold", "usage"):
            raise InvalidArgument(f'invalid_argument: on_cut is "{on_cut}"', "pass hold or usage")
        self.ledger = ledger
        self.subject = subject
        self.on_cut = on_cut
        self.ttl = ttl
        self.headroom = headroom
        self.wait = wait
        self._given = prices
        self._book: PriceBook | None = None
        self._book_until = 0.0
        self._pool = pool
        self._also = tuple(also)
        self._bill_tokens = bill_tokens
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._details = dict(details or {})

    def known_book(self) -> PriceBook | None:
        """The book at hand; None when it has to be fetched."""
        if self._given is not None:
            return self._given
        return self._book if time.monotonic() < self._book_until else None

    def keep(self, book: PriceBook) -> PriceBook:
        """Keeps a book that was fetched, for a minute."""
        self._book, self._book_until = book, time.monotonic() + _REFRESH_S
        return book

    def attempt(
        self, book: PriceBook, provider: str, read: Callable[..., Demand], request: Mapping[str, Any]
    ) -> Attempt:
        """Plans one attempt. Nothing is held and nothing is sent yet.

        Arguments:
            book: the prices.
            provider: who bills.
            read: reads the request, one of `quota.costs.requests`.
            request: its arguments.

        Errors: `UnpricedModel`, and the other `CostError`s of a request whose worst case cannot be told.
        """
        spender, most = _spender.get()
        subject = spender or self.subject
        if subject is None:
            raise InvalidArgument("invalid_argument: nobody pays for this call", "name a subject, or use spending(…)")
        at = datetime.now(UTC)
        demand = read(request, tokenizer=self._tokenizer)
        entry = book.find(provider, demand.model, at, demand.variant)
        demand = clamped(
            demand,
            input_max=entry.input_max,
            output_max=entry.output_max,
            own_bound=self._input_tokens,
            tokens_max=min(filter(None, (self._max_tokens, most)), default=None),
        )
        sent, back = demand.input_tokens, demand.ceiling.total
        costs: dict[str, Amount] = {"usd": entry.price.worst(sent, back, sound=demand.sound)}
        if self._bill_tokens:
            costs["tokens"] = sent + back
        pool = self._pool(demand.model) if callable(self._pool) else self._pool
        quota = None
        if pool is not None:
            quota = pool.tokens or quota_tokens_of(demand.model, pool.endpoint, at.date())
            costs |= quota.held(sent, back, pool.formula)
        price: dict[str, object] = (
            {"price": entry.price.json()} if entry.version is None else {"price_version": entry.version}
        )
        return Attempt(
            subject=subject,
            also=(*self._also, *((pool.subject,) if pool else ())),
            costs=costs,
            details={
                **self._details,
                "provider": provider,
                "model": demand.model,
                "ceiling": demand.ceiling.total,
                "input_bound": sent,
                **price,
            },
            entry=entry,
            quota=quota,
            formula=pool.formula if pool else "worst",
            demand=demand,
            book=book,
            at=at,
        )

    def reserving(self, attempt: Attempt) -> dict[str, Any]:
        """The arguments of the hold. A worker that dies may have been billed: its hold is charged when it expires."""
        return {
            "ttl": self.ttl,
            "also": attempt.also,
            "headroom": self.headroom,
            "wait": self.wait,
            "on_expiry": "charge",
            "details": attempt.details,
        }


_ARGUMENTS = """

    Arguments:
        ledger: the client of the ledger.
        subject: who spends, `kind:id`; None: whoever `spending` names.
        prices: the price book; None: the ledger's own, looked up again every minute.
        pool: the provider's quota that the calls draw on: a `Pool`, or a function from the model to one (or None).
        also: further subjects that every call is charged to.
        bill_tokens: hold and settle the unit `tokens` too: all tokens that are billed.
        on_cut: what a stream that was cut settles at: `hold`, or the `usage` that was reported so far.
        ttl: how long a hold lives; longer than any call.
        headroom: share of every capacity to leave to others: batch work passes 0.2.
        wait: for how many seconds a call waits in turn for room, as in `Client.reserve`; None: it is refused at once.
        input_tokens: the most input tokens of any call, as you state it; it goes before the bound read from the
            request, and makes requests possible whose parts have none.
        max_tokens: the most output tokens that a call may ask for.
        tokenizer: counts the tokens of a text as the model does; None: a token per byte.
        details: what every reservation keeps besides.
    """


class Guard(_Core):
    __doc__ = "Guards calls of synchronous clients." + _ARGUMENTS

    ledger: Client

    def book(self) -> PriceBook:
        """Returns the prices. Errors: `Unavailable`: without prices no call is made."""
        return self.known_book() or self.keep(self.ledger.call(PricesOf(self.ledger.tenant)))

    def hold(self, provider: str, read: Callable[..., Demand], request: Mapping[str, Any]) -> tuple[Attempt, Hold]:
        """Holds the worst case of a request.

        Errors: `Refused`, `CostError`, `Misuse`, `Unavailable`; nothing is sent.
        """
        attempt = self.attempt(self.book(), provider, read, request)
        hold = self.ledger.hold(attempt.subject, attempt.costs, **self.reserving(attempt))
        hold.__enter__()
        return attempt, hold

    def lower(self, hold: Hold, costs: Mapping[str, Amount]) -> None:
        """Returns what a call under way cannot take any more. It may fail: nothing is lost, the settle returns it."""
        try:
            hold.adjust(costs)
        except QuotaError as error:
            logger.info("hold %s was not lowered: %s", hold.id, error)

    def close(self, hold: Hold, closing: Closing) -> None:
        """Ends a hold. A ledger that is away is logged: the answer is not lost, and the hold is charged on expiry."""
        try:
            if closing.released:
                hold.release(details=closing.details)
            else:
                hold.settle(closing.costs, outcome=closing.outcome, details=closing.details)
        except QuotaError as error:
            logger.warning("hold %s could not be closed and is charged when it expires: %s", hold.id, error)


class AsyncGuard(_Core):
    __doc__ = "Guards calls of asynchronous clients." + _ARGUMENTS

    ledger: AsyncClient

    async def book(self) -> PriceBook:
        """As `Guard.book`."""
        return self.known_book() or self.keep(await self.ledger.call(PricesOf(self.ledger.tenant)))

    async def hold(
        self, provider: str, read: Callable[..., Demand], request: Mapping[str, Any]
    ) -> tuple[Attempt, AsyncHold]:
        """As `Guard.hold`."""
        attempt = self.attempt(await self.book(), provider, read, request)
        hold = self.ledger.hold(attempt.subject, attempt.costs, **self.reserving(attempt))
        await hold.__aenter__()
        return attempt, hold

    async def lower(self, hold: AsyncHold, costs: Mapping[str, Amount]) -> None:
        """As `Guard.lower`."""
        try:
            await hold.adjust(costs)
        except QuotaError as error:
            logger.info("hold %s was not lowered: %s", hold.id, error)

    async def close(self, hold: AsyncHold, closing: Closing) -> None:
        """As `Guard.close`."""
        try:
            if closing.released:
                await hold.release(details=closing.details)
            else:
                await hold.settle(closing.costs, outcome=closing.outcome, details=closing.details)
        except QuotaError as error:
            logger.warning("hold %s could not be closed and is charged when it expires: %s", hold.id, error)
