"""Amounts that are decided on here and not in the database: the same rules, exact at any number of digits."""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation
from functools import lru_cache

from quota.calls import Costs
from quota.calls.base import COSTS
from quota.errors import AmountOutOfRange, InvalidAmount, InvalidCosts

__all__ = [
    "PLAIN",
    "PLAIN_DIGITS",
    "STEP",
    "ZERO",
    "Amounts",
    "add",
    "amounts_of",
    "divide",
    "exact_amount",
    "floored",
    "multiply",
    "remainder",
    "subtract",
]

Amounts = dict[str, Decimal]
"""Amounts by unit, judged."""

ZERO = Decimal(0)
LIMIT = Decimal(10) ** 18
STEP = Decimal(1).scaleb(-12)

# A context of our own: a caller's may round to 28 digits or fewer, and amounts have up to 30, their sums a few more.
_exact = Context(prec=96, traps=[InvalidOperation])
add = _exact.add
subtract = _exact.subtract
multiply = _exact.multiply
divide = _exact.divide_int
remainder = _exact.remainder

# Sums of amounts below the one come out exact in a context of so many digits, as Python's own is: there its
# operators may be used, which are faster.
PLAIN = Decimal(10) ** 15
PLAIN_DIGITS = 28


def floored(amount: Decimal, step: Decimal) -> Decimal:
    """Returns the amount, rounded down to whole steps."""
    return subtract(amount, remainder(amount, step))


@lru_cache(maxsize=4096, typed=True)
def _number(value: str | int) -> Decimal | None:
    if isinstance(value, int):
        return Decimal(value)
    whole, point, fraction = value.partition(".")
    digits = whole.isascii() and whole.isdigit() and (not point or (fraction.isascii() and fraction.isdigit()))
    return Decimal(value) if digits else None


def exact_amount(unit: str, value: object) -> Decimal:
    """Returns the amount of a unit as the ledger reads it: finite, 0 to below 10^18, at most 12 fractional digits.

    Errors: `TypeError` for what is no `Decimal`, `int` or `str`; `InvalidAmount`, `AmountOutOfRange`.
    """
    if isinstance(value, bool | float) or not isinstance(value, Decimal | int | str):
        COSTS.send("costs", {unit: value})  # raises what a call to the database raises
        raise TypeError(f"costs: the amount of {unit!r} must be a Decimal, an int or a str")
    found = value if isinstance(value, Decimal) else _number(value)
    if found is None or not found.is_finite() or found < ZERO:
        raise InvalidAmount(
            f'invalid_amount: {str(value)[:80]!r} of "{unit}" is no finite decimal of at least 0',
            "Send decimal digits, such as 0.25.",
        )
    if found >= LIMIT:
        raise AmountOutOfRange(f'amount_out_of_range: {found:e} of "{unit}" is 10^18 or more', "Stay below 10^18.")
    if remainder(found, STEP):
        raise InvalidAmount(
            f'invalid_amount: {str(value)[:80]} of "{unit}" has more than 12 fractional digits',
            "Round it yourself, up for a hold.",
        )
    return found if found else ZERO


def amounts_of(costs: Costs) -> Amounts:
    """Returns a cost map, judged. Errors: `InvalidCosts` for an empty one, and those of `exact_amount`."""
    COSTS.send("costs", costs)  # what cannot even be sent is refused in the same words
    if not costs:
        raise InvalidCosts("invalid_costs: the costs are empty", 'Name a unit and an amount, such as {"usd": "0.25"}.')
    return {unit: exact_amount(unit, value) for unit, value in costs.items()}
