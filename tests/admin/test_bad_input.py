"""Hostile or mistaken input: 400 if it cannot be read, 422 if it cannot be meant, never a 500, and nothing changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.admin.conftest import Api
from tests.admin.routes import Route, api_routes
from tests.server import Connection

BIG = 2**63

MALFORMED = {
    "not JSON": b'{"name":',
    "empty": b"",
    "blank": b"  \n",
    "duplicate keys": b'{"name":"a","name":"b"}',
    "duplicate keys below": b'{"name":"a","costs":{"usd":"1","usd":"2"}}',
    "NaN": b'{"name":NaN}',
    "Infinity": b'{"name":-Infinity}',
    "5000 digits": b'{"name":' + b"1" * 5000 + b"}",
    "5000 digits behind the point": b'{"name":0.' + b"1" * 5000 + b"}",
    "an exponent out of range": b'{"name":1e99999999999999999999}',
    "100000 brackets": b"[" * 60_000,
    "33 levels": b'{"name":' + b"[" * 32 + b"]" * 32 + b"}",
    "NUL": b'{"name":"a\\u0000b"}',
    "a raw control character": b'{"name":"a\x01b"}',
    "half a surrogate pair": b'{"name":"\\ud800"}',
    "a key with NUL": b'{"a\\u0000":"b"}',
    "bad UTF-8": b'{"name":"\xff"}',
    "UTF-16": '{"name":"a"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"name":"a"}',
    "65 KiB": b'{"name":"' + b"a" * (65 << 10) + b'"}',
    "something behind": b'{"name":"a"} {}',
}
MEANINGLESS: dict[str, Any] = {
    "an array": [],
    "a string that holds JSON": '{"name":"a"}',
    "null": None,
    "an unknown member": {"nonsense": 1},
}


def state(db: Connection, api: Api) -> list[tuple[Any, ...]]:
    """What may not move: the log grows with every change."""
    return db.execute(
        "SELECT (SELECT count(*) FROM quota.log WHERE tenant = %(t)s), (SELECT count(*) FROM quota.entries WHERE tenant"
        " = %(t)s), (SELECT count(*) FROM quota.reservations WHERE tenant = %(t)s)",
        {"t": api.tenant},
    ).fetchall()


def with_bodies() -> list[Route]:
    return [route for route in api_routes() if route.body is not None]


def role_of(route: Route) -> str:
    assert route.access is not None
    return sorted(route.access.roles)[-1]


@pytest.fixture
def ready(api: Api) -> Api:
    """Something for paths to point at, so that it is the body that is judged."""
    api.do("POST", "/subjects", {"name": "org:acme"})
    api.do("POST", "/subjects", {"name": "user:7"})
    api.do("POST", "/keys", {"name": "Web", "id": "web"})
    api.do("PUT", "/limits/key:web/cap", {"unit": "usd", "capacity": "10"})
    return api


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_read(ready: Api, db: Connection, what: str) -> None:
    before = state(db, ready)
    for route in with_bodies():
        answer = ready.request(route.method, route.path(), role=role_of(route), raw=MALFORMED[what])
        assert (answer.status, answer.problem) == (400, "malformed"), (route, answer.body)
    assert state(db, ready) == before


@pytest.mark.parametrize("what", MEANINGLESS)
def test_what_cannot_be_meant(ready: Api, db: Connection, what: str) -> None:
    before = state(db, ready)
    raw = json.dumps(MEANINGLESS[what]).encode()
    for route in with_bodies():
        answer = ready.request(route.method, route.path(), role=role_of(route), raw=raw)
        assert (answer.status, answer.problem) == (422, "invalid_argument"), (route, answer.body)
    assert state(db, ready) == before


def test_members_of_a_wrong_type(ready: Api, db: Connection) -> None:
    """Every member of every body, with every wrong value: field and rule are named, and no value is quoted."""
    values: list[Any] = [True, 7, BIG, "\u202esecret-value\u0007", [], [1], {}, {"a": {}}, "x" * 1001, 1.5, None]
    for route in with_bodies():
        for member, good in route.body.items():
            for value in values:
                if type(value) is type(good) or (value is None and member not in ("name", "subject", "costs")):
                    continue  # perhaps good
                body = {**route.body, member: value}
                answer = ready.request(route.method, route.path(), body, role=role_of(route))
                if answer.status in (200, 201):
                    # An amount may be a number as well, and a switch that is given its kind is one.
                    assert isinstance(value, int | float), (route, member, value)
                    continue
                assert answer.status in (403, 404, 409, 412, 422, 429), (route, member, value, answer.body)
                assert "secret-value" not in answer.body.decode()


@pytest.mark.parametrize(
    "amount",
    ["-1", "-0", "NaN", "Infinity", "1e5", "\uff11\uff12", "", " 1", "1_000", "0x1", True, -1, 1e300, [], None],
)
def test_amounts_that_are_none(ready: Api, db: Connection, amount: Any) -> None:
    before = state(db, ready)
    for method, path, body, role in (
        ("PUT", "/limits/key:web/cap2", {"unit": "usd", "capacity": amount}, "owner"),
        ("POST", "/reservations", {"subject": "key:web", "costs": {"usd": amount}}, "worker"),
        ("POST", "/usage-records", {"subject": "key:web", "costs": {"usd": amount}}, "worker"),
        ("POST", "/tiers", {"name": "g", "limits": [{"name": "l", "unit": "usd", "capacity": amount}]}, "owner"),
    ):
        if amount is None and "capacity" in json.dumps(body):
            continue  # unlimited
        answer = ready.request(method, path, body, role)
        assert answer.status == 422, (path, answer.body)
    assert state(db, ready) == before


@pytest.mark.parametrize("digits", ["1" * 19, "0." + "1" * 13, str(BIG), "1000000000000000000"])
def test_amounts_beyond_the_ledger(ready: Api, digits: str) -> None:
    for amount in (digits, float(digits) if "." in digits else int(digits)):
        answer = ready.request("POST", "/reservations", {"subject": "key:web", "costs": {"usd": amount}}, "worker")
        if isinstance(amount, float):
            continue  # the client has rounded it already
        assert answer.status == 422, answer.body
        assert answer.problem in ("amount_out_of_range", "invalid_amount")


def test_amounts_keep_their_digits(ready: Api) -> None:
    for digits in ("0.0000001", "0.30", "123456789012345678", "0.000000000001"):
        ready.do("PUT", "/limits/key:web/exact", {"unit": "usd", "capacity": digits})
        assert ready.get("/limits/key:web/exact")["capacity"] == digits
    raw = b'{"unit":"usd","capacity":0.1000000000000000055511151231257827}'
    assert ready.request("PUT", "/limits/key:web/exact", raw=raw).status == 422
    raw = b'{"unit":"usd","capacity":0.3}'
    assert ready.request("PUT", "/limits/key:web/exact", raw=raw).json["capacity"] == "0.3"


PATHS = [
    ("/keys/%00", 400), ("/keys/%01", 400), ("/keys/%ff", 400), ("/keys/%7f", 400), ("/subjects/user:%0a", 400),
    ("/keys/9223372036854775808", 404), ("/keys/" + "9" * 64, 422), ("/keys/" + "9" * 3000, 422),
    ("/keys/WEB", 422), ("/subjects/nocolon", 422), ("/subjects/user:" + "x" * 300, 422), ("/reservations/7", 422),
    ("/reservations/9223372036854775808", 422), ("/reservations/01890a5d-ac96-774b-bcce-b302099a8057", 404),
    ("/keys/web/", 404), ("//keys", 404), ("/keys//web", 404), ("/nothing", 404), ("/limits/user:*/x", 404),
    ("/subjects/user:%C3%A9", 404), ("/subjects/user:a%2Fb", 404),
]  # fmt: skip


@pytest.mark.parametrize(("path", "status"), PATHS)
def test_paths(ready: Api, path: str, status: int) -> None:
    answer = ready.request("GET", path)
    assert answer.status == status, answer.body
    assert answer.problem


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("keys/web", 200), ("oauth-connections/%00", 400), ("oauth-connections/a%1fb", 400),
        ("oauth-connections/%ff", 400),
    ],
)  # fmt: skip
def test_paths_in_absolute_form(ready: Api, path: str, status: int) -> None:
    """As proxies are asked; the path has the same rules."""
    answer = ready.request("GET", path, path_prefix=f"http://127.0.0.1:{ready.server.port}/v1/")
    assert answer.status == status, answer.body


QUERIES = [
    ("limit=0", 422), ("limit=1001", 422), ("limit=-1", 422), ("limit=1.0", 422), ("limit=9223372036854775808", 422),
    ("limit=" + "9" * 3500, 422), ("limit=%EF%BC%91", 422), ("limit=1&limit=2", 422), ("limit", 422),
    ("nonsense=1", 422),
    ("after=x", 422), ("after=WyJhIl0x", 422), ("after=W10", 422), ("after=bnVsbA", 422), ("after=%00", 400),
    ("search=%ff", 400), ("search=%01", 400), ("search=" + "x" * 201, 422), ("state=nonsense", 422), ("search=%", 200),
    ("after=WzFd", 422), ("search=%F0%9F%98%80", 200), ("limit=5", 200), ("after=WyJcdTAwMDAiXQ", 422),
]  # fmt: skip


@pytest.mark.parametrize(("query", "status"), QUERIES)
def test_queries(ready: Api, query: str, status: int) -> None:
    answer = ready.request("GET", f"/keys?{query}")
    assert answer.status == status, answer.body


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("since=yesterday", 422), ("since=2026-01-01", 422), ("since=2026-01-01T00:00:00", 422),
        ("time_zone=Mars", 422),
        ("since=0001-01-01T00:00:00%2B14:00", 422), ("until=9999-12-31T23:59:59-14:00", 422), ("span=year", 422),
        ("since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", 422), ("span=hour&since=1990-01-01T00:00:00Z", 422),
        ("until=0001-01-02T00:00:00Z", 422), ("subject=org:nobody", 404), ("unit=nothing", 200),
        ("time_zone=Europe/Berlin", 200), ("time_zone=%2B5:30", 200), ("by_spender=maybe", 422),
    ],
)  # fmt: skip
def test_usage_queries(ready: Api, query: str, status: int) -> None:
    answer = ready.request("GET", f"/usage?{query}")
    assert answer.status == status, answer.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Idempotency-Key": ""}, 400), ({"Idempotency-Key": "x" * 201}, 400), ({"Idempotency-Key": "a b"}, 400),
        ({"Idempotency-Key": "\xe9"}, 400), ({"If-Match": "nonsense"}, 400), ({"If-Match": '"nonsense"'}, 412),
        ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Quota-Tenant": "\xff"}, 400), ({"Expect": "100-continue"}, 200), ({"X-Request-Id": "a\tb" * 50}, 200),
    ],
)  # fmt: skip
def test_headers(ready: Api, headers: dict[str, str], status: int) -> None:
    answer = ready.request("PATCH", "/keys/web", {"name": "x"}, headers=headers)
    assert answer.status == status, answer.body


def test_names_that_are_none(ready: Api) -> None:
    for name in ("", " x", "x ", "a\u200bb", "a\u0301", "x" * 201, "\u202ex", "a\nb"):
        assert ready.request("POST", "/keys", {"name": name}).status == 422, ascii(name)
        assert ready.request("PATCH", "/keys/web", {"name": name}).status == 422, ascii(name)
    assert ready.request("PATCH", "/keys/web", {"name": None}).status == 422
    assert ready.request("PATCH", "/keys/web", {"rate_tier": None}).status == 422
    for identity in ("", "A", "a_b", "-a", "a" * 64, "\u00e9", "a/b"):
        assert ready.request("POST", "/keys", {"name": "x", "id": identity}).status == 422, identity
    assert ready.request("POST", "/keys", {"name": "\u0417\u0434\u0440\u0430\u0432\u043e \U0001f511"}).status == 201


def test_lists_are_walked_past_every_name(ready: Api) -> None:
    """Names may hold spaces of every kind, and characters that no font has."""
    names = [f"user:{one}" for one in ("a\u00a0b", "a\u3000b", "a\u2028b", "a\ue000b", "a'\"\\b", "\U0001f511")]
    for name in names:
        ready.do("POST", "/subjects", {"name": name})
    seen, after = [], ""
    while True:
        page = ready.get(f"/subjects?kind=user&limit=1{after}")
        seen += [one["name"] for one in page["items"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert sorted(seen) == sorted([*names, "user:7"])


def test_ids_at_the_edges_are_listed(ready: Api) -> None:
    ids = [f"{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "f0"]
    for identity in ids:
        ready.do("POST", "/reservations", {"subject": "key:web", "costs": {"usd": "1"}, "id": identity}, role="worker")
    first = ready.get("/reservations?limit=1")
    last = ready.get(f"/reservations?limit=1&after={first['next']}")
    assert [one["reservation"] for one in first["items"] + last["items"]] == ids
    assert last["next"] is None


def test_a_tier_names_each_limit_once(ready: Api) -> None:
    limits = [{"name": "a", "unit": "usd", "capacity": capacity} for capacity in ("1", "2")]
    assert ready.request("POST", "/tiers", {"name": "twice", "limits": limits}).problem == "invalid_argument"
    assert ready.request("GET", "/tiers/twice").status == 404


def test_a_location_leads_to_what_was_made(ready: Api) -> None:
    for name in ("user:a/b", "user:a?b", "user:a#b", "user:50%", "user:\uae40 \u00fc"):
        made = ready.request("POST", "/subjects", {"name": name})
        assert ready.get(made.headers["Location"].removeprefix("/v1"))["name"] == name


def test_details_may_be_anything_that_can_be_kept(ready: Api) -> None:
    body = {"subject": "key:web", "costs": {"usd": "1"}, "details": {"a": [1, {"b": None}], "c": "\u00e9\n", "d": 0.5}}
    made = ready.do("POST", "/reservations", body, role="worker")
    assert ready.get(f"/reservations/{made['reservation']}")["details"] == {
        "a": ["1", {"b": None}], "c": "\u00e9\n", "d": "0.5",
    }  # fmt: skip


def test_methods_that_are_not_there(ready: Api) -> None:
    answer = ready.request("DELETE", "/keys/web")
    assert (answer.status, answer.problem) == (405, "method_not_allowed")
    assert set(answer.headers["Allow"].split(", ")) >= {"GET", "PATCH"}
    assert ready.request("TRACE", "/keys").status in (405, 501)
    assert ready.request("POST", "/checks", {"x": 1}).status == 422
