"""What a usage costs, the most that a request may cost, and the book of prices.

A price has a rate per part of a usage, in dollars per million tokens. A rate may have steps: when more than so many
tokens are sent, the whole request is priced at the step's rate (long-context prices). Cost is exact: rates have at most
6 decimals, so a token's price has at most 12, which is what the ledger keeps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType

from quota.costs.names import spellings
from quota.costs.tokens import TOKENS_MAX, Usage
from quota.errors import InvalidPrice, MalformedUsage, PricesOverlap, UnpricedModel

__all__ = ["PARTS", "Price", "PriceBook", "PriceEntry", "Rate", "exact", "price_of_json"]

PARTS = ("input", "cached_input", "cache_write_5m", "cache_write_1h", "output", "input_audio", "output_audio")
"""The parts of a usage that are priced by the million tokens, in the order of `Usage`."""

_PLACES = 12
_RATE_PLACES = 6
_RATE_MAX = 10**6
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?")
_NO_USES: Mapping[str, int] = MappingProxyType({})


def exact(value: object, what: str, places: int = _RATE_PLACES) -> Decimal:
    """Returns a price as a decimal.

    Arguments:
        value: a `Decimal`, an int, or text of decimal digits.
        what: its name, for the error.
        places: the most decimals.

    Errors: `InvalidPrice` when it is negative, too precise, too large or no exact number.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = Decimal(value)
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise InvalidPrice(f"{what} is {value!r:.60}; a price is a decimal, an int or a string of decimal digits")
    price = Decimal(value)
    if not price.is_finite() or price < 0 or price >= _RATE_MAX:
        raise InvalidPrice(f"{what} is {value!s:.60}; a price is at least 0 and below {_RATE_MAX} dollars")
    if _decimals(price) > places:
        raise InvalidPrice(f"{what} is {value!s:.60}; a price of that unit has at most {places} decimals")
    return price


def _decimals(price: Decimal) -> int:
    """Decimals but for zeros at the end; read from the digits, because arithmetic rounds to its context."""
    _, digits, exponent = price.as_tuple()
    assert isinstance(exponent, int)
    written = "".join(map(str, digits))
    significant = written.rstrip("0")
    return max(0, -(exponent + len(written) - len(significant))) if significant else 0


def _dollars(pico: int) -> Decimal:
    """So many millionths of a millionth of a dollar, exactly, whatever the context's precision."""
    return Decimal((0, tuple(map(int, str(pico))), -_PLACES))


def _sum(one: Decimal, other: Decimal) -> Decimal:
    return _dollars(_pico(one, _PLACES) + _pico(other, _PLACES))


def _pico(price: Decimal, places: int) -> int:
    """`price` x 10^places as an int; it has no more decimals than that."""
    sign, digits, exponent = price.as_tuple()
    assert isinstance(exponent, int)
    assert not sign
    number = int("".join(map(str, digits)))
    shift = places + exponent
    return int(number * 10**shift if shift >= 0 else number // 10**-shift)


@dataclass(frozen=True, slots=True)
class Rate:
    """Dollars per million tokens, by the size of the request.

    Fields:
        base: the rate.
        steps: (above, rate): when a request sends more than `above` tokens, all of it is priced at that rate. In rising
            order of `above`.

    Errors: `InvalidPrice`.
    """

    base: Decimal
    steps: tuple[tuple[int, Decimal], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", exact(self.base, "a rate"))
        above = 0
        for start, rate in self.steps:
            if type(start) is not int or not above < start <= TOKENS_MAX:
                raise InvalidPrice(
                    f"a step begins above {start!r:.40} tokens; steps are whole numbers that rise from 1"
                )
            exact(rate, f"the rate above {start} tokens")
            above = start

    def at(self, total_input: int) -> Decimal:
        """Returns the rate of a request that sends so many tokens."""
        rate = self.base
        for above, stepped in self.steps:
            if total_input > above:
                rate = stepped
        return rate

    @property
    def is_zero(self) -> bool:
        """True when no size of request costs anything."""
        return self.base == 0 and all(rate == 0 for _, rate in self.steps)


@dataclass(frozen=True, slots=True)
class Price:
    """What a model's tokens cost.

    Fields:
        input, output: dollars per million tokens. Reasoning tokens are output.
        cached_input: tokens that a cache served; None: priced as input.
        cache_write_5m, cache_write_1h: tokens written to a cache; None: the provider has no such charge. They are then
            priced as input, and an hour as five minutes.
        input_audio, output_audio: tokens of sound; None: the model has none, and a call with sound is refused.
        request: dollars per request, at most 12 decimals.
        uses: dollars per use of a paid extra, by name, at most 12 decimals.
        free: declares that it costs nothing at all. Without it a price of nothing is an error.

    Errors: `InvalidPrice`.
    """

    input: Rate
    output: Rate
    cached_input: Rate | None = None
    cache_write_5m: Rate | None = None
    cache_write_1h: Rate | None = None
    input_audio: Rate | None = None
    output_audio: Rate | None = None
    request: Decimal = Decimal(0)
    uses: Mapping[str, Decimal] = field(default_factory=dict)
    free: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "request", exact(self.request, "request", _PLACES))
        for name, price in self.uses.items():
            exact(price, name, _PLACES)
        nothing = self.request == 0 and all(rate.is_zero for rate in self._rates().values())
        if nothing is not self.free:
            raise InvalidPrice(
                "a price of zero must be declared: say free" if nothing else "it is declared free, and has a price"
            )

    def _rates(self) -> dict[str, Rate]:
        write_5m = self.cache_write_5m or self.input
        rates = {
            "input": self.input,
            "cached_input": self.cached_input or self.input,
            "cache_write_5m": write_5m,
            "cache_write_1h": self.cache_write_1h or write_5m,
            "output": self.output,
            "input_audio": self.input_audio,
            "output_audio": self.output_audio,
        }
        return {part: rate for part, rate in rates.items() if rate is not None}

    @property
    def largest_step(self) -> int:
        """The largest size of request above which some rate changes; 0 without steps."""
        return max((above for rate in self._rates().values() for above, _ in rate.steps), default=0)

    def cost(self, usage: Usage) -> Decimal:
        """Returns the dollars that a usage costs, the request's own fee included.

        Errors: `MalformedUsage` when it names sound or a paid extra that has no price.
        """
        size = usage.total_input
        pico = _pico(self.request, _PLACES)
        rates = self._rates()
        for part in PARTS:
            count = getattr(usage, part)
            if count and part not in rates:
                raise MalformedUsage(f"{count} tokens of {part} are reported, which has no price")
            pico += count * _pico(rates[part].at(size), _RATE_PLACES) if count else 0
        for name, count in usage.uses.items():
            if count and name not in self.uses:
                raise MalformedUsage(f'{count} uses of "{name}" are reported, which has no price')
            pico += count * _pico(self.uses[name], _PLACES) if count else 0
        return _dollars(pico)

    def worst(
        self, input_tokens: int, output_tokens: int, uses: Mapping[str, int] = _NO_USES, *, sound: bool = False
    ) -> Decimal:
        """Returns the most that any usage within the bounds costs.

        No usage that sends at most `input_tokens`, gets at most `output_tokens` and uses each extra at most so often
        costs more, however its input splits into cached, written and plain.

        Arguments:
            input_tokens: the most that is sent, of all kinds together.
            output_tokens: the most that comes back, of all answers together.
            uses: the most uses of paid extras, by name.
            sound: the request sends or asks for audio.

        Errors: `InvalidPrice` when there is sound and the model has no price for any.
        """
        rates = self._rates()
        if sound and not rates.keys() & {"input_audio", "output_audio"}:
            raise InvalidPrice(
                "the request has sound in it, and the model's price has none; set input_audio, output_audio"
            )
        parts_in = [rates[part] for part in rates if "output" not in part and (sound or part != "input_audio")]
        parts_out = [rates[part] for part in rates if "output" in part and (sound or part != "output_audio")]
        # Between two steps the rates are constant, so the dearest request of each stretch is its largest.
        sizes = {above for rate in rates.values() for above, _ in rate.steps if above < input_tokens} | {input_tokens}
        dearest = max(
            size * max(_pico(rate.at(size), _RATE_PLACES) for rate in parts_in)
            + output_tokens * max(_pico(rate.at(size), _RATE_PLACES) for rate in parts_out)
            for size in sizes
        )
        return _sum(_dollars(dearest), self.cost(Usage(uses=uses)))

    def json(self) -> dict[str, object]:
        """Returns the price as plain JSON, numbers as strings: what the database keeps, see `price_of_json`."""
        found: dict[str, object] = {}
        for part in PARTS:
            rate: Rate | None = getattr(self, part)
            if rate is None:
                continue
            base = format(rate.base, "f")
            steps = [{"above": above, "price": format(stepped, "f")} for above, stepped in rate.steps]
            found[part] = {"base": base, "steps": steps} if steps else base
        if self.request:
            found["request"] = format(self.request, "f")
        if self.uses:
            found["uses"] = {name: format(price, "f") for name, price in self.uses.items()}
        return found


def price_of_json(rates: Mapping[str, object], free: bool = False) -> Price:
    """Reads the JSON form of a price: `{"input": "3", "output": "15"}`, a rate with steps as
    `{"base": "3", "steps": [{"above": 200000, "price": "6"}]}`, beside the parts `request` and `uses`.

    Errors: `InvalidPrice` naming the part: unknown, missing, or no price.
    """
    unknown = sorted(set(rates) - {*PARTS, "request", "uses"})
    if unknown:
        raise InvalidPrice(f'"{unknown[0]}" is no part of a price; the parts are {", ".join(PARTS)}, request and uses')
    for part in ("input", "output"):
        if part not in rates:
            raise InvalidPrice(f'"{part}" is missing: a price names input and output')
    read = {part: _rate_of_json(part, rates[part]) for part in PARTS if part in rates}
    uses = rates.get("uses", {})
    if not isinstance(uses, Mapping):
        raise InvalidPrice('"uses" is no object of names and prices')
    return Price(
        **read,
        request=exact(rates.get("request", 0), "request", _PLACES),
        uses={str(name): exact(price, f"uses.{name}", _PLACES) for name, price in uses.items()},
        free=free,
    )


def _rate_of_json(part: str, value: object) -> Rate:
    if not isinstance(value, Mapping):
        return Rate(exact(value, part))
    steps = value.get("steps", [])
    if set(value) - {"base", "steps"} or "base" not in value or not isinstance(steps, list):
        raise InvalidPrice(f'"{part}" is neither a price nor an object with "base" and "steps"')
    for step in steps:
        if not isinstance(step, Mapping) or set(step) != {"above", "price"}:
            raise InvalidPrice(f'a step of "{part}" is no object with "above" and "price"')
    return Rate(
        exact(value["base"], f"{part}.base"),
        tuple((step["above"], exact(step["price"], f"{part} above {step['above']}")) for step in steps),
    )


@dataclass(frozen=True, slots=True)
class PriceEntry:
    """One price of one model for a time.

    Fields:
        provider: who bills, such as `openai`, `anthropic`, `aws`.
        model: its name, in lower case.
        price: what it costs.
        variant: "" for the usual price, else `batch`, `flex`, `priority` and the like.
        effective_from, effective_until: in force from the first instant up to, not including, the second; None: from
            the beginning, for ever.
        output_max: the most tokens that the model can answer; None: not known.
        input_max: the most tokens that the model takes; None: not known.
        version: the number of the entry in the database's book; None outside of it.
        tenant: whose override it is; None: everybody's.
        source: where it stands.
    """

    provider: str
    model: str
    price: Price
    variant: str = ""
    effective_from: datetime | None = None
    effective_until: datetime | None = None
    output_max: int | None = None
    input_max: int | None = None
    version: int | None = None
    tenant: str | None = None
    source: str | None = None

    def covers(self, at: datetime) -> bool:
        """True when it is in force at an instant."""
        return (self.effective_from is None or self.effective_from <= at) and (
            self.effective_until is None or at < self.effective_until
        )


class PriceBook:
    """Prices of models, effective-dated; those of a tenant go before everybody's.

    Arguments:
        entries: the prices.

    Errors: `PricesOverlap` when two entries of one model, variant and tenant are in force at once.
    """

    def __init__(self, entries: Iterable[PriceEntry]) -> None:
        self._by_name: dict[tuple[str, str, str], list[PriceEntry]] = {}
        for entry in entries:
            self._by_name.setdefault((entry.provider, entry.model, entry.variant), []).append(entry)
        for same in self._by_name.values():
            _require_no_overlap(same)

    def __iter__(self) -> Iterator[PriceEntry]:
        return (entry for same in self._by_name.values() for entry in same)

    def __len__(self) -> int:
        return sum(map(len, self._by_name.values()))

    def find(self, provider: str, model: str, at: datetime | None = None, variant: str = "") -> PriceEntry:
        """Returns the entry that is in force.

        Arguments:
            provider: who bills.
            model: in any spelling that `names.spellings` understands.
            at: the time of the call, with a time zone; None: now.
            variant: "" for the usual price. A variant has a price of its own or none: nothing stands in for it.

        Errors: `UnpricedModel`.
        """
        instant = datetime.now(UTC) if at is None else at
        for name in spellings(model):
            covering = [e for e in self._by_name.get((provider, name, variant), ()) if e.covers(instant)]
            if covering:
                return max(covering, key=lambda entry: entry.tenant is not None)
        what = f'model "{model}" of "{provider}"' + (f', variant "{variant}"' if variant else "")
        raise UnpricedModel(
            f"unpriced_model: the price book has no price for {what} at {instant:%Y-%m-%d %H:%M}",
            "Set one with quota price set, or import it; free models are declared free.",
        )


def _require_no_overlap(same: list[PriceEntry]) -> None:
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    for tenant in {entry.tenant for entry in same}:
        own = sorted((e for e in same if e.tenant == tenant), key=lambda entry: entry.effective_from or first)
        for one, other in itertools.pairwise(own):
            if (one.effective_until or last) > (other.effective_from or first):
                raise PricesOverlap(
                    f'prices_overlap: two prices of "{one.model}" of "{one.provider}" are in force at once, from '
                    f"{one.effective_from or 'the beginning'} and from {other.effective_from or 'the beginning'}",
                    "End the one before the other begins.",
                )
