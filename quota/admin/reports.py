"""Reports: what calls have told, summed up. Read only; see docs/reports.md for what each column is for."""

from __future__ import annotations

from typing import Any

from flask import Response
from pydantic import Field

from quota.admin.access import READ
from quota.admin.changes import answer, ledger, principal
from quota.admin.routes import blueprint, route
from quota.admin.types import Answer, Query, Shown, Time
from quota.calls import Call, ReportCalibration, ReportModels, ReportPools

__all__ = ["reports"]

reports = blueprint("reports", "Indicators of model calls and providers' quotas, and the calibration of row costs.")


class ReportQuery(Query):
    """Which time."""

    since: Time | None = Field(None, description="At or after. Left out: seven days before `until`.")
    until: Time | None = Field(None, description="Before. Left out: now.")


class ModelIndicators(Answer):
    """How the calls of a model, made for one route, fare. Shares and statistics are decimals of four digits."""

    provider: str
    model: str
    route: str
    attempts: int = Field(description="Holds, and refusals that were told.")
    refused: int = Field(description="By the ledger.")
    throttled: int = Field(description="By the provider: 429.")
    throttle_rate: Shown | None
    retries: int
    retry_rate: Shown | None
    retry_correlation: Shown | None = Field(description="Of retries with pushed back calls, minute by minute.")
    failed: int
    answered: int
    truncated: int = Field(description="Answers that ended at their ceiling.")
    truncation_rate: Shown | None
    ceiling_p50: int | None = Field(description="Of the ceilings declared, per answer.")
    output_p50: int | None
    output_p95: int | None
    output_p99: int | None
    efficiency_p50: Shown | None = Field(description="Output by ceiling.")
    recommended_ceiling: int | None = Field(description="p95 and a fifth; from twenty answers on.")
    input_tokens: Shown
    cached_tokens: Shown
    cache_write_tokens: Shown
    output_tokens: Shown
    billed_tokens: Shown
    quota_held: Shown | None
    quota_settled: Shown | None


class ModelReport(Answer):
    """A row per provider, model and route."""

    items: list[ModelIndicators]


class PoolUse(Answer):
    """How one quota of a pool is used."""

    pool: str
    limit_name: str
    unit: str
    span: str = Field(description="`minute` for a rate, else the budget's period.")
    quota: Shown | None = Field(description="null: unlimited.")
    settled: Shown
    spans: int = Field(description="Minutes or periods in which anything was settled.")
    mean_use: Shown | None
    peak_use: Shown | None
    peak_at: str | None
    peak_holds: int | None = Field(description="The most holds placed within a minute.")
    peak_held_use: Shown | None = Field(description="The most held within a minute, by the quota.")
    refused: int = Field(description="Calls that this limit refused.")
    throttled: int = Field(description="Calls that the provider answered with 429.")


class PoolReport(Answer):
    """A row per limit of a pool."""

    items: list[PoolUse]


class RouteCalibration(Answer):
    """What a route's settled cost says of the load it makes, and what would fit."""

    route: str | None = Field(description="null: all routes together.")
    calls: int
    failed: int
    failure_rate: Shown | None
    header_missing: int
    cost: Shown | None
    estimate_short: Shown | None = Field(description="Share of calls that cost more than was estimated.")
    load: str = Field(description="What `load_ms` is: `database_ms`, or `latency_ms` where that is not reported.")
    load_ms: Shown | None
    ms_per_cost: Shown | None
    suggested_factor: Shown | None = Field(description="Above 1: underpriced, by that factor.")
    latency_p50_ms: Shown | None
    latency_p95_ms: Shown | None
    latency_correlation: Shown | None
    database_correlation: Shown | None
    bytes_correlation: Shown | None
    rows_read_correlation: Shown | None
    failure_correlation: Shown | None
    ms_per_row: Shown | None
    suggested_node_percent: Shown | None = Field(description="What a node call adds to a row's cost; 20 as it stands.")
    suggested_base_cost: Shown | None = Field(description="What a call costs before its first row.")
    suggested_failure_cost: Shown | None = Field(description="What a failed call costs; 1 as it stands.")
    suggested_max_latency_ms: Shown | None
    suggested_max_response_bytes: int | None
    suggested_max_rows_read: int | None


class CalibrationReport(Answer):
    """All routes together in front, then the worst priced."""

    items: list[RouteCalibration]


def _report(kind: type[Call[list[dict[str, Any]]]], query: ReportQuery) -> Response:
    rows = ledger().call(kind(query.since, query.until, principal().tenant))  # type: ignore[call-arg]
    return answer({"items": rows})


@route(reports, "get", "/reports/models", READ, ok={200: ModelReport})
def report_models(query: ReportQuery) -> Response:
    """Throttle rate, retries, truncation, and how much of the declared ceilings comes back, by model and route."""
    return _report(ReportModels, query)


@route(reports, "get", "/reports/pools", READ, ok={200: PoolReport})
def report_pools(query: ReportQuery) -> Response:
    """How much of each provider's quota was settled and held in its busiest minute or day."""
    return _report(ReportPools, query)


@route(reports, "get", "/reports/calibration", READ, ok={200: CalibrationReport})
def report_calibration(query: ReportQuery) -> Response:
    """Settled cost against latency, load and failures by route, with coefficients and bounds that would fit."""
    return _report(ReportCalibration, query)
