"""Guards as transports of `httpx2`, under any client that takes an `http_client`.

A request is read as it is about to leave: its worst case is held, or an error of `quota.errors` is raised and nothing
is sent. The answer passes through unchanged but for one thing: where a stream has to be asked for its usage, it is, and
the event that carries it is kept from a caller who did not ask.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from quota.calls import Amount
from quota.client import AsyncHold, Hold
from quota.costs.estimate import Demand
from quota.costs.tokens import Usage
from quota.errors import UnboundedInput
from quota.integrations.guard import AsyncGuard, Attempt, Closing, Guard
from quota.integrations.sse import Events

__all__ = ["AsyncTransport", "Dialect", "Route", "Transport"]

# Nothing has left when one of these is raised.
_NEVER_SENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
)
_REMOVED_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})


class StreamReader(Protocol):
    """Looks at the events of a stream as they pass."""

    usage: object
    whole: bool
    variant: str | None
    truncated: bool | None

    def see(self, event: Any) -> bool:
        """Takes an event; False: the caller did not ask for it."""


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of call.

    Fields:
        path: the end of the URL's path.
        read: reads the request's body into what it may use.
        usage: finds the usage in an answer.
        counted: reads that usage.
        variant: finds how the answer was served, None when it does not say.
        truncated: finds whether the answer ended at its ceiling, None when it does not say.
        stream: makes a reader of a stream's events; takes the request's body.
        prepare: changes the request's body before it is sent, so that a stream reports its usage; None: no need.
    """

    path: str
    read: Callable[..., Demand]
    usage: Callable[[Mapping[str, Any]], object]
    counted: Callable[[object], Usage]
    variant: Callable[[Mapping[str, Any]], str | None]
    truncated: Callable[[Mapping[str, Any]], bool | None]
    stream: Callable[[Mapping[str, Any]], StreamReader]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def operation(self) -> str:
        """What the call is, such as `chat.completions`."""
        return self.path.strip("/").replace("/", ".")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one provider is spoken to.

    Fields:
        provider: who bills, as the price book names it.
        routes: the calls that are guarded.
        harmless: ends of paths that cost nothing, beside everything that is only read or deleted.
    """

    provider: str
    routes: tuple[Route, ...]
    harmless: tuple[str, ...] = ()

    def route(self, request: httpx2.Request) -> Route | None:
        """Returns the route of a request, None for one that costs nothing.

        Errors: `UnboundedInput` for what may cost something and is not guarded.
        """
        path = request.url.path.rstrip("/")
        if request.method == "POST":
            for route in self.routes:
                if path.endswith(route.path):
                    return route
            if not path.endswith(self.harmless):
                raise UnboundedInput(
                    f"POST {path} is not guarded, so nothing bounds what it costs; make it with a client of its own"
                )
        return None


def _body_of(content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UnboundedInput("the request's body is no JSON object, so nothing bounds its tokens")
    return parsed


def _prepared(request: httpx2.Request, route: Route, body: dict[str, Any]) -> httpx2.Request:
    if route.prepare is None or body.get("stream") is not True:
        return request
    changed = route.prepare(dict(body))
    if changed == body:
        return request
    content = json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [(name, value) for name, value in request.headers.multi_items() if name.lower() != "content-length"]
    return httpx2.Request(request.method, request.url, headers=headers, content=content, extensions=request.extensions)


def _passed_on(response: httpx2.Response, stream: Any) -> httpx2.Response:
    """The answer with its bytes as they were decoded."""
    headers = [(n, v) for n, v in response.headers.multi_items() if n.lower() not in _REMOVED_HEADERS]
    extensions = {name: value for name, value in response.extensions.items() if name != "network_stream"}
    return httpx2.Response(response.status_code, headers=headers, stream=stream, extensions=extensions)


def _is_stream(response: httpx2.Response) -> bool:
    return response.is_success and "text/event-stream" in response.headers.get("content-type", "")


def _answer(attempt: Attempt, route: Route, response: httpx2.Response, content: bytes) -> Closing:
    if not response.is_success:
        return attempt.turned_away(response.status_code)
    try:
        told = json.loads(content)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        return attempt.flagged("usage_missing", "the answer is no JSON object")
    return attempt.answered(
        route.counted, route.usage(told), variant=route.variant(told), truncated=route.truncated(told)
    )


def _failed(error: BaseException) -> Closing:
    """How the hold ends when no answer came."""
    if isinstance(error, _NEVER_SENT):
        return Closing(released=True)
    if isinstance(error, httpx2.TimeoutException):
        return Closing(None, "timeout")
    if isinstance(error, Exception):
        return Closing(None, "unknown", {"why": type(error).__name__})
    return Closing(None, "cancelled")


class _Passing:
    """What a stream and its hold have in common: events are looked at, the end is decided once."""

    def __init__(self, attempt: Attempt, route: Route, body: Mapping[str, Any], policy: str) -> None:
        self.attempt = attempt
        self.route = route
        self.policy = policy
        self.reader = route.stream(body)
        self.events = Events()
        self._lowered = False

    def lowered(self) -> dict[str, Amount] | None:
        """What the hold may be lowered to, once: as soon as the stream has told its input."""
        if self._lowered or self.reader.usage is None or self.reader.whole:
            return None
        self._lowered = True
        return self.attempt.lowered(self.route.counted, self.reader.usage)

    def pass_on(self, chunk: bytes) -> bytes:
        return b"".join(event for event, data in self.events.feed(chunk) if data is None or self.reader.see(data))

    def closing(self, error: BaseException | None) -> Closing:
        if self.reader.whole and self.reader.usage is not None:
            return self.attempt.answered(
                self.route.counted, self.reader.usage, variant=self.reader.variant, truncated=self.reader.truncated
            )
        if error is None and self.reader.whole:
            return self.attempt.flagged("usage_missing")
        outcome = "timeout" if isinstance(error, httpx2.TimeoutException) else "cancelled"
        if isinstance(error, Exception) and outcome == "cancelled":
            outcome = "unknown"
        return self.attempt.cut(self.route.counted, self.reader.usage, self.policy, outcome)


class _Stream(httpx2.SyncByteStream):
    def __init__(self, passing: _Passing, response: httpx2.Response, guard: Guard, hold: Hold) -> None:
        self._passing, self._response, self._guard, self._hold = passing, response, guard, hold
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        error: BaseException | None = None
        try:
            for chunk in self._response.iter_bytes():
                passed = self._passing.pass_on(chunk)
                less = self._passing.lowered()
                if less is not None:
                    self._guard.lower(self._hold, less)
                if passed:
                    yield passed
            rest = self._passing.events.rest()
            if rest:
                yield rest
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if self._open:
            self._open = False
            self._guard.close(self._hold, self._passing.closing(error))

    def close(self) -> None:
        self._response.close()
        self._finish(None)


class Transport(httpx2.BaseTransport):
    """Guards what passes through it.

    Arguments: `guard`; `dialect`; `inner`, the client that really sends. It keeps its proxies, limits and certificates.
    """

    def __init__(self, guard: Guard, dialect: Dialect, inner: httpx2.Client) -> None:
        self._guard, self._dialect, self._inner = guard, dialect, inner

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request under a hold. Errors: those of `Guard.hold`, and the inner client's."""
        route = self._dialect.route(request)
        content = request.read()
        if route is None:
            response = self._inner.send(_copied(request, content), stream=True)
            return _passed_on(response, _Plain(response))
        body = _body_of(content)
        attempt, hold = self._guard.hold(self._dialect.provider, route.read, body, route.operation)
        return self._sent(_prepared(_copied(request, content), route, body), route, body, attempt, hold)

    def _sent(
        self, request: httpx2.Request, route: Route, body: dict[str, Any], attempt: Attempt, hold: Hold
    ) -> httpx2.Response:
        hold.sending()
        try:
            response = self._inner.send(request, stream=True, follow_redirects=False)
            if _is_stream(response):
                passing = _Passing(attempt, route, body, self._guard.on_cut)
                return _passed_on(response, _Stream(passing, response, self._guard, hold))
            answer = response.read()
        except BaseException as error:
            self._guard.close(hold, _failed(error))
            raise
        self._guard.close(hold, _answer(attempt, route, response, answer))
        return _passed_on(response, httpx2.ByteStream(answer))

    def close(self) -> None:
        """Closes the inner client."""
        self._inner.close()


def _copied(request: httpx2.Request, content: bytes) -> httpx2.Request:
    return httpx2.Request(
        request.method, request.url, headers=request.headers, content=content, extensions=request.extensions
    )


class _Plain(httpx2.SyncByteStream):
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        yield from self._response.iter_bytes()

    def close(self) -> None:
        self._response.close()


class _AsyncStream(httpx2.AsyncByteStream):
    def __init__(
        self,
        passing: _Passing,
        response: httpx2.Response,
        guard: AsyncGuard,
        hold: AsyncHold,
        close: Callable[[AsyncHold, Closing], Coroutine[Any, Any, None]],
    ) -> None:
        self._passing, self._response, self._guard, self._hold, self._close = passing, response, guard, hold, close
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        error: BaseException | None = None
        try:
            async for chunk in self._response.aiter_bytes():
                passed = self._passing.pass_on(chunk)
                less = self._passing.lowered()
                if less is not None:
                    await self._guard.lower(self._hold, less)
                if passed:
                    yield passed
            rest = self._passing.events.rest()
            if rest:
                yield rest
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._finish(error)

    async def _finish(self, error: BaseException | None) -> None:
        if self._open:
            self._open = False
            await self._close(self._hold, self._passing.closing(error))

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._finish(None)


class _AsyncPlain(httpx2.AsyncByteStream):
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_bytes():
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()


class AsyncTransport(httpx2.AsyncBaseTransport):
    """`Transport`, asynchronous."""

    def __init__(self, guard: AsyncGuard, dialect: Dialect, inner: httpx2.AsyncClient) -> None:
        self._guard, self._dialect, self._inner = guard, dialect, inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """As `Transport.handle_request`."""
        route = self._dialect.route(request)
        content = await request.aread()
        if route is None:
            response = await self._inner.send(_copied(request, content), stream=True)
            return _passed_on(response, _AsyncPlain(response))
        body = _body_of(content)
        attempt, hold = await self._guard.hold(self._dialect.provider, route.read, body, route.operation)
        return await self._sent(_prepared(_copied(request, content), route, body), route, body, attempt, hold)

    async def _sent(
        self, request: httpx2.Request, route: Route, body: dict[str, Any], attempt: Attempt, hold: AsyncHold
    ) -> httpx2.Response:
        hold.sending()
        try:
            response = await self._inner.send(request, stream=True, follow_redirects=False)
            if _is_stream(response):
                passing = _Passing(attempt, route, body, self._guard.on_cut)
                return _passed_on(response, _AsyncStream(passing, response, self._guard, hold, self._close))
            answer = await response.aread()
        except BaseException as error:
            await self._close(hold, _failed(error))
            raise
        await self._close(hold, _answer(attempt, route, response, answer))
        return _passed_on(response, httpx2.ByteStream(answer))

    async def _close(self, hold: AsyncHold, closing: Closing) -> None:
        # A task of its own: a cancellation must not leave the hold open.
        await asyncio.shield(asyncio.ensure_future(self._guard.close(hold, closing)))

    async def aclose(self) -> None:
        """Closes the inner client."""
        await self._inner.aclose()
