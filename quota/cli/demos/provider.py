"""A provider of models on this machine: it speaks the format of chat completions, says nothing of worth, and counts."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from quota.costs.tokens import Usage

__all__ = ["Provider"]


class Provider:
    """The server, as long as the context lasts.

    Arguments:
        call_s: how long it takes to answer, in seconds.

    Fields:
        url: the base URL for clients.
        answers: the tokens of every call that reached it.
    """

    def __init__(self, call_s: float) -> None:
        self.call_s = call_s
        self.answers: list[Usage] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"provider": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, request: dict[str, Any], sent_bytes: int) -> dict[str, Any]:
        """Counts a call; returns its answer: four bytes are a token, and a third to all of the ceiling comes back."""
        ceiling = int(request["max_completion_tokens"])
        with self._lock:
            used = Usage(input=sent_bytes // 4, output=max(1, ceiling * (3 + len(self.answers) * 5 % 7) // 9))
            self.answers.append(used)
            number = len(self.answers)
        message = {"role": "assistant", "content": f"Thought no. {number}."}
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": used.input,
                "completion_tokens": used.output,
                "total_tokens": used.input + used.output,
            },
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    provider: Provider
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_POST(self) -> None:
        """One call."""
        text = self.rfile.read(int(self.headers["content-length"]))
        answer = json.dumps(self.provider.answer(json.loads(text), len(text))).encode()
        time.sleep(self.provider.call_s)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
