"""Which units are money: their exhaustion asks for payment (402), not for patience (429)."""

from __future__ import annotations

from quota.admin.changes import ledger
from quota.authentication import Remembered
from quota.calls import pages

__all__ = ["is_money"]

# A unit never changes its kind; a new one is known after a minute at most.
_known: Remembered[frozenset[str]] = Remembered(60, most=100)


def is_money(unit: str) -> bool:
    """True when a unit is registered as money."""
    client = ledger()
    units = _known.get(client, lambda: frozenset(row["name"] for row in client.call(pages.money_units())))
    return units is not None and unit in units
