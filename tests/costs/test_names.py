"""Names of models: the same model in many spellings, and never another one."""

from __future__ import annotations

import pytest

from quota.costs.names import family, spellings


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("gpt-4o", ("gpt-4o",)),
        ("GPT-4o", ("gpt-4o",)),
        ("openai/gpt-4o-2024-08-06", ("openai/gpt-4o-2024-08-06", "gpt-4o-2024-08-06", "gpt-4o")),
        ("claude-sonnet-4-20250514", ("claude-sonnet-4-20250514", "claude-sonnet-4")),
        ("claude-sonnet-4@20250514", ("claude-sonnet-4@20250514", "claude-sonnet-4")),
        ("models/gemini-2.5-pro", ("models/gemini-2.5-pro", "gemini-2.5-pro")),
    ],
)
def test_prefixes_dates_and_case(given: str, found: tuple[str, ...]) -> None:
    assert spellings(given) == found


@pytest.mark.parametrize(
    "name",
    [
        "gpt-4o-mini",
        "gpt-4o-2024-13-06",  # no date
        "gpt-4o-20241306",
        "gpt-4o-2024-0806",
        "claude-opus-5-latest",
        "gpt-4-1106-preview",
        "ft:gpt-4o-mini:acme::abc",
        "somebody/gpt-4o",
        "claude-v2:1",
        "nemotron-nano-9b-v2:0",
        "mistral-7b-instruct-v0:2",
        "global.anthropic.claude-opus-5",
    ],
)
def test_nothing_is_taken_off_that_makes_another_model(name: str) -> None:
    assert spellings(name) == (name,)


def test_the_region_class_on_bedrock_stays() -> None:
    regional = spellings("us.anthropic.claude-opus-4-8-v1:0")
    assert regional[-1] == "regional.anthropic.claude-opus-4-8"
    assert spellings("jp.anthropic.claude-opus-4-8-v1:0")[1:] == regional[1:]
    assert "regional.anthropic.claude-opus-4-8" in spellings("anthropic.claude-opus-4-8-v1:0")
    assert not any(n.startswith("regional") for n in spellings("global.anthropic.claude-opus-4-8-v1:0"))
    arn = "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-opus-4-8-v1:0"
    assert spellings(arn)[1:] == regional


def test_the_family_is_the_bare_name() -> None:
    assert family("arn:aws:bedrock:eu-west-1:1:inference-profile/eu.anthropic.claude-3-haiku-20240307-v1:0") == (
        "claude-3-haiku"
    )
    assert family("openai/GPT-4o-2024-08-06") == "gpt-4o"
