"""Every endpoint has an example in the document, and the examples work: sent as they stand, in this order."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from tests.admin.conftest import Api
from tests.admin.routes import Route, api_routes, openapi
from tests.server import Connection

# Which goes before which; whatever is not named here comes in between, in the order of the document.
FIRST = [
    "create_subject", "create_key", "create_tier", "set_limit", "create_connection", "create_token", "reserve",
    "record_usage", "adjust", "extend", "set_price",
]  # fmt: skip
LAST = [
    "settle",
    "credit",
    "release",
    "remove_limit",
    "retire_tier",
    "revoke_token",
    "rotate_key",
    "revoke_key",
    "retire_subject",
]


def place(route: Route) -> int:
    name = route.endpoint.rpartition(".")[2]
    return FIRST.index(name) - 100 if name in FIRST else LAST.index(name) + 100 if name in LAST else 0


def prepare(api: Api, db: Connection) -> None:
    """What the examples speak of."""
    api.do("POST", "/subjects", {"name": "org:acme"})
    api.do("POST", "/subjects", {"name": "user:7", "parent": "org:acme"})
    api.do("POST", "/keys", {"name": "Web", "id": "web", "parent": "org:acme"})
    api.do("POST", "/oauth-connections", {"id": "connection-a"})
    api.do("POST", "/tokens", {"name": "Ops", "role": "viewer", "id": f"ops-{api.tenant}"})
    api.do("PUT", "/limits/org:acme/lifetime", {"unit": "usd", "capacity": "50"})


@pytest.mark.parametrize("first", [True])
def test_every_example_works(api: Api, db: Connection, root: str, first: bool) -> None:
    prepare(api, db)
    done, settled = set(), ""
    for route in sorted(api_routes(), key=place):
        name = route.endpoint.rpartition(".")[2]
        assert route.access is not None
        # As whom: the least that may.
        role = next(one for one in ("worker", "viewer", "operator", "owner") if one in route.access.roles)
        if name in ("settle", "release"):
            role = "operator"  # their examples have a reason
        held = db.execute(
            "SELECT reservation::text FROM quota.holds WHERE tenant = %s ORDER BY created_at DESC LIMIT 1",
            (api.tenant,),
        ).fetchone()
        if held is None:
            made = api.do("POST", "/reservations", {"subject": "key:web", "costs": {"usd": "0.25"}}, role="worker")
            held = (made["reservation"],)
        settled = held[0] if name == "settle" else settled
        other = {"tenant": api.tenant}
        if "/reservations/" in route.rule:
            other["id"] = settled if name == "credit" else held[0]
        if "/prices/" in route.rule:
            other["version"] = api.get("/prices")["items"][-1]["version"]
        if "/tokens/" in route.rule:
            other["id"] = f"ops-{api.tenant}"
        query = {
            p["name"]: p["example"] for p in route.operation["parameters"] if p["in"] == "query" and "example" in p
        }
        path = route.path(**other) + (f"?{urlencode(query)}" if query else "")
        # What concerns every tenant takes a token that is for every one.
        token = root if name in ("create_tenant", "create_unit") else api.tokens[role]
        answer = api.server.request(route.method, path, route.body, token=token)
        documented = {int(status) for status in route.operation["responses"] if status != "default"}
        assert answer.status in documented, (name, path, answer.status, answer.body)
        done.add(name)
    assert done == {
        operation["operationId"] for methods in openapi()["paths"].values() for operation in methods.values()
    } - {
        "live",
        "ready",
    }
