"""How a call is put together: the values that may be sent, the statement, and the `Call` that every function is.

Statements use named notation with an explicit cast for every parameter: the types, and with them the plan, do not
depend on what a caller happens to pass.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring
from typing import ClassVar, Generic, Self, TypeVar
from uuid import UUID

from quota.calls.answers import Row
from quota.errors import AmountOutOfRange, InvalidAmount, InvalidArgument, InvalidName, Misuse

__all__ = [
    "AMOUNT",
    "BYTES",
    "COSTS",
    "COUNT",
    "DETAILS",
    "FLAG",
    "ID",
    "INSTANT",
    "NAME",
    "NAMES",
    "NUMBER",
    "ROLE",
    "SPAN",
    "TIME",
    "WHOLE",
    "WORD",
    "A",
    "Amount",
    "Call",
    "Costs",
    "Function",
    "Kind",
]

Amount = Decimal | int | str
"""An exact amount. Strings are decimal digits with at most one point; a binary float is never an amount."""

Costs = Mapping[str, Amount]
"""Amounts by unit, such as `{"usd": "0.25", "tokens": 1200}`."""

A = TypeVar("A", covariant=True)

# The amounts that the database takes end at 10^18 and 12 fractional digits. What is told apart here is only what cannot
# be written out in a sane number of digits; everything else is the database's to judge.
_DIGITS_MAX = 100
# Whole numbers below it are written as they are.
_PLAIN_END = 10**18

# What PostgreSQL cannot take as text: a NUL, and half of a surrogate pair.
_UNSENDABLE = re.compile("[\0\ud800-\udfff]")

# A NUL in a JSON text is written \u0000; an even number of backslashes before it does not escape it.
_JSON_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def _shown(value: object) -> str:
    try:
        text = ascii(value)
    except ValueError:  # an int of more digits than Python writes
        return "a very long number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sendable(value: str) -> bool:
    """True when PostgreSQL can take the text: no NUL, no half of a surrogate pair."""
    if value.isascii():  # nearly always, and several times as fast
        return "\0" not in value
    return _UNSENDABLE.search(value) is None


def _text(what: str, value: object, refuse: type[Misuse]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__} {_shown(value)}")
    if not _sendable(value):
        raise refuse(
            f"{refuse.name}: {what} {_shown(value)} has a NUL or half of a surrogate pair in it",
            "send printable characters only",
        )
    return value


def _name(what: str, value: object) -> str | None:
    return _text(what, value, InvalidName)


def _word(what: str, value: object) -> str | None:
    return _text(what, value, InvalidArgument)


def _role(what: str, value: object) -> str | None:
    text = _word(what, value)
    if text is not None and len(text.encode()) > 63:  # PostgreSQL would cut it, and so name another role
        raise InvalidArgument(f"invalid_argument: {what} {_shown(value)} is longer than 63 bytes", "name a login role")
    return text


def _names(what: str, value: object) -> list[str | None] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise TypeError(f"{what} must be a list of names, not {type(value).__name__} {_shown(value)}")
    return [_name(what, item) for item in value]


def _decimal(what: str, value: object, refuse: type[Misuse]) -> str | None:
    """The number as text that PostgreSQL reads exactly."""
    if value is None:
        return None
    if isinstance(value, bool | float) or not isinstance(value, Decimal | int | str):
        raise TypeError(
            f"{what} must be a Decimal, an int or a str, not {type(value).__name__} {_shown(value)}: "
            "an amount is exact, and a binary fraction is not"
        )
    if isinstance(value, str):
        return _text(what, value, refuse)
    if isinstance(value, int):
        if abs(value) >= 10**_DIGITS_MAX:
            raise AmountOutOfRange(
                f"amount_out_of_range: {what} has more than {_DIGITS_MAX} digits", "stay below 10^18"
            )
        return str(value)
    if not value.is_finite():
        return str(value)  # "NaN" and its like are the database's to refuse, by name
    if value == 0:
        return "0"  # also for -0 and 0E+9
    if value.adjusted() > _DIGITS_MAX:
        raise AmountOutOfRange(f"amount_out_of_range: {what} {_shown(value)} is 10^18 or more", "stay below 10^18")
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -10 * _DIGITS_MAX:
        raise refuse(f"{refuse.name}: {what} {_shown(value)} is too precise", "give at most 12 fractional digits")
    return format(value, "f")


def _amount(what: str, value: object) -> str | None:
    return _decimal(what, value, InvalidAmount)


def _number(what: str, value: object) -> str | None:
    text = _decimal(what, value, InvalidArgument)
    if text is not None and isinstance(value, str):
        try:
            return _decimal(what, Decimal(text), InvalidArgument)
        except InvalidOperation:
            raise InvalidArgument(
                f'invalid_argument: {what} "{_shown(value)}" is no number', "give one, such as 0.2"
            ) from None
    return text


def _costs(what: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a map of units to amounts, not {type(value).__name__} {_shown(value)}")
    sent = []
    for unit, number in value.items():
        if number is None:
            raise TypeError(f"{what}: the amount of {_shown(unit)} must be a Decimal, an int or a str, not None")
        name = encode_basestring(_name(f"{what}: the unit", unit) or "")
        if type(number) is int and abs(number) < _PLAIN_END:  # most of them; the rest is looked at closely
            sent.append(f'{name}: "{number}"')
        else:
            amount = _amount(f"{what}: the amount of {_shown(unit)}", number) or ""
            sent.append(f"{name}: {encode_basestring(amount)}")
    return f"{{{', '.join(sent)}}}"


def _plain(value: object) -> str:
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} {_shown(value)} is no JSON value")


# Made once: json.dumps makes a new encoder for every text that is not written by its defaults.
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain).encode


def _details(what: str, value: object) -> str:
    if value is None:
        return "{}"
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a map, not {type(value).__name__} {_shown(value)}")
    try:
        sent = _write(dict(value))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"invalid_argument: {what} is no JSON: {error}", "pass plain, finite values") from None
    if ("\\u0000" in sent and _JSON_NUL.search(sent)) or not _sendable(sent):
        raise InvalidArgument(
            f"invalid_argument: {what} has a NUL or half of a surrogate pair in it", "send printable characters only"
        )
    return sent


def _id(what: str, value: object) -> str | None:
    if value is None or isinstance(value, UUID):
        return None if value is None else str(value)
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a UUID or a str, not {type(value).__name__} {_shown(value)}")
    try:
        return str(UUID(value))
    except ValueError:
        raise InvalidArgument(f"invalid_argument: {what} {_shown(value)} is no UUID", "pass one, v7 advised") from None


def _span(what: str, value: object) -> timedelta | None:
    if value is None or isinstance(value, timedelta):
        return value
    raise TypeError(f"{what} must be a timedelta, not {type(value).__name__} {_shown(value)}")


def _time(what: str, value: object) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a datetime, not {type(value).__name__} {_shown(value)}")
    if value.tzinfo is None:
        raise TypeError(f"{what} {value} must have a time zone, such as datetime.now(UTC)")
    return value


def _bytes(what: str, value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError(f"{what} must be bytes, not {type(value).__name__}")


def _flag(what: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"{what} must be a bool, not {type(value).__name__} {_shown(value)}")


def _whole(what: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__} {_shown(value)}")
    if not -(2**31) <= value < 2**31:
        raise InvalidArgument(f"invalid_argument: {what} {_shown(value)} is out of range", "stay below 2147483648")
    return value


def _count(what: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__} {_shown(value)}")
    if not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"invalid_argument: {what} {_shown(value)} is out of range", "stay below 2^63")
    return value


def _instant(what: str, value: object) -> object:
    """A time with its zone, or `-infinity`: from the beginning."""
    if value is None or value == "-infinity":
        return value
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a datetime, not {type(value).__name__} {_shown(value)}")
    if value.tzinfo is None:
        raise InvalidArgument(f"invalid_argument: {what} {value} has no time zone", "pass one, such as UTC")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of parameter: its type in SQL, and how a value of it is sent (or refused) under a name."""

    cast: str
    send: Callable[[str, object], object]


NAME = Kind("text", _name)
WORD = Kind("text", _word)
ROLE = Kind("name", _role)
NAMES = Kind("text[]", _names)
COSTS = Kind("jsonb", _costs)
DETAILS = Kind("jsonb", _details)
AMOUNT = Kind("numeric", _amount)
NUMBER = Kind("numeric", _number)
ID = Kind("uuid", _id)
SPAN = Kind("interval", _span)
TIME = Kind("timestamptz", _time)
BYTES = Kind("bytea", _bytes)
FLAG = Kind("boolean", _flag)
WHOLE = Kind("integer", _whole)
COUNT = Kind("bigint", _count)
INSTANT = Kind("timestamptz", _instant)


class Function:
    """One SQL function: its name, the columns to read from it, and the kinds of what it takes."""

    def __init__(self, function: str, columns: str | None, /, **takes: Kind) -> None:
        arguments = ", ".join(f"{name} => %({name})s::{kind.cast}" for name, kind in takes.items())
        invoked = f"quota.{function}({arguments})"
        self.name = function
        self.takes = takes
        # Names and columns are this package's own; values travel as parameters.
        self.statement = f"SELECT {invoked}" if columns is None else f"SELECT {columns} FROM {invoked}"  # noqa: S608


class Call(Generic[A]):
    """One call of one SQL function as a value: what to execute, with which parameters, and how to read the result.

    It does no I/O: a client, a transaction of the caller's own, or anything else that speaks to PostgreSQL executes it.

    Class fields:
        function: the SQL function.
        repeatable: a second run after a first one that took effect does no harm and answers alike, so that a client may
            repeat it when a connection is lost.
        keyed: its `id` is an idempotency key that may be left out; it is repeatable only with one.
        writes: it may change the ledger.
        timeout_s: the deadline in seconds that suits it; None: the client's own.
    """

    function: ClassVar[Function]
    repeatable: ClassVar[bool] = True
    keyed: ClassVar[bool] = False
    writes: ClassVar[bool] = True
    timeout_s: ClassVar[Decimal | None] = None

    @property
    def statement(self) -> str:
        """The SQL text, with `%(name)s` parameters."""
        return self.function.statement

    def parameters(self) -> dict[str, object]:
        """Returns the parameters by name, as the driver sends them.

        Errors: `TypeError` for a value of a type that cannot be meant (a float as an amount names its unit), and the
        typed `Misuse` for one that cannot even be sent: malformed ids, NUL characters, lone surrogates.
        """
        return {name: kind.send(name, getattr(self, name)) for name, kind in self.function.takes.items()}

    @abstractmethod
    def answer(self, rows: Sequence[Row]) -> A:
        """Returns the answer from the result rows (`SELECT` yields one, but for `balance` and `check`)."""

    def identified(self, new_id: Callable[[], UUID]) -> Self:
        """Returns this call with an id of its own: the one it has, else a new one if it is keyed.

        Arguments:
            new_id: makes the id. Without an id a repeated reserve would be a second one.
        """
        if self.keyed and getattr(self, "id", None) is None:
            named = copy.copy(self)  # not dataclasses.replace: several times as fast, and every reserve comes by here
            object.__setattr__(named, "id", new_id())
            return named
        return self
