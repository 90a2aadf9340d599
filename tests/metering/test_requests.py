"""Who is let in, what the application gets to see, and what a caller is told: everything around the cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quota import AsyncClient, credentials
from quota.calls import CreateKey, CreateSubject, EnsureSubject, Freeze, RetireSubject, RevokeKey, SetLimit
from quota.client import run
from quota.http.problems import Problem
from quota.integrations.asgi import MeteringMiddleware
from quota.metering import Identity, Policy, Request, Route, page_limit
from tests.metering.kit import Books, Gateway, Seen, new_subject
from tests.server import Connection

Serve = Callable[..., Gateway]


def problem(answer: Seen) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = json.loads(answer.body)
    assert found["status"] == answer.status
    return found


def untouched(books: Books) -> bool:
    return books.calls() == [] and (books.spent(), books.reserved()) == (0, 0)


# -- credentials ------------------------------------------------------------------------------------------------------


def test_missing_malformed_and_wrong_credentials(serve: Serve, books: Books) -> None:
    gateway = serve()
    secret = books.credential.secret
    other = credentials.Credential.new(credentials.KEY, books.credential.id).secret
    for headers in (
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", f"Basic {secret}")],
        [("Authorization", f"Bearer {secret[:-1]}")],
        [("Authorization", f"Bearer {other}")],
        [("X-API-Key", "nonsense")],
        [("X-API-Key", "")],
    ):
        answer = gateway.ask(query="cost=1", headers=headers)
        assert (answer.status, problem(answer)["title"]) == (401, "unauthenticated"), headers
        assert answer.headers["www-authenticate"] == 'Bearer realm="quota"'
        assert "ratelimit" not in answer.headers
    assert untouched(books)


def test_a_key_and_a_token_together_are_refused(serve: Serve, books: Books) -> None:
    gateway = serve()
    answer = gateway.ask(headers=[*books.key, ("X-API-Key", books.credential.secret)])
    assert (answer.status, problem(answer)["title"]) == (400, "ambiguous credentials")
    assert untouched(books)
    assert gateway.ask(query="cost=1", headers=[("X-API-Key", books.credential.secret)]).status == 200


def test_revoked_expired_and_retired_keys(serve: Serve, books: Books, beside: Connection) -> None:
    gateway = serve()
    run(beside, RevokeKey(books.credential.id, "test"))
    assert gateway.ask(headers=books.key).status == 401
    old = credentials.Credential.new(credentials.KEY)
    run(beside, CreateKey(old.id, "old", old.hash, expires_at=datetime.now(UTC) - timedelta(days=1)))
    answer = gateway.ask(headers=[("X-API-Key", old.secret)])
    assert (answer.status, problem(answer)["detail"]) == (401, "This key is expired.")
    # One that is remembered as good, whose subject has gone meanwhile.
    gone = Books(beside)
    assert gateway.ask(query="cost=1", headers=gone.key).status == 200
    run(beside, RetireSubject(gone.subject))
    assert gateway.ask(headers=gone.key).status == 401


def test_a_frozen_key_is_told_so(serve: Serve, beside: Connection) -> None:
    user = new_subject("user")
    run(beside, CreateSubject(user))
    books = Books(beside, parent=user)
    run(beside, Freeze(user, "runaway"))
    answer = serve().ask(headers=books.key)
    assert (answer.status, problem(answer)["reason"]) == (403, "frozen")
    assert user not in answer.body.decode()
    assert "retry-after" not in answer.headers


# -- identities -------------------------------------------------------------------------------------------------------


def oauth(connection: str, user: str | None = None) -> Callable[..., Identity]:
    def authenticate(headers: Any, *, while_away: bool) -> Identity:
        return Identity(subject=connection, parent=user, first_contact=True)

    return authenticate


def test_an_authenticator_of_ones_own_and_first_contact(serve: Serve, beside: Connection) -> None:
    """R10: kinds never collide, OAuth is basic, and a refreshed token (the same sid) keeps the budget."""
    key = Books(beside)
    user, connection = new_subject("user"), f"oauth:{key.credential.id}"
    run(beside, EnsureSubject(user))
    gateway = serve(Policy(authenticate=oauth(connection, user)))
    for _token in ("first", "refreshed"):
        assert gateway.ask(query="cost=40").status == 200
    spent = beside.execute("SELECT limit_name, spent, capacity FROM quota.balance(%s)", (connection,)).fetchall()
    assert ("hourly", 80, 2_000_000) in spent
    assert untouched(key)
    # A subject that nobody knows and nobody may make is nobody.
    strict = serve(Policy(authenticate=lambda headers, *, while_away: Identity(subject="oauth:unknown")))
    assert strict.ask().status == 401


def test_the_application_sees_who_asks_and_nothing_that_was_claimed(serve: Serve, books: Books) -> None:
    gateway = serve(Policy(drop_headers=("X-Forwarded-User",)))
    claims = [
        ("X-Quota-Subject", "key:somebody-else"),
        ("x-quota-subject", "key:twice"),
        ("X_Quota_Subject", "key:underscore"),
        ("X-Agent-Cost", "0"),
        ("X-Agent-Facts", "rows=0"),
        ("X-Forwarded-User", "root"),
        ("X-Other", "kept"),
    ]
    seen = gateway.ask("/echo", headers=[*books.key, *claims]).body.decode()
    assert [line for line in seen.splitlines() if "subject" in line] == [f"x-quota-subject: {books.subject}"]
    assert "x-other: kept" in seen
    for word in ("agent", "root"):
        assert word not in seen


def test_a_cost_that_the_caller_claims_is_not_believed(serve: Serve, books: Books) -> None:
    gateway = serve()
    gateway.ask(query="cost=40", headers=[*books.key, ("x-agent-cost", "0")])
    gateway.ask(query="", headers=[*books.key, ("x-agent-cost", "0")])
    assert [one["booked"]["cost"] for one in books.calls()] == [40, 1]


def test_what_it_cost_is_shown_only_when_asked_for(serve: Serve, books: Books) -> None:
    assert "x-agent-cost" not in serve().ask(query="cost=40", headers=books.key).headers
    assert serve(Policy(show_cost=True)).ask(query="cost=40", headers=books.key).headers["x-agent-cost"] == "40"


# -- routes -----------------------------------------------------------------------------------------------------------


def no_more_than_two(request: Request) -> None:
    if len(request.parameters.get("ids", ["x,x,x"])[0].split(",")) > 2:
        raise Problem(422, "too_many_targets", "At most 2 ids at a time.")


def test_routes_estimates_bounds_and_what_is_free(serve: Serve, books: Books) -> None:
    gateway = serve(
        Policy(
            routes=(
                Route("/rows", estimate=page_limit(50), methods=("GET",)),
                Route("/rows/<id>", bounds=(no_more_than_two,)),
                Route("/health", metered=False),
            ),
            default=None,
        )
    )
    assert gateway.ask("/health").status == 200
    gateway.ask("/rows", "limit=400&cost=1", headers=books.key)
    assert books.last()["details"]["estimate"] == 50
    answer = gateway.ask("/rows/7", "ids=a,b,c", headers=books.key)
    assert (answer.status, problem(answer)["title"]) == (422, "too many targets")
    assert gateway.ask("/rows/7", "ids=a,b&cost=1", headers=books.key).status == 200
    for path, method in (("/other", "GET"), ("/rows", "POST"), ("/rows/7/8", "GET")):
        answer = gateway.ask(path, method=method, headers=books.key)
        assert (answer.status, problem(answer)["title"]) == (404, "no route"), path
    assert [one["details"]["route"] for one in books.calls()] == ["GET /rows", "/rows/<id>"]


def test_head_is_metered_as_get_and_options_asks_beforehand(serve: Serve, books: Books) -> None:
    gateway = serve(Policy(routes=(Route("/rows", methods=("GET",), name="rows"),)))
    answer = gateway.ask(query="cost=40&limit=7", headers=books.key, method="HEAD")
    assert (answer.status, books.last()["details"]["estimate"], books.spent()) == (200, 7, 40)
    assert (books.last()["details"]["route"], books.last()["details"]["response_bytes"]) == ("rows", 0)
    assert gateway.ask(query="cost=40", method="OPTIONS").status == 200
    assert len(books.calls()) == 1
    closed = serve(Policy(routes=(Route("/rows", methods=("GET",)),), default=None))
    assert (closed.ask(method="OPTIONS").status, closed.ask("/other").status) == (200, 404)
    # Unless the application says that OPTIONS is work.
    strict = serve(Policy(default=Route("/", methods=("OPTIONS",))))
    assert strict.ask(query="cost=40", method="OPTIONS").status == 401


def test_scripts_are_shown_the_headers(serve: Serve, books: Books) -> None:
    gateway = serve()
    ours = "RateLimit-Policy, RateLimit, Retry-After, Quota-Bucket-Full-After, Quota-Fail-Open"
    for headers in (books.key, []):
        assert gateway.ask(query="cost=1", headers=headers).headers["access-control-expose-headers"] == ours


# -- a caller's own limits --------------------------------------------------------------------------------------------


def test_a_key_sees_its_own_limits_without_spending(serve: Serve, beside: Connection) -> None:
    user = new_subject("user")
    run(beside, CreateSubject(user))
    run(beside, SetLimit(user, "daily", "cost", "budget", 5_000_000, period="day"))
    run(beside, SetLimit(user, "money", "usd", "budget", 50))
    books = Books(beside, parent=user)
    gateway = serve()
    gateway.ask(query="cost=40", headers=books.key)
    before = len(books.calls())
    answer = gateway.ask("/v1/limits", headers=books.key)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["cache-control"] == "no-store"
    shown = json.loads(answer.body)
    assert shown["subject"] == books.subject
    assert [(one["owner"], one["name"], one["capacity"]) for one in shown["limits"]] == [
        (books.subject, "bucket", "1000000"),
        (books.subject, "hourly", "2000000"),
        ("user", "daily", "5000000"),
    ]
    hourly = shown["limits"][1]
    assert (hourly["spent"], hourly["available"], hourly["reserved"]) == ("40", "1999960", "0")
    assert 0 < float(hourly["resets_in_s"]) <= 3600
    assert hourly["window_start"] < hourly["window_end"]
    assert '"user-daily"' in answer.headers["ratelimit"]
    assert user not in answer.body.decode() + str(answer.headers)
    assert gateway.ask("/v1/limits", headers=books.key, method="HEAD").body == b""
    assert len(books.calls()) == before


def test_the_limits_answer_to_those_who_are_let_in_only(serve: Serve, books: Books) -> None:
    gateway = serve()
    assert gateway.ask("/v1/limits").status == 401
    answer = gateway.ask("/v1/limits", headers=books.key, method="POST")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert gateway.ask("/v1/limits", method="OPTIONS").status == 204
    elsewhere = serve(Policy(limits_path="/mine"))
    assert elsewhere.ask("/mine", headers=books.key).headers["content-type"] == "application/json"
    assert elsewhere.ask("/v1/limits", "cost=1", headers=books.key).body == b"row\nrow\nrow\n"


# -- the styles of the headers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["draft-11", "legacy", "none"])
def test_styles(style: Any, serve: Serve, books: Books) -> None:
    headers = serve(Policy(headers=style)).ask(query="cost=300", headers=books.key).headers
    names = {name for name in headers if "ratelimit" in name}
    assert (
        names
        == {
            "draft-11": {"ratelimit", "ratelimit-policy"},
            "legacy": {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-ratelimit-policy"},
            "none": set(),
        }[style]
    )
    assert headers["quota-bucket-full-after"] in ("0", "1")


def test_an_application_that_speaks_of_limits_itself_is_not_heard(serve: Serve, books: Books) -> None:
    """Two answers to one question are none."""
    gateway = serve()
    made = gateway.meter.call

    def call(request: Any) -> Any:
        one = made(request)
        original = one.responding

        def responding(status: int, headers: Any) -> Any:
            extra = [("RateLimit", '"mine";r=9'), ("Retry-After", "7"), ("Access-Control-Expose-Headers", "X-Mine")]
            return (yield from original(status, [*headers, *extra]))

        one.responding = responding
        return one

    gateway.meter.call = call
    headers = gateway.ask(query="cost=1", headers=books.key).headers
    assert "mine" not in headers["ratelimit"]
    assert headers["retry-after"] == "7"
    assert headers["access-control-expose-headers"].startswith("X-Mine, RateLimit-Policy, ")


# -- what is no request ------------------------------------------------------------------------------------------------


async def no_application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": scope["type"]})


def test_a_handshake_that_the_server_leaves_to_the_application(serve: Serve, books: Books) -> None:
    """Some servers do: the application could take the connection over, and nobody would count any more."""
    gateway = serve(Policy(routes=(Route("/free", metered=False),)))
    for path in ("/rows", "/free"):
        upgrade = [("Connection", "Upgrade"), ("Upgrade", "h2c, WebSocket")]
        answer = gateway.ask(path, query="cost=1", headers=[*books.key, *upgrade])
        assert (answer.status, problem(answer)["title"]) == (501, "no websockets")
    assert untouched(books)


@pytest.mark.parametrize(
    ("extensions", "types"),
    [
        (None, ["websocket.close"]),
        ({"websocket.http.response": {}}, ["websocket.http.response.start", "websocket.http.response.body"]),
    ],
)
def test_websockets_are_refused_and_the_rest_passes(extensions: Any, types: list[str]) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def asked() -> None:
        async with AsyncClient("postgresql://nowhere") as client:
            app = MeteringMiddleware(no_application, client)
            await app({"type": "websocket", "path": "/", "headers": [], "extensions": extensions}, receive, send)
            await app({"type": "lifespan"}, receive, send)

    asyncio.run(asked())
    assert [message["type"] for message in sent] == [*types, "lifespan"]
    assert sent[0].get("status") == 501 or (sent[0]["code"], sent[0]["reason"]) == (1008, "no_websockets")
