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
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from quota.calls import Amount, EnsureSubject, PricesOf
from quota.client import AsyncClient, AsyncHold, Client, Hold
from quota.costs.estimate import Demand, Tokenizer, clamped
from quota.costs.prices import PriceBook
from quota.costs.tokens import quota_tokens_of
from quota.errors import InvalidArgument, QuotaError, Refused
from quota.integrations.attempt import Attempt, Closing, Pool
from quota.integrations.refusals import METER, Refusals
from quota.runs import AsyncRun, Run

__all__ = ["AsyncGuard", "Attempt", "Closing", "Guard", "Pool", "spending"]

logger = logging.getLogger("quota.integrations")

_REFRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class _Spending:
    """What a block says of the calls in it."""

    subject: str | None = None
    max_tokens: int | None = None
    route: str | None = None
    attempt: int = 1


_spending: ContextVar[_Spending] = ContextVar("quota_spending", default=_Spending())  # noqa: B039 - it is frozen


@contextmanager
def spending(
    who: str | Run | AsyncRun | None = None, *, route: str | None = None, attempt: int | None = None
) -> Iterator[None]:
    """Within the block, and whatever it calls or awaits, guarded calls are charged to this subject.

    Arguments:
        who: `kind:id` of the user or key on whose behalf the calls are made, or a run, itself and not its name: its
            `max_tokens` holds; None: as around the block.
        route: what the calls are made for, as reports name it; None: as around the block.
        attempt: which attempt of one call it is, from 1: later ones are retries to the reports; None: as around it.
    """
    told = _spending.get()
    if isinstance(who, str):
        told = replace(told, subject=_no_run(who), max_tokens=None)
    elif who is not None:
        told = replace(told, subject=who.subject, max_tokens=who.max_tokens)
    before = _spending.set(replace(told, route=route or told.route, attempt=attempt or told.attempt))
    try:
        yield
    finally:
        _spending.reset(before)


def _no_run(subject: str) -> str:
    """Returns the subject. Errors: `InvalidArgument` for a run's name, which does not tell how long answers may be."""
    if subject.startswith("run:"):
        raise InvalidArgument(
            f'invalid_argument: "{subject}" is a run by its name alone, and calls below it have a max_tokens',
            "use spending(run) with the run itself; another process starts a run of its own below the name",
        )
    return subject


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
        self.refusals = Refusals()
        if on_cut not in ("hold", "usage"):
            raise InvalidArgument(f'invalid_argument: on_cut is "{on_cut}"', "pass hold or usage")
        self.ledger = ledger
        self.subject = None if subject is None else _no_run(subject)
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
        self,
        book: PriceBook,
        provider: str,
        read: Callable[..., Demand],
        request: Mapping[str, Any],
        operation: str = "",
    ) -> Attempt:
        """Plans one attempt. Nothing is held and nothing is sent yet.

        Arguments:
            book: the prices.
            provider: who bills.
            read: reads the request, one of `quota.costs.requests`.
            request: its arguments.
            operation: what is called; the route, where neither `spending` nor the guard's details name one.

        Errors: `UnpricedModel`, and the other `CostError`s of a request whose worst case cannot be told.
        """
        told = _spending.get()
        subject = told.subject or self.subject
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
            tokens_max=min(filter(None, (self._max_tokens, told.max_tokens)), default=None),
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
                "route": operation,
                **self._details,
                **({"route": told.route} if told.route else {}),
                **({"attempt": told.attempt} if told.attempt > 1 else {}),
                "provider": provider,
                "model": demand.model,
                "ceiling": demand.ceiling.total,
                **({"answers": demand.ceiling.answers} if demand.ceiling.answers > 1 else {}),
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
        details: what every reservation keeps besides; its `route` is what reports name the calls by.
    """


class Guard(_Core):
    __doc__ = "Guards calls of synchronous clients." + _ARGUMENTS

    ledger: Client

    def book(self) -> PriceBook:
        """Returns the prices. Errors: `Unavailable`: without prices no call is made."""
        return self.known_book() or self.keep(self.ledger.call(PricesOf(self.ledger.tenant)))

    def hold(
        self, provider: str, read: Callable[..., Demand], request: Mapping[str, Any], operation: str = ""
    ) -> tuple[Attempt, Hold]:
        """Holds the worst case of a request. Arguments as in `attempt`.

        Errors: `Refused`, `CostError`, `Misuse`, `Unavailable`; nothing is sent.
        """
        attempt = self.attempt(self.book(), provider, read, request, operation)
        self.tell_refusals(now=False)  # not once the hold is there: whatever is raised would leave it open
        hold = self.ledger.hold(attempt.subject, attempt.costs, **self.reserving(attempt))
        try:
            hold.__enter__()
        except Refused as error:
            self.refusals.count(attempt.details, error.refusal)
            self.tell_refusals(now=False)
            raise
        return attempt, hold

    def tell_refusals(self, *, now: bool = True) -> None:
        """Tells the ledger of the refusals that were counted, for the reports; without being asked, every ten seconds.

        Arguments: `now`, False: only when it is time to. A ledger that is away is told later.
        """
        told = self.refusals.due(now=now)
        if not told:
            return
        try:
            self.ledger.call(EnsureSubject(METER, tenant=self.ledger.tenant))
            self.ledger.record(METER, {"requests": 0}, details=told)
        except QuotaError as error:
            self.refusals.put_back(told, error)

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
        self, provider: str, read: Callable[..., Demand], request: Mapping[str, Any], operation: str = ""
    ) -> tuple[Attempt, AsyncHold]:
        """As `Guard.hold`."""
        attempt = self.attempt(await self.book(), provider, read, request, operation)
        await self.tell_refusals(now=False)
        hold = self.ledger.hold(attempt.subject, attempt.costs, **self.reserving(attempt))
        try:
            await hold.__aenter__()
        except Refused as error:
            self.refusals.count(attempt.details, error.refusal)
            await self.tell_refusals(now=False)
            raise
        return attempt, hold

    async def tell_refusals(self, *, now: bool = True) -> None:
        """As `Guard.tell_refusals`."""
        told = self.refusals.due(now=now)
        if not told:
            return
        try:
            await self.ledger.call(EnsureSubject(METER, tenant=self.ledger.tenant))
            await self.ledger.record(METER, {"requests": 0}, details=told)
        except QuotaError as error:
            self.refusals.put_back(told, error)

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
