"""What both clients share: their settings, what they do about a database that is away, and how they drive a plan."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict

from quota.calls import (
    BATCH_MAX,
    FAIL_OPEN,
    Adjust,
    Call,
    Extend,
    Release,
    Released,
    Reservation,
    Reserve,
    ReserveInTurn,
    Settle,
    Settlement,
    Turn,
)
from quota.client.attempts import Plan, attempts
from quota.client.coalescing import MANY, Batches, Coalescer
from quota.client.connections import Failures, PerProcess, pool_options
from quota.client.retrying import in_turn
from quota.client.waiting import Bell
from quota.config import ConfigError, Settings, redact_url
from quota.errors import Unavailable
from quota.ids import uuid7

__all__ = ["Core"]

logger = logging.getLogger("quota.client")

A = TypeVar("A")
B = TypeVar("B")

# Reservations let through that nobody settles or releases must not fill the memory of a long outage.
_BYPASSES_REMEMBERED = 100_000


class Core:
    """The part of a client that does no I/O. Arguments as in `Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        tenant: str = "default",
        timeout_s: Decimal | float = Decimal(2),
        pool_max: int = 8,
        prepare_threshold: int | None = 5,
        fail_open: bool = False,
        retries: int = 3,
        application_name: str = "quota",
        coalesce: bool = False,
        batches_in_flight: int = 1,
        batch_max: int = 500,
    ) -> None:
        if not 0 < float(timeout_s) <= 3600:
            raise ConfigError(f"timeout_s: {timeout_s} is not more than 0 and at most 3600; give seconds, such as 2")
        if pool_max < 1:
            raise ConfigError(f"pool_max: {pool_max} is less than 1; give the number of connections, such as 8")
        if retries < 0:
            raise ConfigError(f"retries: {retries} is negative; give how often a call may be repeated, such as 3")
        if batches_in_flight < 1:
            raise ConfigError(f"batches_in_flight: {batches_in_flight} is less than 1; give a small number, such as 2")
        if not 1 <= batch_max <= BATCH_MAX:
            raise ConfigError(f"batch_max: {batch_max} is not 1 to {BATCH_MAX}; give the most calls in a batch")
        self.tenant = tenant
        self.timeout_s = float(timeout_s)
        self.retries = retries
        self.fail_open = fail_open
        self._url = _checked(url)
        self._failures = Failures(maxlen=1)
        self._pool_options = pool_options(
            failures=self._failures,
            application_name=application_name,
            prepare_threshold=prepare_threshold,
            pool_max=pool_max,
            timeout_s=self.timeout_s,
        )
        self._pools: PerProcess[Any] = PerProcess(self._new_pool)
        self._coalesce = coalesce
        self._batch_settings = {"batches_in_flight": batches_in_flight, "batch_max": batch_max}
        self._workers: PerProcess[Any] = PerProcess(self._new_workers)
        self._coalescers: PerProcess[Coalescer] = PerProcess(self._new_coalescer)
        self._background: set[Any] = set()
        self._closed = False
        self._bypasses = 0
        self._bypassed: OrderedDict[str, None] = OrderedDict()
        self._bypass_lock = PerProcess(threading.Lock)

    def _new_pool(self) -> Any:
        raise NotImplementedError

    def _new_bell(self) -> Bell:
        raise NotImplementedError

    def _new_workers(self) -> Any:
        raise NotImplementedError

    def _start(self, plan: Plan[None]) -> None:
        """Has a plan carried out beside whoever calls."""
        raise NotImplementedError

    def _new_coalescer(self) -> Coalescer:
        return Coalescer(
            start=self._start,
            new_bell=self._new_bell,
            retries=self.retries,
            timeout_s=self.timeout_s,
            **self._batch_settings,
        )

    def _scope(self) -> Hashable:
        """Within a process, whose connections and batches are meant."""
        return None

    @classmethod
    def settings_of(cls, settings: Settings) -> dict[str, Any]:
        """Returns the arguments that `settings` (of the environment) stand for."""
        return {
            "url": settings.database_url,
            "tenant": settings.tenant,
            "timeout_s": settings.timeout_s,
            "pool_max": settings.pool_max,
            "prepare_threshold": settings.prepare_threshold,
            "fail_open": settings.fail_open,
        }

    @property
    def closed(self) -> bool:
        """True when `close` was called: every call after it is a `RuntimeError`."""
        return self._closed

    @property
    def bypasses(self) -> int:
        """How many reservations passed unchecked because the database was away (`fail_open`)."""
        return self._bypasses

    @property
    def batches(self) -> Batches:
        """What a coalescing client has sent so far, in this process (or, asynchronous, in the running loop)."""
        return self._coalescers.get(self._scope()).batches

    def plan(self, call: Call[A], timeout_s: Decimal | float | None = None, *, id_is_ours: bool = False) -> Plan[A]:
        """Plans a call: with an id, a deadline, retries, and what `fail_open` makes of a database that is away.

        Arguments:
            call: any value of `quota.calls`.
            timeout_s: its deadline in seconds; None: the call's own, else the client's.
            id_is_ours: the call's id was made here, and its user does not ask for it again.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        asked, call = call, call.identified(uuid7)
        if self._bypassed:
            answer = self._answer_for_bypassed(call)
            if answer is not None:
                return cast("A", answer)
        try:
            if isinstance(call, ReserveInTurn):
                return cast("A", (yield from in_turn(lambda one: self.ask(one, timeout_s), call)))
            if self._coalesce and type(call) in MANY:
                coalescer = self._coalescers.get(self._scope())
                ours = id_is_ours or call is not asked
                seconds = self._deadline_of(call, timeout_s)
                return (yield from coalescer.asking(call, timeout_s=seconds, id_is_ours=ours))[0]
            return (yield from self.ask(call, timeout_s))
        except Unavailable as error:
            if self.fail_open and isinstance(call, Reserve | ReserveInTurn):
                return cast("A", self._bypass(call, error))
            raise

    def plan_with(self, call: Call[A], then: Call[B]) -> Plan[tuple[A, B | None]]:
        """`plan` with a read that sees what the call has done, in the same round trip where calls are coalesced.

        Arguments: `call`; `then`, the read.
        Result: both answers; None for the read when it was not to be had that way: plan it by itself.
        """
        if self._closed or self._bypassed or not self._coalesce or type(call) not in MANY:
            return (yield from self.plan(call)), None
        identified = call.identified(uuid7)
        seconds, ours = self._deadline_of(call, None), identified is not call
        coalescer = self._coalescers.get(self._scope())
        return (yield from coalescer.asking(identified, timeout_s=seconds, id_is_ours=ours, then=then))

    def ask(self, call: Call[A], timeout_s: Decimal | float | None = None, retries: int | None = None) -> Plan[A]:
        """Plans a call that only the database may answer, whatever `fail_open` says.

        Arguments:
            call: the call, with its id.
            timeout_s: its deadline in seconds; None: the call's own, else the client's.
            retries: how often it may be repeated; None: as the client is set.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        retries = self.retries if retries is None else retries
        return (yield from attempts(call, timeout_s=self._deadline_of(call, timeout_s), retries=retries))

    def _deadline_of(self, call: Call[Any], timeout_s: Decimal | float | None) -> float:
        if timeout_s is not None:
            return float(timeout_s)
        return self.timeout_s if call.timeout_s is None else max(float(call.timeout_s), self.timeout_s)

    def _bypass(self, call: Reserve | ReserveInTurn, error: Unavailable) -> Reservation:
        identity = UUID(str(call.id))
        with self._bypass_lock.get():
            self._bypasses += 1
            self._bypassed[str(identity)] = None
            if len(self._bypassed) > _BYPASSES_REMEMBERED:
                self._bypassed.popitem(last=False)
        logger.warning("fail open: %s of %s passed unchecked: %s", identity, call.subject, error)
        kind = Turn if isinstance(call, ReserveInTurn) else Reservation
        return kind(granted=True, reservation=identity, state=FAIL_OPEN)

    def _answer_for_bypassed(self, call: Call[Any]) -> object | None:
        """What the ledger never saw cannot be closed there: the answer that stands for doing nothing."""
        if not isinstance(call, Settle | Release | Adjust | Extend):
            return None
        key = str(call.parameters()["id"])
        with self._bypass_lock.get():
            if key not in self._bypassed:
                return None
            if isinstance(call, Release) or (isinstance(call, Settle) and call.final):
                # Remembered a little longer: closing twice must not turn into an error.
                self._bypassed.move_to_end(key, last=False)
        match call:
            case Settle():
                return Settlement(state=FAIL_OPEN)
            case Release():
                return Released(state=FAIL_OPEN)
            case Adjust():
                return Reservation(granted=True, reservation=UUID(key), state=FAIL_OPEN)
            case Extend():
                return datetime.now(UTC) + call.ttl

    def _why_no_connection(self) -> str:
        if self._failures:
            return self._failures[-1]
        return f"all {self._pool_options['max_size']} of the pool are busy, or the server does not answer"


def _checked(url: str | None) -> str:
    if url is None:
        url = Settings.from_env().database_url
    if url is None:
        raise ConfigError(
            "no database: set QUOTA_DATABASE_URL, or pass a URL such as postgresql://user@host:5432/database"
        )
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # from None: the driver's message quotes the text, password and all.
        raise ConfigError(
            f'"{redact_url(url)}" is neither a URL nor a libpq connection string; '
            "write postgresql://user:password@host:5432/database"
        ) from None
    return url
