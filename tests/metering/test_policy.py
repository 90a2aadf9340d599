"""Policies: which route a request takes, and what cannot be meant."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from quota import Client
from quota.config import ConfigError
from quota.http.problems import Problem
from quota.metering import FailOpen, Meter, Policy, Request, Route, credential_of, fixed
from quota.metering.ceiling import Ceiling


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/rows", "list"),
        ("HEAD", "/rows", "list"),
        ("GET", "/rows/", "list"),
        ("POST", "/rows", "create"),
        ("GET", "/rows/7", "one"),
        ("DELETE", "/rows/7", "one"),
        ("GET", "/rows/latest", "latest"),
        ("GET", "/rows/7/8", "rest"),
        ("GET", "/rows/7/8/9", "rest"),
        ("PUT", "/rows", "rest"),
        ("GET", "/", "rest"),
        ("GET", "//rows", "list"),
        ("GET", "/rows/../rows", "rest"),
        ("GET", "/ROWS", "rest"),
        ("GET", "/rows\n", "rest"),
        ("GET", "", "rest"),
        ("OPTIONS", "*", "rest"),
    ],
)
def test_which_route(method: str, path: str, name: str) -> None:
    policy = Policy(
        routes=(
            Route("/rows/<id>", name="one"),
            Route("/rows", ("GET",), "list"),
            Route("/rows", ("POST",), "create"),
            Route("/rows/latest", name="latest"),
        ),
        default=Route("/<path:rest>", name="rest"),
    )
    for _ in range(2):  # the second one is remembered
        route = policy.route_of(method, path)
        assert route is not None
        assert route.name == name


def test_what_is_remembered_of_paths_is_bounded() -> None:
    policy = Policy(routes=(Route("/rows/<id>", name="one"),), default=None)
    for path in ("/rows/" + "a" * 10_000, "/other/" + "a" * 10_000):
        assert [policy.route_of("GET", path) for _ in range(2)] == [policy.routes[0] if "rows" in path else None] * 2
    known: Any = policy._known
    assert (known.cache_info().currsize, known.cache_info().maxsize) == (0, 4096)


def test_no_default_is_no_route() -> None:
    assert Policy(default=None).route_of("GET", "/rows") is None
    assert Route("/a", ("GET", "PUT")).name == "GET|PUT /a"
    assert Route("/a").name == "/a"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Route("rows"), "begins with /"),
        (lambda: Route("/rows", ("get",)), '"get"'),
        (lambda: Route("/rows", minimum_charge=-1), "minimum_charge -1"),
        (lambda: Route("/rows", failure_charge=1.5), "failure_charge 1.5"),  # type: ignore[arg-type]
        (lambda: Route("/rows", on_timeout="wait"), "charge or hold"),  # type: ignore[arg-type]
        (lambda: Route("/rows", overrun="deny"), "book or cap"),  # type: ignore[arg-type]
        (lambda: Route("/rows", ttl=timedelta(0)), "ttl"),
        (lambda: Route("/rows", headroom=Decimal(1)), "headroom 1"),
        (lambda: FailOpen(capacity=0, refill_per_s=1), "fail_open"),
        (lambda: Policy(headers="draft-3"), "draft-11, legacy, none"),  # type: ignore[arg-type]
        (lambda: Policy(routes=(Route("/rows/<id"),)), "as in Flask"),
        (lambda: Policy(routes=(Route("/rows/<nosuch:id>"),)), "as in Flask"),
        (lambda: Policy(routes=(Route("/a"), Route("/a", estimate=fixed(2)))), "twice"),
        (lambda: Policy(routes=(Route("/a", ("GET",)), Route("/a", ("GET", "PUT")))), "twice"),
    ],
)
def test_what_cannot_be_meant(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("|", "[|]")):
        wrong()


def test_one_credential() -> None:
    assert credential_of({"authorization": ["Bearer  abc "]}) == "abc"
    assert credential_of({"authorization": ["bearer abc"]}) == "abc"
    assert credential_of({"x-api-key": [" abc "]}) == "abc"
    for headers, status in (
        ({}, 401),
        ({"authorization": ["abc"]}, 401),
        ({"authorization": ["Bearer a", "Bearer a"]}, 400),
        ({"x-api-key": ["a", "a"]}, 400),
        ({"x-api-key": ["a"], "authorization": ["Basic b"]}, 400),
    ):
        with pytest.raises(Problem) as caught:
            credential_of(headers)
        assert caught.value.status == status


def test_the_ceiling_is_exact() -> None:
    ceiling = Ceiling(FailOpen(capacity=10, refill_per_s=0))
    assert [ceiling.take(cost) for cost in (4, 7, 6, 1, 0)] == [True, False, True, False, True]


def test_a_note_that_cannot_be_meant_fails_where_it_is_made() -> None:
    call = Meter(Client("postgresql://nowhere"), Policy()).call(Request("GET", "/rows", "", {}))
    for wrong in ({"outcome": "well"}, {"cost": -1}, {"cost": 1.5}, {"cost": True}, {"rows": "many"}, {"ms": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            call.note(**wrong)
    call.note(outcome="timeout", cost=0, rows=1, database_ms=1.5)
    assert call.facts == {"rows": 1, "database_ms": 1.5}
