"""Tokens: who may call this API, as what, and for which tenant."""

from __future__ import annotations

from typing import Annotated

from flask import Response
from pydantic import Field

from quota import credentials
from quota.admin.access import OWN
from quota.admin.changes import Found, answer, ledger, principal, write
from quota.admin.pages import page, position
from quota.admin.routes import blueprint, place, route
from quota.admin.types import Answer, Body, KeyId, Name, PageQuery, Path, Reason, Time, example, page_of
from quota.calls import CreateToken, RevokeToken, pages
from quota.client import Do
from quota.errors import UnknownToken

__all__ = ["tokens"]

tokens = blueprint("tokens", "Who may call this API: worker, viewer, operator or owner, for one tenant or for all.")


class Token(Answer):
    """A token. Its secret is shown once."""

    tenant: str | None = Field(description="null: every tenant.")
    id: str
    name: str
    role: str
    state: str
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewToken(Token):
    """A token with its secret, which is shown in this answer only."""

    secret: str | None = Field(None, description="Left out when the request is repeated: make another token then.")


class TokenPath(Path):
    """Which token."""

    id: KeyId = Field(json_schema_extra={"example": "ops"})


class TokenDraft(Body):
    """A token to be made."""

    model_config = example({"name": "Worker fleet", "role": "worker"})

    name: Name
    role: Annotated[str, Field(pattern="^(worker|viewer|operator|owner)$")]
    id: KeyId | None = Field(None, description="Left out: a new one.")
    expires_at: Time | None = None
    every_tenant: bool = Field(False, description="For every tenant; takes a token that is so itself.")


def found(do: Do, identity: str) -> Found:
    """Reads one token that the caller may see. Errors: `UnknownToken`."""
    rows = do(pages.token(principal().tenant, identity, shared=principal().scope is None))
    if not rows:
        raise UnknownToken(f'unknown_token: there is no token "{identity}"', "Pass the full public id.")
    return rows[0]


@route(tokens, "get", "/tokens", OWN, ok={200: page_of(Token)})
def list_tokens(query: PageQuery) -> Response:
    """List tokens, by id."""
    (after,) = position(query.after, str) or (pages.FIRST_ID,)
    shared = principal().scope is None
    rows = ledger().call(pages.tokens(principal().tenant, shared=shared, after=after, most=query.limit + 1))
    return page(rows, query.limit, lambda row: [row["id"]])


@route(tokens, "post", "/tokens", OWN, ok={201: NewToken})
def create_token(body: TokenDraft) -> Response:
    """Make a token. Its secret is in this answer and nowhere else."""
    if body.every_tenant:
        principal().require_every_tenant("A token for every tenant")
    owner = None if body.every_tenant else principal().tenant
    credential = credentials.Credential.new(credentials.TOKEN, body.id)

    def work(do: Do) -> Found:
        do(CreateToken(credential.id, body.name, body.role, credential.hash, body.expires_at, owner))
        return found(do, credential.id)

    return write(
        work, status=201, tenant=owner, secret=credential.secret, location=lambda row: place("tokens", row["id"])
    )


@route(tokens, "get", "/tokens/<segment:id>", OWN, ok={200: Token})
def get_token(path: TokenPath) -> Response:
    """Show a token."""
    return answer(found(ledger().call, path.id), versioned=True)


@route(tokens, "post", "/tokens/<segment:id>/revoke", OWN, ok={200: Token})
def revoke_token(path: TokenPath, body: Reason) -> Response:
    """End a token for ever; in force everywhere within the cache bound, 10 seconds unless configured."""
    owner = found(ledger().call, path.id)["tenant"]

    def work(do: Do) -> Found:
        do(RevokeToken(path.id, body.reason, owner))
        return found(do, path.id)

    return write(work, tenant=owner, current=lambda do: found(do, path.id), reason=body.reason)
