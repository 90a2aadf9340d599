"""Metering in front of an ASGI application: Starlette, FastAPI, Django, or any other.

    from quota import AsyncClient
    from quota.integrations.asgi import MeteringMiddleware
    from quota.metering import Policy, Route, page_limit

    app = MeteringMiddleware(app, AsyncClient(), Policy(routes=(Route("/v1/rows", estimate=page_limit(300)),)))

The application stays as it is, but for what it reports (`quota.http.cost_header.set_cost`). It finds its call in
`scope["quota.call"]`, a `quota.metering.Call`, and may `note` what it knows. Nothing is buffered, no connection to the
database is held while it works, and whatever becomes of the request, its hold is closed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

from quota.client import AsyncClient
from quota.client.waiting import undisturbed
from quota.lease import AsyncLeasedBudget
from quota.metering import Answer, Call, Meter, Policy, Request
from quota.metering.answers import no_websockets, of_problem
from quota.metering.call import Outcome

__all__ = ["CALL", "MeteringMiddleware"]

CALL = "quota.call"
"""Where the application finds its call, in the scope."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class MeteringMiddleware:
    """Meters an ASGI application.

    Arguments:
        app: the application.
        client: the ledger. It belongs to the caller, who closes it.
        policy: what is metered how.
    """

    def __init__(self, app: App, client: AsyncClient, policy: Policy | None = None) -> None:
        self.app = app
        self.client = client
        self.meter = Meter(client, policy or Policy())
        self._dropped = self.meter.dropped()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection, request or lifespan."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "websocket":
                await _refuse_websocket(scope, receive, send)
            case "lifespan":
                await self.app(scope, functools.partial(self._until_shutdown, receive), send)
            case _:
                await self.app(scope, receive, send)

    async def close(self) -> None:
        """Gives back what is leased (`Policy.lease`). Done by itself before the application learns of its shutdown."""
        # Together: where the ledger is away each of them waits for its deadline.
        await asyncio.gather(*(cast("AsyncLeasedBudget", budget).close() for budget in self.meter.close()))

    async def _until_shutdown(self, receive: Receive) -> Message:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await self.close()  # now: the application may be about to close the client
        return message

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.meter.call(_request(scope))
        exchange = _Exchange(call, self.client, receive, send)
        try:
            answer = await self.client.drive(call.opening())
            if answer is not None:
                await _answer(answer, scope["method"], send)
                return
            await self.app(self._inner(scope, call), exchange.receive, exchange.send)
        except asyncio.CancelledError:
            exchange.outcome = "gone"
            raise
        except Exception:
            exchange.broke()
            raise
        finally:
            await exchange.close()

    def _inner(self, scope: Scope, call: Call) -> Scope:
        """The scope that the application sees: without what the caller claims, with what is known."""
        headers = [(name, value) for name, value in scope["headers"] if _plain(name) not in self._dropped]
        told = self.meter.policy.subject_header
        if told and call.identity is not None:
            headers.append((told.lower().encode("ascii"), call.identity.subject.encode("utf-8")))
        return {**scope, "headers": headers, CALL: call}


class _Exchange:
    """What passes between the server and the application in one request."""

    def __init__(self, call: Call, client: AsyncClient, receive: Receive, send: Send) -> None:
        self._call = call
        self._client = client
        self._receive = receive
        self._send = send
        self._started = False
        self._ended = False
        # Until it turns out otherwise: an application that returns without an answer has failed.
        self.outcome: Outcome = "failed"

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._ended:
            self.outcome = "gone"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            if self.outcome != "gone":
                self.outcome = "cut"
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())]
            told = await self._client.drive(self._call.responding(message["status"], headers))
            message = {
                **message,
                "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told],
            }
        elif message["type"] in ("http.response.body", "http.response.pathsend"):
            if self._call.counted(message.get("body", b"")):
                await self._client.drive(self._call.extending())
            if not message.get("more_body", False):
                # Before the last piece: who has the whole answer finds it settled, and background work holds no slot.
                self._ended = True
                if self.outcome == "cut":
                    self.outcome = "answered"
                await self.close()
        try:
            await self._send(message)
        except OSError:
            if not self._ended:
                self.outcome = "gone"
            raise

    def broke(self) -> None:
        """The application raised."""
        if self.outcome != "gone":
            self.outcome = "cut" if self._started else "exception"

    async def close(self) -> None:
        if not self._call.is_open:
            return
        cancelled = await undisturbed(self._client.drive(self._call.closing(self.outcome)))
        if cancelled is not None and self.outcome != "gone":
            raise cancelled


@functools.lru_cache(maxsize=256)  # names are the caller's, up to 16 KiB each
def _plain(name: bytes) -> str:
    # Gateways to other protocols take "_" for "-".
    return name.decode("latin-1").lower().replace("_", "-")


def _request(scope: Scope) -> Request:
    headers: dict[str, list[str]] = {}
    for name, value in cast("Iterable[tuple[bytes, bytes]]", scope["headers"]):
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    raw = scope.get("raw_path")
    return Request(
        scope["method"],
        scope["path"],
        scope.get("query_string", b"").decode("latin-1"),
        headers,
        None if raw is None else raw.decode("latin-1"),
    )


async def _answer(answer: Answer, method: str, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else answer.body})


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Nobody counts what flows through a WebSocket, so none is opened."""
    problem = no_websockets()
    await receive()
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        # The server has one answer to this, a 403 without a word.
        await send({"type": "websocket.close", "code": 1008, "reason": problem.name})
        return
    answer = of_problem(problem)
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})
