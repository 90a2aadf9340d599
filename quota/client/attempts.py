"""What to do, in which order, until when: the one place that decides about deadlines, retries and doubt.

No I/O and no clock but `monotonic`. A plan is a generator: it yields steps, a driver carries each out, sends back what
came of it or throws what went wrong, and the plan decides what comes next. The two clients are two drivers.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import psycopg

from quota.calls import Call, Row
from quota.client.statements import Outcome
from quota.errors import Fate, QuotaError, Unavailable, fate, from_database_error

__all__ = [
    "Done",
    "Ended",
    "Execute",
    "Join",
    "NoConnection",
    "Pause",
    "Plan",
    "Result",
    "Together",
    "TooLate",
    "Wait",
    "attempts",
    "pause_s",
    "together",
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
    """Step: execute this statement on some connection, and be done by `deadline_s` (of `time.monotonic`).

    `look`: take a connection only after a look at whether the server has closed it while it lay idle.
    """

    statement: str
    parameters: dict[str, object]
    deadline_s: float
    look: bool = True


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


@dataclass(frozen=True, slots=True)
class Together:
    """Step: execute these on one connection, in one round trip and in order, each a transaction of its own.

    Its result is a list: of each its `Result`, or psycopg's error.
    """

    steps: tuple[Execute, ...]

    @property
    def deadline_s(self) -> float:
        """When the last of them must be done (of `time.monotonic`)."""
        return max(step.deadline_s for step in self.steps)

    @property
    def look(self) -> bool:
        """As of `Execute`."""
        return any(step.look for step in self.steps)

    def statements(self) -> list[tuple[str, dict[str, object]]]:
        """Returns text and parameters of each."""
        return [(step.statement, step.parameters) for step in self.steps]

    @staticmethod
    def results(outcomes: Sequence[Outcome]) -> list[Result | psycopg.Error]:
        """Returns what the step's result is, made from what became of its statements."""
        return [outcome if isinstance(outcome, psycopg.Error) else Result(*outcome) for outcome in outcomes]


Done = Result | list[Result | psycopg.Error]
"""What comes of `Execute`, and of `Together`."""

Plan = Generator[Execute | Together | Pause | Wait | Join, Any, A]
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
    # A read that meets a connection which is gone is simply read again, if it may be.
    step = Execute(call.statement, call.parameters(), deadline_s, look=call.writes or not retries)
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
        if not step.look:
            step = replace(step, look=True)
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


class Ended(NamedTuple):
    """What came of one plan among several: its answer or its error, and whether it took one attempt only."""

    outcome: Any
    at_once: bool


def together(plans: Sequence[Plan[Any]]) -> Plan[list[Ended]]:
    """Plans several calls whose first attempts are one round trip; what is to be repeated goes on by itself afterwards.

    Arguments: `plans`, of `attempts`. Result: what came of each, in their order; errors are values here.
    """
    if len(plans) == 1:
        return [Ended((yield from _outcome(plans[0])), True)]
    ended: list[Ended] = []
    steps = tuple(cast("Execute", next(plan)) for plan in plans)
    try:
        results = yield Together(steps)
    except BaseException as error:  # nothing was executed, or nobody knows: each plan decides
        results = [error] * len(plans)
    for plan, result in zip(plans, results, strict=True):
        try:
            step = plan.throw(result) if isinstance(result, BaseException) else plan.send(result)
        except StopIteration as stop:
            ended.append(Ended(stop.value, True))
        except Exception as error:
            ended.append(Ended(error, True))
        else:
            ended.append(Ended((yield from _outcome(_continued(plan, step))), False))
    return ended


def _continued(plan: Plan[A], step: Any) -> Plan[A]:
    """A plan that has yielded `step` already."""
    try:
        while True:
            try:
                result = yield step
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(result)
    except StopIteration as stop:
        answer: A = stop.value
        return answer


def _outcome(plan: Plan[A]) -> Plan[A | Exception]:
    try:
        return (yield from plan)
    except Exception as error:
        return error


def _what(call: Call[Any]) -> str:
    return f"quota.{call.function.name}"
