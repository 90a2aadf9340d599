"""The commands: `quota gateway` until a signal, and `quota demo gateway` to its proof."""

from __future__ import annotations

import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import QUOTA, environment, run_quota, said
from tests.gateway.conftest import PATIENCE_S, make_key, until
from tests.gateway.upstream import BODY, Upstream


def test_the_gateway_runs_until_it_is_told_to_stop(database: str, upstream: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('upstream = "http://192.0.2.1"\n[[routes]]\npath = "/<path:rest>"\n')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [QUOTA, "gateway", "--config", str(file), "--upstream", upstream.url, "--bind", address, "--workers", "2"]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, env=environment(database), stderr=out) as process:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"http://{address}/-/health/ready", timeout=PATIENCE_S) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        until(answers, log.read_text)
        request = urllib.request.Request(f"http://{address}/ok/whole", headers=make_key(database).headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.read() == BODY
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_demonstration_proves_what_it_shows(database: str) -> None:
    ended = run_quota("demo", "gateway", "--requests", "28", "--json", url=database)
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["ok"], document["holds_left"], document["check_violations"]) == (True, 0, 0)
    by_tier = {key["tier"]: key for key in document["keys"]}
    assert set(by_tier) == {"basic", "extended", "bulk"}
    for key in by_tier.values():
        assert key["requests"] == 28
        assert key["booked"] == str(key["cost_of_answers"])
        assert sum(key["answers"].values()) == 28
    # The small one reaches its end, the large one does not.
    assert by_tier["basic"]["refused_by_reason"].keys() <= {"rate", "held", "exhausted"}
    assert by_tier["basic"]["refused"] > 0 == by_tier["bulk"]["refused"]
    assert by_tier["basic"]["retry_after_s"] >= 1


def test_a_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('upstream = "http://x"\n[[routes]]\npath = "/"\n')
    ended = said(capsys, "gateway", "--config", str(file), "--upstream", "x", "--check")
    assert ended.code == 2
    assert '"x" is no origin' in ended.complaint
