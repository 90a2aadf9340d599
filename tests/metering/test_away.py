"""The ledger is away: nothing passes, or exactly what a route says, and nobody waits longer than the deadline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quota import AsyncClient, Client
from quota.calls import EnsureSubject
from quota.client import run
from quota.config import ConfigError
from quota.metering import FailOpen, Identity, Meter, Policy, Route, fixed
from tests.client.proxy import Proxy
from tests.metering.kit import Books, Gateway
from tests.server import Connection

Serve = Callable[..., Gateway]


@pytest.fixture
def proxy(shared_ledger: str) -> Iterator[Proxy]:
    with Proxy(shared_ledger) as found:
        yield found


def known(headers: Any, *, while_away: bool) -> Identity:
    return Identity(subject="oauth:known")


def away(gateway: Gateway, proxy: Proxy) -> None:
    """From now on the ledger does not answer, and nobody waits long for it. Until now there was time enough."""
    proxy.frozen.set()
    gateway.meter.client.timeout_s = 0.3


def back(gateway: Gateway, proxy: Proxy) -> None:
    gateway.meter.client.timeout_s = 30
    proxy.frozen.clear()


def open_for(capacity: int) -> Policy:
    route = Route("/rows", name="rows", estimate=fixed(100), fail_open=FailOpen(capacity=capacity, refill_per_s=0))
    return Policy(routes=(route,), authenticate=known, default=Route("/<path:rest>", name="default"))


def test_it_fails_closed(serve: Serve, closed_port: str) -> None:
    gateway = serve(Policy(authenticate=known), url=closed_port, timeout_s=0.2)
    answer = gateway.ask(query="cost=1")
    assert (answer.status, json.loads(answer.body)["title"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["cache-control"] == "no-store"
    assert "ratelimit" not in answer.headers
    assert gateway.meter.events == {("fail_closed", "default"): 1}


def test_a_route_that_fails_open_up_to_its_ceiling(
    serve: Serve, closed_port: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = serve(open_for(250), url=closed_port, timeout_s=0.2)
    answers = [gateway.ask(query="cost=40&stream=1") for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 503]
    for one in answers[:2]:
        assert one.headers["quota-fail-open"] == "?1"
        assert "ratelimit" not in one.headers
        assert "x-agent-cost" not in one.headers
    assert gateway.meter.events == {("fail_open", "rows"): 2, ("fail_closed", "rows"): 1}
    assert "fail_open at rows, 2 so far" in caplog.text
    assert gateway.ask("/other", "cost=1").status == 503


def test_the_ceiling_refills(serve: Serve, closed_port: str) -> None:
    route = Route("/rows", estimate=fixed(100), fail_open=FailOpen(capacity=100, refill_per_s=10**6))
    gateway = serve(Policy(routes=(route,), authenticate=known), url=closed_port, timeout_s=0.2)
    assert [gateway.ask(query="cost=1").status for _ in range(2)] == [200, 200]


def test_known_keys_pass_an_outage_on_routes_that_fail_open(
    serve: Serve, proxy: Proxy, beside: Connection, books: Books
) -> None:
    route = Route("/rows", estimate=fixed(1), fail_open=FailOpen(capacity=10, refill_per_s=0))
    gateway = serve(Policy(routes=(route,)), url=proxy.url)
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    gateway.meter.authenticate._memory._known._values.clear()
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    # All that is remembered is past its time, and the ledger goes away.
    values = gateway.meter.authenticate._memory._known._values
    for key, (_, holder) in list(values.items()):
        values[key] = (0.0, holder)
    away(gateway, proxy)
    assert gateway.ask(query="cost=1", headers=books.key).headers["quota-fail-open"] == "?1"
    assert gateway.ask("/other", "cost=1", headers=books.key).status == 503
    assert gateway.ask(query="cost=1", headers=Books(beside).key).status == 503


@pytest.mark.parametrize("stream", ["", "&stream=1"], ids=["whole", "stream"])
def test_it_goes_away_while_the_application_works(
    stream: str, serve: Serve, proxy: Proxy, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    """The work is done and its answer goes out; the hold returns when its time has passed."""
    gateway = serve(Policy(), url=proxy.url)
    made = gateway.meter.call

    def call(request: Any) -> Any:
        one = made(request)
        original = one.responding

        def responding(status: int, headers: Any) -> Any:
            away(gateway, proxy)
            return (yield from original(status, headers))

        one.responding = responding
        return one

    gateway.meter.call = call
    answer = gateway.ask(query="cost=40" + stream, headers=books.key)
    assert (answer.status, answer.body) == (200, b"row\nrow\nrow\n")
    assert not {"ratelimit", "x-agent-cost"} & set(answer.headers)
    assert books.last()["state"] == "held"
    assert "it returns when its time has passed" in caplog.text


def test_it_comes_back_before_the_end(serve: Serve, proxy: Proxy, books: Books) -> None:
    """What could not be settled with the head is settled at the end, with the same totals."""
    gateway = serve(Policy(), url=proxy.url)
    made = gateway.meter.call

    def call(request: Any) -> Any:
        one = made(request)
        original = one.responding

        def responding(status: int, headers: Any) -> Any:
            away(gateway, proxy)
            try:
                return (yield from original(status, headers))
            finally:
                back(gateway, proxy)

        one.responding = responding
        return one

    gateway.meter.call = call
    assert gateway.ask(query="cost=40", headers=books.key).status == 200
    assert (books.spent(), books.reserved()) == (40, 0)


def test_a_settlement_in_doubt_is_repeated_as_it_was(
    serve: Serve, proxy: Proxy, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer was lost and the answer then broke off, for which another cost is due: the first totals stand."""
    gateway = serve(Policy(routes=(Route("/rows", failure_charge=7),)), url=proxy.url, retries=0)
    made = gateway.meter.call

    def call(request: Any) -> Any:
        one = made(request)
        original = one.responding

        def responding(status: int, headers: Any) -> Any:
            proxy.lose_answers = 1
            return (yield from original(status, headers))

        one.responding = responding
        return one

    gateway.meter.call = call
    gateway.ask(query="fail=mid", headers=books.key)
    assert (books.spent(), books.reserved(), books.last()["details"]["outcome"]) == (1, 0, "answered")
    assert "its balances are not told" in caplog.text
    assert "was not closed" not in caplog.text


def test_a_hold_in_doubt_is_returned(serve: Serve, proxy: Proxy, books: Books) -> None:
    """The reserve was granted and its answer lost: who was told 503 leaves nothing behind."""
    gateway = serve(Policy(), url=proxy.url, retries=0)
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    proxy.lose_answers = 1
    assert gateway.ask(query="cost=1", headers=books.key).status == 503
    assert gateway.ask(query="cost=1", headers=books.key).status == 200
    assert (books.spent(), books.reserved()) == (2, 0)
    assert [one["state"] for one in books.calls()] == ["settled", "released", "settled"]


def test_what_passed_in_doubt_is_settled_all_the_same(serve: Serve, proxy: Proxy, beside: Connection) -> None:
    run(beside, EnsureSubject("oauth:known"))
    gateway = serve(open_for(250), url=proxy.url, retries=0)
    assert "quota-fail-open" not in gateway.ask(query="cost=40").headers
    proxy.lose_answers = 1
    assert gateway.ask(query="cost=40").headers["quota-fail-open"] == "?1"
    found = beside.execute(
        "SELECT spent, reserved FROM quota.balance('oauth:known') WHERE limit_name = 'hourly'"
    ).fetchall()
    assert found[0][1] == 0
    assert found[0][0] in (80, 160)  # both protocols may share the subject


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_that_lets_everything_pass_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="fail_open"):
        Meter(kind("postgresql://nowhere", fail_open=True), Policy())
