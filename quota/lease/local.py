"""One call under a lease, and the answers that it gets: made on every decision, so made cheaply."""

from __future__ import annotations

import dataclasses
from itertools import count
from typing import Any
from uuid import UUID, SafeUUID

from quota.calls import Reservation, Standing
from quota.ids import uuid7
from quota.lease.amounts import ZERO, Amounts
from quota.lease.lease import Lease

__all__ = ["Granted", "Local", "identity", "keys", "standings"]

_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(Reservation) if field.default is not dataclasses.MISSING
} | {"state": "held"}
# The last 62 bits of a UUID follow its variant; with the first two of them clear, counting on never reaches it.
_ROOM = ~(0b11 << 60)

_new = object.__new__
_set = object.__setattr__


def keys() -> count[int]:
    """Returns ids for the calls of one process, as integers: a version 7 UUID, counted on."""
    return count(uuid7().int & _ROOM)


def identity(key: int) -> UUID:
    """Returns the UUID of an integer, without the checks that its constructor makes of texts and fields."""
    made = _new(UUID)
    _set(made, "int", key)
    _set(made, "is_safe", SafeUUID.unknown)
    return made


class Local:
    """One call under a lease.

    Fields:
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

    state = "held"
    booked: Amounts = {}  # noqa: RUF012 - read only; most calls have none
    unknown = charged = late = False
    unbooked: Amounts | None = None

    def __init__(self, lease: Lease, asked: Amounts, deadline_s: float) -> None:
        self.lease = lease
        self.asked = self.first = asked
        self.deadline_s = deadline_s


class Granted(Reservation):
    """A grant under a lease. What is rarely read is worked out when it is: `expires_at` and `remaining`."""

    __slots__ = ("_local",)

    _local: Local

    @classmethod
    def to(cls, key: int, local: Local) -> Granted:
        """The grant of a call by its key."""
        made = _new(cls)
        _set(made, "granted", True)
        _set(made, "reservation", identity(key))
        _set(made, "_local", local)
        return made

    def __getattr__(self, name: str) -> Any:
        """A field that was left out: its slot is empty until it is asked for."""
        value: Any
        if name == "expires_at":
            value = self._local.lease.instant(self._local.deadline_s)
        elif name == "remaining":
            value = standings(self._local.lease)
        elif name in _DEFAULTS:
            value = _DEFAULTS[name]
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        _set(self, name, value)
        return value


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
