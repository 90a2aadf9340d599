"""demo, replay and the reaper's loop, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pytest

from quota.cli.replay import Result
from quota.cli.work import Books, Job, Tally
from quota.trace import Prices
from tests.cli.conftest import QUOTA, Quota, environment
from tests.server import connect

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
SMALL = ("--workers", "4", "--call-ms", "5")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests that cost 0.018 dollars each, at 3 and 15, and may cost 0.03372."""
    file = tmp_path / "trace.csv"
    file.write_text("\n".join([HEADER, *(f"2026-01-05 09:00:{second},1000,1000" for second in range(60))]))
    return file


def test_replay_counts_everything_exactly(shell: Quota, trace: Path) -> None:
    ended = shell("replay", str(trace), "--cap", "100", *SMALL, "--json")
    assert ended.code == 0
    found = ended.document
    assert (found["calls"], found["granted"], found["refused"]) == (60, 60, 0)
    assert Decimal(found["spent"]) == Decimal("1.08")
    assert (found["cap"], found["overspend"], found["holds_left"], found["check_violations"]) == ("100", "0", 0, 0)
    assert Decimal("0.03372") <= Decimal(found["peak_spent_plus_reserved"]) <= Decimal("1.2")
    assert found["reserve_p50_ms"] <= found["reserve_p99_ms"]
    assert found["seconds"] > 0
    # Its books are a tenant of their own, so a second run finds nothing of the first.
    again = shell("replay", str(trace), "--cap", "100", *SMALL, "--json").document
    assert (again["spent"], again["tenant"] == found["tenant"]) == (found["spent"], False)
    assert len(shell("ledger", "--tenant", found["tenant"], "--max", "100", "--json").rows) == 60


def test_replay_under_a_cap_that_binds(shell: Quota, trace: Path) -> None:
    found = shell("replay", str(trace), "--cap", "0.5", *SMALL, "--json").document
    assert found["granted"] + found["refused"] == 60
    assert set(found["refused_by_reason"]) <= {"held", "exhausted"}
    assert Decimal(found["peak_spent_plus_reserved"]) <= Decimal("0.5")
    assert Decimal(found["spent"]) == found["granted"] * Decimal("0.018")
    # With --retry nobody is refused because of what others only hold: the budget is used up.
    ended = shell("replay", str(trace), "--cap", "0.1", *SMALL, "--retry")
    assert ended.code == 0
    assert "held" not in ended.out.split("refused")[1].splitlines()[0]
    assert "$0.072 of $0.1 (72.0 % of the cap)" in ended.out
    assert ended.out.splitlines()[-2] == "The cap was held."


def test_replay_books_outputs_above_the_ceiling_in_full(shell: Quota, trace: Path) -> None:
    found = shell("replay", str(trace), "--cap", "0.05", "--ceiling", "0", *SMALL, "--json").document
    assert found["above_ceiling"] == found["granted"]
    assert Decimal(found["overage"]) == found["granted"] * Decimal("0.015")
    assert Decimal(found["spent"]) == found["granted"] * Decimal("0.018")
    assert Decimal(found["overspend"]) == max(Decimal(found["spent"]) - Decimal("0.05"), Decimal(0))
    assert Decimal(found["peak_spent_plus_reserved"]) <= Decimal("0.05")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\nx,1,2\nx,many,2\n", 'line 3, column ContextTokens: "many" is not a whole number of tokens'),
        ("a,b\n1,2\n", "line 1: column ContextTokens is not there"),
        (None, "No such file or directory"),
    ],
)
def test_replay_of_what_is_no_trace(quota: Quota, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bad.csv"
    if text is not None:
        file.write_text(text)
    ended = quota("replay", str(file))
    assert ended.code == 2
    assert message in ended.complaint
    assert str(file) in ended.complaint


def test_demo(shell: Quota) -> None:
    ended = shell("demo", "--workers", "4", "--cap", "5", "--calls", "16", "--call-ms", "50", "--json")
    assert ended.code == 0
    found = ended.document
    naive, ledger, crash = found["naive"], found["ledger"], found["crash"]
    # In step, so the same every time: four look, four see room, four call.
    assert (naive["calls_made"], naive["refused"], naive["overspend"]) == (4, 12, "1.989565")
    assert ledger["calls_made"] + ledger["refused"] == 16
    assert Decimal(ledger["spent"]) <= Decimal(ledger["peak_spent_plus_reserved"]) <= 5
    assert (ledger["overspend"], ledger["holds_left"], ledger["check_violations"]) == ("0", 0, 0)
    assert crash["held"] == crash["reserved_after_kill"]
    assert (crash["released"], crash["reserved_after_reap"], found["ok"]) == (1, "0", True)


def test_demo_in_plain_lines(shell: Quota) -> None:
    ended = shell("demo", "--workers", "2", "--cap", "3", "--calls", "8", "--call-ms", "20")
    assert ended.code == 0
    assert "\x1b" not in ended.out
    (over,) = [line.split() for line in ended.out.splitlines() if line.startswith("over the cap by")]
    assert (over[4] != "$0", over[5]) == (True, "$0")
    assert "was killed with SIGKILL" in ended.out
    assert "The ledger held the cap." in ended.out


def test_demo_agents(shell: Quota) -> None:
    ended = shell("demo", "agents", "--agents", "3", "--calls", "2", "--budget", "0.30", "--call-ms", "10", "--json")
    assert ended.code == 0, ended
    found = ended.document
    runs = {run["run"]: run for run in found["runs"]}
    assert set(runs) == {"run:lead", "run:agent-1", "run:agent-2", "run:agent-3", "run:helper"}
    assert (runs["run:helper"]["parent"], runs["run:helper"]["refused"]) == ("run:agent-1", ["a run: depth"])
    assert runs["run:agent-3"]["refused"] == ["a call: exhausted"], "the runaway ends at its slice"
    assert runs["run:lead"]["refused"] == ["a call: frozen"], "the kill switch"
    assert all(Decimal(run["spent"]) <= Decimal(run["slice"]) and run["reserved"] == "0" for run in runs.values())
    # Calls are charged to the whole lineage once.
    lead = Decimal(runs["run:lead"]["spent"])
    below = sum(Decimal(runs[f"run:agent-{n}"]["spent"]) for n in (1, 2, 3))
    assert (
        below < lead == Decimal(found["spent"]) == Decimal(found["billed_by_provider"]) <= Decimal(found["lead_slice"])
    )
    assert found["quota_tokens"] == found["burnt_at_provider"]
    assert sum(run["calls"] for run in runs.values()) == found["provider_calls"], "no call that was refused has left"
    assert (found["holds_left"], found["check_violations"], found["ok"]) == (0, 0, True)


def test_demo_agents_in_plain_lines(shell: Quota) -> None:
    ended = shell("demo", "agents", "--agents", "2", "--calls", "1", "--budget", "0.10", "--call-ms", "10")
    assert ended.code == 0, ended
    assert "\x1b" not in ended.out
    assert "run:agent-2 is refused a call: exhausted" in ended.out
    assert "Every cap held." in ended.out


def test_demo_agents_says_what_to_install(quota: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    ended = quota("demo", "agents")
    assert ended.code == 2
    assert "pip install 'quota-ledger[openai]'" in ended.complaint


@pytest.mark.parametrize("budget", ["0.01", "1000"])
def test_demo_agents_keeps_the_runaway_short(quota: Quota, budget: str) -> None:
    ended = quota("demo", "agents", "--budget", budget)
    assert (ended.code, budget in ended.complaint) == (2, True)


def test_demo_without_a_name_is_the_fleet(quota: Quota) -> None:
    assert "--workers" not in quota("demo", "--help").out
    for words in (("demo", "--workers", "0"), ("demo", "fleet", "--workers", "0")):
        ended = quota(*words)
        assert (ended.code, "See: quota demo fleet --help" in ended.complaint) == (2, True)
    ended = quota("demo", "nonsense")
    assert (ended.code, "nonsense" in ended.complaint) == (2, True)


# -- the reaper -----------------------------------------------------------------------------------------------------


@contextmanager
def reaping(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [QUOTA, "reap", "--every", "0.1s", *options],
        env=environment(url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_reap_every_brings_holds_back_and_stops_on_sigterm(database: str, team: Quota, tmp_path: Path) -> None:
    heartbeat = tmp_path / "heartbeat"
    assert team("reserve", "key:42", "usd=1", "--ttl", "0.2s").code == 0
    with reaping(database, "--json", "--heartbeat", str(heartbeat)) as reaper:
        assert reaper.stdout is not None
        released, deadline = 0, time.monotonic() + 30
        while released == 0:
            assert time.monotonic() < deadline
            released += json.loads(reaper.stdout.readline())["released"]
        assert heartbeat.exists()
        reaper.send_signal(signal.SIGTERM)
        _, err = reaper.communicate(timeout=30)
        assert (reaper.returncode, err.splitlines()[-1]) == (0, "quota: reaper stopped")
    assert released == 1
    (row,) = team("balance", "team:a", "--json").rows
    assert row["reserved"] == "0"


def test_the_loop_outlives_a_database_that_goes_away(database: str, team: Quota) -> None:
    with reaping(database, "--json") as reaper, connect(database) as connection:
        assert reaper.stdout is not None
        reaper.stdout.readline()
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'quota cli'"
        )
        for _ in range(3):
            assert json.loads(reaper.stdout.readline())["released"] == 0
        reaper.send_signal(signal.SIGINT)
        assert reaper.wait(timeout=30) == 0


def test_one_sweep_closes_everything_that_is_overdue(database: str, team: Quota) -> None:
    for _ in range(5):
        assert team("reserve", "key:42", "usd=1", "--on-expiry", "charge").code == 0
    with connect(database) as connection:
        connection.execute("UPDATE quota_test.clock SET at = clock_timestamp() + interval '11 minutes'")
    assert [row["overdue"] for row in team("holds", "--json").rows] == [True] * 5
    assert team("reap", "--max", "2", "--json").document == {"released": 0, "charged": 5}
    assert team("reap").out == "0 released, 0 charged\n"
    assert [row["kind"] for row in team("ledger", "--json").rows] == ["charge"] * 5


@pytest.mark.parametrize(
    ("peak", "spent", "overage", "holds", "held"),
    [
        ("20", "20", "0", 0, True),
        ("20", "20.5", "0.5", 0, True),
        ("20.000001", "19", "0", 0, False),
        ("20", "20.5", "0.4", 0, False),
        ("20", "19", "0", 1, False),
    ],
)
def test_what_counts_as_a_cap_that_was_held(peak: str, spent: str, overage: str, holds: int, held: bool) -> None:
    job = Job("run:x", Decimal(20), Prices(Decimal(3), Decimal(15)), 2048, 0.02)
    tally = Tally(peak=Decimal(peak), booked=Decimal(spent), overage=Decimal(overage))
    result = Result(job, 20, "t", tally, Books(Decimal(spent), Decimal(0), holds, []), 1.0)
    assert result.held is held
    astray = Books(Decimal(spent) - 1, Decimal(0), 0, [])
    assert not Result(job, 20, "t", tally, astray, 1.0).held  # the books lack what the workers settled
