"""Tenants, units and credits: what stands above subjects, who may touch it, and what is taken back."""

from __future__ import annotations

import secrets
from urllib.parse import quote

from tests.admin.conftest import Api, Server
from tests.web import Answer


def as_root(server: Server, root: str, method: str, path: str, body: object | None = None, **headers: str) -> Answer:
    return server.request(method, path, body, token=root, headers=headers)


def test_a_tenant_from_its_making_on(server: Server, root: str) -> None:
    name = f"new {secrets.token_hex(4)}/eu"
    made = as_root(server, root, "POST", "/tenants", {"name": name})
    assert (made.status, made.headers["Location"]) == (201, f"/v1/tenants/{quote(name, safe='')}")
    assert (made.json["ttl_maximum_s"], made.json["polling_hint_s"], made.json["keep_s"]) == ("86400", "1", "2592000")
    assert as_root(server, root, "POST", "/tenants", {"name": name}).problem == "already_exists"

    place = made.headers["Location"].removeprefix("/v1")
    first = {"If-Match": made.headers["ETag"]}
    changed = as_root(server, root, "PATCH", place, {"ttl_maximum_s": 0.5, "keep_s": 0}, **first)
    assert (changed.json["ttl_maximum_s"], changed.json["keep_s"]) == ("0.5", "0")
    assert as_root(server, root, "PATCH", place, {"polling_hint_s": 2}, **first).status == 412
    for wrong in ({"ttl_maximum_s": 0}, {"ttl_maximum_s": None}, {"polling_hint_s": 0}, {"keep_s": -1}, {"keep": 1}):
        assert as_root(server, root, "PATCH", place, wrong).status == 422, wrong
    path = "/log?action=configure_tenant&limit=1"
    logged = as_root(server, root, "GET", path, **{"Quota-Tenant": name}).json["items"][0]
    assert (logged["tenant"], logged["before"]["ttl_maximum"], logged["after"]["ttl_maximum"]) == (
        name, "24:00:00", "00:00:00.5",
    )  # fmt: skip


def test_the_longest_life_of_a_hold(api: Api) -> None:
    api.do("PATCH", f"/tenants/{api.tenant}", {"ttl_maximum_s": 60})
    api.do("POST", "/subjects", {"name": "org:a"})
    api.do("PUT", "/limits/org:a/cap", {"unit": "usd", "capacity": "1"})
    body = {"subject": "org:a", "costs": {"usd": "1"}, "ttl_s": 61}
    assert api.request("POST", "/reservations", body, "worker").problem == "invalid_ttl"
    assert api.request("POST", "/reservations", {**body, "ttl_s": 60}, "worker").status == 201


def test_whoever_is_confined_sees_one_tenant(api: Api, other: Api, root: str) -> None:
    assert [one["name"] for one in api.get("/tenants", "viewer")["items"]] == [api.tenant]
    assert api.request("GET", f"/tenants/{other.tenant}").problem == "unknown_tenant"
    assert api.request("PATCH", f"/tenants/{other.tenant}", {"keep_s": 1}).problem == "unknown_tenant"
    assert api.request("POST", "/tenants", {"name": "mine"}).problem == "wrong_scope"
    assert api.request("POST", "/units", {"name": "mine"}).problem == "wrong_scope"
    seen, path = [], "/tenants?limit=1"
    while path:
        answer = as_root(api.server, root, "GET", path)
        seen += [one["name"] for one in answer.json["items"]]
        path = f"/tenants?limit=1&after={answer.json['next']}" if answer.json["next"] else ""
    assert seen == sorted(seen)
    assert {api.tenant, other.tenant, "default"} <= set(seen)


def test_units(api: Api, root: str) -> None:
    name = f"token/s {secrets.token_hex(4)}"
    made = as_root(api.server, root, "POST", "/units", {"name": name, "money": True})
    assert (made.status, made.json) == (201, {"name": name, "money": True})
    assert as_root(api.server, root, "GET", made.headers["Location"].removeprefix("/v1")).json == made.json
    assert as_root(api.server, root, "POST", "/units", {"name": name}).problem == "already_exists"
    assert api.request("GET", "/units/none").problem == "unknown_unit"
    assert api.request("GET", "/units/none").status == 404
    assert {"name": "usd", "money": True} in api.get("/units", "viewer")["items"]
    # Whoever is told of it may count it.
    api.do("POST", "/subjects", {"name": "org:a"})
    api.do("PUT", "/limits/org:a/cap", {"unit": name, "capacity": "1"})
    assert api.request("PUT", "/limits/org:a/cap2", {"unit": "none", "capacity": "1"}).problem == "unknown_unit"


def test_a_credit_takes_back_what_was_booked_and_no_more(api: Api) -> None:
    api.do("POST", "/subjects", {"name": "org:a"})
    api.do("PUT", "/limits/org:a/cap", {"unit": "usd", "capacity": "10"})
    made = api.do("POST", "/reservations", {"subject": "org:a", "costs": {"usd": "4"}}, "worker")["reservation"]
    place = f"/reservations/{made}"
    api.do("POST", f"{place}/settle", {"costs": {"usd": "3"}}, "worker")
    body = {"costs": {"usd": "2"}, "reason": "refunded", "id": "01890a5d-ac96-774b-bcce-b302099a8055"}
    assert api.request("POST", f"{place}/credit", body, "worker").status == 403
    assert api.request("POST", f"{place}/credit", {"costs": {"usd": "2"}}, "operator").status == 422
    first = api.do("POST", f"{place}/credit", body, "operator")
    assert first["replayed"] is False
    assert api.do("POST", f"{place}/credit", body, "operator") == {"entry": first["entry"], "replayed": True}
    assert api.request("POST", f"{place}/credit", {**body, "costs": {"usd": "1"}}).problem == "id_conflict"
    more = api.request("POST", f"{place}/credit", {"costs": {"usd": "2"}, "reason": "more"})
    assert (more.status, more.problem) == (422, "amount_out_of_range")
    assert api.request("POST", f"{place}/credit", {"costs": {"tokens": "2"}, "reason": "x"}).problem == "unit_not_held"
    (row,) = api.get("/subjects/org:a/balance")["items"]
    assert row["spent"] == "1"
    assert [line["kind"] for line in api.get("/ledger?kind=credit")["items"]] == ["credit"]
    assert api.get("/log?action=credit")["items"][0]["reason"] == "refunded"
