"""The OpenAPI document of the API, and a page for people that shows it: plain HTML, no script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, current_app, render_template, send_file
from flask_openapi3 import Info, OpenAPI
from markupsafe import Markup, escape

from quota.admin.access import PUBLIC
from quota.http.values import written

__all__ = ["DESCRIPTION", "INFO", "SECURITY", "document", "text", "views"]

DESCRIPTION = """\
Keys, tiers and caps of the quota ledger, and reservations for workers without a database login.

**Tokens.** `Authorization: Bearer qt_...`. A token is a worker, viewer, operator or owner, for one tenant or for all;
with one for all, the header `Quota-Tenant` says which tenant is meant (left out: `default`).

**Amounts** are exact decimals in strings; a JSON number is taken too, and judged by its digits.

**Writes** take `Idempotency-Key`: the same request with the same key is done once and answered again for a
day, with `Idempotency-Replayed: true`; secrets are not repeated. They take `If-Match` with the `ETag` of an answer: 412
when somebody has changed it since. Each is logged in its own transaction.

**Problems** are `application/problem+json` (RFC 9457): 400 what cannot be read, 401 no good token, 402 money or
a lifetime budget is spent, 403 not this role, or frozen, 404 not there, or not for this token, 409 a state or an id in
the way, 412 another version, 422 what can be read but not be meant, 429 wait (`Retry-After`), 503 the ledger is away.
"""
INFO = Info(title="quota-ledger", version="1", description=DESCRIPTION)
SECURITY = {"token": {"type": "http", "scheme": "bearer", "description": "A token, qt_..."}}

_TENANT = {
    "name": "Quota-Tenant",
    "in": "header",
    "required": False,
    "description": "Which tenant, for a token that may act for all of them; left out: default.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200},
}
_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Done once, however often it is sent.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[A-Za-z0-9_.:-]+$"},
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "The ETag of the version that is meant.",
    "schema": {"type": "string", "pattern": '^"[a-z0-9]{1,64}"$'},
}

_CODE, _STRONG = re.compile("`([^`]+)`"), re.compile(r"\*\*([^*]+)\*\*")
# Of a pattern such as ^(csv|jsonl)$ the words.
_WORDS = re.compile(r"\^\(([a-z|]+)\)\$")

views = Blueprint("document", __name__, template_folder="templates")


def document(app: OpenAPI) -> dict[str, Any]:
    """Returns the document: what the library makes of the code, and the headers that every route takes."""
    made: dict[str, Any] = json.loads(json.dumps(app.api_doc))
    for methods in made["paths"].values():
        for method, operation in methods.items():
            parameters = operation.setdefault("parameters", [])
            if operation["x-roles"] == ["everybody"]:
                continue
            parameters.append(_TENANT)
            if method != "get":
                parameters.append(_IDEMPOTENCY)
                parameters.append(_IF_MATCH)
    return made


def text(app: OpenAPI) -> str:
    """Returns the document as it is checked in."""
    return json.dumps(document(app), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _openapi() -> Response:
    return Response(current_app.extensions["quota.document"], content_type="application/json")


def _docs() -> str:
    found = json.loads(current_app.extensions["quota.document"])
    by_noun: dict[str, list[dict[str, Any]]] = {tag["name"]: [] for tag in found["tags"]}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            by_noun[operation["tags"][0]].append({"path": path, "method": method.upper(), **operation})
    return render_template("docs.html", api=found, nouns=by_noun, shown=_shown, marked=_marked, written=written)


def _marked(text: str) -> Markup:
    """A description as HTML: of its Markdown there are `code` and **emphasis**, and nothing else."""
    found = _CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(_STRONG.sub(r"<strong>\1</strong>", found))  # noqa: S704 - escaped above


def _shown(schema: dict[str, Any] | None, nullable: bool = True) -> str:
    """A schema's type in one line. `nullable`: null is told; a parameter is left out instead."""
    if not schema:
        return "anything"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        kinds = dict.fromkeys(_shown(one) for one in schema["anyOf"])
        return " or ".join(kind for kind in kinds if nullable or kind != "null")
    words = _WORDS.fullmatch(schema.get("pattern", ""))
    if words is not None:
        return words[1].replace("|", ", ")
    if schema.get("type") == "array":
        return f"list of {_shown(schema.get('items'))}"
    kind = schema.get("format") or schema.get("type", "anything")
    return str(kind)


def _style() -> Response:
    return send_file(Path(__file__).parent / "static" / "docs.css", mimetype="text/css")


_openapi.access = PUBLIC  # type: ignore[attr-defined]
_docs.access = PUBLIC  # type: ignore[attr-defined]
views.add_url_rule("/openapi.json", "openapi", _openapi)
_style.access = PUBLIC  # type: ignore[attr-defined]
views.add_url_rule("/docs", "docs", _docs)
views.add_url_rule("/docs/docs.css", "style", _style)
