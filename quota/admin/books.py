"""The books: ledger, usage, who changed what, and the proof that the counters are right."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from flask import Response, stream_with_context
from pydantic import Field

from quota.admin.access import OWN, READ
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, route
from quota.admin.subjects import found as found_subject
from quota.admin.types import (
    Answer,
    Identity,
    Name,
    PageQuery,
    Query,
    Shown,
    SubjectName,
    Switch,
    Time,
    page_of,
)
from quota.calls import LoggedCheck, Repair, pages
from quota.client import Do
from quota.http.problems import Problem
from quota.http.values import plain, written

__all__ = ["books"]

books = blueprint("books", "The append-only ledger, usage, the log of changes, and the proof of the counters.")

_EXPORT_PAGE = 1000
_SPANS_MAX = 10_000
_LONG_S = 60
# A cell that begins with one of these is a formula to a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Line(Answer):
    """One line of a booking: what it added to one limit's account."""

    entry: str
    at: str
    kind: str
    reservation: str | None
    charged_to: str
    subject: str | None
    limit_name: str | None
    unit: str | None
    amount: Shown | None
    signed_amount: Shown | None
    window_start: str | None


class LedgerFilter(Query):
    """Which lines."""

    subject: SubjectName | None = Field(None, description="Whose account it is, or who spent.")
    unit: Name | None = None
    kind: Name | None = None
    reservation: Identity | None = None
    since: Time | None = Field(None, description="Booked at or after.")
    until: Time | None = Field(None, description="Booked before.")


class LedgerQuery(LedgerFilter, PageQuery):
    """Which lines, and which page of them."""


class ExportQuery(LedgerFilter):
    """Which lines, and how."""

    format: Annotated[str, Field(pattern="^(csv|jsonl)$")] = "csv"


def _lines(query: LedgerFilter, after: Any, most: int) -> list[dict[str, Any]]:
    reservation = None if query.reservation is None else str(query.reservation)
    call = pages.ledger(
        principal().tenant, after=after, most=most, subject=query.subject, unit=query.unit, kind=query.kind,
        reservation=reservation, since=query.since, until=query.until,
    )  # fmt: skip
    return ledger().call(call)


def _line_key(row: Found) -> list[Any]:
    return [row["entry"], row["subject"] or "", row["limit_name"] or ""]


def _shown_line(row: Found) -> dict[str, Any]:
    return {**row, "entry": str(row["entry"])}


@route(books, "get", "/ledger", READ, ok={200: page_of(Line)})
def list_ledger(query: LedgerQuery) -> Response:
    """Search the ledger, in the order of booking."""
    after = position(query.after, int, str, str) or (-1, "", "")
    rows = _lines(query, after, query.limit + 1)
    shown = [_shown_line(row) for row in rows]
    return page(shown, query.limit, lambda row: _line_key({**row, "entry": int(row["entry"])}))


def _export(query: LedgerFilter) -> Iterator[list[dict[str, Any]]]:
    after: Any = (-1, "", "")
    while True:
        rows = _lines(query, after, _EXPORT_PAGE)
        yield [plain(_shown_line(row)) for row in rows]
        if len(rows) < _EXPORT_PAGE:
            return
        after = tuple(_line_key(rows[-1]))


def _safe(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return f"'{text}" if text.startswith(_FORMULA) else text


# Numbers are numbers: a spreadsheet may add up what the quote of a text cell would hide.
_NUMBERS = frozenset({"entry", "amount", "signed_amount"})


def _csv(query: LedgerFilter) -> Iterator[str]:
    columns = list(Line.model_fields)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for rows in _export(query):
        for row in rows:
            writer.writerow([row[name] if name in _NUMBERS else _safe(row[name]) for name in columns])
        yield text.getvalue()
        text.seek(0)
        text.truncate()


def _jsonl(query: LedgerFilter) -> Iterator[str]:
    for rows in _export(query):
        yield "".join(f"{written(row)}\n" for row in rows)


@route(
    books, "get", "/ledger/export", READ, ok={200: None},
    content={
        "text/csv": {"schema": {"type": "string"}},
        "application/x-ndjson": {"schema": {"type": "string"}},
    },
)  # fmt: skip
def export_ledger(query: ExportQuery) -> Response:
    """Export ledger lines as CSV or as JSON lines, streamed. Text cells never begin like a formula."""
    as_csv = query.format == "csv"
    stream = _csv(query) if as_csv else _jsonl(query)
    kind = "text/csv; charset=utf-8; header=present" if as_csv else "application/x-ndjson"
    # The first part is made before the status is sent: what is wrong with the query is still an error then.
    first = next(stream)

    def parts() -> Iterator[str]:
        yield first
        yield from stream

    response = Response(stream_with_context(parts()), content_type=kind)
    response.headers["Content-Disposition"] = f'attachment; filename="ledger.{query.format}"'
    return response


# -- usage ----------------------------------------------------------------------------------------------------------


class Used(Answer):
    """What was booked in a span."""

    start: str = Field(description="Of the span.")
    unit: str
    charged_to: str | None = Field(description="With `by_spender`: who spent.")
    amount: Shown
    bookings: int


class UsageAnswer(Answer):
    """What was booked; spans without bookings are left out."""

    since: str
    until: str
    time_zone: str
    items: list[Used]


class UsageQuery(Query):
    """Whose usage, when, and how finely."""

    subject: SubjectName | None = Field(None, description="With all below it; left out: the whole tenant.")
    unit: Name | None = None
    since: Time | None = Field(None, description="Left out: 30 days before `until`.")
    until: Time | None = Field(None, description="Left out: now.")
    span: Annotated[str, Field(pattern="^(hour|day)$")] = "day"
    time_zone: Annotated[Name, Field(json_schema_extra={"example": "Europe/Berlin"})] = "UTC"
    by_spender: Switch = Field(False, description="A row for each subject that spent.")


@route(books, "get", "/usage", READ, ok={200: UsageAnswer})
def get_usage(query: UsageQuery) -> Response:
    """Sum up what was booked, by unit and by hour or day of a time zone, children included.

    Every booking lies in exactly one span, so that days add up to their range in every zone.
    """
    until = query.until or datetime.now(UTC)
    try:
        since = query.since or until - timedelta(days=30)
    except OverflowError:
        raise Problem(422, "invalid_argument", "until: name `since` as well.") from None
    if not since < until:
        raise Problem(422, "invalid_argument", "since, until: the range is empty.")
    hours = (until - since) / timedelta(hours=1 if query.span == "hour" else 24)
    if hours > _SPANS_MAX:
        raise Problem(422, "invalid_argument", f"since, until: more than {_SPANS_MAX} spans; ask for less or by day.")
    if query.subject is not None:
        found_subject(ledger().call, query.subject)
    rows = ledger().call(
        pages.usage(
            principal().tenant,
            since=since,
            until=until,
            span=query.span,
            time_zone=query.time_zone,
            subject=query.subject,
            unit=query.unit,
            by_spender=query.by_spender,
            most=_SPANS_MAX * 10,
        )
    )
    return answer({"since": since, "until": until, "time_zone": query.time_zone, "items": rows})


# -- the log --------------------------------------------------------------------------------------------------------


class Change(Answer):
    """One change, as it was made."""

    id: str
    at: str
    actor: str = Field(description="The database login.")
    on_behalf_of: str | None = Field(description="The token, as `token:<id>`, or what the session has said.")
    action: str
    tenant: str | None
    target: str | None
    reason: str | None
    before: Any
    after: Any
    request_id: str | None


class LogQuery(PageQuery):
    """Which changes."""

    action: Name | None = None
    target: Name | None = None
    on_behalf_of: Name | None = None


@route(books, "get", "/log", READ, ok={200: page_of(Change)})
def list_log(query: LogQuery) -> Response:
    """Who changed what, the newest in front. A token for every tenant also sees what concerns all of them."""
    (after,) = position(query.after, int) or (pages.LAST_ID,)
    call = pages.log(
        principal().tenant, shared=principal().scope is None, after=after, most=query.limit + 1, action=query.action,
        target=query.target, on_behalf_of=query.on_behalf_of,
    )  # fmt: skip
    rows = [{**row, "id": str(row["id"])} for row in ledger().call(call)]
    return page(rows, query.limit, lambda row: [int(row["id"])])


# -- the proof ------------------------------------------------------------------------------------------------------


class Wrong(Answer):
    """An invariant that does not hold."""

    tenant: str
    invariant: str
    subject: str | None
    limit_name: str | None
    expected: str | None
    found: str | None


class Proof(Answer):
    """The books are right when there are no violations."""

    violations: list[Wrong]


class Corrected(Answer):
    """A counter that was wrong."""

    subject: str
    limit_name: str
    counter: str
    was: Shown
    is_now: Shown


class Repaired(Answer):
    """What has been set right."""

    items: list[Corrected]


@route(books, "post", "/checks", READ, ok={200: Proof})
def check_books() -> Response:
    """Prove the tenant's counters from holds and ledger, in one snapshot, and log when that was."""

    def work(do: Do) -> Found:
        return {"violations": do(LoggedCheck(principal().tenant))}

    return write(work, versioned=False, timeout_s=_LONG_S)


@route(books, "post", "/repair", OWN, ok={200: Repaired})
def repair_books() -> Response:
    """Rebuild the tenant's counters from holds and ledger, in one transaction, itself on the ledger."""

    def work(do: Do) -> Found:
        return {"items": do(Repair(principal().tenant))}

    return write(work, versioned=False, timeout_s=_LONG_S)
