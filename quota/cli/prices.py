"""`quota price …`: the price book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from quota.calls import EndPrice, PricesOf, SetPrice
from quota.cli.help import Ordered, examples
from quota.cli.params import AMOUNT, INSTANT, PRICE, text_of
from quota.cli.screen import number, when
from quota.cli.store import Session, with_store
from quota.costs.catalogs import Catalog, read_catalog
from quota.costs.prices import PriceEntry
from quota.prices import AS_BEFORE, CHANGED, LEFT_OUT, NEW, import_catalog

__all__ = ["price"]

_IMPORT_S = 300

_FOR_ALL = click.option("--own", is_flag=True, help="The tenant's own price, not the one that all tenants see.")


@click.group(cls=Ordered)
def price() -> None:
    """Prices: what models cost.

    In dollars per million tokens. A model without a price cannot be called.
    """


@price.command(
    "set",
    epilog=examples(
        "quota price set openai gpt-4o --input 2.5 --cached-input 1.25 --output 10 --output-max 16384",
        "quota price set openai gpt-4o --input 2 --output 8 --from 2027-01-01",
        "quota price set acme llama --input 0 --output 0 --free",
        "quota price set google gemini --input 1.25 --output 10 --long-context 200000 2.5 15",
        "quota price set anthropic claude-opus-5 --input 4 --output 20 --own --tenant acme",
    ),
)
@click.argument("provider")
@click.argument("model")
@click.option("--input", type=PRICE, required=True, help="Tokens sent.")
@click.option("--output", type=PRICE, required=True, help="Tokens that come back, reasoning included.")
@click.option("--cached-input", type=PRICE, help="Tokens that a cache served. [default: as input]")
@click.option("--cache-write-5m", type=PRICE, help="Tokens written to a cache. [default: as input]")
@click.option("--cache-write-1h", type=PRICE, help="Written for an hour. [default: as for five minutes]")
@click.option("--input-audio", type=PRICE, help="Sound sent. [default: calls with sound are refused]")
@click.option("--output-audio", type=PRICE, help="Sound that comes back.")
@click.option("--request", type=AMOUNT, help="Dollars for every request.")
@click.option(
    "--long-context",
    type=(click.IntRange(1), PRICE, PRICE),
    multiple=True,
    metavar="TOKENS INPUT OUTPUT",
    help="When more is sent, all of the request costs so much; may stand more than once.",
)
@click.option("--variant", default="", help="Such as batch. [default: the usual price]")
@click.option("--from", "start", type=INSTANT, help="In force from then on. [default: now]")
@click.option("--until", type=INSTANT, help="In force until then. [default: until another price begins]")
@click.option("--output-max", type=click.IntRange(1), help="The most tokens that the model answers.")
@click.option("--input-max", type=click.IntRange(1), help="The most tokens that the model takes.")
@click.option("--free", is_flag=True, help="Declares that it costs nothing.")
@click.option("--source", help="Where the price stands.")
@_FOR_ALL
@with_store
def price_set(
    session: Session,
    /,
    provider: str,
    model: str,
    long_context: tuple[tuple[int, Decimal, Decimal], ...],
    variant: str,
    start: datetime | None,
    until: datetime | None,
    output_max: int | None,
    input_max: int | None,
    free: bool,
    source: str | None,
    own: bool,
    **parts: Decimal | None,
) -> None:
    """Set what a model costs from a time on. The price in force ends there."""
    rates = _rates(parts, sorted(long_context))
    call = SetPrice(
        provider.lower(),
        model.lower(),
        rates,
        variant,
        start,
        until,
        output_max,
        input_max,
        free,
        source,
        session.tenant if own else None,
    )
    version, replayed = session.call(call)
    session.screen.document(
        {"version": version, "replayed": replayed, "provider": call.provider, "model": call.model, "rates": rates}
    )
    session.screen.line(f"price of {call.model}: version {version}{', as before' if replayed else ''}")


def _rates(parts: Mapping[str, Decimal | None], steps: Sequence[tuple[int, Decimal, Decimal]]) -> dict[str, object]:
    rates: dict[str, object] = {part: format(rate, "f") for part, rate in parts.items() if rate is not None}
    if steps:
        for part, at in (("input", 1), ("output", 2)):
            dearer = [{"above": step[0], "price": format(step[at], "f")} for step in steps]
            rates[part] = {"base": rates[part], "steps": dearer}
    return rates


@price.command("end", epilog=examples("quota price end 17", "quota price end 17 --at 2027-01-01"))
@click.argument("version", type=click.IntRange(1))
@click.option("--at", type=INSTANT, help="When. [default: now]")
@_FOR_ALL
@with_store
def price_end(session: Session, version: int, at: datetime | None, own: bool) -> None:
    """End a price: from then on the model has the next one, or cannot be called."""
    session.call(EndPrice(version, at, session.tenant if own else None))
    session.screen.document({"version": version, "ended_at": at})
    session.screen.line(f"price version {version} ends {'now' if at is None else when(at)}")


@price.command("list", epilog=examples("quota price list", "quota price list claude --provider aws --json"))
@click.argument("text", metavar="[PART OF A NAME]", required=False, default="")
@click.option("--provider", help="Only its models.")
@with_store
def price_list(session: Session, text: str, provider: str | None) -> None:
    """List the prices that the tenant meets now or later."""
    found = [
        entry
        for entry in session.call(PricesOf(session.tenant))
        if text.lower() in entry.model and provider in (None, entry.provider)
    ]
    rows = [_row(entry) for entry in found]
    columns = {
        "version": [str(row["version"]) for row in rows],
        "provider": [row["provider"] for row in rows],
        "model": [row["model"] + (f" ({row['variant']})" if row["variant"] else "") for row in rows],
        "input": [_shown(entry.price.input) for entry in found],
        "output": [_shown(entry.price.output) for entry in found],
        "at most": [str(entry.output_max) if entry.output_max else "-" for entry in found],
        "from": [when(entry.effective_from) if entry.effective_from else "-" for entry in found],
        "until": [when(entry.effective_until) if entry.effective_until else "-" for entry in found],
        "of": [entry.tenant or "all" for entry in found],
    }
    session.screen.rows(rows, columns, "no prices; import some: quota price import")


def _shown(rate: Any) -> str:
    return number(rate.base) + ("+" if rate.steps else "")


def _row(entry: PriceEntry) -> dict[str, Any]:
    return {
        "version": entry.version,
        "tenant": entry.tenant,
        "provider": entry.provider,
        "model": entry.model,
        "variant": entry.variant,
        "rates": entry.price.json(),
        "free": entry.price.free,
        "effective_from": entry.effective_from,
        "effective_until": entry.effective_until,
        "output_max": entry.output_max,
        "input_max": entry.input_max,
        "source": entry.source,
    }


@price.command(
    "import",
    epilog=examples(
        "quota price import --provider openai --provider anthropic",
        "quota price import prices.json --dry-run",
    ),
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--provider", "providers", multiple=True, help="Only its models; may stand more than once.")
@click.option("--dry-run", is_flag=True, help="Report, and change nothing.")
@_FOR_ALL
@with_store
def price_import(session: Session, file: Path | None, providers: tuple[str, ...], dry_run: bool, own: bool) -> None:
    """Fill the price book from the genai-prices package, or from a price map in JSON.

    Of the forms that LiteLLM, models.dev and OpenRouter use, or a list of objects with provider, model and rates. A
    price that has changed is in force from now on; what was before stays as it was. What lacks a price is left out and
    reported; what lacks an output maximum is reported. All of it is imported, or nothing.
    """
    catalog = _catalog(file, providers)
    tenant = session.tenant if own else None
    counts = Counter(read=len(catalog.entries))
    if not dry_run:
        counts = session.client.transact(lambda do: import_catalog(do, catalog, tenant), timeout_s=_IMPORT_S)
    document = {
        **{key: counts[key] for key in (NEW, AS_BEFORE, CHANGED, LEFT_OUT)},
        "remarks": [
            {"provider": r.provider, "model": r.model, "problem": r.problem, "imported": r.imported}
            for r in catalog.remarks
        ],
    }
    session.screen.document(document)
    session.screen.line(", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no prices")
    left_out = [r for r in catalog.remarks if not r.imported]
    for remark in left_out:
        session.screen.line(f"left out: {remark.model} of {remark.provider}: {remark.problem}")
    if len(catalog.remarks) > len(left_out):
        session.screen.line(
            f"{len(catalog.remarks) - len(left_out)} without an output maximum: their ceilings are not clamped"
        )


def _catalog(file: Path | None, providers: tuple[str, ...]) -> Catalog:
    wanted = [name.lower() for name in providers] or None
    if file is not None:
        return read_catalog(text_of(file), providers=wanted, source=file.name)
    try:
        from quota.costs.genai import genai_prices

        return genai_prices(wanted)
    except ImportError:
        raise click.UsageError(
            "genai-prices is not installed: pip install 'quota-ledger[models]', or name a file"
        ) from None
