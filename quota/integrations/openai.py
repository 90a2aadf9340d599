"""Guards for the `openai` package: chat completions and responses, synchronous and asynchronous, streams included.

    from quota.integrations.openai import guarded

    client = guarded(openai.OpenAI(), Guard(ledger, "user:7"))
    client.chat.completions.create(model="gpt-4o", messages=[…], max_completion_tokens=500)

What comes back is the package's own client, with its types and all its methods; only its HTTP client is another one. It
does not repeat calls by itself: one attempt, one hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import httpx2
import openai

from quota.costs.requests import openai_chat, openai_responses
from quota.costs.usages import openai_usage
from quota.integrations.guard import AsyncGuard, Guard
from quota.integrations.transport import AsyncTransport, Dialect, Route, Transport

__all__ = ["dialect", "guarded"]

# What "auto" came to. A tier that has no price of its own is served as usual.
_TIERS = {"default": "", "flex": "flex", "priority": "priority", "fast": "fast"}


def _tier(told: Mapping[str, Any]) -> str | None:
    return _TIERS.get(str(told.get("service_tier")))


def _choices_truncated(told: Mapping[str, Any]) -> bool | None:
    """True when any of the answers ended at its ceiling; None while none has ended."""
    choices = told.get("choices")
    if not isinstance(choices, list):
        return None
    ends = [one.get("finish_reason") for one in choices if isinstance(one, Mapping)]
    return "length" in ends if any(ends) else None


def _response_truncated(told: Mapping[str, Any]) -> bool | None:
    why = told.get("incomplete_details")
    if told.get("status") == "incomplete":
        return isinstance(why, Mapping) and why.get("reason") == "max_output_tokens"
    return False if told.get("status") == "completed" else None


class _ChatStream:
    """Chunks of a chat completion; the last one has the usage, if it was asked for."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options")
        self._asked = isinstance(options, Mapping) and options.get("include_usage") is True
        self.usage: object = None
        self.whole = False
        self.variant: str | None = None
        self.truncated: bool | None = None

    def see(self, event: Any) -> bool:
        if not isinstance(event, Mapping):
            return True
        self.variant = _tier(event) or self.variant
        ended = _choices_truncated(event)
        self.truncated = self.truncated if ended is None else ended or bool(self.truncated)
        if event.get("usage") is None:
            return True
        self.usage = event["usage"]
        self.whole = True
        return self._asked or bool(event.get("choices"))


def _ask_for_usage(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options")
    return {**body, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}


class _ResponseStream:
    """Events of a response; the closing one holds the whole response."""

    def __init__(self, _body: Mapping[str, Any]) -> None:
        self.usage: object = None
        self.whole = False
        self.variant: str | None = None
        self.truncated: bool | None = None

    def see(self, event: Any) -> bool:
        if isinstance(event, Mapping) and event.get("type") in (
            "response.completed",
            "response.incomplete",
            "response.failed",
        ):
            response = event.get("response")
            if isinstance(response, Mapping):
                self.usage, self.variant = response.get("usage"), _tier(response)
                self.truncated = _response_truncated(response)
            self.whole = True
        return True


def dialect(provider: str = "openai") -> Dialect:
    """Returns how an OpenAI-compatible API is spoken to. Arguments: `provider`, as the price book names it."""
    return Dialect(
        provider,
        (
            Route(
                "/chat/completions", openai_chat, lambda told: told.get("usage"), openai_usage, _tier,
                _choices_truncated, _ChatStream, _ask_for_usage,
            ),
            Route(
                "/responses", openai_responses, lambda told: told.get("usage"), openai_usage, _tier,
                _response_truncated, _ResponseStream,
            ),
        ),
        harmless=("/cancel", "/input_tokens", "/moderations"),
    )  # fmt: skip


@overload
def guarded(
    client: openai.OpenAI, guard: Guard, *, provider: str = "openai", http_client: httpx2.Client | None = None
) -> openai.OpenAI: ...


@overload
def guarded(
    client: openai.AsyncOpenAI,
    guard: AsyncGuard,
    *,
    provider: str = "openai",
    http_client: httpx2.AsyncClient | None = None,
) -> openai.AsyncOpenAI: ...


def guarded(
    client: openai.OpenAI | openai.AsyncOpenAI,
    guard: Guard | AsyncGuard,
    *,
    provider: str = "openai",
    http_client: httpx2.Client | httpx2.AsyncClient | None = None,
) -> openai.OpenAI | openai.AsyncOpenAI:
    """Returns a client like `client` whose calls are held before they leave, and settled afterwards.

    Arguments:
        client: as you have made it; it stays as it is.
        guard: who spends: a `Guard` for `OpenAI`, an `AsyncGuard` for `AsyncOpenAI`.
        provider: who bills, as the price book names it: other providers speak this API too.
        http_client: what really sends, with your proxies and certificates; None: the package's default.

    Errors, from calls, before anything is sent: `Refused`, `UnpricedModel`, and the `CostError`s: a missing ceiling, a
    part of the request without a bound, a call that is not guarded. They are not wrapped in errors of the package.
    """
    spoken = dialect(provider)
    if isinstance(client, openai.AsyncOpenAI) and isinstance(guard, AsyncGuard):
        inner = http_client or openai.DefaultAsyncHttpxClient()
        assert isinstance(inner, httpx2.AsyncClient)
        sender = openai.DefaultAsyncHttpxClient(transport=AsyncTransport(guard, spoken, inner))
        return client.with_options(http_client=sender, max_retries=0)
    if isinstance(client, openai.OpenAI) and isinstance(guard, Guard):
        plain = http_client or openai.DefaultHttpxClient()
        assert isinstance(plain, httpx2.Client)
        return client.with_options(
            http_client=openai.DefaultHttpxClient(transport=Transport(guard, spoken, plain)), max_retries=0
        )
    raise TypeError(
        f"{type(client).__name__} with {type(guard).__name__}: a Guard goes with OpenAI, an AsyncGuard with AsyncOpenAI"
    )
