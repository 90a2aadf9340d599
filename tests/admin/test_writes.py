"""Writes: once, on the version that was meant, logged with who asked; and what operators do to reservations."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.admin.conftest import Api
from tests.server import Connection
from tests.web import Answer


def test_a_repeated_request_is_done_once_and_answered_again(api: Api, db: Connection) -> None:
    body = {"name": "Web"}
    for header in ("one-key", '"one-key"'):  # quoted or bare, it is the same key
        answer = api.request("POST", "/keys", body, headers={"Idempotency-Key": header})
        assert answer.status == 201
        if header == "one-key":
            first = answer
    again = answer
    assert again.headers["Idempotency-Replayed"] == "true"
    assert {**first.json, "secret": None} == {**again.json, "secret": None}
    assert "secret" in first.json
    assert "secret" not in again.json
    assert again.headers["Location"] == first.headers["Location"]
    assert again.headers["ETag"] == first.headers["ETag"]
    assert len(api.get("/keys")["items"]) == 1
    # No secret is kept for the answer.
    assert db.execute(
        "SELECT count(*) FROM quota_internal.api_requests WHERE answer LIKE '%%' || %s || '%%'", (first.json["secret"],)
    ).fetchone() == (0,)


def test_the_key_belongs_to_one_request(api: Api) -> None:
    headers = {"Idempotency-Key": "k1"}
    api.do("POST", "/keys", {"name": "a"}, headers=headers)
    for method, path, body in (("POST", "/keys", {"name": "b"}), ("POST", "/subjects", {"name": "user:1"})):
        answer = api.request(method, path, body, headers=headers)
        assert (answer.status, answer.problem) == (422, "idempotency_key_reused")
    # Another token's key is another key.
    assert api.request("POST", "/keys", {"name": "b"}, role="operator", headers=headers).status == 201
    # What failed did nothing, so the key is free.
    headers = {"Idempotency-Key": "k2"}
    assert api.request("POST", "/subjects", {"name": "user:1", "parent": "org:none"}, headers=headers).status == 404
    assert api.request("POST", "/subjects", {"name": "user:1"}, headers=headers).status == 201


def test_many_at_once_with_one_key(api: Api) -> None:
    barrier = threading.Barrier(8)

    def one(_: int) -> Answer:
        barrier.wait()
        return api.request("POST", "/keys", {"name": "x"}, headers={"Idempotency-Key": "same"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert {answer.status for answer in answers} == {201}
    assert len({answer.json["id"] for answer in answers}) == 1
    assert sum("secret" in answer.json for answer in answers) == 1
    assert len(api.get("/keys")["items"]) == 1


def test_a_stale_version_is_refused(api: Api) -> None:
    api.do("POST", "/keys", {"name": "a", "id": "k"})
    first = api.request("GET", "/keys/k").headers["ETag"]
    changed = api.request("PATCH", "/keys/k", {"name": "b"}, headers={"If-Match": first})
    assert changed.status == 200
    assert changed.headers["ETag"] == api.request("GET", "/keys/k").headers["ETag"] != first
    stale = api.request("PATCH", "/keys/k", {"name": "c"}, headers={"If-Match": first})
    assert (stale.status, stale.problem) == (412, "stale")
    assert api.get("/keys/k")["name"] == "b"
    for header in ("*", f'"x", {changed.headers["ETag"]}', f"W/{changed.headers['ETag']}"):
        assert api.request("PATCH", "/keys/k", {"name": "b"}, headers={"If-Match": header}).status in (200, 412), header
    assert api.request("POST", "/keys", {"name": "x"}, headers={"If-Match": "*"}).status == 412


def test_a_condition_is_never_passed_over(api: Api) -> None:
    """What a worker changes has no version: a request that names one is refused, not done all the same."""
    budget(api)
    made = api.do("POST", "/reservations", {"subject": "key:w", "costs": {"usd": "4"}}, "worker")["reservation"]
    place = f"/reservations/{made}"
    for path, body in (
        ("/reservations", {"subject": "key:w", "costs": {"usd": "1"}}),
        ("/usage-records", {"subject": "key:w", "costs": {"usd": "1"}}),
        (f"{place}/adjust", {"costs": {"usd": "5"}}), (f"{place}/extend", {"ttl_s": 3600}), (f"{place}/settle", {}),
        (f"{place}/release", {}),
    ):  # fmt: skip
        answer = api.request("POST", path, body, "worker", headers={"If-Match": '"x"'})
        assert (answer.status, answer.problem) == (412, "stale"), path
    assert api.get(place)["state"] == "held"
    assert [one["reservation"] for one in api.get("/reservations")["items"]] == [made]


def test_of_many_with_one_version_one_wins(api: Api) -> None:
    api.do("POST", "/keys", {"name": "a", "id": "k"})
    tag = api.request("GET", "/keys/k").headers["ETag"]
    barrier = threading.Barrier(6)

    def one(number: int) -> int:
        barrier.wait()
        return api.request("PATCH", "/keys/k", {"name": f"n{number}"}, headers={"If-Match": tag}).status

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(one, range(6))) == [200] + [412] * 5


def test_every_write_is_logged_with_who_asked(api: Api) -> None:
    token = api.get("/tokens")["items"]
    owner = next(one["id"] for one in token if one["role"] == "owner")
    answer = api.request("POST", "/subjects", {"name": "org:a"}, headers={"X-Request-Id": "trace-1"})
    assert answer.headers["X-Request-Id"] == "trace-1"
    api.do("POST", "/subjects/org:a/freeze", {"reason": "runaway"})
    newest, first = api.get("/log?limit=2")["items"]
    assert (newest["action"], newest["target"], newest["reason"]) == ("freeze", "org:a", "runaway")
    assert (first["action"], first["on_behalf_of"], first["request_id"]) == (
        "create_subject", f"token:{owner}", "trace-1",
    )  # fmt: skip
    assert newest["before"] == {"frozen": None}
    assert newest["after"] == {"frozen": "runaway"}
    bad = api.request("GET", "/keys", headers={"X-Request-Id": 'x" onload=1'})
    assert re.fullmatch(r"[0-9a-f]{32}", bad.headers["X-Request-Id"])


def test_a_change_of_several_things_is_one(api: Api) -> None:
    api.do("POST", "/keys", {"name": "a", "id": "k"})
    before = len(api.get("/log")["items"])
    answer = api.request("PATCH", "/keys/k", {"name": "b", "rate_tier": "platinum"})
    assert answer.problem == "unknown_tier"
    assert api.get("/keys/k")["name"] == "a"
    assert len(api.get("/log")["items"]) == before


# -- reservations ---------------------------------------------------------------------------------------------------


def budget(api: Api, capacity: str = "10") -> None:
    api.do("POST", "/subjects", {"name": "key:w"})
    api.do("PUT", "/limits/key:w/cap", {"unit": "usd", "capacity": capacity})


def test_a_worker_without_a_database_login(api: Api) -> None:
    budget(api)
    made = api.request("POST", "/reservations", {"subject": "key:w", "costs": {"usd": "4"}, "ttl_s": 60}, "worker")
    assert made.status == 201
    place = f"/reservations/{made.json['reservation']}"
    assert made.json["remaining"][0]["available"] == "6"
    assert api.request("POST", f"{place}/adjust", {"costs": {"usd": "5"}}, "worker").status == 200
    assert api.do("POST", f"{place}/extend", {"ttl_s": 600}, "worker")["expires_at"] > made.json["expires_at"]
    partial = api.do("POST", f"{place}/settle", {"costs": {"usd": "1"}, "final": False}, "worker")
    assert partial["state"] == "held"
    done = api.do("POST", f"{place}/settle", {"costs": {"usd": "6"}}, "worker")
    assert (done["state"], done["overage"]) == ("settled", {"usd": "1"})
    assert api.do("POST", f"{place}/settle", {"costs": {"usd": "6"}}, "worker")["replayed"] is True
    assert api.request("POST", f"{place}/settle", {"costs": {"usd": "7"}}, "worker").problem == "already_settled"
    assert api.request("POST", f"{place}/release", {}, "worker").problem == "already_settled"
    assert api.get(place)["booked"] == {"usd": "6"}


def test_refusals_have_their_status_and_their_numbers(api: Api) -> None:
    budget(api)
    api.do("PUT", "/limits/key:w/rate", {"unit": "requests", "kind": "bucket", "capacity": "1", "refill_per_s": "0.01"})
    api.do("PUT", "/limits/key:w/slots", {"unit": "tokens", "capacity": "10", "period": "1 hour"})

    def ask(costs: dict[str, str], **more: object) -> Answer:
        return api.request("POST", "/reservations", {"subject": "key:w", "costs": costs, **more}, "worker")

    large = ask({"usd": "11"})
    assert (large.status, large.problem, large.headers["Retry-After"]) == (422, "refused_too_large", None)
    held = ask({"usd": "6"}, id="01890a5d-ac96-774b-bcce-b302099a8051")
    assert held.status == 201
    rate = ask({"usd": "1"})
    assert (rate.status, rate.problem) == (429, "refused_rate")
    assert 90 <= int(rate.headers["Retry-After"]) <= 101
    assert rate.json["retry_after"] == int(rate.headers["Retry-After"])
    assert rate.json["violated-policies"] == ["rate"]
    assert rate.headers["Cache-Control"] == "no-store"
    busy = ask({"usd": "5", "requests": "0"})
    assert (busy.status, busy.problem, busy.headers["Retry-After"]) == (429, "refused_held", "1")
    assert (busy.json["capacity"], busy.json["spent"], busy.json["reserved"], busy.json["requested"]) == (
        "10", "0", "6", "5",
    )  # fmt: skip
    api.do("POST", "/usage-records", {"subject": "key:w", "costs": {"usd": "9", "tokens": "10"}}, "worker")
    spent = ask({"usd": "5", "requests": "0"})
    assert (spent.status, spent.problem, spent.headers["Retry-After"]) == (402, "refused_exhausted", None)
    windowed = ask({"tokens": "5", "requests": "0"})
    assert (windowed.status, windowed.problem) == (429, "refused_exhausted")
    assert 3500 < int(windowed.headers["Retry-After"]) <= 3600
    api.do("POST", "/subjects/key:w/freeze", {"reason": "test"})
    assert (ask({"tokens": "0"}).status, ask({"tokens": "0"}).problem) == (403, "refused_frozen")
    identity = "01890a5d-ac96-774b-bcce-b302099a8051"
    api.do("POST", f"/reservations/{identity}/release", {}, "worker")
    closed = ask({"usd": "6"}, id=identity)
    assert (closed.status, closed.problem, closed.json["state"]) == (409, "refused_closed", "released")


def test_reservations_tell_of_their_limits_in_headers(api: Api) -> None:
    api.do("POST", "/subjects", {"name": "org:acme"})
    api.do("POST", "/keys", {"name": "k", "id": "w", "parent": "org:acme"})
    api.do("PUT", "/limits/key:w/money", {"unit": "usd", "capacity": "10"})
    api.do("PUT", "/limits/org:acme/monthly", {"unit": "cost", "capacity": "5000000", "period": "1 hour"})

    def ask(**costs: str) -> Answer:
        return api.request("POST", "/reservations", {"subject": "key:w", "costs": costs}, "worker")

    policy = (
        '"bucket";q=1000000;qu="credits";w=334, "hourly";q=2000000;qu="credits";w=3600, '
        '"org-monthly";q=5000000;qu="credits";w=3600'
    )
    granted = ask(cost="300", usd="1")
    assert granted.status == 201
    assert granted.headers["RateLimit-Policy"] == policy
    bucket, hourly, monthly = granted.headers["RateLimit"].split(", ")
    assert re.fullmatch(r'"bucket";r=(1000000|999\d{3};t=1)', bucket)
    assert re.fullmatch(r'"hourly";r=1999700;t=3[56]\d\d', hourly)
    assert re.fullmatch(r'"org-monthly";r=4999700;t=3[56]\d\d', monthly)
    assert granted.headers["Quota-Bucket-Full-After"] in ("0", "1")

    api.do("POST", "/usage-records", {"subject": "key:w", "costs": {"cost": "1500000"}}, "worker")
    refused = ask(cost="600000")  # more than the hour has left, and than the bucket, which is empty
    assert (refused.status, refused.headers["RateLimit-Policy"]) == (429, policy)
    told = re.fullmatch(r'"bucket";r=\d+;t=(\d+), "hourly";r=499700;t=(\d+)', refused.headers["RateLimit"])
    assert told is not None
    assert max(map(int, told.groups())) == int(refused.headers["Retry-After"])
    assert refused.json["violated-policies"] == ["bucket", "hourly"]
    # Where waiting does not help, or money is the matter, there is nothing to tell.
    for costs, status in (({"cost": "9000000"}, 422), ({"usd": "10"}, 429), ({"usd": "11"}, 422)):
        answer = ask(**costs)
        assert answer.status == status
        assert answer.headers["RateLimit"] is None
        assert answer.headers["RateLimit-Policy"] is None


def test_an_idempotency_key_is_a_reservations_id(api: Api) -> None:
    budget(api)
    headers = {"Idempotency-Key": "job-7"}
    body = {"subject": "key:w", "costs": {"usd": "4"}}
    first = api.request("POST", "/reservations", body, "worker", headers=headers)
    again = api.request("POST", "/reservations", body, "worker", headers=headers)
    assert (first.status, again.status, again.json["replayed"]) == (201, 200, True)
    assert first.json["reservation"] == again.json["reservation"]
    other = api.request("POST", "/reservations", {**body, "costs": {"usd": "5"}}, "worker", headers=headers)
    assert (other.status, other.problem) == (422, "idempotency_key_reused")
    named = {**body, "id": first.json["reservation"], "costs": {"usd": "5"}}
    assert api.request("POST", "/reservations", named, "worker").problem == "id_conflict"


def test_an_operator_clears_up_and_says_why(api: Api) -> None:
    budget(api)
    places = []
    for _ in range(2):
        made = api.do("POST", "/reservations", {"subject": "key:w", "costs": {"usd": "4"}}, "worker")
        places.append(f"/reservations/{made['reservation']}")
    for act in ("settle", "release"):
        assert api.request("POST", f"{places[0]}/{act}", {}, "operator").status == 422
        assert api.request("POST", f"{places[0]}/{act}", {"reason": "x"}, "worker").status == 422
        assert api.request("POST", f"{places[0]}/{act}", {"reason": "x"}, "viewer").status == 403
    api.do("POST", f"{places[0]}/release", {"reason": "worker gone"}, "operator")
    api.do("POST", f"{places[1]}/settle", {"costs": {"usd": "3"}, "reason": "cost known"}, "operator")
    logged = {line["action"]: line["reason"] for line in api.get("/log")["items"]}
    assert logged["operator_release"] == "worker gone"
    assert logged["operator_settle"] == "cost known"
    assert [one["state"] for one in api.get("/reservations?subject=key:w")["items"]] == ["settled", "released"]
    assert api.get("/reservations?state=held")["items"] == []


def test_tiers(api: Api) -> None:
    gold = {"name": "gold", "limits": [{"name": "hourly", "unit": "cost", "capacity": "500", "period": "1 hour"}]}
    api.do("POST", "/tiers", gold)
    assert api.request("POST", "/tiers", gold).problem == "already_exists"
    api.do("POST", "/keys", {"name": "k", "id": "k", "rate_tier": "gold"})

    def capacity() -> str:
        found = {row["limit_name"]: row["capacity"] for row in api.get("/subjects/key:k/balance")["items"]}
        return str(found["hourly"])

    assert capacity() == "500"
    changed = {"unit": "cost", "capacity": "700", "period": "1 hour"}
    api.do("PUT", "/tiers/gold/limits/hourly", changed)
    assert capacity() == "700"
    assert api.request("PUT", "/tiers/gold/limits/hourly", {"unit": "usd", "capacity": "7"}).problem == "limit_differs"
    assert api.request("PUT", "/tiers/none/limits/hourly", changed).status == 404
    assert api.do("POST", "/tiers/gold/retire", {})["retired"] is True
    assert capacity() == "2000000"  # its keys act as basic
    assert api.request("PATCH", "/keys/k", {"rate_tier": "gold"}).problem == "unknown_tier"
    assert {tier["name"] for tier in api.get("/tiers")["items"]} == {"basic", "extended", "bulk", "gold"}
    assert api.get("/keys/k")["rate_tier"] == "gold"


def test_subjects_and_their_tree(api: Api) -> None:
    for name, parent in (("org:a", None), ("user:a/b", "org:a"), ("org:b", None)):
        api.do("POST", "/subjects", {"name": name, "parent": parent})
    assert api.get("/subjects/user:a%2Fb")["lineage"] == ["user:a/b", "org:a"]
    assert [one["name"] for one in api.get("/subjects?below=org:a")["items"]] == ["org:a", "user:a/b"]
    assert api.do("PATCH", "/subjects/user:a%2Fb", {"parent": "org:b"})["parent"] == "org:b"
    assert api.request("PATCH", "/subjects/org:b", {"parent": "user:a/b"}).problem == "cycle"
    api.do("POST", "/subjects/org:b/freeze", {"reason": "x"})
    assert [one["name"] for one in api.get("/subjects?frozen=true")["items"]] == ["org:b"]
    assert api.do("POST", "/subjects/org:b/unfreeze")["frozen"] is None
    assert api.do("POST", "/subjects/org:b/retire", {"reason": "gone"})["retired"] is True
    assert [one["name"] for one in api.get("/subjects")["items"]] == ["org:a"]
    connection = api.do("POST", "/oauth-connections", {"id": "conn", "parent": "org:a"})
    assert (connection["subject"], connection["rate_tier"]) == ("oauth:conn", "basic")
    assert api.do("POST", "/oauth-connections", {"id": "conn"}) == connection  # a refreshed token is the same one
    assert api.request("POST", "/keys/set-tier", {"ids": ["conn"], "rate_tier": "bulk"}).status == 404
