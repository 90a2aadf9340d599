"""How calls reach the ledger, and how callers learn what is left: one by one here; out of leases, see `leasing`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

from quota import calls
from quota.authentication import Remembered
from quota.calls import LimitsOf, LimitState, Row, Settle
from quota.client.attempts import Plan
from quota.client.core import Core
from quota.http.headers import Style
from quota.metering import answers
from quota.metering.answers import ResponseHeaders
from quota.metering.identity import Identity
from quota.metering.reads import Reads

__all__ = ["Books", "Ledger", "Snapshot"]

A = TypeVar("A")

_TERMS_S = 10.0


class Snapshot:
    """The limits on a lineage as they stood at one moment, for all who share the look at them.

    Arguments:
        states: the answer of `LimitsOf`.
        shifts: by unit, how much more is left than they say.
    """

    __slots__ = ("_headers", "_shifts", "states")

    def __init__(self, states: list[LimitState], shifts: Mapping[str, Decimal] = MappingProxyType({})) -> None:
        self.states = states
        self._shifts = shifts
        self._headers: dict[str, ResponseHeaders] = {}

    def headers(self, subject: str, unit: str, style: Style) -> ResponseHeaders:
        """Returns the headers that tell them. Written once: they are the same for all who look.

        Arguments: `subject`, whose lineage it is; `unit`, what the request is counted in; `style`, of the headers.
        """
        found = self._headers.get(unit)
        if found is None:
            found = self._headers[unit] = answers.balances(self.states, subject, {unit}, style, self._shifts)
        return found


class Books(Protocol):
    """Where a call is held and settled, and where its caller's balances are read.

    Field: `keeps_details`, whether the details of a settlement are kept.
    """

    keeps_details: bool

    def plan(self, call: calls.Call[A], *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a reserve, settle, release, adjust or extend; as `Client.plan`."""

    def settling(self, settle: Settle, identity: Identity) -> Plan[Snapshot | None]:
        """Plans a settlement, and a look at the limits after it; None when that did not come along."""

    def looking(self, identity: Identity) -> Plan[Snapshot]:
        """Plans a look at the limits on a lineage."""


class Ledger:
    """Every call is a reservation of its own, decided by the database.

    Arguments: `client`, the ledger.
    """

    keeps_details = True

    def __init__(self, client: Core) -> None:
        self.client = client
        self._terms: Remembered[Snapshot] = Remembered(_TERMS_S)
        self._reads: Reads[Snapshot] = Reads()

    def plan(self, call: calls.Call[A], *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a call of the client."""
        return self.client.plan(call, id_is_ours=id_is_ours)

    def settling(self, settle: Settle, identity: Identity) -> Plan[Snapshot | None]:
        """Plans a settlement, and in the same round trip a look at the limits after it, where that is to be had."""
        look, asked_at_s = self.look(identity), time.monotonic()
        _, snapshot = yield from self.client.plan_with(settle, look)
        if snapshot is not None:
            self._terms.keep(look, snapshot, asked_at_s)
        return snapshot

    def looking(self, identity: Identity) -> Plan[Snapshot]:
        """Plans a look at the limits on a lineage, shared by all who want it at the same moment."""
        look = self.look(identity)
        asked_at_s = time.monotonic()
        deadline_s = asked_at_s + self.client.timeout_s
        snapshot = yield from self._reads.sharing(look, lambda: self.client.plan(look), deadline_s)
        self._terms.keep(look, snapshot, asked_at_s)
        return snapshot

    def terms(self, identity: Identity) -> Snapshot | None:
        """Returns the limits on a lineage as they were seen lately; None when they were not."""
        return self._terms.find(self.look(identity))

    def tenant_of(self, identity: Identity) -> str:
        """Returns whose subject it is."""
        return identity.tenant or self.client.tenant

    def look(self, identity: Identity) -> calls.Call[Snapshot]:
        """Returns the call that looks at the limits on a lineage; equal ones are the same look."""
        return cast("calls.Call[Snapshot]", _Look(identity.subject, self.tenant_of(identity)))


class _Look(LimitsOf):
    """A look at the limits on a lineage: one for all who want it at the same moment."""

    def answer(self, rows: Sequence[Row]) -> Snapshot:  # type: ignore[override]
        """What was seen, in one piece."""
        return Snapshot(super().answer(rows))
