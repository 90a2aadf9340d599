"""The verbs of a client, written once: each builds the call that `Client` and `AsyncClient` then carry out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

from quota.calls import (
    Adjust,
    Amount,
    Balance,
    BalanceRow,
    Call,
    Check,
    Costs,
    Credit,
    EnsureSubject,
    Extend,
    Reap,
    Reaped,
    Record,
    Recorded,
    Release,
    Released,
    Repair,
    Repaired,
    Reservation,
    Reserve,
    ReserveInTurn,
    Settle,
    Settlement,
    Violation,
)
from quota.client.retrying import patience_of
from quota.ids import uuid7

__all__ = ["awaited", "blocking"]

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")


class Speaker(Protocol):
    """Whoever speaks for a tenant: a client."""

    tenant: str


def blocking(build: Callable[Concatenate[S, P], Call[A]]) -> Callable[Concatenate[S, P], A]:
    """Makes a method of what builds a call: it has its own object's `call` carry it out and returns the answer."""

    @functools.wraps(build)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> A:
        answer: A = cast("Any", self).call(build(self, *args, **kwargs))
        return answer

    return method


def awaited(build: Callable[Concatenate[S, P], Call[A]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, A]]:
    """`blocking`, asynchronous."""

    @functools.wraps(build)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> A:
        answer: A = await cast("Any", self).call(build(self, *args, **kwargs))
        return answer

    return method


def reserve(
    client: Speaker,
    subject: str,
    costs: Costs,
    *,
    ttl: timedelta = timedelta(minutes=10),
    id: UUID | str | None = None,  # noqa: A002 - the contract's word
    also: Collection[str] = (),
    headroom: Amount = Decimal(0),
    on_expiry: str | None = None,
    details: Mapping[str, object] | None = None,
    wait: Decimal | float | None = None,
) -> Call[Reservation]:
    """Holds the worst case before the call is made; all or nothing.

    Arguments:
        subject: who spends, `kind:id`; every ancestor is charged as well.
        costs: amounts by unit (`Decimal`, `int` or `str`).
        ttl: how long the hold lives unless it is extended.
        id: the idempotency key; None: a new UUID of version 7, the same for every attempt of this call.
        also: further subjects that the same cost counts on.
        headroom: share of every capacity to leave untouched, 0 to below 1.
        on_expiry: `charge` books the hold when its time has passed, whatever the limits say; None: as they say.
        details: free JSON that is kept with the reservation.
        wait: for how many seconds to wait in turn when there is no room, behind those who wait already; 0: ask once,
            and let them pass; None: ask once, whoever waits.

    Result: the reservation; a refusal is a value too, see `raise_if_refused`, and comes at once when no wait can help.
    Errors: the `Misuse` that the database names; `Unavailable`, unless the client is set to fail open; `Shortage` when
    it has waited and there was no room.
    """
    arguments: dict[str, Any] = {
        "ttl": ttl,
        "id": id,
        "also": also,
        "headroom": headroom,
        "on_expiry": on_expiry,
        "details": details,
        "tenant": client.tenant,
    }
    if wait is None:
        return Reserve(subject, costs, **arguments)
    return ReserveInTurn(subject, costs, patience=patience_of(wait), **arguments)


def settle(
    client: Speaker,
    id: UUID | str,  # noqa: A002
    costs: Costs | None = None,
    *,
    final: bool = True,
    outcome: str = "ok",
    details: Mapping[str, object] | None = None,
) -> Call[Settlement]:
    """Books the true cost of a reservation.

    Arguments:
        id: the reservation.
        costs: totals of the reservation so far, by unit, never steps; units left out, or None, settle at the hold.
        final: False books the totals and keeps the rest held.
        outcome: `ok`, `error`, `timeout`, `cancelled`, or `unknown`: books the whole hold; one later settle may
            correct it.
        details: free JSON that is kept with the entry.

    Errors: among others `UnknownReservation`, `AlreadySettled`, `AlreadyReleased`, `TotalDecreased`; `Unavailable`:
    repeat it, the same totals are booked once.
    """
    return Settle(id, costs, final=final, outcome=outcome, details=details, tenant=client.tenant)


def release(
    client: Speaker,
    id: UUID | str,  # noqa: A002
    *,
    details: Mapping[str, object] | None = None,
) -> Call[Released]:
    """Returns a hold whose call never left. What was booked stays.

    Arguments: `id`, the reservation; `details`, free JSON.
    Errors: `UnknownReservation`, `AlreadySettled`; `Unavailable`.
    """
    return Release(id, details=details, tenant=client.tenant)


def adjust(client: Speaker, id: UUID | str, costs: Costs) -> Call[Reservation]:  # noqa: A002
    """Changes what an open hold holds to `costs`: totals by unit. More is decided like a reserve, less always fits.

    Result: the reservation, or the refusal that left it as it was. Errors: `UnitNotHeld`, `TotalDecreased`, `Expired`
    and others of a closed reservation; `Unavailable`.
    """
    return Adjust(id, costs, tenant=client.tenant)


def extend(client: Speaker, id: UUID | str, ttl: timedelta) -> Call[datetime]:  # noqa: A002
    """Lets an open hold live for `ttl` from now on. Result: when it expires (UTC), never earlier than before.

    Errors: `InvalidTtl`, `Expired` and others of a closed reservation; `Unavailable`.
    """
    return Extend(id, ttl, tenant=client.tenant)


def record(
    client: Speaker,
    subject: str,
    costs: Costs,
    *,
    id: UUID | str | None = None,  # noqa: A002
    also: Collection[str] = (),
    details: Mapping[str, object] | None = None,
) -> Call[Recorded]:
    """Books usage that had no hold, in full; it is never refused.

    Arguments: as in `reserve`. Result: the ledger entry. Errors: the `Misuse` that the database names; `Unavailable`.
    """
    return Record(subject, costs, id=uuid7() if id is None else id, also=also, details=details, tenant=client.tenant)


def balance(client: Speaker, subject: str) -> Call[list[BalanceRow]]:
    """Returns every limit on the subject's lineage as it stands now. Errors: `UnknownSubject`; `Unavailable`."""
    return Balance(subject, tenant=client.tenant)


def ensure_subject(client: Speaker, name: str, parent: str | None = None) -> Call[bool]:
    """Makes a subject at the first contact of an id that somebody has authenticated; True when it is new.

    Errors: `ParentDiffers` when it is known under another parent; `InvalidName`; `Unavailable`.
    """
    return EnsureSubject(name, parent, tenant=client.tenant)


def credit(
    client: Speaker,
    reservation: UUID | str,
    costs: Costs,
    reason: str,
    *,
    id: UUID | str | None = None,  # noqa: A002
) -> Call[Recorded]:
    """Takes back at most what a reservation booked, on all its accounts and in their windows.

    Arguments: `costs`, amounts by unit; `reason`, for the log; `id`, the idempotency key (None: a new one).
    Errors: `UnknownReservation`, `AmountOutOfRange`; `NotAllowed` unless the login is an admin's; `Unavailable`.
    """
    return Credit(reservation, costs, reason, id=uuid7() if id is None else id, tenant=client.tenant)


def reap(_client: Speaker, max: int = 1000, tenant: str | None = None) -> Call[Reaped]:  # noqa: A002
    """Closes at most `max` overdue holds, oldest first, of `tenant` (None: of all).

    Its deadline is a minute at least; `call(Reap(…), timeout_s=…)` sets another.
    """
    return Reap(max, tenant)


def check(_client: Speaker, tenant: str | None = None) -> Call[list[Violation]]:
    """Proves the books of `tenant` (None: of all) in one snapshot; an empty list when they are right.

    Its deadline is a minute at least; `call(Check(…), timeout_s=…)` sets another.
    """
    return Check(tenant)


def repair(client: Speaker) -> Call[list[Repaired]]:
    """Rebuilds the tenant's counters from its holds and entries; returns those that were wrong. A minute at least."""
    return Repair(tenant=client.tenant)
