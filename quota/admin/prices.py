"""Prices: what models cost, by provider, model and variant, each in force for a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from flask import Response
from pydantic import Field

from quota.admin.access import OPERATE, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import Answer, Body, Name, PageQuery, Path, Switch, Text, Time, example, page_of
from quota.calls import EndPrice, SetPrice, pages
from quota.calls.prices import entry_of
from quota.client import Do, Transaction
from quota.costs.catalogs import Catalog, catalog_of
from quota.costs.tokens import TOKENS_MAX
from quota.http.problems import Problem
from quota.prices import AS_BEFORE, CHANGED, LEFT_OUT, NEW, import_catalog

__all__ = ["prices"]

prices = blueprint("prices", "The price book: what models cost, in dollars per million tokens, each for a time.")

_SHARED = "The price that all tenants see; takes a token for every tenant. A tenant's own goes before it."
_IMPORT_S = 60

Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Variant = Annotated[str, Field(max_length=60, pattern=r"^[a-z0-9_.-]*$")]


class Price(Answer):
    """One version of a price, in force from `effective_from` up to, not including, `effective_until`."""

    version: str = Field(description="What a reservation keeps.")
    shared: bool = Field(description="All tenants see it.")
    provider: str
    model: str
    variant: str = Field(description="Empty for the usual price, or such as `batch`.")
    rates: dict[str, Any] = Field(description="By part of a usage; a rate with long-context steps is an object.")
    free: bool
    effective_from: str | None = Field(description="null: from the beginning.")
    effective_until: str | None = Field(description="null: until another price begins.")
    output_max: int | None
    input_max: int | None
    source: str | None
    created_at: str


class PricePath(Path):
    """Which version."""

    version: Annotated[str, Field(pattern="^[0-9]{1,18}$", json_schema_extra={"example": "1"})]


class PriceQuery(PageQuery):
    """Which prices."""

    provider: Name | None = None
    search: Name | None = Field(None, description="A part of the model's name, in any case.")
    at: Time | None = Field(None, description="In force then. Left out: in force now or later.")
    history: Switch = Field(False, description="Also those that have ended.")


class PriceDraft(Body):
    """A price to be set. The one in force ends where it begins; the same price again is the same version."""

    model_config = example({
        "provider": "acme", "model": "llama-70b", "rates": {"input": "0.6", "cached_input": "0.06", "output": "0.8"},
        "output_max": 8192, "source": "https://acme.example/prices",
    })  # fmt: skip

    provider: Name
    model: Name
    rates: dict[str, Any] = Field(
        description="Dollars per million tokens: `input` and `output`, and where they differ `cached_input`, "
        "`cache_write_5m`, `cache_write_1h`, `input_audio`, `output_audio`; dollars per `request` and in `uses`."
    )
    variant: Variant = ""
    effective_from: Time | Literal["-infinity"] | None = Field(None, description="Left out: now.")
    effective_until: Time | None = Field(None, description="Left out: until another price begins.")
    output_max: Tokens | None = Field(None, description="The most tokens that the model answers.")
    input_max: Tokens | None = Field(None, description="The most tokens that it takes.")
    free: bool = Field(False, description="Declares that it costs nothing.")
    source: Text | None = None
    shared: bool = Field(False, description=_SHARED)


class PriceEnd(Body):
    """When a price ends."""

    model_config = example({"at": "2040-01-01T00:00:00Z"})

    at: Time | None = Field(None, description="Left out: now.")


class PriceMap(Body):
    """Prices to be imported: a price map, or those of the genai-prices package where the service has it."""

    model_config = example({
        "prices": [{"provider": "acme", "model": "m", "rates": {"input": "1", "output": "2"}, "output_max": 4096}],
        "dry_run": True,
    })  # fmt: skip

    prices: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None,
        description="As LiteLLM, models.dev or OpenRouter write it, or a list of objects with provider, model and "
        "rates, at most 64 KiB at a time. Left out: the package's, for the `providers` named.",
    )
    providers: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = Field(
        None, description="Only their models."
    )
    shared: bool = Field(False, description=_SHARED)
    dry_run: bool = Field(False, description="Report, and change nothing.")


class Remark(Answer):
    """What lacks a price (left out), or an output maximum (imported; its ceilings are not clamped)."""

    provider: str
    model: str
    problem: str
    imported: bool


class Imported(Answer):
    """What became of the prices."""

    read: int
    new: int
    as_before: int
    changed_from_now_on: int
    left_out: int = Field(description="The past is not rewritten.")
    remarks: list[Remark]


def _shown(row: Found) -> dict[str, Any]:
    entry = entry_of(row)
    return {
        "version": str(entry.version),
        "shared": entry.tenant is None,
        "provider": entry.provider,
        "model": entry.model,
        "variant": entry.variant,
        "rates": entry.price.json(),
        "free": entry.price.free,
        "effective_from": entry.effective_from,
        "effective_until": entry.effective_until,
        "output_max": entry.output_max,
        "input_max": entry.input_max,
        "source": entry.source,
        "created_at": row["created_at"],
    }


def _found(do: Do, version: int) -> Found:
    rows = do(pages.price(principal().tenant, version))
    if not rows:
        raise Problem(404, "unknown_price", f"There is no version {version} of a price. See the list of prices.")
    return _shown(rows[0])


def _owner(shared: bool) -> str | None:
    if shared:
        principal().require_every_tenant("A price that all tenants see")
        return None
    return principal().tenant


@route(prices, "get", "/prices", READ, ok={200: page_of(Price)})
def list_prices(query: PriceQuery) -> Response:
    """List the prices that the tenant meets, its own and those that all tenants see, in the order they were set."""
    (after,) = position(query.after, int) or (0,)
    call = pages.prices(
        principal().tenant, after=after, most=query.limit + 1, provider=query.provider, search=query.search,
        at=query.at, ended=query.history,
    )  # fmt: skip
    return page([_shown(row) for row in ledger().call(call)], query.limit, lambda row: [int(row["version"])])


@route(prices, "get", "/prices/<segment:version>", READ, ok={200: Price})
def get_price(path: PricePath) -> Response:
    """Show a version of a price."""
    return answer(_found(ledger().call, int(path.version)), versioned=True)


@route(prices, "post", "/prices", OPERATE, ok={201: Price})
def set_price(body: PriceDraft) -> Response:
    """Set what a model costs from a time on. History is never rewritten: the price in force ends there."""
    owner = _owner(body.shared)
    call = SetPrice(
        body.provider.lower(), body.model.lower(), body.rates, body.variant, body.effective_from, body.effective_until,
        body.output_max, body.input_max, body.free, body.source, owner,
    )  # fmt: skip
    return write(
        lambda do: _found(do, do(call)[0]),
        status=201,
        tenant=owner,
        location=lambda price: place("prices", str(price["version"])),
    )


@route(prices, "post", "/prices/<segment:version>/end", OPERATE, ok={200: Price})
def end_price(path: PricePath, body: PriceEnd) -> Response:
    """End a price: from then on the model has the next one, or cannot be called."""
    version = int(path.version)
    owner = _owner(bool(_found(ledger().call, version)["shared"]))

    def work(do: Do) -> Found:
        do(EndPrice(version, body.at, owner))
        return _found(do, version)

    return write(work, tenant=owner, current=lambda do: _found(do, version))


@route(prices, "post", "/prices/import", OPERATE, ok={200: Imported})
def import_prices(body: PriceMap) -> Response:
    """Fill the price book: all of it, or nothing. What has changed is in force from now on; what was before stays."""
    owner, catalog = _owner(body.shared), _catalog(body)
    remarks = [
        {"provider": r.provider, "model": r.model, "problem": r.problem, "imported": r.imported}
        for r in catalog.remarks
    ]

    def work(do: Transaction) -> Found:
        counts = {} if body.dry_run else import_catalog(do, catalog, owner)
        return {
            "read": len(catalog.entries),
            "new": counts.get(NEW, 0),
            "as_before": counts.get(AS_BEFORE, 0),
            "changed_from_now_on": counts.get(CHANGED, 0),
            "left_out": counts.get(LEFT_OUT, 0),
            "remarks": remarks,
        }

    return write(work, tenant=owner, versioned=False, timeout_s=_IMPORT_S)


def _catalog(body: PriceMap) -> Catalog:
    providers = None if body.providers is None else [name.lower() for name in body.providers]
    if body.prices is None and providers is None:
        raise Problem(422, "invalid_argument", "prices, providers: send a price map, or name providers.")
    if body.prices is not None:
        return catalog_of(body.prices, providers=providers, source=f"imported {datetime.now(UTC):%Y-%m-%d}")
    try:
        from quota.costs.genai import genai_prices

        return genai_prices(providers)
    except ImportError:
        raise Problem(422, "invalid_argument", "prices: the service has no genai-prices package; send a map.") from None
