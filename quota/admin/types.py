"""What the API takes and gives, as types: judged here by form, by meaning in the database."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, ClassVar
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

__all__ = [
    "LEFT_OUT",
    "Answer",
    "Body",
    "Costs",
    "Details",
    "Given",
    "Identity",
    "KeyId",
    "Name",
    "PageQuery",
    "Path",
    "Query",
    "Reason",
    "Seconds",
    "Shown",
    "SubjectName",
    "Switch",
    "Text",
    "Time",
    "example",
    "page_of",
    "span_of",
]

_DIGITS = r"^[0-9]{1,100}(\.[0-9]{1,100})?$"
_SHOWN_DIGITS = r"^-?[0-9]+(\.[0-9]+)?$"
_SPAN_MAX_S = 10**8


def _given_amount(value: Any) -> Decimal | int | str:
    if isinstance(value, Decimal | int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(_DIGITS, value) is not None:
        return value
    raise ValueError('must be an amount: decimal digits in a string such as "0.25", or a number')


def _time(value: Any) -> Any:
    if not isinstance(value, str) or not re.match(r"\d{4}-\d\d-\d\d[Tt ]", value, re.ASCII):
        raise ValueError("must be a time such as 2030-01-31T00:00:00Z")
    try:
        found = datetime.fromisoformat(value)
        if found.tzinfo is None:
            raise ValueError("must say its offset, such as Z or +01:00")
        return found.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time between the years 1 and 9999") from None


def _uuid(value: Any) -> Any:
    if not isinstance(value, str) or re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value) is None:
        raise ValueError("must be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
    return UUID(value)


def _printable(value: Any) -> Any:
    if isinstance(value, str) and any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ValueError("must not have control characters")
    return value


def _switch(value: Any) -> Any:
    if value in ("true", "false"):
        return value == "true"
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        if re.fullmatch(r"[0-9]{1,18}", value, re.ASCII) is None:
            raise ValueError("must be a whole number")
        return int(value)
    return value


def _seconds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 <= value <= _SPAN_MAX_S:
        raise ValueError(f"must be a number of seconds, 0 to {_SPAN_MAX_S}")
    return Decimal(value)


LEFT_OUT: Any = None
"""The default of a member that may be left out but not be null."""

_AMOUNT_SCHEMA = {"anyOf": [{"type": "string", "pattern": _DIGITS}, {"type": "number", "minimum": 0}]}

Given = Annotated[Decimal | int | str, PlainValidator(_given_amount), WithJsonSchema(_AMOUNT_SCHEMA)]
"""An amount as it is sent: digits in a string, or a JSON number."""

Shown = Annotated[str, Field(pattern=_SHOWN_DIGITS, json_schema_extra={"example": "0.25"})]
"""An amount as it is answered: an exact decimal in a string."""

Name = Annotated[str, BeforeValidator(_printable), Field(min_length=1, max_length=200)]
Text = Annotated[str, BeforeValidator(_printable), Field(min_length=1, max_length=1000)]
SubjectName = Annotated[
    str,
    BeforeValidator(_printable),
    Field(min_length=3, max_length=200, pattern=r"^[a-z][a-z0-9_-]*:"),
]
KeyId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9][a-z0-9-]*$",
        json_schema_extra={"example": "web"},
        description="Public id.",
    ),
]
Time = Annotated[datetime, BeforeValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Identity = Annotated[UUID, BeforeValidator(_uuid), WithJsonSchema({"type": "string", "format": "uuid"})]
Switch = Annotated[bool, BeforeValidator(_switch), WithJsonSchema({"type": "boolean"})]
Seconds = Annotated[
    Decimal, PlainValidator(_seconds), WithJsonSchema({"type": "number", "minimum": 0, "maximum": _SPAN_MAX_S})
]
Costs = Annotated[
    dict[Name, Given],
    Field(min_length=1, max_length=50, json_schema_extra={"example": {"usd": "0.25"}}, description="Amounts by unit."),
]
Details = Annotated[dict[str, Any], Field(description="Free JSON, kept with the reservation. No secrets.")]


def span_of(seconds: Decimal) -> timedelta:
    """Returns how long these `Seconds` are, to the microsecond."""
    return timedelta(microseconds=int(seconds * 1_000_000))


class Body(BaseModel):
    """A JSON object that somebody sends: unknown members are refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Path(BaseModel):
    """What stands in the path."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Query(BaseModel):
    """What stands behind the question mark: unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    _schemas: ClassVar[dict[Any, dict[str, Any]]] = {}

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The schema; made once, because the library asks for it with every request."""
        key = (cls, args, tuple(sorted(kwargs.items())))
        if key not in cls._schemas:
            cls._schemas[key] = super().model_json_schema(*args, **kwargs)
        return cls._schemas[key]


class PageQuery(Query):
    """Which part of a list."""

    limit: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1000, description="Most rows of the page.")] = 100
    after: Annotated[
        str | None,
        BeforeValidator(_printable),
        Field(max_length=4000, pattern="^[A-Za-z0-9_-]+$", description="`next` of the page before."),
    ] = None


def example(value: Any) -> ConfigDict:
    """Returns the configuration of a body with an example, which the document shows and a test sends."""
    config: Any = ConfigDict(extra="forbid", strict=True, frozen=True)
    config["openapi_extra"] = {"example": value}
    found: ConfigDict = config
    return found


class Reason(Body):
    """Why."""

    model_config = example({"reason": "leaked in a ticket"})

    reason: Text


class Answer(BaseModel):
    """What the API answers; described here, and compared with what it does by the tests."""

    model_config = ConfigDict(extra="forbid")


def page_of(item: type[Answer]) -> type[Answer]:
    """Returns the type of a page of these items."""
    from pydantic import create_model

    return create_model(
        f"{item.__name__}Page",
        __base__=Answer,
        items=(list[item], ...),  # type: ignore[valid-type]
        next=(str | None, Field(description="Pass it as `after` for the next page; null on the last.")),
    )
