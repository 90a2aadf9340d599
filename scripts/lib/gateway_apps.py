"""What the gateway's bench serves: a query API in FastAPI, the same in the metering middleware, and two proxies.

The API reads its rows from the database that the ledger is in, as a query API does.

`plain_proxy` is what a pass-through costs on this server with this client, with nothing of ours in it. Read from the
environment: BENCH_UPSTREAM, BENCH_COALESCE, BENCH_LEASE, QUOTA_DATABASE_URL.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import FastAPI, Response
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool
from yarl import URL

from quota import AsyncClient
from quota.config import Settings
from quota.gateway import create_gateway
from quota.gateway.config import GatewayConfig
from quota.http.cost_header import set_cost
from quota.integrations.asgi import MeteringMiddleware
from quota.metering import Leasing, Policy, Route

ROWS = 100
LEASE = 100_000  # what a busy second costs
QUERY = "SELECT id, name, value::float8 AS value FROM orders ORDER BY id LIMIT %(limit)s"
_OF_A_CONNECTION = {b"connection", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


def bare() -> FastAPI:
    """The API: a page of a hundred rows, and what it cost."""
    pool: Any = AsyncConnectionPool(os.environ["QUOTA_DATABASE_URL"], open=False, kwargs={"row_factory": dict_row})

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=life)

    @app.get("/v1/rows/orders")
    async def rows(response: Response, limit: int = ROWS) -> Any:
        async with pool.connection() as connection:
            page = await (await connection.execute(QUERY, {"limit": min(limit, ROWS)}, prepare=True)).fetchall()
        set_cost(response, len(page))
        return {"total": 10_000, "rows": page}

    return app


def _coalescing() -> bool:
    return os.environ.get("BENCH_COALESCE", "1") == "1"


def _leasing() -> bool:
    return os.environ.get("BENCH_LEASE") == "1"


def metered() -> MeteringMiddleware:
    """The API in the middleware."""
    options = AsyncClient.settings_of(Settings.from_env())
    client = AsyncClient(**options, coalesce=_coalescing())
    lease = Leasing(size=LEASE) if _leasing() else None
    return MeteringMiddleware(bare(), client, Policy(routes=(Route("/v1/rows/<table>"),), lease=lease))


def proxy() -> Any:
    """The gateway."""
    config = GatewayConfig.model_validate({
        "upstream": os.environ["BENCH_UPSTREAM"], "routes": [{"path": "/v1/rows/<table>"}],
        "lease": {"size": LEASE} if _leasing() else None,
    })  # fmt: skip
    return create_gateway(config, Settings.from_env(), coalesce=_coalescing())


class PlainProxy:
    """Passes requests on, and nothing else."""

    def __init__(self) -> None:
        self._upstream = os.environ["BENCH_UPSTREAM"]
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=60),
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                )  # fmt: skip
                await send({"type": "lifespan.startup.complete"})
            assert self._session is not None
            await self._session.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        assert self._session is not None
        body = (await receive()).get("body") or None
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode()
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in _OF_A_CONNECTION]
        async with self._session.request(
            scope["method"], URL(self._upstream + target, encoded=True), headers=headers, data=body,
            allow_redirects=False,
        ) as answer:  # fmt: skip
            kept = [(name, value) for name, value in answer.raw_headers if name.lower() not in _OF_A_CONNECTION]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
