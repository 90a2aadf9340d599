"""A guard for `boto3` clients of `bedrock-runtime`: converse, converse_stream and invoke_model.

    from botocore.config import Config
    from quota.integrations.bedrock import guarded

    plain = boto3.client("bedrock-runtime", config=Config(retries={"total_max_attempts": 1}))
    client = guarded(plain, Guard(ledger, "user:7", pool=Pool("pool:aws-1/us-east-1/opus-4-8/runtime")))
    client.converse(modelId="us.anthropic.claude-opus-4-8", messages=[…], inferenceConfig={"maxTokens": 500})

The client's own repetitions have to be off: one attempt, one hold. They cannot be turned off afterwards, so a client
that repeats is refused. `bedrock-mantle` speaks OpenAI's protocol: use `quota.integrations.openai` with
`provider="aws"`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from botocore import exceptions
from botocore.response import StreamingBody

from quota.client import Hold
from quota.costs.estimate import Demand
from quota.costs.requests import bedrock_converse, bedrock_invoke
from quota.costs.tokens import Usage
from quota.costs.usages import anthropic_usage, bedrock_usage
from quota.errors import InvalidArgument, UnboundedInput
from quota.integrations.guard import Attempt, Closing, Guard

__all__ = ["BedrockRuntime", "guarded"]

_NEVER_SENT = (
    exceptions.EndpointConnectionError,
    exceptions.ConnectTimeoutError,
    exceptions.ProxyConnectionError,
    exceptions.ParamValidationError,
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
)
_HARMLESS = frozenset({"can_paginate", "close", "count_tokens", "exceptions", "generate_presigned_url", "meta"})
_IN, _OUT = "x-amzn-bedrock-input-token-count", "x-amzn-bedrock-output-token-count"


def _failed(attempt: Attempt, error: BaseException) -> Closing:
    """How the hold ends when a call has raised."""
    if isinstance(error, _NEVER_SENT):
        return Closing(released=True)
    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return attempt.turned_away(status) if isinstance(status, int) else Closing(None, "unknown")
    if isinstance(error, exceptions.ReadTimeoutError):
        return Closing(None, "timeout")
    if isinstance(error, Exception):
        return Closing(None, "unknown", {"why": type(error).__name__})
    return Closing(None, "cancelled")


def _variant(answer: Mapping[str, Any]) -> str | None:
    tier = answer.get("serviceTier")
    name = tier.get("type") if isinstance(tier, Mapping) else None
    return None if name is None else "" if name in ("default", "reserved") else str(name)


def _truncated(why: object) -> bool | None:
    return None if why is None else why in ("max_tokens", "model_context_window_exceeded", "length")


class _Events:
    """The stream of `converse_stream`: events pass, the one with the usage is remembered, the end settles."""

    def __init__(self, stream: Any, guard: Guard, attempt: Attempt, hold: Hold) -> None:
        self._stream, self._guard, self._attempt, self._hold = stream, guard, attempt, hold
        self._usage: object = None
        self._whole = False
        self._variant: str | None = None
        self._truncated: bool | None = None
        self._open = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        error: BaseException | None = None
        try:
            for event in self._stream:
                if isinstance(event.get("messageStop"), Mapping):
                    self._truncated = _truncated(event["messageStop"].get("stopReason"))
                metadata = event.get("metadata")
                if isinstance(metadata, Mapping):
                    self._usage, self._variant, self._whole = metadata.get("usage"), _variant(metadata), True
                yield event
            self._whole = True
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if not self._open:
            return
        self._open = False
        if self._whole:
            closing = self._attempt.answered(
                bedrock_usage, self._usage, variant=self._variant, truncated=self._truncated
            )
        else:
            outcome = "unknown" if isinstance(error, Exception) else "cancelled"
            closing = self._attempt.cut(bedrock_usage, self._usage, self._guard.on_cut, outcome)
        self._guard.close(self._hold, closing)

    def close(self) -> None:
        """Leaves the stream; what was not read is not waited for."""
        self._stream.close()
        self._finish(None)


class BedrockRuntime:
    """A `bedrock-runtime` client under a guard. See `guarded`."""

    def __init__(self, client: Any, guard: Guard, provider: str) -> None:
        self._client, self._guard, self._provider = client, guard, provider

    def converse(self, **request: Any) -> dict[str, Any]:
        """As the client's own. Errors, before anything is sent: `Refused`, `UnpricedModel`, `CostError`s."""
        attempt, hold = self._held(bedrock_converse, request, "converse")
        answer = self._sent(self._client.converse, request, attempt, hold)
        ended = _truncated(answer.get("stopReason"))
        closing = attempt.answered(bedrock_usage, answer.get("usage"), variant=_variant(answer), truncated=ended)
        self._guard.close(hold, closing)
        return answer

    def converse_stream(self, **request: Any) -> dict[str, Any]:
        """As the client's own; the hold is settled when the stream ends or is closed. Errors: as in `converse`."""
        attempt, hold = self._held(bedrock_converse, request, "converse_stream")
        answer = self._sent(self._client.converse_stream, request, attempt, hold)
        return {**answer, "stream": _Events(answer["stream"], self._guard, attempt, hold)}

    def invoke_model(self, **request: Any) -> dict[str, Any]:
        """As the client's own; the body is read at once. Errors: as in `converse`."""
        attempt, hold = self._held(bedrock_invoke, request, "invoke_model")

        def call(**arguments: Any) -> dict[str, Any]:
            answer: dict[str, Any] = self._client.invoke_model(**arguments)
            content = answer["body"].read()
            return {**answer, "body": StreamingBody(io.BytesIO(content), len(content)), "_content": content}

        answer = self._sent(call, request, attempt, hold)
        body = _json_of(answer.pop("_content"))
        ended = _truncated(body.get("stop_reason"))
        self._guard.close(hold, attempt.answered(_invoke_usage, _invoked(body, answer), truncated=ended))
        return answer

    def _held(self, read: Callable[..., Demand], request: Mapping[str, Any], operation: str) -> tuple[Attempt, Hold]:
        return self._guard.hold(self._provider, read, request, operation)

    def _sent(
        self, call: Callable[..., dict[str, Any]], request: Mapping[str, Any], attempt: Attempt, hold: Hold
    ) -> dict[str, Any]:
        hold.sending()
        try:
            return call(**request)
        except BaseException as error:
            self._guard.close(hold, _failed(attempt, error))
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._client, name)
        if name.startswith("_") or not hasattr(self._client, name):
            raise AttributeError(name)
        raise UnboundedInput(f"{name} is not guarded, so nothing bounds what it costs; call it on a client of its own")


def _json_of(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}


def _invoked(body: Mapping[str, Any], answer: Mapping[str, Any]) -> object:
    """The usage of `invoke_model`: in the body as Anthropic's models write it, else in the headers of Bedrock."""
    if isinstance(body.get("usage"), dict) and "input_tokens" in body["usage"]:
        return body["usage"]
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if _IN in headers and _OUT in headers:
        return {"inputTokens": _whole(headers[_IN]), "outputTokens": _whole(headers[_OUT])}
    return None


def _whole(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() else text


def _invoke_usage(told: object) -> Usage:
    is_body = isinstance(told, Mapping) and "input_tokens" in told
    return anthropic_usage(told) if is_body else bedrock_usage(told)


def guarded(client: Any, guard: Guard, *, provider: str = "aws") -> BedrockRuntime:
    """Returns an object like `client` whose calls are held before they leave, and settled afterwards.

    Arguments:
        client: of `bedrock-runtime`, with its own repetitions off: `Config(retries={"total_max_attempts": 1})`.
        guard: who spends.
        provider: who bills, as the price book names it.

    Errors: `InvalidArgument` for a client that repeats calls by itself.
    """
    retries = client.meta.config.retries or {}
    if retries.get("total_max_attempts") != 1:
        raise InvalidArgument(
            f"invalid_argument: the client repeats calls by itself: retries are {retries}",
            'Make it with config=Config(retries={"total_max_attempts": 1}): one attempt, one hold.',
        )
    return BedrockRuntime(client, guard, provider)
