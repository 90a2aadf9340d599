"""Limits on subjects and on kinds, and tiers: the numbers that decide."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Response
from pydantic import Field

from quota.admin.access import OPERATE, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import (
    Answer,
    Body,
    Given,
    Name,
    PageQuery,
    Path,
    Shown,
    SubjectName,
    example,
    page_of,
)
from quota.calls import RemoveLimit, SetLimit, pages
from quota.client import Do
from quota.errors import UnknownLimit

__all__ = ["Definition", "DefinitionShown", "limits"]

limits = blueprint("limits", "Limits on subjects, and on kinds (`user:*`) as the default of every subject of it.")

Kind = Annotated[str, Field(pattern="^(budget|bucket|concurrency)$")]


class Definition(Body):
    """A limit's unit and kind, which stay, and its numbers."""

    unit: Name
    kind: Kind = "budget"
    capacity: Given | None = Field(description="The most; null: unlimited, counted, never refused (budgets only).")
    refill_per_s: Given | None = Field(None, description="Of a bucket: what it regains each second.")
    period: Name | None = Field(
        None, description="Of a budget: day, week, month, or a length such as 1 hour; null: a lifetime."
    )


class LimitDraft(Definition):
    """A limit of a subject or a kind."""

    model_config = example({"unit": "usd", "kind": "budget", "capacity": "50", "period": "month"})

    time_zone: Name = Field("UTC", description="IANA zone of a calendar period.")
    on_expiry: Annotated[str, Field(pattern="^(release|charge)$")] = "release"
    required: bool = Field(False, description="Costs must name the unit.")


class DefinitionShown(Answer):
    """A limit as it was set."""

    name: str
    unit: str
    kind: str
    capacity: Shown | None
    refill_per_s: Shown | None
    period: str | None


class Limit(DefinitionShown):
    """A limit of a subject or a kind."""

    owner: str
    time_zone: str
    on_expiry: str
    required: bool


class LimitPath(Path):
    """Which limit."""

    owner: SubjectName = Field(
        description="A subject, or a kind such as user:*.", json_schema_extra={"example": "org:acme"}
    )
    name: Name = Field(json_schema_extra={"example": "monthly"})


class LimitsQuery(PageQuery):
    """Which limits."""

    owner: SubjectName | None = None


def found(do: Do, owner: str, name: str) -> Found:
    """Reads one limit. Errors: `UnknownLimit`."""
    rows = do(pages.limits(principal().tenant, owner=owner, name=name, most=1))
    if not rows:
        raise UnknownLimit(f'unknown_limit: "{owner}" has no limit "{name}" of its own', "See the list of its limits.")
    return rows[0]


@route(limits, "get", "/limits", READ, ok={200: page_of(Limit)})
def list_limits(query: LimitsQuery) -> Response:
    """List limits as they were set. Which are in force for a subject, and where they stand, says its balance."""
    after: Any = position(query.after, str, str) or ("", "")
    call = pages.limits(principal().tenant, after=after, most=query.limit + 1, owner=query.owner)
    return page(ledger().call(call), query.limit, lambda row: [row["owner"], row["name"]])


@route(limits, "get", "/limits/<segment:owner>/<segment:name>", READ, ok={200: Limit})
def get_limit(path: LimitPath) -> Response:
    """Show a limit."""
    return answer(found(ledger().call, path.owner, path.name), versioned=True)


@route(limits, "put", "/limits/<segment:owner>/<segment:name>", OPERATE, ok={200: Limit})
def set_limit(path: LimitPath, body: LimitDraft) -> Response:
    """Set a limit, or change its numbers; usage stays.

    A cap may be lowered below what is spent: open holds live on, and no reservation that is decided after this answer
    is granted by the old number.
    """

    def work(do: Do) -> Found:
        do(
            SetLimit(
                path.owner,
                path.name,
                body.unit,
                body.kind,
                body.capacity,
                body.refill_per_s,
                body.period,
                body.time_zone,
                body.on_expiry,
                body.required,
                principal().tenant,
            )
        )
        return found(do, path.owner, path.name)

    return write(
        work,
        current=lambda do: found(do, path.owner, path.name),
        location=lambda row: place("limits", row["owner"], row["name"]),
    )


class Removed(Answer):
    """What was removed."""

    owner: str
    name: str
    removed: bool


@route(limits, "delete", "/limits/<segment:owner>/<segment:name>", OPERATE, ok={200: Removed})
def remove_limit(path: LimitPath) -> Response:
    """Take a limit out of force. Open holds on it live on; set again with the same shape, it has its counters back."""

    def work(do: Do) -> Found:
        do(RemoveLimit(path.owner, path.name, principal().tenant))
        return {"owner": path.owner, "name": path.name, "removed": True}

    return write(work, current=lambda do: found(do, path.owner, path.name), versioned=False)
