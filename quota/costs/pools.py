"""A provider's quotas as pools: what the JSON of `aws service-quotas list-service-quotas` says about an account.

A pool is a subject, `pool:ACCOUNT/REGION/MODEL/ENDPOINT`, that every call to that model there names beside its spender.
Names are those of the quotas: "On-demand model inference tokens per minute for Anthropic Claude Opus 4.8 V1".
Source: https://docs.aws.amazon.com/bedrock/latest/userguide/quotas-runtime.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from typing import Any

from quota.errors import CostError

__all__ = ["InvalidQuotas", "Pool", "PoolLimit", "Pools", "read_service_quotas"]

_MINUTES_A_DAY = 1440
_PLACES = Decimal("0.000000000001")
_VALUE_MAX = Decimal(10**15)
_NAME = re.compile(
    r"(?P<scope>(?:Global )?[Cc]ross-[Rr]egion|On-demand)(?P<fast> latency-optimized)?"
    r"(?: model inference| InvokeModel)? (?P<what>requests|tokens|(?:input|output) tokens) per (?P<span>minute|day)"
    r" for (?P<model>.+)"
)
_DAY = re.compile(
    r"Model invocation max tokens per day for (?P<model>.+?)(?P<doubled> \(doubled for cross-region calls\))?"
)
_SPLIT = re.compile(
    r"(?:[Bb]edrock[- ][Mm]antle )?(?:model inference )?(?P<what>[Ii]nput|[Oo]utput) tokens per (?P<span>minute|day)"
    r" for (?P<model>.+)"
)
_ARN = re.compile(r"arn:aws[a-z-]*:servicequotas:(?P<region>[a-z0-9-]*):(?P<account>\d{12})?:.*")


class InvalidQuotas(CostError, name="invalid_quotas"):  # noqa: N818 - the contract's way of naming
    """The JSON is not what `aws service-quotas list-service-quotas` prints; the message names the line."""


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """One limit of a pool, as `set_limit` takes it.

    Fields:
        name: such as `tpm`.
        unit: `requests`, `quota_tokens`, `quota_input_tokens` or `quota_output_tokens`.
        kind: `bucket` for a rate per minute, `budget` for a day.
        capacity: the quota's value; None: the account has no such quota, which is declared, not assumed.
        refill_per_s: of a bucket.
        period: of a budget.
        declared: False when the number was not in the JSON.
    """

    name: str
    unit: str
    kind: str
    capacity: Decimal | None
    refill_per_s: Decimal | None = None
    period: str | None = None
    declared: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool: its subject's name, and its limits."""

    subject: str
    limits: tuple[PoolLimit, ...]


@dataclass(frozen=True, slots=True)
class Pools:
    """What was read: the pools, and the names of the quotas that are none of a model's rates."""

    pools: tuple[Pool, ...]
    ignored: tuple[str, ...]


def read_service_quotas(
    text: str, *, account: str | None = None, region: str | None = None, model: str | None = None
) -> Pools:
    """Reads the JSON of `aws service-quotas list-service-quotas --service-code bedrock`.

    Arguments:
        text: the JSON.
        account, region: None: as the quotas' ARNs say.
        model: only quotas whose model's name has this in it, in any case; None: all.

    Result: a pool for each model and endpoint that has a rate. Its limits: `rpm` and `tpm`, buckets of one minute;
    `tpd`, a calendar day in UTC, TPM x 1440 where the account has no value of its own; what it does not have at all is
    declared unlimited, and counted by the day.
    Errors: `InvalidQuotas` naming the line.
    """
    found: dict[str, dict[tuple[str, str], Decimal]] = {}
    doubled: list[tuple[str, str, Decimal, bool]] = []
    ignored: list[str] = []
    for line, one in _quotas(text):
        name, value = _name_and_value(one, line)
        place = _place(one, line, account, region)
        split = _SPLIT.fullmatch(name)
        day = _DAY.fullmatch(name)
        match = split or _NAME.fullmatch(name)
        told = day or match
        if told is None or (model is not None and model.lower() not in told["model"].lower()):
            ignored.append(name)
        elif day:
            doubled.append((f"{place}/{_slug(day['model'])}", "tokens", value, day["doubled"] is not None))
        elif match:
            endpoint = "mantle" if "put" in match["what"] else _endpoint(match["scope"], match["fast"])
            subject = f"{place}/{_slug(match['model'])}/{endpoint}"
            found.setdefault(subject, {})[match["what"].lower().removesuffix(" tokens"), match["span"]] = value
    for prefix, what, value, twice in doubled:
        for endpoint, times in (("runtime", 1), ("runtime-cross-region", 2 if twice else 1)):
            if f"{prefix}/{endpoint}" in found:
                found[f"{prefix}/{endpoint}"].setdefault((what, "day"), value * times)
    return Pools(tuple(Pool(subject, _limits(values)) for subject, values in sorted(found.items())), tuple(ignored))


def _endpoint(scope: str, fast: str | None) -> str:
    words = {"on-demand": "runtime", "cross-region": "runtime-cross-region"}
    return words.get(scope.lower(), "runtime-global") + ("-fast" if fast else "")


def _slug(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def _limits(values: dict[tuple[str, str], Decimal]) -> tuple[PoolLimit, ...]:
    kinds = {what for what, _ in values} - {"requests"}
    split = bool(kinds & {"input", "output"})
    limits = list(_pair("rpm", "rpd", "requests", values.get(("requests", "minute")), values.get(("requests", "day"))))
    for what in ("input", "output") if split else ("tokens",):
        prefix = f"{what}-" if split else ""
        unit = f"quota_{what}_tokens" if split else "quota_tokens"
        minute, day = values.get((what, "minute")), values.get((what, "day"))
        declared = day is not None
        if minute is not None and day is None:
            day = minute * _MINUTES_A_DAY
        limits += _pair(f"{prefix}tpm", f"{prefix}tpd", unit, minute, day, declared, always=True)
    return tuple(limits)


def _pair(
    per_minute: str,
    per_day: str,
    unit: str,
    minute: Decimal | None,
    day: Decimal | None,
    declared: bool = True,
    always: bool = False,
) -> Iterator[PoolLimit]:
    """The limit per minute, where there is one, and the one per day; without either an unlimited one that counts."""
    if minute is not None:
        refill = (minute / 60).quantize(_PLACES, ROUND_FLOOR, Context(prec=40))
        yield PoolLimit(per_minute, unit, "bucket", minute, refill_per_s=refill)
    if day is not None or always or minute is None:
        yield PoolLimit(per_day, unit, "budget", day, period="day", declared=declared and day is not None)


# -- the JSON, with lines -------------------------------------------------------------------------------------------


def _quotas(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line, quota) for every element of "Quotas"."""
    try:
        whole = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InvalidQuotas(f"line {error.lineno}: no JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidQuotas("line 1: nested too deeply") from None
    except ValueError as error:
        raise InvalidQuotas(f"line 1: no JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("Quotas"), list):
        raise InvalidQuotas(
            'line 1: no object with a list "Quotas"; pass what aws service-quotas list-service-quotas prints'
        )
    decoder = json.JSONDecoder(parse_float=Decimal, parse_int=Decimal)
    at = _start(text, decoder)
    while text[at := _skip(text, at)] != "]":
        line = text.count("\n", 0, at) + 1
        one, at = decoder.raw_decode(text, at)
        if not isinstance(one, dict):
            raise InvalidQuotas(f"line {line}: {text[at - 20 : at]!r:.40} is no quota; each is an object")
        yield line, one


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'the key "{next(name for name in names if names.count(name) > 1):.60}" stands twice')
    return found


def _start(text: str, decoder: json.JSONDecoder) -> int:
    """Where the list "Quotas" of the outermost object begins. The text has been parsed: it has one."""
    at = _skip(text, 0) + 1
    while True:
        name, at = decoder.raw_decode(text, _skip(text, at))
        at = _skip(text, at)
        if name == "Quotas":
            return at + 1
        _, at = decoder.raw_decode(text, at)


def _skip(text: str, at: int) -> int:
    """The next place that is neither white space nor a separator."""
    found = re.compile(r"[\s,:]*").match(text, at)
    return found.end() if found else at


def _name_and_value(one: dict[str, Any], line: int) -> tuple[str, Decimal]:
    name, value = one.get("QuotaName"), one.get("Value")
    if not isinstance(name, str) or not name:
        raise InvalidQuotas(f'line {line}: "QuotaName" is {name!r:.60}, not the text of a name')
    if not isinstance(value, Decimal) or not 0 <= value < _VALUE_MAX or _decimals(value) > 12:
        raise InvalidQuotas(
            f'line {line}: "Value" of "{name}" is {value!s:.60}, not a number below 10^15 with at most 12 decimals'
        )
    return name, value.normalize() + 0


def _decimals(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _place(one: dict[str, Any], line: int, account: str | None, region: str | None) -> str:
    arn = _ARN.fullmatch(str(one.get("QuotaArn", "")))
    owner = account or (arn["account"] if arn else None)
    where = region or (arn["region"] if arn else None)
    if not owner or not where:
        raise InvalidQuotas(
            f'line {line}: "QuotaArn" is {one.get("QuotaArn")!r:.80} and names no account and region; state both'
        )
    return f"pool:{owner}/{where}"
