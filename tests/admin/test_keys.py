"""Keys over HTTP: from their making to their end, and what SQL workers notice of it."""

from __future__ import annotations

import time
from decimal import Decimal

from tests.admin.conftest import CACHE_S, WORKERS, Api
from tests.server import Connection


def balance(db: Connection, api: Api, subject: str, limit: str) -> tuple[Decimal, ...]:
    row = db.execute(
        "SELECT capacity, coalesce(level, spent), reserved FROM quota.balance(%s, %s) WHERE limit_name = %s",
        (subject, api.tenant, limit),
    ).fetchone()
    assert row is not None
    return row


def test_a_key_from_its_making_to_its_end(api: Api, db: Connection) -> None:
    api.do("POST", "/subjects", {"name": "org:acme"})
    made = api.request("POST", "/keys", {"name": "Web shop", "id": "web", "parent": "org:acme"}, role="operator")
    assert made.status == 201
    assert made.headers["Location"] == "/v1/keys/web"
    secret = made.json["secret"]
    assert secret.startswith("qk_web_")
    shown = api.get("/keys/web", role="viewer")
    assert (shown["subject"], shown["parent"], shown["rate_tier"], shown["state"]) == (
        "key:web", "org:acme", "basic", "active",
    )  # fmt: skip
    assert "secret" not in shown

    # It reserves through SQL as itself; another tier keeps what is used, with the new numbers at once.
    reserve = "SELECT granted FROM quota.reserve('key:web', '{\"cost\": 300}', tenant => %s)"
    assert db.execute(reserve, (api.tenant,)).fetchone() == (True,)
    assert api.do("PATCH", "/keys/web", {"rate_tier": "bulk", "name": "Shop"})["rate_tier"] == "bulk"
    assert balance(db, api, "key:web", "hourly") == (Decimal(40000000), Decimal(0), Decimal(300))

    assert [key["id"] for key in api.get("/keys?search=SHOP")["items"]] == ["web"]
    assert api.get("/keys?tier=basic")["items"] == []
    ended = api.do("POST", "/keys/web/revoke", {"reason": "leaked"})
    assert (ended["state"], ended["frozen"]) == ("revoked", "leaked")
    row = db.execute(
        "SELECT granted, reason FROM quota.reserve('key:web', '{\"cost\": 1}', tenant => %s)", (api.tenant,)
    )
    assert row.fetchone() == (False, "frozen")
    assert api.request("POST", "/keys/web/rotate", {}).problem == "revoked"
    # Once more is no error, and no second line in the log.
    api.do("POST", "/keys/web/revoke", {"reason": "again"})
    revoked = [line for line in api.get("/log?action=revoke_key")["items"] if line["target"] == "key:web"]
    assert [line["reason"] for line in revoked] == ["leaked"]


def test_a_key_for_a_subject_that_workers_know_already(api: Api, db: Connection) -> None:
    db.execute("SELECT quota.create_subject('key:42', rate_tier => 'extended', tenant => %s)", (api.tenant,))
    made = api.do("POST", "/keys", {"name": "Old one", "id": "42"})
    assert made["rate_tier"] == "extended"
    assert api.request("POST", "/keys", {"name": "Twice", "id": "42"}).problem == "already_exists"


def test_a_rotation_keeps_the_old_secret_for_the_overlap(api: Api) -> None:
    old = api.do("POST", "/keys", {"name": "k", "id": "rot"})["secret"]
    new = api.do("POST", "/keys/rot/rotate", {"overlap_s": 3600})["secret"]
    for secret in (old, new):
        assert api.do("POST", "/keys/verify", {"secret": secret}, role="worker")["valid"] is True
    # Without an overlap the ones before end at once, as soon as no cache remembers them.
    newest = api.do("POST", "/keys/rot/rotate", {})["secret"]
    time.sleep(CACHE_S + 0.2)
    found = {secret: api.do("POST", "/keys/verify", {"secret": secret})["valid"] for secret in (old, new, newest)}
    assert found == {old: False, new: False, newest: True}


def test_verify_says_who_and_in_which_state(api: Api, other: Api) -> None:
    secret = api.do("POST", "/keys", {"name": "k", "id": "v", "rate_tier": "bulk"})["secret"]
    found = api.do("POST", "/keys/verify", {"secret": secret}, role="worker")
    assert (found["valid"], found["subject"], found["rate_tier"], found["tenant"]) == (
        True, "key:v", "bulk", api.tenant,
    )  # fmt: skip
    unknown = {"valid": False, "state": "unknown"}
    assert other.do("POST", "/keys/verify", {"secret": secret}) == unknown
    for wrong in (secret[:-1] + "~", secret[:-1], "qk_v_" + "A" * 43, "qk_none_" + "A" * 43, "x", "é", "key:v"):
        assert api.do("POST", "/keys/verify", {"secret": wrong}) == unknown


def test_an_expired_key_lets_nobody_in(api: Api) -> None:
    made = api.do("POST", "/keys", {"name": "k", "id": "e", "expires_at": "2020-01-01T00:00:00Z"})
    assert made["state"] == "expired"
    assert api.do("POST", "/keys/verify", {"secret": made["secret"]})["state"] == "expired"
    assert api.do("PATCH", "/keys/e", {"expires_at": None})["state"] == "active"


def test_revocation_is_effective_everywhere_within_the_bound(api: Api) -> None:
    secret = api.do("POST", "/keys", {"name": "k", "id": "c"})["secret"]

    def seen() -> set[bool]:
        """What the workers say; enough requests that each of them is asked."""
        return {api.do("POST", "/keys/verify", {"secret": secret})["valid"] for _ in range(WORKERS * 6)}

    assert seen() == {True}
    api.do("POST", "/keys/c/revoke", {"reason": "test"})
    time.sleep(CACHE_S + 0.1)
    assert seen() == {False}


def test_a_thousand_keys_in_one_call_or_none(api: Api, db: Connection) -> None:
    db.execute(
        "SELECT quota.create_key('k' || n, 'key ' || n, sha256(n::text::bytea), tenant => %s)"
        " FROM generate_series(1, 1000) n",
        (api.tenant,),
    )
    ids = [f"k{n}" for n in range(1, 1001)]
    assert api.request("POST", "/keys/set-tier", {"ids": [*ids[:999], "nobody"], "rate_tier": "bulk"}).status == 404
    assert api.get("/keys?tier=bulk&limit=1")["items"] == []
    api.do("POST", "/keys/set-tier", {"ids": ids, "rate_tier": "bulk"})
    tiers = db.execute(
        "SELECT rate_tier, count(*) FROM quota.keys WHERE tenant = %s GROUP BY 1", (api.tenant,)
    ).fetchall()
    assert tiers == [("bulk", 1000)]
    # The list is walked by its keys, every one once, in order.
    seen: list[str] = []
    path = "/keys?limit=300"
    while path:
        answer = api.request("GET", path)
        seen += [key["id"] for key in answer.json["items"]]
        link = answer.headers["Link"]
        path = link.partition(">")[0].removeprefix("</v1") if link else ""
    assert seen == sorted(ids)
