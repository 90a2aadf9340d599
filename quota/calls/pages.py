"""Reads of the public views that come in pages: what the HTTP API lists, searches and exports.

Every list has a total order and is walked by its keys: a page begins after the last row of the one before, so that the
thousandth costs what the first does. The comparison stands alone in its WHERE clause, never behind an `OR`: a plan that
is kept for all parameters would read the whole table instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

from quota.calls.views import View

__all__ = [
    "FIRST_ID",
    "LAST_ID",
    "health",
    "key",
    "keys",
    "ledger",
    "limits",
    "log",
    "money_units",
    "price",
    "prices",
    "reservation",
    "reservations",
    "subjects",
    "tenant",
    "tenants",
    "tiers",
    "token",
    "tokens",
    "units",
    "usage",
]

FIRST_ID = ""
LAST_ID = 2**63 - 1
_LAST_UUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"

_KEY = (
    "SELECT id, subject, name, parent, rate_tier, state, frozen, created_at, expires_at, revoked_at, changed_at, "
    "old_secret_until FROM quota.keys WHERE tenant = %(tenant)s::text"
)
_ONE_KEY = f"{_KEY} AND id = %(id)s::text"
_KEYS = f"""{_KEY} AND id > %(after)s::text
    AND (%(search)s::text IS NULL OR id = %(search)s::text OR strpos(lower(name), lower(%(search)s::text)) > 0)
    AND (%(parent)s::text IS NULL OR parent = %(parent)s::text)
    AND (%(tier)s::text IS NULL OR rate_tier = %(tier)s::text)
    AND (%(state)s::text IS NULL OR state = %(state)s::text)
ORDER BY id LIMIT %(most)s::integer"""
_SUBJECTS = """
SELECT name, kind, parent, lineage, rate_tier, frozen, retired, created_at
FROM quota.subjects
WHERE tenant = %(tenant)s::text AND name > %(after)s::text
    AND (%(name)s::text IS NULL OR name = %(name)s::text)
    AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
    AND (%(parent)s::text IS NULL OR parent = %(parent)s::text)
    AND (%(below)s::text IS NULL OR %(below)s::text = ANY (lineage))
    AND (%(frozen)s::boolean IS NULL OR (frozen IS NOT NULL) = %(frozen)s::boolean)
    AND (NOT retired OR %(retired)s::boolean)
ORDER BY name LIMIT %(most)s::integer
"""
_LIMITS = """
SELECT owner, name, unit, kind, capacity, refill_per_s, period, time_zone, on_expiry, required
FROM quota.limits
WHERE tenant = %(tenant)s::text AND (owner, name) > (%(after_owner)s::text, %(after_name)s::text)
    AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)
    AND (%(name)s::text IS NULL OR name = %(name)s::text)
ORDER BY owner, name LIMIT %(most)s::integer
"""
_TIERS = """
SELECT tenant IS NULL AS builtin, tier, retired, limit_name, unit, kind, capacity, refill_per_s, period
FROM quota.tiers
WHERE (tenant IS NULL OR tenant = %(tenant)s::text) AND (%(tier)s::text IS NULL OR tier = %(tier)s::text)
    AND (%(builtin)s::boolean IS NULL OR (tenant IS NULL) = %(builtin)s::boolean)
ORDER BY tenant NULLS FIRST, tier, limit_name
"""
_RESERVATION = (
    "SELECT reservation, subject, also, state, costs::text AS costs, held::text AS held, booked::text AS booked, "
    "outcome, late, created_at, expires_at, closed_at, details::text AS details FROM quota.reservations "
    "WHERE tenant = %(tenant)s::text"
)
_MATCHING = """
    AND (%(subject)s::text IS NULL OR subject = %(subject)s::text OR %(subject)s::text = ANY (also))
    AND (%(state)s::text IS NULL OR state = %(state)s::text)
    AND (NOT %(overdue)s::boolean OR state = 'held' AND expires_at <= clock_timestamp())
ORDER BY reservation DESC LIMIT %(most)s::integer"""
_LEDGER = """
SELECT entry, at, kind, reservation, charged_to, subject, limit_name, unit, amount, signed_amount, window_start
FROM quota.entries
WHERE tenant = %(tenant)s::text AND entry >= %(entry)s::bigint
    AND (entry, coalesce(subject, ''), coalesce(limit_name, '')) >
        (%(entry)s::bigint, %(after_subject)s::text, %(after_limit)s::text)
    AND (%(subject)s::text IS NULL OR subject = %(subject)s::text OR charged_to = %(subject)s::text)
    AND (%(unit)s::text IS NULL OR unit = %(unit)s::text)
    AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
    AND (%(reservation)s::uuid IS NULL OR reservation = %(reservation)s::uuid)
    AND (%(since)s::timestamptz IS NULL OR at >= %(since)s::timestamptz)
    AND (%(until)s::timestamptz IS NULL OR at < %(until)s::timestamptz)
ORDER BY entry, coalesce(subject, ''), coalesce(limit_name, '') LIMIT %(most)s::integer
"""
# An amount reaches every limit of its unit on a lineage and is used once; a booking counts for a subject when it was
# made by it or below it, or charged to it. Every booking falls into exactly one span of the zone's calendar.
_USAGE = """
WITH below AS (
    SELECT array_agg(name) AS names FROM quota.subjects
    WHERE tenant = %(tenant)s::text AND %(subject)s::text = ANY (lineage)
), lines AS (
    SELECT e.entry, e.at, e.charged_to, e.unit, e.limit_name, e.subject, sum(e.signed_amount) AS amount
    FROM quota.entries e
    WHERE e.tenant = %(tenant)s::text AND e.kind NOT IN ('repair', 'carried') AND e.unit IS NOT NULL
        AND e.at >= %(since)s::timestamptz AND e.at < %(until)s::timestamptz
        AND (%(unit)s::text IS NULL OR e.unit = %(unit)s::text)
    GROUP BY e.entry, e.at, e.charged_to, e.unit, e.limit_name, e.subject
), bookings AS (
    SELECT l.entry, l.at, l.charged_to, l.unit, max(l.amount) AS amount
    FROM lines l CROSS JOIN below b
    GROUP BY l.entry, l.at, l.charged_to, l.unit
    HAVING %(subject)s::text IS NULL OR bool_or(l.charged_to = ANY (b.names) OR l.subject = ANY (b.names))
)
SELECT date_trunc(%(span)s::text, at, %(time_zone)s::text) AS start, unit,
    CASE WHEN %(by_spender)s::boolean THEN charged_to END AS charged_to, sum(amount) AS amount, count(*) AS bookings
FROM bookings
-- A zone that is none is an error even where nothing was booked.
WHERE date_trunc('hour', %(until)s::timestamptz, %(time_zone)s::text) IS NOT NULL
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
LIMIT %(most)s::integer
"""
_LOG = """
SELECT id, at, actor, on_behalf_of, action, tenant, target, reason, before::text AS before, after::text AS after,
    request_id
FROM quota.log
WHERE id < %(after_id)s::bigint
    AND (tenant = %(tenant)s::text OR tenant IS NULL AND %(shared)s::boolean)
    AND (%(action)s::text IS NULL OR action = %(action)s::text)
    AND (%(target)s::text IS NULL OR target = %(target)s::text)
    AND (%(on_behalf_of)s::text IS NULL OR on_behalf_of = %(on_behalf_of)s::text)
ORDER BY id DESC LIMIT %(most)s::integer
"""
_TOKENS = """
SELECT tenant, id, name, role, state, created_at, expires_at, revoked_at
FROM quota.tokens
WHERE id > %(after)s::text AND (tenant = %(tenant)s::text OR tenant IS NULL AND %(shared)s::boolean)
    AND (%(id)s::text IS NULL OR id = %(id)s::text)
ORDER BY id LIMIT %(most)s::integer
"""
_TENANTS = """
SELECT name, trim_scale(extract(epoch FROM ttl_maximum)) AS ttl_maximum_s, polling_hint_s,
    trim_scale(extract(epoch FROM keep)) AS keep_s, created_at
FROM quota.tenants
WHERE name > %(after)s::text AND (%(name)s::text IS NULL OR name = %(name)s::text)
ORDER BY name LIMIT %(most)s::integer
"""
_UNITS = """
SELECT name, money FROM quota.units
WHERE name > %(after)s::text AND (%(name)s::text IS NULL OR name = %(name)s::text)
ORDER BY name LIMIT %(most)s::integer
"""
_PRICE = (
    "SELECT version, tenant, provider, model, variant, rates::text AS rates, free, effective_from, effective_until, "
    "output_max, input_max, source, created_at FROM quota.prices "
    "WHERE (tenant IS NULL OR tenant = %(tenant)s::text)"
)
_PRICES = f"""{_PRICE} AND version > %(after)s::bigint
    AND (%(provider)s::text IS NULL OR provider = %(provider)s::text)
    AND (%(search)s::text IS NULL OR strpos(model, lower(%(search)s::text)) > 0)
    AND (%(ended)s::boolean OR effective_until IS NULL
        OR effective_until > coalesce(%(at)s::timestamptz, clock_timestamp()))
    AND (%(at)s::timestamptz IS NULL OR effective_from IS NULL OR effective_from <= %(at)s::timestamptz)
ORDER BY version LIMIT %(most)s::integer"""
_HEALTH = """
SELECT (SELECT version_num FROM public.quota_alembic_version) AS revision,
    (SELECT extract(epoch FROM clock_timestamp() - min(expires_at)) FROM quota.holds WHERE overdue) AS lag_s,
    c.at AS checked_at, (c.after ->> 'violations')::bigint AS violations
FROM (SELECT) one
LEFT JOIN (SELECT at, after FROM quota.log WHERE action = 'check' ORDER BY at DESC LIMIT 1) c ON true
"""


@dataclass(frozen=True)
class Page(View):
    """Rows that somebody waits for: within the client's own deadline, unlike a walk over everything."""

    timeout_s: ClassVar[Decimal | None] = None


@dataclass(frozen=True)
class Report(View):
    """Rows that are summed up from many."""

    timeout_s: ClassVar[Decimal | None] = Decimal(30)


def _page(text: str, values: Mapping[str, object], exact: tuple[str, ...] = ()) -> Page:
    return Page(text, values, exact)


def keys(
    tenant: str,
    *,
    after: str = FIRST_ID,
    most: int,
    search: str | None = None,
    parent: str | None = None,
    tier: str | None = None,
    state: str | None = None,
) -> View:
    """Returns the call for keys by id. `search`: an id, or a part of a name in any case."""
    values = {"search": search, "parent": parent, "tier": tier, "state": state}
    return _page(_KEYS, {"tenant": tenant, "after": after, "most": most, **values})


def key(tenant: str, identity: str) -> View:
    """Returns the call for one key."""
    return _page(_ONE_KEY, {"tenant": tenant, "id": identity})


def subjects(
    tenant: str,
    *,
    after: str = FIRST_ID,
    most: int,
    name: str | None = None,
    kind: str | None = None,
    parent: str | None = None,
    below: str | None = None,
    frozen: bool | None = None,
    retired: bool = False,
) -> View:
    """Returns the call for subjects by name. `below`: that subject and its tree."""
    values = {"name": name, "kind": kind, "parent": parent, "below": below, "frozen": frozen, "retired": retired}
    return _page(_SUBJECTS, {"tenant": tenant, "after": after, "most": most, **values})


def limits(
    tenant: str, *, after: tuple[str, str] = ("", ""), most: int, owner: str | None = None, name: str | None = None
) -> View:
    """Returns the call for limits as they were set, by owner and name."""
    values = {"after_owner": after[0], "after_name": after[1], "owner": owner, "name": name}
    return _page(_LIMITS, {"tenant": tenant, "most": most, **values})


def tiers(tenant: str, tier: str | None = None, builtin: bool | None = None) -> View:
    """Returns the call for the tiers that a tenant sees, a row per limit."""
    return _page(_TIERS, {"tenant": tenant, "tier": tier, "builtin": builtin})


def reservations(
    tenant: str,
    *,
    after: str | None = None,
    most: int,
    subject: str | None = None,
    state: str | None = None,
    overdue: bool = False,
) -> View:
    """Returns the call for reservations, the greatest id (the newest, for ids that grow with time) in front."""
    values = {"subject": subject, "state": state, "overdue": overdue}
    exact = ("costs", "held", "booked", "details")
    # The first page begins with the greatest id that there can be, the others behind the last one before.
    text = f"{_RESERVATION} AND reservation {'<=' if after is None else '<'} %(after)s::uuid{_MATCHING}"
    return _page(text, {"tenant": tenant, "after": after or _LAST_UUID, "most": most, **values}, exact)


def reservation(tenant: str, identity: str) -> View:
    """Returns the call for one reservation."""
    text = f"{_RESERVATION} AND reservation = %(id)s::uuid"
    return _page(text, {"tenant": tenant, "id": identity}, ("costs", "held", "booked", "details"))


def ledger(
    tenant: str,
    *,
    after: tuple[int, str, str] = (-1, "", ""),
    most: int,
    subject: str | None = None,
    unit: str | None = None,
    kind: str | None = None,
    reservation: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> View:
    """Returns the call for ledger lines in the order of their booking."""
    where = {"entry": after[0], "after_subject": after[1], "after_limit": after[2]}
    values = {"subject": subject, "unit": unit, "kind": kind, "reservation": reservation}
    times = {"since": since, "until": until}
    return _page(_LEDGER, {"tenant": tenant, "most": most, **where, **values, **times})


def usage(
    tenant: str,
    *,
    since: datetime,
    until: datetime,
    span: str,
    time_zone: str,
    most: int,
    subject: str | None = None,
    unit: str | None = None,
    by_spender: bool = False,
) -> View:
    """Returns the call for what was booked in [since, until), by `hour` or `day` of a zone and by unit.

    `subject`: with all below it; None: the whole tenant. `by_spender`: a row for each subject that spent.
    """
    where = {"tenant": tenant, "subject": subject, "unit": unit, "since": since, "until": until}
    return Report(_USAGE, {**where, "span": span, "time_zone": time_zone, "by_spender": by_spender, "most": most})


def log(
    tenant: str,
    *,
    shared: bool,
    after: int = LAST_ID,
    most: int,
    action: str | None = None,
    target: str | None = None,
    on_behalf_of: str | None = None,
) -> View:
    """Returns the call for admin changes, newest first. `shared`: also those that concern all tenants."""
    values = {"action": action, "target": target, "on_behalf_of": on_behalf_of}
    where: dict[str, Any] = {"tenant": tenant, "shared": shared, "after_id": after, "most": most}
    return _page(_LOG, {**where, **values}, ("before", "after"))


def tokens(tenant: str, *, shared: bool, after: str = FIRST_ID, most: int) -> View:
    """Returns the call for tokens by id. `shared`: also those for every tenant."""
    return _page(_TOKENS, {"tenant": tenant, "shared": shared, "after": after, "most": most, "id": None})


def token(tenant: str, identity: str, *, shared: bool) -> View:
    """Returns the call for one token."""
    return _page(_TOKENS, {"tenant": tenant, "shared": shared, "after": FIRST_ID, "most": 1, "id": identity})


def tenants(*, name: str | None = None, after: str = FIRST_ID, most: int) -> View:
    """Returns the call for tenants by name, their settings in seconds. `name`: that one only."""
    return _page(_TENANTS, {"name": name, "after": after, "most": most})


def units(*, name: str | None = None, after: str = FIRST_ID, most: int) -> View:
    """Returns the call for units by name. `name`: that one only."""
    return _page(_UNITS, {"name": name, "after": after, "most": most})


def prices(
    tenant: str,
    *,
    after: int = 0,
    most: int,
    provider: str | None = None,
    search: str | None = None,
    at: datetime | None = None,
    ended: bool = False,
) -> View:
    """Returns the call for the prices that a tenant meets, its own and everybody's, by version.

    `at`: in force then; None: in force now or later. `ended`: also those that have ended before.
    """
    values = {"provider": provider, "search": search, "at": at, "ended": ended}
    return _page(_PRICES, {"tenant": tenant, "after": after, "most": most, **values})


def price(tenant: str, version: int) -> View:
    """Returns the call for one version of a price."""
    return _page(f"{_PRICE} AND version = %(version)s::bigint", {"tenant": tenant, "version": version})


def money_units() -> View:
    """Returns the call for the units that are money."""
    return _page("SELECT name FROM quota.units WHERE money", {})


def health() -> View:
    """Returns the call for the revision, the age of the oldest overdue hold (s), and the last logged check."""
    return _page(_HEALTH, {})


def tenant(name: str) -> View:
    """Returns the call for one tenant."""
    return _page("SELECT name FROM quota.tenants WHERE name = %(name)s::text", {"name": name})
