"""What workers of a fleet do with a list of requests, and what they count: the ledger's way, and the naive one."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from quota.calls import (
    Amount,
    Balance,
    BalanceRow,
    Check,
    CreateSubject,
    CreateTenant,
    Reservation,
    SetLimit,
    Violation,
    views,
)
from quota.client import Client
from quota.costs.prices import Price
from quota.costs.tokens import HoldFormula, QuotaTokens, Usage
from quota.fleet import Worker
from quota.trace import Prices, Request

__all__ = [
    "BookPrices",
    "Books",
    "Draw",
    "Job",
    "Pulse",
    "Tally",
    "books_of",
    "fresh_budget",
    "fresh_pool",
    "fresh_tenant",
    "guess",
    "percentile",
    "spend",
]

UNIT, LIMIT = "usd", "cap"
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class BookPrices:
    """A price of the book, in the place of `Prices`: the worst case and the true cost of a request of a trace."""

    price: Price

    def worst(self, request: Request, ceiling_tokens: int) -> Decimal:
        """Returns what a request may cost at most: its input of whatever kind, and the output ceiling."""
        return self.price.worst(request.context_tokens, ceiling_tokens)

    def true(self, request: Request) -> Decimal:
        """Returns what the request did cost, nothing of it cached."""
        return self.price.cost(Usage(input=request.context_tokens, output=request.generated_tokens))


@dataclass(frozen=True, slots=True)
class Draw:
    """The provider's quota that a job draws on.

    Fields:
        pool: its subject.
        tokens: the model's formula.
        formula: what is held: `worst` or `provider`.
    """

    pool: str
    tokens: QuotaTokens
    formula: HoldFormula

    def held(self, request: Request, ceiling_tokens: int) -> dict[str, int]:
        """Returns the quota tokens to hold for a request."""
        return self.tokens.held(request.context_tokens, ceiling_tokens, self.formula)

    def settled(self, request: Request) -> dict[str, int]:
        """Returns those that it has taken."""
        return self.tokens.settled(Usage(input=request.context_tokens, output=request.generated_tokens))


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of a fleet share.

    Fields:
        subject: whose budget they spend.
        cap: the budget.
        prices: what tokens cost.
        ceiling_tokens: the output that is declared and held.
        call_s: how long a call lasts in seconds.
        retry_s: how long to wait at most before a call that was refused as `held` is tried again; None: it is skipped.
        pulse_s: how often a worker tells how far it is, in seconds.
        draw: the provider's quota that is drawn on beside the budget; None: none.
    """

    subject: str
    cap: Decimal
    prices: Prices | BookPrices
    ceiling_tokens: int
    call_s: float
    retry_s: float | None = None
    pulse_s: float = 0.25
    draw: Draw | None = None


class Pulse(NamedTuple):
    """How far a worker is: its own counts so far, and the budget as its last answer showed it."""

    calls: int
    granted: int
    refused: int
    spent: Decimal
    reserved: Decimal


@dataclass(slots=True)
class Tally:
    """What a worker counted.

    Fields:
        calls: requests that it dealt with.
        granted: those that were made.
        refused: those that were not, by reason.
        retries: refusals as `held` after which it asked again.
        peak: the largest spent + reserved that any of its grants showed.
        booked: dollars that it settled.
        overage: the part of them above what was held.
        above_ceiling: requests whose true output was more than was declared.
        quota_settled: quota tokens that it settled.
        quota_overage: the part of them above what was held.
        reserve_ms, settle_ms: how long each answer took, in milliseconds.
    """

    calls: int = 0
    granted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    peak: Decimal = Decimal(0)
    booked: Decimal = Decimal(0)
    overage: Decimal = Decimal(0)
    above_ceiling: int = 0
    quota_settled: Decimal = Decimal(0)
    quota_overage: Decimal = Decimal(0)
    reserve_ms: list[float] = field(default_factory=list)
    settle_ms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, tallies: Iterable[Tally]) -> Tally:
        """Returns the sum of several."""
        total = cls()
        for one in tallies:
            total.calls += one.calls
            total.granted += one.granted
            total.refused += one.refused
            total.retries += one.retries
            total.peak = max(total.peak, one.peak)
            total.booked += one.booked
            total.overage += one.overage
            total.above_ceiling += one.above_ceiling
            total.quota_settled += one.quota_settled
            total.quota_overage += one.quota_overage
            total.reserve_ms += one.reserve_ms
            total.settle_ms += one.settle_ms
        return total


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the value that this share of the values does not exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# -- the budget, before and after -----------------------------------------------------------------------------------


def fresh_tenant(client: Client, kind: str) -> str:
    """Makes a tenant of its own for a run, so that runs never meet; returns its name."""
    name = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    client.call(CreateTenant(name))
    return name


def fresh_budget(client: Client, tenant: str, subject: str, cap: Decimal) -> None:
    """Makes a subject with a lifetime budget of `cap` dollars."""
    client.call(CreateSubject(subject, tenant=tenant))
    client.call(SetLimit(subject, LIMIT, UNIT, "budget", cap, tenant=tenant))


def fresh_pool(client: Client, tenant: str, pool: str, tokens_per_minute: int) -> None:
    """Makes a pool with a quota of tokens per minute, and 1440 times as many per day."""
    client.call(CreateSubject(pool, tenant=tenant))
    refill = Decimal(tokens_per_minute * 10**12 // 60).scaleb(-12)
    client.call(SetLimit(pool, "tpm", "quota_tokens", "bucket", tokens_per_minute, refill, tenant=tenant))
    client.call(SetLimit(pool, "tpd", "quota_tokens", "budget", tokens_per_minute * 1440, period="day", tenant=tenant))


class Books(NamedTuple):
    """What the ledger says of a run when it is over."""

    spent: Decimal
    reserved: Decimal
    holds: int
    violations: list[Violation]


def books_of(client: Client, tenant: str, subject: str) -> Books:
    """Returns what stands on the budget, how many holds the subject has left, and what `check` finds in the tenant."""
    row = cap_of(client, tenant, subject)
    held = client.call(views.holds(tenant, subject, overdue=False, most=1_000_000))
    return Books(row.spent or Decimal(0), row.reserved or Decimal(0), len(held), client.call(Check(tenant)))


def cap_of(client: Client, tenant: str, subject: str) -> BalanceRow:
    """Returns where the budget stands."""
    (row,) = client.call(Balance(subject, tenant))
    return row


# -- tasks of workers -----------------------------------------------------------------------------------------------


def spend(worker: Worker, job: Job, requests: Sequence[Request]) -> Tally:
    """Makes the calls under the ledger: hold the worst case, call, settle the true cost."""
    tally, beat = Tally(), _beat(worker, job)
    worker.client.balance(job.subject)  # the connection is there before the clock starts
    worker.together()
    worker.tell("started")
    for request in requests:
        while True:
            asked = time.perf_counter()
            answer = worker.client.reserve(
                job.subject,
                _held(job, request),
                also=[] if job.draw is None else [job.draw.pool],
                ttl=timedelta(seconds=60 + job.call_s),
            )
            tally.reserve_ms.append((time.perf_counter() - asked) * _MS)
            if answer.reason != "held" or job.retry_s is None:
                break
            tally.retries += 1
            beat(tally, answer.spent, answer.reserved)
            hint_s = float(answer.retry_after_s or 0)
            time.sleep(min(hint_s, job.retry_s) * random.uniform(0.5, 1))  # noqa: S311 - spreads retries
        tally.calls += 1
        if answer.refused:
            tally.refused[str(answer.reason)] += 1
        else:
            assert answer.reservation is not None
            tally.granted += 1
            tally.peak = max(tally.peak, _on_the_budget(answer, job))
            beat(tally, answer.spent, answer.reserved)
            time.sleep(job.call_s)
            cost = job.prices.true(request)
            asked = time.perf_counter()
            quota = {} if job.draw is None else job.draw.settled(request)
            settled = worker.client.settle(answer.reservation, {UNIT: cost, **quota})
            tally.settle_ms.append((time.perf_counter() - asked) * _MS)
            tally.booked += cost
            tally.overage += settled.overage.get(UNIT, Decimal(0))
            tally.quota_settled += sum(quota.values())
            tally.quota_overage += sum((settled.overage.get(unit, Decimal(0)) for unit in quota), Decimal(0))
            tally.above_ceiling += request.generated_tokens > job.ceiling_tokens
        beat(tally, answer.spent, answer.reserved)
    return tally


def _held(job: Job, request: Request) -> dict[str, Amount]:
    money: dict[str, Amount] = {UNIT: job.prices.worst(request, job.ceiling_tokens)}
    return money if job.draw is None else money | job.draw.held(request, job.ceiling_tokens)


def _on_the_budget(answer: Reservation, job: Job) -> Decimal:
    """Spent and reserved on the budget after a grant: its own columns may show the pool, if that is tighter."""
    for row in answer.remaining:
        if row.subject == job.subject and row.limit_name == LIMIT:
            return (row.spent or Decimal(0)) + (row.reserved or Decimal(0))
    return (answer.spent or Decimal(0)) + (answer.reserved or Decimal(0))


def guess(worker: Worker, job: Job, requests: Sequence[Request], rounds: int) -> Tally:
    """Makes the calls the naive way: look whether something is left, call, add the cost.

    The workers go in step, a burst at a time, as agents do that are started together: all look before any has added.
    """
    tally, beat = Tally(), _beat(worker, job)
    worker.together()
    worker.tell("started")
    for turn in range(rounds):
        (row,) = worker.client.balance(job.subject)
        spent = row.spent or Decimal(0)
        worker.together()
        if turn < len(requests):
            tally.calls += 1
            if spent < job.cap:
                cost = job.prices.true(requests[turn])
                tally.granted += 1
                beat(tally, spent, Decimal(0))
                time.sleep(job.call_s)
                worker.client.record(job.subject, {UNIT: cost})
                tally.booked += cost
                (row,) = worker.client.balance(job.subject)
                spent = row.spent or Decimal(0)
            else:
                tally.refused["looked"] += 1
            beat(tally, spent, Decimal(0))
        worker.together()
    return tally


def _beat(worker: Worker, job: Job) -> Callable[[Tally, Decimal | None, Decimal | None], None]:
    told = 0.0

    def beat(tally: Tally, spent: Decimal | None, reserved: Decimal | None) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= job.pulse_s:
            told = now
            refused = tally.refused.total()
            worker.tell(Pulse(tally.calls, tally.granted, refused, spent or Decimal(0), reserved or Decimal(0)))

    return beat


def stall(worker: Worker, subject: str, cost: Decimal, ttl_s: float) -> Any:
    """Holds, and then hangs in its call for ever: the worker that is to be killed."""
    answer = worker.client.reserve(subject, {UNIT: cost}, ttl=timedelta(seconds=ttl_s)).raise_if_refused()
    worker.tell(answer.reservation)
    time.sleep(3600)
