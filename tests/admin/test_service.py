"""The service itself: brake on guessing, secrets, forks, grace, and a database that is away."""

from __future__ import annotations

import re
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tests.admin.conftest import Api, Server, as_api, make_token, start, stop
from tests.server import Connection, connect


def failed(server: Server, address: str, token: str = "qt_none_" + "A" * 43) -> tuple[int, str | None]:
    answer = server.request("GET", "/keys", token=token, headers={"X-Forwarded-For": address})
    return answer.status, answer.headers["Retry-After"]


def test_guessing_is_slowed_down_by_the_ledgers_own_buckets(api: Api, db: Connection) -> None:
    address = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
    seen = [failed(api.server, address) for _ in range(30)]
    assert seen[:20] == [(401, None)] * 20
    status, wait = seen[-1]
    assert status == 429
    assert wait is not None
    assert 1 <= int(wait) <= 5
    # Another address is not slowed down, and its own tokens go on where they are known.
    assert failed(api.server, "192.0.2.7")[0] == 401
    for _ in range(40):
        api.server.request("GET", "/keys", token=api.tokens["viewer"])
    known = api.server.request("GET", "/keys", token=api.tokens["viewer"], headers={"X-Forwarded-For": address})
    assert known.status in (200, 429)
    row = db.execute(
        "SELECT count(*) FROM quota.balances WHERE tenant = 'quota-api' AND limit_name = 'failed logins' AND level < 1"
    ).fetchone()
    assert row is not None
    assert row[0] >= 1


def test_networks_of_addresses_are_one(api: Api) -> None:
    prefix = f"2001:db8:{secrets.token_hex(2)}:{secrets.token_hex(2)}"
    seen = [failed(api.server, f"{prefix}::{n:x}")[0] for n in range(1, 30)]
    assert seen.count(401) <= 21
    assert seen[-1] == 429


def test_secrets_are_nowhere(api: Api, db: Connection, api_database: str) -> None:
    """Sentinels in every place where a secret is presented; then everything that is written is searched."""
    key = api.do("POST", "/keys", {"name": "s", "id": "sentinel"}, headers={"Idempotency-Key": "sentinel-1"})["secret"]
    token = api.do("POST", "/tokens", {"name": "s", "role": "viewer"})["secret"]
    rotated = api.do("POST", "/keys/sentinel/rotate", {"overlap_s": 60})["secret"]
    parts = [secret.rpartition("_")[2] if "_" not in secret[-43:] else secret[-43:] for secret in (key, token, rotated)]
    bodies = []
    for secret in (key, rotated):
        bodies.append(api.request("POST", "/keys/verify", {"secret": secret}).body)
        bodies.append(api.request("POST", "/keys/verify", {"secret": secret, "x": secret}).body)
        bodies.append(api.request("POST", "/keys", {"name": "x", "id": secret}).body)
        bodies.append(api.request("GET", f"/keys/{secret}").body)
        bodies.append(api.request("GET", f"/keys?nonsense={secret}").body)
        bodies.append(api.request("POST", "/keys", {secret: 1}).body)
        bodies.append(api.server.request("GET", "/keys", token=secret, headers={"X-Forwarded-For": "192.0.2.9"}).body)
    bodies.append(api.server.request("GET", "/keys", token=token).body)
    for path in ("/keys", "/tokens", "/log"):
        bodies.append(api.request("GET", path).body)
    texts = [body.decode() for body in bodies] + [api.server.log.read_text()]
    with connect(api_database) as connection:
        tables = connection.execute(
            "SELECT format('%I.%I', table_schema, table_name) FROM information_schema.tables"
            " WHERE table_schema IN ('quota', 'quota_internal')"
        ).fetchall()
        for (table,) in tables:
            rows = connection.execute(f"SELECT t::text FROM {table} t".encode()).fetchall()
            texts += [str(row[0]) for row in rows]
        texts += [str(row) for row in connection.execute("SELECT query, application_name FROM pg_stat_activity")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(process.read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    for part in parts:
        # What is echoed is the field's name at most; a secret as a member's name or in a path is not repeated either.
        assert not any(part in text for text in texts), part


def test_every_worker_has_connections_of_its_own(api: Api, db: Connection) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: api.get("/keys"), range(64)))
    rows = db.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'quota api' AND datname = current_database()"
    ).fetchall()
    assert len(rows) >= 2
    # Whose they are says the kernel: no socket of the database is open in two processes.
    owners: dict[str, set[str]] = {}
    workers = Path(f"/proc/{api.server.process.pid}/task/{api.server.process.pid}/children").read_text().split()
    assert len(workers) >= 4
    for pid in workers:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:"):
                owners.setdefault(target, set()).add(pid)
    own = {pid for pids in owners.values() if len(pids) == 1 for pid in pids}
    assert len(own) >= 2


def test_a_graceful_stop_finishes_what_has_begun(database: str, tmp_path: Path) -> None:
    server = start(as_api(database), tmp_path, QUOTA_WORKERS="1")
    try:
        with connect(database) as db:
            token = make_token(db, "owner", "default")
            with connect(database, autocommit=False) as holder:
                # The write waits for the tenant's row, which this transaction has.
                holder.execute("SELECT FROM quota_internal.tenants WHERE name = 'default' FOR UPDATE")
                found: list[int] = []
                writer = threading.Thread(
                    target=lambda: found.append(
                        server.request("POST", "/subjects", {"name": "org:late"}, token=token).status
                    )
                )
                writer.start()
                deadline = time.monotonic() + 20
                while not db.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                assert server.process.poll() is None
                holder.rollback()
            writer.join(30)
            assert found == [201]
            assert server.process.wait(45) == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        stop(server)


def test_a_database_that_is_away_is_said_so(admin_dsn: str, tmp_path: Path) -> None:
    server = start("postgresql://nobody@127.0.0.1:1/none", tmp_path, QUOTA_WORKERS="1", QUOTA_TIMEOUT_S="1")
    try:
        assert server.request("GET", "/health/live").status == 200
        ready = server.request("GET", "/health/ready")
        assert (ready.status, ready.problem) == (503, "not_ready")
        answer = server.request("GET", "/keys", token="qt_none_" + "A" * 43)
        assert (answer.status, answer.problem) == (503, "unavailable")
        assert answer.headers["Retry-After"] == "1"
        assert "127.0.0.1" not in answer.body.decode()
    finally:
        stop(server)


def test_security_headers_and_no_cors(api: Api) -> None:
    for path, prefix in (("/keys", "/v1"), ("/nothing", ""), ("/docs", "")):
        answer = api.request("GET", path, path_prefix=prefix, headers={"Origin": "https://evil.example"})
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert (
        api.request("OPTIONS", "/keys", headers={"Origin": "https://evil.example"}).headers.get(
            "Access-Control-Allow-Origin"
        )
        is None
    )


def test_the_log_names_routes_and_tokens_and_nothing_else(api: Api) -> None:
    api.do("POST", "/keys", {"name": "Somebody's name", "id": "loggedkey"})
    api.get("/keys/loggedkey")
    text = api.server.log.read_text()
    assert "/v1/keys/<segment:id>" in text
    assert "loggedkey" not in text
    assert "Somebody" not in text
    assert re.search(r'"token": "[a-z0-9]{16}"', text)


def test_the_role_of_the_api_is_enough_and_not_more(api_database: str) -> None:
    with connect(as_api(api_database)) as connection:
        for statement in (
            "SELECT * FROM quota_internal.api_keys",
            "SELECT quota.bind_login('postgres', 'default')",
            "SELECT * FROM quota.retain()",
            "SELECT * FROM quota.reap()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
