"""Guards for the `anthropic` package: messages, synchronous and asynchronous, streams included.

    from quota.integrations.anthropic import guarded

    client = guarded(anthropic.Anthropic(), Guard(ledger, "user:7"))
    client.messages.create(model="claude-opus-5", messages=[…], max_tokens=500)

What comes back is the package's own client, with its types and all its methods; only its HTTP client is another one. It
does not repeat calls by itself: one attempt, one hold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

import anthropic
import httpx2

from quota.costs.requests import anthropic_messages
from quota.costs.usages import anthropic_usage
from quota.errors import QuotaError
from quota.integrations.guard import AsyncGuard, Guard
from quota.integrations.transport import AsyncTransport, Dialect, Route, Transport

__all__ = ["dialect", "guarded"]

R = TypeVar("R")


def _variant(told: Mapping[str, Any]) -> str | None:
    usage = told.get("usage")
    if isinstance(usage, Mapping) and usage.get("speed") in ("fast", "standard"):
        return "fast" if usage["speed"] == "fast" else ""
    return None


def _truncated(told: object) -> bool | None:
    why = told.get("stop_reason") if isinstance(told, Mapping) else None
    return None if why is None else why in ("max_tokens", "model_context_window_exceeded")


class _MessageStream:
    """Events of a message: the first one has the usage of the input, later ones the output's total so far."""

    def __init__(self, _body: Mapping[str, Any]) -> None:
        self.usage: object = None
        self.whole = False
        self.variant: str | None = None
        self.truncated: bool | None = None

    def see(self, event: Any) -> bool:
        kind = event.get("type") if isinstance(event, Mapping) else None
        if kind == "message_start":
            message = event.get("message")
            if isinstance(message, Mapping):
                self.usage, self.variant = message.get("usage"), _variant(message)
        elif kind == "message_delta":
            self._more(event.get("usage"))
            self.truncated = _truncated(event.get("delta"))
        elif kind == "message_stop":
            self.whole = True
        return True

    def _more(self, usage: object) -> None:
        if isinstance(usage, Mapping):
            before = self.usage if isinstance(self.usage, Mapping) else {}
            self.usage = {**before, **{name: count for name, count in usage.items() if count is not None}}


def dialect(provider: str = "anthropic") -> Dialect:
    """Returns how the messages API is spoken to. Arguments: `provider`, as the price book names it."""
    route = Route(
        "/messages", anthropic_messages, lambda told: told.get("usage"), anthropic_usage, _variant, _truncated,
        _MessageStream,
    )  # fmt: skip
    return Dialect(provider, (route,), harmless=("/messages/count_tokens",))


def _unwrapped(error: anthropic.APIConnectionError) -> BaseException:
    """The package wraps whatever its HTTP client raises; what the guard has raised is given as it is."""
    return error.__cause__ if isinstance(error.__cause__, QuotaError) else error


def _plainly(request: Any, call_next: Callable[[Any], R]) -> R:
    try:
        return call_next(request)
    except anthropic.APIConnectionError as error:
        raise _unwrapped(error) from None


async def _plainly_async(request: Any, call_next: Callable[[Any], Awaitable[R]]) -> R:
    try:
        return await call_next(request)
    except anthropic.APIConnectionError as error:
        raise _unwrapped(error) from None


@overload
def guarded(
    client: anthropic.Anthropic,
    guard: Guard,
    *,
    provider: str = "anthropic",
    http_client: httpx2.Client | None = None,
) -> anthropic.Anthropic: ...


@overload
def guarded(
    client: anthropic.AsyncAnthropic,
    guard: AsyncGuard,
    *,
    provider: str = "anthropic",
    http_client: httpx2.AsyncClient | None = None,
) -> anthropic.AsyncAnthropic: ...


def guarded(
    client: anthropic.Anthropic | anthropic.AsyncAnthropic,
    guard: Guard | AsyncGuard,
    *,
    provider: str = "anthropic",
    http_client: httpx2.Client | httpx2.AsyncClient | None = None,
) -> anthropic.Anthropic | anthropic.AsyncAnthropic:
    """Returns a client like `client` whose calls are held before they leave, and settled afterwards.

    Arguments:
        client: as you have made it; it stays as it is.
        guard: who spends: a `Guard` for `Anthropic`, an `AsyncGuard` for `AsyncAnthropic`.
        provider: who bills, as the price book names it.
        http_client: what really sends, with your proxies and certificates; None: the package's default.

    Errors: as those of `quota.integrations.openai.guarded`.
    """
    spoken = dialect(provider)
    if isinstance(client, anthropic.AsyncAnthropic) and isinstance(guard, AsyncGuard):
        inner = http_client or anthropic.DefaultAsyncHttpxClient()
        assert isinstance(inner, httpx2.AsyncClient)
        sender = anthropic.DefaultAsyncHttpxClient(transport=AsyncTransport(guard, spoken, inner))
        return client.with_options(http_client=sender, max_retries=0).with_middleware(_plainly_async)
    if isinstance(client, anthropic.Anthropic) and isinstance(guard, Guard):
        plain = http_client or anthropic.DefaultHttpxClient()
        assert isinstance(plain, httpx2.Client)
        passing = anthropic.DefaultHttpxClient(transport=Transport(guard, spoken, plain))
        return client.with_options(http_client=passing, max_retries=0).with_middleware(_plainly)
    raise TypeError(
        f"{type(client).__name__} with {type(guard).__name__}: a Guard goes with Anthropic, an AsyncGuard with Async…"
    )
