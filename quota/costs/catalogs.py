"""Prices from elsewhere: the `genai-prices` package, and price maps in JSON.

| format | told apart by |
|---|---|
| quota's own | a list of objects with `provider`, `model` and `rates` |
| LiteLLM's map | an object of models with `litellm_provider` |
| models.dev's | an object of providers with `models` |
| OpenRouter's | an object with `data`, a list of models with `pricing` |

Nothing is guessed. What cannot be priced exactly is left out and reported: no price, a price in a unit that calls to a
chat model do not have, more decimals than the ledger keeps, nothing but zeros. A model without an output maximum is
imported and reported as well: its ceilings are not clamped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any

from quota.costs.prices import Price, PriceBook, PriceEntry, Rate, exact, price_of_json
from quota.costs.tokens import TOKENS_MAX
from quota.errors import CostError, InvalidPrice

__all__ = ["Catalog", "Collector", "Remark", "catalog_of", "complete", "read_catalog"]

_PROVIDERS = MappingProxyType(
    {"amazon-bedrock": "aws", "bedrock": "aws", "bedrock_converse": "aws", "vertex_ai": "google", "gemini": "google"}
)


@dataclass(frozen=True, slots=True)
class Remark:
    """What an import left out, or lacks.

    Fields:
        provider, model: whose.
        problem: what is wrong.
        imported: True when the price is there all the same.
    """

    provider: str
    model: str
    problem: str
    imported: bool = False


@dataclass(frozen=True, slots=True)
class Catalog:
    """Prices and what is to be said about them.

    Fields:
        entries: the prices.
        remarks: what lacks a price or an output maximum, one a model and problem.
    """

    entries: tuple[PriceEntry, ...]
    remarks: tuple[Remark, ...]


class Collector:
    """Gathers prices, and remarks on what is none."""

    def __init__(self, source: str, providers: Iterable[str] | None) -> None:
        self.source = source
        self.wanted = None if providers is None else frozenset(providers)
        self.entries: dict[tuple[object, ...], PriceEntry] = {}
        self.remarks: list[Remark] = []

    def wants(self, provider: str) -> bool:
        """True when prices of this provider were asked for."""
        return self.wanted is None or provider in self.wanted

    def add(self, entry: PriceEntry, aliases: Iterable[str] = ()) -> None:
        """Takes a price under its name, and under others that nobody has taken."""
        if entry.input_max is not None and entry.price.largest_step >= entry.input_max:
            entry = replace(entry, input_max=None)  # its long-context prices say that it takes more
        if entry.output_max is None and entry.variant == "":
            self.remark(entry.provider, entry.model, "no output maximum", imported=True)
        for name in dict.fromkeys((entry.model, *aliases)):
            named = replace(entry, model=name, source=entry.source or self.source)
            if name == entry.model:
                self.entries[_key(named)] = named
            else:
                self.entries.setdefault(_key(named), named)

    def remark(self, provider: str, model: str, problem: str, *, imported: bool = False) -> None:
        """Notes a problem once."""
        found = Remark(provider, model, problem, imported)
        if found not in self.remarks[-3:]:
            self.remarks.append(found)

    def priced(self, provider: str, model: str, make: Callable[[], Price]) -> Price | None:
        """Makes a price; None, and a remark, when it is none."""
        try:
            return make()
        except CostError as error:
            self.remark(provider, model, error.message.partition(": ")[2])
            return None

    def catalog(self) -> Catalog:
        """Returns what was gathered."""
        return Catalog(tuple(self.entries.values()), tuple(self.remarks))


def read_catalog(text: str, *, providers: Iterable[str] | None = None, source: str = "a price map") -> Catalog:
    """Reads a price map in JSON, whatever its format of those above.

    Arguments:
        text: the JSON. Numbers are read as decimals, never as floats.
        providers: only theirs; None: all.
        source: what the entries say they come from.

    Errors: `InvalidPrice` when it is no JSON (with the line) or has none of the known shapes; `PricesOverlap` when two
    prices of quota's own format are in force at once.
    """
    try:
        parsed = json.loads(text, parse_float=Decimal, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InvalidPrice(f"the price map is no JSON: {error.msg}, line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidPrice(f"the price map is no JSON: {error}") from None
    return catalog_of(parsed, providers=providers, source=source)


def catalog_of(parsed: object, *, providers: Iterable[str] | None = None, source: str = "a price map") -> Catalog:
    """`read_catalog` of JSON that is parsed already, fractions as decimals. Errors: `InvalidPrice`, `PricesOverlap`."""
    into = Collector(source, providers)
    if isinstance(parsed, list) and all(isinstance(one, dict) and "rates" in one for one in parsed):
        _own(parsed, into)
    elif isinstance(parsed, dict) and isinstance(parsed.get("data"), list):
        _openrouter(parsed["data"], into)
    elif isinstance(parsed, dict) and any(isinstance(v, dict) and "litellm_provider" in v for v in parsed.values()):
        _litellm(parsed, into)
    elif isinstance(parsed, dict) and any(isinstance(v, dict) and "models" in v for v in parsed.values()):
        _models_dev(parsed, into)
    else:
        raise InvalidPrice(
            "the price map has none of the known shapes: quota's own, LiteLLM's, models.dev's, OpenRouter's"
        )
    return into.catalog()


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'the key "{key}" stands twice')
        found[key] = value
    return found


# -- quota's own ----------------------------------------------------------------------------------------------------

_VARIANT = re.compile(r"[a-z0-9_.-]{0,60}")
_OWN = frozenset(
    {"provider", "model", "rates", "variant", "effective_from", "effective_until", "output_max", "input_max", "free",
     "source"}
)  # fmt: skip


def _own(parsed: list[dict[str, Any]], into: Collector) -> None:
    for number, one in enumerate(parsed, start=1):
        unknown = sorted(one.keys() - _OWN)
        if unknown or not isinstance(one.get("provider"), str) or not isinstance(one.get("model"), str):
            what = f'"{unknown[0]}" is no field of it' if unknown else '"provider" and "model" are text'
            raise InvalidPrice(f"entry {number}: {what}")
        provider, model = one["provider"].lower(), one["model"].strip().lower()
        price = into.priced(provider, model, partial(_own_price, one))
        if price is None or not into.wants(provider):
            continue
        entry = PriceEntry(
            provider,
            model,
            price,
            variant=str(one.get("variant", "")),
            effective_from=_instant(one.get("effective_from"), number),
            effective_until=_instant(one.get("effective_until"), number),
            output_max=_count(one.get("output_max")),
            input_max=_count(one.get("input_max")),
            source=one.get("source"),
        )
        _require_span(entry, number)
        if _key(entry) in into.entries:
            raise InvalidPrice(f'entry {number}: "{model}" of "{provider}" stands twice with one beginning')
        into.add(entry)
    PriceBook(into.entries.values())


def _require_span(entry: PriceEntry, number: int) -> None:
    start, end = entry.effective_from, entry.effective_until
    if start is not None and end is not None and end <= start:
        raise InvalidPrice(f"entry {number}: it ends at {end}, not after it begins at {start}")
    if not _VARIANT.fullmatch(entry.variant):
        raise InvalidPrice(f'entry {number}: "variant" is "{entry.variant:.60}"; write a-z, 0-9, _, . and -')


def _key(entry: PriceEntry) -> tuple[object, ...]:
    return (entry.provider, entry.model, entry.variant, entry.effective_from)


def _own_price(one: Mapping[str, Any]) -> Price:
    return price_of_json(_object(one["rates"]), one.get("free") is True)


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidPrice(f"rates is {value!r:.40}, no object")
    return value


def _instant(value: object, number: int) -> datetime | None:
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise InvalidPrice(f'entry {number}: "{value!s:.40}" is no time with a zone; write 2026-11-01T00:00:00Z')
    return found


def _count(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
        value = int(value)
    # Bounded before it is converted: 1e999999999 is a number, too.
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 < value <= TOKENS_MAX:
        return None
    return int(value) if value == int(value) else None


# -- prices per token, as LiteLLM and OpenRouter write them ------------------------------------------------------------


_NUMBER_MAX = 10**12
_PLACES_MAX = 100


def _per_million(value: object, what: str) -> Decimal:
    """Dollars per million from dollars per token, exactly."""
    number = _number(value, what)
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or sign:
        raise InvalidPrice(f"{what} is {value!s:.40}; a price is at least 0")
    return exact(Decimal((0, digits, exponent + 6)).normalize(), what)


def _number(value: object, what: str) -> Decimal:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,6})?", value, re.ASCII):
        value = Decimal(value)
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise InvalidPrice(f"{what} is {value!r:.40}, no number")
    exponent = Decimal(value).as_tuple().exponent
    if not -_NUMBER_MAX < value < _NUMBER_MAX or not isinstance(exponent, int) or exponent < -_PLACES_MAX:
        raise InvalidPrice(f"{what} is {value!s:.40}, no price")
    return Decimal(value)


_LITELLM_PARTS = MappingProxyType(
    {
        "input": "input_cost_per_token",
        "output": "output_cost_per_token",
        "cached_input": "cache_read_input_token_cost",
        "cache_write_5m": "cache_creation_input_token_cost",
        "cache_write_1h": "cache_creation_input_token_cost_above_1hr",
        "input_audio": "input_cost_per_audio_token",
        "output_audio": "output_cost_per_audio_token",
    }
)
_LITELLM_VARIANTS = MappingProxyType({"": "", "batch": "_batches", "flex": "_flex", "priority": "_priority"})
_STEP = re.compile(r"_above_(\d+)k_tokens")


def _litellm(parsed: dict[str, Any], into: Collector) -> None:
    for name, told in parsed.items():
        if name == "sample_spec" or not isinstance(told, dict):
            continue
        written = str(told.get("litellm_provider", ""))
        provider = _PROVIDERS.get(written, _PROVIDERS.get(written.partition("-")[0], written))
        if not into.wants(provider):
            continue
        model = name.lower()
        maximum = _count(told.get("max_output_tokens"))
        aliases = _bare(model, written)
        for variant, suffix in _LITELLM_VARIANTS.items():
            if variant and f"input_cost_per_token{suffix}" not in told:
                continue
            price = into.priced(provider, model, partial(_litellm_price, told, suffix))
            if price is not None:
                into.add(
                    PriceEntry(
                        provider,
                        model,
                        price,
                        variant,
                        output_max=maximum,
                        input_max=_count(told.get("max_input_tokens")),
                    ),
                    aliases,
                )


def _bare(model: str, provider: str) -> list[str]:
    """`bedrock/x` and `openai/x` are x of that provider, if nobody else is called that."""
    head, slash, rest = model.partition("/")
    return [rest] if slash and head in (provider, provider.partition("_")[0]) and rest else []


def _litellm_price(told: Mapping[str, Any], suffix: str) -> Price:
    found: dict[str, Any] = {}
    for part, key in _LITELLM_PARTS.items():
        base = told.get(key + suffix, told.get(key))
        if base is None:
            continue
        steps = []
        for other, value in told.items():
            step = _STEP.fullmatch(other.removeprefix(key).removesuffix(suffix)) if other.startswith(key) else None
            if step and other.endswith(suffix) and value is not None:
                steps.append((int(step[1]) * 1000, _per_million(value, other)))
        found[part] = Rate(_per_million(base, key), tuple(sorted(steps)))
    reasoning = told.get("output_cost_per_reasoning_token")
    if reasoning is not None and "output" in found and _per_million(reasoning, "reasoning") > found["output"].base:
        raise InvalidPrice("reasoning tokens cost more than output tokens; set its price by hand")
    if told.get("input_cost_per_request"):
        found["request"] = exact(_number(told["input_cost_per_request"], "input_cost_per_request"), "request", 12)
    return complete(found)


def complete(found: Mapping[str, Any]) -> Price:
    """Makes a price of its parts. Errors: `InvalidPrice`, also when it lacks input or output, or is zero."""
    for part in ("input", "output"):
        if part not in found:
            raise InvalidPrice(f"no price for {part}")
    try:
        return Price(**found)
    except InvalidPrice as error:
        if "must be declared" in error.message:
            raise InvalidPrice("its price is zero; if it is free, declare it so") from None
        raise


def _part(told: object, name: str) -> Mapping[str, Any]:
    """An object within an object; what is none has nothing in it."""
    found = told.get(name) if isinstance(told, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# -- models.dev -----------------------------------------------------------------------------------------------------

_MODELS_DEV_PARTS = MappingProxyType(
    {"input": "input", "output": "output", "cached_input": "cache_read", "cache_write_5m": "cache_write",
     "input_audio": "input_audio", "output_audio": "output_audio"}
)  # fmt: skip
_MODELS_DEV_STEP = re.compile(r"context_over_(\d+)k")


def _models_dev(parsed: dict[str, Any], into: Collector) -> None:
    for name, told in parsed.items():
        provider = _PROVIDERS.get(name, name).lower()
        models = told.get("models") if isinstance(told, dict) else None
        if not into.wants(provider) or not isinstance(models, dict):
            continue
        for model, about in models.items():
            limit, cost = _part(about, "limit"), _part(about, "cost")
            price = into.priced(provider, model.lower(), partial(_models_dev_price, cost))
            if price is not None:
                maximum, context = _count(limit.get("output")), _count(limit.get("context"))
                into.add(PriceEntry(provider, model.lower(), price, output_max=maximum, input_max=context))


def _models_dev_price(cost: Mapping[str, Any]) -> Price:
    found: dict[str, Any] = {}
    for part, key in _MODELS_DEV_PARTS.items():
        if key not in cost:
            continue
        steps = sorted(
            (int(step[1]) * 1000, exact(_number(over[key], f"{other}.{key}"), f"{other}.{key}"))
            for other, over in cost.items()
            if (step := _MODELS_DEV_STEP.fullmatch(other)) and isinstance(over, Mapping) and key in over
        )
        found[part] = Rate(exact(_number(cost[key], key), key), tuple(steps))
    reasoning = cost.get("reasoning")
    if reasoning is not None and "output" in found and _number(reasoning, "reasoning") > found["output"].base:
        raise InvalidPrice("reasoning tokens cost more than output tokens; set its price by hand")
    return complete(found)


# -- OpenRouter -----------------------------------------------------------------------------------------------------

_OPENROUTER_PARTS = MappingProxyType(
    {"input": "prompt", "output": "completion", "cached_input": "input_cache_read",
     "cache_write_5m": "input_cache_write", "input_audio": "audio"}
)  # fmt: skip


def _openrouter(parsed: list[Any], into: Collector) -> None:
    if not into.wants("openrouter"):
        return
    for number, told in enumerate(parsed, start=1):
        if not isinstance(told, dict) or not isinstance(told.get("id"), str):
            raise InvalidPrice(f'data entry {number} is no object with an "id"')
        model = told["id"].lower()
        price = into.priced("openrouter", model, partial(_openrouter_price, _part(told, "pricing")))
        if price is not None:
            top = _part(told, "top_provider")
            maximum, context = _count(top.get("max_completion_tokens")), _count(told.get("context_length"))
            into.add(PriceEntry("openrouter", model, price, output_max=maximum, input_max=context))


def _openrouter_price(pricing: Mapping[str, Any]) -> Price:
    found: dict[str, Any] = {
        part: Rate(_per_million(pricing[key], key)) for part, key in _OPENROUTER_PARTS.items() if key in pricing
    }
    if "request" in pricing:
        found["request"] = exact(_number(pricing["request"], "request"), "request", 12)
    if "web_search" in pricing:
        found["uses"] = {"web_search": exact(_number(pricing["web_search"], "web_search"), "web_search", 12)}
    return complete(found)
