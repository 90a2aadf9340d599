"""What requests may use at most: input bounds, ceilings by name, answers asked for, parts without a bound."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.costs.estimate import ANTHROPIC, OPENAI, clamped, text_bound
from quota.costs.requests import (
    anthropic_messages,
    bedrock_converse,
    bedrock_invoke,
    openai_chat,
    openai_responses,
)
from quota.errors import MissingCeiling, UnboundedInput

MESSAGES = [{"role": "user", "content": "Say hello"}]
CHAT: dict[str, Any] = {"model": "gpt-4o", "messages": MESSAGES, "max_completion_tokens": 100}
MESSAGE: dict[str, Any] = {"model": "claude-opus-5", "messages": MESSAGES, "max_tokens": 100}
RESPONSE: dict[str, Any] = {"model": "gpt-4o", "input": "Say hello", "max_output_tokens": 100}
CONVERSE: dict[str, Any] = {
    "modelId": "anthropic.claude-opus-4-8-v1:0",
    "messages": [{"role": "user", "content": [{"text": "Say hello"}]}],
    "inferenceConfig": {"maxTokens": 100},
}
INVOKE: dict[str, Any] = {
    "modelId": "anthropic.claude-opus-4-8-v1:0",
    "body": json.dumps({"anthropic_version": "bedrock-2023-05-31", "messages": MESSAGES, "max_tokens": 100}),
}
READERS: list[Any] = [
    (openai_chat, CHAT),
    (openai_responses, RESPONSE),
    (anthropic_messages, MESSAGE),
    (bedrock_converse, CONVERSE),
    (bedrock_invoke, INVOKE),
]
IDS = ["chat", "responses", "messages", "converse", "invoke"]


class NotGiven:
    """The SDKs' own word for an argument that was not passed."""


@pytest.mark.parametrize(("read", "request_"), READERS, ids=IDS)
def test_a_plain_request(read: Any, request_: dict[str, Any]) -> None:
    found = read(request_)
    assert found.model == request_.get("model", request_.get("modelId"))
    assert found.ceiling.total == 100
    assert 9 <= found.input_tokens <= 3_000
    assert (found.unbounded, found.endless, found.variant, found.sound) == ((), (), "", False)


# -- text -----------------------------------------------------------------------------------------------------------


@given(st.text())
def test_no_tokenizer_that_cuts_bytes_makes_more_tokens(text: str) -> None:
    """A token covers a byte at least, of the text or of the text as some tokenizers normalise it first."""
    bound = text_bound(text)
    assert bound >= len(text.encode())
    assert bound >= len(unicodedata.normalize("NFKC", text).encode())


def test_text_that_grows_when_it_is_normalised() -> None:
    assert len("\ufdfa".encode()) == 3
    assert text_bound("\ufdfa") == 33


def test_half_a_surrogate_pair_is_counted_not_a_crash() -> None:
    assert text_bound("\ud800") == 3


def test_a_tokenizer_makes_the_bound_tighter() -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "word " * 1000}]}
    assert openai_chat(long).input_tokens > 5_000
    assert openai_chat(long, tokenizer=lambda text: len(text.split())).input_tokens < 1_200


TEXTS = st.text(max_size=40)


@given(TEXTS, st.lists(TEXTS, max_size=3), TEXTS)
def test_every_text_of_a_request_counts_byte_by_byte(system: str, said: list[str], described: str) -> None:
    texts = sum(text_bound(text) for text in (system, *said, described))
    tool = {"name": "f", "description": described, "input_schema": {"type": "object"}}
    function = {"type": "function", "function": {"name": "f", "description": described}}
    found = [
        openai_chat(
            {**CHAT, "messages": [{"role": "user", "content": t} for t in (system, *said)], "tools": [function]}
        ),
        openai_responses(
            {**RESPONSE, "instructions": system, "input": [{"role": "user", "content": t} for t in said],
             "tools": [{"type": "function", "name": "f", "description": described}]}
        ),
        anthropic_messages(
            {**MESSAGE, "system": system, "messages": [{"role": "user", "content": t} for t in said], "tools": [tool]}
        ),
        bedrock_converse(
            {**CONVERSE, "system": [{"text": system}],
             "messages": [{"role": "user", "content": [{"text": t}]} for t in said],
             "toolConfig": {"tools": [{"toolSpec": {"name": "f", "description": described}}]}}
        ),
    ]  # fmt: skip
    for demand in found:
        assert demand.input_tokens >= texts
        assert not demand.endless


# -- ceilings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "request_", "parameter"),
    [
        (openai_chat, {k: v for k, v in CHAT.items() if k != "max_completion_tokens"}, "max_completion_tokens"),
        (openai_responses, {k: v for k, v in RESPONSE.items() if k != "max_output_tokens"}, "max_output_tokens"),
        (anthropic_messages, {k: v for k, v in MESSAGE.items() if k != "max_tokens"}, "max_tokens"),
        (bedrock_converse, {**CONVERSE, "inferenceConfig": {}}, "inferenceConfig.maxTokens"),
        (bedrock_converse, {k: v for k, v in CONVERSE.items() if k != "inferenceConfig"}, "inferenceConfig.maxTokens"),
        (bedrock_invoke, {**INVOKE, "body": b'{"prompt": "x"}'}, "max_tokens"),
        (openai_chat, {**CHAT, "max_completion_tokens": NotGiven()}, "max_completion_tokens"),
    ],
)
def test_a_missing_output_ceiling_is_refused_by_the_parameters_name(read: Any, request_: Any, parameter: str) -> None:
    with pytest.raises(MissingCeiling, match=f"missing_output_ceiling: {parameter} is missing"):
        read(request_)


@pytest.mark.parametrize("value", [0, -1, 1.5, "100", True, 10**10])
def test_a_ceiling_that_is_none(value: object) -> None:
    with pytest.raises(MissingCeiling, match="max_completion_tokens is"):
        openai_chat({**CHAT, "max_completion_tokens": value})
    with pytest.raises(MissingCeiling, match="n is"):
        openai_chat({**CHAT, "n": value})


def test_the_larger_ceiling_counts() -> None:
    assert openai_chat({**CHAT, "max_tokens": 500}).ceiling.tokens == 500
    assert openai_chat({**CHAT, "max_tokens": 50}).ceiling.tokens == 100


def test_every_answer_asked_for_counts() -> None:
    assert openai_chat({**CHAT, "n": 3}).ceiling.total == 300
    assert openai_chat({**CHAT, "n": 3, "best_of": 5}).ceiling.total == 500


def test_rejected_predictions_are_output_too() -> None:
    found = openai_chat({**CHAT, "n": 2, "prediction": {"type": "content", "content": "x" * 40}})
    assert found.ceiling.total == 200 + 80


@pytest.mark.parametrize(
    "body",
    [
        {"max_gen_len": 7},
        {"max_tokens_to_sample": 7},
        {"textGenerationConfig": {"maxTokenCount": 7}},
        {"inferenceConfig": {"max_new_tokens": 7}},
        {"inferenceConfig": {"maxTokens": 5, "max_new_tokens": 7}},
    ],
)
def test_the_ceilings_of_bodies(body: dict[str, Any]) -> None:
    assert bedrock_invoke({**INVOKE, "body": json.dumps({"prompt": "x", **body})}).ceiling.total == 7


def test_ceilings_are_clamped_to_what_the_model_can_do() -> None:
    demand = openai_chat({**CHAT, "max_completion_tokens": 10**6, "n": 2})
    assert clamped(demand, output_max=16_384).ceiling.total == 32_768
    assert clamped(demand, output_max=None).ceiling.total == 2 * 10**6


def test_a_callers_own_maximum_refuses_a_larger_ceiling() -> None:
    assert clamped(openai_chat(CHAT), tokens_max=100).ceiling.total == 100
    with pytest.raises(MissingCeiling, match="max_completion_tokens is 100, and this caller may ask for 99"):
        clamped(openai_chat(CHAT), tokens_max=99)


# -- what is no text ------------------------------------------------------------------------------------------------


def told(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_pictures_have_a_stated_bound() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    plain = openai_chat({**CHAT, "messages": told()}).input_tokens
    assert openai_chat({**CHAT, "messages": told(picture, picture)}).input_tokens == plain + 2 * OPENAI.image
    source = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    plain = anthropic_messages({**MESSAGE, "messages": told()}).input_tokens
    assert anthropic_messages({**MESSAGE, "messages": told(source)}).input_tokens == plain + ANTHROPIC.image
    found = bedrock_converse(
        {**CONVERSE, "messages": told({"image": {"format": "png", "source": {"bytes": b"\x00" * 9}}})}
    )
    assert found.input_tokens >= OPENAI.image


def test_a_picture_in_a_tools_result() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {"type": "base64"}}]}
    assert anthropic_messages({**MESSAGE, "messages": told(result)}).input_tokens > ANTHROPIC.image


def test_sound_is_bounded_by_its_bytes_and_priced_apart() -> None:
    found = openai_chat(
        {**CHAT, "messages": told({"type": "input_audio", "input_audio": {"data": "A" * 4000, "format": "mp3"}})}
    )
    assert found.sound
    assert found.input_tokens >= 3_000
    assert openai_chat({**CHAT, "audio": {"voice": "x", "format": "mp3"}, "modalities": ["audio"]}).sound


@pytest.mark.parametrize(
    ("read", "request_", "part"),
    [
        (openai_chat, {**CHAT, "messages": told({"type": "file", "file": {"file_id": "a"}})}, "content[0] (file)"),
        (openai_responses, {**RESPONSE, "previous_response_id": "a"}, "previous_response_id"),
        (openai_responses, {**RESPONSE, "prompt": {"id": "a"}}, "prompt"),
        (openai_responses, {**RESPONSE, "input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        (
            anthropic_messages,
            {**MESSAGE, "messages": told({"type": "document", "source": {"type": "base64"}})},
            "messages[0].content[0] (document)",
        ),
        (bedrock_converse, {**CONVERSE, "messages": told({"document": {"name": "a"}})}, "(document)"),
        (bedrock_invoke, {**INVOKE, "body": '{"max_tokens": 9, "images": ["a"]}'}, "body.images"),
    ],
)
def test_parts_without_a_bound_take_the_models_maximum_or_are_refused(read: Any, request_: Any, part: str) -> None:
    demand = read(request_)
    with pytest.raises(UnboundedInput) as caught:
        clamped(demand)
    assert part in str(caught.value)
    assert clamped(demand, input_max=200_000).input_tokens == 200_000
    assert clamped(demand, own_bound=5_000).input_tokens == 5_000


@pytest.mark.parametrize(
    ("read", "request_", "part"),
    [
        (openai_chat, {**CHAT, "web_search_options": {}}, "web_search_options"),
        (openai_responses, {**RESPONSE, "tools": [{"type": "web_search"}]}, "tools[0] (web_search)"),
        (openai_responses, {**RESPONSE, "tools": [{"type": "mcp", "server_url": "x"}]}, "tools[0] (mcp)"),
        (
            anthropic_messages,
            {**MESSAGE, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0] (web_search_20250305)",
        ),
        (anthropic_messages, {**MESSAGE, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (bedrock_converse, {**CONVERSE, "toolConfig": {"tools": [{"systemTool": {"name": "x"}}]}}, "toolConfig.tools"),
    ],
)
def test_tools_that_the_provider_runs_have_no_bound_at_all(read: Any, request_: Any, part: str) -> None:
    demand = read(request_)
    with pytest.raises(UnboundedInput) as caught:
        clamped(demand, input_max=200_000)
    assert part in str(caught.value)
    assert clamped(demand, own_bound=5_000).input_tokens == 5_000


def test_the_models_maximum_makes_the_bound_tighter() -> None:
    demand = openai_chat({**CHAT, "messages": [{"role": "user", "content": "x" * 10_000}]})
    assert clamped(demand, input_max=8_192).input_tokens == 8_192


def test_variants_that_a_request_asks_for() -> None:
    assert openai_chat({**CHAT, "service_tier": "flex"}).variant == "flex"
    assert openai_chat({**CHAT, "service_tier": "default"}).variant == ""
    assert anthropic_messages({**MESSAGE, "speed": "fast"}).variant == "fast"
    assert bedrock_converse({**CONVERSE, "serviceTier": {"type": "priority"}}).variant == "priority"


@pytest.mark.parametrize("body", [b"", b"x", b"[]", None, object()])
def test_a_body_that_is_no_json(body: object) -> None:
    with pytest.raises(UnboundedInput, match="body is no JSON object"):
        bedrock_invoke({**INVOKE, "body": body})


@pytest.mark.parametrize("model", [None, "", " ", 7])
def test_no_model(model: object) -> None:
    with pytest.raises(UnboundedInput, match="model is missing"):
        openai_chat({**CHAT, "model": model})
