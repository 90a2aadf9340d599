"""Real applications behind the real proxy, FastAPI and Flask, for callers with keys and with access tokens."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.conftest import Key, Proxy, make_key, settled, start, stop
from tests.gateway.test_oauth import AUDIENCE, ISSUER, KEYS, token
from tests.server import Connection
from tests.web import Answer

CONFIG = """
upstream = "{upstream}"

[oauth]
issuer = "{issuer}"
audience = "{audience}"
jwks_file = "jwks.json"
user_claim = "sub"

[[routes]]
path = "/v1/rows/<table>"
estimate = {{ page_limit = 300 }}

[[routes]]
path = "/v1/current"
estimate = {{ through_nodes = {{ id_count = "ids" }}, calls = 1 }}

[[routes]]
path = "/v1/broken"
failure_charge = 7

[[routes]]
path = "/<path:rest>"
"""

APPS = {
    "fastapi": ["-m", "uvicorn", "--log-level", "error", "tests.gateway.apps:app", "--fd"],
    "flask": ["-m", "gunicorn", "-k", "gthread", "--threads", "4", "quota.gateway.sample:create_app()", "--bind"],
}


@contextlib.contextmanager
def running(framework: str) -> Iterator[str]:
    """Runs an application; yields its origin."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        number = listener.fileno()
        command = [sys.executable, *APPS[framework], str(number) if framework == "fastapi" else f"fd://{number}"]
        with subprocess.Popen(
            command, cwd=Path(__file__).parents[2], pass_fds=[number], env=dict(os.environ),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                process.terminate()


@pytest.fixture(scope="module", params=APPS)
def proxy(
    request: pytest.FixtureRequest, gateway_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """The gateway in front of each."""
    folder = tmp_path_factory.mktemp("upstreams")
    (folder / "jwks.json").write_text(json.dumps({"keys": KEYS}))
    with running(request.param) as upstream:
        config = CONFIG.format(upstream=upstream, issuer=ISSUER, audience=AUDIENCE)
        gateway = start(folder, config, gateway_database)
        yield gateway
        assert stop(gateway) == 0


def get(proxy: Proxy, target: str, secret: str) -> Answer:
    return proxy.request("GET", target, headers={"Authorization": f"Bearer {secret}"})


def test_rows_are_what_an_answer_costs(proxy: Proxy, db: Connection, key: Key) -> None:
    """Held: the limit, or the page where it makes no sense. Settled: the rows that came, whatever the total is."""
    for query, rows in (("", 300), ("?limit=40", 40), ("?limit=100000", 300)):
        answer = get(proxy, f"/v1/rows/orders{query}", key.secret)
        assert answer.status == 200
        assert (len(answer.json["rows"]), answer.json["total"]) == (rows, 10_000)
        assert answer.headers["X-Agent-Cost"] is None
        assert answer.headers["RateLimit"].startswith('"bucket";r=')
    assert settled(db, key) == [("settled", 300, "ok"), ("settled", 40, "ok"), ("settled", 300, "ok")]


def test_an_exception_in_the_application(proxy: Proxy, db: Connection, key: Key) -> None:
    assert get(proxy, "/v1/broken", key.secret).status == 500
    assert settled(db, key) == [("settled", 7, "error")]


def test_what_one_framework_has(proxy: Proxy, db: Connection, key: Key, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["proxy"] == "flask":
        assert get(proxy, "/v1/current?ids=a,b,c", key.secret).status == 200
        assert get(proxy, "/v1/series?ids=x.a,x.b,y.c&limit=100", key.secret).status == 200
        assert get(proxy, "/v1/rows/events", key.secret).json["rows"] == []
        assert [cost for _, cost, _ in settled(db, key)] == [4, 140, 0]
        return
    body = json.dumps(["a", "b", "c"]).encode()
    posted = proxy.request("POST", "/v1/current", body, {**key.headers, "Content-Type": "application/json"})
    assert posted.json == {"rows": ["a", "b", "c"]}
    assert get(proxy, "/v1/flow", key.secret).body == b"".join(f"{number}\n".encode() for number in range(40))
    assert get(proxy, "/v1/silent", key.secret).status == 200
    assert get(proxy, "/v1/who", key.secret).json["subject"] == key.subject
    assert [cost for _, cost, _ in settled(db, key)] == [4, 40, 1, 0]
    assert "cost_header_missing" in proxy.log.read_text()


# -- access tokens --------------------------------------------------------------------------------------------------


def test_a_refreshed_token_keeps_the_budget(proxy: Proxy, db: Connection) -> None:
    """Two tokens of one connection spend from one bucket, a third of another connection from its own; all are basic."""
    connection = Key(f"oauth:{proxy.port}-a", "")
    sid = connection.subject.removeprefix("oauth:")
    for number in range(2):
        refreshed = token(sid=sid, jti=str(number), sub="ann", exp=int(time.time()) + 600 + number)
        answer = get(proxy, "/v1/rows/orders?limit=10", refreshed)
        assert answer.status == 200
        assert answer.headers["RateLimit-Policy"].startswith('"bucket";q=1000000;')
    get(proxy, "/v1/rows/orders?limit=5", token(sid=f"{sid}-other", sub="ann"))
    assert settled(db, connection) == [("settled", 10, "ok")] * 2
    assert settled(db, Key(f"{connection.subject}-other", "")) == [("settled", 5, "ok")]
    rows = db.execute("SELECT parent, rate_tier FROM quota.subjects WHERE name LIKE %s", (f"{connection.subject}%",))
    assert rows.fetchall() == [("user:ann", "basic")] * 2
    hour = "SELECT spent FROM quota.balance(%s) WHERE limit_name = 'hourly'"
    assert db.execute(hour.encode(), (connection.subject,)).fetchone() == (20,)


def test_a_key_of_the_same_name_is_somebody_else(proxy: Proxy, db: Connection, gateway_database: str) -> None:
    key = make_key(gateway_database)
    name = key.subject.removeprefix("key:")
    get(proxy, "/v1/rows/orders?limit=10", token(sid=name))
    get(proxy, "/v1/rows/orders?limit=20", key.secret)
    assert settled(db, key) == [("settled", 20, "ok")]
    assert settled(db, Key(f"oauth:{name}", "")) == [("settled", 10, "ok")]


def test_one_credential_and_a_good_one(proxy: Proxy, db: Connection, key: Key) -> None:
    both = proxy.request(
        "GET", "/v1/rows/orders", headers={"X-Api-Key": key.secret, "Authorization": f"Bearer {token()}"}
    )
    assert (both.status, both.problem) == (400, "ambiguous_credentials")
    expired = get(proxy, "/v1/rows/orders", token(exp=1))
    assert (expired.status, expired.problem) == (401, "unauthenticated")
    assert 'error="invalid_token"' in expired.headers["WWW-Authenticate"]
    db.execute("SELECT quota.ensure_subject('oauth:frozen')")
    db.execute("SELECT quota.freeze('oauth:frozen', 'test')")
    assert get(proxy, "/v1/rows/orders", token(sid="frozen")).status == 403
    assert settled(db, key) == []
