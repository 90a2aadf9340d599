"""The front of the gateway: what comes before the metering, and what is answered without it."""

from __future__ import annotations

import logging
from collections.abc import Container

from quota.calls import VerifyKey
from quota.client import AsyncClient
from quota.errors import QuotaError
from quota.gateway.forward import Forwarder, Receive, Scope, Send, answer
from quota.gateway.hygiene import cleaned, fault_of
from quota.http.problems import Problem
from quota.integrations.asgi import MeteringMiddleware

__all__ = ["Gateway"]

logger = logging.getLogger("quota.gateway")

_READY_S = 2.0
_NOBODY = VerifyKey("none", bytes(32))


class Gateway:
    """The gateway as an ASGI application: refuses what is malformed, tells its health, meters and forwards the rest.

    Arguments:
        forwarder: to the upstream.
        metered: the metering around it.
        client: the ledger.
        spoofed: headers, in lower case, that no client may send, beside those that none ever may.
        health_path: where it answers for itself: 200 while it runs, and at `<path>/ready` while the ledger answers.

    With the lifespan of the server it opens the forwarder, and closes both at the end, when all in flight has been
    settled.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        metered: MeteringMiddleware,
        client: AsyncClient,
        *,
        spoofed: Container[bytes] = (),
        health_path: str = "/-/health",
    ) -> None:
        self._forwarder = forwarder
        self._metered = metered
        self._client = client
        self._spoofed = spoofed
        self._live, self._ready = health_path, f"{health_path}/ready"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection, request or lifespan."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await self._live_on(receive, send)
            case _:
                await self._metered(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = fault_of(scope)
        if fault is not None:
            await answer(send, fault, scope["method"])
        elif scope["path"] in (self._live, self._ready):
            await self._tell_health(scope, send)
        else:
            inner = {**scope, "headers": cleaned(scope["headers"], self._spoofed)}
            await self._metered(inner, receive, send)

    async def _tell_health(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            problem = Problem(405, "method_not_allowed", "Health is read: GET or HEAD.", headers={"Allow": "GET, HEAD"})
            await answer(send, problem, scope["method"])
            return
        if scope["path"] == self._ready:
            try:
                await self._client.call(_NOBODY, timeout_s=_READY_S)
            except QuotaError as error:
                logger.warning("not ready: %s", error)
                problem = Problem(503, "not_ready", "The ledger does not answer.", headers={"Retry-After": "1"})
                await answer(send, problem, scope["method"])
                return
        headers = [
            (b"content-type", b"application/json"), (b"content-length", b"15"), (b"cache-control", b"no-store"),
        ]  # fmt: skip
        body = b"" if scope["method"] == "HEAD" else b'{"status":"ok"}'
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _live_on(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._forwarder.open()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._forwarder.close()
                await self._metered.close()
                await self._client.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
