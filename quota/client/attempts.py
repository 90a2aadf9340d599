"""What to do, in which order, until when: the one place that decides about deadlines, retries and doubt.

No I/O and no clock but `monotonic`. A plan is a generator: it yields steps, a driver carries each out, sends back what
came of it or throws what went wrong, and the plan decides what comes next. The two clients are two drivers.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psycopg

from quota.calls import Call, Row
from quota.errors import Fate, QuotaError, Unavailable, fate, from_database_error

__all__ = [
    "Execute",
    "Join",
    "NoConnection",
    "Pause",
    "Plan",
    "Result",
    "TooLate",
    "Wait",
    "attempts",
    "pause_s",
    "uniform",
]

logger = logging.getLogger("quota.client")

A = TypeVar("A")

_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0

# The kernel's numbers: neither a seed nor a fork makes a fleet retry in step.
uniform = random.SystemRandom().uniform


@dataclass(frozen=True, slots=True)
class Execute:
    """Step: execute this statement on some connection, and be done by `deadline_s` (of `time.monotonic`)."""

    statement: str
    parameters: dict[str, object]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Step: wait for that many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Step: wait until the bell has rung, at the longest until `until_s` (of `time.monotonic`)."""

    bell: Any
    until_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Step: wait until somebody else is done, or until `deadline_s` (of `time.monotonic`), whatever came of it."""

    other: Future[None]
    deadline_s: float


class Result(NamedTuple):
    """What came of `Execute`: the rows, and the warnings that the server sent along."""

    rows: list[Row]
    warnings: list[str]


Plan = Generator[Execute | Pause | Wait | Join, Any, A]
"""Steps to an answer."""


class NoConnection(psycopg.OperationalError):
    """The deadline passed before there was a connection: nothing was sent."""


class TooLate(psycopg.OperationalError):
    """The deadline passed while the statement was under way."""


def attempts(call: Call[A], *, timeout_s: float, retries: int, deadline_s: float | None = None) -> Plan[A]:
    """Plans one call.

    Arguments:
        call: the call; it has its id already, so that every attempt is the same request.
        timeout_s: for everything together: waiting for a connection, connecting, executing, pausing, retrying.
        retries: how often it may be repeated.
        deadline_s: when the time is over (of `time.monotonic`), if it began to run earlier than now.

    Result: the plan of its answer. Repeated with full jitter: serialization failures and deadlocks; and, if the call is
    repeatable, results in doubt: a lost connection, or a warning on a write (a commit whose wait for a standby was
    cancelled is acknowledged with nothing but a warning).
    Errors: whatever `Misuse` the database reports; `Unavailable` when time or retries have run out.
    """
    deadline_s = time.monotonic() + timeout_s if deadline_s is None else deadline_s
    step = Execute(call.statement, call.parameters(), deadline_s)
    in_doubt = False
    for attempt in range(retries + 1):
        try:
            result: Result = yield step
        except NoConnection as error:
            raise Unavailable(f"{_what(call)}: no connection within {timeout_s:g} s: {error}", in_doubt) from error
        except TooLate as error:
            raise Unavailable(f"{_what(call)}: no answer within {timeout_s:g} s", True) from error
        except psycopg.Error as error:
            what_is_known = fate(error)
            in_doubt = in_doubt or what_is_known is Fate.IN_DOUBT
            problem = str(error).strip()
            _raise_if_final(call, error, what_is_known, in_doubt)
        else:
            if not (result.warnings and call.writes):
                return call.answer(result.rows)
            in_doubt, problem = True, "; ".join(result.warnings)
        if in_doubt and not call.repeatable:
            raise Unavailable(f"{_what(call)}: the outcome is unknown: {problem}", True)
        seconds = pause_s(attempt)
        if attempt == retries or time.monotonic() + seconds >= deadline_s:
            break
        logger.info("%s: repeated (attempt %d failed: %s)", _what(call), attempt + 1, problem)
        yield Pause(seconds)
    raise Unavailable(f"{_what(call)}: given up after {attempt + 1} attempts: {problem}", in_doubt)


def pause_s(attempt: int) -> float:
    """Returns how long to wait after the attempt of that number (from 0), in seconds: full jitter."""
    return uniform(0, min(_PAUSE_MAX_S, _PAUSE_S * 2**attempt))


def _raise_if_final(call: Call[Any], error: psycopg.Error, what_is_known: Fate, in_doubt: bool) -> None:
    if what_is_known is Fate.OVERLOADED:
        raise Unavailable(f"{_what(call)}: {str(error).strip()}", in_doubt) from error
    if what_is_known is Fate.REJECTED:
        ours: QuotaError | None = from_database_error(error)
        if ours is None:
            raise error
        raise ours from error


def _what(call: Call[Any]) -> str:
    return f"quota.{call.function.name}"
