"""Waiting for room, for a whole fleet at once: ask in turn, look again with jitter, stop when it cannot help.

The signal that the fleet shares stands in the ledger: whoever waits has a place in the queue of the limit that binds,
and is told when to look again by what those before it will take (`quota.reserve_in_turn`). So waiters of all processes
and machines are spread over the refill, the first come first. Jitter is for what no queue can know: what others return
early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

from quota.calls import ReserveInTurn, Turn
from quota.client.attempts import Pause, Plan, uniform
from quota.errors import InvalidArgument, Shortage

__all__ = ["in_turn", "patience_of"]

# Below it a look comes exactly when it is due: there is nothing left to spread.
_EXACT_S = 1.0
_WAIT_MAX_S = 86_400


def patience_of(wait: Decimal | float) -> timedelta:
    """Returns so many seconds as a patience. Errors: `InvalidArgument` unless it is 0 to a day."""
    seconds = float(wait)
    if not (math.isfinite(seconds) and 0 <= seconds <= _WAIT_MAX_S):
        raise InvalidArgument(
            f"invalid_argument: wait is {wait}", f"pass seconds, 0 to {_WAIT_MAX_S}; 0 asks once and lets waiters pass"
        )
    return timedelta(seconds=seconds)


def in_turn(
    ask: Callable[[ReserveInTurn], Plan[Turn]],
    call: ReserveInTurn,
    *,
    now: Callable[[], float] = time.monotonic,
    uniform: Callable[[float, float], float] = uniform,
) -> Plan[Turn]:
    """Plans a reservation that waits for its turn.

    Arguments:
        ask: plans one ask.
        call: the first one, with its id; `patience` is the time for everything.
        now: the clock of that time, in seconds.
        uniform: the source of jitter: a number between two.

    Result: the grant; or at once the refusal that waiting cannot help: for ever (`too_large`, `frozen`, a lifetime's
    `exhausted`, `closed`), or because even alone it would have to wait for longer than it may.
    Errors: `Shortage` when the time ran out; what `ask` raises.
    """
    began_s = now()
    until_s = began_s + call.patience.total_seconds()
    turn = yield from ask(call)
    while turn.look_after_s is not None:
        yield Pause(min(_pause_s(float(turn.look_after_s), uniform), max(0.0, until_s - now())))
        left_s = max(0.0, until_s - now())
        turn = yield from ask(replace(call, patience=timedelta(seconds=left_s)))
        if turn.look_after_s is None and turn.refused and turn.retry_after_s is not None:
            raise Shortage(turn, now() - began_s)
    return turn


def _pause_s(look_after_s: float, uniform: Callable[[float, float], float]) -> float:
    """A quarter to a half of the time, at random: what others return early is seen early. The last second is exact."""
    return look_after_s if look_after_s <= _EXACT_S else uniform(look_after_s / 4, look_after_s / 2)
