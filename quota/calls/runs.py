"""Runs: subjects that live for a while and spend slices of their parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from quota.calls.answers import Row, amount, instant
from quota.calls.base import COSTS, COUNT, NAME, NUMBER, SPAN, WHOLE, Amount, Call, Costs, Function

__all__ = ["CreateRun", "EndRun", "RunDecision"]


@dataclass(frozen=True)
class RunDecision:
    """The answer of `create_run`: the run may start, or is refused with the reason.

    Fields:
        granted: True when it may start.
        run: its subject.
        replayed: it was there already.
        expires_at: from when on it no longer counts.
        start_after_s: seconds to wait before it starts, so that a parent's runs do not all start at once.
        max_tokens: the most output tokens of a call, its own bound and those above it; None: no such bound.
        reason: why it was refused: `closed`, `frozen`, `depth`, `width`, `too_large`, `exhausted`, or `held`: others'
            slices are in the way.
        limit_subject, limit_name, unit, capacity: what refused it.
        available, promised, requested: what the parent has left, what of it live runs may still spend, what was asked.
        retry_after_s: seconds after which it may be worth asking again; None when waiting does not help.
    """

    granted: bool
    run: str
    replayed: bool
    expires_at: datetime | None
    start_after_s: Decimal | None
    max_tokens: int | None
    reason: str | None
    limit_subject: str | None
    limit_name: str | None
    unit: str | None
    capacity: Decimal | None
    available: Decimal | None
    promised: Decimal | None
    requested: Decimal | None
    retry_after_s: Decimal | None


@dataclass(frozen=True)
class CreateRun(Call[RunDecision]):
    """`quota.create_run`: starts a run below a parent, with slices of its budgets.

    Arguments:
        name: `run:id`; it is the idempotency key.
        parent: whose budgets are sliced: a user, a key, another run.
        budget: what the run may spend, by unit.
        ttl: how long it lives; then its slices are its parent's again.
        max_width: the most live runs right below it; None: any number.
        max_depth: the most levels of runs below it; None: any number (a lineage has at most 8 subjects).
        max_tokens: the most output tokens of a call below it.
        stagger_s: seconds between the starts of the runs right below it.
        tenant: the tenant.
    """

    name: str
    parent: str
    budget: Costs
    ttl: timedelta = timedelta(hours=1)
    max_width: int | None = None
    max_depth: int | None = None
    max_tokens: int | None = None
    stagger_s: Amount = 0
    tenant: str = "default"

    function = Function(
        "create_run",
        "granted, run, replayed, expires_at, start_after_s, max_tokens, reason, limit_subject, limit_name, unit, "
        "capacity, available, promised, requested, retry_after_s",
        name=NAME, parent=NAME, budget=COSTS, ttl=SPAN, max_width=WHOLE, max_depth=WHOLE, max_tokens=COUNT,
        stagger_s=NUMBER, tenant=NAME,
    )  # fmt: skip

    def answer(self, rows: Sequence[Row]) -> RunDecision:
        """The decision."""
        row = dict(rows[0])
        numbers = ("start_after_s", "capacity", "available", "promised", "requested", "retry_after_s")
        return RunDecision(
            **{
                **row,
                "expires_at": instant(row["expires_at"]),
                **{name: amount(row[name]) for name in numbers},
            }
        )


@dataclass(frozen=True)
class EndRun(Call[bool]):
    """`quota.end_run`: ends a run and the runs below it; what is open may settle. True when it was still live."""

    name: str
    tenant: str = "default"

    function = Function("end_run", "ended", name=NAME, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> bool:
        """Whether it was live."""
        return bool(rows[0]["ended"])
