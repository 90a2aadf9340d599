"""gunicorn's `asgi` worker for HTTP and nothing else.

That worker answers the handshake of a WebSocket before anybody is asked whether there is one: 426 or 400 for what is
wrong with it, and a bare 403 when the application declines. Nothing is configurable about it, and the ASGI extension
by which an application words its refusal (`websocket.http.response`) it does not have. Here a handshake is what it is
without the upgrade that it offers: a GET, which is refused in our own words like everything else (RFC 9110, 7.8: a
server may ignore `Upgrade`).
"""

from __future__ import annotations

from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers import gasgi

__all__ = ["HttpWorker"]


class _HttpProtocol(ASGIProtocol):  # type: ignore[misc]  # gunicorn has no types
    def _is_websocket_upgrade(self, request: object) -> bool:  # noqa: ARG002 - gunicorn's signature
        return False


class HttpWorker(gasgi.ASGIWorker):  # type: ignore[misc]
    """gunicorn's `asgi` worker, whose connections speak HTTP only."""

    def init_process(self) -> None:
        """Starts the worker, in its own process."""
        # The worker asks nobody what a connection is made of: this name is the only way in.
        gasgi.ASGIProtocol = _HttpProtocol
        super().init_process()
