"""Prices and reports over HTTP: set, listed, ended, imported; whose they are; what is refused and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.conftest import Api, Server, make_token
from tests.server import Connection

RATES = {"input": "3", "output": "15"}
DRAFT: dict[str, Any] = {"provider": "OpenAI", "model": "GPT-X", "rates": RATES}


def put(api: Api, **more: Any) -> Any:
    return api.do("POST", "/prices", {**DRAFT, **more})


def listed(api: Api, query: str = "") -> list[Any]:
    """The tenant's own prices; other tests may show theirs to everybody."""
    return [one for one in api.get(f"/prices{query}")["items"] if not one["shared"]]


def test_a_price_is_set_shown_changed_and_ended(api: Api) -> None:
    answer = api.request("POST", "/prices", {**DRAFT, "output_max": 16384, "source": "a page"})
    assert answer.status == 201
    first = answer.json
    assert (first["provider"], first["model"], first["rates"], first["shared"]) == ("openai", "gpt-x", RATES, False)
    assert answer.headers["Location"] == f"/v1/prices/{first['version']}"
    assert api.get(f"/prices/{first['version']}") == first
    later = put(api, rates={"input": "2", "output": "10"}, effective_from="2040-01-01T00:00:00Z")
    assert api.get(f"/prices/{first['version']}")["effective_until"].startswith("2040-01-01")
    assert [one["version"] for one in listed(api)] == [first["version"], later["version"]]
    assert listed(api, "?at=2041-01-01T00:00:00Z") == [later]
    assert [one["version"] for one in listed(api, "?at=2039-12-31T23:59:59Z")] == [first["version"]]
    ended = api.do("POST", f"/prices/{later['version']}/end", {"at": "2050-01-01T00:00:00Z"})
    assert ended["effective_until"].startswith("2050-01-01")
    assert listed(api, "?at=2051-01-01T00:00:00Z") == []
    assert api.do("POST", f"/prices/{first['version']}/end", {})["effective_until"] is not None
    assert [one["version"] for one in listed(api)] == [later["version"]]
    assert len(listed(api, "?history=true")) == 2


def test_a_price_with_all_its_parts(api: Api) -> None:
    rates = {
        "input": {"base": "3", "steps": [{"above": 200000, "price": "6"}]}, "cached_input": "0.3",
        "cache_write_5m": "3.75", "cache_write_1h": "6", "output": "15", "request": "0.001",
        "uses": {"web_search": "0.01"},
    }  # fmt: skip
    assert put(api, rates=rates)["rates"] == rates
    batch = put(api, rates={"input": 1.5, "output": 7.5}, variant="batch")
    assert (batch["rates"], batch["variant"]) == ({"input": "1.5", "output": "7.5"}, "batch")
    assert put(api, model="own", rates={"input": 0, "output": 0}, free=True)["free"] is True


def test_the_list_is_searched_and_walked(api: Api) -> None:
    for number in range(5):
        put(api, model=f"m-{number}")
    put(api, provider="acme", model="m-9")
    page = api.get("/prices?provider=openai&search=M-&limit=3")
    assert [one["model"] for one in page["items"]] == ["m-0", "m-1", "m-2"]
    rest = api.get(f"/prices?provider=openai&search=M-&limit=3&after={page['next']}")
    assert ([one["model"] for one in rest["items"]], rest["next"]) == (["m-3", "m-4"], None)


def test_a_repeated_request_sets_one_price_and_logs_once(api: Api) -> None:
    headers = {"Idempotency-Key": "p1", "X-Request-Id": "price-1"}
    first = api.do("POST", "/prices", DRAFT, headers=headers)
    again = api.request("POST", "/prices", DRAFT, headers=headers)
    assert (again.json, again.headers["Idempotency-Replayed"]) == (first, "true")
    assert put(api)["version"] == first["version"], "the same price is the same version"
    (entry,) = api.get("/log?action=set_price")["items"]
    assert (entry["target"], entry["request_id"], entry["after"]["rates"]) == ("openai gpt-x", "price-1", RATES)


def test_a_stale_version_is_not_ended(api: Api) -> None:
    price = f"/prices/{put(api)['version']}"
    tag = api.request("GET", price).headers["ETag"]
    api.do("POST", f"{price}/end", {"at": "2050-01-01T00:00:00Z"}, headers={"If-Match": tag})
    answer = api.request("POST", f"{price}/end", {"at": "2040-01-01T00:00:00Z"}, headers={"If-Match": tag})
    assert (answer.status, answer.problem) == (412, "stale")


@pytest.mark.parametrize(
    ("changed", "status", "problem", "told"),
    [
        ({"rates": {"input": "3"}}, 422, "invalid_argument", "no input and output"),
        ({"rates": {"input": "-3", "output": "1"}}, 422, "invalid_amount", "input"),
        ({"rates": {"input": "0.0000001", "output": "1"}}, 422, "invalid_argument", "0.0000001"),
        ({"rates": {**RATES, "thinking": "1"}}, 422, "invalid_argument", "thinking"),
        ({"rates": {"input": "0", "output": "0"}}, 422, "invalid_argument", "not declared free"),
        ({"rates": []}, 422, "invalid_argument", "rates"),
        ({"variant": "Batch!"}, 422, "invalid_argument", "variant"),
        ({"output_max": 0}, 422, "invalid_argument", "output_max"),
        ({"effective_from": "infinity"}, 422, "invalid_argument", "effective_from"),
        ({"effective_until": "2001-01-01T00:00:00Z"}, 422, "invalid_argument", "2001"),
        ({"effective_from": "-infinity"}, 409, "prices_overlap", "version"),
        ({"shared": True}, 403, "wrong_scope", "every tenant"),
    ],
)  # fmt: skip
def test_what_is_no_price_changes_nothing(api: Api, changed: Any, status: int, problem: str, told: str) -> None:
    put(api, effective_from="2030-01-01T00:00:00Z", effective_until="2030-01-02T00:00:00Z")
    before = listed(api, "?history=true")
    answer = api.request("POST", "/prices", {**DRAFT, **changed})
    assert (answer.status, answer.problem) == (status, problem), answer.body
    assert told in answer.json["detail"]
    assert listed(api, "?history=true") == before


def test_versions_that_are_not_there_or_cannot_end_then(api: Api) -> None:
    for method, path, body in (("GET", "/prices/999999999", None), ("POST", "/prices/999999999/end", {})):
        answer = api.request(method, path, body)
        assert (answer.status, answer.problem) == (404, "unknown_price")
    assert api.request("GET", "/prices/nonsense").status == 422
    price = put(api)
    answer = api.request("POST", f"/prices/{price['version']}/end", {"at": "2001-01-01T00:00:00Z"})
    assert (answer.status, answer.problem) == (422, "invalid_argument")
    assert api.get(f"/prices/{price['version']}") == price


def test_shared_prices_take_a_token_for_every_tenant(server: Server, db: Connection, api: Api, root: str) -> None:
    everybody = Api(server, api.tenant, {"owner": root, "viewer": make_token(db, "viewer", None)})
    shared = everybody.do("POST", "/prices", {**DRAFT, "model": f"m-{api.tenant}", "shared": True})
    try:
        assert shared["shared"] is True
        assert api.get(f"/prices?search={api.tenant}")["items"] == [shared]
        answer = api.request("POST", f"/prices/{shared['version']}/end", {})
        assert (answer.status, answer.problem) == (403, "wrong_scope")
        own = put(api, model=f"m-{api.tenant}")
        assert [one["shared"] for one in api.get(f"/prices?search={api.tenant}")["items"]] == [True, False]
        assert own["version"] != shared["version"]
    finally:
        everybody.do("POST", f"/prices/{shared['version']}/end", {})
    assert api.get(f"/prices?search={api.tenant}")["items"] == [own]


# -- import ---------------------------------------------------------------------------------------------------------

MAP: list[dict[str, Any]] = [
    {"provider": "acme", "model": "m", "rates": {"input": "1", "output": "2"}, "output_max": 9},
    {"provider": "acme", "model": "n", "rates": {"input": "1"}},
    {"provider": "acme", "model": "o", "rates": {"input": "1", "output": "2"}},
]


def test_an_import_reports_what_lacks_a_price_or_an_output_maximum(api: Api) -> None:
    done = api.do("POST", "/prices/import", {"prices": MAP, "dry_run": True})
    assert (done["read"], done["new"], listed(api)) == (2, 0, [])
    done = api.do("POST", "/prices/import", {"prices": MAP})
    assert (done["read"], done["new"], done["as_before"]) == (2, 2, 0)
    assert [(r["model"], r["imported"], r["problem"]) for r in done["remarks"]] == [
        ("n", False, '"output" is missing: a price names input and output'), ("o", True, "no output maximum"),
    ]  # fmt: skip
    assert api.do("POST", "/prices/import", {"prices": MAP})["as_before"] == 2
    changed = [{**MAP[0], "rates": {"input": "3", "output": "4"}}]
    assert api.do("POST", "/prices/import", {"prices": changed})["changed_from_now_on"] == 1
    assert [one["rates"]["input"] for one in listed(api, "?search=m")] == ["3"]
    assert len(api.get("/log?action=set_price")["items"]) == 3


def test_other_maps_and_the_package(api: Api) -> None:
    litellm = {"gpt-x": {"litellm_provider": "openai", "input_cost_per_token": 2.5e-06, "output_cost_per_token": 1e-05}}
    assert api.do("POST", "/prices/import", {"prices": litellm})["new"] == 1
    assert listed(api)[0]["rates"] == {"input": "2.5", "output": "10"}
    done = api.do("POST", "/prices/import", {"providers": ["Cerebras"]})
    assert done["new"] > 0
    assert {one["provider"] for one in listed(api)} == {"openai", "cerebras"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "invalid_argument"),
        ({"prices": {"a": {"b": 1}}}, "invalid_price"),
        ({"prices": [*MAP, {**MAP[0], "nonsense": 1}]}, "invalid_price"),
        ({"prices": [*MAP, MAP[0]]}, "invalid_price"),
        ({"prices": [*MAP, {**MAP[0], "effective_from": "2030-01-01T00:00:00Z"}]}, "prices_overlap"),
        ({"prices": [*MAP, {**MAP[0], "model": " x \u200b"}]}, "invalid_name"),
        ({"providers": ["no-such-provider"]}, "invalid_price"),
        ({"prices": MAP, "shared": True}, "wrong_scope"),
    ],
)
def test_an_import_is_all_or_nothing(api: Api, body: Any, problem: str) -> None:
    answer = api.request("POST", "/prices/import", body)
    assert answer.problem == problem, answer.body
    assert answer.status in (403, 409, 422)
    assert listed(api, "?history=true") == []


# -- reports --------------------------------------------------------------------------------------------------------


def test_reports_of_the_tenant(api: Api, other: Api) -> None:
    api.do("POST", "/subjects", {"name": "user:1"})
    for unit in ("usd", "cost"):
        api.do("PUT", f"/limits/user:1/{unit}", {"unit": unit, "capacity": None})
    details = {"provider": "openai", "model": "gpt-x", "ceiling": 100}
    made = {"subject": "user:1", "costs": {"usd": "1"}, "details": details}
    held = api.do("POST", "/reservations", made, "worker")["reservation"]
    told = {"usage": {"input": 7, "output": 50}, "truncated": False}
    api.do("POST", f"/reservations/{held}/settle", {"costs": {"usd": "0"}, "details": told}, "worker")
    (row,) = api.get("/reports/models", "viewer")["items"]
    assert (row["model"], row["attempts"], row["efficiency_p50"], row["billed_tokens"]) == ("gpt-x", 1, "0.5", "57")
    routed = {"route": "GET /rows", "cost": 9, "outcome": "answered", "latency_ms": 27}
    api.do("POST", "/usage-records", {"subject": "user:1", "costs": {"cost": "9"}, "details": routed}, "worker")
    everything, row = api.get("/reports/calibration")["items"]
    assert (everything["route"], row["route"], row["ms_per_cost"]) == (None, "GET /rows", "3")
    assert api.get("/reports/pools")["items"] == []
    assert api.get("/reports/models?until=2020-01-01T00:00:00Z")["items"] == []
    for name in ("models", "pools", "calibration"):
        assert other.get(f"/reports/{name}")["items"] == []
        answer = api.request("GET", f"/reports/{name}?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z")
        assert (answer.status, answer.problem) == (422, "invalid_argument")
