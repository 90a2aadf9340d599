"""Refusals: nothing is charged, the numbers are those of the decision, and waiting as long as was said is enough."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from quota import AsyncClient
from quota.calls import CreateSubject, SetLimit, SetRateTier
from quota.client import run
from quota.costs.rows import row_cost
from quota.integrations.asgi import MeteringMiddleware
from quota.metering import Policy, Route, fixed, page_limit
from tests.metering.kit import AsgiGateway, Books, Gateway, Seen, WsgiGateway, asgi_app, new_subject
from tests.server import Connection
from tests.sql.kit import NOON, advance, set_clock

Serve = Callable[..., Gateway]


def costing(cost: int, **route: Any) -> Policy:
    return Policy(routes=(Route("/rows", estimate=fixed(cost), **route),))


def ask(serve: Serve, url: str, books: Books, held: int, cost: int | None = None) -> Seen:
    """One call that holds `held` and comes to `cost` (None: the same)."""
    return serve(costing(held), url=url).ask(query=f"cost={held if cost is None else cost}", headers=books.key)


def ask_elsewhere(url: str, books: Books, cost: int) -> Seen:
    """The same from another process's point of view, while a call is under way."""
    other = WsgiGateway(url, costing(cost))
    try:
        return other.ask(query=f"cost={cost}", headers=books.key)
    finally:
        other.close()


@pytest.fixture
def standing(conn: Connection) -> Connection:
    """A connection to a ledger of the test's own, whose clock stands."""
    set_clock(conn, NOON)
    return conn


# -- the design's examples, from the real ledger ----------------------------------------------------------------------


def test_an_answer_that_was_let_through(serve: Serve, database: str, standing: Connection) -> None:
    books = Books(standing)
    ask(serve, database, books, 1, 0)  # opens the window
    advance(standing, "11 seconds")
    headers = ask(serve, database, books, 300).headers
    assert (
        headers["ratelimit-policy"] == '"bucket";q=1000000;qu="credits";w=334, "hourly";q=2000000;qu="credits";w=3600'
    )
    assert headers["ratelimit"] == '"bucket";r=999700;t=1, "hourly";r=1999700;t=3589'
    assert headers["quota-bucket-full-after"] == "1"
    assert "retry-after" not in headers


def test_a_bucket_that_is_short(serve: Serve, database: str, standing: Connection) -> None:
    books = Books(standing)
    ask(serve, database, books, 880_000)
    before = (books.spent(), books.level())
    answer = ask(serve, database, books, 300_000)
    assert (answer.status, answer.headers["retry-after"]) == (429, "60")
    assert answer.headers["ratelimit"] == '"bucket";r=120000;t=60'
    assert '"hourly";q=2000000;qu="credits";w=3600' in answer.headers["ratelimit-policy"]
    assert answer.headers["cache-control"] == "no-store"
    # The bucket is full later than this request fits: two figures.
    assert answer.headers["quota-bucket-full-after"] == "294"
    body = json.loads(answer.body)
    assert (body["reason"], body["limit"], body["requested"], body["retry_after"]) == ("rate", "bucket", "300000", 60)
    assert body["violated-policies"] == ["bucket"]
    assert (books.spent(), books.level()) == before == (880_000, 120_000)
    assert len(books.calls()) == 1
    advance(standing, "59 seconds")
    assert ask(serve, database, books, 300_000).status == 429
    advance(standing, "1 second")
    assert ask(serve, database, books, 300_000).status == 200


def test_an_hour_that_is_spent_with_a_full_bucket(serve: Serve, database: str, standing: Connection) -> None:
    """Either limit refuses alone, and a refusal charges neither."""
    books = Books(standing)
    ask(serve, database, books, 1_000_000)
    advance(standing, "10 minutes")
    ask(serve, database, books, 1_000_000)
    short = ask(serve, database, books, 300_000)
    assert (short.headers["ratelimit"], short.headers["retry-after"]) == (
        '"bucket";r=0;t=100, "hourly";r=0;t=3000',
        "3000",
    )
    advance(standing, "10 minutes")
    full = ask(serve, database, books, 1)
    assert (full.status, full.headers["retry-after"], full.headers["ratelimit"]) == (429, "2400", '"hourly";r=0;t=2400')
    assert full.headers["quota-bucket-full-after"] == "0"
    assert (books.spent(), books.level(), books.reserved()) == (2_000_000, 1_000_000, 0)
    advance(standing, "40 minutes")
    assert ask(serve, database, books, 1).status == 200


def test_two_of_200_and_300_left(serve: Serve, database: str, standing: Connection) -> None:
    """R6b: the first holds 200, the second is judged by the 100 that are left, before the first has cost anything."""
    books = Books(standing)
    run(standing, SetLimit(books.subject, "hourly", "cost", "budget", 300, period="1 hour"))
    gateway = serve(costing(200), url=database)
    answers: list[Seen] = []
    made = gateway.meter.call

    def call(request: Any) -> Any:
        one = made(request)
        original = one.responding

        def responding(status: int, headers: Any) -> Any:
            # While the first one is at work: the second arrives.
            if not answers:
                answers.append(ask_elsewhere(database, books, 200))
            return (yield from original(status, headers))

        one.responding = responding
        return one

    gateway.meter.call = call
    first = gateway.ask(query="cost=40", headers=books.key)
    (second,) = answers
    assert (first.status, second.status, json.loads(second.body)["reason"]) == (200, 429, "held")
    # What only others hold has no time of its own; Retry-After is a hint to ask again.
    assert (second.headers["ratelimit"], second.headers["retry-after"]) == ('"hourly";r=100', "1")
    assert (books.spent(), books.reserved()) == (40, 0)


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_waiting_as_long_as_was_said_alone_succeeds(
    seed: int, protocol: Any, serve: Serve, database: str, standing: Connection
) -> None:
    """Drawn costs until something refuses; then exactly Retry-After seconds, alone: it fits."""
    draw = random.Random(seed)
    books = Books(standing)
    run(standing, SetLimit(books.subject, "bucket", "cost", "bucket", 1000, refill_per_s=Decimal("7.3")))
    run(standing, SetLimit(books.subject, "hourly", "cost", "budget", 3000, period="1 hour"))
    run(standing, SetLimit(books.subject, "calls", "requests", "bucket", 3, refill_per_s=Decimal("0.013")))
    refusals = 0
    while refusals < 6:
        cost = draw.randint(1, 900)
        gateway = serve(costing(cost), url=database)
        answer = gateway.ask(query=f"cost={cost}", headers=books.key)
        if answer.status == 200:
            advance(standing, f"{draw.random() * 20} seconds")
            continue
        refusals += 1
        told = [int(part.split(";t=")[1]) for part in answer.headers["ratelimit"].split(", ")]
        wait_s = int(answer.headers["retry-after"])
        assert wait_s == max(1, *told)
        advance(standing, f"{wait_s} seconds")
        assert gateway.ask(query=f"cost={cost}", headers=books.key).status == 200


# -- other refusals ---------------------------------------------------------------------------------------------------


def test_no_estimate_is_above_the_bucket(serve: Serve, beside: Connection) -> None:
    """R2: at most the bucket's capacity is held; what the answer costs is settled."""
    books = Books(beside)
    run(beside, SetLimit(books.subject, "bucket", "cost", "bucket", 100, refill_per_s=1))
    answer = serve(costing(300)).ask(query="cost=150", headers=books.key)
    assert (answer.status, books.last()["details"]["estimate"], books.spent()) == (200, 100, 150)
    assert books.level() <= 1  # no debt, and a moment to refill


def test_what_can_never_fit(serve: Serve, beside: Connection) -> None:
    books = Books(beside)
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 100, period="1 hour"))
    answer = serve(costing(300)).ask(headers=books.key)
    assert (answer.status, json.loads(answer.body)["reason"]) == (422, "too_large")
    assert not {"retry-after", "ratelimit"} & set(answer.headers)


def test_a_lifetime_that_is_used_up_is_a_matter_of_payment(serve: Serve, beside: Connection) -> None:
    books = Books(beside)
    run(beside, SetLimit(books.subject, "trial", "cost", "budget", 500))
    gateway = serve(costing(300))
    assert gateway.ask(query="cost=300", headers=books.key).status == 200
    answer = gateway.ask(query="cost=300", headers=books.key)
    assert (answer.status, json.loads(answer.body)["limit"]) == (402, "trial")
    assert not {"retry-after", "ratelimit"} & set(answer.headers)
    assert answer.headers["cache-control"] == "no-store"


def test_requests_concurrency_and_the_users_total_beside_cost(serve: Serve, beside: Connection) -> None:
    """R11: a user's two keys share the total above them; each also counts its requests."""
    user = new_subject("user")
    run(beside, CreateSubject(user))
    run(beside, SetLimit(user, "hourly", "cost", "budget", 700, period="1 hour"))
    one, two = Books(beside, parent=user), Books(beside, parent=user)
    run(beside, SetLimit(one.subject, "calls", "requests", "budget", 1, period="1 hour"))
    gateway = serve(costing(300))
    assert gateway.ask(query="cost=300", headers=one.key).status == 200
    refused = gateway.ask(query="cost=300", headers=one.key)
    assert refused.headers["ratelimit"].startswith('"calls";r=0;t=')
    assert gateway.ask(query="cost=300", headers=two.key).status == 200
    refused = gateway.ask(query="cost=300", headers=two.key)
    assert refused.headers["ratelimit"].startswith('"user-hourly";r=100;t=')
    assert user not in refused.body.decode() + str(refused.headers)
    assert one.spent(owner=user) == two.spent(owner=user) == 600


def test_a_unit_that_nothing_counts_is_the_operators_to_mend(
    serve: Serve, beside: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books(beside)
    answer = serve(costing(1, unit="tokens")).ask(headers=books.key)
    assert (answer.status, json.loads(answer.body)["title"]) == (503, "misconfigured")
    assert "no_limit" not in answer.body.decode()
    assert "no_limit" in caplog.text


# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesce", [False, True], ids=["single", "coalesced"])
def test_64_at_once_against_one_key(coalesce: bool, shared_ledger: str, beside: Connection) -> None:
    """Exactly as many pass as fit: 40 times 100 rows into 4,000, whoever comes first."""
    books = Books(beside)
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 4000, period="1 hour"))
    run(beside, SetLimit(books.subject, "bucket", "cost", "bucket", 1_000_000, refill_per_s=0))
    statuses: list[int] = []
    policy = Policy(routes=(Route("/rows", estimate=page_limit(100)),))

    async def fleet() -> None:
        async with AsyncClient(shared_ledger, timeout_s=60, coalesce=coalesce) as client:
            app = MeteringMiddleware(asgi_app, client, policy)
            start = asyncio.Event()

            async def caller() -> None:
                await start.wait()
                for _ in range(2):
                    statuses.append(await in_the_asgi_way(app, books, b"cost=100"))

            callers = [asyncio.ensure_future(caller()) for _ in range(64)]
            start.set()
            await asyncio.gather(*callers)

    asyncio.run(fleet())
    assert (statuses.count(200), len(statuses)) == (40, 128)
    assert set(statuses) == {200, 429}
    assert (books.spent(), books.reserved(), books.level()) == (4000, 0, 996_000)


async def in_the_asgi_way(app: Any, books: Books, query: bytes = b"cost=1") -> int:
    """One request; its status."""
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    key = [(name.lower().encode(), value.encode()) for name, value in books.key]
    await app({"type": "http", "method": "GET", "path": "/rows", "query_string": query, "headers": key}, receive, send)
    return statuses[0]


def test_no_connection_is_held_while_the_application_works(shared_ledger: str, beside: Connection) -> None:
    """One connection for ten calls, each of which answers only when all ten have arrived."""
    books = Books(beside)

    async def fleet() -> list[int]:
        arrived, all_here = 0, asyncio.Event()

        async def meeting(scope: Any, receive: Any, send: Any) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 10:
                all_here.set()
            await all_here.wait()
            await asgi_app(scope, receive, send)

        async with AsyncClient(shared_ledger, timeout_s=60, pool_max=1) as client:
            app = MeteringMiddleware(meeting, client, Policy())
            return await asyncio.gather(*(in_the_asgi_way(app, books) for _ in range(10)))

    assert asyncio.run(fleet()) == [200] * 10
    assert (books.spent(), books.reserved()) == (10, 0)


# -- time and tiers ---------------------------------------------------------------------------------------------------


class InFlight:
    """A call that is at work while something happens: `during` runs when the application has answered."""

    def __init__(self, gateway: Gateway, during: Callable[[], None]) -> None:
        made = gateway.meter.call

        def call(request: Any) -> Any:
            one = made(request)
            original = one.responding

            def responding(status: int, headers: Any) -> Any:
                during()
                return (yield from original(status, headers))

            one.responding = responding
            return one

        gateway.meter.call = call
        self.ask = gateway.ask


def test_the_window_turns_between_hold_and_settlement(serve: Serve, database: str, standing: Connection) -> None:
    """R8: what was held in the last hour is settled there; the new hour knows nothing of it, refund or not."""
    books = Books(standing)
    ask(serve, database, books, 1, 1)

    def next_hour() -> None:
        advance(standing, "61 minutes")
        ask_elsewhere(database, books, 500)

    for held, cost in ((300, 40), (100, 160)):
        InFlight(serve(costing(held), url=database), next_hour).ask(query=f"cost={cost}", headers=books.key)
        assert (books.spent(), books.reserved()) == (500, 0)
        assert books.last()["state"] == "settled"


def test_the_tier_changes_in_flight(serve: Serve, database: str, standing: Connection) -> None:
    """R6: usage stays, the level is cut to the new capacity, the next request is judged by the new numbers."""
    books = Books(standing)
    run(standing, SetRateTier(books.subject, "bulk"))
    gateway = serve(costing(3_000_000), url=database)
    InFlight(gateway, lambda: run(standing, SetRateTier(books.subject, "basic"))).ask(
        query="cost=2500000", headers=books.key
    )
    assert (books.spent(), books.reserved(), books.level()) == (2_500_000, 0, 1_000_000)
    answer = ask(serve, database, books, 1)
    assert (answer.status, json.loads(answer.body)["limit"]) == (429, "hourly")
    run(standing, SetRateTier(books.subject, "extended"))
    assert ask(serve, database, books, 1).status == 200
    run(standing, SetRateTier(books.subject, "basic"))
    assert '"hourly";q=2000000' in ask(serve, database, books, 1).headers["ratelimit-policy"]


def test_refunds_stop_at_capacity_and_extra_charges_at_zero(serve: Serve, database: str, standing: Connection) -> None:
    """R9: the bucket has no more than its capacity and no debt; the hour takes all of it and then refuses."""
    books = Books(standing)
    InFlight(serve(costing(300_000), url=database), lambda: advance(standing, "10 minutes")).ask(
        query="cost=0", headers=books.key
    )
    assert (books.spent(), books.level()) == (0, 1_000_000)
    ask(serve, database, books, 900_000, 2_500_000)
    assert (books.spent(), books.level()) == (2_500_000, 0)
    advance(standing, "20 minutes")
    answer = ask(serve, database, books, 1)
    assert (answer.status, json.loads(answer.body)["limit"]) == (429, "hourly")


@pytest.mark.parametrize(
    ("held", "rows", "calls", "cost", "back"),
    [(300, 40, 0, 40, 260), (100, 100, 3, 160, -60), (100, 100, 1, 120, -20), (1, 1, 1, 2, -1), (100, 0, 3, 0, 100)],
)
def test_the_worked_examples(
    held: int, rows: int, calls: int, cost: int, back: int, serve: Serve, database: str, standing: Connection
) -> None:
    books = Books(standing)
    seen: list[Decimal | int] = []
    gateway = InFlight(serve(costing(held), url=database), lambda: seen.append(books.level()))
    gateway.ask(query=f"cost={row_cost(rows, calls)}", headers=books.key)
    assert seen == [1_000_000 - held]
    assert books.level() - seen[0] == back
    assert (books.spent(), books.last()["details"]["cost"]) == (cost, cost)


def test_state_outlives_the_process(database: str, standing: Connection) -> None:
    """Another process, another protocol, after a restart: the same budget."""
    books = Books(standing)
    for kind in (AsgiGateway, WsgiGateway, AsgiGateway):
        gateway = kind(database, costing(300))
        gateway.ask(query="cost=300", headers=books.key)
        gateway.close()
    assert books.spent() == 900
