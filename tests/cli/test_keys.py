"""quota key, token and tier: in the database and over HTTP, with the same answers; quota serve and quota up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quota.embedded import stop_server
from tests.admin.conftest import Server, as_api, start, stop
from tests.cli.conftest import QUOTA, Ended, Quota, environment, run_quota, said


@pytest.fixture
def api(database: str, tmp_path: Path) -> Iterator[Server]:
    running = start(as_api(database), tmp_path, QUOTA_WORKERS="1")
    yield running
    stop(running)


def test_the_same_commands_in_the_database_and_over_http(database: str, api: Server) -> None:
    secret = run_quota("token", "create", "ops", "--role", "operator", "--json", url=database).document["secret"]

    def run(remote: bool, *words: str, stdin: str = "") -> Ended:
        where = {"QUOTA_API_URL": f"http://127.0.0.1:{api.port}", "QUOTA_API_TOKEN": secret} if remote else {}
        done = subprocess.run(
            [QUOTA, *words, "--json"], env=environment(None if remote else database, **where), capture_output=True,
            text=True, timeout=120, check=False, input=stdin,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    shown: dict[bool, list[Any]] = {}
    hourly = ("hourly", "--unit", "cost", "--period", "1 hour", "--capacity")
    for remote in (False, True):
        name = "http" if remote else "sql"
        made = run(remote, "key", "create", "Web", "--id", name, "--tier", "bulk").document
        steps = [
            run(remote, "key", "rename", name, "Shop").document,
            run(remote, "key", "expire", name, "--never").document,
            run(remote, "tier", "set", f"key:{name}", "extended").document,
            run(remote, "key", "show", name).document,
            [row for row in run(remote, "key", "list", "--search", "shop").rows if row["id"] == name],
            run(remote, "key", "verify", stdin=made["secret"]).document,
            run(remote, "key", "verify", stdin="nonsense").code,
            run(remote, "tier", "limit", f"gold{name}", *hourly, "5").code,
            run(remote, "tier", "limit", f"gold{name}", *hourly, "6").code,
            [row["capacity"] for row in run(remote, "tier", "list").rows if row["tier"] == f"gold{name}"],
            run(remote, "tier", "retire", f"gold{name}").code,
            run(remote, "key", "rotate", name, "--overlap", "1h").document["secret"].startswith(f"qk_{name}_"),
            run(remote, "key", "revoke", name, "--reason", "test").document,
            run(remote, "key", "show", "nobody").code,
            run(remote, "key", "create", "Web", "--id", name).document["error"]["name"],
        ]  # fmt: skip
        text = json.dumps(steps).replace(f'"{name}"', '"x"').replace(f"key:{name}", "key:x")
        shown[remote] = json.loads(text)
    # What differs is when it happened.
    for one, two in zip(shown[False], shown[True], strict=True):
        assert without_times(one) == without_times(two)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if not name.endswith(("_at", "_until"))}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def test_a_token_that_may_not_and_an_api_that_is_away(database: str, api: Server) -> None:
    viewer = run_quota("token", "create", "v", "--role", "viewer", "--json", url=database).document
    where = {"QUOTA_API_URL": f"http://127.0.0.1:{api.port}", "QUOTA_API_TOKEN": viewer["secret"]}
    assert run_quota("key", "list", url=None, **where).code == 0
    assert run_quota("key", "create", "x", url=None, **where).code == 5
    assert run_quota("key", "list", url=None, **{**where, "QUOTA_API_URL": "http://127.0.0.1:1"}).code == 3
    assert run_quota("key", "list", url=None, QUOTA_API_URL="http://127.0.0.1:1").code == 2
    assert run_quota("key", "list", url=None, **{**where, "QUOTA_API_URL": "ftp://x"}).code == 2
    assert run_quota("token", "revoke", viewer["id"], "--reason", "test", url=database).code == 0
    assert "revoked" in run_quota("token", "list", url=database).out


def test_what_admins_do_in_the_database_and_over_http(
    database: str, api: Server, quota: Quota, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = quota("token", "create", "ops", "--role", "owner", "--json").document["secret"]
    where = {"QUOTA_API_URL": f"http://127.0.0.1:{api.port}", "QUOTA_API_TOKEN": secret}

    def remote(*words: str) -> Ended:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("QUOTA_")]:
                patch.delenv(name)
            for name, value in where.items():
                patch.setenv(name, value)
            return said(capsys, *words)

    steps = (
        "tenant create t-NAME", "unit create images-NAME", "subject create org:NAME",
        "subject create user:NAME/a --parent org:NAME", "subject create user:NAME/a --if-missing --parent org:NAME",
        "subject create user:NAME/a --if-missing --parent org:none", "subject create user:NAME/b --if-missing",
        "limit set org:NAME monthly --unit usd --capacity 50 --period month --time-zone Europe/Berlin --required",
        "limit set org:NAME monthly --unit usd --capacity unlimited --period month --time-zone Europe/Berlin",
        "limit set org:NAME rate --unit requests --kind bucket --capacity 7 --refill-per-s 0.5", "limit list org:NAME",
        "limit remove org:NAME rate", "limit remove org:NAME rate", "limit list org:NAME",
        "subject freeze org:NAME --reason runaway", "subject show user:NAME/a", "subject list --below org:NAME",
        "subject unfreeze org:NAME", "subject move user:NAME/a --to-root", "subject retire user:NAME/a",
        "subject create user:NAME/a --if-missing", "subject list --below user:NAME/a --retired",
        "subject show user:none", "limit set org:NAME x --unit no --capacity 1",
    )  # fmt: skip
    for step in steps:
        shown = []
        for run, name in ((quota, "sql"), (remote, "http")):
            words = step.replace("NAME", name).split()
            plain = run(*words, "--json")
            found = [without_times(json.loads(line)) for line in plain.out.replace(name, "NAME").splitlines()]
            shown.append((plain.code, [comparable(one) for one in found]))
        assert shown[0] == shown[1], step
    for listed in ("subject list", "limit list", "subject show org:sql", "token list", "tier list"):
        people = [run(*listed.split()).out for run in (quota, remote)]
        assert people[0] == people[1], listed


def test_tokens_over_http(database: str, api: Server, quota: Quota, capsys: pytest.CaptureFixture[str]) -> None:
    assert quota("tenant", "create", "acme").code == 0
    secret = quota("token", "create", "ops", "--role", "owner", "--json").document["secret"]
    where = {"QUOTA_API_URL": f"http://127.0.0.1:{api.port}", "QUOTA_API_TOKEN": secret}
    every = run_quota("token", "create", "one", "--role", "viewer", "--json", url=None, **where).document
    short = ("--role", "worker", "--tenant", "acme", "--expires-in", "1h", "--json")
    acme = run_quota("token", "create", "two", *short, url=None, **where).document
    assert (every["tenant"], acme["tenant"]) == (None, "acme")
    assert acme["secret"].startswith(f"qt_{acme['id']}_")
    rows = run_quota("token", "list", "--tenant", "acme", "--json", url=None, **where).rows
    assert {row["name"] for row in rows} == {"ops", "one", "two"}
    why = ("--tenant", "acme", "--reason", "left", "--json")
    ended = run_quota("token", "revoke", acme["id"], *why, url=None, **where)
    assert ended.document["state"] == "revoked"
    # A token for one tenant makes none for all.
    confined = quota("token", "create", "x", "--role", "owner", "--tenant", "acme", "--json").document["secret"]
    refused = run_quota("token", "create", "y", "--role", "viewer", url=None, **{**where, "QUOTA_API_TOKEN": confined})
    assert refused.code == 5
    assert "every tenant" in refused.complaint


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Over HTTP the tenant is the request's, and rows do not repeat it; errors are the same by name."""
    if "error" in row:
        return {"error": row["error"]["name"]}
    return {name: item for name, item in row.items() if name != "tenant"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for an embedded server, which is stopped at the end; short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="qk-"))
    yield path
    stop_server(path, force=True)
    shutil.rmtree(path)


def test_up_runs_database_api_and_reaper(folder: Path) -> None:
    for first in (True, False):
        port = str(20000 + os.getpid() % 12000 + first)  # below those that systems give away
        process = subprocess.Popen(
            [QUOTA, "up", "--data", str(folder), "--bind", f"127.0.0.1:{port}", "--workers", "1", "--json"],
            env=environment(None), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            answer = json.loads(process.stdout.readline())
            assert ("token" in answer) is first  # the first time only
            with urllib.request.urlopen(f"{answer['api']}/v1/health/ready", timeout=10) as response:
                assert json.load(response)["status"] == "ready"
            if first:
                token = answer["token"]
            request = urllib.request.Request(f"{answer['api']}/v1/tokens", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=10) as response:
                assert [one["role"] for one in json.load(response)["items"]] == ["owner"]
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            process.stdout.close()
        assert code == 0
    # Nothing is left behind.
    deadline = time.monotonic() + 20
    while (
        run_quota("down", "--data", str(folder), url=None).out.startswith("the server") and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert "no server runs" in run_quota("down", "--data", str(folder), url=None).out
