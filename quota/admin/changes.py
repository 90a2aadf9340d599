"""How a write is done: once, on the version that was meant, together with its line in the log, or not at all.

One transaction says who acts and takes the tenant's lock, looks for the answer of an earlier request with the same
Idempotency-Key, compares If-Match with what is there now, does the work through the functions that SQL users call, and
stores its answer. No second change of the tenant comes in between.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flask import Response, current_app, request

from quota.admin.access import Principal
from quota.admin.front import PRINCIPAL, REQUEST_ID
from quota.calls import BeginChange, BeginRequest, EndRequest
from quota.client import Client, Do, Transaction
from quota.http.problems import Problem
from quota.http.values import plain, written

__all__ = ["Found", "answer", "etag", "ledger", "must_be_unconditional", "principal", "write"]

Found = Mapping[str, Any]
"""A resource as it is answered."""

_KEY = re.compile(r'"((?:[^"\\]|\\.){1,200})"|([\x21-\x7e]{1,200})', re.ASCII)
_ETAGS = re.compile(r'\s*(?:W/)?("[\x21\x23-\x7e]*")\s*(?:,|$)', re.ASCII)


def ledger() -> Client:
    """The client of this application."""
    client: Client = current_app.extensions["quota"]
    return client


def principal() -> Principal:
    """Who made the request that is being served."""
    found: Principal = request.environ[PRINCIPAL]
    return found


def etag(resource: Found) -> str:
    """Returns the version of a resource: a strong validator made from all that is shown of it."""
    return _etag_of(written(resource))


def _etag_of(text: str) -> str:
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def answer(resource: Found, status: int = 200, *, versioned: bool = False, location: str | None = None) -> Response:
    """Returns the response that shows a resource. `versioned`: with its ETag."""
    text = written(resource)
    response = Response(text, status, content_type="application/json")
    if versioned:
        response.headers["ETag"] = _etag_of(text)
    if location is not None:
        response.headers["Location"] = location
    return response


def idempotency_key() -> str | None:
    """The request's Idempotency-Key, quoted or bare. Errors: `Problem` 400."""
    header = request.headers.get("Idempotency-Key")
    if header is None:
        return None
    found = _KEY.fullmatch(header.strip())
    if found is None or len(header) > 202:
        raise Problem(400, "malformed", "Idempotency-Key: give 1 to 200 printable ASCII characters, quoted or bare.")
    return found[1] if found[1] is not None else found[2]


def _versions() -> frozenset[str] | None:
    """The versions that If-Match names; None without the header; `*` stands for every one."""
    header = request.headers.get("If-Match")
    if header is None:
        return None
    if header.strip() == "*":
        return frozenset({"*"})
    found = _ETAGS.findall(header)
    if not found or _ETAGS.sub("", header).strip():
        raise Problem(400, "malformed", 'If-Match: give the ETag of an answer, such as "5d41402a", or *.')
    return frozenset(found)


def must_be_unconditional() -> None:
    """Refuses If-Match where what is changed has no version: nothing is done as if it had matched. Errors: 412."""
    if request.headers.get("If-Match") is not None:
        raise Problem(412, "stale", "If-Match: what this changes has no version; leave it out.")


def _must_match(do: Do, current: Callable[[Do], Found] | None, versions: frozenset[str] | None) -> None:
    if versions is None:
        return
    if current is None:
        raise Problem(412, "stale", "If-Match: there is nothing here yet that could have a version.")
    now = current(do)
    if versions != {"*"} and etag(now) not in versions:
        raise Problem(412, "stale", "Somebody has changed it since; read it again and decide anew.")


@dataclass(frozen=True, slots=True)
class _Done:
    status: int
    resource: Found
    secret: str | None
    replayed: bool


def write(
    work: Callable[[Transaction], Found],
    *,
    current: Callable[[Do], Found] | None = None,
    status: int = 200,
    tenant: str | None = "",
    reason: str | None = None,
    location: Callable[[Found], str] | None = None,
    secret: str | None = None,
    versioned: bool = True,
    timeout_s: float | None = None,
) -> Response:
    """Does a write; returns its response.

    Arguments:
        work: does it and returns the resource as it is then; runs again after a serialization failure.
        current: reads the resource before, for If-Match; None: it has no version yet.
        status: of the answer.
        tenant: whose; None: all tenants'; left out: the request's.
        reason: why, for the log.
        location: where the resource is found.
        secret: shown in this answer, once; a repeated request gets the resource without it.
        versioned: the answer has an ETag.
        timeout_s: its own deadline in seconds.

    Errors: `Problem` 412 for another version, 422 for an Idempotency-Key that belongs to another request.
    """
    who, key, versions = principal(), idempotency_key(), _versions()
    where = who.tenant if tenant == "" else tenant
    text = f"{request.method} {request.full_path}\n".encode() + request.get_data()
    fingerprint = hashlib.sha256(text).digest()

    def inside(do: Transaction) -> _Done:
        do(BeginChange(who.actor, request.environ[REQUEST_ID], reason, where))
        if key is not None:
            claim = do(BeginRequest(who.token, key, fingerprint, where))
            if not claim.same:
                raise Problem(
                    422, "idempotency_key_reused", "This Idempotency-Key belongs to another request; use a new one."
                )
            if not claim.fresh:
                return _Done(claim.status or status, json.loads(claim.answer or "{}"), None, True)
        _must_match(do, current, versions)
        resource = plain(work(do))
        if key is not None:
            do(EndRequest(who.token, key, status, written(resource), where))
        return _Done(status, resource, secret, False)

    done = ledger().transact(inside, timeout_s=timeout_s)
    shown = done.resource if done.secret is None else {**done.resource, "secret": done.secret}
    where_found = location(done.resource) if location is not None else None
    response = answer(shown, done.status, location=where_found)
    if versioned:
        response.headers["ETag"] = etag(done.resource)
    if done.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return response
