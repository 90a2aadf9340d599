"""Reservations: for workers without a database login, and for operators who look and clear up."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID, uuid5

from flask import Response
from pydantic import Field

from quota.admin.access import CLOSE, OPERATE, READ, WORK
from quota.admin.changes import Found, answer, idempotency_key, ledger, must_be_unconditional, principal, write
from quota.admin.money import is_money
from quota.admin.pages import page, position
from quota.admin.rate_limits import limit_headers
from quota.admin.routes import blueprint, route
from quota.admin.types import (
    Answer,
    Body,
    Costs,
    Details,
    Given,
    Identity,
    PageQuery,
    Path,
    Seconds,
    Shown,
    SubjectName,
    Switch,
    Text,
    example,
    page_of,
    span_of,
)
from quota.calls import (
    Adjust,
    Credit,
    Extend,
    OperatorRelease,
    OperatorSettle,
    Record,
    Release,
    Reservation,
    Reserve,
    Settle,
    pages,
)
from quota.client import Do
from quota.errors import IdConflict, UnknownReservation
from quota.http.problems import Problem, of_refusal
from quota.ids import uuid7

__all__ = ["reservations"]

reservations = blueprint("reservations", "Holds: the worst case before a call is made, the true cost afterwards.")

# Ids made from an Idempotency-Key: the same key of the same token is the same reservation.
_NAMESPACE = UUID("5f0c2f3a-7a0c-5d53-9d0e-1f6f3f0b6c11")


class Standing(Answer):
    """Where a limit stands, as the decision saw it."""

    subject: str
    limit_name: str | None
    unit: str | None
    kind: str | None
    capacity: Shown | None
    spent: Shown | None
    reserved: Shown | None
    level: Shown | None
    available: Shown | None
    reason: str | None
    retry_after_s: Shown | None


class Granted(Answer):
    """An open hold."""

    reservation: str
    state: str
    expires_at: str
    replayed: bool = Field(description="The answer to an earlier request with the same id.")
    remaining: list[Standing]


class Kept(Answer):
    """A reservation as it is kept."""

    reservation: str
    subject: str
    also: list[str]
    state: str
    costs: dict[str, Shown]
    held: dict[str, Shown]
    booked: dict[str, Shown]
    outcome: str | None
    late: bool
    created_at: str
    expires_at: str
    closed_at: str | None
    details: dict[str, Any]


class ReservationPath(Path):
    """Which reservation."""

    id: Identity = Field(json_schema_extra={"example": "01890a5d-ac96-774b-bcce-b302099a8057"})


class ReservationsQuery(PageQuery):
    """Which reservations."""

    subject: SubjectName | None = None
    state: Annotated[str, Field(pattern="^(held|settled|released|expired)$")] | None = None
    overdue: Switch = Field(False, description="Only open ones whose time has passed.")


class Draft(Body):
    """What is asked for."""

    model_config = example({"subject": "key:web", "costs": {"usd": "0.25"}, "ttl_s": 120})

    subject: SubjectName
    costs: Costs
    ttl_s: Seconds | None = Field(None, description="How long the hold lives; left out: 600.")
    id: Identity | None = Field(None, description="The idempotency key; left out: made from Idempotency-Key, else new.")
    also: Annotated[list[SubjectName], Field(max_length=20)] = Field(
        [], description="The same cost counts on them too."
    )
    headroom: Given = Field("0", description="Share of every capacity to leave untouched, 0 to below 1.")
    on_expiry: Annotated[str, Field(pattern="^(release|charge)$")] | None = None
    details: Details | None = None


class Settling(Body):
    """The true cost."""

    model_config = example({"costs": {"usd": "0.11"}, "reason": "the worker is gone; cost from the provider's page"})

    costs: Costs | None = Field(
        None, description="Totals of the reservation so far; what is left out settles at the hold."
    )
    final: bool = Field(True, description="False books and keeps the rest held.")
    outcome: Annotated[str, Field(pattern="^(ok|error|timeout|cancelled|unknown)$")] = "ok"
    details: Details | None = None
    reason: Text | None = Field(None, description="An operator has to say why; it is logged. Workers leave it out.")


class Settled(Answer):
    """What was settled."""

    state: str
    late: bool
    replayed: bool
    overage: dict[str, Shown]


class Releasing(Body):
    """Why the hold returns."""

    model_config = example({"reason": "the worker is gone"})

    details: Details | None = None
    reason: Text | None = Field(None, description="An operator has to say why; it is logged. Workers leave it out.")


class ReleasedAnswer(Answer):
    """The state after it."""

    state: str
    replayed: bool


class Adjusting(Body):
    """What is to be held in all."""

    model_config = example({"costs": {"usd": "0.20"}})

    costs: Costs


class Extending(Body):
    """How long it lives from now on."""

    model_config = example({"ttl_s": 300})

    ttl_s: Seconds


class Extended(Answer):
    """When it expires."""

    expires_at: str


class Usage(Body):
    """Usage that had no hold."""

    model_config = example({"subject": "key:web", "costs": {"usd": "0.01"}})

    subject: SubjectName
    costs: Costs
    id: Identity | None = Field(None, description="The idempotency key; left out: made from Idempotency-Key, else new.")
    also: Annotated[list[SubjectName], Field(max_length=20)] = Field(default_factory=list)
    details: Details | None = None


class Booked(Answer):
    """The ledger entry."""

    entry: str = Field(description="Its number.")
    replayed: bool


class Crediting(Body):
    """What is taken back."""

    model_config = example({"costs": {"usd": "0.05"}, "reason": "the provider refunded a failed answer"})

    costs: Costs
    reason: Text
    id: Identity | None = Field(None, description="The idempotency key; left out: none but the header's.")


def _id(given: UUID | None) -> tuple[UUID, bool]:
    """The id of a request, and whether it was made from its Idempotency-Key."""
    must_be_unconditional()
    key = idempotency_key()
    if given is not None:
        return given, False
    if key is None:
        return uuid7(), False
    who = principal()
    return uuid5(_NAMESPACE, f"{who.tenant}\n{who.token}\n{key}"), True


def _reused(error: IdConflict) -> Problem:
    return Problem(422, "idempotency_key_reused", f"This Idempotency-Key belongs to another request: {error.message}")


def _refused(refusal: Reservation, subject: str, units: Collection[str] | None = None) -> Problem:
    """The problem that a refusal is. `units`: what was asked for, to tell of its limits in headers; None: not told."""
    problem = of_refusal(refusal, subject, is_money)
    if problem.status == 429 and units is not None:
        problem.headers.update(limit_headers(subject, units, refusal))
    return problem


def _granted(reservation: Reservation, subject: str, status: int) -> Response:
    if reservation.refused:
        raise _refused(reservation, subject)
    shown = {name: getattr(reservation, name) for name in Granted.model_fields}
    return answer(shown, 200 if reservation.replayed else status)


@route(reservations, "post", "/reservations", WORK, ok={200: Granted, 201: Granted})
def reserve(body: Draft) -> Response:
    """Hold the worst case before the call is made: all limits of the subject and its ancestors take it, or none.

    201: granted. 200: the same request as before, granted then. 402, 403, 409, 422 and 429: refused, with the binding
    limit and its numbers.
    """
    identity, derived = _id(body.id)
    call = Reserve(
        body.subject,
        body.costs,
        ttl=timedelta(minutes=10) if body.ttl_s is None else span_of(body.ttl_s),
        id=identity,
        also=body.also,
        headroom=body.headroom,
        on_expiry=body.on_expiry,
        details=body.details,
        tenant=principal().tenant,
    )
    try:
        done = ledger().call(call)
    except IdConflict as error:
        if derived:
            raise _reused(error) from None
        raise
    if done.refused:
        raise _refused(done, body.subject, body.costs)
    response = _granted(done, body.subject, 201)
    response.headers.extend(limit_headers(body.subject, body.costs))
    return response


@route(reservations, "get", "/reservations", READ, ok={200: page_of(Kept)})
def list_reservations(query: ReservationsQuery) -> Response:
    """Search reservations, the newest in front."""
    after = position(query.after, str)
    call = pages.reservations(
        principal().tenant, most=query.limit + 1, subject=query.subject, state=query.state, overdue=query.overdue,
        after=None if after is None else _known_uuid(after[0]),
    )  # fmt: skip
    return page(ledger().call(call), query.limit, lambda row: [str(row["reservation"])])


def _known_uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise Problem(422, "invalid_argument", "after: this is no `next` of this list.") from None


def found(do: Do, identity: UUID) -> Found:
    """Reads one reservation. Errors: `UnknownReservation`."""
    rows = do(pages.reservation(principal().tenant, str(identity)))
    if not rows:
        raise UnknownReservation(f'unknown_reservation: there is no reservation "{identity}"', "Pass the full id.")
    return rows[0]


@route(reservations, "get", "/reservations/<segment:id>", READ, ok={200: Kept})
def get_reservation(path: ReservationPath) -> Response:
    """Show a reservation."""
    return answer(found(ledger().call, path.id))


def _operators_reason(reason: str | None) -> str | None:
    """Why an operator acts, who has to say so; None for a worker, who does not."""
    worker = principal().role == "worker"
    if worker and reason is not None:
        raise Problem(422, "invalid_argument", "reason: only operators give one; put yours into details.")
    if worker:
        must_be_unconditional()
    elif reason is None:
        raise Problem(422, "invalid_argument", "reason: an operator has to say why; it is logged.")
    return reason


@route(reservations, "post", "/reservations/<segment:id>/settle", CLOSE, ok={200: Settled})
def settle(path: ReservationPath, body: Settling) -> Response:
    """Book the true cost. Repeating it with the same totals changes nothing.

    An operator settles for good, with outcome `ok` and a reason.
    """
    tenant = principal().tenant
    reason = _operators_reason(body.reason)
    if reason is None:
        call = Settle(path.id, body.costs, body.final, body.outcome, body.details, tenant)
        return answer(vars_of(ledger().call(call), Settled))
    if not body.final or body.outcome != "ok" or body.details is not None:
        raise Problem(422, "invalid_argument", "final, outcome, details: an operator settles for good and says why.")

    def work(do: Do) -> Found:
        return vars_of(do(OperatorSettle(path.id, body.costs, reason, tenant)), Settled)

    return write(work, versioned=False, reason=reason)


def vars_of(value: object, kind: type[Answer]) -> dict[str, Any]:
    """Returns what an answer of this type shows of a value."""
    return {name: getattr(value, name) for name in kind.model_fields}


@route(reservations, "post", "/reservations/<segment:id>/release", CLOSE, ok={200: ReleasedAnswer})
def release(path: ReservationPath, body: Releasing) -> Response:
    """Return a hold whose call never left. An operator gives a reason."""
    tenant = principal().tenant
    reason = _operators_reason(body.reason)
    if reason is None:
        return answer(vars_of(ledger().call(Release(path.id, body.details, tenant)), ReleasedAnswer))
    if body.details is not None:
        raise Problem(422, "invalid_argument", "details: an operator gives a reason.")

    def work(do: Do) -> Found:
        return vars_of(do(OperatorRelease(path.id, reason, tenant)), ReleasedAnswer)

    return write(work, versioned=False, reason=reason)


@route(reservations, "post", "/reservations/<segment:id>/credit", OPERATE, ok={200: Booked})
def credit(path: ReservationPath, body: Crediting) -> Response:
    """Take back at most what a reservation has booked, on all its limits and in the windows it was booked in."""

    def work(do: Do) -> Found:
        done = do(Credit(path.id, body.costs, body.reason, body.id, principal().tenant))
        return {"entry": str(done.entry), "replayed": done.replayed}

    return write(work, versioned=False, reason=body.reason)


@route(reservations, "post", "/reservations/<segment:id>/adjust", WORK, ok={200: Granted})
def adjust(path: ReservationPath, body: Adjusting) -> Response:
    """Change what an open hold holds, to these totals. More is decided like a reservation, less always fits."""
    must_be_unconditional()
    return _granted(ledger().call(Adjust(path.id, body.costs, principal().tenant)), "", 200)


@route(reservations, "post", "/reservations/<segment:id>/extend", WORK, ok={200: Extended})
def extend(path: ReservationPath, body: Extending) -> Response:
    """Let an open hold live for `ttl_s` from now on; never less than before."""
    must_be_unconditional()
    return answer({"expires_at": ledger().call(Extend(path.id, span_of(body.ttl_s), principal().tenant))})


@route(reservations, "post", "/usage-records", WORK, ok={200: Booked, 201: Booked})
def record_usage(body: Usage) -> Response:
    """Book usage that had no hold, in full; it is never refused."""
    identity, derived = _id(body.id)
    call = Record(body.subject, body.costs, identity, body.also, body.details, principal().tenant)
    try:
        done = ledger().call(call)
    except IdConflict as error:
        if derived:
            raise _reused(error) from None
        raise
    return answer({"entry": str(done.entry), "replayed": done.replayed}, 200 if done.replayed else 201)
