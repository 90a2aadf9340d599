"""Subjects: who spends, and whose children spend for them. OAuth connections are subjects of the kind `oauth`."""

from __future__ import annotations

from typing import Annotated

from flask import Response
from pydantic import Field

from quota.admin.access import OPERATE, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import (
    Answer,
    Body,
    Name,
    PageQuery,
    Path,
    Reason,
    Shown,
    SubjectName,
    Switch,
    Text,
    example,
    page_of,
)
from quota.calls import Balance, CreateSubject, EnsureSubject, Freeze, MoveSubject, RetireSubject, Unfreeze, pages
from quota.client import Do
from quota.errors import UnknownSubject

__all__ = ["connections", "found", "subjects"]

subjects = blueprint("subjects", "Who spends. A charge to a subject is a charge to every ancestor.")
connections = blueprint(
    "oauth_connections", "OAuth connections: their tokens come and go, their budget stays. Always `basic`."
)


class Subject(Answer):
    """Who spends."""

    name: str
    kind: str
    parent: str | None
    lineage: list[str]
    rate_tier: str | None = Field(description="Of a key; null for every other kind.")
    frozen: str | None = Field(description="Why it is frozen.")
    retired: bool
    created_at: str


class SubjectPath(Path):
    """Which subject."""

    subject: SubjectName = Field(json_schema_extra={"example": "user:7"})


class SubjectsQuery(PageQuery):
    """Which subjects."""

    kind: Name | None = None
    parent: SubjectName | None = Field(None, description="Only its children.")
    below: SubjectName | None = Field(None, description="Only it and everything below it.")
    frozen: Switch | None = None
    retired: Switch = Field(False, description="Retired ones too.")


class SubjectDraft(Body):
    """A subject to be made."""

    model_config = example({"name": "user:8", "parent": "org:acme"})

    name: SubjectName
    parent: SubjectName | None = None
    rate_tier: Name | None = Field(None, description="Of a key; left out: basic.")


class SubjectMove(Body):
    """Where it hangs."""

    model_config = example({"parent": "org:acme"})

    parent: SubjectName | None = Field(description="null: below nobody.")


class Ending(Body):
    """Why it ends."""

    model_config = example({"reason": "the contract has ended"})

    reason: Text | None = Field(None, description="For the log.")


class Standing(Answer):
    """Where a limit stands."""

    subject: str
    limit_name: str
    unit: str
    kind: str
    capacity: Shown | None = Field(description="null: unlimited.")
    spent: Shown | None
    reserved: Shown | None
    level: Shown | None
    available: Shown | None
    window_start: str | None
    window_end: str | None
    full_after_s: Shown | None


class Standings(Answer):
    """Every limit that a subject is under."""

    items: list[Standing]


def _shown(row: Found) -> Found:
    return {**row, "rate_tier": row["rate_tier"] if row["kind"] == "key" else None}


def found(do: Do, name: str) -> Found:
    """Reads one subject of the request's tenant, retired or not. Errors: `UnknownSubject`."""
    rows = do(pages.subjects(principal().tenant, name=name, retired=True, most=1))
    if not rows:
        raise UnknownSubject(f'unknown_subject: there is no subject "{name}"', "Create it, or correct the spelling.")
    return _shown(rows[0])


def _place(subject: Found) -> str:
    return place("subjects", subject["name"])


@route(subjects, "get", "/subjects", READ, ok={200: page_of(Subject)})
def list_subjects(query: SubjectsQuery) -> Response:
    """List subjects by name; their tree with `parent` or `below`."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    call = pages.subjects(
        principal().tenant, after=after, most=query.limit + 1, kind=query.kind, parent=query.parent,
        below=query.below, frozen=query.frozen, retired=query.retired,
    )  # fmt: skip
    rows = [_shown(row) for row in ledger().call(call)]
    return page(rows, query.limit, lambda row: [row["name"]])


@route(subjects, "post", "/subjects", OPERATE, ok={201: Subject})
def create_subject(body: SubjectDraft) -> Response:
    """Make a subject."""

    def work(do: Do) -> Found:
        do(CreateSubject(body.name, body.parent, body.rate_tier, principal().tenant))
        return found(do, body.name)

    return write(work, status=201, location=_place)


@route(subjects, "get", "/subjects/<segment:subject>", READ, ok={200: Subject})
def get_subject(path: SubjectPath) -> Response:
    """Show a subject."""
    return answer(found(ledger().call, path.subject), versioned=True)


@route(subjects, "get", "/subjects/<segment:subject>/balance", READ, ok={200: Standings})
def get_balance(path: SubjectPath) -> Response:
    """Show where every limit stands that the subject is under, its ancestors' included, at one instant."""
    return answer({"items": ledger().call(Balance(path.subject, principal().tenant))})


@route(subjects, "patch", "/subjects/<segment:subject>", OPERATE, ok={200: Subject})
def move_subject(path: SubjectPath, body: SubjectMove) -> Response:
    """Hang a subject below another parent. Refused while holds are open on it or below it."""

    def work(do: Do) -> Found:
        do(MoveSubject(path.subject, body.parent, principal().tenant))
        return found(do, path.subject)

    return write(work, current=lambda do: found(do, path.subject))


@route(subjects, "post", "/subjects/<segment:subject>/freeze", OPERATE, ok={200: Subject})
def freeze_subject(path: SubjectPath, body: Reason) -> Response:
    """Grant no new holds to a subject and all below it; what is open may settle and release."""

    def work(do: Do) -> Found:
        do(Freeze(path.subject, body.reason, principal().tenant))
        return found(do, path.subject)

    return write(work, current=lambda do: found(do, path.subject), reason=body.reason)


@route(subjects, "post", "/subjects/<segment:subject>/unfreeze", OPERATE, ok={200: Subject})
def unfreeze_subject(path: SubjectPath) -> Response:
    """Grant holds again."""

    def work(do: Do) -> Found:
        do(Unfreeze(path.subject, principal().tenant))
        return found(do, path.subject)

    return write(work, current=lambda do: found(do, path.subject))


@route(subjects, "post", "/subjects/<segment:subject>/retire", OPERATE, ok={200: Subject})
def retire_subject(path: SubjectPath, body: Ending) -> Response:
    """End a subject and all below it. Its ledger stays, its name is never used again."""

    def work(do: Do) -> Found:
        do(RetireSubject(path.subject, principal().tenant))
        return found(do, path.subject)

    return write(work, current=lambda do: found(do, path.subject), reason=body.reason)


# -- OAuth connections ----------------------------------------------------------------------------------------------

_KIND = "oauth"
ConnectionId = Annotated[str, Field(min_length=1, max_length=190, json_schema_extra={"example": "connection-a"})]


class ConnectionPath(Path):
    """Which connection."""

    id: ConnectionId


class ConnectionDraft(Body):
    """A connection to be known."""

    model_config = example({"id": "connection-b", "parent": "user:7"})

    id: Annotated[Name, Field(max_length=190)]
    parent: SubjectName | None = Field(None, description="Whose connection it is.")


class Connection(Answer):
    """An OAuth connection: the subject `oauth:<id>`."""

    id: str
    subject: str
    parent: str | None
    rate_tier: str = Field(description="Always basic.")
    frozen: str | None
    retired: bool
    created_at: str


class ConnectionsQuery(PageQuery):
    """Which connections."""

    parent: SubjectName | None = None


def _connection(row: Found) -> Found:
    shown = {name: row[name] for name in ("parent", "frozen", "retired", "created_at")}
    return {"id": row["name"].partition(":")[2], "subject": row["name"], "rate_tier": "basic", **shown}


@route(connections, "get", "/oauth-connections", READ, ok={200: page_of(Connection)})
def list_connections(query: ConnectionsQuery) -> Response:
    """List OAuth connections by name."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    call = pages.subjects(
        principal().tenant, after=after, most=query.limit + 1, kind=_KIND, parent=query.parent, retired=True
    )
    rows = [_connection(row) for row in ledger().call(call)]
    return page(rows, query.limit, lambda row: [row["subject"]])


@route(connections, "post", "/oauth-connections", OPERATE, ok={200: Connection})
def create_connection(body: ConnectionDraft) -> Response:
    """Know a connection, if it is not known yet. A refreshed token is the same connection and keeps its budget."""
    name = f"{_KIND}:{body.id}"

    def work(do: Do) -> Found:
        do(EnsureSubject(name, body.parent, principal().tenant))
        return _connection(found(do, name))

    return write(work, versioned=False)


@route(connections, "get", "/oauth-connections/<segment:id>", READ, ok={200: Connection})
def get_connection(path: ConnectionPath) -> Response:
    """Show a connection."""
    return answer(_connection(found(ledger().call, f"{_KIND}:{path.id}")))
