"""What providers report as usage, read into `Usage`. Anything that cannot be is `MalformedUsage`, never corrected.

| provider | input tokens | are |
|---|---|---|
| openai | `prompt_tokens`, `input_tokens` | all that was sent, cached tokens among them |
| anthropic | `input_tokens` | what neither came from a cache nor went into one |
| bedrock | `inputTokens` | as anthropic |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quota.costs.tokens import TOKENS_MAX, Usage
from quota.errors import MalformedUsage

__all__ = ["anthropic_usage", "bedrock_usage", "openai_usage"]


def _object(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise MalformedUsage(f"{what} is {value!r:.60}, no object")
    return value


def _count(told: Mapping[str, Any], name: str, *, required: bool = False) -> int:
    value = told.get(name)
    if value is None and not required:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= TOKENS_MAX:
        raise MalformedUsage(f"{name} is {value!r:.60}, not a whole number from 0 to {TOKENS_MAX}")
    return value


def openai_usage(usage: object) -> Usage:
    """Reads the usage of a chat completion or of a response.

    Errors: `MalformedUsage` when a count is missing, is none, or a part exceeds its whole.
    """
    told = _object(usage, "usage")
    chat = "prompt_tokens" in told
    sent = _count(told, "prompt_tokens" if chat else "input_tokens", required=True)
    back = _count(told, "completion_tokens" if chat else "output_tokens", required=True)
    into = _object(told.get("prompt_tokens_details" if chat else "input_tokens_details"), "details of the input")
    out = _object(told.get("completion_tokens_details" if chat else "output_tokens_details"), "details of the output")
    cached, written = _count(into, "cached_tokens"), _count(into, "cache_write_tokens")
    heard, said = _count(into, "audio_tokens"), _count(out, "audio_tokens")
    if cached + written > sent or heard > sent or said > back:
        raise MalformedUsage(
            f"of {sent} tokens in and {back} out, {cached} + {written} are cached, {heard} + {said} audio"
        )
    # Sound may be cached as well; nobody says how much of it, so it counts as not cached, which is never cheaper.
    cached = min(cached, sent - heard - written) if heard else cached
    return Usage(
        input=sent - cached - written - heard,
        cached_input=cached,
        cache_write_5m=written,
        output=back - said,
        input_audio=heard,
        output_audio=said,
    )


def anthropic_usage(usage: object) -> Usage:
    """Reads the usage of a message. Errors: as in `openai_usage`."""
    told = _object(usage, "usage")
    written = _count(told, "cache_creation_input_tokens")
    split = _object(told.get("cache_creation"), "cache_creation")
    hour = _count(split, "ephemeral_1h_input_tokens")
    if hour > written:
        raise MalformedUsage(f"{hour} tokens are written for an hour, of {written} that are written")
    uses = {
        name.removesuffix("_requests"): _count(_object(told.get("server_tool_use"), "server_tool_use"), name)
        for name in _object(told.get("server_tool_use"), "server_tool_use")
        if name.endswith("_requests")
    }
    return Usage(
        input=_count(told, "input_tokens", required=True),
        cached_input=_count(told, "cache_read_input_tokens"),
        cache_write_5m=written - hour,
        cache_write_1h=hour,
        output=_count(told, "output_tokens", required=True),
        uses={name: count for name, count in uses.items() if count},
    )


def bedrock_usage(usage: object) -> Usage:
    """Reads the usage of a `converse` answer. Errors: as in `openai_usage`."""
    told = _object(usage, "usage")
    written = _count(told, "cacheWriteInputTokens")
    details = told.get("cacheDetails") or []
    if not isinstance(details, list):
        raise MalformedUsage(f"cacheDetails is {details!r:.60}, no list")
    hour = sum(
        _count(_object(one, "cacheDetails"), "inputTokens")
        for one in details
        if _object(one, "cacheDetails").get("ttl") == "1h"
    )
    if hour > written:
        raise MalformedUsage(f"{hour} tokens are written for an hour, of {written} that are written")
    return Usage(
        input=_count(told, "inputTokens", required=True),
        cached_input=_count(told, "cacheReadInputTokens"),
        cache_write_5m=written - hour,
        cache_write_1h=hour,
        output=_count(told, "outputTokens", required=True),
    )
