"""`quota report …`: what calls have told, summed up for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import click

from quota.calls import Call, ReportCalibration, ReportModels, ReportPools
from quota.cli.help import Ordered, examples
from quota.cli.params import DURATION, INSTANT, UNLIMITED
from quota.cli.screen import number, when
from quota.cli.store import Session, with_store

__all__ = ["report"]

P = ParamSpec("P")
Rows = list[dict[str, Any]]
Range = tuple[datetime | None, datetime | None]


@click.group(cls=Ordered)
def report() -> None:
    """Reports: throttling, quotas and ceilings of model calls; what row costs should be.

    They read what calls have told in the details of their reservations, for as long as those are kept.
    """


def _ranged(command: Callable[Concatenate[Session, Range, P], None]) -> Callable[Concatenate[Session, P], None]:
    """Adds the options that say which time a report is about."""

    @click.option("--last", type=DURATION, help="From so long ago, such as 2h. [default: 7d]")
    @click.option("--since", type=INSTANT, help="From then on.")
    @click.option("--until", type=INSTANT, help="Up to then. [default: now]")
    @wraps(command)
    def ranged(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> None:
        last: Any = kwargs.pop("last")
        since: Any = kwargs.pop("since")
        until: Any = kwargs.pop("until")
        command(session, _range(last, since, until), *args, **kwargs)

    return ranged


def _range(last: timedelta | None, since: datetime | None, until: datetime | None) -> Range:
    if last is None:
        return since, until
    if since is not None:
        raise click.UsageError("--last and --since both say where the report begins; give one of them")
    try:
        return (until or datetime.now(UTC)) - last, until
    except OverflowError:
        raise click.UsageError(f"--last {last} goes back to before there were years; give less, such as 30d") from None


def _rows(session: Session, kind: Callable[..., Call[Rows]], during: Range) -> Rows:
    rows = session.call(kind(*during, session.tenant))
    for row in rows:
        session.screen.document(row)
    return rows


def _share(value: Decimal | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, Decimal) else "-" if value is None else str(value)


def _table(session: Session, title: str, rows: Rows, cells: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    session.screen.table({name: [cell(row) for row in rows] for name, cell in cells.items()}, title)


def _model(row: dict[str, Any]) -> str:
    return f"{row['provider']}/{row['model']}"


@report.command(
    "models",
    epilog=examples(
        "quota report models", "quota report models --last 2h", "quota report models --since 2026-11-01 --json"
    ),
)
@with_store
@_ranged
def report_models(session: Session, during: Range) -> None:
    """Throttle rate, retries, truncation and use of max_tokens, by model and route.

    A ceiling is recommended from twenty answers on: the p95 of what came back, and a fifth. Beside it stands how many
    answers were cut off at theirs.
    """
    rows = _rows(session, ReportModels, during)
    if not rows:
        session.screen.line("no guarded calls of models in that time")
        return
    _table(
        session, "Throttling and retries", rows,
        {
            "model": _model,
            "route": lambda row: row["route"],
            "attempts": lambda row: str(row["attempts"]),
            "refused": lambda row: str(row["refused"]),
            "429": lambda row: str(row["throttled"]),
            "throttle rate": lambda row: _share(row["throttle_rate"]),
            "retry rate": lambda row: _share(row["retry_rate"]),
            "correlation": lambda row: _shown(row["retry_correlation"]),
            "failed": lambda row: str(row["failed"]),
        },
    )  # fmt: skip
    _table(
        session, "Ceilings (max_tokens), in tokens of one answer", rows,
        {
            "model": _model,
            "route": lambda row: row["route"],
            "answers": lambda row: str(row["answered"]),
            "ceiling": lambda row: _shown(row["ceiling_p50"]),
            "p50": lambda row: _shown(row["output_p50"]),
            "p95": lambda row: _shown(row["output_p95"]),
            "p99": lambda row: _shown(row["output_p99"]),
            "used": lambda row: _share(row["efficiency_p50"]),
            "truncated": lambda row: _share(row["truncation_rate"]),
            "recommended": lambda row: _shown(row["recommended_ceiling"]),
        },
    )  # fmt: skip
    _table(
        session, "Tokens, and what they took from quotas", rows,
        {
            "model": _model,
            "route": lambda row: row["route"],
            "input": lambda row: _shown(row["input_tokens"]),
            "cached": lambda row: _shown(row["cached_tokens"]),
            "cache writes": lambda row: _shown(row["cache_write_tokens"]),
            "output": lambda row: _shown(row["output_tokens"]),
            "billed": lambda row: _shown(row["billed_tokens"]),
            "quota held": lambda row: _shown(row["quota_held"]),
            "quota settled": lambda row: _shown(row["quota_settled"]),
        },
    )  # fmt: skip


@report.command("pools", epilog=examples("quota report pools", "quota report pools --last 1d --json"))
@with_store
@_ranged
def report_pools(session: Session, during: Range) -> None:
    """How much of each provider's quota was settled and held, in its busiest minute or day.

    By the quota's own formula: input + cache writes + output x burndown.
    """
    rows = _rows(session, ReportPools, during)
    if not rows:
        session.screen.line("no pools; make some: quota pool import quotas.json")
        return
    _table(
        session, "Quotas", rows,
        {
            "pool": lambda row: row["pool"],
            "limit": lambda row: row["limit_name"],
            "per": lambda row: row["span"],
            "quota": lambda row: number(row["quota"], UNLIMITED),
            "mean use": lambda row: _share(row["mean_use"]),
            "peak use": lambda row: _share(row["peak_use"]),
            "peak at": lambda row: when(row["peak_at"]),
            "holds at once": lambda row: _shown(row["peak_holds"]),
            "peak held": lambda row: _share(row["peak_held_use"]),
            "refused": lambda row: str(row["refused"]),
            "429": lambda row: str(row["throttled"]),
        },
    )  # fmt: skip


@report.command(
    "calibration", epilog=examples("quota report calibration", "quota report calibration --last 30d --json")
)
@with_store
@_ranged
def report_calibration(session: Session, during: Range) -> None:
    """Settled cost against latency, load and failures by route, the worst priced in front.

    A factor above 1 says by how much a route is underpriced, beside all routes together. The load is the database's
    time where at least half of the calls report it, else their latency.
    """
    rows = _rows(session, ReportCalibration, during)
    if not rows:
        session.screen.line("no calls of routes in that time")
        return
    _table(
        session, "Cost and load", rows,
        {
            "route": lambda row: row["route"] or "all",
            "calls": lambda row: str(row["calls"]),
            "failed": lambda row: _share(row["failure_rate"]),
            "cost": lambda row: _shown(row["cost"]),
            "above estimate": lambda row: _share(row["estimate_short"]),
            _load(rows): lambda row: _shown(row["load_ms"]),
            "ms per cost": lambda row: _shown(row["ms_per_cost"]),
            "factor": lambda row: _shown(row["suggested_factor"]),
            "p50 ms": lambda row: _shown(row["latency_p50_ms"]),
            "p95 ms": lambda row: _shown(row["latency_p95_ms"]),
        },
    )  # fmt: skip
    _table(
        session, "Correlation of cost with", rows,
        {
            "route": lambda row: row["route"] or "all",
            "latency": lambda row: _shown(row["latency_correlation"]),
            "database": lambda row: _shown(row["database_correlation"]),
            "bytes": lambda row: _shown(row["bytes_correlation"]),
            "rows read": lambda row: _shown(row["rows_read_correlation"]),
            "failure": lambda row: _shown(row["failure_correlation"]),
        },
    )  # fmt: skip
    _table(
        session, "What would fit", rows,
        {
            "route": lambda row: row["route"] or "all",
            "ms per row": lambda row: _shown(row["ms_per_row"]),
            "node call %": lambda row: _shown(row["suggested_node_percent"]),
            "base cost": lambda row: _shown(row["suggested_base_cost"]),
            "cost of a failure": lambda row: _shown(row["suggested_failure_cost"]),
            "max ms": lambda row: _shown(row["suggested_max_latency_ms"]),
            "max bytes": lambda row: _shown(row["suggested_max_response_bytes"]),
            "max rows read": lambda row: _shown(row["suggested_max_rows_read"]),
        },
    )  # fmt: skip


def _load(rows: Rows) -> str:
    """The title of the load's column: what it is measured by."""
    return "database ms" if rows[0]["load"] == "database_ms" else "latency ms"
