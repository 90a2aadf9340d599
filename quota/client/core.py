"""What both clients share: their settings, what they do about a database that is away, and how they drive a plan."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict

from quota.calls import (
    FAIL_OPEN,
    Adjust,
    Call,
    Extend,
    Release,
    Released,
    Reservation,
    Reserve,
    Settle,
    Settlement,
)
from quota.client.attempts import Plan, attempts
from quota.client.connections import Failures, PerProcess, pool_options
from quota.config import ConfigError, Settings, redact_url
from quota.errors import Unavailable
from quota.ids import uuid7

__all__ = ["Core"]

logger = logging.getLogger("quota.client")

A = TypeVar("A")

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
    ) -> None:
        if not 0 < float(timeout_s) <= 3600:
            raise ConfigError(f"timeout_s: {timeout_s} is not more than 0 and at most 3600; give seconds, such as 2")
        if pool_max < 1:
            raise ConfigError(f"pool_max: {pool_max} is less than 1; give the number of connections, such as 8")
        if retries < 0:
            raise ConfigError(f"retries: {retries} is negative; give how often a call may be repeated, such as 3")
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
        self._background: set[Any] = set()
        self._closed = False
        self._bypasses = 0
        self._bypassed: OrderedDict[str, None] = OrderedDict()
        self._bypass_lock = PerProcess(threading.Lock)

    def _new_pool(self) -> Any:
        raise NotImplementedError

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

    def plan(self, call: Call[A], timeout_s: Decimal | float | None = None) -> Plan[A]:
        """Plans a call: with an id, a deadline, retries, and what `fail_open` makes of a database that is away.

        Arguments:
            call: any value of `quota.calls`.
            timeout_s: its deadline in seconds; None: the call's own, else the client's.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        call = call.identified(uuid7)
        if self._bypassed:
            answer = self._answer_for_bypassed(call)
            if answer is not None:
                return cast("A", answer)
        try:
            return (yield from self.ask(call, timeout_s))
        except Unavailable as error:
            if self.fail_open and isinstance(call, Reserve):
                return cast("A", self._bypass(call, error))
            raise

    def ask(self, call: Call[A], timeout_s: Decimal | float | None = None, retries: int | None = None) -> Plan[A]:
        """Plans a call that only the database may answer, whatever `fail_open` says.

        Arguments:
            call: the call, with its id.
            timeout_s: its deadline in seconds; None: the call's own, else the client's.
            retries: how often it may be repeated; None: as the client is set.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        if timeout_s is None:
            timeout_s = self.timeout_s if call.timeout_s is None else max(float(call.timeout_s), self.timeout_s)
        retries = self.retries if retries is None else retries
        return (yield from attempts(call, timeout_s=float(timeout_s), retries=retries))

    def _bypass(self, call: Reserve, error: Unavailable) -> Reservation:
        identity = UUID(str(call.id))
        with self._bypass_lock.get():
            self._bypasses += 1
            self._bypassed[str(identity)] = None
            if len(self._bypassed) > _BYPASSES_REMEMBERED:
                self._bypassed.popitem(last=False)
        logger.warning("fail open: %s of %s passed unchecked: %s", identity, call.subject, error)
        return Reservation(granted=True, reservation=identity, state=FAIL_OPEN)

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
