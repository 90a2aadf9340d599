"""What an answer says about limits: the one serialiser of `RateLimit` and its relatives.

| style | headers |
|---|---|
| `draft-11` | `RateLimit-Policy`, `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11: lists of Strings (RFC 9651) |
| `legacy` | `X-RateLimit-Limit`, `-Remaining`, `-Reset` (seconds from now) of what binds; `X-RateLimit-Policy` |
| `none` | none of them |

`Retry-After` and `Quota-Bucket-Full-After` come with every style. The first says when *this* request fits, the second
when the bucket is full again: two figures, never mixed. Money never appears here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, get_args
from urllib.parse import quote

import http_sf

from quota.calls import LimitState, Reservation, Standing

__all__ = [
    "FULL_AFTER",
    "STYLES",
    "QuotaPolicy",
    "Style",
    "exposed",
    "full_after",
    "of_refusal",
    "of_states",
    "rate_limit_headers",
    "unique_names",
]

Style = Literal["draft-11", "legacy", "none"]
STYLES: tuple[str, ...] = get_args(Style)

FULL_AFTER = "Quota-Bucket-Full-After"
_NAMES = {
    "draft-11": ("RateLimit-Policy", "RateLimit"),
    "legacy": ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-RateLimit-Policy"),
    "none": (),
}

# RFC 9651, section 3.3.1: integers have at most 15 digits.
_MOST = 10**15 - 1
# RFC 9651, section 3.3.3: strings are printable ASCII. The rest is written as in URLs.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
# The draft's quota units; requests are its default.
_UNITS = {"requests": None, "concurrency": "concurrent-requests"}
_CREDITS = "credits"

# What counts by itself, where a limit counts it.
_IMPLIED = frozenset(_UNITS)

_ZERO = Decimal(0)

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPolicy:
    """One limit as the headers tell it.

    Fields:
        name: unique in its answer; an ancestor's begins with its kind.
        quota: its capacity.
        unit: the draft's quota unit; None: requests.
        window_s: seconds of its window, or until an empty bucket is full; None: it has none.
        remaining: what is left.
        reset_s: seconds until there is more, or on a refusal until this request fits; None: not known.
        full_after_s: seconds until a bucket is full; None for anything else.
    """

    name: str
    quota: int
    unit: str | None
    window_s: int | None
    remaining: int
    reset_s: int | None = None
    full_after_s: int | None = None


def of_states(
    states: Iterable[LimitState],
    subject: str,
    units: Collection[str],
    shifts: Mapping[str, Decimal] = MappingProxyType({}),
) -> list[QuotaPolicy]:
    """Returns the policies of an answer that was let through.

    Arguments:
        states: the limits on the subject's lineage, as they stand after the request.
        subject: who asked: its own limits go by their names.
        units: what the request is counted in, besides requests and concurrency.
        shifts: by unit, how much more is left than the states say; less, where it is below 0.
    """
    found = []
    for state in states:
        if state.capacity is None or not _told(state, units):
            continue
        shift = shifts.get(state.unit, _ZERO)
        if state.kind == "bucket":
            level = min(state.capacity, (state.level or _ZERO) + shift)
            reset_s = _next_unit_s(level, state)
            full_after_s = _refill_s(state.capacity - level, state.refill_per_s)
        else:
            reset_s, full_after_s = _up(state.resets_in_s), None
        found.append(
            QuotaPolicy(
                name=_name(state.owner, state.limit_name, subject),
                quota=_whole(state.capacity),
                unit=_UNITS.get(state.unit, _CREDITS),
                window_s=_window_s(state),
                remaining=_whole(min(state.capacity, (state.available or _ZERO) + shift)),
                reset_s=reset_s,
                full_after_s=full_after_s,
            )
        )
    return unique_names(found)


def of_refusal(
    refusal: Reservation, states: Iterable[LimitState], subject: str
) -> tuple[list[QuotaPolicy], list[QuotaPolicy]]:
    """Returns the policies of a refused request: all that it was judged by, and those that it violates.

    Arguments:
        refusal: the answer; all balances and waits are of its one snapshot.
        states: the limits on the subject's lineage, read before or after: only their terms count.
        subject: who asked.
    """
    terms = {(state.owner, state.limit_name): state for state in states}
    judged = [
        (item, term)
        for item in refusal.remaining
        if item.capacity is not None and (term := terms.get((item.subject, item.limit_name or ""))) and not term.money
    ]
    policies = unique_names([_of_standing(item, term, subject) for item, term in judged])
    return policies, [policy for policy, (item, _) in zip(policies, judged, strict=True) if item.reason is not None]


def rate_limit_headers(
    policies: Sequence[QuotaPolicy], style: Style, violated: Sequence[QuotaPolicy] | None = None
) -> Headers:
    """Returns the headers of an answer.

    Arguments:
        policies: all that the request was judged by.
        style: which headers.
        violated: on a refusal, those whose balance is told; None: all of them.
    """
    if not policies or style == "none":
        return []
    if style == "legacy":
        return _legacy(policies, violated)
    told = policies if violated is None else violated
    # RFC 9651, section 4.1.1: a list is its members with ", " between them.
    headers = [
        ("RateLimit-Policy", ", ".join([_terms(one.name, one.quota, one.unit, one.window_s) for one in policies]))
    ]
    if told:
        headers.append(("RateLimit", ", ".join([_balance(one) for one in told])))
    return headers


def full_after(policies: Iterable[QuotaPolicy]) -> Headers:
    """Returns the header that says when every bucket is full again, in seconds; none without a bucket."""
    seconds = [policy.full_after_s for policy in policies if policy.full_after_s is not None]
    return [(FULL_AFTER, str(max(seconds)))] if seconds else []


def exposed(style: Style) -> tuple[str, ...]:
    """Returns the headers that a browser's script may be shown (`Access-Control-Expose-Headers`)."""
    return (*_NAMES[style], "Retry-After", FULL_AFTER)


def unique_names(policies: Sequence[QuotaPolicy]) -> list[QuotaPolicy]:
    """Returns the policies, later ones of the same name numbered: `org-monthly`, `org-monthly-2`."""
    taken: set[str] = set()
    found = []
    for policy in policies:
        name, number = policy.name, 1
        while name in taken:
            number += 1
            name = f"{policy.name}-{number}"
        taken.add(name)
        found.append(policy if name == policy.name else replace(policy, name=name))
    return found


def _legacy(policies: Sequence[QuotaPolicy], violated: Sequence[QuotaPolicy] | None) -> Headers:
    headers = [
        ("X-RateLimit-Policy", ", ".join(f"{p.quota};w={p.window_s}" if p.window_s else str(p.quota) for p in policies))
    ]
    if violated is None:
        # What is nearest to its end binds; on a refusal the longest wait.
        binding = min(policies, key=lambda one: Decimal(one.remaining) / max(one.quota, 1))
    elif violated:
        binding = max(violated, key=lambda one: one.reset_s or 0)
    if violated != []:
        headers += [
            ("X-RateLimit-Limit", str(binding.quota)),
            ("X-RateLimit-Remaining", str(binding.remaining)),
            ("X-RateLimit-Reset", str(binding.reset_s or 0)),
        ]
    return headers


def _of_standing(item: Standing, term: LimitState, subject: str) -> QuotaPolicy:
    bucket = item.kind == "bucket"
    capacity, level = item.capacity or Decimal(0), item.level or Decimal(0)
    waits = item.reason in ("rate", "exhausted")
    return QuotaPolicy(
        name=_name(item.subject, item.limit_name or "", subject),
        quota=_whole(capacity),
        unit=_UNITS.get(item.unit or "", _CREDITS),
        window_s=_window_s(term),
        remaining=_whole(item.available or Decimal(0)),
        reset_s=_up(item.retry_after_s) if waits else None,
        full_after_s=_refill_s(capacity - level, term.refill_per_s) if bucket else None,
    )


def _told(state: LimitState, units: Collection[str]) -> bool:
    return not state.money and (state.unit in units or state.unit in _IMPLIED)


@functools.lru_cache(maxsize=4096)
def _name(owner: str, limit_name: str, subject: str) -> str:
    """An ancestor is named by its kind, never by its id."""
    name = limit_name if owner == subject else f"{owner.partition(':')[0]}-{limit_name}"
    return quote(name, safe=_PRINTABLE)


def _window_s(state: LimitState) -> int | None:
    if state.kind == "bucket":
        return _refill_s(state.capacity or Decimal(0), state.refill_per_s)
    return _up(state.window_s)


def _next_unit_s(level: Decimal, state: LimitState) -> int | None:
    """Seconds until a bucket at this level has one more whole unit; None when it is full."""
    capacity = state.capacity or _ZERO
    if level >= capacity:
        return None
    return _refill_s(min(Decimal(math.floor(level) + 1), capacity) - level, state.refill_per_s)


def _refill_s(amount: Decimal, refill_per_s: Decimal | None) -> int | None:
    return _up(amount / refill_per_s) if refill_per_s else None


def _up(value: Decimal | None) -> int | None:
    return None if value is None else min(_MOST, max(0, math.ceil(value)))


def _whole(value: Decimal) -> int:
    return min(_MOST, max(0, math.floor(value)))


@functools.lru_cache(maxsize=4096)
def _terms(name: str, quota: int, unit: str | None, window_s: int | None) -> str:
    """What a policy is, as a member of a list. It hardly ever changes, so most have been written before."""
    parameters = {"q": quota, "qu": unit, "w": window_s}
    member: Any = (name, {key: value for key, value in parameters.items() if value is not None})
    return str(http_sf.ser([member]))


def _balance(policy: QuotaPolicy) -> str:
    """What is left of a policy, as a member of a list."""
    # RFC 9651, section 4.1.1.2: parameters are ";key=value"; 4.1.4: an integer is its decimal digits.
    left = f"{_string(policy.name)};r={policy.remaining}"
    return left if policy.reset_s is None else f"{left};t={policy.reset_s}"


@functools.lru_cache(maxsize=4096)
def _string(value: str) -> str:
    return str(http_sf.ser([value]))
