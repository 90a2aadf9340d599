"""The real engine, called through its public functions only, with answers in the terms of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from tests.model.errors import ModelError, sqlstate_name
from tests.model.ledger import ReserveAnswer, SettleAnswer
from tests.model.limits import Row

Answer = dict[str, Any]

ROW_COLUMNS = (
    "subject",
    "limit_name",
    "unit",
    "kind",
    "capacity",
    "spent",
    "reserved",
    "level",
    "available",
    "reason",
    "retry_after_s",
)
AMOUNT_COLUMNS = frozenset({"capacity", "spent", "reserved", "level", "available", "retry_after_s"})
RESERVE_COLUMNS = (
    "granted",
    "state",
    "expires_at",
    "replayed",
    "reason",
    "limit_subject",
    "limit_name",
    "unit",
    "capacity",
    "spent",
    "reserved",
    "requested",
    "retry_after_s",
)


class Json(str):
    """A cost map as JSON text, every digit as it was written: a Decimal becomes a number, never a float."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Json | None:
        """JSON text of what the model takes."""
        return None if value is None else cls(_json(value))


def _json(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_json(each)}" for key, each in value.items()) + "}"
    return format(value, "f") if isinstance(value, Decimal) else json.dumps(value)


class Engine:
    """One connection in autocommit: every call is a transaction of its own."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def set_clock(self, now: datetime) -> None:
        """The template's clock reads this row."""
        self._connection.execute("UPDATE quota_test.clock SET at = %s", [now])

    def call(self, function: str, arguments: Mapping[str, object]) -> list[Answer]:
        """`SELECT * FROM quota.function(name => value, …)`. Misuse comes back as the model's exception."""
        named = ", ".join(f"{name} => %({name})s{_cast(name, value)}" for name, value in arguments.items())
        return self.rows(f"SELECT * FROM quota.{function}({named})", arguments)

    def rows(self, text: str, arguments: Mapping[str, object]) -> list[Answer]:
        """What a statement answers. Misuse comes back as the model's exception."""
        try:
            with self._connection.cursor(row_factory=dict_row) as cursor:
                cursor.execute(text.encode(), dict(arguments))
                return cursor.fetchall()
        except psycopg.Error as error:
            name = sqlstate_name(error.sqlstate)
            if name is None:
                raise
            raise ModelError(name, str(error)) from error

    def balances(self, subjects: Sequence[str], tenant: str) -> list[Answer]:
        """`balance` of many subjects in one snapshot."""
        with self._connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(
                "SELECT s.name AS asked, b.* FROM unnest(%s::text[]) s(name), quota.balance(s.name, %s) b",
                [list(subjects), tenant],
            )
            return cursor.fetchall()

    def check(self, tenant: str) -> list[Answer]:
        """Every violated invariant."""
        return self.call("check", {"tenant": tenant})


def _cast(name: str, value: object) -> str:
    if isinstance(value, Json):
        return "::jsonb"
    if name == "also":
        return "::text[]"
    return "::numeric" if isinstance(value, Decimal | int) and not isinstance(value, bool) and name != "max" else ""


def plain(value: object) -> object:
    """A value of either side in one form: amounts as fractions, cost maps and rows as dictionaries."""
    if isinstance(value, Decimal | int) and not isinstance(value, bool):
        return Fraction(value)
    if isinstance(value, Row):
        shown = {name: plain(getattr(value, name)) for name in ROW_COLUMNS}
        return {name: None if found == "" else found for name, found in shown.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def engine_row(row: Mapping[str, Any]) -> object:
    """An element of `remaining` or `violations`: amounts are strings there."""
    return {
        name: Fraction(row[name]) if name in AMOUNT_COLUMNS and row[name] is not None else row[name]
        for name in ROW_COLUMNS
    }


def engine_reserve(answer: Answer) -> object:
    """What is compared of a row of `reserve` or `adjust`."""
    return {name: plain(answer[name]) for name in RESERVE_COLUMNS} | {
        "remaining": [engine_row(row) for row in answer["remaining"]],
        "violations": [engine_row(row) for row in answer["violations"]],
    }


def model_reserve(answer: ReserveAnswer) -> object:
    """The same of the model's."""
    return {name: plain(getattr(answer, name)) for name in (*RESERVE_COLUMNS, "remaining", "violations")}


def engine_settle(answer: Answer) -> object:
    """A row of `settle`."""
    return {
        "state": answer["state"],
        "late": answer["late"],
        "replayed": answer["replayed"],
        "overage": {unit: Fraction(amount) for unit, amount in answer["overage"].items()},
    }


def model_settle(answer: SettleAnswer) -> object:
    """The same of the model's."""
    return plain(answer)


def engine_balance(row: Answer) -> object:
    """A row of `balance`."""
    names = (*ROW_COLUMNS[:9], "window_start", "window_end", "full_after_s")
    return {name: plain(row[name]) for name in names}


def model_balance(row: Row) -> object:
    """The same of the model's."""
    shown = {name: plain(getattr(row, name)) for name in (*ROW_COLUMNS[:9], "full_after_s")}
    window = row.window
    return shown | {"window_start": window.start if window else None, "window_end": window.end if window else None}


def reservation_of(answer: Answer) -> UUID | None:
    """The id of the hold, chosen by the engine where the caller gave none."""
    found = answer["reservation"]
    assert found is None or isinstance(found, UUID)
    return found


def difference(found: object, expected: object, path: str = "") -> str:
    """Where two answers differ: `path: engine …, model …`, a line each."""
    if found == expected:
        return ""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return "".join(difference(found[key], expected[key], f"{path}.{key}") for key in found)
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return "".join(difference(*pair, f"{path}[{n}]") for n, pair in enumerate(zip(found, expected, strict=True)))
    return f"\n  {path}: engine {_shown(found)}, model {_shown(expected)}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)
