"""Quota tokens: the numbers of the field report, the multipliers as data, and the bound of the worst case."""

from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.costs.tokens import BURNDOWNS, Burndown, QuotaTokens, Usage, quota_tokens_of
from quota.errors import MalformedUsage, UnknownBurndown

DAY = date(2026, 11, 30)
FIVE = QuotaTokens(5)


@pytest.mark.parametrize(("max_tokens", "provider", "worst"), [(32_000, 36_000, 164_000), (1_250, 5_250, 10_250)])
def test_the_two_scenarios_hold_by_their_ceilings_and_settle_alike(max_tokens: int, provider: int, worst: int) -> None:
    """Input 3,000, cache write 1,000, output 1,000 at 5x."""
    used = Usage(input=3_000, cache_write_5m=1_000, output=1_000)
    assert FIVE.held(used.total_input, max_tokens, "provider") == {"quota_tokens": provider}
    assert FIVE.held(used.total_input, max_tokens, "worst") == {"quota_tokens": worst}
    assert FIVE.settled(used) == {"quota_tokens": 9_000}


def test_billing_and_quota_are_two_formulas() -> None:
    used = Usage(input=1_000, output=100)
    assert used.billed_tokens == 1_100
    assert FIVE.settled(used) == {"quota_tokens": 1_500}


def test_cache_reads_are_billed_and_take_no_quota() -> None:
    used = Usage(input=10, cached_input=50_000, cache_write_1h=7, output=1)
    assert used.billed_tokens == 50_018
    assert FIVE.settled(used) == {"quota_tokens": 22}
    assert FIVE.held(used.total_input, 1, "provider") == {"quota_tokens": 50_018}, "held before anybody knows"


@pytest.mark.parametrize(
    ("model", "multiplier"),
    [
        ("claude-opus-4-8", 15),
        ("us.anthropic.claude-opus-4-8-v1:0", 15),
        ("anthropic.claude-sonnet-4-8-20260101-v1:0", 15),
        ("claude-sonnet-5", 10),
        ("global.anthropic.claude-opus-5", 10),
        ("Claude-Opus-4-7", 5),
        ("eu.anthropic.claude-sonnet-4-20250514-v1:0", 5),
        ("anthropic.claude-haiku-4-5-20251001-v1:0", 5),
        ("anthropic.claude-3-5-sonnet-20241022-v2:0", 5),
        ("anthropic.claude-3-haiku-20240307-v1:0", 5),
        ("anthropic.claude-v2:1", 5),
        ("anthropic.claude-instant-v1", 5),
        ("openai.gpt-5.6-sol", 10),
        ("openai.gpt-5.6-luna", 10),
        ("openai.gpt-oss-120b-1:0", 1),
        ("amazon.nova-pro-v1:0", 1),
        ("meta.llama3-3-70b-instruct-v1:0", 1),
    ],
)
def test_multipliers_on_bedrock_runtime(model: str, multiplier: int) -> None:
    assert quota_tokens_of(model, "bedrock-runtime", DAY) == QuotaTokens(multiplier)


@pytest.mark.parametrize("model", ["claude-opus-5-5", "claude-haiku-6", "claude-opus-4-9", "claude-opus-48"])
def test_a_claude_that_the_table_does_not_know_is_not_guessed(model: str) -> None:
    with pytest.raises(UnknownBurndown, match=model):
        quota_tokens_of(model, "bedrock-runtime", DAY)


def test_mantle_splits_input_and_output_and_burns_nothing_down() -> None:
    mantle = quota_tokens_of("claude-opus-4-8", "bedrock-mantle", DAY)
    used = Usage(input=100, cached_input=30, cache_write_5m=20, output=10)
    assert mantle.held(150, 1_000) == {"quota_input_tokens": 150, "quota_output_tokens": 1_000}
    assert mantle.settled(used) == {"quota_input_tokens": 120, "quota_output_tokens": 10}


def test_other_endpoints_count_one_to_one() -> None:
    assert quota_tokens_of("claude-opus-4-8", "api.anthropic.com", DAY) == QuotaTokens(1)


def test_a_multiplier_holds_from_its_day_on() -> None:
    table = (Burndown("m", 5), Burndown("m", 7, effective_from=date(2026, 12, 1)), Burndown(".*", 1))
    assert quota_tokens_of("m", "bedrock-runtime", date(2026, 11, 30), table) == QuotaTokens(5)
    assert quota_tokens_of("m", "bedrock-runtime", date(2026, 12, 1), table) == QuotaTokens(7)
    later = (Burndown("m", 7, effective_from=date(2026, 12, 1)), Burndown(".*", 2))
    assert quota_tokens_of("m", "bedrock-runtime", date(2026, 11, 30), later) == QuotaTokens(2)


def test_every_line_of_the_table_has_a_source() -> None:
    assert all(line.source.startswith("https://") for line in BURNDOWNS)


@pytest.mark.parametrize("count", [-1, True, 1.5, "7", 10**9 + 1, None])
def test_absurd_usage_is_malformed(count: object) -> None:
    with pytest.raises(MalformedUsage, match="output is"):
        Usage(output=count)  # type: ignore[arg-type]
    with pytest.raises(MalformedUsage, match="web_search is"):
        Usage(uses={"web_search": count})  # type: ignore[dict-item]


COUNTS = st.integers(0, 10**6)


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.integers(1, 20), st.booleans(), COUNTS)
def test_the_worst_hold_is_never_below_the_settle(
    plain: int, cached: int, write: int, write_1h: int, output: int, multiplier: int, split: bool, more: int
) -> None:
    formula = QuotaTokens(1 if split else multiplier, split)
    used = Usage(plain, cached, write, write_1h, output)
    held = formula.held(used.total_input + more, output + more, "worst")
    settled = formula.settled(used)
    assert held.keys() == settled.keys()
    assert all(held[unit] >= settled[unit] for unit in held)
