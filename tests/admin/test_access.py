"""Who may do what: the matrix of roles and routes, made from the URL map, and tenants that do not see each other."""

from __future__ import annotations

import secrets
from time import sleep

import pytest

from quota.admin.app import _admit
from tests.admin.conftest import CACHE_S, ROLES, WORKERS, Api, Server, make_token
from tests.admin.routes import Route, all_routes, api_routes, application
from tests.server import Connection

# Told here once more, by hand: what a role may do changes with intent, or not at all.
WORKER = {"reserve", "settle", "release", "adjust", "extend", "record_usage", "verify_key"}
VIEWER = {
    "list_keys", "get_key", "list_tiers", "get_tier", "list_subjects", "get_subject", "get_balance", "list_limits",
    "get_limit", "list_reservations", "get_reservation", "list_ledger", "export_ledger", "get_usage", "list_log",
    "check_books", "list_connections", "get_connection", "list_tenants", "get_tenant", "list_units", "get_unit",
    "list_prices", "get_price", "report_models", "report_pools", "report_calibration",
}  # fmt: skip
OPERATOR = VIEWER | {
    "create_key", "change_key", "rotate_key", "revoke_key", "set_tier_of_keys", "verify_key", "create_tier",
    "set_tier_limit", "retire_tier", "create_subject", "move_subject", "freeze_subject", "unfreeze_subject",
    "retire_subject", "set_limit", "remove_limit", "settle", "release", "credit", "create_connection", "set_price",
    "end_price", "import_prices",
}  # fmt: skip
OWNER = OPERATOR | {
    "list_tokens", "create_token", "get_token", "revoke_token", "repair_books", "create_tenant", "configure_tenant",
    "create_unit",
}  # fmt: skip
MAY = {"worker": WORKER, "viewer": VIEWER, "operator": OPERATOR, "owner": OWNER}


def name(route: Route) -> str:
    return route.endpoint.rpartition(".")[2]


def test_every_route_declares_who_may_call_it() -> None:
    assert [route.endpoint for route in all_routes() if route.access is None] == []
    public = {name(route) for route in all_routes() if route.access is not None and route.access.public}
    assert public == {"live", "ready", "openapi", "docs", "style"}
    assert {name(route) for route in api_routes()} == OWNER | WORKER


def test_nothing_waits_for_hooks_that_are_not_called() -> None:
    """The application calls `_admit` before a request and nothing after it: what Flask would call has to be empty."""
    app = application()
    assert not any((app.before_request_funcs, app.after_request_funcs, app.url_value_preprocessors))


def test_a_route_without_a_declaration_is_closed() -> None:
    app = application()
    with app.test_request_context("/docs"):
        view = app.view_functions["document.docs"]
        app.view_functions["document.docs"] = lambda: "open"
        try:
            with pytest.raises(Exception, match="needs a token"):
                _admit(app)
        finally:
            app.view_functions["document.docs"] = view


@pytest.mark.parametrize("role", ROLES)
def test_the_matrix(api: Api, role: str) -> None:
    for route in api_routes():
        # An unknown parameter: nobody who is let in does anything, and who is not never learns that it is unknown.
        answer = api.request(route.method, f"{route.path()}?nonsense=1", route.body, role)
        allowed = answer.status != 403
        assert allowed is (name(route) in MAY[role]), (route, answer.status, answer.body)
        if allowed:
            assert answer.status == 422, (route, answer.body)
        else:
            assert answer.problem == "wrong_role"


def test_no_token_no_answer(server: Server) -> None:
    for route in api_routes():
        answer = server.request(route.method, route.path(), route.body)
        assert (answer.status, answer.problem) == (401, "unauthenticated"), route
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="quota"'


# -- tenants --------------------------------------------------------------------------------------------------------


def populate(api: Api) -> dict[str, str]:
    """Something of every noun, named alike in every tenant but for what is unique; what stands in paths."""
    api.do("POST", "/subjects", {"name": "org:secret"})
    key = api.do("POST", "/keys", {"name": "Hidden", "parent": "org:secret"})["id"]
    api.do("POST", "/oauth-connections", {"id": "hidden"})
    api.do("PUT", "/limits/org:secret/cap", {"unit": "usd", "capacity": "10"})
    api.do("POST", "/tiers", {"name": "hidden", "limits": [{"name": "x", "unit": "usd", "capacity": "1"}]})
    held = api.do("POST", "/reservations", {"subject": f"key:{key}", "costs": {"usd": "1"}}, role="worker")
    api.do("POST", "/usage-records", {"subject": f"key:{key}", "costs": {"usd": "2"}}, role="worker")
    token = api.do("POST", "/tokens", {"name": "hidden", "role": "viewer"})["id"]
    rates = {"input": "1", "output": "2"}
    price = api.do("POST", "/prices", {"provider": "hidden", "model": "hidden", "rates": rates})["version"]
    return {
        "key": key, "token": token, "reservation": held["reservation"], "price": price, "tenant": api.tenant,
    }  # fmt: skip


def aimed(route: Route, theirs: dict[str, str]) -> str:
    """The route's path, pointing at what belongs to the other tenant."""
    noun = route.rule.split("/")[2]
    ids = {
        "keys": theirs["key"], "tokens": theirs["token"], "reservations": theirs["reservation"],
        "oauth-connections": "hidden",
    }  # fmt: skip
    return route.path(
        id=ids.get(noun, ""), tier="hidden", subject="org:secret", owner="org:secret",
        name="x" if noun == "tiers" else "cap", tenant=theirs["tenant"], unit="hidden", version=theirs["price"],
    )  # fmt: skip


def snapshot(db: Connection, tenant: str) -> list[object]:
    found: list[object] = []
    for view in (
        "keys",
        "subjects",
        "limits",
        "reservations",
        "entries",
        "log",
        "tokens",
        "tiers",
        "balances",
        "prices",
    ):
        rows = db.execute(f"SELECT * FROM quota.{view} WHERE tenant = %s ORDER BY 1, 2, 3".encode(), (tenant,))
        # Levels and windows move by themselves.
        found.append([(view, *map(str, row)) for row in rows if view != "balances" or "bucket" not in row])
    return found


def test_one_tenant_neither_sees_nor_moves_another(api: Api, other: Api, db: Connection) -> None:
    theirs = populate(other)
    before = snapshot(db, other.tenant)
    # A version is a number, such as may stand anywhere; what it is the version of is called "hidden".
    hidden = ("Hidden", "hidden", "org:secret", *(value for what, value in theirs.items() if what != "price"))
    for route in api_routes():
        for role in sorted(route.access.roles if route.access else ()):
            body = route.body
            if role == "worker" and body is not None:
                body = {member: value for member, value in body.items() if member != "reason"}
            for headers in ({}, {"Quota-Tenant": other.tenant}):
                path = aimed(route, theirs)
                answer = api.request(route.method, path, body, role, headers=headers)
                named = (name(route), role, headers, answer.status, answer.body)
                if headers:
                    assert (answer.status, answer.problem) == (404, "unknown_tenant"), named
                elif "<" in route.rule and name(route) != "set_limit":
                    assert answer.status == 404, named
                if answer.status < 300:
                    assert not any(one in answer.body.decode() for one in hidden), named
    assert snapshot(db, other.tenant) == before


def test_bodies_that_name_what_is_another_tenants(api: Api, other: Api, db: Connection) -> None:
    theirs = populate(other)
    before = snapshot(db, other.tenant)
    subject = f"key:{theirs['key']}"
    for method, path, body, role in (
        ("POST", "/keys", {"name": "k", "parent": "org:secret"}, "owner"),
        ("POST", "/keys/set-tier", {"ids": [theirs["key"]], "rate_tier": "bulk"}, "owner"),
        ("POST", "/subjects", {"name": "user:1", "parent": "org:secret"}, "owner"),
        ("POST", "/reservations", {"subject": subject, "costs": {"usd": "1"}}, "worker"),
        ("POST", "/usage-records", {"subject": subject, "costs": {"usd": "1"}}, "worker"),
    ):
        assert api.request(method, path, body, role).status == 404, path
    made = api.do("POST", "/keys", {"name": "k"})["id"]
    assert api.request("PATCH", f"/keys/{made}", {"rate_tier": "hidden"}).status == 422
    assert api.request("PATCH", f"/keys/{made}", {"parent": "org:secret"}).status == 404
    assert snapshot(db, other.tenant) == before


def test_a_confined_token_changes_nothing_that_all_tenants_share(api: Api) -> None:
    builtin = {"unit": "cost", "kind": "budget", "capacity": "1", "period": "1 hour", "builtin": True}
    for method, path, body in (
        ("PUT", "/tiers/basic/limits/hourly", builtin),
        ("POST", "/tiers/bulk/retire", {"builtin": True}),
        ("POST", "/tiers", {"name": "x", "builtin": True, "limits": [{"name": "y", "unit": "usd", "capacity": "1"}]}),
        ("POST", "/tokens", {"name": "x", "role": "owner", "every_tenant": True}),
    ):
        assert api.request(method, path, body).problem == "wrong_scope", path


def test_a_token_for_every_tenant_says_which(api: Api, other: Api, root: str) -> None:
    populate(api)
    for one, count in ((api, 1), (other, 0)):
        answer = one.server.request("GET", "/keys", token=root, headers={"Quota-Tenant": one.tenant})
        assert (answer.status, len(answer.json["items"])) == (200, count)
    for tenant in ("nobody", "\u00e9".encode().decode("latin-1"), "x" * 300):
        answer = api.server.request("GET", "/keys", token=root, headers={"Quota-Tenant": tenant})
        assert (answer.status, answer.problem) == (404, "unknown_tenant")


# -- tokens that are not good ---------------------------------------------------------------------------------------


def test_every_wrong_token_gets_the_same_answer(api: Api, db: Connection) -> None:
    expired, revoked = make_token(db, "owner", api.tenant), make_token(db, "owner", api.tenant)
    db.execute("UPDATE quota_internal.api_tokens SET expires_at = 'epoch' WHERE id = %s", (expired.split("_")[1],))
    db.execute("SELECT quota.revoke_token(%s, 'test', %s)", (revoked.split("_")[1], api.tenant))
    good = api.tokens["owner"]
    answers = set()
    for authorization in (
        f"Bearer {good[:-1]}~", f"Bearer {good}x", f"Bearer {expired}", f"Bearer {revoked}", "Bearer ", "Bearer x",
        f"Basic {good}", "\xe9-key", "Bearer \xe9\xff", f"Bearer {'x' * 3000}",
    ):  # fmt: skip
        # Each from an address of its own: the brake on guessing has a test of its own.
        headers = {"Authorization": authorization, "X-Forwarded-For": f"2001:db8:{secrets.token_hex(2)}::1"}
        answer = api.server.request("GET", "/keys", headers=headers)
        found = answer.json
        answers.add((answer.status, found["type"], found["detail"]))
    assert answers == {(401, "urn:quota-ledger:problem:unauthenticated", "This token is not good.")}
    assert api.server.request("GET", "/keys", headers={"Authorization": f"bearer  {good}"}).status == 200


def test_a_revoked_token_ends_within_the_bound(api: Api) -> None:
    made = api.do("POST", "/tokens", {"name": "x", "role": "viewer"})

    def seen() -> set[int]:
        """What the workers say; enough requests that each is asked, from addresses that nobody slows down."""
        addresses = [{"X-Forwarded-For": f"2001:db8:{secrets.token_hex(2)}::1"} for _ in range(WORKERS * 6)]
        return {api.server.request("GET", "/keys", token=made["secret"], headers=one).status for one in addresses}

    assert seen() == {200}
    api.do("POST", f"/tokens/{made['id']}/revoke", {"reason": "left"})
    sleep(CACHE_S + 0.1)
    assert seen() == {401}


def test_a_key_is_no_token(api: Api) -> None:
    secret = api.do("POST", "/keys", {"name": "x"})["secret"]
    assert api.server.request("GET", "/keys", token=secret).status == 401
