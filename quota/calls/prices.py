"""The price book in the database: what admins set, and what clients keep a copy of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Literal

from quota.calls.answers import Row, instant
from quota.calls.base import COUNT, DETAILS, FLAG, INSTANT, NAME, WORD, Call, Function
from quota.costs.prices import PriceBook, PriceEntry, price_of_json

__all__ = ["EndPrice", "PriceOf", "PricesOf", "SetPrice", "entry_of"]

_COLUMNS = (
    "version, tenant, provider, model, variant, rates::text AS rates, free, effective_from, effective_until, "
    "output_max, input_max, source"
)


def entry_of(row: Row) -> PriceEntry:
    """Returns a row of the book as an entry; its numbers stay exact."""
    return PriceEntry(
        provider=row["provider"],
        model=row["model"],
        price=price_of_json(json.loads(row["rates"], parse_float=Decimal), free=row["free"]),
        variant=row["variant"],
        effective_from=instant(row["effective_from"]),
        effective_until=instant(row["effective_until"]),
        output_max=row["output_max"],
        input_max=row["input_max"],
        version=row["version"],
        tenant=row["tenant"],
        source=row["source"],
    )


@dataclass(frozen=True)
class SetPrice(Call[tuple[int, bool]]):
    """`quota.set_price`: what a model costs from a time on. The price in force ends there; the same again is a replay.

    Arguments:
        provider, model: in lower case, as `PriceEntry` has them.
        rates: the parts of the price in dollars per million tokens, see `quota.costs.prices.price_of_json`.
        variant: "" for the usual price.
        effective_from: None: now; `-infinity`: from the beginning.
        effective_until: None: until another price begins.
        output_max, input_max: the most tokens that the model answers and takes; None: not known.
        free: declares that it costs nothing.
        source: where the price stands.
        tenant: None: for all tenants.
    """

    provider: str
    model: str
    rates: Mapping[str, object]
    variant: str = ""
    effective_from: datetime | Literal["-infinity"] | None = None
    effective_until: datetime | None = None
    output_max: int | None = None
    input_max: int | None = None
    free: bool = False
    source: str | None = None
    tenant: str | None = None

    function = Function(
        "set_price", "version, replayed", provider=NAME, model=NAME, rates=DETAILS, variant=WORD,
        effective_from=INSTANT, effective_until=INSTANT, output_max=COUNT, input_max=COUNT, free=FLAG, source=WORD,
        tenant=NAME,
    )  # fmt: skip

    @classmethod
    def of(cls, entry: PriceEntry, *, tenant: str | None = None, starting_now: bool = False) -> SetPrice:
        """Returns the call that sets an entry.

        Arguments: `tenant`, whose own price it becomes (None: as the entry says); `starting_now`, from now on, whatever
        its date says.
        """
        start: datetime | Literal["-infinity"] | None = entry.effective_from or "-infinity"
        return cls(
            entry.provider,
            entry.model,
            entry.price.json(),
            entry.variant,
            None if starting_now else start,
            entry.effective_until,
            entry.output_max,
            entry.input_max,
            entry.price.free,
            entry.source,
            entry.tenant if tenant is None else tenant,
        )

    def answer(self, rows: Sequence[Row]) -> tuple[int, bool]:
        """The version, and whether it was there already."""
        return rows[0]["version"], rows[0]["replayed"]


@dataclass(frozen=True)
class EndPrice(Call[None]):
    """`quota.end_price`: ends a version of a price at a time (None: now); `tenant` None: one of everybody's."""

    version: int
    at: datetime | None = None
    tenant: str | None = None

    repeatable = False
    function = Function("end_price", None, version=COUNT, at=INSTANT, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class PriceOf(Call[PriceEntry]):
    """`quota.price`: the price in force under exactly this name; `UnpricedModel` when there is none."""

    provider: str
    model: str
    variant: str = ""
    at: datetime | None = None
    tenant: str = "default"

    writes = False
    function = Function("price", _COLUMNS, provider=NAME, model=NAME, variant=WORD, at=INSTANT, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> PriceEntry:
        """The entry."""
        return entry_of(rows[0])


@dataclass(frozen=True)
class PricesOf(Call[PriceBook]):
    """`quota.price_book`: every price that a tenant can meet now or later."""

    tenant: str = "default"

    writes = False
    function = Function("price_book", _COLUMNS, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> PriceBook:
        """The book."""
        return PriceBook(entry_of(row) for row in rows)
