"""Calls decided out of a lease: booked and told as one by one, the cap exact, and nothing held when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from quota import AsyncClient, Client
from quota.calls import CreateTenant, EnsureSubject, Freeze, Release, RemoveLimit, Reserve, SetLimit, Settle
from quota.client import run
from quota.config import ConfigError
from quota.ids import uuid7
from quota.integrations import asgi
from quota.metering import Identity, Leasing, Meter, Policy, Route, fixed
from tests.client.proxy import Proxy
from tests.metering.kit import Books, Gateway, asgi_app
from tests.metering.test_exits import BEFORE_THE_HEAD, WAYS
from tests.server import Connection
from tests.sql.kit import PATIENCE_S

Serve = Callable[..., Gateway]

# From the first call on whose caller has been seen: one.
AT_ONCE = Leasing(size=3000, from_per_s=1, post_every=timedelta(hours=1))


def leased(lease: Leasing = AT_ONCE, **route: Any) -> Policy:
    return Policy(routes=(Route("/rows", name="rows", **route),), lease=lease)


def begun(gateway: Gateway, books: Books, *, at: str = "/rows") -> None:
    """The caller has been seen, at a cost of 1, and has a lease from now on: the next call proves it."""
    assert gateway.ask(at, query="cost=1", headers=books.key).status == 200


def leases_of(books: Books) -> list[dict[str, Any]]:
    return [one for one in books.calls() if "lease" in one["details"]]


def own(books: Books) -> list[dict[str, Any]]:
    """The calls that are reservations of their own."""
    return [one for one in books.calls() if "lease" not in one["details"]]


@pytest.fixture
def proxy(shared_ledger: str) -> Iterator[Proxy]:
    with Proxy(shared_ledger) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_booked_at_what_it_is_without_a_lease(way: str, stream: bool, serve: Serve, books: Books) -> None:
    query, leave_after, _, whole_cost, _, flowing_cost = WAYS[way]
    gateway = serve(leased())
    cost = flowing_cost if stream else whole_cost
    if way in BEFORE_THE_HEAD.get(gateway.kind, ()):
        cost = 1
    begun(gateway, books)
    for _ in range(2):
        gateway.ask(query=query + "&stream=1" * stream, headers=books.key, leave_after=leave_after)
    assert (len(own(books)), len(leases_of(books))) == (1, 1)
    gateway.close_leases()
    assert (books.spent(), books.reserved()) == (1 + 2 * cost, 0)


def test_callers_are_told_what_they_are_told_without_a_lease(serve: Serve, beside: Connection) -> None:
    """Costs below the estimate and above it, flowing answers too: after each call the same is left."""
    queries = ["cost=40", "cost=0", "cost=400", "", "fail=500", "cost=40&stream=1", "cost=700&stream=1", "cost=7"]
    told = []
    for policy in (Policy(), leased()):
        books, gateway = Books(beside), serve(policy)
        begun(gateway, books)
        answers = [gateway.ask(query=query, headers=books.key) for query in queries]
        told.append([(one.status, one.headers["ratelimit"].partition('"hourly"')[2].split(";")[1]) for one in answers])
        assert all(int(one.headers["quota-bucket-full-after"]) <= 3 for one in answers)
    assert told[0] == told[1]
    # A stream is told what its whole cost leaves, as the hold above that has returned.
    assert told[1][0] == (200, "r=1999959")


def test_the_bucket_is_told_without_what_calls_hold(serve: Serve, beside: Connection) -> None:
    books, gateway = Books(beside), serve(leased())
    run(beside, SetLimit(books.subject, "bucket", "cost", "bucket", 10_000, refill_per_s=Decimal("0.1")))
    begun(gateway, books)
    answer = gateway.ask(query="cost=40", headers=books.key)
    assert '"bucket";r=9959;t=' in answer.headers["ratelimit"]
    assert 380 <= int(answer.headers["quota-bucket-full-after"]) <= 410
    assert 6900 < books.level() < 7100  # the ledger's has the lease taken out


def test_requests_are_counted_out_of_the_lease_as_well(serve: Serve, books: Books, beside: Connection) -> None:
    run(beside, SetLimit(books.subject, "calls", "requests", "budget", 100, period="1 hour"))
    gateway = serve(leased())
    begun(gateway, books)
    for left in (98, 97, 96):
        answer = gateway.ask(query="cost=1", headers=books.key)
        assert f'"calls";r={left};' in answer.headers["ratelimit"]
    gateway.close_leases()
    assert (books.spent("calls"), books.reserved("calls"), len(own(books))) == (4, 0, 1)


def test_who_asks_seldom_is_decided_one_by_one(serve: Serve, books: Books) -> None:
    gateway = serve(leased(Leasing(size=3000, from_per_s=4, post_every=timedelta(hours=1))))
    for _ in range(3):
        gateway.ask(query="cost=1", headers=books.key)
    assert (len(own(books)), leases_of(books)) == (3, [])
    until_often(gateway, books)
    assert len(leases_of(books)) == 1


def until_often(gateway: Gateway, books: Books) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not leases_of(books):
        assert time.monotonic() < end_s
        for _ in range(4):
            gateway.ask(query="cost=1", headers=books.key)


@pytest.mark.parametrize(
    "route",
    [{"leased": False}, {"unit": "tokens"}, {"estimate": fixed(3001)}, {"headroom": Decimal("0.6")}],
    ids=["not leased", "another unit", "more than the size", "leaves more"],
)
def test_routes_that_are_decided_one_by_one(
    route: dict[str, Any], serve: Serve, books: Books, beside: Connection
) -> None:
    run(beside, SetLimit(books.subject, "tokens", "tokens", "budget", 1_000_000))
    gateway = serve(leased(**route))
    for _ in range(3):
        assert gateway.ask(query="cost=1", headers=books.key).status == 200
    assert (len(own(books)), leases_of(books)) == (3, [])


def test_near_the_cap_the_ledger_decides_to_the_last_unit(serve: Serve, books: Books, beside: Connection) -> None:
    """From half of the capacity on nothing is leased, and a refusal is the ledger's: exact, and with its reason."""
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 1000, period="1 hour"))
    gateway = serve(leased(Leasing(size=200, from_per_s=1), estimate=fixed(100)))
    statuses = [gateway.ask(query="cost=100", headers=books.key).status for _ in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    assert len(leases_of(books)) == 1
    answer = gateway.ask(query="cost=100", headers=books.key)
    assert (answer.headers["ratelimit"].partition(";")[0], books.spent(), books.reserved()) == ('"hourly"', 1000, 0)


def test_a_refused_caller_gets_what_is_left_in_its_lease(serve: Serve, books: Books, beside: Connection) -> None:
    """What is free in a lease returns before the ledger decides: a lease never stands in its own caller's way."""
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 1000, period="1 hour"))
    gateway = serve(leased(Leasing(size=500, from_per_s=1), estimate=fixed(300)))
    begun(gateway, books)
    assert gateway.ask(query="cost=300", headers=books.key).status == 200  # 199 of 500 are free, 499 are not leased
    assert gateway.ask(query="cost=300", headers=books.key).status == 200
    assert gateway.ask(query="cost=300", headers=books.key).status == 200  # 399 are left: 200 beside a lease of 199
    assert (books.spent(), books.reserved()) == (901, 0)


def test_a_caller_with_limited_concurrency_has_no_lease(serve: Serve, books: Books, beside: Connection) -> None:
    run(beside, SetLimit(books.subject, "slots", "concurrency", "concurrency", 100))
    gateway = serve(leased())
    for _ in range(3):
        assert gateway.ask(query="cost=1", headers=books.key).status == 200
    assert (len(own(books)), leases_of(books)) == (3, [])
    run(beside, RemoveLimit(books.subject, "slots"))
    gateway.meter.ledger._terms.keep(gateway.meter.ledger.look(Identity(subject=books.subject)), None, 0)
    for _ in range(2):
        gateway.ask(query="cost=1", headers=books.key)
    assert len(leases_of(books)) == 1


CHANGES = {
    "a lower cap": lambda subject: SetLimit(subject, "hourly", "cost", "budget", 1_000_000, period="1 hour"),
    "a slower bucket": lambda subject: SetLimit(subject, "bucket", "cost", "bucket", 1_000_000, refill_per_s=1),
    "limited concurrency": lambda subject: SetLimit(subject, "slots", "concurrency", "concurrency", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_limits_in_force_end_a_lease_at_the_next_look(
    change: str, serve: Serve, books: Books, beside: Connection
) -> None:
    gateway = serve(leased(Leasing(size=3000, from_per_s=1, post_every=timedelta(milliseconds=1))))
    begun(gateway, books)
    gateway.ask(query="cost=1", headers=books.key)
    assert books.reserved() > 2000
    run(beside, CHANGES[change](books.subject))
    end_s = time.monotonic() + PATIENCE_S
    while len(own(books)) < 2:  # whoever is just at the lease is not waited for; then it rests for a while
        assert time.monotonic() < end_s
        time.sleep(0.002)
        gateway.ask(query="cost=1", headers=books.key)
    assert (len(leases_of(books)), books.reserved()) == (1, 0)


def test_what_others_do_is_told_at_the_next_look(serve: Serve, books: Books, beside: Connection) -> None:
    gateway = serve(leased(Leasing(size=3000, from_per_s=1, post_every=timedelta(milliseconds=1))))
    begun(gateway, books)
    gateway.ask(query="cost=1", headers=books.key)
    elsewhere = run(beside, Reserve(books.subject, {"cost": 500}))
    run(beside, Settle(elsewhere.reservation or "", {"cost": 500}))
    left, calls, end_s = 0, 2, time.monotonic() + PATIENCE_S
    while left != 2_000_000 - 500 - calls:  # whoever is just at the lease is not waited for
        assert time.monotonic() < end_s, (left, calls)
        time.sleep(0.002)
        told = gateway.ask(query="cost=1", headers=books.key).headers["ratelimit"]
        left, calls = int(told.partition('"hourly";r=')[2].partition(";")[0]), calls + 1


def test_no_more_is_told_than_a_bucket_ever_has(serve: Serve, books: Books, beside: Connection) -> None:
    """It fills up again beside what is leased."""
    run(beside, SetLimit(books.subject, "bucket", "cost", "bucket", 10_000, refill_per_s=10_000_000))
    gateway = serve(leased(Leasing(size=3000, from_per_s=1, post_every=timedelta(milliseconds=1))))
    begun(gateway, books)
    for _ in range(3):
        time.sleep(0.002)
        answer = gateway.ask(query="cost=1", headers=books.key)
        assert '"bucket";r=10000,' in answer.headers["ratelimit"]


def test_own_limits_are_the_ledgers(serve: Serve, books: Books) -> None:
    gateway = serve(leased())
    begun(gateway, books)
    gateway.ask(query="cost=1", headers=books.key)
    answer = gateway.ask("/v1/limits", headers=books.key)
    assert (answer.status, b'"reserved":"3000"' in answer.body.replace(b" ", b"")) == (200, True)


def test_a_frozen_caller_is_stopped_within_a_third_of_the_time(serve: Serve, books: Books, beside: Connection) -> None:
    terms = Leasing(size=3000, from_per_s=1, ttl=timedelta(seconds=1), post_every=timedelta(milliseconds=50))
    gateway = serve(leased(terms))
    begun(gateway, books)
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    run(beside, Freeze(books.subject, "stop"))
    end_s = time.monotonic() + PATIENCE_S
    while gateway.ask(query="cost=1", headers=books.key).status == 200:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert gateway.ask(query="cost=1", headers=books.key).status == 403


def known(headers: Any, *, while_away: bool) -> Identity:
    """Somebody of another tenant, authenticated elsewhere."""
    return Identity(subject=headers["x-who"][0], tenant=headers["x-tenant"][0], first_contact=True)


def test_decisions_go_on_while_the_ledger_is_away_and_end_with_the_lease(
    serve: Serve, books: Books, proxy: Proxy
) -> None:
    terms = Leasing(size=3000, from_per_s=1, ttl=timedelta(seconds=3), post_every=timedelta(milliseconds=1))
    gateway = serve(leased(terms), url=proxy.url)
    begun(gateway, books)
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    proxy.frozen.set()
    gateway.meter.client.timeout_s = 0.3
    answer = gateway.ask(query="cost=1", headers=books.key)
    assert (answer.status, '"hourly";r=1999997' in answer.headers["ratelimit"]) == (200, True)
    time.sleep(3)
    assert gateway.ask(query="cost=1", headers=books.key).status == 503
    # As of a killed process: what was held and is not booked is charged.
    assert (books.spent(), books.reserved()) == (3001, 0)


def test_a_call_lives_as_long_as_its_route_says(serve: Serve, books: Books) -> None:
    gateway = serve(leased())
    begun(gateway, books)
    gateway.ask(query="cost=1", headers=books.key)
    (known,) = gateway.meter.leases.get()._leased.values()
    lives = {}
    for minutes in (10, 30):
        answer = gateway.drive(known.reserving(1, timedelta(minutes=minutes), uuid7()))
        lives[minutes] = answer.expires_at
        gateway.drive(known.plan(Release(answer.reservation)))
    assert timedelta(minutes=19) < lives[30] - lives[10] < timedelta(minutes=21)


def test_what_was_seen_before_a_lease_could_begin_is_not_told(serve: Serve, books: Books, proxy: Proxy) -> None:
    gateway = serve(leased(), url=proxy.url)
    begun(gateway, books)
    assert "ratelimit" in gateway.ask(query="cost=1", headers=books.key).headers
    (known,) = gateway.meter.leases.get()._leased.values()
    known._seen = replace(known._seen, at_s=known._seen.at_s - 31)
    known._look_at_s = 0
    proxy.frozen.set()
    gateway.meter.client.timeout_s = 0.3
    answer = gateway.ask(query="cost=1", headers=books.key)
    assert (answer.status, "ratelimit" in answer.headers) == (200, False)


def test_a_caller_of_another_tenant_is_leased_in_it(serve: Serve, beside: Connection) -> None:
    tenant = "tenant" + str(time.time_ns())
    run(beside, CreateTenant(tenant))
    run(beside, EnsureSubject("user:one", tenant=tenant))
    run(beside, SetLimit("user:one", "hourly", "cost", "budget", 100_000, period="1 hour", tenant=tenant))
    gateway = serve(Policy(authenticate=known, lease=AT_ONCE))
    who = [("X-Who", "user:one"), ("X-Tenant", tenant)]
    answers = [gateway.ask(query="cost=5", headers=who) for _ in range(3)]
    assert '"hourly";r=99985' in answers[-1].headers["ratelimit"]
    gateway.close_leases()
    rows = beside.execute(
        "SELECT count(*) FILTER (WHERE details ? 'lease'), sum((booked->>'cost')::numeric) FROM quota.reservations"
        " WHERE tenant = %s AND state = 'settled'",
        (tenant,),
    ).fetchone()
    assert rows == (1, 15)


ONE = Leasing(size=3000, from_per_s=1, callers=1, idle=timedelta(seconds=1), post_every=timedelta(hours=1))


def test_so_many_callers_have_a_lease_and_no_more(serve: Serve, beside: Connection) -> None:
    one, other, gateway = Books(beside), Books(beside), serve(leased(ONE))
    for books in (one, other):
        for _ in range(3):
            assert gateway.ask(query="cost=1", headers=books.key).status == 200
    assert (len(leases_of(one)), len(leases_of(other))) == (1, 0)
    assert len(own(other)) == 3
    end_s = time.monotonic() + PATIENCE_S
    while not leases_of(other):  # until the other one's is idle, and over
        assert time.monotonic() < end_s
        time.sleep(0.1)
        gateway.ask(query="cost=1", headers=other.key)
    assert one.reserved() == 0


def test_a_shutdown_gives_back_before_the_application_learns_of_it(shared_ledger: str, books: Books) -> None:
    """The application may be about to close the client."""
    reserved: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await asgi_app(scope, receive, send)
            return
        assert (await receive())["type"] == "lifespan.shutdown"
        reserved.append((books.spent(), books.reserved()))
        await send({"type": "lifespan.shutdown.complete"})

    async def main() -> None:
        async with AsyncClient(shared_ledger, timeout_s=30) as client:
            middleware = asgi.MeteringMiddleware(app, client, leased())
            headers = [(name.lower().encode(), value.encode()) for name, value in books.key]
            scope = {"type": "http", "method": "GET", "path": "/rows", "query_string": b"cost=9", "headers": headers}

            async def send(message: Any) -> None:
                pass

            async def receive() -> Any:
                return {"type": "http.request"}

            async def shutdown() -> Any:
                return {"type": "lifespan.shutdown"}

            for _ in range(3):
                await middleware(dict(scope), receive, send)
            reserved.append((books.spent(), books.reserved()))
            await middleware({"type": "lifespan"}, shutdown, send)
            await middleware(dict(scope), receive, send)

    asyncio.run(main())
    assert reserved == [(9, 3000), (27, 0)]
    assert (books.spent(), len(own(books)), len(leases_of(books))) == (36, 2, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": 0}, "size 0"),
        ({"size": True}, "size True"),
        ({"size": 10, "most": 9}, "most 9 is less than size, 10"),
        ({"size": 10, "leaves": Decimal(1)}, "leaves 1"),
        ({"size": 10, "from_per_s": 0}, "from_per_s 0"),
        ({"size": 10, "callers": -1}, "callers -1"),
        ({"size": 10, "ttl": timedelta(0)}, "ttl 0:00:00"),
        ({"size": 10, "post_every": timedelta(days=2)}, "post_every 2 days"),
    ],
)
def test_terms_that_cannot_mean_anything(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Leasing(**wrong)


def test_nobody_is_leased_by_a_policy_that_says_nothing(shared_ledger: str) -> None:
    with Client(shared_ledger) as client:
        meter = Meter(client, Policy())
        assert (meter.leases, meter.close()) == (None, [])
