"""Metering in front of a WSGI application: Flask, Django, or any other.

    from quota import Client
    from quota.integrations.wsgi import MeteringMiddleware
    from quota.metering import Policy, Route, page_limit

    app.wsgi_app = MeteringMiddleware(app.wsgi_app, Client(), Policy(routes=(Route("/v1/rows"),)))

The same as `quota.integrations.asgi`, blocking; the application finds its call in `environ["quota.call"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, cast
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from quota.client import Client
from quota.lease import LeasedBudget
from quota.metering import Call, Meter, Policy, Request
from quota.metering.call import Outcome

__all__ = ["CALL", "MeteringMiddleware"]

CALL = "quota.call"
"""Where the application finds its call, in the environ."""


class MeteringMiddleware:
    """Meters a WSGI application.

    Arguments:
        app: the application.
        client: the ledger, safe before and after a fork. It belongs to the caller, who closes it.
        policy: what is metered how.
    """

    def __init__(self, app: WSGIApplication, client: Client, policy: Policy | None = None) -> None:
        self.app = app
        self.client = client
        self.meter = Meter(client, policy or Policy())
        self._dropped = [_variable(name) for name in self.meter.dropped()]

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serves one request."""
        call = self.meter.call(_request(environ))
        exchange = _Exchange(call, self.client, start_response)
        try:
            answer = self.client.drive(call.opening())
            if answer is None:
                exchange.serve(self.app, self._inner(environ, call))
            else:
                start_response(_status_line(answer.status), answer.headers)
                exchange.chunks = iter([] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body])
        except BaseException:
            exchange.outcome = "exception"
            exchange.close()
            raise
        return exchange

    def close(self) -> None:
        """Gives back what is leased (`Policy.lease`). An interpreter that ends in order does it by itself."""
        for budget in self.meter.close():
            cast("LeasedBudget", budget).close()

    def _inner(self, environ: WSGIEnvironment, call: Call) -> WSGIEnvironment:
        """The environ that the application sees: without what the caller claims, with what is known."""
        for name in self._dropped:
            environ.pop(name, None)
        told = self.meter.policy.subject_header
        if told and call.identity is not None:
            environ[_variable(told)] = call.identity.subject.encode("utf-8").decode("latin-1")
        environ[CALL] = call
        return environ


class _Exchange:
    """What passes between the server and the application in one request; the server iterates and closes it."""

    def __init__(self, call: Call, client: Client, start_response: StartResponse) -> None:
        self._call = call
        self._client = client
        self._start = start_response
        self._head: tuple[str, list[tuple[str, str]], tuple[Any, ...]] | None = None
        self._write: Callable[[bytes], object] | None = None
        self._close: Callable[[], None] | None = None
        self.chunks: Iterator[bytes] = iter(())
        # Who stops iterating before the end has lost its caller.
        self.outcome: Outcome = "gone"

    def serve(self, app: WSGIApplication, environ: WSGIEnvironment) -> None:
        body = app(environ, self._app_starts)
        self._close = getattr(body, "close", None)
        self.chunks = iter(body)

    def _app_starts(self, status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Callable[[bytes], object]:
        if self._write is not None:
            # The head is out: with exc_info the server raises, without it the application is wrong.
            return self._start(status, headers, *exc_info)
        self._head = (status, headers, exc_info)
        return self._app_writes

    def _app_writes(self, data: bytes) -> None:
        self._send_head()
        self._count(data)
        if self._write is not None:
            self._write(data)

    def _send_head(self) -> None:
        """Hands the head to the server, as late as can be: until then the application may take it back."""
        if self._head is None:
            return
        (status, headers, exc_info), self._head = self._head, None
        told = self._client.drive(self._call.responding(int(status[:3]), headers))
        self._write = self._start(status, told, *exc_info)

    def _count(self, chunk: bytes) -> None:
        if self._call.counted(chunk):
            self._client.drive(self._call.extending())

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self.chunks)
            self._send_head()
        except StopIteration:
            self._send_head()
            # Before the server ends the answer: who has the whole of it finds it settled.
            self.outcome = "answered"
            self._settle()
            raise
        except BaseException:
            self.outcome = "exception" if self._write is None else "cut"
            raise
        self._count(chunk)
        return chunk

    def close(self) -> None:
        try:
            if self._close is not None:
                self._close()
        finally:
            self._settle()

    def _settle(self) -> None:
        self._client.drive(self._call.closing(self.outcome))


def _variable(header: str) -> str:
    return "HTTP_" + header.upper().replace("-", "_")


def _request(environ: WSGIEnvironment) -> Request:
    headers = {
        name[5:].lower().replace("_", "-"): [value] for name, value in environ.items() if name.startswith("HTTP_")
    }
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.lower().replace("_", "-")] = [environ[name]]
    # WSGI's strings are bytes in Latin-1.
    path = str(environ.get("PATH_INFO", "")).encode("latin-1").decode("utf-8", "replace")
    return Request(environ["REQUEST_METHOD"], path or "/", environ.get("QUERY_STRING", ""), headers)


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"
