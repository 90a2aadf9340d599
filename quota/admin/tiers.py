"""Tiers: named sets of limits for keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from flask import Response
from pydantic import Field

from quota.admin.access import OPERATE, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.limits import Definition, DefinitionShown
from quota.admin.routes import blueprint, place, route
from quota.admin.types import Answer, Body, Name, Path, Query, Switch, example
from quota.calls import RetireTier, SetTierLimit, pages
from quota.client import Do
from quota.errors import AlreadyExists, InvalidArgument, UnknownTier

__all__ = ["tiers"]

tiers = blueprint("tiers", "Rate tiers: named sets of limits. A key stores the name, the numbers stand here.")

_BUILTIN = "The built-in tier that all tenants see; takes a token for every tenant."


class Tier(Answer):
    """A tier. Keys of one that is retired act as `basic`."""

    name: str
    builtin: bool
    retired: bool
    limits: list[DefinitionShown]


class Tiers(Answer):
    """All tiers that the tenant sees; its own override built-in ones of the same name limit by limit."""

    items: list[Tier]


class TierPath(Path):
    """Which tier."""

    tier: Name = Field(json_schema_extra={"example": "gold"})


class TierLimitPath(TierPath):
    """Which limit of which tier."""

    name: Name = Field(json_schema_extra={"example": "hourly"})


class TierQuery(Query):
    """Whose tier."""

    builtin: Switch | None = Field(None, description=_BUILTIN + " Left out: the tenant's own, else the built-in one.")


class NamedDefinition(Definition):
    """A limit of a tier."""

    name: Name


class TierDraft(Body):
    """A tier to be made."""

    model_config = example({
        "name": "gold",
        "limits": [
            {"name": "bucket", "unit": "cost", "kind": "bucket", "capacity": "2000000", "refill_per_s": "6000"},
            {"name": "hourly", "unit": "cost", "kind": "budget", "capacity": "4000000", "period": "1 hour"},
        ],
    })  # fmt: skip

    name: Name
    limits: Annotated[list[NamedDefinition], Field(min_length=1, max_length=20)]
    builtin: bool = Field(False, description=_BUILTIN)


class TierLimitDraft(Definition):
    """The numbers of a tier's limit."""

    model_config = example({"unit": "cost", "kind": "budget", "capacity": "5000000", "period": "1 hour"})

    builtin: bool = Field(False, description=_BUILTIN)


class Retirement(Body):
    """Which tier ends."""

    model_config = example({"builtin": False})

    builtin: bool = Field(False, description=_BUILTIN)


def _grouped(rows: Sequence[Found]) -> list[dict[str, Any]]:
    found: dict[tuple[bool, str], dict[str, Any]] = {}
    for row in rows:
        tier = found.setdefault(
            (row["builtin"], row["tier"]),
            {"name": row["tier"], "builtin": row["builtin"], "retired": row["retired"], "limits": []},
        )
        if row["limit_name"] is not None:
            numbers = {name: row[name] for name in ("unit", "kind", "capacity", "refill_per_s", "period")}
            tier["limits"].append({"name": row["limit_name"], **numbers})
    return list(found.values())


def found(do: Do, name: str, builtin: bool | None) -> Found:
    """Reads one tier; `builtin` None: the tenant's own, else the built-in one. Errors: 404."""
    listed = _grouped(do(pages.tiers(principal().tenant, name, builtin)))
    if not listed:
        raise _Missing(f'unknown_tier: there is no tier "{name}"', "See the list of tiers.")
    return listed[-1]  # built-in ones come first


class _Missing(UnknownTier, name="unknown_tier", sqlstate="QT005", http_status=404):
    """A tier that the path names is not there; one that a body names is 422."""


def _owner(builtin: bool) -> str | None:
    if builtin:
        principal().require_every_tenant("A built-in tier")
        return None
    return principal().tenant


def _place(tier: Found) -> str:
    return place("tiers", tier["name"])


def _set(do: Do, tier: str, limit: str, body: Definition, owner: str | None) -> None:
    do(SetTierLimit(tier, limit, body.unit, body.kind, body.capacity, body.refill_per_s, body.period, owner))


@route(tiers, "get", "/tiers", READ, ok={200: Tiers})
def list_tiers() -> Response:
    """List the tiers that the tenant sees."""
    return answer({"items": _grouped(ledger().call(pages.tiers(principal().tenant)))})


@route(tiers, "post", "/tiers", OPERATE, ok={201: Tier})
def create_tier(body: TierDraft) -> Response:
    """Make a tier. One that was retired is in force again, with the limits that it had and these."""
    owner = _owner(body.builtin)

    def work(do: Do) -> Found:
        known = _grouped(do(pages.tiers(principal().tenant, body.name, body.builtin)))
        if known and not known[0]["retired"]:
            raise AlreadyExists(f'already_exists: tier "{body.name}" exists', "Change its numbers limit by limit.")
        if len({limit.name for limit in body.limits}) < len(body.limits):
            raise InvalidArgument("invalid_argument: limits: a name stands twice", "Name each limit once.")
        for limit in body.limits:
            _set(do, body.name, limit.name, limit, owner)
        return found(do, body.name, body.builtin)

    return write(work, status=201, tenant=owner, location=_place)


@route(tiers, "get", "/tiers/<segment:tier>", READ, ok={200: Tier})
def get_tier(path: TierPath, query: TierQuery) -> Response:
    """Show a tier."""
    return answer(found(ledger().call, path.tier, query.builtin), versioned=True)


@route(tiers, "put", "/tiers/<segment:tier>/limits/<segment:name>", OPERATE, ok={200: Tier})
def set_tier_limit(path: TierLimitPath, body: TierLimitDraft) -> Response:
    """Change the numbers of a tier's limit, or give the tier another one. Its keys have them with their next hold."""
    owner = _owner(body.builtin)

    def work(do: Do) -> Found:
        found(do, path.tier, body.builtin)
        _set(do, path.tier, path.name, body, owner)
        return found(do, path.tier, body.builtin)

    return write(work, tenant=owner, current=lambda do: found(do, path.tier, body.builtin))


@route(tiers, "post", "/tiers/<segment:tier>/retire", OPERATE, ok={200: Tier})
def retire_tier(path: TierPath, body: Retirement) -> Response:
    """End a tier: its keys act as `basic` from their next hold on, usage stays."""
    owner = _owner(body.builtin)

    def work(do: Do) -> Found:
        found(do, path.tier, body.builtin)
        do(RetireTier(path.tier, owner))
        return found(do, path.tier, body.builtin)

    return write(work, tenant=owner, current=lambda do: found(do, path.tier, body.builtin))
