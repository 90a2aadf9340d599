"""Applications as somebody would write them, in three frameworks: unchanged but for the cost that they report.

`/rows?rows=…&calls=…` answers a page, `/flow` never ends, `/total` knows of more rows than it returns.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import flask
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from quota import AsyncClient, Client
from quota.http.cost_header import set_cost
from quota.integrations import asgi, wsgi
from quota.metering import Leasing, Policy, Route, page_limit, through_nodes

LEASE = Leasing(size=5000, from_per_s=1) if os.environ.get("TEST_LEASE") else None
POLICY = Policy(
    lease=LEASE,
    routes=(
        Route("/rows", name="rows", estimate=through_nodes(page_limit(300), calls=3)),
        Route("/flow", name="flow"),
        Route("/health", metered=False),
    ),
)


def _page(parameters: Any) -> tuple[list[str], int]:
    return ["row"] * int(parameters.get("rows", "100")), int(parameters.get("calls", "0"))


def fastapi_app() -> Any:
    """FastAPI in the metering middleware."""
    app = FastAPI()

    @app.get("/rows")
    async def rows(request: Request, response: Response) -> Any:
        page, calls = _page(request.query_params)
        set_cost(response, len(page), calls, rows_read=10_000)
        return {"total": 10_000, "rows": page}

    @app.get("/flow")
    async def flow() -> Any:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"row\n" * 1000
                await asyncio.sleep(0.01)

        response = StreamingResponse(pieces())
        set_cost(response, 40)
        return response

    @app.get("/health")
    async def health() -> str:
        return "well"

    return asgi.MeteringMiddleware(app, AsyncClient(timeout_s=30), POLICY)


def flask_app() -> Any:
    """Flask in the metering middleware."""
    app = flask.Flask(__name__)

    @app.get("/rows")
    def rows() -> Any:
        page, calls = _page(flask.request.args)
        response = flask.jsonify({"total": 10_000, "rows": page})
        set_cost(response, len(page), calls, rows_read=10_000)
        return response

    @app.get("/flow")
    def flow() -> Any:
        response = flask.Response(_flowing())
        set_cost(response, 40)
        return response

    @app.get("/health")
    def health() -> str:
        return "well"

    app.wsgi_app = wsgi.MeteringMiddleware(app.wsgi_app, Client(timeout_s=30), POLICY)  # type: ignore[method-assign]
    return app


def django_app() -> Any:
    """Django in the metering middleware."""
    import django
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
    from django.urls import path

    def rows(request: Any) -> Any:
        page, calls = _page(request.GET)
        response = JsonResponse({"total": 10_000, "rows": page})
        response.headers["Content-Length"] = str(len(response.content))
        set_cost(response, len(page), calls, rows_read=10_000)
        return response

    def flow(request: Any) -> Any:
        response = StreamingHttpResponse(_flowing())
        set_cost(response, 40)
        return response

    urls = [path("rows", rows), path("flow", flow), path("health", lambda request: HttpResponse("well"))]
    settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=tuple(urls), SECRET_KEY="test", LOGGING_CONFIG=None)
    django.setup(set_prefix=False)
    return wsgi.MeteringMiddleware(WSGIHandler(), Client(timeout_s=30), POLICY)


def _flowing() -> Iterator[bytes]:
    for _ in itertools.count():
        yield b"row\n" * 1000
        time.sleep(0.01)
