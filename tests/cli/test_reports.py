"""quota report: the figures as lines of JSON, and as tables for people."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Quota
from tests.server import Connection

CALLS = """
SELECT quota.create_subject('user:1'), quota.set_limit('user:1', 'usd', 'usd', 'budget', NULL),
    quota.set_limit('user:1', 'cost', 'cost', 'budget', NULL), quota.ensure_subject('pool:a'),
    quota.set_limit('pool:a', 'tpm', 'quota_tokens', 'bucket', 1000, 16),
    quota.set_limit('pool:a', 'rpd', 'requests', 'budget', NULL, NULL, 'day');
SELECT quota.settle((quota.reserve('user:1', '{"usd": 1}', also => '{pool:a}',
    details => '{"provider": "openai", "model": "gpt-x", "route": "summarise", "ceiling": 1000}')).reservation,
    '{"usd": 0}', details => jsonb_build_object('usage', jsonb_build_object('output', n), 'truncated', n > 15))
FROM generate_series(1, 20) n;
SELECT quota.settle((quota.reserve('user:1', '{"cost": 9}')).reservation, '{"cost": 9}',
    details => '{"route": "GET /rows", "cost": 9, "outcome": "answered", "latency_ms": 27}');
"""


@pytest.fixture
def called(quota: Quota, conn: Connection) -> Quota:
    conn.execute(CALLS)
    return quota


def test_models(called: Quota) -> None:
    (row,) = called("report", "models", "--json").rows
    assert (row["model"], row["route"], row["attempts"], row["throttle_rate"]) == ("gpt-x", "summarise", 20, "0")
    assert (row["output_p95"], row["recommended_ceiling"], row["truncation_rate"]) == (19, 23, "0.25")
    shown = called("report", "models").out
    for words in ("openai/gpt-x", "summarise", "Throttling and retries", "25.0 %", "recommended"):
        assert words in shown


def test_pools(called: Quota) -> None:
    found = {row["limit_name"]: row for row in called("report", "pools", "--json").rows}
    assert (found["tpm"]["quota"], found["tpm"]["settled"], found["rpd"]["settled"]) == ("1000", "0", "20")
    shown = called("report", "pools").out
    assert "pool:a" in shown
    assert "unlimited" in shown


def test_calibration(called: Quota) -> None:
    everything, row = called("report", "calibration", "--json").rows
    assert (everything["route"], row["route"], row["ms_per_cost"], row["suggested_factor"]) == (
        None, "GET /rows", "3", "1",
    )  # fmt: skip
    shown = called("report", "calibration").out
    for words in ("GET /rows", "all", "latency ms", "What would fit"):
        assert words in shown


@pytest.mark.parametrize("name", ["models", "pools", "calibration"])
def test_another_time_or_tenant_has_nothing(called: Quota, name: str) -> None:
    if name != "pools":
        assert called("report", name, "--until", "2020-01-01", "--json").rows == []
        assert called("report", name, "--since", "2020-01-01", "--until", "2020-02-01").out.startswith("no ")
    assert called("tenant", "create", "acme").code == 0
    assert called("report", name, "--last", "1h", "--tenant", "acme", "--json").rows == []
    assert called("report", name, "--tenant", "acme").out.startswith("no ")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--last", "2h", "--since", "2026-01-01"), "give one of them"),
        (("--last", "9000000d"), "--last"),
        (("--last", "soon"), '"soon" is no duration'),
        (("--since", "yesterday"), '"yesterday" is no time'),
        (("--since", "2026-01-02", "--until", "2026-01-01"), "begins before it ends"),
    ],
)
def test_mistakes_are_told(quota: Quota, options: tuple[str, ...], told: str) -> None:
    done = quota("report", "models", *options)
    assert done.code == 2
    assert told in done.err
    assert json.loads(quota("report", "models", *options, "--json").out)["error"]["exit_code"] == 2
