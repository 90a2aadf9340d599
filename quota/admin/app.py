"""The application: what may come in, who may pass, and how every answer and every error looks."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints
from urllib.parse import unquote_to_bytes

from flask import Flask, Request, Response, request
from flask.sessions import NullSession, SessionInterface
from flask_openapi3 import OpenAPI
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from quota.admin import (
    books,
    document,
    health,
    keys,
    limits,
    prices,
    reports,
    reservations,
    subjects,
    tenants,
    tiers,
    tokens,
)
from quota.admin.access import NOBODY, Access, Guard
from quota.admin.front import PRINCIPAL, REQUEST_ID, ROUTE, Front
from quota.admin.paths import MALFORMED, SegmentConverter
from quota.admin.rate_limits import STYLE
from quota.admin.routes import ProblemDocument
from quota.authentication import CACHE_S, Authenticator
from quota.client import Client
from quota.config import ConfigError, Settings
from quota.errors import QuotaError
from quota.http import bodies, headers
from quota.http.problems import CONTENT_TYPE, Problem, of_error
from quota.migrate import head

__all__ = ["create_app"]

logger = logging.getLogger("quota.admin")

_TITLES = {
    400: ("malformed", "This request cannot be read."),
    404: ("not_found", "There is nothing at this path."),
    405: ("method_not_allowed", "This path does not take this method."),
    413: ("malformed", f"The body has more than {bodies.BODY_BYTES_MAX} bytes."),
    414: ("malformed", "The path is too long."),
    415: ("unsupported_media_type", "Send application/json."),
}


class _Request(Request):
    """A request whose JSON is read by our own parser, and by nothing else."""

    def get_json(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - the library asks for silence
        """The body's value. Errors: `Problem` 400 for what cannot be read, 415 for another type."""
        if self.mimetype != "application/json":
            raise Problem(415, "unsupported_media_type", "Send application/json.")
        try:
            value = bodies.parse(self.get_data())
        except bodies.Malformed as error:
            raise Problem(400, "malformed", f"The body is no JSON that can be taken: {error}.") from None
        if not isinstance(value, dict):
            # The library would parse a string once more.
            raise Problem(422, "invalid_argument", "The body: must be an object.")
        return value


class _NoSessions(SessionInterface):
    """Who calls is told by a token, with every request: there are no cookies."""

    _none = NullSession()

    def open_session(self, app: Flask, request: Request) -> NullSession:  # noqa: ARG002 - Flask's signature
        """The session of every request."""
        return self._none


class _Application(OpenAPI):
    """Flask without what it looks for around every request and what is never there."""

    session_interface = _NoSessions()

    def preprocess_request(self) -> None:
        """What is done before a request: no blueprint has more."""
        _admit(self)

    def process_response(self, response: Response) -> Response:
        """What is done after it: nothing; headers that all have are the `Front`'s."""
        return response

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing here is a coroutine."""
        return func


def create_app(
    settings: Settings | None = None,
    *,
    client: Client | None = None,
    cache_s: float = CACHE_S,
    rate_limit_headers: headers.Style = "draft-11",
    access_log: Callable[[str], None] | None = None,
) -> Flask:
    """Makes the application. It opens no connection before its first request, so that it may be made before a fork.

    Arguments:
        settings: what the environment decides; None: read it.
        client: the ledger; None: one for `settings`. It never fails open: operators ask the ledger.
        cache_s: how long a good token or key is believed, in seconds.
        rate_limit_headers: which of them the answer to a reservation has: `draft-11`, `legacy` or `none`.
        access_log: takes a line for every request, an object of JSON; None: the logger `quota.admin`.

    Errors: `ConfigError` for wrong settings.
    """
    if rate_limit_headers not in headers.STYLES:
        raise ConfigError(f'rate_limit_headers: "{rate_limit_headers}" is not {", ".join(headers.STYLES)}')
    if client is None:
        options = Client.settings_of(Settings.from_env() if settings is None else settings)
        client = Client(**{**options, "fail_open": False}, application_name="quota api")
    app = _Application(
        "quota.admin",
        info=document.INFO,
        security_schemes=document.SECURITY,  # type: ignore[arg-type]  # plain JSON is what it becomes
        doc_ui=False,
        validation_error_status="default",
        validation_error_model=ProblemDocument,
        validation_error_callback=_invalid,
        static_folder=None,
    )
    app.request_class = _Request
    app.json.ensure_ascii = False  # type: ignore[attr-defined]
    app.config.update(MAX_CONTENT_LENGTH=bodies.BODY_BYTES_MAX, QUOTA_REVISION=head(), **{STYLE: rate_limit_headers})
    app.url_map.converters["segment"] = SegmentConverter
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = True
    app.extensions["quota"] = client
    app.extensions["quota.guard"] = Guard(client, cache_s)
    app.extensions["quota.authenticator"] = Authenticator(client, cache_s)
    for noun in (
        keys.keys, tiers.tiers, subjects.subjects, limits.limits, reservations.reservations, books.books,
        subjects.connections, prices.prices, reports.reports, tenants.tenants, tenants.units, tokens.tokens,
        health.health,
    ):  # fmt: skip
        app.register_api(noun)
    app.register_blueprint(document.views)
    app.extensions["quota.document"] = document.text(app)
    app.register_error_handler(Problem, _problem)
    app.register_error_handler(QuotaError, _known)
    app.register_error_handler(HTTPException, _http)
    app.register_error_handler(Exception, _unknown)
    app.wsgi_app = Front(app.wsgi_app, access_log or logger.info)  # type: ignore[method-assign]
    return app


# -- what comes in --------------------------------------------------------------------------------------------------


def _admit(app: Flask) -> None:
    """Refuses what cannot be meant and whoever may not pass, before anything is read from the database."""
    environ = request.environ
    if MALFORMED in environ:
        raise Problem(400, "malformed", f"The path cannot be read: {environ[MALFORMED]}.")
    rule = request.url_rule
    if rule is None:
        return  # Flask answers it
    environ[ROUTE] = rule.rule
    view = app.view_functions[rule.endpoint]
    access: Access = getattr(view, "access", NOBODY)
    if not access.public:
        guard: Guard = app.extensions["quota.guard"]
        tenant = _tenant(environ.get("HTTP_QUOTA_TENANT"))
        who = guard.principal(environ.get("HTTP_AUTHORIZATION"), tenant, environ.get("REMOTE_ADDR") or "")
        environ[PRINCIPAL] = who
        if who.role not in access.roles:
            needed = " or ".join(sorted(access.roles)) or "nobody"
            raise Problem(403, "wrong_role", f"This is for {needed}; the role of this token is {who.role}.")
    takes = _takes(view)
    if environ.get("QUERY_STRING"):
        _must_be_readable_query("query" in takes)
    if "body" not in takes and environ["REQUEST_METHOD"] not in ("GET", "HEAD") and request.get_data():
        raise Problem(422, "invalid_argument", "The body: nothing is taken here; leave it out.")


@functools.lru_cache(maxsize=1000)
def _takes(view: Callable[..., Any]) -> frozenset[str]:
    """Which of `path`, `query` and `body` a route takes."""
    return frozenset(get_type_hints(inspect.unwrap(view)))


def _tenant(header: str | None) -> str | None:
    if header is None:
        return None
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise Problem(400, "malformed", "Quota-Tenant: it is not UTF-8.") from None


def _must_be_readable_query(takes_any: bool) -> None:
    try:
        text = unquote_to_bytes(request.query_string.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(400, "malformed", "The query: it is not UTF-8.") from None
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text):
        raise Problem(400, "malformed", "The query: it has control characters.")
    if not takes_any:
        raise Problem(422, "invalid_argument", "The query: nothing is taken here; leave it out.")
    for name, values in request.args.lists():
        if len(values) > 1:
            raise Problem(422, "invalid_argument", f"The query: {name} stands twice.")


def _invalid(error: ValidationError) -> NoReturn:
    """What Pydantic has found: field and rule, never the value."""
    found = [
        {
            "field": ".".join(str(part) for part in one["loc"])[:200] or "body",
            "rule": one["msg"].removeprefix("Value error, "),
        }
        for one in error.errors(include_url=False, include_context=False, include_input=False)[:20]
    ]
    first = found[0]
    raise Problem(422, "invalid_argument", f"{first['field']}: {first['rule']}.", members={"errors": found})


# -- what goes out --------------------------------------------------------------------------------------------------


def _problem(problem: Problem) -> Response:
    identity = request.environ.get(REQUEST_ID)
    text = json.dumps(
        problem.document(f"urn:quota-ledger:request:{identity}" if identity else None), ensure_ascii=False
    )
    response = Response(text, problem.status, content_type=CONTENT_TYPE)
    for name, value in problem.headers.items():
        response.headers[name] = value
    return response


def _known(error: QuotaError) -> Response:
    problem = of_error(error)
    if problem.status >= 500:
        logger.warning("request %s: %s: %s", request.environ.get(REQUEST_ID), type(error).__name__, error)
    return _problem(problem)


def _http(error: HTTPException) -> Response:
    status = error.code or 500
    name, detail = _TITLES.get(status, ("refused", "This request is refused."))
    if isinstance(error, RequestEntityTooLarge):
        status = 400
    problem = Problem(status, name, detail)
    if error.response is not None:  # a redirect
        return error.response  # type: ignore[return-value]
    for header, value in error.get_headers():
        if header.lower() == "allow":
            problem.headers[header] = value
    return _problem(problem)


def _unknown(error: Exception) -> Response:
    # The traceback goes to the log, with the request's id; its text may quote the input, so nobody else sees it.
    logger.error("request %s failed", request.environ.get(REQUEST_ID), exc_info=error)
    return _problem(Problem(500, "internal", "The service failed; its operator finds why in its log."))
