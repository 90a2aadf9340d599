"""The forwarder: an ASGI application that hands a request to one upstream, and the answer back, piece by piece.

Nothing is kept but the piece that is on its way; who reads slowly is written to slowly. When either side leaves, or the
time for the upstream is over, the other side learns of it at once: a connection that has been cut short is closed, so
that nobody takes a part for the whole.

What became of a call that has no good answer is noted on the call that the metering around it has placed in the scope,
if there is one: `timeout`, `gone` (the client left), `cut` or `failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from quota.gateway.hygiene import CREDENTIALS, Headers, passed_back
from quota.http.cost_header import COST, read_cost
from quota.http.problems import Problem
from quota.integrations.asgi import CALL
from quota.metering.answers import of_problem

__all__ = ["NO_BOUNDS", "Bounds", "Forwarder", "answer"]

logger = logging.getLogger("quota.gateway")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECT_S = 5.0
UPSTREAM_S = 60.0
CLIENT_S = 60.0
_HEADER_BYTES_MAX = 32 * 1024
_PIECE_BYTES = 64 * 1024
_COST = COST.encode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the upstream may take for one answer.

    Fields:
        upstream_s: seconds that the upstream may keep us waiting, over the whole answer. The time that the client takes
            to send and to read is not the upstream's.
        response_bytes: length of its body.
    """

    upstream_s: float = UPSTREAM_S
    response_bytes: int | None = None


NO_BOUNDS = Bounds()


class Forwarder:
    """Passes requests on to one upstream.

    Arguments:
        upstream: its origin, `http://host:port` or `https://host`.
        bounds: what the upstream may take, by the name of the route.
        withheld: headers, in lower case, that the upstream does not get.
        connect_s: seconds until a connection to it has to stand.
        client_s: seconds that a client may neither send what it announced nor read what it asked for.

    Open it in the loop that serves, and close it there.
    """

    def __init__(
        self,
        upstream: str,
        *,
        bounds: Mapping[str, Bounds] | None = None,
        withheld: Container[bytes] = CREDENTIALS,
        connect_s: float = CONNECT_S,
        client_s: float = CLIENT_S,
    ) -> None:
        self.origin = upstream.rstrip("/")
        self.bounds = bounds or {}
        self.withheld = withheld
        self.client_s = client_s
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open connections to the upstream. Errors: `RuntimeError` when it was not opened."""
        if self._session is None:
            raise RuntimeError("the forwarder is not open")
        return self._session

    async def open(self) -> None:
        """Makes ready for requests; connects to nobody yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, keepalive_timeout=15),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=_PIECE_BYTES,
            max_line_size=_HEADER_BYTES_MAX,
            max_field_size=_HEADER_BYTES_MAX,
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes the connections to the upstream."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request on."""
        call = scope.get(CALL)
        route = None if call is None else call.route
        bounds = NO_BOUNDS if route is None else self.bounds.get(route.name, NO_BOUNDS)
        await _Exchange(self, bounds, scope, receive, send).run()


class _End(Enum):
    """Whom an exchange waits for, and so why it ends when the waiting has no end."""

    UPSTREAM = "timeout"
    CLIENT = "slow client"
    GONE = "gone"


class _Exchange:
    """One request and its answer."""

    def __init__(self, forwarder: Forwarder, bounds: Bounds, scope: Scope, receive: Receive, send: Send) -> None:
        self._forwarder = forwarder
        self._scope = scope
        self._receive = receive
        self._send = send
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(bounds.upstream_s)
        self._waiting_for = _End.UPSTREAM
        self._left_s = self._bounds.upstream_s
        self._told_cost: int | None = None
        self._answering = False
        self._watcher: asyncio.Task[None] | None = None

    async def run(self) -> None:
        first = await self._receive()
        if first["type"] == "http.disconnect":
            self._note("gone")
            return
        try:
            async with self._timer:
                if not first.get("more_body", False):
                    self._has_all()
                async with self._forwarder.session.request(
                    self._scope["method"], self._url(), headers=self._headers(), data=self._body(first),
                    allow_redirects=False,
                ) as response:  # fmt: skip
                    await self._pass_back(response)
        except Problem as problem:
            await self._fail("failed", problem)
        except aiohttp.ConnectionTimeoutError:
            await self._fail("failed", Problem(504, "upstream_timeout", "The upstream cannot be reached in time."))
        except TimeoutError:
            await self._ended()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            logger.warning("%s: %s", self._forwarder.origin, str(error) or type(error).__name__)
            what = "The upstream cannot be reached." if _unreached(error) else "The upstream gave no answer to pass on."
            await self._fail("failed", Problem(502, "bad_gateway", what))
        finally:
            if self._watcher is not None:
                self._watcher.cancel()

    # -- the request -------------------------------------------------------------------------------------------------

    def _url(self) -> URL:
        query = self._scope["query_string"]
        target = self._scope["raw_path"] + (b"?" + query if query else b"")
        # Encoded: not a byte of it is rewritten on its way.
        return URL(self._forwarder.origin + target.decode("ascii"), encoded=True)

    def _headers(self) -> CIMultiDict[str]:
        scope, withheld = self._scope, self._forwarder.withheld
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in scope["headers"]:
            if name == b"host":
                headers["X-Forwarded-Host"] = value.decode("ascii")
            elif name not in withheld:
                headers.add(name.decode("ascii"), value.decode("utf-8"))
        if scope.get("client"):
            headers["X-Forwarded-For"] = scope["client"][0]
        headers["X-Forwarded-Proto"] = scope.get("scheme", "http")
        headers.add("Via", f"{scope['http_version']} quota")
        return headers

    def _body(self, first: Message) -> bytes | AsyncIterator[bytes] | None:
        if first.get("more_body", False):
            return self._pieces(first["body"])
        return bytes(first.get("body", b"")) or None

    async def _pieces(self, piece: bytes) -> AsyncIterator[bytes]:
        """The body as the client sends it. While it keeps us waiting, the upstream's time stands still."""
        more = True
        while True:
            if piece:
                yield piece
            if not more:
                break
            self._wait_for_client(uploading=True)
            message = await self._receive()
            self._wait_for_upstream(uploading=True)
            if message["type"] == "http.disconnect":
                self._end_now()
                # What was announced never comes: the upstream must not take the part for the whole.
                raise ConnectionAbortedError("the client has left")
            piece, more = message.get("body", b""), message.get("more_body", False)
        self._has_all()

    def _has_all(self) -> None:
        """The request is there in full; from now on the client can only wait or leave."""
        self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Waits until the client leaves, and ends the exchange then."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end_now()

    # -- time --------------------------------------------------------------------------------------------------------

    def _wait_for_client(self, *, uploading: bool = False) -> None:
        if uploading and self._answering:
            return  # the answer's clock runs
        now_s, when_s = self._loop.time(), self._timer.when()
        self._left_s = self._bounds.upstream_s if when_s is None else when_s - now_s
        self._waiting_for = _End.CLIENT
        self._timer.reschedule(now_s + self._forwarder.client_s)

    def _wait_for_upstream(self, *, uploading: bool = False) -> None:
        if (uploading and self._answering) or self._waiting_for is not _End.CLIENT:
            return
        self._waiting_for = _End.UPSTREAM
        self._timer.reschedule(self._loop.time() + self._left_s)

    def _end_now(self) -> None:
        self._waiting_for = _End.GONE
        with contextlib.suppress(RuntimeError):  # it is over already
            self._timer.reschedule(self._loop.time())

    # -- the answer --------------------------------------------------------------------------------------------------

    async def _pass_back(self, response: aiohttp.ClientResponse) -> None:
        headers = passed_back(response.raw_headers)
        self._told_cost = read_cost([value.decode("latin-1") for name, value in headers if name == _COST])
        self._judge(response.status, headers)
        most, sent, last = self._bounds.response_bytes, 0, False
        while not last:
            piece = await response.content.readany()
            last = response.content.at_eof()
            sent += len(piece)
            if most is not None and sent > most:
                raise _too_large(most)
            self._wait_for_client()
            if not self._answering:
                # The head goes with the first piece: until then a failure can still be told as one.
                self._answering = True
                await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": piece, "more_body": not last})
            if not last:
                self._wait_for_upstream()
        if self._watcher is None:
            response.close()  # it has answered before it was asked in full; nothing more may follow on this connection

    def _judge(self, status: int, headers: Headers) -> None:
        """Errors: `Problem` 502 for an answer whose end nobody can know, or whose length is beyond its bound."""
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) > 1 or any(not value.isdigit() for value in lengths) or status < 200:
            raise Problem(502, "bad_gateway", "The upstream's answer is malformed.")
        most = self._bounds.response_bytes
        if most is not None and lengths and int(lengths[0]) > most and self._scope["method"] != "HEAD":
            raise _too_large(most)

    # -- bad ends ----------------------------------------------------------------------------------------------------

    async def _ended(self) -> None:
        match self._waiting_for:
            case _End.UPSTREAM:
                bound = f"{self._bounds.upstream_s:g}"
                await self._fail("timeout", Problem(504, "upstream_timeout", f"No answer within {bound} s."))
            case _End.CLIENT:
                await self._fail("gone", Problem(408, "client_timeout", "The body did not come in time."))
            case _End.GONE:
                self._note("gone")

    async def _fail(self, outcome: str, problem: Problem) -> None:
        """Says what is wrong, if there is still somebody and no half of another answer on its way."""
        if self._waiting_for is _End.GONE:
            self._note("gone")
            return
        if self._answering:
            self._note("cut" if outcome == "failed" else outcome)
        else:
            self._note(outcome)
            await answer(self._send, problem, self._scope["method"])

    def _note(self, outcome: str) -> None:
        call = self._scope.get(CALL)
        if call is not None:
            call.note(outcome=outcome, cost=self._told_cost)


def _too_large(most: int) -> Problem:
    return Problem(502, "response_too_large", f"The answer has more than {most} bytes; ask for less.")


def _unreached(error: BaseException) -> bool:
    """True when not a byte of the request can have arrived."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)


async def answer(send: Send, problem: Problem, method: str = "GET") -> None:
    """Answers with a problem, over ASGI. `method`: of the request; HEAD gets no body."""
    whole = of_problem(problem)
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in whole.headers]
    await send({"type": "http.response.start", "status": whole.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else whole.body})
