"""`quota replay`: a request trace against one budget, by a fleet of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from quota.calls import PricesOf
from quota.cli.failures import REFUSED
from quota.cli.help import examples
from quota.cli.params import AMOUNT, PRICE
from quota.cli.screen import Screen, number
from quota.cli.store import Session, with_server
from quota.cli.work import (
    BookPrices,
    Books,
    Draw,
    Job,
    Pulse,
    Tally,
    books_of,
    fresh_budget,
    fresh_pool,
    fresh_tenant,
    percentile,
    spend,
)
from quota.costs.tokens import HoldFormula, QuotaTokens, quota_tokens_of
from quota.fleet import Fleet
from quota.trace import Prices, Request, read_trace, sample_trace

__all__ = ["replay"]

SUBJECT = "run:replay"
POOL = "pool:replay"
_LINE_EVERY_S = 5.0


@dataclass(frozen=True)
class Result:
    """A replay when it is over: what the workers counted, what the books say, how long it took."""

    job: Job
    workers: int
    tenant: str
    tally: Tally
    books: Books
    seconds: float

    @property
    def overspend(self) -> Decimal:
        """Dollars above the cap; only an output above its declared ceiling can make them."""
        return max(self.books.spent - self.job.cap, Decimal(0))

    @property
    def held(self) -> bool:
        """True when the ledger kept its word: no grant above the cap, no hold left, books right."""
        within = self.tally.peak <= self.job.cap and self.overspend <= self.tally.overage
        exact = self.books.spent == self.tally.booked
        return within and exact and self.books.holds == 0 and not self.books.violations

    def document(self) -> dict[str, Any]:
        """The answer for programs."""
        tally, seconds = self.tally, self.seconds
        return {
            "calls": tally.calls,
            "granted": tally.granted,
            "refused": tally.refused.total(),
            "refused_by_reason": dict(tally.refused),
            "retries": tally.retries,
            "spent": self.books.spent,
            "cap": self.job.cap,
            "utilisation": _share(self.books.spent, self.job.cap),
            "overspend": self.overspend,
            "peak_spent_plus_reserved": tally.peak,
            "above_ceiling": tally.above_ceiling,
            "overage": tally.overage,
            "quota_settled": tally.quota_settled,
            "quota_overage": tally.quota_overage,
            "quota_held": self.job.draw is None or tally.quota_overage == 0,
            "holds_left": self.books.holds,
            "check_violations": len(self.books.violations),
            "cap_held": self.held,
            "workers": self.workers,
            "seconds": round(seconds, 3),
            "calls_per_s": round(tally.calls / seconds, 1) if seconds else None,
            "granted_per_s": round(tally.granted / seconds, 1) if seconds else None,
            "reserve_p50_ms": _rounded(percentile(tally.reserve_ms, 0.50)),
            "reserve_p90_ms": _rounded(percentile(tally.reserve_ms, 0.90)),
            "reserve_p99_ms": _rounded(percentile(tally.reserve_ms, 0.99)),
            "settle_p50_ms": _rounded(percentile(tally.settle_ms, 0.50)),
            "settle_p99_ms": _rounded(percentile(tally.settle_ms, 0.99)),
            "tenant": self.tenant,
            "subject": SUBJECT,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _share(part: Decimal, whole: Decimal) -> str | None:
    """A ratio as text, to four digits; it is shown, never reckoned with."""
    return None if whole == 0 else f"{part / whole:.4f}"


@click.command(
    epilog=examples(
        "quota replay",
        "quota replay trace.csv --price-in 3 --price-out 15 --cap 20 --workers 20",
        "quota replay trace.csv --cap 20 --retry --json | jq .peak_spent_plus_reserved",
        "quota replay trace.csv --model aws/us.anthropic.claude-opus-4-8 --pool-tpm 200000 --formula provider",
    )
)
@click.argument("trace", required=False, type=click.Path(path_type=Path), metavar="[TRACE.csv]")
@click.option("--price-in", type=PRICE, default="3", show_default=True, help="Dollars per million tokens sent.")
@click.option(
    "--price-out", type=PRICE, default="15", show_default=True, help="Dollars per million tokens that come back."
)
@click.option("--model", metavar="PROVIDER/NAME", help="Price by the book as this model, instead of the two prices.")
@click.option("--pool-tpm", type=click.IntRange(1, 10**12), help="Draw on a pool of so many quota tokens a minute too.")
@click.option(
    "--formula",
    type=click.Choice(["worst", "provider"]),
    default="worst",
    show_default=True,
    help="What is held of the pool: what a call can burn, or what the provider holds.",
)
@click.option("--cap", type=AMOUNT, default="20", show_default=True, help="The budget in dollars.")
@click.option("--workers", type=click.IntRange(1, 150), default=20, show_default=True, help="Processes.")
@click.option(
    "--ceiling",
    type=click.IntRange(0, 10_000_000),
    default=2048,
    show_default=True,
    help="The output that every call declares; it is held, the row's is settled.",
)
@click.option(
    "--call-ms", type=click.IntRange(0, 600_000), default=20, show_default=True, help="How long a call lasts."
)
@click.option(
    "--retry", is_flag=True, help="A call refused as held waits as it is told and asks again, instead of being skipped."
)
@with_server
def replay(
    session: Session,
    trace: Path | None,
    price_in: Decimal,
    price_out: Decimal,
    model: str | None,
    pool_tpm: int | None,
    formula: HoldFormula,
    cap: Decimal,
    workers: int,
    ceiling: int,
    call_ms: int,
    retry: bool,
) -> None:
    """Replay a request trace against one budget.

    By worker processes, each with its own connection.

    TRACE.csv has a header line and the columns ContextTokens and GeneratedTokens (others are ignored); without one, a
    small made-up trace that comes with quota is used. For every row a worker holds ContextTokens x price in + ceiling x
    price out, lets the call's time pass, and settles what the row really cost. An output above the ceiling is booked
    in full and reported as overage.

    A call is refused as "exhausted" when what is spent leaves no room for it, and as "held" when only other workers'
    open holds stand in its way. Both are skipped and counted apart; --retry makes the second ask again.

    With --model the calls are priced by the book (quota price) as a call to that model would be; with --pool-tpm each
    call holds quota tokens of a pool as well, both or neither, by the model's burndown. Under "worst" no settle exceeds
    its hold; under "provider" the excess is reported.

    Each replay has a tenant of its own, so repeated runs are independent. Exit code 0 when the cap was held by every
    grant's own answer, no hold is left and the books are right; else 1.
    """
    requests = sample_trace() if trace is None else read_trace(trace)
    retry_s = 3600.0 if retry else None
    prices, draw = _terms(session, model, pool_tpm, formula, Prices(price_in, price_out))
    job = Job(SUBJECT, cap, prices, ceiling, call_ms / 1000, retry_s, draw=draw)
    result = run(session, job, requests, workers, pool_tpm)
    session.screen.document(result.document())
    show(session.screen, result)
    if not result.held:
        click.get_current_context().exit(REFUSED)


def _terms(
    session: Session, model: str | None, pool_tpm: int | None, formula: HoldFormula, flat: Prices
) -> tuple[Prices | BookPrices, Draw | None]:
    """What tokens cost, and what of the provider's quota they take."""
    if model is None:
        return flat, None if pool_tpm is None else Draw(POOL, QuotaTokens(), formula)
    provider, slash, name = model.partition("/")
    if not slash or not name:
        raise click.UsageError(f'"{model}" names no provider; write PROVIDER/NAME, such as openai/gpt-4o')
    prices = BookPrices(session.client.call(PricesOf(session.tenant)).find(provider, name).price)
    if pool_tpm is None:
        return prices, None
    return prices, Draw(POOL, quota_tokens_of(name, "bedrock-runtime", datetime.now(UTC).date()), formula)


def run(
    session: Session, job: Job, requests: list[Request], workers: int, tokens_per_minute: int | None = None
) -> Result:
    """Carries out a replay; `tokens_per_minute`: the quota of the pool that the job draws on."""
    tenant = fresh_tenant(session.client, "replay")
    fresh_budget(session.client, tenant, job.subject, job.cap)
    if job.draw is not None and tokens_per_minute is not None:
        fresh_pool(session.client, tenant, job.draw.pool, tokens_per_minute)
    prepare = session.target.settings.prepare_threshold
    with (
        Fleet(workers, session.url, tenant=tenant, prepare_threshold=prepare, preload=["quota.cli.replay"]) as fleet,
        _progress(session.screen, len(requests)) as progress,
    ):
        pulses: dict[int, Pulse] = {}
        started = time.perf_counter()

        def on_news(number_: int, news: Any) -> None:
            nonlocal started
            if isinstance(news, Pulse):
                pulses[number_] = news
                progress(list(pulses.values()))
            else:  # the workers are at the line
                started = time.perf_counter()

        tallies = fleet.run(spend, [(job, requests[n::workers]) for n in range(workers)], on_news)
        seconds = time.perf_counter() - started
    books = books_of(session.client, tenant, job.subject)
    return Result(job, workers, tenant, Tally.of(tallies), books, seconds)


@contextmanager
def _progress(screen: Screen, total: int) -> Iterator[Callable[[list[Pulse]], None]]:
    """Yields what shows how far the workers are: a bar on a terminal, a line now and then otherwise."""
    if screen.lively:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(40), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield lambda pulses: bar.update(
                task, completed=sum(pulse.calls for pulse in pulses), description=_described(pulses)
            )
        return
    told = time.monotonic()

    def line(pulses: list[Pulse]) -> None:
        nonlocal told
        if time.monotonic() - told >= _LINE_EVERY_S:
            told = time.monotonic()
            screen.note(f"{sum(pulse.calls for pulse in pulses)} of {total} calls, {_described(pulses)}")

    yield line


def _described(pulses: list[Pulse]) -> str:
    spent = max(pulse.spent for pulse in pulses)
    return f"${spent:.2f} spent, {sum(pulse.refused for pulse in pulses)} refused"


def _latency(measured_ms: list[float]) -> str:
    if not measured_ms:
        return "-"
    return ", ".join(f"p{share} {percentile(measured_ms, share / 100):.1f} ms" for share in (50, 90, 99))


def show(screen: Screen, result: Result) -> None:
    """Prints the closing table."""
    found, tally, cap = result.document(), result.tally, result.job.cap
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.refused.items())) or "-"
    lines = {
        "calls": f"{tally.calls} by {result.workers} workers",
        "granted": f"{tally.granted}",
        "refused": f"{tally.refused.total()} ({reasons})" if tally.refused else "0",
        "spent": f"${number(result.books.spent)} of ${number(cap)}"
        + (f" ({100 * result.books.spent / cap:.1f} % of the cap)" if cap else ""),
        "over the cap by": f"${number(result.overspend)}",
        "highest spent + reserved": f"${number(tally.peak)} (in any grant's own answer)",
        "holds left": f"{result.books.holds}",
        "check()": f"{len(result.books.violations)} violations" if result.books.violations else "the books are right",
        "time": f"{result.seconds:.1f} s, {found['calls_per_s']} calls/s, {found['granted_per_s']} granted/s",
        "reserve": _latency(tally.reserve_ms),
        "settle": _latency(tally.settle_ms),
    }
    if tally.retries:
        lines["asked again"] = f"{tally.retries} times, held by others"
    if tally.above_ceiling:
        lines["above the ceiling"] = (
            f"{tally.above_ceiling} outputs, ${number(tally.overage)} booked beyond their holds"
        )
    if result.job.draw is not None:
        excess = f", {number(tally.quota_overage)} of them beyond their holds" if tally.quota_overage else ""
        lines["quota tokens"] = f"{number(tally.quota_settled)} settled{excess}"
    screen.table({"replay": list(lines), "": list(lines.values())})
    screen.line("The cap was held." if result.held else "THE CAP WAS NOT HELD.")
    screen.line(f"Its books: quota ledger --tenant {result.tenant}, quota balance {SUBJECT} --tenant {result.tenant}")
