"""How an application tells what its answer cost: headers from the inside, never from a caller, and not for one.

- `x-agent-cost`: the cost, a string of decimal digits.
- `x-agent-facts`: what it was made of, a Structured Field dictionary (RFC 9651), all of it optional:
  `rows=100, node_calls=3, rows_read=5000, database_ms=12.5`. It goes into the reservation's details.

The application sets both with `set_cost`, in any framework whose answers have `headers` to assign to (Flask, Django,
Starlette, FastAPI):

    set_cost(response, rows=len(page), node_calls=3)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import http_sf

from quota.costs.rows import NODE_CALL_PERCENT, row_cost

__all__ = ["COST", "FACTS", "FACT_NAMES", "read_cost", "read_facts", "set_cost"]

COST = "x-agent-cost"
FACTS = "x-agent-facts"
FACT_NAMES = frozenset({"rows", "node_calls", "rows_read", "database_ms"})

# A dictionary of nothing but numbers, of at most 12 digits before the point (RFC 9651, section 3.3).
_PLAIN_FACT = re.compile(r"([a-z][a-z0-9_]*)=([0-9]{1,12}(?:\.[0-9]{1,3})?)")
_PLAIN_FACTS = re.compile(rf"(?:{_PLAIN_FACT.pattern}, )*{_PLAIN_FACT.pattern}")

# The ledger's amounts are below 10^18.
_DIGITS_MAX = 18
_FACT_MAX = 10**15


def read_cost(values: Sequence[str]) -> int | None:
    """Returns the cost that an application reports; None when it reports none that can be believed.

    Arguments: `values`, those of the header `x-agent-cost`, as often as it was sent: once, decimal digits, nothing
    else. 0 is a cost, too.
    """
    if len(values) != 1:
        return None
    text = values[0].strip(" \t")
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS_MAX else None


def read_facts(values: Sequence[str]) -> dict[str, int | float]:
    """Returns what an application says about its answer, by name; what cannot be read is left out.

    Arguments: `values`, those of the header `x-agent-facts`.
    """
    if not values:
        return {}
    if len(values) == 1 and (plain := _PLAIN_FACTS.fullmatch(values[0])):
        # As `set_cost` writes them, which is nearly always: read in a tenth of the time.
        return {name: _number(text) for name, text in _PLAIN_FACT.findall(plain[0]) if name in FACT_NAMES}
    try:
        found = http_sf.parse(", ".join(values).encode("ascii"), tltype="dictionary")
    except ValueError:
        return {}
    facts: dict[str, int | float] = {}
    for name, item in found.items() if isinstance(found, Mapping) else ():
        value = item[0] if isinstance(item, tuple) else item
        if isinstance(value, bool) or name not in FACT_NAMES:
            continue
        if isinstance(value, int | float | Decimal) and math.isfinite(value) and 0 <= value < _FACT_MAX:
            facts[name] = value if isinstance(value, int) else float(value)
    return facts


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def set_cost(
    response: Any,
    rows: int,
    node_calls: int = 0,
    *,
    percent: int = NODE_CALL_PERCENT,
    rows_read: int | None = None,
    database_ms: float | None = None,
) -> int:
    """Tells the gateway what this answer costs.

    Arguments:
        response: the framework's answer; its `headers` are set.
        rows: rows in this answer, not the total of which it is a page.
        node_calls: calls to data nodes that it took.
        percent: what each of them adds.
        rows_read: rows that the database went through for it, if known.
        database_ms: milliseconds that it took the database, if known.

    Result: the cost. Errors: as `row_cost`.
    """
    cost = row_cost(rows, node_calls, percent)
    facts: dict[str, Any] = {"rows": rows, "node_calls": max(0, node_calls)}
    if rows_read is not None:
        facts["rows_read"] = rows_read
    if database_ms is not None:
        facts["database_ms"] = round(float(database_ms), 3)
    response.headers[COST] = str(cost)
    response.headers[FACTS] = http_sf.ser({name: (value, {}) for name, value in facts.items()})
    return cost
