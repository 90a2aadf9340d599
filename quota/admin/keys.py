"""Keys: who authenticates as `key:<id>`."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from flask import Response, current_app
from pydantic import Field

from quota import credentials
from quota.admin.access import OPERATE, READ, VERIFY
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import (
    LEFT_OUT,
    Answer,
    Body,
    KeyId,
    Name,
    PageQuery,
    Path,
    Reason,
    Seconds,
    SubjectName,
    Time,
    example,
    page_of,
    span_of,
)
from quota.authentication import Authenticator
from quota.calls import (
    CreateKey,
    MoveSubject,
    RenameKey,
    RevokeKey,
    RotateKey,
    SetKeyExpiry,
    SetRateTier,
    SetRateTiers,
    pages,
)
from quota.client import Do
from quota.errors import UnknownKey

__all__ = ["keys"]

keys = blueprint("keys", "API keys. A key is a secret that authenticates the subject `key:<id>`; it is shown once.")


class Key(Answer):
    """A key and the subject that it authenticates."""

    id: str
    subject: str
    name: str
    parent: str | None
    rate_tier: str
    state: str
    frozen: str | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    changed_at: str
    old_secret_until: str | None


class NewKey(Key):
    """A key with its secret, which is shown in this answer only."""

    secret: str | None = Field(None, description="Left out when the request is repeated: rotate the key then.")


class KeyPath(Path):
    """Which key."""

    id: KeyId


class KeysQuery(PageQuery):
    """Which keys."""

    search: Name | None = Field(None, description="An id, or a part of a name.")
    parent: SubjectName | None = None
    tier: Name | None = None
    state: Annotated[str | None, Field(pattern="^(active|expired|revoked|retired)$")] = None


class KeyDraft(Body):
    """A key to be made."""

    model_config = example({"name": "Web shop", "parent": "org:acme", "rate_tier": "basic"})

    name: Name
    id: KeyId | None = Field(None, description="Left out: a new one.")
    parent: SubjectName | None = Field(None, description="The owner: what the key spends is charged to it as well.")
    rate_tier: Name | None = Field(None, description="Left out: basic.")
    expires_at: Time | None = None


class KeyChange(Body):
    """What changes; what is left out stays."""

    model_config = example({"rate_tier": "bulk"})

    name: Name = LEFT_OUT
    rate_tier: Name = LEFT_OUT
    parent: SubjectName | None = Field(None, description="null: no owner any more. Refused while holds are open.")
    expires_at: Time | None = Field(None, description="null: it does not expire.")


class Rotation(Body):
    """How the secret changes."""

    model_config = example({"overlap_s": 3600})

    overlap_s: Seconds = Field(Decimal(0), description="How long the secret before stays good.")


class TierOfMany(Body):
    """Keys that move to a tier."""

    model_config = example({"ids": ["web"], "rate_tier": "extended"})

    ids: Annotated[list[KeyId], Field(min_length=1, max_length=1000)]
    rate_tier: Name


class Moved(Answer):
    """Which keys have moved to which tier."""

    ids: list[str]
    rate_tier: str


class Presented(Body):
    """A secret that somebody has presented."""

    model_config = example({"secret": "qk_web_0123456789012345678901234567890123456789012"})

    secret: Annotated[str, Field(min_length=1, max_length=500)]


class Verified(Answer):
    """Whose secret it is."""

    valid: bool = Field(description="True: let the holder in.")
    state: str = Field(description="active, expired, revoked, retired, or unknown.")
    tenant: str | None = None
    subject: str | None = None
    name: str | None = None
    parent: str | None = None
    rate_tier: str | None = None
    frozen: str | None = Field(None, description="Why the subject is frozen: its reservations are refused.")
    expires_at: str | None = None


def found(do: Do, identity: str) -> Found:
    """Reads one key of the request's tenant. Errors: `UnknownKey`."""
    rows = do(pages.key(principal().tenant, identity))
    if not rows:
        raise UnknownKey(f'unknown_key: there is no key "{identity}"', "Pass the full public id.")
    return rows[0]


def _place(key: Found) -> str:
    return place("keys", key["id"])


@route(keys, "get", "/keys", READ, ok={200: page_of(Key)})
def list_keys(query: KeysQuery) -> Response:
    """List and search keys, by id."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    call = pages.keys(
        principal().tenant, after=after, most=query.limit + 1, search=query.search, parent=query.parent,
        tier=query.tier, state=query.state,
    )  # fmt: skip
    return page(ledger().call(call), query.limit, lambda key: [key["id"]])


@route(keys, "post", "/keys", OPERATE, ok={201: NewKey})
def create_key(body: KeyDraft) -> Response:
    """Make a key. Its secret is in this answer and nowhere else.

    Its subject is `key:<id>`: what it may spend are the limits of that subject, its tier and its owners.
    """
    credential = credentials.Credential.new(credentials.KEY, body.id)

    def work(do: Do) -> Found:
        do(
            CreateKey(
                credential.id,
                body.name,
                credential.hash,
                body.parent,
                body.rate_tier,
                body.expires_at,
                principal().tenant,
            )
        )
        return found(do, credential.id)

    return write(work, status=201, location=_place, secret=credential.secret)


@route(keys, "get", "/keys/<segment:id>", READ, ok={200: Key})
def get_key(path: KeyPath) -> Response:
    """Show a key."""
    return answer(found(ledger().call, path.id), versioned=True)


@route(keys, "patch", "/keys/<segment:id>", OPERATE, ok={200: Key})
def change_key(path: KeyPath, body: KeyChange) -> Response:
    """Rename a key, move it to another tier or owner, or change its expiry; all of it or nothing.

    A change of tier is in force from the next reservation on: usage stays, the bucket is cut to the new capacity.
    """
    tenant, given = principal().tenant, body.model_fields_set

    def work(do: Do) -> Found:
        key = found(do, path.id)
        if "name" in given:
            do(RenameKey(path.id, body.name, tenant))
        if "rate_tier" in given:
            do(SetRateTier(key["subject"], body.rate_tier, tenant))
        if "parent" in given and body.parent != key["parent"]:
            do(MoveSubject(key["subject"], body.parent, tenant))
        if "expires_at" in given:
            do(SetKeyExpiry(path.id, body.expires_at, tenant))
        return found(do, path.id)

    return write(work, current=lambda do: found(do, path.id))


@route(keys, "post", "/keys/<segment:id>/rotate", OPERATE, ok={200: NewKey})
def rotate_key(path: KeyPath, body: Rotation) -> Response:
    """Give a key a new secret; the one before stays good for `overlap_s`, at most 30 days."""
    credential = credentials.Credential.new(credentials.KEY, path.id)

    def work(do: Do) -> Found:
        do(RotateKey(path.id, credential.hash, span_of(body.overlap_s), principal().tenant))
        return found(do, path.id)

    return write(work, current=lambda do: found(do, path.id), secret=credential.secret)


@route(keys, "post", "/keys/<segment:id>/revoke", OPERATE, ok={200: Key})
def revoke_key(path: KeyPath, body: Reason) -> Response:
    """End a key for ever, and freeze its subject: no new holds from now on. Repeating it changes nothing."""

    def work(do: Do) -> Found:
        do(RevokeKey(path.id, body.reason, principal().tenant))
        return found(do, path.id)

    return write(work, current=lambda do: found(do, path.id), reason=body.reason)


@route(keys, "post", "/keys/set-tier", OPERATE, ok={200: Moved})
def set_tier_of_keys(body: TierOfMany) -> Response:
    """Move up to 1,000 keys to a tier: all of them, or none."""

    def work(do: Do) -> Found:
        tenant = principal().tenant
        do(SetRateTiers([f"key:{identity}" for identity in body.ids], body.rate_tier, tenant))
        return {"ids": body.ids, "rate_tier": body.rate_tier}

    return write(work, versioned=False, timeout_s=30)


@route(keys, "post", "/keys/verify", VERIFY, ok={200: Verified})
def verify_key(body: Presented) -> Response:
    """Whose secret is this? The answer may be as old as the service's cache bound, 10 seconds unless configured.

    Decide about money and rates by reserving: that never reads the cache.
    """
    authenticator: Authenticator = current_app.extensions["quota.authenticator"]
    who = authenticator.authenticate(body.secret)
    if who is None or principal().scope not in (None, who.tenant):
        return answer({"valid": False, "state": "unknown"})
    shown: dict[str, Any] = {name: getattr(who, name) for name in Verified.model_fields if name != "valid"}
    return answer({"valid": who.active, **shown})
