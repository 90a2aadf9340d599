"""Importing prices into the book: all of a catalog in one transaction, and what became of each."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from quota.calls import SetPrice
from quota.client import Transaction
from quota.costs.catalogs import Catalog
from quota.costs.prices import PriceEntry
from quota.errors import PricesOverlap

__all__ = ["AS_BEFORE", "CHANGED", "LEFT_OUT", "NEW", "import_catalog"]

NEW, AS_BEFORE, CHANGED, LEFT_OUT = "new", "as before", "changed from now on", "left out"


def import_catalog(do: Transaction, catalog: Catalog, tenant: str | None) -> Counter[str]:
    """Sets every price of a catalog.

    Arguments:
        do: carries out calls in one transaction, as in `Client.transact`.
        catalog: the prices.
        tenant: whose own they become; None: everybody's.

    Result: how many are `NEW`, `AS_BEFORE`, `CHANGED` (a price that differs from the one in force is in force from now
    on) and `LEFT_OUT` (the past is not rewritten, and the future belongs to whoever wrote it first).
    Errors: the `Misuse` that the database names; then nothing is imported.
    """
    return Counter(_set(do, entry, tenant) for entry in catalog.entries)


def _set(do: Transaction, entry: PriceEntry, tenant: str | None) -> str:
    try:
        _, replayed = do(SetPrice.of(entry, tenant=tenant), savepoint=True)
    except PricesOverlap:
        if not entry.covers(datetime.now(UTC)):
            return LEFT_OUT
        do(SetPrice.of(entry, tenant=tenant, starting_now=True))
        return CHANGED
    return AS_BEFORE if replayed else NEW
