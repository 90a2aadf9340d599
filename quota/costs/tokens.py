"""What a call used, and what that takes from a provider's quota.

Billing and quota are two formulas. Billing counts every token at its price (`quota.costs.prices`). A quota on Amazon
Bedrock is held at input + max_tokens when the call starts and settled at input + cache writes + output x burndown when
it ends; cache reads are free. Source: "How tokens are counted in Amazon Bedrock",
https://docs.aws.amazon.com/bedrock/latest/userguide/quotas-token-burndown.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Literal

from quota.costs.names import family
from quota.errors import MalformedUsage, UnknownBurndown

__all__ = [
    "BURNDOWNS",
    "TOKENS_MAX",
    "Burndown",
    "HoldFormula",
    "QuotaTokens",
    "Usage",
    "quota_tokens_of",
]

# A provider that reports more tokens than this for one call reports nonsense.
TOKENS_MAX = 10**9

HoldFormula = Literal["provider", "worst"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one call used. The parts are disjoint: a token is counted once.

    Fields:
        input: tokens sent that no cache served or stored.
        cached_input: tokens that a cache served.
        cache_write_5m: tokens written to a cache, for five minutes or as long as the provider says.
        cache_write_1h: tokens written to a cache for an hour.
        output: tokens that came back, reasoning included: it is billed as output.
        input_audio, output_audio: tokens of sound, which have a price of their own.
        uses: how often paid extras were used, by name, such as `{"web_search": 2}`.

    Errors: `MalformedUsage` for a count that is negative, no whole number, or above `TOKENS_MAX`.
    """

    input: int = 0
    cached_input: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0
    input_audio: int = 0
    output_audio: int = 0
    uses: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "uses"}
        for name, count in (counts | dict(self.uses)).items():
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= TOKENS_MAX:
                raise MalformedUsage(f"{name} is {count!r:.60}, not a whole number from 0 to {TOKENS_MAX}")

    @property
    def total_input(self) -> int:
        """All tokens sent, cached or not: what decides about long-context prices."""
        return self.input + self.cached_input + self.cache_write_5m + self.cache_write_1h + self.input_audio

    @property
    def total_output(self) -> int:
        """All tokens that came back."""
        return self.output + self.output_audio

    @property
    def billed_tokens(self) -> int:
        """All tokens that are billed at some price."""
        return self.total_input + self.total_output


@dataclass(frozen=True, slots=True)
class Burndown:
    """How many quota tokens an output token takes: one line of the provider's table.

    Fields:
        models: regular expression that a model's whole name matches, in lower case, without provider and date.
        multiplier: quota tokens per output token; None: the provider does not say, and nobody guesses.
        endpoint: the endpoint it holds for.
        effective_from: first day (UTC) it holds for; None: from the beginning.
        source: where it stands.
    """

    models: str
    multiplier: int | None
    endpoint: str = "bedrock-runtime"
    effective_from: date | None = None
    source: str = "https://docs.aws.amazon.com/bedrock/latest/userguide/quotas-token-burndown.html"


BURNDOWNS: tuple[Burndown, ...] = (
    Burndown(r"claude-(?:[a-z]+-)?4[-.]8(?:-[a-z]+)*", 15),
    Burndown(r"claude-(?:sonnet|opus)-5(?:[-.]0)?|claude-5(?:[-.]0)?-(?:sonnet|opus)", 10),
    Burndown(r"claude-(?:[a-z]+-)?4(?:[-.][0-7])?(?:-[a-z]+)*", 5),
    Burndown(r"claude-(?:[a-z]+-)?3(?:[-.]\d)?(?:-[a-z]+)*|claude-v?[12](?:[-.:]\d)?|claude-instant.*", 5),
    # A Claude that the table does not know yet: a guess of 1 would pass the quota, a guess of 15 would waste it.
    Burndown(r"claude.*", None),
    Burndown(r"gpt-5[-.]6(?:-(?:sol|terra|luna))?", 10),
    Burndown(r".*", 1),
)
"""The multipliers as the provider states them; the first line that matches holds."""


@dataclass(frozen=True, slots=True)
class QuotaTokens:
    """The quota formula of one model on one endpoint.

    Fields:
        multiplier: quota tokens per output token.
        split: input and output have quotas of their own (`bedrock-mantle`); the multiplier is 1 then.
    """

    multiplier: int = 1
    split: bool = False

    def held(self, input_tokens: int, output_ceiling: int, formula: HoldFormula = "worst") -> dict[str, int]:
        """Returns the quota tokens to hold before a call, by unit.

        Arguments:
            input_tokens: the most that is sent, cached or not.
            output_ceiling: the most that comes back, of all answers together.
            formula: `provider` holds what the provider does (input + ceiling), and so admits what the provider would;
                `worst` holds what the call can burn (input + ceiling x multiplier), so that the quota itself holds.
        """
        if self.split:
            return {"quota_input_tokens": input_tokens, "quota_output_tokens": output_ceiling}
        return {"quota_tokens": input_tokens + output_ceiling * (self.multiplier if formula == "worst" else 1)}

    def settled(self, usage: Usage) -> dict[str, int]:
        """Returns the quota tokens that a call has taken, by unit: input + cache writes + output x multiplier."""
        sent = usage.total_input - usage.cached_input
        if self.split:
            return {"quota_input_tokens": sent, "quota_output_tokens": usage.total_output}
        return {"quota_tokens": sent + usage.total_output * self.multiplier}


def quota_tokens_of(model: str, endpoint: str, on: date, table: Iterable[Burndown] = BURNDOWNS) -> QuotaTokens:
    """Returns the quota formula of a model.

    Arguments:
        model: its name, in any spelling that `names.family` understands.
        endpoint: `bedrock-runtime`, `bedrock-mantle`, or whatever the table speaks of; on others an output token is
            one quota token.
        on: the day (UTC) of the call.
        table: the lines, the most specific first; of lines with the same expression the newest that holds on the day
            decides.

    Errors: `UnknownBurndown` when the provider does not say.
    """
    if endpoint == "bedrock-mantle":
        return QuotaTokens(split=True)
    lines = [line for line in table if line.endpoint == endpoint]
    name = family(model)
    for line in lines:
        if not re.fullmatch(line.models, name):
            continue
        dated = [
            other
            for other in lines
            if other.models == line.models and (other.effective_from is None or other.effective_from <= on)
        ]
        if not dated:
            continue
        newest = max(dated, key=lambda other: other.effective_from or date.min)
        if newest.multiplier is None:
            raise UnknownBurndown(
                f'nobody has said how many quota tokens an output token of "{model}" takes on {endpoint}; '
                "pass the formula, QuotaTokens(multiplier), as the provider states it"
            )
        return QuotaTokens(newest.multiplier)
    return QuotaTokens()
