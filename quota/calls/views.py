"""Reads of the public views, as calls: the client gives them its deadline and its retries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from quota.calls.answers import Row
from quota.calls.base import Call, Function

__all__ = ["Rows", "View", "balances", "entries", "holds", "limits", "schema_revision", "subjects", "tiers"]

Rows = list[dict[str, Any]]

# Amounts in JSON are decimal strings or numbers; read as text, neither becomes a binary fraction on the way.
_HOLDS = """
SELECT tenant, reservation, subject, also, held::text AS held, booked::text AS booked, created_at, expires_at, overdue,
    charge_on_expiry, details
FROM quota.holds
WHERE tenant = %(tenant)s::text
    AND (%(subject)s::text IS NULL OR subject = %(subject)s::text OR %(subject)s::text = ANY (also))
    AND (overdue OR NOT %(overdue)s::boolean)
ORDER BY expires_at, reservation
LIMIT %(most)s::integer
"""
_ENTRIES = """
SELECT e.* FROM (
    SELECT tenant, entry, at, kind, reservation, charged_to, subject, limit_name, unit, amount, signed_amount,
        window_start, details
    FROM quota.entries
    WHERE tenant = %(tenant)s::text
        AND (%(subject)s::text IS NULL OR subject = %(subject)s::text OR charged_to = %(subject)s::text)
        AND (%(reservation)s::uuid IS NULL OR reservation = %(reservation)s::uuid)
    ORDER BY at DESC, entry DESC
    LIMIT %(most)s::integer
) e
ORDER BY e.at, e.entry, e.subject, e.limit_name
"""
_SUBJECTS = """
SELECT tenant, name, kind, parent, lineage, rate_tier, frozen, retired, created_at
FROM quota.subjects
WHERE tenant = %(tenant)s::text
    AND (%(name)s::text IS NULL OR name = %(name)s::text)
    AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
    AND (%(below)s::text IS NULL OR %(below)s::text = ANY (lineage))
    AND (NOT retired OR %(retired)s::boolean)
ORDER BY name
"""
_LIMITS = """
SELECT tenant, owner, name, unit, kind, capacity, refill_per_s, period, time_zone, on_expiry, required
FROM quota.limits
WHERE tenant = %(tenant)s::text AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)
ORDER BY owner, name
"""
_TIERS = """
SELECT tenant, tier, retired, limit_name, unit, kind, capacity, refill_per_s, period
FROM quota.tiers
WHERE tenant IS NULL OR tenant = %(tenant)s::text
ORDER BY tenant NULLS FIRST, tier, limit_name
"""
_BALANCES = """
SELECT subject, limit_name, unit, kind, trim_scale(capacity) AS capacity, trim_scale(spent) AS spent,
    trim_scale(reserved) AS reserved, trim_scale(level) AS level,
    trim_scale(CASE WHEN kind = 'bucket' THEN level ELSE greatest(0, capacity - spent - reserved) END) AS available
FROM quota.balances
WHERE tenant = %(tenant)s::text
ORDER BY subject, limit_name
"""
_REVISION = "SELECT version_num FROM public.quota_alembic_version"


@dataclass(frozen=True)
class View(Call[Rows]):
    """Rows of a public view.

    Arguments:
        text: the statement.
        values: its parameters.
        exact: columns of JSON text that hold amounts.
    """

    text: str
    values: Mapping[str, object]
    exact: tuple[str, ...] = ()

    writes = False
    timeout_s: ClassVar[Decimal | None] = Decimal(60)
    function = Function("views", None)

    @property
    def statement(self) -> str:
        """The SQL text."""
        return self.text

    def parameters(self) -> dict[str, object]:
        """The parameters by name."""
        return dict(self.values)

    def answer(self, rows: Sequence[Row]) -> Rows:
        """The rows, amounts exact."""
        if not self.exact:
            return [dict(row) for row in rows]
        return [{name: _amounts(value) if name in self.exact else value for name, value in row.items()} for row in rows]


def _amounts(text: str | None) -> Any:
    return None if text is None else json.loads(text, parse_float=Decimal, parse_int=Decimal)


@dataclass(frozen=True)
class Holds(View):
    """Open holds. Leases of processes are marked: `lease`, whose it is, and `stranded`, what is held and not booked."""

    def answer(self, rows: Sequence[Row]) -> Rows:
        """The rows, amounts exact, with the two further columns; both are None where there is no lease."""
        found = super().answer(rows)
        for row in found:
            lease = (row["details"] or {}).get("lease")
            row["lease"] = lease if isinstance(lease, dict) else None
            row["stranded"] = _stranded(row["held"], row["booked"] or {}) if row["lease"] else None
        return found


def _stranded(held: dict[str, Any], booked: dict[str, Any]) -> dict[str, Decimal]:
    return {unit: max(Decimal(0), Decimal(total) - Decimal(booked.get(unit, 0))) for unit, total in held.items()}


def holds(tenant: str, subject: str | None, *, overdue: bool, most: int) -> Holds:
    """Returns the call for open holds, the ones that expire first in front."""
    values = {"tenant": tenant, "subject": subject, "overdue": overdue, "most": most}
    return Holds(_HOLDS, values, exact=("held", "booked"))


def entries(tenant: str, subject: str | None, reservation: str | None, *, most: int) -> View:
    """Returns the call for the newest ledger lines, oldest of them first."""
    return View(_ENTRIES, {"tenant": tenant, "subject": subject, "reservation": reservation, "most": most})


def subjects(
    tenant: str, *, name: str | None = None, kind: str | None = None, below: str | None = None, retired: bool = False
) -> View:
    """Returns the call for subjects, by name."""
    return View(_SUBJECTS, {"tenant": tenant, "name": name, "kind": kind, "below": below, "retired": retired})


def balances(tenant: str) -> View:
    """Returns the call for where all limits of a tenant stand, in one snapshot."""
    return View(_BALANCES, {"tenant": tenant})


def limits(tenant: str, owner: str | None) -> View:
    """Returns the call for limits as they were set, on subjects and kinds."""
    return View(_LIMITS, {"tenant": tenant, "owner": owner})


def tiers(tenant: str) -> View:
    """Returns the call for the tiers that a tenant sees, a row per limit."""
    return View(_TIERS, {"tenant": tenant})


def schema_revision() -> View:
    """Returns the call for the revision of the installed schema; `SchemaMismatch` where there is none."""
    return View(_REVISION, {})
