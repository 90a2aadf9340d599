"""Prices: exact totals, long-context steps, the worst case as a bound, the book and its dates."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.costs.prices import PARTS, Price, PriceBook, PriceEntry, Rate, price_of_json
from quota.costs.tokens import Usage
from quota.errors import InvalidPrice, MalformedUsage, PricesOverlap, UnpricedModel

OPUS = price_of_json(
    {"input": "5", "cached_input": "0.5", "cache_write_5m": "6.25", "cache_write_1h": "10", "output": "25"}
)
LONG = price_of_json(
    {
        "input": {"base": "5", "steps": [{"above": 200_000, "price": "10"}]},
        "output": {"base": "25", "steps": [{"above": 200_000, "price": "37.5"}]},
    }
)


def at(day: int, month: int = 11) -> datetime:
    return datetime(2026, month, day, tzinfo=UTC)


# -- cost -----------------------------------------------------------------------------------------------------------


def test_every_part_at_its_rate() -> None:
    used = Usage(input=1_000, cached_input=2_000, cache_write_5m=400, cache_write_1h=100, output=300)
    assert OPUS.cost(used) == Decimal("0.005") + Decimal("0.001") + Decimal("0.0025") + Decimal("0.001") + Decimal(
        "0.0075"
    )


def test_parts_without_a_rate_cost_what_input_costs_and_an_hour_what_five_minutes_cost() -> None:
    plain = price_of_json({"input": "2", "output": "8"})
    assert plain.cost(Usage(cached_input=10**6, cache_write_5m=10**6, cache_write_1h=10**6)) == 6
    writes = price_of_json({"input": "2", "output": "8", "cache_write_5m": "2.5"})
    assert writes.cost(Usage(cache_write_1h=10**6)) == Decimal("2.5")


@pytest.mark.parametrize(("sent", "dollars"), [(200_000, "1.025"), (200_001, "2.03751")])
def test_above_a_step_the_whole_request_is_dearer(sent: int, dollars: str) -> None:
    assert LONG.cost(Usage(input=sent, output=1_000)) == Decimal(dollars)


def test_all_input_decides_about_the_step_cached_or_not() -> None:
    assert LONG.cost(Usage(cached_input=200_001)) == Decimal("2.00001")


def test_fees_of_a_request_and_of_paid_extras() -> None:
    price = price_of_json({"input": "1", "output": "1", "request": "0.005", "uses": {"web_search": "0.01"}})
    assert price.cost(Usage()) == Decimal("0.005")
    assert price.cost(Usage(uses={"web_search": 3})) == Decimal("0.035")
    with pytest.raises(MalformedUsage, match='2 uses of "code"'):
        price.cost(Usage(uses={"code": 2}))


def test_sound_has_a_price_of_its_own_or_none() -> None:
    assert OPUS.worst(10, 10) == OPUS.worst(10, 10, sound=False)
    with pytest.raises(InvalidPrice, match="input_audio"):
        OPUS.worst(10, 10, sound=True)
    with pytest.raises(MalformedUsage, match="5 tokens of output_audio"):
        OPUS.cost(Usage(output_audio=5))
    spoken = price_of_json({"input": "2.5", "output": "10", "input_audio": "40", "output_audio": "80"})
    assert spoken.worst(10**6, 10**6) == Decimal("12.5")
    assert spoken.worst(10**6, 10**6, sound=True) == 120
    assert spoken.cost(Usage(input_audio=10**6, output_audio=10**6)) == 120


def test_totals_are_exact_in_any_context() -> None:
    price = price_of_json({"input": "0.000001", "output": "999999.999999"})
    used = Usage(input=1, output=10**9)
    with localcontext(prec=3):
        cost = price.cost(used)
        worst = price.worst(1, 10**9)
    assert cost == worst == Decimal("999999999.999000000001")


RATES = st.decimals(0, 1000, places=6)
COUNTS = st.integers(0, 10**6)


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    starts = sorted(draw(st.sets(st.integers(1, 10**6), max_size=3)))
    return Rate(draw(RATES), tuple((start, draw(RATES)) for start in starts))


@st.composite
def prices(draw: st.DrawFn) -> Price:
    some: Any = {part: draw(st.none() | rates()) for part in ("cached_input", "cache_write_5m", "cache_write_1h")}
    request = draw(st.decimals(Decimal("0.000000000001"), 1, places=12))
    return Price(draw(rates()), draw(rates()), **some, request=request)


@given(prices(), st.tuples(*[COUNTS] * 5), COUNTS, COUNTS)
def test_the_worst_case_is_never_below_any_usage_within_its_bounds(
    price: Price, counts: Any, more_in: int, more_out: int
) -> None:
    used = Usage(*counts[:5])
    assert price.worst(used.total_input + more_in, used.output + more_out) >= price.cost(used)


def usage_of(part: str, size: int, output: int) -> Usage:
    named: dict[str, Any] = {part: size, "output": output}
    return Usage(**named)


@given(prices(), COUNTS, COUNTS)
def test_the_worst_case_is_reached(price: Price, sent: int, output: int) -> None:
    """No tighter bound is right: some usage within the bounds costs exactly that."""
    sizes = {sent} | {
        above for part in PARTS if (rate := getattr(price, part)) for above, _ in rate.steps if above < sent
    }
    parts = ("input", "cached_input", "cache_write_5m", "cache_write_1h")
    costs = [price.cost(usage_of(part, size, output)) for size in sizes for part in parts]
    assert price.worst(sent, output) == max(costs)


@given(prices(), st.tuples(*[COUNTS] * 5))
def test_totals_are_exact(price: Price, counts: Any) -> None:
    used = Usage(*counts[:5])
    write = price.cache_write_5m or price.input
    by_hand = [price.input, price.cached_input or price.input, write, price.cache_write_1h or write, price.output]
    expected = sum(
        (Fraction(n) * Fraction(rate.at(used.total_input)) / 10**6 for n, rate in zip(counts, by_hand, strict=True)),
        Fraction(price.request),
    )
    assert Fraction(price.cost(used)) == expected
    assert -Decimal(price.cost(used)).as_tuple().exponent <= 12  # type: ignore[operator]


@given(prices())
def test_json_and_pickle_there_and_back(price: Price) -> None:
    assert price_of_json(price.json()) == price
    assert pickle.loads(pickle.dumps(price)) == price


# -- bad prices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"input": "3"}, '"output" is missing'),
        ({"output": "3"}, '"input" is missing'),
        ({"input": "-3", "output": "15"}, "input is '-3'"),
        ({"input": 3.5, "output": "15"}, "input is 3.5"),
        ({"input": "3", "output": "NaN"}, "output is 'NaN'"),
        ({"input": "3", "output": True}, "output is True"),
        ({"input": "3", "output": "0.0000001"}, "at most 6 decimals"),
        ({"input": "3", "output": "123456.1234560000000000000001"}, "'123456.12.*"),
        ({"input": "3", "output": "123456.123456000000000001"}, "at most 6 decimals"),
        ({"input": "3", "output": Decimal("123456.1234560000000000000000000001")}, "at most 6 decimals"),
        ({"input": "3", "output": Decimal("1e-999999999")}, "at most 6 decimals"),
        ({"input": Decimal("1e999999999"), "output": "1"}, "below 1000000"),
        ({"input": "3", "output": "1000000"}, "below 1000000"),
        ({"input": "3", "output": "15", "thinking": "1"}, '"thinking" is no part of a price'),
        ({"input": "3", "output": "15", "request": "0.0000000000001"}, "at most 12 decimals"),
        ({"input": "3", "output": "15", "uses": "0.1"}, '"uses"'),
        ({"input": {"base": "3", "steps": [{"above": 0, "price": "6"}]}, "output": "15"}, "rise from 1"),
        ({"input": {"base": "3", "steps": [{"above": 5}]}, "output": "15"}, '"above" and "price"'),
        ({"input": {"steps": []}, "output": "15"}, '"input" is neither'),
        ({"input": "0", "output": "0.0"}, "must be declared"),
    ],
)
def test_bad_prices_are_refused_by_name(written: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidPrice, match=told):
        price_of_json(written)


def test_free_is_declared_and_nothing_else_is_free() -> None:
    assert price_of_json({"input": "0", "output": "0"}, free=True).worst(10**6, 10**6) == 0
    with pytest.raises(InvalidPrice, match="declared free, and has a price"):
        price_of_json({"input": "0", "output": "0", "request": "0.1"}, free=True)


# -- the book -------------------------------------------------------------------------------------------------------


def entry(model: str = "opus", price: Price = OPUS, **more: object) -> PriceEntry:
    return PriceEntry("anthropic", model, price, **more)  # type: ignore[arg-type]


def test_no_price_no_call() -> None:
    book = PriceBook([entry()])
    for provider, model, variant in [
        ("anthropic", "opus-2", ""),
        ("openai", "opus", ""),
        ("anthropic", "opus", "batch"),
    ]:
        with pytest.raises(UnpricedModel, match=f'model "{model}"') as caught:
            book.find(provider, model, variant=variant)
        assert (caught.value.name, caught.value.http_status) == ("unpriced_model", 422)


def test_prices_hold_from_their_date_to_the_next() -> None:
    old = entry(price=LONG, effective_until=at(10))
    new = entry(effective_from=at(10), effective_until=at(20))
    book = PriceBook([new, old])
    assert book.find("anthropic", "opus", at(9)).price == LONG
    assert book.find("anthropic", "opus", at(10)).price == OPUS
    with pytest.raises(UnpricedModel):
        book.find("anthropic", "opus", at(20))


def test_overlapping_dates_are_refused() -> None:
    with pytest.raises(PricesOverlap, match="opus"):
        PriceBook([entry(effective_until=at(11)), entry(effective_from=at(10))])
    with pytest.raises(PricesOverlap):
        PriceBook([entry(), entry()])


def test_a_tenants_own_price_goes_first() -> None:
    book = PriceBook([entry(price=LONG), entry(tenant="acme", effective_until=at(10))])
    assert book.find("anthropic", "opus", at(9)).price == OPUS
    assert book.find("anthropic", "opus", at(10)).price == LONG


def test_the_exact_spelling_goes_before_the_family() -> None:
    book = PriceBook([entry("opus", OPUS), entry("opus-2026-01-02", LONG)])
    assert book.find("anthropic", "Opus-2026-01-02").price == LONG
    assert book.find("anthropic", "opus-2026-01-03").price == OPUS
