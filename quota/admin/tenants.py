"""What stands above subjects: tenants, and the units that all of them count in."""

from __future__ import annotations

from flask import Response
from pydantic import Field

from quota.admin.access import OWN, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import LEFT_OUT, Answer, Body, Name, PageQuery, Path, Seconds, Shown, example, page_of, span_of
from quota.calls import ConfigureTenant, CreateTenant, CreateUnit, pages
from quota.client import Do
from quota.errors import UnknownTenant, UnknownUnit

__all__ = ["tenants", "units"]

tenants = blueprint("tenants", "Outer boundaries: subjects, limits, holds and ledger of one never touch another's.")
units = blueprint("units", "What is counted, in all tenants alike. A unit that is not registered is an error.")


class Tenant(Answer):
    """A tenant and its settings, in seconds."""

    name: str
    ttl_maximum_s: Shown = Field(description="The longest life of a hold, each time it is reserved or extended.")
    polling_hint_s: Shown = Field(description="The wait that refusals by others' holds suggest.")
    keep_s: Shown = Field(description="How long closed reservations are kept at least.")
    created_at: str


class TenantPath(Path):
    """Which tenant."""

    tenant: Name = Field(json_schema_extra={"example": "default"})


class TenantDraft(Body):
    """A tenant to be made."""

    model_config = example({"name": "acme"})

    name: Name


class TenantChange(Body):
    """Settings in seconds; what is left out stays."""

    model_config = example({"ttl_maximum_s": 3600})

    ttl_maximum_s: Seconds = LEFT_OUT
    polling_hint_s: Seconds = LEFT_OUT
    keep_s: Seconds = LEFT_OUT


def found(do: Do, name: str) -> Found:
    """Reads one tenant that the caller may see. Errors: `UnknownTenant`."""
    scope = principal().scope
    rows = do(pages.tenants(name=name, most=1)) if scope in (None, name) else []
    if not rows:
        raise UnknownTenant(f'unknown_tenant: there is no tenant "{name}"', "See the list of tenants.")
    return rows[0]


@route(tenants, "get", "/tenants", READ, ok={200: page_of(Tenant)})
def list_tenants(query: PageQuery) -> Response:
    """List tenants by name; a token for one of them sees that one."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    rows = ledger().call(pages.tenants(name=principal().scope, after=after, most=query.limit + 1))
    return page(rows, query.limit, lambda row: [row["name"]])


@route(tenants, "post", "/tenants", OWN, ok={201: Tenant})
def create_tenant(body: TenantDraft) -> Response:
    """Make a tenant, with nothing in it. Takes a token for every tenant."""
    principal().require_every_tenant("Another tenant")

    def work(do: Do) -> Found:
        do(CreateTenant(body.name))
        return found(do, body.name)

    return write(work, status=201, tenant=None, location=lambda row: place("tenants", row["name"]))


@route(tenants, "get", "/tenants/<segment:tenant>", READ, ok={200: Tenant})
def get_tenant(path: TenantPath) -> Response:
    """Show a tenant and its settings."""
    return answer(found(ledger().call, path.tenant), versioned=True)


@route(tenants, "patch", "/tenants/<segment:tenant>", OWN, ok={200: Tenant})
def configure_tenant(path: TenantPath, body: TenantChange) -> Response:
    """Change a tenant's settings, for all that is reserved, refused and kept from now on."""
    found(ledger().call, path.tenant)

    def work(do: Do) -> Found:
        given = body.model_dump(exclude_unset=True)
        ttl, keep = (span_of(given[name]) if name in given else None for name in ("ttl_maximum_s", "keep_s"))
        do(ConfigureTenant(path.tenant, ttl, given.get("polling_hint_s"), keep))
        return found(do, path.tenant)

    return write(work, tenant=path.tenant, current=lambda do: found(do, path.tenant))


# -- units ----------------------------------------------------------------------------------------------------------


class Unit(Answer):
    """A unit."""

    name: str
    money: bool = Field(description="Running out of it is a matter of payment: 402, not 429.")


class UnitPath(Path):
    """Which unit."""

    unit: Name = Field(json_schema_extra={"example": "usd"})


class UnitDraft(Body):
    """A unit to be registered."""

    model_config = example({"name": "images", "money": False})

    name: Name
    money: bool = Field(False, description="Running out of it is a matter of payment: 402, not 429.")


def found_unit(do: Do, name: str) -> Found:
    """Reads one unit. Errors: 404."""
    rows = do(pages.units(name=name, most=1))
    if not rows:
        raise _MissingUnit(f'unknown_unit: there is no unit "{name}"', "See the list of units.")
    return rows[0]


class _MissingUnit(UnknownUnit, name="unknown_unit", sqlstate="QT003", http_status=404):
    """A unit that the path names is not there; one that a body names is 422."""


@route(units, "get", "/units", READ, ok={200: page_of(Unit)})
def list_units(query: PageQuery) -> Response:
    """List units by name."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    rows = ledger().call(pages.units(after=after, most=query.limit + 1))
    return page(rows, query.limit, lambda row: [row["name"]])


@route(units, "post", "/units", OWN, ok={201: Unit})
def create_unit(body: UnitDraft) -> Response:
    """Register a unit, for all tenants and for ever. Takes a token for every tenant."""
    principal().require_every_tenant("A unit")

    def work(do: Do) -> Found:
        do(CreateUnit(body.name, body.money))
        return found_unit(do, body.name)

    return write(work, status=201, tenant=None, location=lambda row: place("units", row["name"]))


@route(units, "get", "/units/<segment:unit>", READ, ok={200: Unit})
def get_unit(path: UnitPath) -> Response:
    """Show a unit."""
    return answer(found_unit(ledger().call, path.unit), versioned=True)
