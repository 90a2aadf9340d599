"""How the requests of the providers' clients are read: what they send at most, and their ceilings on output.

One function per call: arguments by name in, a `Demand` out. Nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quota.costs.estimate import ANTHROPIC, BEDROCK, OPENAI, Bounds, Ceiling, Demand, Tokenizer, text_bound
from quota.costs.tokens import TOKENS_MAX
from quota.errors import MissingCeiling, UnboundedInput

__all__ = ["anthropic_messages", "bedrock_converse", "bedrock_invoke", "openai_chat", "openai_responses"]


class _Reader:
    """Adds up what the parts of a request cost at most."""

    def __init__(self, bounds: Bounds, tokenizer: Tokenizer | None) -> None:
        self.bounds = bounds
        self.tokenizer = tokenizer
        self.tokens = bounds.request
        self.unbounded: list[str] = []
        self.endless: list[str] = []
        self.sound = False

    def text(self, value: str) -> None:
        self.tokens += text_bound(value, self.tokenizer)

    def plain(self, value: Any) -> None:
        """Structured text, such as the description of a tool: its JSON is at least as long as what the model reads."""
        self.text(json.dumps(_jsonable(value), ensure_ascii=False, default=str))

    def image(self) -> None:
        self.tokens += self.bounds.image

    def audio(self, data: str | bytes) -> None:
        self.sound = True
        size = len(data) * 3 // 4 if isinstance(data, str) else len(data)
        self.tokens += size // self.bounds.audio_bytes_per_token + 1

    def unknown(self, name: str) -> None:
        self.unbounded.append(name)

    def demand(self, model: str, ceiling: Ceiling, variant: str) -> Demand:
        return Demand(model, self.tokens, tuple(self.unbounded), tuple(self.endless), ceiling, variant, self.sound)

    def tools(self, tools: object, where: str, own: Callable[[Mapping[str, Any]], bool]) -> None:
        """Tools that the caller runs are text; those that the provider runs send what nobody can foresee."""
        if not tools:
            return
        self.tokens += self.bounds.tools
        for number, tool in enumerate(_listed(tools)):
            described = _mapping(tool)
            if described is None or own(described):
                self.plain(tool)
            else:
                self.endless.append(f"{where}[{number}] ({described.get('type')})")


def _mapping(value: object) -> Mapping[str, Any] | None:
    plain = _jsonable(value)
    return plain if isinstance(plain, Mapping) else None


def _jsonable(value: object) -> Any:
    """SDK objects (pydantic models) as the plain values they stand for."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value


def _listed(value: object) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return [value]
    return list(value) if isinstance(value, Iterable) else [value]


def _ceiling_of(request: Mapping[str, Any], names: Sequence[str], wanted: str) -> Ceiling:
    """The largest of the named parameters. Errors: `MissingCeiling`, naming the one that is wanted."""
    found = {name: request[name] for name in names if _given(request.get(name))}
    if not found:
        raise MissingCeiling(f"{wanted} is missing; without a ceiling on the output there is no worst case to hold")
    for name, value in found.items():
        _require_count(name, value)
    largest = max(found, key=lambda name: int(found[name]))
    return Ceiling(largest, found[largest])


def _given(value: object) -> bool:
    """False for None and for the SDKs' own "not given" values."""
    return value is not None and type(value).__name__ not in ("NotGiven", "Omit")


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= TOKENS_MAX:
        raise MissingCeiling(f"{name} is {value!r:.60}, not a whole number of tokens from 1 to {TOKENS_MAX}")


def _model_of(request: Mapping[str, Any], name: str = "model") -> str:
    model = request.get(name)
    if not isinstance(model, str) or not model.strip():
        raise UnboundedInput(f"{name} is missing; without a model there is no price")
    return model


def _answers_of(request: Mapping[str, Any]) -> int:
    asked = {name: request[name] for name in ("n", "best_of") if _given(request.get(name))}
    for name, value in asked.items():
        _require_count(name, value)
    return max([1, *map(int, asked.values())])


def _without_nothing(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if _given(value)}


# -- openai ---------------------------------------------------------------------------------------------------------

_OPENAI_VARIANTS = {"flex": "flex", "priority": "priority", "fast": "fast"}


def openai_chat(request: Mapping[str, Any], bounds: Bounds = OPENAI, tokenizer: Tokenizer | None = None) -> Demand:
    """Reads a request of `chat.completions.create`.

    Arguments:
        request: its arguments by name.
        bounds: what the provider adds.
        tokenizer: see `text_bound`.

    Errors: `MissingCeiling` without `max_completion_tokens` (or `max_tokens`; the larger one counts);
    `UnboundedInput` without a model.
    """
    asked = _without_nothing(request)
    reader = _Reader(bounds, tokenizer)
    for number, message in enumerate(_listed(asked.get("messages", ()))):
        reader.tokens += bounds.message
        _openai_message(reader, message, f"messages[{number}]")
    reader.tools(asked.get("tools"), "tools", lambda tool: tool.get("type") in ("function", "custom"))
    for name in ("functions", "response_format", "stop"):
        if name in asked:
            reader.plain(asked[name])
    reader.sound = reader.sound or "audio" in asked
    if "web_search_options" in asked:
        reader.endless.append("web_search_options")
    ceiling = _ceiling_of(asked, ("max_completion_tokens", "max_tokens"), "max_completion_tokens")
    prediction = _mapping(asked["prediction"]) if "prediction" in asked else None
    predicted = 0
    if prediction is not None:
        content = prediction.get("content", "")
        predicted = text_bound(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
        reader.tokens += predicted
    answers = _answers_of(asked)
    ceiling = replace(ceiling, answers=answers, beside=predicted * answers)
    return reader.demand(_model_of(asked), ceiling, _openai_variant(asked))


def _openai_variant(asked: Mapping[str, Any]) -> str:
    return _OPENAI_VARIANTS.get(str(asked.get("service_tier", "")), "")


def _openai_message(reader: _Reader, message: object, where: str) -> None:
    told = _mapping(message)
    if told is None:
        reader.plain(message)
        return
    content = told.get("content")
    reader.plain({name: value for name, value in told.items() if name not in ("content", "audio")})
    if told.get("audio"):
        reader.unknown(f"{where}.audio")
    _openai_content(reader, content, where)


def _openai_content(reader: _Reader, content: object, where: str) -> None:
    if content is None:
        return
    if isinstance(content, str):
        reader.text(content)
        return
    for number, part in enumerate(_listed(content)):
        told = _mapping(part) or {}
        kind = told.get("type")
        if kind in ("image_url", "input_image"):
            reader.image()
        elif kind == "input_audio":
            reader.audio(str((_mapping(told.get("input_audio")) or {}).get("data", "")))
        elif kind in ("file", "input_file"):
            reader.unknown(f"{where}.content[{number}] (file)")
        else:
            reader.plain(part)


_RESPONSES_UNBOUNDED = ("previous_response_id", "conversation", "prompt")
_RESPONSES_TEXT = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "custom_tool_call",
        "custom_tool_call_output",
        None,
    }
)


def openai_responses(request: Mapping[str, Any], bounds: Bounds = OPENAI, tokenizer: Tokenizer | None = None) -> Demand:
    """Reads a request of `responses.create`; as `openai_chat`, with `max_output_tokens` as the ceiling.

    `previous_response_id`, `conversation` and stored prompts send what is not in the request: they have no bound in it.
    """
    asked = _without_nothing(request)
    reader = _Reader(bounds, tokenizer)
    for name in ("instructions", "text"):
        if name in asked:
            reader.plain(asked[name])
    given = asked.get("input", "")
    if isinstance(given, str):
        reader.text(given)
    else:
        for number, item in enumerate(_listed(given)):
            reader.tokens += bounds.message
            told = _mapping(item) or {}
            if told.get("type") in _RESPONSES_TEXT:
                _openai_message(reader, item, f"input[{number}]")
                _output_parts(reader, told, f"input[{number}]")
            else:
                reader.unknown(f"input[{number}] ({told.get('type')})")
    reader.tools(asked.get("tools"), "tools", lambda tool: tool.get("type") in ("function", "custom"))
    for name in _RESPONSES_UNBOUNDED:
        if name in asked:
            reader.unknown(name)
    ceiling = _ceiling_of(asked, ("max_output_tokens",), "max_output_tokens")
    return reader.demand(_model_of(asked), ceiling, _openai_variant(asked))


def _output_parts(reader: _Reader, told: Mapping[str, Any], where: str) -> None:
    output = told.get("output")
    if isinstance(output, list):  # pictures and files that a tool of the caller's has returned
        _openai_content(reader, output, where)


# -- anthropic ------------------------------------------------------------------------------------------------------


def anthropic_messages(
    request: Mapping[str, Any], bounds: Bounds = ANTHROPIC, tokenizer: Tokenizer | None = None
) -> Demand:
    """Reads a request of `messages.create`. Its ceiling is `max_tokens`; thinking is output and counts towards it.

    Errors: as in `openai_chat`.
    """
    asked = _without_nothing(request)
    reader = _Reader(bounds, tokenizer)
    if "system" in asked:
        _anthropic_content(reader, asked["system"], "system")
    for number, message in enumerate(_listed(asked.get("messages", ()))):
        reader.tokens += bounds.message
        told = _mapping(message) or {}
        _anthropic_content(reader, told.get("content", ""), f"messages[{number}].content")
    reader.tools(
        asked.get("tools"), "tools", lambda tool: tool.get("type") in (None, "custom") or "input_schema" in tool
    )
    for name in ("output_config", "output_format", "stop_sequences"):
        if name in asked:
            reader.plain(asked[name])
    for name in ("mcp_servers", "container"):
        if name in asked:
            reader.endless.append(name)
    ceiling = _ceiling_of(asked, ("max_tokens",), "max_tokens")
    variant = "fast" if asked.get("speed") == "fast" else ""
    return reader.demand(_model_of(asked), ceiling, variant)


def _anthropic_content(reader: _Reader, content: object, where: str) -> None:
    if isinstance(content, str):
        reader.text(content)
        return
    for number, part in enumerate(_listed(content)):
        told = _mapping(part) or {}
        source = _mapping(told.get("source")) or {}
        if told.get("type") == "image":
            reader.image()
        elif told.get("type") == "document":
            if source.get("type") == "text":
                reader.plain(part)
            elif source.get("type") == "content":
                _anthropic_content(reader, source.get("content", ""), f"{where}[{number}].source")
            else:
                reader.unknown(f"{where}[{number}] (document)")
        elif told.get("type") == "container_upload":
            reader.unknown(f"{where}[{number}] (container_upload)")
        elif told.get("type") == "tool_result" and not isinstance(told.get("content", ""), str):
            _anthropic_content(reader, told["content"], f"{where}[{number}].content")
            reader.plain({name: value for name, value in told.items() if name != "content"})
        else:
            reader.plain(part)


# -- bedrock --------------------------------------------------------------------------------------------------------


def bedrock_converse(
    request: Mapping[str, Any], bounds: Bounds = BEDROCK, tokenizer: Tokenizer | None = None
) -> Demand:
    """Reads a request of `converse` or `converse_stream`; its ceiling is `inferenceConfig.maxTokens`.

    Errors: as in `openai_chat`.
    """
    asked = _without_nothing(request)
    reader = _Reader(bounds, tokenizer)
    _converse_content(reader, asked.get("system", ()), "system")
    for number, message in enumerate(asked.get("messages", ())):
        reader.tokens += bounds.message
        _converse_content(reader, message.get("content", ()), f"messages[{number}].content")
    tools = asked.get("toolConfig", {}).get("tools", ())
    reader.tools(tools, "toolConfig.tools", lambda tool: "systemTool" not in tool)
    for name in ("additionalModelRequestFields", "outputConfig", "promptVariables"):
        if name in asked:
            reader.plain(asked[name])
    if str(asked.get("modelId", "")).find(":prompt/") >= 0:
        reader.unknown("modelId (a stored prompt)")
    ceiling = _ceiling_of(dict(asked.get("inferenceConfig", {})), ("maxTokens",), "inferenceConfig.maxTokens")
    return reader.demand(_model_of(asked, "modelId"), ceiling, _bedrock_variant(asked))


def _bedrock_variant(asked: Mapping[str, Any]) -> str:
    tier = asked.get("serviceTier")
    name = str(tier.get("type", "")) if isinstance(tier, Mapping) else str(tier or "")
    return "" if name in ("", "default", "reserved") else name


def _converse_content(reader: _Reader, content: object, where: str) -> None:
    for number, block in enumerate(_listed(content)):
        place = f"{where}[{number}]"
        told: Mapping[str, Any] = block if isinstance(block, Mapping) else {"text": str(block)}
        for kind, value in told.items():
            if kind == "image":
                reader.image()
            elif kind in ("document", "video", "audio"):
                reader.unknown(f"{place} ({kind})")
            elif kind == "toolResult":
                _converse_content(reader, value.get("content", ()), f"{place}.toolResult")
                reader.plain({name: part for name, part in value.items() if name != "content"})
            elif kind == "guardContent" and "image" in value:
                reader.image()
            else:
                reader.plain(value)


_INVOKE_CEILINGS = ("max_tokens", "max_completion_tokens", "max_gen_len", "max_tokens_to_sample", "maxTokens")
_INVOKE_NESTED = (
    ("textGenerationConfig", "maxTokenCount"),
    ("inferenceConfig", "maxTokens"),
    ("inferenceConfig", "max_new_tokens"),
)


def bedrock_invoke(request: Mapping[str, Any], bounds: Bounds = BEDROCK, tokenizer: Tokenizer | None = None) -> Demand:
    """Reads a request of `invoke_model`: its body is the model's own JSON.

    Messages in the form of `anthropic` are read as such; any other body counts as text, byte by byte, pictures as they
    are encoded included. Ceilings that are known: `max_tokens`, `max_completion_tokens`, `max_gen_len`,
    `max_tokens_to_sample`, `maxTokens`, `textGenerationConfig.maxTokenCount`, `inferenceConfig.maxTokens` and
    `.max_new_tokens`.

    Errors: as in `openai_chat`; `UnboundedInput` for a body that is no JSON object.
    """
    asked = _without_nothing(request)
    model = _model_of(asked, "modelId")
    body = _json_body(asked.get("body", b""))
    if "anthropic_version" in body:
        read = anthropic_messages({"model": model, **body}, bounds, tokenizer)
        return replace(read, model=model, variant=_bedrock_variant(asked))
    flat = {name: body[name] for name in _INVOKE_CEILINGS if name in body}
    for outer, inner in _INVOKE_NESTED:
        nested = body.get(outer)
        if isinstance(nested, Mapping) and inner in nested:
            flat[f"{outer}.{inner}"] = nested[inner]
    ceiling = replace(_ceiling_of(flat, list(flat), "max_tokens"), answers=_answers_of(body))
    reader = _Reader(bounds, tokenizer)
    reader.plain(body)
    _no_media(reader, body, "body")
    reader.tokens += bounds.tools if body.keys() & {"tools", "toolConfig"} else 0
    reader.tokens += bounds.message * len(_listed(body.get("messages", ())))
    return reader.demand(model, ceiling, _bedrock_variant(asked))


def _no_media(reader: _Reader, value: object, where: str) -> None:
    """Pictures, films and sound in a body of unknown form have no bound that could be read from it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if any(word in str(name).lower() for word in ("image", "video", "audio", "document")):
                reader.unknown(f"{where}.{name}")
            _no_media(reader, inner, f"{where}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _no_media(reader, inner, f"{where}[{number}]")


def _json_body(body: object) -> dict[str, Any]:
    try:
        parsed = json.loads(body) if isinstance(body, str | bytes | bytearray) else None
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UnboundedInput("body is no JSON object, so nothing bounds its tokens; pass the model's request as JSON")
    return parsed
