"""The tables that more than one command shows."""

from __future__ import annotations

from collections.abc import Sequence

from quota.calls import BalanceRow, Violation
from quota.cli.screen import number, when

__all__ = ["balance_columns", "violation_columns"]


def balance_columns(rows: Sequence[BalanceRow]) -> dict[str, list[str]]:
    """Returns where limits stand, as columns."""
    return {
        "subject": [row.subject for row in rows],
        "limit": [row.limit_name for row in rows],
        "unit": [row.unit for row in rows],
        "kind": [row.kind for row in rows],
        "capacity": [number(row.capacity, "unlimited") for row in rows],
        "spent": [number(row.spent) for row in rows],
        "reserved": [number(row.reserved) for row in rows],
        "level": [number(row.level) for row in rows],
        "available": [number(row.available, "unlimited") for row in rows],
        "window ends": [when(row.window_end) for row in rows],
    }


def violation_columns(rows: Sequence[Violation]) -> dict[str, list[str]]:
    """Returns violations, as columns."""
    return {
        "tenant": [row.tenant for row in rows],
        "invariant": [row.invariant for row in rows],
        "subject": [row.subject or "-" for row in rows],
        "limit": [row.limit_name or "-" for row in rows],
        "expected": [row.expected or "-" for row in rows],
        "found": [row.found or "-" for row in rows],
    }
