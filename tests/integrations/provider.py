"""A provider of models on this machine: real HTTP in the formats of the real ones. It counts what reaches it.

What it does with the next requests is told by `behave`: each item serves one request, the last one all that follow.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What every answer reports, unless the behaviour says otherwise.
SENT, CACHED, BACK = 100, 20, 30


class Provider:
    """The server: its `url`, the bodies of the requests that `reached` it, and how it behaves."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, dict[str, Any]]] = []
        self.behave: list[str] = ["ok"]
        self.delay_s = 0.0
        self.usage: dict[str, Any] = {}
        self.truncated = False
        self.released = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"provider": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def take(self, path: str, body: dict[str, Any]) -> str:
        """Counts a request; returns how to behave."""
        with self._lock:
            self.reached.append((path, body))
            return self.behave.pop(0) if len(self.behave) > 1 else self.behave[0]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running() -> Iterator[Provider]:
    """A provider for the block."""
    provider = Provider()
    try:
        yield provider
    finally:
        provider.close()


class _Handler(BaseHTTPRequestHandler):
    provider: Provider
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.provider.take(self.path, {})
        self._json(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(raw or b"{}")
        how = self.provider.take(self.path, body)
        time.sleep(self.provider.delay_s)
        if how.isdigit():
            self._json(int(how), {"error": {"type": "some_error", "message": f"status {how}"}, "type": "error"})
        elif how == "reset":
            self._reset()
        elif how == "hang":
            self.provider.released.wait(30)
        elif how == "wait":  # and answer
            self.provider.released.wait(240)
            self._answer(body, "ok")
        else:
            self._answer(body, how)

    def _reset(self) -> None:
        """Closes so that the other side sees a reset, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(self, body: dict[str, Any], how: str) -> None:
        for end, answer in ANSWERS.items():
            if self.path.split("?")[0].endswith(end):
                answer(self, body, how)
                return
        self._json(404, {"error": {"message": self.path}})

    def _json(self, status: int, told: object, content_type: str = "application/json") -> None:
        content = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def events(self, told: list[tuple[str | None, object]], how: str, keep: int) -> None:
        """Sends a stream; `cut` ends it after `keep` events, `stall` waits there."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, (name, data) in enumerate(told):
            if number == keep and how == "cut":
                self._reset()
                return
            if number == keep and how == "stall":
                self.provider.released.wait(30)
                return
            text = data if isinstance(data, str) else json.dumps(data)
            event = (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
            # In two pieces: whoever reads must not take a piece for an event.
            for piece in (event.encode()[:7], event.encode()[7:]):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def _usage(handler: _Handler, how: str, told: dict[str, Any]) -> dict[str, Any] | None:
    if how == "no_usage":
        return None
    return {**told, **handler.provider.usage}


# -- openai ---------------------------------------------------------------------------------------------------------


def _chat(handler: _Handler, body: dict[str, Any], how: str) -> None:
    usage = _usage(
        handler,
        how,
        {
            "prompt_tokens": SENT,
            "completion_tokens": BACK,
            "total_tokens": SENT + BACK,
            "prompt_tokens_details": {"cached_tokens": CACHED},
        },
    )
    ended = "length" if handler.provider.truncated else "stop"
    base = {"id": "c1", "created": 1, "model": body["model"], "service_tier": "default"}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "Hello there"}
        choices = [{"index": 0, "message": message, "finish_reason": ended, "logprobs": None}]
        handler._json(200, {**base, "object": "chat.completion", "choices": choices, "usage": usage})
        return
    chunk = {**base, "object": "chat.completion.chunk"}
    told: list[tuple[str | None, object]] = [
        (None, {**chunk, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        for text in ("Hello", " there")
    ]
    told.append((None, {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": ended}]}))
    if (body.get("stream_options") or {}).get("include_usage") and usage is not None:
        told.append((None, {**chunk, "choices": [], "usage": usage}))
    told.append((None, "[DONE]"))
    handler.events(told, how, keep=2)


def _responses(handler: _Handler, body: dict[str, Any], how: str) -> None:
    usage = _usage(
        handler,
        how,
        {
            "input_tokens": SENT,
            "output_tokens": BACK,
            "total_tokens": SENT + BACK,
            "input_tokens_details": {"cached_tokens": CACHED},
            "output_tokens_details": {"reasoning_tokens": 5},
        },
    )
    content = [{"type": "output_text", "text": "Hello there", "annotations": []}]
    output = [{"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": content}]
    ended: dict[str, Any] = {"status": "completed", "incomplete_details": None}
    if handler.provider.truncated:
        ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    response = {
        "id": "r1", "object": "response", "created_at": 1, "model": body["model"], **ended,
        "output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage,
    }  # fmt: skip
    if not body.get("stream"):
        handler._json(200, response)
        return
    opened = {**response, "status": "in_progress", "incomplete_details": None, "usage": None, "output": []}
    closing = f"response.{response['status']}"
    delta = {
        "type": "response.output_text.delta", "item_id": "m1", "output_index": 0, "content_index": 0,
        "delta": "Hello", "sequence_number": 1, "logprobs": [],
    }  # fmt: skip
    handler.events(
        [
            ("response.created", {"type": "response.created", "response": opened, "sequence_number": 0}),
            ("response.output_text.delta", delta),
            ("response.output_text.delta", {**delta, "delta": " there", "sequence_number": 2}),
            (closing, {"type": closing, "response": response, "sequence_number": 3}),
        ],
        how,
        keep=2,
    )


# -- anthropic ------------------------------------------------------------------------------------------------------


def _messages(handler: _Handler, body: dict[str, Any], how: str) -> None:
    usage = _usage(
        handler,
        how,
        {
            "input_tokens": SENT - CACHED,
            "cache_read_input_tokens": CACHED,
            "cache_creation_input_tokens": 0,
            "output_tokens": BACK,
        },
    )
    ended = "max_tokens" if handler.provider.truncated else "end_turn"
    message = {
        "id": "m1", "type": "message", "role": "assistant", "model": body["model"], "stop_reason": ended,
        "stop_sequence": None, "content": [{"type": "text", "text": "Hello there"}], "usage": usage,
    }  # fmt: skip
    if not body.get("stream"):
        handler._json(200, message)
        return
    opened = {**message, "content": [], "stop_reason": None, "usage": usage and {**usage, "output_tokens": 1}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}
    closing = {
        "type": "message_delta",
        "delta": {"stop_reason": ended, "stop_sequence": None},
        "usage": usage and {"output_tokens": usage["output_tokens"]},
    }
    text = {"type": "text", "text": ""}
    handler.events(
        [
            ("message_start", {"type": "message_start", "message": opened}),
            ("content_block_start", {"type": "content_block_start", "index": 0, "content_block": text}),
            ("ping", {"type": "ping"}),
            ("content_block_delta", delta),
            ("content_block_stop", {"type": "content_block_stop", "index": 0}),
            ("message_delta", closing),
            ("message_stop", {"type": "message_stop"}),
        ],
        how,
        keep=4,
    )


# -- bedrock --------------------------------------------------------------------------------------------------------


def _framed(headers: dict[str, str], payload: bytes) -> bytes:
    """One message of application/vnd.amazon.eventstream: lengths and checksums around headers and payload."""
    packed = b"".join(
        struct.pack("!B", len(name)) + name.encode() + struct.pack("!BH", 7, len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(packed) + len(payload), len(packed))
    body = prelude + struct.pack("!I", zlib.crc32(prelude)) + packed + payload
    return body + struct.pack("!I", zlib.crc32(body))


def _bedrock_usage(handler: _Handler, how: str) -> dict[str, Any] | None:
    told = {"inputTokens": SENT - CACHED, "cacheReadInputTokens": CACHED, "outputTokens": BACK, "totalTokens": 130}
    return _usage(handler, how, told)


def _bedrock_end(handler: _Handler) -> str:
    return "max_tokens" if handler.provider.truncated else "end_turn"


def _converse(handler: _Handler, _body: dict[str, Any], how: str) -> None:
    message = {"role": "assistant", "content": [{"text": "Hello there"}]}
    answer = {"output": {"message": message}, "stopReason": _bedrock_end(handler), "metrics": {"latencyMs": 1}}
    usage = _bedrock_usage(handler, how)
    handler._json(200, {**answer, **({"usage": usage} if usage else {})})


def _converse_stream(handler: _Handler, _body: dict[str, Any], how: str) -> None:
    told: list[tuple[str, dict[str, Any]]] = [
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": "Hello"}}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": _bedrock_end(handler)}),
        ("metadata", {"usage": _bedrock_usage(handler, how) or {}, "metrics": {"latencyMs": 1}}),
    ]
    handler.send_response(200)
    handler.send_header("content-type", "application/vnd.amazon.eventstream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    for number, (name, data) in enumerate(told):
        if number == 2 and how == "cut":
            handler._reset()
            return
        headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
        frame = _framed(headers, json.dumps(data).encode())
        handler.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
        handler.wfile.flush()
    handler.wfile.write(b"0\r\n\r\n")


def _invoke(handler: _Handler, body: dict[str, Any], how: str) -> None:
    if "anthropic_version" in body:
        _messages(handler, {**body, "model": "claude-opus-4-8"}, how)
        return
    handler.send_response(200)
    content = json.dumps({"generation": "Hello there"}).encode()
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(content)))
    if how != "no_usage":
        handler.send_header("x-amzn-bedrock-input-token-count", str(SENT))
        handler.send_header("x-amzn-bedrock-output-token-count", str(BACK))
    handler.end_headers()
    handler.wfile.write(content)


ANSWERS: dict[str, Callable[[_Handler, dict[str, Any], str], None]] = {
    "/chat/completions": _chat,
    "/responses": _responses,
    "/messages": _messages,
    "/converse": _converse,
    "/converse-stream": _converse_stream,
    "/invoke": _invoke,
}
