"""A hold around a piece of work: reserved before it, closed after it, whatever happens in between."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from uuid import UUID

from quota.calls import (
    Adjust,
    Call,
    Costs,
    Extend,
    Release,
    Released,
    Reservation,
    Reserve,
    ReserveInTurn,
    Settle,
    Settlement,
)
from quota.client.attempts import Plan
from quota.client.verbs import awaited, blocking
from quota.client.waiting import undisturbed
from quota.errors import Unavailable
from quota.ids import uuid7

__all__ = ["AsyncHold", "Hold"]

logger = logging.getLogger("quota.client")

A = TypeVar("A")


class Planner(Protocol):
    """Whoever plans calls: a client, or a leased budget."""

    def plan(self, call: Call[A], *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a call. `id_is_ours`: the call's id was made here, and its user does not ask for it again."""


class Driver(Planner, Protocol):
    """Who also carries plans out."""

    def drive(self, plan: Plan[A]) -> A:
        """Carries out a plan."""


class AsyncDriver(Planner, Protocol):
    """`Driver`, asynchronous."""

    async def drive(self, plan: Plan[A]) -> A:
        """Carries out a plan."""


class _HoldCore:
    """The life of a hold, as plans. No I/O."""

    def __init__(self, core: Planner, reserve: Reserve | ReserveInTurn) -> None:
        self._core = core
        self._id_is_ours = reserve.id is None
        self._reserve = reserve.identified(uuid7)
        self._answer: Reservation | None = None
        self._sent = False
        self._closed = False
        self._unsure: Call[Any] | None = None
        self.tenant = reserve.tenant

    @property
    def id(self) -> UUID:
        """The reservation's id."""
        return UUID(str(self._reserve.id))

    @property
    def reservation(self) -> Reservation:
        """The answer that granted the hold. Errors: `RuntimeError` before the hold was entered."""
        if self._answer is None:
            raise RuntimeError("the hold has not been entered")
        return self._answer

    def sending(self) -> None:
        """From here on the call may have left: an exception no longer returns the hold, it books it."""
        self._sent = True

    def _entering(self) -> Plan[None]:
        if self._answer is not None:
            raise RuntimeError("a hold is entered once; ask the client for a new one")
        try:
            self._answer = yield from self._core.plan(self._reserve, id_is_ours=self._id_is_ours)
        except Exception:
            raise
        except BaseException:
            # Interrupted or cancelled: the reserve may have been granted, the work will not be done.
            try:
                yield from self._core.plan(Release(self._reserve.id or "", tenant=self.tenant))
            except Exception as failure:  # most often UnknownReservation: it was not granted
                logger.info("hold %s, interrupted while reserving, was not released: %s", self._reserve.id, failure)
            raise
        self._answer.raise_if_refused()

    def _tracking(self, call: Call[A]) -> Plan[A]:
        """Plans a call on this hold, and remembers what it means for the way out."""
        final = isinstance(call, Release) or (isinstance(call, Settle) and call.final)
        try:
            answer = yield from self._core.plan(call)
        except Unavailable:
            # It may have taken effect; whatever else happens, only the same request is safe to repeat.
            self._unsure = call if final else self._unsure
            raise
        if final:
            self._closed, self._unsure = True, None
        return answer

    def _leaving(self, error: BaseException | None) -> Plan[None]:
        if self._closed:
            return
        call = self._unsure or self._way_out(error)
        try:
            yield from self._tracking(call)
        except Exception as failure:
            if error is None:
                raise
            note = f"hold {self.id} could not be closed and stays until it expires: {failure}"
            logger.warning("%s", note)
            error.add_note(note)

    def _way_out(self, error: BaseException | None) -> Call[Any]:
        if error is None:
            return Settle(self.id, tenant=self.tenant)
        if self._sent:
            return Settle(self.id, outcome="unknown", tenant=self.tenant)
        return Release(self.id, tenant=self.tenant)


def settle(
    hold: _HoldCore,
    costs: Costs | None = None,
    *,
    final: bool = True,
    outcome: str = "ok",
    details: Mapping[str, object] | None = None,
) -> Call[Settlement]:
    """Books the true cost: totals by unit; units left out, or None, settle at the hold. See `Client.settle`."""
    return Settle(hold.id, costs, final=final, outcome=outcome, details=details, tenant=hold.tenant)


def release(hold: _HoldCore, *, details: Mapping[str, object] | None = None) -> Call[Released]:
    """Returns the hold: the call will not be made. See `Client.release`."""
    return Release(hold.id, details=details, tenant=hold.tenant)


def adjust(hold: _HoldCore, costs: Costs) -> Call[Reservation]:
    """Changes what is held to these totals by unit; the answer may be a refusal. See `Client.adjust`."""
    return Adjust(hold.id, costs, tenant=hold.tenant)


def extend(hold: _HoldCore, ttl: timedelta) -> Call[datetime]:
    """Lets the hold live for `ttl` from now on. See `Client.extend`."""
    return Extend(hold.id, ttl, tenant=hold.tenant)


class Hold(_HoldCore):
    """A hold as a context, from `Client.hold`. Entering raises `Refused` when the hold is refused.

    Leaving it: a hold that `settle` or `release` has closed is left alone. Otherwise, without an exception, it settles
    at the hold; with one before `sending()` it is released, with one after it the outcome is unknown and the whole hold
    is booked (one later settle may correct it). `KeyboardInterrupt` and cancellation are exceptions like any other. An
    exception of the work is never replaced: when closing fails on top of it, that is logged and noted on it.
    """

    def __init__(self, client: Driver, reserve: Reserve | ReserveInTurn) -> None:
        super().__init__(client, reserve)
        self._client = client

    def call(self, call: Call[A]) -> A:
        """Carries out a call on this hold; returns its answer."""
        return self._client.drive(self._tracking(call))

    settle = blocking(settle)
    release = blocking(release)
    adjust = blocking(adjust)
    extend = blocking(extend)

    def __enter__(self) -> Self:
        self._client.drive(self._entering())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.drive(self._leaving(error))


class AsyncHold(_HoldCore):
    """`Hold`, asynchronous, from `AsyncClient.hold`. A cancellation waits until the hold is closed (or out of time)."""

    def __init__(self, client: AsyncDriver, reserve: Reserve | ReserveInTurn) -> None:
        super().__init__(client, reserve)
        self._client = client

    async def call(self, call: Call[A]) -> A:
        """Carries out a call on this hold; returns its answer."""
        return await self._client.drive(self._tracking(call))

    settle = awaited(settle)
    release = awaited(release)
    adjust = awaited(adjust)
    extend = awaited(extend)

    async def __aenter__(self) -> Self:
        await self._client.drive(self._entering())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Who cancels a second time must not leave the hold open.
        cancelled = await undisturbed(self._client.drive(self._leaving(error)))
        if cancelled is not None and error is None:
            raise cancelled
