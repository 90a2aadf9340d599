"""Price maps: what is read, what is left out, and that the package's own sums agree."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from quota.costs.catalogs import Catalog, read_catalog
from quota.costs.genai import genai_prices
from quota.costs.prices import PriceBook
from quota.costs.tokens import Usage
from quota.errors import InvalidPrice, PricesOverlap, UnpricedModel

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def problems(catalog: Catalog) -> dict[str, str]:
    return {remark.model: remark.problem for remark in catalog.remarks if not remark.imported}


# -- LiteLLM's ------------------------------------------------------------------------------------------------------

LITELLM = """{
  "sample_spec": {"litellm_provider": "one of them", "input_cost_per_token": 0.0},
  "gpt-x": {"litellm_provider": "openai", "max_output_tokens": 16384, "max_input_tokens": 128000,
            "input_cost_per_token": 2.5e-06, "output_cost_per_token": 1e-05, "cache_read_input_token_cost": 1.25e-06,
            "input_cost_per_token_batches": 1.25e-06, "output_cost_per_token_batches": 5e-06},
  "long": {"litellm_provider": "anthropic", "max_output_tokens": "64000",
           "input_cost_per_token": 3e-06, "input_cost_per_token_above_200k_tokens": 6e-06,
           "output_cost_per_token": 1.5e-05, "output_cost_per_token_above_200k_tokens": 2.25e-05,
           "cache_creation_input_token_cost": 3.75e-06, "cache_creation_input_token_cost_above_1hr": 6e-06},
  "bedrock/us.m": {"litellm_provider": "bedrock_converse", "input_cost_per_token": 1e-06,
                   "output_cost_per_token": 2e-06},
  "no-output": {"litellm_provider": "openai", "input_cost_per_token": 1e-06},
  "nothing": {"litellm_provider": "openai", "input_cost_per_token": 0, "output_cost_per_token": 0.0},
  "fine": {"litellm_provider": "openai", "input_cost_per_token": 1e-14, "output_cost_per_token": 1e-06},
  "below": {"litellm_provider": "openai", "input_cost_per_token": -1e-06, "output_cost_per_token": 1e-06}
}"""


def test_litellms_map() -> None:
    catalog = read_catalog(LITELLM, source="a test")
    book = PriceBook(catalog.entries)
    found = book.find("openai", "gpt-x")
    assert found.price.json() == {"input": "2.5", "cached_input": "1.25", "output": "10"}
    assert (found.output_max, found.input_max, found.source) == (16_384, 128_000, "a test")
    assert book.find("openai", "gpt-x", variant="batch").price.json()["output"] == "5"
    long = book.find("anthropic", "long").price
    assert long.cost(Usage(input=200_001, output=1)) == Decimal("1.2000285")
    assert long.json()["cache_write_1h"] == "6"
    assert book.find("aws", "us.m").price == book.find("aws", "bedrock/us.m").price


def test_litellms_map_reports_what_is_no_price() -> None:
    catalog = read_catalog(LITELLM)
    found = problems(catalog)
    assert found["no-output"] == "no price for output"
    assert "zero" in found["nothing"]
    assert "at most 6 decimals" in found["fine"]
    assert "at least 0" in found["below"]
    assert [(r.model, r.problem) for r in catalog.remarks if r.imported] == [("bedrock/us.m", "no output maximum")]
    with pytest.raises(UnpricedModel):
        PriceBook(catalog.entries).find("openai", "nothing")


def test_only_the_providers_asked_for() -> None:
    catalog = read_catalog(LITELLM, providers=["anthropic"])
    assert {entry.provider for entry in catalog.entries} == {"anthropic"}
    assert catalog.remarks == ()


# -- models.dev's and OpenRouter's ------------------------------------------------------------------------------------


def test_models_devs_map() -> None:
    told: dict[str, Any] = {
        "amazon-bedrock": {
            "models": {
                "M": {
                    "cost": {"input": 3, "output": 15.5, "cache_read": 0.3, "context_over_200k": {"input": 6}},
                    "limit": {"context": 1_000_000, "output": 64_000},
                },
                "unpriced": {"limit": {"output": 5}},
            }
        }
    }
    catalog = read_catalog(json.dumps(told))
    found = PriceBook(catalog.entries).find("aws", "m")
    assert found.price.json() == {
        "input": {"base": "3", "steps": [{"above": 200_000, "price": "6"}]},
        "cached_input": "0.3",
        "output": "15.5",
    }
    assert (found.input_max, found.output_max) == (1_000_000, 64_000)
    assert problems(catalog) == {"unpriced": "no price for input"}


def test_openrouters_map() -> None:
    pricing = {"prompt": "0.0000025", "completion": "0.00001", "request": "0.001", "web_search": "0.01"}
    told = {"data": [{"id": "openai/GPT", "pricing": pricing, "top_provider": {"max_completion_tokens": 9}}]}
    found = PriceBook(read_catalog(json.dumps(told)).entries).find("openrouter", "openai/gpt")
    assert found.price.cost(Usage(input=2, output=1, uses={"web_search": 1})) == Decimal("0.011015")
    assert found.output_max == 9


# -- quota's own ----------------------------------------------------------------------------------------------------


def test_quotas_own_list() -> None:
    told = [
        {"provider": "Acme", "model": "Own", "rates": {"input": "1", "output": 2},
         "effective_until": "2026-11-01T00:00Z"},
        {"provider": "acme", "model": "own", "rates": {"input": "3", "output": "4"}, "output_max": 5,
         "effective_from": "2026-11-01T00:00+00:00"},
        {"provider": "acme", "model": "gift", "rates": {"input": 0, "output": 0}, "free": True},
    ]  # fmt: skip
    book = PriceBook(read_catalog(json.dumps(told)).entries)
    assert book.find("acme", "own", NOW).price.json() == {"input": "3", "output": "4"}
    assert book.find("acme", "own", datetime(2026, 10, 31, tzinfo=UTC)).price.json() == {"input": "1", "output": "2"}
    assert book.find("acme", "gift").price.free


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no JSON: .*line 1"),
        ('{"a": 1, "a": 2}', 'the key "a" stands twice'),
        ("[]x", "no JSON"),
        ('{"a": {"b": 1}}', "none of the known shapes"),
        ("7", "none of the known shapes"),
        ('[{"provider": "a", "model": "b", "rates": {}, "price": 1}]', 'entry 1: "price" is no field'),
        ('[{"provider": "a", "rates": {}}]', "entry 1"),
        (
            '[{"provider": "a", "model": "b", "rates": {"input": 1, "output": 1}, "effective_from": "2026-11-01"}]',
            "no time with a zone",
        ),
    ],
)
def test_what_is_no_price_map(text: str, told: str) -> None:
    with pytest.raises(InvalidPrice, match=told):
        read_catalog(text)


# -- genai-prices -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packaged() -> Catalog:
    return genai_prices(["openai", "anthropic", "aws"])


def test_the_packages_own_sums_agree(packaged: Catalog) -> None:
    """Every usual price that was taken over costs what the package says that it costs."""
    from genai_prices import Usage as TheirUsage
    from genai_prices.data import providers

    by_id = {provider.id: provider for provider in providers}
    compared = 0
    for entry in PriceBook(packaged.entries):
        provider = by_id[entry.provider]
        model = next((m for m in provider.models if m.id == entry.model), None) or provider.find_model(entry.model)
        if entry.variant or not entry.covers(NOW) or model is None:
            continue
        for size in (1_000, 300_000):
            used = TheirUsage(input_tokens=size, cache_read_tokens=300, output_tokens=700)
            sum_ = model.calc_price(used, provider, genai_request_timestamp=NOW, auto_update_timestamp=None)
            ours = Usage(input=size - 300, cached_input=300, output=700)
            assert entry.price.cost(ours) - entry.price.request == sum_.total_price, entry.model
        compared += 1
    assert compared > 200


def test_snapshots_keep_their_own_price(packaged: Catalog) -> None:
    book = PriceBook(packaged.entries)
    assert book.find("openai", "gpt-4o-2024-05-13").price.json()["input"] == "5"
    assert book.find("openai", "openai/GPT-4o-2024-11-20").price.json()["input"] == "2.5"


def test_regions_on_bedrock_keep_theirs(packaged: Catalog) -> None:
    book = PriceBook(packaged.entries)
    regional = book.find("aws", "us.anthropic.claude-opus-5", NOW).price
    assert book.find("aws", "eu.anthropic.claude-opus-4-8", NOW).price == regional, "the id without its revision"
    worldwide = book.find("aws", "global.anthropic.claude-opus-5", NOW).price
    assert regional.cost(Usage(input=10)) > worldwide.cost(Usage(input=10))


def test_batches_have_a_price_from_their_date_on(packaged: Catalog) -> None:
    book = PriceBook(packaged.entries)
    assert book.find("anthropic", "claude-opus-5", NOW, "batch").price.cost(Usage(input=2)) == Decimal("0.000005")
    with pytest.raises(UnpricedModel):
        book.find("anthropic", "claude-opus-5", datetime(2026, 10, 13, tzinfo=UTC), "batch")


@pytest.mark.parametrize("model", ["gpt-4o-turbo", "claude-opus-5-ultra", "gpt", "claude-opus-4-88"])
def test_names_that_only_begin_alike_are_other_models(packaged: Catalog, model: str) -> None:
    book = PriceBook(packaged.entries)
    for provider in ("openai", "anthropic", "aws"):
        with pytest.raises(UnpricedModel):
            book.find(provider, model)


def test_the_package_lacks_output_maxima_and_that_is_said(packaged: Catalog) -> None:
    assert any(r.problem == "no output maximum" and r.imported for r in packaged.remarks)
    assert any(r.problem == "no price for output" and not r.imported for r in packaged.remarks)


def test_a_provider_that_nobody_knows() -> None:
    with pytest.raises(InvalidPrice, match='no provider "opnai"'):
        genai_prices(["opnai"])


# -- bad input ------------------------------------------------------------------------------------------------------

OWN: dict[str, Any] = {"provider": "acme", "model": "m", "rates": {"input": "1", "output": "2"}}


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ([OWN, OWN], InvalidPrice, "entry 2: .* stands twice"),
        ([OWN, {**OWN, "effective_from": "2030-01-01T00:00Z"}], PricesOverlap, "in force at once"),
        (
            [{**OWN, "effective_from": "2030-01-02T00:00Z", "effective_until": "2030-01-01T00:00Z"}],
            InvalidPrice,
            "entry 1: it ends at 2030-01-01",
        ),
        ([{**OWN, "variant": "B!"}], InvalidPrice, 'entry 1: "variant" is "B!"'),
        ([{**OWN, "effective_from": "2030-01-01"}], InvalidPrice, "no time with a zone"),
    ],
)
def test_a_list_of_ones_own_is_refused_as_a_whole(told: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_catalog(json.dumps(told))


JUNK: list[Any] = [None, 7, "x", [], ["prompt"], {}, {"input": {}}, {"prompt": []}, {"input": "x", "output": None}]


@pytest.mark.parametrize("junk", JUNK)
def test_maps_of_another_shape_are_remarks_and_no_crash(junk: Any) -> None:
    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}
    maps: list[dict[str, Any]] = [
        {"p": {"models": {"m": junk, "n": {"cost": junk, "limit": junk}}}},
        {"data": [{"id": "m", "pricing": junk}, {"id": "n", "pricing": junk, "top_provider": junk}]},
        {
            "m": {"litellm_provider": "openai", "input_cost_per_token": junk, "output_cost_per_token": junk},
            "n": {"litellm_provider": "openai", **price, "max_output_tokens": junk, "input_cost_per_token": junk},
        },
    ]
    for told in maps:
        catalog = read_catalog(json.dumps(told))
        assert catalog.entries == ()
        assert set(problems(catalog)) == {"m", "n"}


@pytest.mark.parametrize(
    "number", ["1e999999999", "1e-999999999", "-1e999999999", "1" + "0" * 4000, "1e99999999999999999"]
)
def test_numbers_out_of_all_bounds_cost_no_time(number: str) -> None:
    costs = f'"input_cost_per_token": {number}, "output_cost_per_token": {number}'
    maps = [
        f'{{"m": {{"litellm_provider": "openai", {costs}}}}}',
        f'{{"data": [{{"id": "m", "pricing": {{"prompt": "{number}", "completion": {number}}}}}]}}',
        f'[{{"provider": "p", "model": "m", "rates": {{"input": {number}, "output": 1}}}}]',
    ]
    for told in maps:
        assert read_catalog(told).entries == ()
    bounded = f'[{{"provider": "p", "model": "m", "rates": {{"input": 1, "output": 1}}, "output_max": {number}}}]'
    assert [entry.output_max for entry in read_catalog(bounded).entries] == [None]
