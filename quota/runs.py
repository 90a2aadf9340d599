"""Runs of agents: each has a slice of its parent's budget, bounds on what it may spawn, and an end.

    with run(ledger, "user:7", budget={"usd": 5}, max_tokens=2000, max_width=8, max_depth=2) as lead:
        with lead.run(budget={"usd": "0.50"}) as worker, spending(worker):
            ...  # every guarded call here is charged to the worker, the lead and the user

A slice is a limit on the run, not a hold on its parent. It is refused when what its parent has left is promised to
other live runs. `quota.freeze` on a run stops the whole tree below it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

from quota.calls import Amount, Costs, CreateRun, EndRun, RunDecision
from quota.client import AsyncClient, Client
from quota.errors import QuotaError, RunRefused
from quota.ids import uuid7

__all__ = ["AsyncRun", "Run", "run", "run_async"]

logger = logging.getLogger("quota.runs")


class _Core:
    """What a run is, without I/O."""

    def __init__(self, ledger: Any, call: CreateRun) -> None:
        self._ledger = ledger
        self._call = call
        self._decision: RunDecision | None = None

    @property
    def subject(self) -> str:
        """Who spends: name it in reserves, or in `spending`."""
        return self._call.name

    @property
    def max_tokens(self) -> int | None:
        """The most output tokens of a call below this run; None: no bound. Guards keep to it."""
        return self._call.max_tokens if self._decision is None else self._decision.max_tokens

    def _entered(self, decision: RunDecision) -> float:
        """Returns how many seconds to wait before the start."""
        if not decision.granted:
            raise RunRefused(decision)
        self._decision = decision
        return float(decision.start_after_s or 0)

    def _child(self, **arguments: Any) -> CreateRun:
        return _call(self._ledger.tenant, self.subject, **arguments)


def _call(
    tenant: str,
    parent: str,
    *,
    budget: Costs,
    name: str | None = None,
    ttl: timedelta = timedelta(hours=1),
    max_tokens: int | None = None,
    max_width: int | None = None,
    max_depth: int | None = None,
    stagger_s: Amount = Decimal(0),
) -> CreateRun:
    return CreateRun(name or f"run:{uuid7()}", parent, budget, ttl, max_width, max_depth, max_tokens, stagger_s, tenant)


def _not_ended(subject: str, error: QuotaError) -> None:
    logger.warning("%s could not be ended and counts until it expires: %s", subject, error)


class Run(_Core):
    """A run as a context: entering starts it, leaving ends it and the runs below it. From `run` or `Run.run`."""

    def run(self, **arguments: Any) -> Run:
        """Returns a run below this one; arguments as in `quota.runs.run`."""
        return Run(self._ledger, self._child(**arguments))

    def __enter__(self) -> Self:
        time.sleep(self._entered(self._ledger.call(self._call)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._ledger.call(EndRun(self.subject, self._ledger.tenant))
        except QuotaError as failure:
            _not_ended(self.subject, failure)


class AsyncRun(_Core):
    """`Run`, asynchronous."""

    def run(self, **arguments: Any) -> AsyncRun:
        """Returns a run below this one; arguments as in `quota.runs.run`."""
        return AsyncRun(self._ledger, self._child(**arguments))

    async def __aenter__(self) -> Self:
        await asyncio.sleep(self._entered(await self._ledger.call(self._call)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await asyncio.shield(self._ledger.call(EndRun(self.subject, self._ledger.tenant)))
        except QuotaError as failure:
            _not_ended(self.subject, failure)


def run(
    ledger: Client,
    parent: str,
    *,
    budget: Costs,
    name: str | None = None,
    ttl: timedelta = timedelta(hours=1),
    max_tokens: int | None = None,
    max_width: int | None = None,
    max_depth: int | None = None,
    stagger_s: Amount = Decimal(0),
) -> Run:
    """Returns a run below `parent`, to be used as a context.

    Arguments:
        ledger: the client of the ledger.
        parent: whose budget is sliced: a user, a key, another run.
        budget: what the run may spend, by unit.
        name: `run:id`, the idempotency key; None: a new one.
        ttl: how long it counts, should nobody end it.
        max_tokens: the most output tokens of a call below it.
        max_width: the most live runs right below it.
        max_depth: the most levels of runs below it; 0: none.
        stagger_s: seconds between the starts of the runs right below it.

    Errors, on entering: `RunRefused`; `UnknownSubject`, and others of `quota.create_run`; `Unavailable`.
    """
    return Run(ledger, _arguments(ledger.tenant, locals()))


def run_async(
    ledger: AsyncClient,
    parent: str,
    *,
    budget: Costs,
    name: str | None = None,
    ttl: timedelta = timedelta(hours=1),
    max_tokens: int | None = None,
    max_width: int | None = None,
    max_depth: int | None = None,
    stagger_s: Amount = Decimal(0),
) -> AsyncRun:
    """`run`, asynchronous."""
    return AsyncRun(ledger, _arguments(ledger.tenant, locals()))


def _arguments(tenant: str, given: dict[str, Any]) -> CreateRun:
    build: Callable[..., CreateRun] = _call
    return build(tenant, **{name: value for name, value in given.items() if name != "ledger"})
