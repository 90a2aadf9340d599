"""One call under a lease, and the answers that it gets: made on every decision, so made cheaply."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any
from uuid import UUID, SafeUUID

from quota.calls import Reservation, Standing
from quota.ids import uuid7
from quota.lease.amounts import ZERO, Amounts
from quota.lease.lease import Lease

__all__ = ["Granted", "Local", "first_key", "identity", "standings"]

# The last 62 bits of a UUID follow its variant; with the first two of them clear, counting on never reaches it.
_ROOM = ~(0b11 << 60)

_UNKNOWN = SafeUUID.unknown
_new = object.__new__


def first_key() -> int:
    """Returns the id that the calls of one process count on from, as an integer: a version 7 UUID."""
    return uuid7().int & _ROOM


class _Blank(UUID):
    """A UUID that can still be filled in."""

    __slots__ = ()

    __setattr__ = object.__setattr__  # type: ignore[assignment]


def identity(key: int) -> UUID:
    """Returns the UUID of an integer, without the checks that its constructor makes of texts and fields."""
    made = _new(_Blank)
    made.int = key  # type: ignore[misc]
    made.is_safe = _UNKNOWN  # type: ignore[misc]
    made.__class__ = UUID  # type: ignore[assignment]
    return made


class Local:
    """One call under a lease.

    Fields:
        lease: what it was granted from.
        asked: what it holds, or held, by unit; never changed in place.
        first: what it asked for at first.
        deadline_s: when it expires, by the local clock.
        state: as of a reservation.
        booked: totals by unit that are booked; of a closed call those of its settle, as they were given.
        unknown: it was settled with an unknown outcome, and may be corrected once.
        charged: it expired and was booked in full.
        late: it was settled after it had expired.
        unbooked: usage that its lease can no longer book: it is to be recorded.
    """

    lease: Lease
    asked: Amounts
    first: Amounts
    deadline_s: float
    state = "held"
    booked: Amounts = {}  # noqa: RUF012 - read only; most calls have none
    unknown = charged = late = False
    unbooked: Amounts | None = None


class Granted(Reservation):
    """A grant under a lease. What is the same in all of them, its class knows; the rest is worked out when it is read.

    Copies of it are plain: pickled, or with `dataclasses.replace`, it is a `Reservation` of its own.
    """

    __slots__ = ("_key", "_local")

    _key: int
    _local: Local

    granted = True
    state = "held"
    replayed = False
    reason = limit_subject = limit_name = unit = None
    capacity = spent = reserved = requested = retry_after_s = None
    violations = ()

    # Its own two are set like any attribute; of what a reservation has, nothing can be.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def __new__(cls, **fields: Any) -> Reservation:  # type: ignore[misc]
        """Called like a reservation it makes one; grants are made by `to`."""
        return Reservation(**fields)

    @staticmethod
    def to(key: int, local: Local) -> Granted:
        """The grant of a call by its key."""
        made = _new(Granted)
        made._key = key  # noqa: SLF001
        made._local = local  # noqa: SLF001
        return made

    @property
    def reservation(self) -> UUID:
        """Its id."""
        return identity(self._key)

    @property
    def expires_at(self) -> datetime:
        """When it expires, by the database's clock."""
        return self._local.lease.instant(self._local.deadline_s)

    @property
    def remaining(self) -> tuple[Standing, ...]:
        """Where its lease stands now."""
        return standings(self._local.lease)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, ({field.name: getattr(self, field.name) for field in dataclasses.fields(self)},)


def _plain(fields: dict[str, Any]) -> Reservation:
    return Reservation(**fields)


def standings(lease: Lease) -> tuple[Standing, ...]:
    """Returns where a lease stands, a value per unit, of the kind `lease`."""
    return tuple(
        Standing(
            subject=lease.terms.subject,
            limit_name=None,
            unit=unit,
            kind="lease",
            capacity=lease.held[unit],
            spent=lease.used[unit],
            reserved=lease.out()[unit] - lease.used[unit],
            level=None,
            available=max(ZERO, lease.free[unit]),
        )
        for unit in lease.held
    )
