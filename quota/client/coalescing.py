"""Concurrent calls gathered into batches: one statement and one commit for many callers, to each its own answer.

A hot row does one commit after another, so that more writers only wait for each other. Here few batches are under way
at a time; whoever calls meanwhile waits, and goes out together with the others when one of them comes back. While a
batch may go, a call is sent at once: nobody waits for company, and there is no timer.

No I/O: a caller's plan waits (`Wait`), a flusher's plan executes batch after batch, and a client carries out both. What
is promised to each caller:

- Its deadline and its cancellation are its own; those of others never touch it.
- It gets its own answer or its own error; what goes wrong with the whole batch reaches everybody in it.
- Calls that name one id are made in the order they came, each after the answer to the one before.
- A hold that is granted to a caller who has left is released, unless somebody may still want it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from quota.calls import Call, Release, ReleaseMany, Reservation, Reserve, ReserveMany, Row, Settle, SettleMany
from quota.client.attempts import Pause, Plan, Wait, attempts, together
from quota.client.waiting import Bell
from quota.errors import InvalidArgument, Unavailable

__all__ = ["MANY", "Batches", "Coalescer"]

logger = logging.getLogger("quota.client")

A = TypeVar("A")
B = TypeVar("B")

MANY: Mapping[type[Call[Any]], Callable[..., Call[list[Any]]]] = {
    Reserve: ReserveMany,
    Settle: SettleMany,
    Release: ReleaseMany,
}
"""What is coalesced, and as what."""

# Most reads that go with a batch: its callers are answered when the last one has come back.
_READS = 8

# A caller waits longer by this share of its time: a batch that fails at the same instant tells why, and whether it was
# sent at all.
_GRACE = 0.05


class Batches(NamedTuple):
    """What a coalescing client has sent: `sent` batches, `requests` in all of them together, `largest` in one.

    A call that went alone is a batch of one.
    """

    sent: int = 0
    requests: int = 0
    largest: int = 0


class _Member(Generic[A]):
    """One call on its way. To a batch it is a request whose parameters are known to be sendable.

    Fields: `sent`, it is under way or has been; `outcome`, the answer or the error; `given_up`, the caller has left and
    wants no hold; `taken_over`, another call has named its id since; `then_answer`, that of the read that came along.
    """

    __slots__ = (
        "_parameters", "bell", "call", "deadline_s", "given_up", "id_is_ours", "key", "lane", "outcome", "sent",
        "taken_over", "then", "then_answer", "timeout_s",
    )  # fmt: skip

    def __init__(
        self, call: Call[A], timeout_s: float, bell: Bell | None, id_is_ours: bool, then: Call[Any] | None = None
    ) -> None:
        self.call = call
        self.then = then
        self.then_answer: Any = None
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.bell = bell
        self.id_is_ours = id_is_ours
        self._parameters = call.parameters()  # here, in its caller: what cannot be sent is nobody else's trouble
        if then is not None:
            then.parameters()  # likewise
        self.key = (cast("Any", call).tenant, self._parameters["id"])
        self.lane: tuple[type[Call[Any]], str] = (type(call), self.key[0])
        self.sent = False
        self.given_up = False
        self.taken_over = False
        self.outcome: A | Exception | None = None

    def parameters(self) -> dict[str, object]:
        return self._parameters

    def answer(self, rows: Sequence[Row]) -> A:
        return self.call.answer(rows)


_Batch = list[_Member[Any]]


class Coalescer:
    """The calls that wait and the batches that are under way, of one process or one event loop.

    Arguments:
        start: has somebody carry out a plan beside whoever calls; `RuntimeError` when that cannot be.
        new_bell: makes what a caller waits for.
        batches_in_flight: most batches under way at a time, of all kinds together.
        batch_max: most calls in a batch.
        retries: how often a batch may be repeated.
        timeout_s: deadline, in seconds, of a release that nobody waits for.
    """

    def __init__(
        self,
        *,
        start: Callable[[Plan[None]], None],
        new_bell: Callable[[], Bell],
        batches_in_flight: int,
        batch_max: int,
        retries: int,
        timeout_s: float,
    ) -> None:
        self._start = start
        self._new_bell = new_bell
        self._batches_in_flight = batches_in_flight
        self._batch_max = batch_max
        self._retries = retries
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # By kind of call and tenant, those that wait, oldest first, with the number of their arrival.
        self._waiting: dict[tuple[type[Call[Any]], str], dict[_Member[Any], int]] = {}
        # By tenant and id, those that wait or are under way, oldest first.
        self._named: dict[tuple[str, object], list[_Member[Any]]] = {}
        self._arrivals = 0
        self._flushers = 0
        self.batches = Batches()

    # -- callers -----------------------------------------------------------------------------------------------------

    def asking(
        self, call: Call[A], *, timeout_s: float, id_is_ours: bool, then: Call[B] | None = None
    ) -> Plan[tuple[A, B | None]]:
        """Plans a caller's part: to hand the call over, wait for its answer, and leave in time.

        Arguments:
            call: of a kind in `MANY`, with its id.
            timeout_s: the caller's deadline in seconds.
            id_is_ours: nobody but this client knows the id. Then a hold that is granted after the deadline is released;
                otherwise the caller may ask for it again, here or elsewhere.
            then: a read, for after the call has taken effect. Equal ones of several callers are one.

        Result: both answers; None for the read when it could not be had in the same round trip: ask by itself.
        Errors: as of `attempts`; who leaves while the batch is under way is in doubt.
        """
        bell = self._new_bell()
        member = _Member(call, timeout_s, bell, id_is_ours, then)
        try:
            self._add(member)
            yield Wait(bell, member.deadline_s + _GRACE * timeout_s)
        except BaseException:
            self._leave(member, cancelled=True)
            raise
        if member.outcome is None:
            self._leave(member, cancelled=False)
        if isinstance(member.outcome, Exception):
            raise member.outcome
        if member.outcome is None:
            where = "its batch is under way" if member.sent else "it has waited for other batches"
            raise Unavailable(f"quota.{call.function.name}: no answer within {timeout_s:g} s: {where}", member.sent)
        return member.outcome, member.then_answer

    def _add(self, member: _Member[Any]) -> None:
        with self._lock:
            for earlier in list(self._named.get(member.key, ())):
                # Whoever names an id takes over the hold that another caller has left behind, but to release it.
                earlier.taken_over = earlier.taken_over or not isinstance(member.call, Release)
                if earlier.bell is None and not earlier.sent:
                    self._forget(earlier)
            self._queue(member)
            plan = self._another_flusher()
        try:
            self._begin(plan)
        except RuntimeError:
            with self._lock:
                self._forget(member)
            raise

    def _leave(self, member: _Member[Any], *, cancelled: bool) -> None:
        """The caller goes without its answer. A cancelled call that closes a hold is made all the same."""
        with self._lock:
            member.given_up = cancelled or member.id_is_ours
            if member.outcome is not None and cancelled:
                self._release_if_orphaned(member)
            elif not member.sent and (not cancelled or isinstance(member.call, Reserve)):
                self._forget(member)
            plan = self._another_flusher()
        with contextlib.suppress(RuntimeError):  # a loop that is about to end carries out nothing more
            self._begin(plan)

    def _queue(self, member: _Member[Any]) -> None:
        self._arrivals += 1
        self._waiting.setdefault(member.lane, {})[member] = self._arrivals
        self._named.setdefault(member.key, []).append(member)

    def _unqueue(self, member: _Member[Any]) -> None:
        lane = self._waiting.get(member.lane, {})
        if lane.pop(member, None) is not None and not lane:
            del self._waiting[member.lane]

    def _forget(self, member: _Member[Any]) -> None:
        """Takes a member out, wherever it is; one that is not there (any more) is fine."""
        self._unqueue(member)
        named = self._named.get(member.key, [])
        if member in named:
            named.remove(member)
            if not named:
                del self._named[member.key]

    def _release_if_orphaned(self, member: _Member[Any]) -> None:
        """Has a hold released that nobody knows of but this client. A replayed one may be another caller's."""
        answer = member.outcome
        if not (member.given_up and isinstance(member.call, Reserve) and isinstance(answer, Reservation)):
            return
        wanted = member.taken_over or member.key in self._named
        if answer.granted and not wanted and (member.id_is_ours or not answer.replayed):
            release = Release(answer.reservation or "", tenant=member.call.tenant)
            self._queue(_Member(release, self._timeout_s, None, False))

    # -- flushers ----------------------------------------------------------------------------------------------------

    def _another_flusher(self) -> Plan[None] | None:
        """Returns the plan of one flusher more, when there is something to do for it."""
        if not self._waiting or self._flushers >= self._batches_in_flight:
            return None
        self._flushers += 1
        return self._flushing()

    def _begin(self, plan: Plan[None] | None) -> None:
        if plan is None:
            return
        try:
            self._start(plan)
        except RuntimeError:
            with self._lock:
                self._flushers -= 1
                others = self._flushers
            if not others:
                raise

    def _flushing(self) -> Plan[None]:
        """Plans batch after batch, until nothing waits that may go."""
        batch: _Batch = []
        try:
            while batch := self._taken():
                yield from self._sending(batch)
                # Whoever has just been answered and asks again at once goes with the next one.
                yield Pause(0)
        finally:
            if batch:  # whoever carries this out was stopped
                with self._lock:
                    self._flushers -= 1
                rest = [member for member in batch if member.outcome is None]
                self._finish(rest, [Unavailable("the batch was interrupted", True) for _ in rest])

    def _taken(self) -> _Batch:
        """Takes what goes next: the kind whose oldest call has waited longest."""
        with self._lock:
            for lane in sorted(self._waiting, key=lambda lane: next(iter(self._waiting[lane].values()))):
                if batch := self._picked(self._waiting[lane]):
                    sent, requests, largest = self.batches
                    self.batches = Batches(sent + 1, requests + len(batch), max(largest, len(batch)))
                    return batch
            # Under the same lock: whoever comes a moment later has to know that nobody will look again.
            self._flushers -= 1
        return []

    def _picked(self, lane: dict[_Member[Any], int]) -> list[_Member[Any]]:
        now_s = time.monotonic()
        for late in [member for member in lane if member.deadline_s <= now_s]:
            self._forget(late)  # its caller leaves by itself, if it has not left
        first = (member for member in lane if self._named[member.key][0] is member)
        picked = list(itertools.islice(first, self._batch_max))
        for member in picked:
            self._unqueue(member)
            member.sent = True
        return picked

    def _sending(self, batch: _Batch) -> Plan[None]:
        """Plans one batch, and in the same round trip what is to be read after it: reads wait for nobody's locks.

        A batch that cannot even be read as a whole is halved, until only the culprit gets the error.
        """
        reads = list(dict.fromkeys(member.then for member in batch if member.then is not None))[:_READS]
        plans = [self._attempting(batch)]
        plans += [attempts(read, timeout_s=self._timeout_s, retries=0) for read in reads]
        (outcome, at_once), *read_ended = yield from together(plans)
        if isinstance(outcome, InvalidArgument) and len(batch) > 1:
            logger.info("a batch of %d is halved: %s", len(batch), outcome)
            half = len(batch) // 2
            yield from self._sending(batch[:half])
            yield from self._sending(batch[half:])
        elif isinstance(outcome, Exception):  # whatever it is, callers wait for it
            self._finish(batch, [_own(outcome) for _ in batch])
        else:
            answers = [None if isinstance(one.outcome, Exception) else one.outcome for one in read_ended]
            found = dict(zip(reads, answers, strict=True)) if at_once else {}  # otherwise they came before it
            for member in batch:
                member.then_answer = None if member.then is None else found.get(member.then)
            self._finish(batch, [outcome] if len(batch) == 1 else outcome)

    def _attempting(self, batch: _Batch) -> Plan[Any]:
        latest = max(batch, key=lambda member: member.deadline_s)
        first = batch[0].call
        call = first if len(batch) == 1 else MANY[type(first)](batch, tenant=batch[0].key[0])
        return attempts(call, timeout_s=latest.timeout_s, retries=self._retries, deadline_s=latest.deadline_s)

    def _finish(self, members: Sequence[_Member[Any]], outcomes: Sequence[Any]) -> None:
        """Hands each caller its own outcome."""
        with self._lock:
            for member, outcome in zip(members, outcomes, strict=True):
                self._forget(member)
                member.outcome = outcome
                self._release_if_orphaned(member)
        for member in members:
            if member.bell is not None:
                member.bell.ring()
            failed = isinstance(member.outcome, Exception)
            if member.bell is None and not failed:
                logger.info("hold %s was granted when its caller had left; it is released", member.key[1])
            elif failed and not isinstance(member.call, Reserve) and (member.bell is None or member.given_up):
                what = member.call.function.name
                logger.info("%s of %s, whose caller had left, has failed: %s", what, member.key[1], member.outcome)


def _own(error: Exception) -> Exception:
    """An exception is raised once: everybody gets one of their own."""
    try:
        own = copy.copy(error)
    except Exception:  # not made to be copied; shared is better than none
        return error
    own.__cause__ = error
    return own
