"""Prices from the `genai-prices` package: its data as installed, without a look at the network.

Its rules of what a name matches are not taken over, since some match every name that begins alike. Of them only the
names that are spelled out are taken, where the package itself finds the same model under them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from quota.costs.catalogs import Catalog, Collector, complete
from quota.costs.names import spellings
from quota.costs.prices import Price, PriceEntry, Rate, exact
from quota.errors import InvalidPrice

__all__ = ["genai_prices"]

_PARTS = MappingProxyType(
    {
        "input_mtok": "input",
        "output_mtok": "output",
        "cache_read_mtok": "cached_input",
        "cache_write_mtok": "cache_write_5m",
        "cache_write_5m_mtok": "cache_write_5m",
        "cache_write_1h_mtok": "cache_write_1h",
        "input_audio_mtok": "input_audio",
        "output_audio_mtok": "output_audio",
    }
)
# Cheaper than, or as dear as, what they are priced as here: an upper bound is kept.
_COVERED_BY = MappingProxyType(
    {
        "cache_audio_read_mtok": "input_audio_mtok",
        "cache_image_read_mtok": "input_mtok",
        "input_image_mtok": "input_mtok",
        "input_video_mtok": "input_mtok",
        "output_image_mtok": "output_mtok",
        "output_video_mtok": "output_mtok",
        "output_reasoning_mtok": "output_mtok",
        "output_citation_mtok": "output_mtok",
    }
)
_USES = MappingProxyType({"web_searches_kcount": "web_search", "storage_searches_kcount": "file_search"})
_SAME_AS_USUAL = frozenset({"default"})


def genai_prices(providers: Iterable[str] | None = None) -> Catalog:
    """Returns the prices that the installed `genai-prices` package has.

    Arguments: `providers`, only theirs, by the package's ids (`openai`, `anthropic`, `aws`, ...); None: all.
    Result: the catalog. Errors: `ImportError` when the package is not installed; `InvalidPrice` for a provider that it
    does not know.
    """
    from genai_prices.data import providers as known

    source = f"genai-prices {version('genai-prices')}"
    into = Collector(source, providers)
    unknown = sorted((into.wanted or frozenset()) - {provider.id for provider in known})
    if unknown:
        raise InvalidPrice(f'genai-prices knows no provider "{unknown[0]}"')
    for provider in known:
        if into.wants(provider.id):
            ids = {model.id.lower() for model in provider.models}
            for model in provider.models:
                _model(provider, model, ids, into)
    return into.catalog()


def _model(provider: Any, model: Any, ids: set[str], into: Collector) -> None:
    name = model.id.lower()
    usual = _dated(model.prices if isinstance(model.prices, list) else [model])
    if usual is None:
        into.remark(provider.id, name, "its price depends on the time of day; set it by hand")
        return
    aliases = [alias for alias in _aliases(provider, model) if alias not in ids]
    timelines: dict[str, list[tuple[datetime | None, Any, Mapping[str, Any]]]] = {
        "": [(start, prices, {}) for start, prices in usual]
    }
    for variant, starts in _variants(model).items():
        timelines[variant] = list(_overlaid(usual, starts))
    for variant, line in timelines.items():
        for number, (start, prices, over) in enumerate(line):
            written = {**vars(prices), **over}
            price = into.priced(provider.id, name, partial(_price, written))
            if price is None:
                continue
            entry = PriceEntry(
                provider.id,
                name,
                price,
                variant,
                effective_from=start,
                effective_until=line[number + 1][0] if number + 1 < len(line) else None,
                input_max=model.context_window,
            )
            into.add(entry, aliases)


def _dated(prices: list[Any]) -> list[tuple[datetime | None, Any]] | None:
    """(start, value) in the order of time; None when something else than a day decides."""
    found: dict[datetime | None, Any] = {}
    for one in prices:
        constraint = getattr(one, "constraint", None)
        if constraint is not None and not hasattr(constraint, "start_date"):
            return None
        start = None if constraint is None else _midnight(constraint.start_date)
        found[start] = one.prices
    return sorted(found.items(), key=lambda item: item[0] or datetime.min.replace(tzinfo=UTC))


def _midnight(day: Any) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _variants(model: Any) -> dict[str, list[tuple[datetime | None, Any]]]:
    by_name: dict[str, list[Any]] = {}
    for variant in model.price_variants or ():
        if len(variant.when) == 1:
            ((key, name),) = variant.when.items()
            if key in ("processing", "service_tier", "speed") and name not in _SAME_AS_USUAL:
                by_name.setdefault(name, []).append(variant)
    return {name: dated for name, some in by_name.items() if (dated := _dated(some)) is not None}


def _overlaid(
    usual: list[tuple[datetime | None, Any]], variant: list[tuple[datetime | None, Any]]
) -> Iterator[tuple[datetime | None, Any, Mapping[str, Any]]]:
    """The variant's prices over the usual ones, a stretch of time each; before the variant begins it has no price."""
    first = datetime.min.replace(tzinfo=UTC)
    starts = sorted({start or first for start, _ in (*usual, *variant)})
    for start in starts:
        over = [prices for since, prices in variant if (since or first) <= start]
        if over:
            base = [prices for since, prices in usual if (since or first) <= start] or [usual[0][1]]
            yield (None if start == first else start), base[-1], vars(over[-1])


def _price(written: Mapping[str, Any]) -> Price:
    found: dict[str, Any] = {}
    uses: dict[str, Decimal] = {}
    for key, value in written.items():
        if value is None:
            continue
        if key in _PARTS:
            found[_PARTS[key]] = _rate(key, value)
        elif key in _USES:
            uses[_USES[key]] = _share(key, value, 3)
        elif key == "requests_kcount":
            found["request"] = _share(key, value, 3)
        elif key not in _COVERED_BY:
            raise InvalidPrice(f"it is priced by {key}, which calls to a chat model do not count")
    for key, part in _COVERED_BY.items():
        dearer = written.get(key)
        if dearer is not None and not _covers(written.get(part), dearer):
            raise InvalidPrice(f"{key} is dearer than {part}; set its price by hand")
    return complete({**found, "uses": uses})


def _rate(key: str, value: Any) -> Rate:
    if isinstance(value, Decimal):
        return Rate(exact(value, key))
    return Rate(exact(value.base, key), tuple((tier.start, exact(tier.price, key)) for tier in value.tiers))


def _covers(whole: Any, part: Any) -> bool:
    return isinstance(whole, Decimal) and isinstance(part, Decimal) and part <= whole


def _share(key: str, value: Any, places: int) -> Decimal:
    """The price of one, of a price for 10^places."""
    if not isinstance(value, Decimal):
        raise InvalidPrice(f"{key} has steps")
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    return exact(Decimal((0, digits, exponent - places)).normalize(), key, 12)


def _aliases(provider: Any, model: Any) -> list[str]:
    """Names that the package's rules spell out and find this model under, and its id without a revision."""
    spelled = [name for name in _spelled(model.match) if provider.find_model(name) is model]
    return [*spelled, *(name for name in spellings(model.id)[1:] if not _loses_date(model.id, name))]


def _loses_date(whole: str, short: str) -> bool:
    return any(part.isdigit() and len(part) == 8 and part not in short for part in whole.replace("@", "-").split("-"))


def _spelled(match: Any) -> Iterator[str]:
    for field in dataclasses.fields(match):
        value = getattr(match, field.name)
        if field.name in ("equals", "starts_with"):
            yield value.lower()
        elif field.name == "or_":
            for one in value:
                yield from _spelled(one)
