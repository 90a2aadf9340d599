"""Applications behind the middleware, both kinds of server protocol played by hand, and a ledger to look into."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs

from quota import AsyncClient, Client, credentials
from quota.calls import CreateKey
from quota.integrations import asgi, wsgi
from quota.metering import Policy
from tests.server import Connection

JSON = "application/json"


@dataclass
class Seen:
    """What a caller got: `broken` when the answer ended by an error."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    broken: BaseException | None = None


class Failure(Exception):  # noqa: N818 - what it is
    """What applications here raise."""


def options(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


def behaviour(query: str, note: Callable[..., None]) -> tuple[int, list[tuple[str, str]], list[bytes | Failure], bool]:
    """What an application does for a query: status, headers, pieces of its answer, whether it flows.

    `cost`: what it reports; `fail`: where it raises (before, mid, close), or which status it answers; `stream`.
    """
    asked = options(query)
    fail, stream = asked.get("fail", ""), "stream" in asked
    if "note" in asked:
        note(outcome=asked["note"])
    if fail == "before":
        raise Failure("before")
    status = int(fail) if fail.isdigit() else int(asked.get("status", "200"))
    pieces: list[bytes | Failure] = [b"row\n", b"row\n", b"row\n"]
    headers = [("Content-Type", "text/plain")]
    if "cost" in asked:
        headers.append(("x-agent-cost", asked["cost"]))
    if not stream:
        headers.append(("Content-Length", "12"))
    if fail == "mid":
        pieces[1] = Failure("mid")
    if fail == "first":
        pieces[0] = Failure("first")
    if fail == "end":
        pieces.append(Failure("end"))
    return status, headers, pieces, stream


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    """The application, asynchronous."""
    if scope["path"] == "/late":  # knows what it cost when all is said
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"row\n", "more_body": True})
        scope[asgi.CALL].note(cost=77, rows=77)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if scope["path"] == "/echo":
        seen = b"\n".join(name + b": " + value for name, value in scope["headers"])
        head = [(b"content-length", str(len(seen)).encode()), (b"x-agent-cost", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": seen})
        return
    call = scope.get(asgi.CALL)
    query = scope["query_string"].decode()
    status, headers, pieces, _ = behaviour(query, call.note if call else lambda **_: None)
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers]
    if options(query).get("fail") == "silent":
        return
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    for piece in pieces:
        if isinstance(piece, Failure):
            raise piece
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        if options(query).get("fail") == "cancel":
            raise asyncio.CancelledError
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Pieces:
    def __init__(self, pieces: Iterable[bytes | Failure], fails_at_close: bool) -> None:
        self._pieces = iter(pieces)
        self._fails_at_close = fails_at_close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        piece = next(self._pieces)
        if isinstance(piece, Failure):
            raise piece
        return piece

    def close(self) -> None:
        if self._fails_at_close:
            raise Failure("close")


def wsgi_app(environ: Any, start_response: Any) -> Iterable[bytes]:
    """The application, blocking."""
    if environ["PATH_INFO"] == "/late":

        def late() -> Iterator[bytes]:
            yield b"row\n"
            environ[wsgi.CALL].note(cost=77, rows=77)

        start_response("200 OK", [])
        return late()
    if environ["PATH_INFO"] == "/echo":
        names = [name for name in environ if name.startswith("HTTP_")]
        seen = "\n".join(f"{name[5:].lower().replace('_', '-')}: {environ[name]}" for name in names).encode()
        start_response("200 OK", [("Content-Length", str(len(seen))), ("x-agent-cost", "1")])
        return [seen]
    call = environ.get(wsgi.CALL)
    query = environ["QUERY_STRING"]
    status, headers, pieces, _ = behaviour(query, call.note if call else lambda **_: None)
    fail = options(query).get("fail")
    if fail == "silent":
        return []
    start_response(f"{status} X", headers)
    return _Pieces(pieces, fail == "close")


class Gateway:
    """A metered application, and a caller of it. `leave_after`: the caller leaves after so many pieces."""

    kind: str
    meter: Any

    def ask(
        self,
        path: str = "/rows",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        *,
        method: str = "GET",
        leave_after: int | None = None,
    ) -> Seen:
        raise NotImplementedError

    def drive(self, plan: Any) -> Any:
        """Carries out a plan of the metering."""
        raise NotImplementedError

    def close_leases(self) -> None:
        """Gives back what is leased."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the client of the ledger."""


class AsgiGateway(Gateway):
    """An ASGI server by hand."""

    kind = "asgi"

    def __init__(self, url: str, policy: Policy, **client: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **{"timeout_s": 30, **client})
        self.middleware = asgi.MeteringMiddleware(asgi_app, self._client, policy)
        self.meter = self.middleware.meter

    def ask(
        self,
        path: str = "/rows",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        *,
        method: str = "GET",
        leave_after: int | None = None,
    ) -> Seen:
        return self._runner.run(self._ask(path, query, headers, method, leave_after))

    async def _ask(self, path: str, query: str, headers: Any, method: str, leave_after: int | None) -> Seen:
        seen, pieces = Seen(), 0

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal pieces
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                seen.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            else:
                if leave_after is not None and pieces >= leave_after:
                    raise OSError("the caller has left")
                pieces += 1
                seen.body += message["body"]

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        }
        try:
            await self.middleware(scope, receive, send)
        except (Failure, OSError, asyncio.CancelledError) as error:
            seen.broken = error
        return seen

    def drive(self, plan: Any) -> Any:
        return self._runner.run(self._client.drive(plan))

    def close_leases(self) -> None:
        self._runner.run(self.middleware.close())

    def close(self) -> None:
        self.close_leases()
        self._runner.run(self._client.close())
        self._runner.close()


class WsgiGateway(Gateway):
    """A WSGI server by hand."""

    kind = "wsgi"

    def __init__(self, url: str, policy: Policy, **client: Any) -> None:
        self._client = Client(url, **{"timeout_s": 30, **client})
        self.middleware = wsgi.MeteringMiddleware(wsgi_app, self._client, policy)
        self.meter = self.middleware.meter

    def ask(
        self,
        path: str = "/rows",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        *,
        method: str = "GET",
        leave_after: int | None = None,
    ) -> Seen:
        seen = Seen()
        environ: Any = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        environ |= {"HTTP_" + name.upper().replace("-", "_"): value for name, value in headers}

        def start_response(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            seen.status = int(status[:3])
            seen.headers = {name.lower(): value for name, value in headers}
            return lambda data: None

        try:
            body: Any = self.middleware(environ, start_response)
            try:
                for number, piece in enumerate(body):
                    if leave_after is not None and number >= leave_after:
                        raise OSError("the caller has left")
                    seen.body += piece
            finally:
                if hasattr(body, "close"):
                    body.close()
        except (Failure, OSError) as error:
            seen.broken = error
        return seen

    def drive(self, plan: Any) -> Any:
        return self._client.drive(plan)

    def close_leases(self) -> None:
        self.middleware.close()

    def close(self) -> None:
        self.close_leases()
        self._client.close()


class Books:
    """A key, and what the ledger says about it."""

    def __init__(self, connection: Connection, parent: str | None = None) -> None:
        from quota.client import run

        self.connection = connection
        self.credential = credentials.Credential.new(credentials.KEY)
        self.subject = f"key:{self.credential.id}"
        run(connection, CreateKey(self.credential.id, "test", self.credential.hash, parent=parent))

    @property
    def key(self) -> list[tuple[str, str]]:
        """The header that authenticates it."""
        return [("Authorization", f"Bearer {self.credential.secret}")]

    def spent(self, limit: str = "hourly", owner: str | None = None) -> Decimal | int:
        """What is booked on a budget."""
        return self._balance(limit, owner)[0]

    def reserved(self, limit: str = "hourly", owner: str | None = None) -> Decimal | int:
        """What is held on it."""
        return self._balance(limit, owner)[1]

    def level(self) -> Decimal | int:
        """What is in the bucket, whole units."""
        return self._balance("bucket", None)[2]

    def _balance(self, limit: str, owner: str | None) -> tuple[Decimal, Decimal, Decimal]:
        (row,) = self.connection.execute(
            "SELECT spent, reserved, floor(level) FROM quota.balance(%s) WHERE limit_name = %s AND subject = %s",
            (self.subject, limit, owner or self.subject),
        ).fetchall()
        return row[0], row[1], row[2]

    def calls(self) -> list[dict[str, Any]]:
        """Its reservations, oldest first: state, outcome, what was booked, details."""
        rows = self.connection.execute(
            "SELECT state, outcome, booked, details FROM quota.reservations WHERE subject = %s"
            " ORDER BY created_at, reservation",
            (self.subject,),
        ).fetchall()
        return [dict(zip(("state", "outcome", "booked", "details"), row, strict=True)) for row in rows]

    def last(self) -> dict[str, Any]:
        """The newest of them."""
        return self.calls()[-1]


def new_subject(kind: str) -> str:
    return f"{kind}:{secrets.token_hex(6)}"
