"""The most that a request may use: its input in tokens, and its ceiling on output. Nothing is sent or downloaded.

**Text** costs at most one token per UTF-8 byte: the tokenizers of these models cut bytes, and no token covers less than
one. Some normalise the text first (NFKC) and may lengthen it, so the longer of the two counts. What the provider adds
around it (roles, separators, the instructions that come with tools) has an allowance, `Bounds`.

**Images and audio** are counted by the provider's own rules; `Bounds` states the most for one. **Files, URLs of
documents, stored prompts and conversations** have no bound in the request. They cost at most what the model takes at
all, where the book knows that (`input_max`). **Tools that the provider runs** ask the model again and again, and have
not even that bound. Otherwise the request is refused by name, unless the caller states a bound of its own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from quota.errors import MissingCeiling, UnboundedInput

__all__ = ["ANTHROPIC", "BEDROCK", "OPENAI", "Bounds", "Ceiling", "Demand", "Tokenizer", "clamped", "text_bound"]

Tokenizer = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most tokens that a provider adds to a request, or counts for what is no text.

    Fields:
        request: for every request.
        message: for every message, beside its text.
        tools: once when tools are passed, for the instructions that come with them.
        image: for one image.
        audio_bytes_per_token: bytes of encoded audio that make one token at least.
        source: where the numbers come from.
    """

    request: int
    message: int
    tools: int
    image: int
    audio_bytes_per_token: int
    source: str


OPENAI = Bounds(
    request=64,
    message=16,
    tools=1024,
    # gpt-4o-mini, the dearest: 2,833 + 5,667 for each of at most 8 tiles.
    image=48_169,
    audio_bytes_per_token=1,
    source="https://platform.openai.com/docs/guides/images-vision#calculating-costs",
)
ANTHROPIC = Bounds(
    request=64,
    message=16,
    tools=2048,
    # 2,576 pixels on the long edge make 4,784 tokens; rounded up.
    image=5_000,
    audio_bytes_per_token=1,
    source="https://platform.claude.com/docs/en/build-with-claude/vision",
)
BEDROCK = replace(OPENAI, tools=2048, source="the larger of the two above: models of both kinds run there")


def text_bound(text: str, tokenizer: Tokenizer | None = None) -> int:
    """Returns the most tokens that a text makes.

    Arguments:
        text: what is sent.
        tokenizer: counts the tokens of a text as the model does, if one is installed; it may not load anything from
            the network. None: a token per byte.
    """
    if tokenizer is not None:
        return tokenizer(text)
    return max(len(text.encode(errors="surrogatepass")), len(_normal(text).encode(errors="surrogatepass")))


def _normal(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that comes back.

    Fields:
        parameter: the name of the request's parameter.
        tokens: the most tokens of one answer.
        answers: how many answers are asked for.
        beside: further output tokens that may be billed, whatever the ceiling (rejected predictions).
    """

    parameter: str
    tokens: int
    answers: int = 1
    beside: int = 0

    @property
    def total(self) -> int:
        """The most output tokens that are billed for the request."""
        return self.tokens * self.answers + self.beside


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request may use at most, as far as the request itself tells.

    Fields:
        model: as the request names it.
        input_tokens: the most tokens of what is in the request.
        unbounded: the names of its parts that have no bound in the request; the model's own maximum bounds them.
        endless: the names of its parts that nothing bounds: tools that the provider runs ask the model again and again.
        ceiling: the most that comes back.
        sound: audio is sent or asked for; it has a price of its own.
        variant: the variant of the price that the request asks for, "" for the usual one.
    """

    model: str
    input_tokens: int
    unbounded: tuple[str, ...]
    endless: tuple[str, ...]
    ceiling: Ceiling
    variant: str = ""
    sound: bool = False


def clamped(
    demand: Demand,
    *,
    input_max: int | None = None,
    output_max: int | None = None,
    own_bound: int | None = None,
    tokens_max: int | None = None,
) -> Demand:
    """Returns the demand, cut to what the model can do at all.

    Arguments:
        demand: what the request says.
        input_max: the most tokens the model takes; None: not known.
        output_max: the most tokens the model answers; None: not known.
        own_bound: the most input tokens of the whole request, as the caller states it; it goes before everything else.
        tokens_max: the most output tokens that this caller may ask of one answer (a run's `max_tokens`); None: no such.

    Result: without unbounded parts. Errors: `UnboundedInput` naming the parts; `MissingCeiling` when the ceiling asks
    for more than `tokens_max`.
    """
    ceiling = demand.ceiling
    if output_max is not None:
        ceiling = replace(ceiling, tokens=min(ceiling.tokens, output_max))
    if tokens_max is not None and ceiling.tokens > tokens_max:
        raise MissingCeiling(
            f"{ceiling.parameter} is {ceiling.tokens}, and this caller may ask for {tokens_max}; ask for less"
        )
    sent = demand.input_tokens
    if own_bound is not None:
        sent = own_bound
    elif demand.endless or (demand.unbounded and input_max is None):
        raise UnboundedInput(
            f"nothing bounds the tokens of {', '.join(demand.endless or demand.unbounded)}; "
            "leave it out, or state the most input tokens of the whole request"
        )
    elif demand.unbounded and input_max is not None:
        sent = input_max
    elif input_max is not None:
        sent = min(sent, input_max)
    return replace(demand, input_tokens=sent, unbounded=(), endless=(), ceiling=ceiling)
