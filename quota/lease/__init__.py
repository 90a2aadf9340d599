"""LeasedBudget and AsyncLeasedBudget: one large hold, taken once, and decisions from memory under it.

    with Client("postgresql://worker@db/app") as client, LeasedBudget(client, "key:42", {"usd": 50}) as budget:
        answer = budget.reserve({"usd": "0.25"}).raise_if_refused()
        usage = ask_the_model()
        budget.settle(answer.reservation, {"usd": usage.cost})

The cap is exact because the whole lease is reserved, with `on_expiry => 'charge'`: what is given out here was taken
there before. See docs/leases.md.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from decimal import Decimal
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from uuid import UUID

from quota.calls import Amount, Call, Costs, Reservation, Reserve, Settlement
from quota.client import AsyncClient, AsyncHold, Client, Hold, verbs
from quota.client.attempts import Plan
from quota.client.core import Core
from quota.client.verbs import awaited, blocking
from quota.ids import uuid7
from quota.lease.escrow import TTL_S, Escrow
from quota.lease.plans import Planner, boot_clock
from quota.lease.terms import REMEMBERED, Terms

__all__ = ["AsyncLeasedBudget", "LeasedBudget"]

logger = logging.getLogger("quota.lease")

A = TypeVar("A")
C = TypeVar("C", bound=Core)

_TTL = timedelta(seconds=TTL_S)

_at_work: weakref.WeakSet[LeasedBudget] = weakref.WeakSet()
"""The budgets of this process that somebody looks after: an interpreter that ends in order closes them."""


@atexit.register
def _close_all() -> None:
    for budget in list(_at_work):
        if budget.client.closed:
            continue
        try:
            budget.close()
        except Exception:
            logger.exception("a lease of %s could not be closed: it is booked in full", budget.subject)


def reserve(
    budget: Budget[Any],
    costs: Costs,
    *,
    ttl: timedelta = _TTL,
    id: UUID | str | None = None,  # noqa: A002 - the contract's word
    details: Mapping[str, object] | None = None,
) -> Call[Reservation]:
    """Holds the worst case before the call is made, out of the lease; all or nothing.

    Arguments:
        costs: amounts by unit: those that are leased. Anything else is asked of the database, as `Client.reserve` does.
        ttl: how long the hold lives unless it is extended.
        id: the idempotency key, among the calls of this object; None: a new one.
        details: free JSON, kept only with a hold that the database decides.

    Result: the reservation; a refusal is a value too, with the numbers that the database gave.
    Errors: as of `Client.reserve`; `RuntimeError` when this object is closed.
    """
    return budget.asked(costs, ttl=ttl, id=uuid7() if id is None else id, details=details)


class Budget(Planner, Generic[C]):
    """What both leased budgets share. Arguments as in `LeasedBudget`."""

    def __init__(
        self,
        client: C,
        subject: str,
        size: Costs,
        *,
        at_least: Costs | None = None,
        most: Costs | None = None,
        ttl: timedelta = timedelta(seconds=30),
        idle: timedelta = timedelta(seconds=10),
        post_every: timedelta = timedelta(seconds=1),
        also: Collection[str] = (),
        headroom: Amount = Decimal(0),
        on_expiry: str = "charge",
        remember: int = REMEMBERED,
        details: Mapping[str, object] | None = None,
        tenant: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        terms = Terms.of(
            subject,
            size,
            at_least=at_least,
            most=most,
            ttl=ttl,
            idle=idle,
            post_every=post_every,
            also=also,
            headroom=headroom,
            on_expiry=on_expiry,
            remember=remember,
            details=details,
        )
        super().__init__(client, terms, boot_clock() if clock is None else clock, tenant)
        self._client = client

    @property
    def client(self) -> C:
        """The client that talks to the ledger."""
        return self._client

    @property
    def subject(self) -> str:
        """Who spends."""
        return self._terms.subject

    def start_anew(self) -> None:
        super().start_anew()
        # A new one in a child: a thread that it lacks may have been at the old one.
        self._wake = threading.Event()

    def asked(self, costs: Costs, **rest: Any) -> Reserve:
        """Returns the call that a reserve of these costs is to the database."""
        terms = self._terms
        return Reserve(terms.subject, costs, also=terms.also, headroom=terms.headroom, tenant=self.tenant, **rest)

    def _may_rest(self, escrow: Escrow, keeper: object) -> bool:
        if escrow.rest(keeper):
            return True
        if self._client.closed:
            logger.warning("the client of %s is closed: its leases are booked in full", self._terms.subject)
        return self._client.closed

    @property
    def decisions(self) -> tuple[int, int]:
        """How many calls of this process were granted here, and how many were the database's to decide."""
        return self.escrow.local, self.escrow.direct


class LeasedBudget(Budget[Client]):
    """A budget of one subject, decided in this process. Thread-safe; after a fork the child takes a lease of its own.

    Arguments:
        client: the ledger. It stays the caller's; close it after this.
        subject: who spends, `kind:id`; every ancestor is charged as well.
        size: amounts by unit to lease at a time: the units that calls may name.
        at_least: amounts by unit that a first lease must have when `size` does not fit: the part that fits is taken.
            None: a lease that does not fit is a refusal like any other.
        most: amounts by unit that may be held and not used at any time, that is, what a killed process costs. A call
            that needs more is decided by the database. None: eight times `size`.
        ttl: how long a lease outlives its process, and how long decisions go on while the database is away.
        idle: what was not needed for so long returns.
        post_every: how often what was used is booked.
        also: further subjects that the same costs count on.
        headroom: share of every capacity to leave untouched, 0 to below 1.
        on_expiry: what becomes of a call that nobody closes in its time: `charge` books it, `release` returns it.
        remember: closed calls, at least, of which a repeated close or id finds the answer.
        details: free JSON that is kept with each lease.
        tenant: whose subject it is; None: the client's.
        clock: seconds that never step back, for tests.

    Errors: `ConfigError` and those of a cost map for arguments that cannot mean anything. The first call takes the
    lease, nothing before. Close it, or use it as a context: an interpreter that ends in order closes what was left
    open, but the lease of a process that is killed is booked in full.
    """

    def call(self, call: Call[A], *, timeout_s: Decimal | float | None = None) -> A:
        """Carries out any value of `quota.calls`; returns its answer. `timeout_s`: its own deadline in seconds."""
        return self.drive(self.plan(call, timeout_s))

    def drive(self, plan: Plan[A]) -> A:
        """Carries out the steps of a plan; returns its answer."""
        try:
            return self._client.drive(plan)
        finally:
            self.look_after()

    def reserve(
        self,
        costs: Costs,
        *,
        ttl: timedelta = _TTL,
        id: UUID | str | None = None,  # noqa: A002
        details: Mapping[str, object] | None = None,
    ) -> Reservation:
        """Holds the worst case out of the lease, or refuses. See the function `reserve` of this module."""
        if id is None and ttl is _TTL:
            answer = self.escrow.take(costs)
            if answer is not None:
                return answer
        return self.call(reserve(self, costs, ttl=ttl, id=id, details=details))

    def settle(
        self,
        id: UUID | str,  # noqa: A002
        costs: Costs | None = None,
        *,
        final: bool = True,
        outcome: str = "ok",
        details: Mapping[str, object] | None = None,
    ) -> Settlement:
        """Books the true cost of a call, by its totals. See `Client.settle`; outcome and details are not kept."""
        if final and outcome == "ok" and isinstance(id, UUID):
            answer = self.escrow.close(id.int, costs)
            if answer is not None:
                return answer
        return self.call(verbs.settle(self, id, costs, final=final, outcome=outcome, details=details))

    release = blocking(verbs.release)
    adjust = blocking(verbs.adjust)
    extend = blocking(verbs.extend)

    def hold(self, costs: Costs, **rest: Any) -> Hold:
        """Returns a hold to be used as a context, as `Client.hold` does. Arguments: as in `reserve`."""
        return Hold(self, self.asked(costs, **{"id": uuid7(), **rest}))

    def close(self) -> None:
        """Books what was used and returns the rest. Reserving after it is a `RuntimeError`.

        Calls that are still open keep their part until they are closed, which they can be: the lease goes on for them.
        """
        escrow = self.escrow
        escrow.closed()
        self.drive(self.tending(escrow))
        self._wake.set()

    def look_after(self) -> None:
        """Sees to it that somebody looks after the leases, where there are any. For who drives plans by other means."""
        escrow = self.escrow

        def start() -> threading.Thread:
            _at_work.add(self)
            keeper = threading.Thread(target=self._keep, args=(escrow,), name="quota-lease", daemon=True)
            keeper.start()
            return keeper

        escrow.hire(start, threading.Thread.is_alive)

    def _keep(self, escrow: Escrow) -> None:
        me = threading.current_thread()
        while not self._may_rest(escrow, me):
            self._wake.wait(self._terms.interval_s)
            self._wake.clear()
            try:
                self._client.drive(self.tending(escrow))
            except Exception:
                logger.exception("leases of %s could not be looked after", self._terms.subject)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncLeasedBudget(Budget[AsyncClient]):
    """`LeasedBudget` for asyncio: the same arguments but for an `AsyncClient`, the same verbs, each to be awaited.

    A task of the loop that took the lease looks after it. When the loop has ended nobody closes it.
    """

    async def call(self, call: Call[A], *, timeout_s: Decimal | float | None = None) -> A:
        """Carries out any value of `quota.calls`; returns its answer. `timeout_s`: its own deadline in seconds."""
        return await self.drive(self.plan(call, timeout_s))

    async def drive(self, plan: Plan[A]) -> A:
        """Carries out the steps of a plan; returns its answer."""
        try:
            return await self._client.drive(plan)
        finally:
            self.look_after()

    async def reserve(
        self,
        costs: Costs,
        *,
        ttl: timedelta = _TTL,
        id: UUID | str | None = None,  # noqa: A002
        details: Mapping[str, object] | None = None,
    ) -> Reservation:
        """Holds the worst case out of the lease, or refuses. See the function `reserve` of this module."""
        if id is None and ttl is _TTL:
            answer = self.escrow.take(costs)
            if answer is not None:
                return answer
        return await self.call(reserve(self, costs, ttl=ttl, id=id, details=details))

    async def settle(
        self,
        id: UUID | str,  # noqa: A002
        costs: Costs | None = None,
        *,
        final: bool = True,
        outcome: str = "ok",
        details: Mapping[str, object] | None = None,
    ) -> Settlement:
        """Books the true cost of a call, by its totals. See `AsyncClient.settle`; outcome and details are not kept."""
        if final and outcome == "ok" and isinstance(id, UUID):
            answer = self.escrow.close(id.int, costs)
            if answer is not None:
                return answer
        return await self.call(verbs.settle(self, id, costs, final=final, outcome=outcome, details=details))

    release = awaited(verbs.release)
    adjust = awaited(verbs.adjust)
    extend = awaited(verbs.extend)

    def hold(self, costs: Costs, **rest: Any) -> AsyncHold:
        """Returns a hold to be used as a context, as `AsyncClient.hold` does. Arguments: as in `reserve`."""
        return AsyncHold(self, self.asked(costs, **{"id": uuid7(), **rest}))

    async def close(self) -> None:
        """Books what was used and returns the rest. See `LeasedBudget.close`."""
        escrow = self.escrow
        escrow.closed()
        await self.drive(self.tending(escrow))
        keeper: asyncio.Task[None] | None = escrow.keeper
        if keeper is not None and escrow.rest(keeper):
            keeper.cancel()

    def look_after(self) -> None:
        """As `LeasedBudget.look_after`; within the running loop."""
        escrow = self.escrow
        loop = asyncio.get_running_loop()
        escrow.hire(lambda: loop.create_task(self._keep(escrow)), lambda task: not task.done())

    async def _keep(self, escrow: Escrow) -> None:
        me = asyncio.current_task()
        while not self._may_rest(escrow, me):
            await asyncio.sleep(self._terms.interval_s)
            try:
                await self._client.drive(self.tending(escrow))
            except Exception:
                logger.exception("leases of %s could not be looked after", self._terms.subject)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
