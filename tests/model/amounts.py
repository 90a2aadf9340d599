"""What may be written where an amount, a cost map, a name or a time to live is expected.

Amounts are `Fraction`: every operation on them is exact, and no float can slip in.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

from tests.model.errors import ModelError

Costs = Mapping[str, object]
"""A cost map as it stands in JSON: numbers are int or Decimal, decimal strings are str."""

ZERO = Fraction(0)
AMOUNT_BOUND = Fraction(10) ** 18
AMOUNT_SCALE = Fraction(10) ** 12
MAXIMUM_TTL = timedelta(hours=24)

_DECIMAL_STRING = re.compile(r"[0-9]+(\.[0-9]+)?")
_SUBJECT = re.compile(r"([a-z][a-z0-9_-]*):(.+)", re.DOTALL)


def amount(value: object) -> Fraction:
    """One amount: finite, >= 0, below 10^18, at most 12 fractional digits (trailing zeros do not count)."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str | Fraction):
        raise ModelError("invalid_amount", f"{value!r} is neither a number nor a decimal string")
    if isinstance(value, str) and not _DECIMAL_STRING.fullmatch(value):
        raise ModelError("invalid_amount", f"{value!r} is not written as digits with an optional fraction")
    if isinstance(value, Decimal) and not value.is_finite():
        raise ModelError("invalid_amount", f"{value} is not finite")
    exact = Fraction(value)
    if exact < 0:
        raise ModelError("invalid_amount", f"{value} is negative")
    if (exact * AMOUNT_SCALE).denominator != 1:
        raise ModelError("invalid_amount", f"{value} has more than 12 fractional digits")
    if exact >= AMOUNT_BOUND:
        raise ModelError("amount_out_of_range", f"{value} is not below 10^18")
    return exact


def costs_of(raw: object) -> dict[str, Fraction]:
    """A cost map, unit -> amount. Null, another type and the empty map are refused."""
    if not isinstance(raw, Mapping) or not raw:
        raise ModelError("invalid_costs", "costs are a map of unit to amount and never empty")
    return {str(unit): amount(value) for unit, value in raw.items()}


def whole(value: Fraction, unit: str) -> Fraction:
    """Slots of a concurrency limit are whole."""
    if value.denominator != 1:
        raise ModelError("invalid_amount", f"{unit} counts whole slots, not {value}")
    return value


def check_name(name: str) -> str:
    """A limit, tier, tenant or unit name: 1-200 characters, NFC, nothing invisible, no white space at the ends."""
    if not 1 <= len(name) <= 200 or name != name.strip() or name != unicodedata.normalize("NFC", name):
        raise ModelError("invalid_name", repr(name))
    if any(unicodedata.category(character) in ("Cc", "Cf") for character in name):
        raise ModelError("invalid_name", repr(name))
    return name


def check_subject(name: str) -> str:
    """A subject's name: `kind:id`. `kind:*` is the kind itself and never a subject."""
    check_name(name)
    match = _SUBJECT.fullmatch(name)
    if match is None or match[2] == "*":
        raise ModelError("invalid_name", repr(name))
    return name


def kind_of(subject: str) -> str:
    """What stands before the first colon."""
    return subject.partition(":")[0]


def check_ttl(ttl: timedelta | None) -> timedelta:
    """More than zero, at most the configured maximum."""
    if ttl is None or not timedelta(0) < ttl <= MAXIMUM_TTL:
        raise ModelError("invalid_ttl", str(ttl))
    return ttl


def check_headroom(headroom: Decimal | int | Fraction) -> Fraction:
    """From 0 up to, not including, 1."""
    if isinstance(headroom, Decimal) and not headroom.is_finite():
        raise ModelError("invalid_argument", f"headroom {headroom}")
    exact = Fraction(headroom)
    if not 0 <= exact < 1:
        raise ModelError("invalid_argument", f"headroom {headroom}")
    return exact


def check_on_expiry(on_expiry: str | None) -> str | None:
    """`release`, `charge`, or nothing said."""
    if on_expiry not in (None, "release", "charge"):
        raise ModelError("invalid_argument", f"on_expiry {on_expiry!r}")
    return on_expiry


def seconds(span: timedelta) -> Fraction:
    """A time span in seconds, exactly (datetimes carry microseconds)."""
    return Fraction(span // timedelta(microseconds=1), 1_000_000)


def ceil_to_microsecond(wait_s: Fraction) -> Fraction:
    """The first clock reading that is not too early: clocks count microseconds."""
    return Fraction(math.ceil(wait_s * 1_000_000), 1_000_000)
