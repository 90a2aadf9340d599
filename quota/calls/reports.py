"""Reports: what calls have told, summed up by model and route, by pool, by route. Read only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

from quota.calls.answers import Row
from quota.calls.base import NAME, TIME, Call, Function

__all__ = ["ReportCalibration", "ReportModels", "ReportPools"]

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class _Report(Call[Rows]):
    """A report on the time from `since` (None: seven days before `until`) to, not including, `until` (None: now)."""

    since: datetime | None = None
    until: datetime | None = None
    tenant: str = "default"

    writes = False
    timeout_s: ClassVar[Decimal | None] = Decimal(30)

    def answer(self, rows: Sequence[Row]) -> Rows:
        """The rows by column name; shares and statistics are exact decimals of four digits."""
        return [dict(row) for row in rows]


@dataclass(frozen=True)
class ReportModels(_Report):
    """`quota.report_models`: throttle rate, retries, truncation and use of ceilings by provider, model and route."""

    function = Function("report_models", "*", since=TIME, until=TIME, tenant=NAME)


@dataclass(frozen=True)
class ReportPools(_Report):
    """`quota.report_pools`: the use of providers' quotas by pool and limit."""

    function = Function("report_pools", "*", since=TIME, until=TIME, tenant=NAME)


@dataclass(frozen=True)
class ReportCalibration(_Report):
    """`quota.report_calibration`: cost against load by route, all routes together first, then the worst priced."""

    function = Function("report_calibration", "*", since=TIME, until=TIME, tenant=NAME)
