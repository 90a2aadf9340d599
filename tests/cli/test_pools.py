"""quota pool import, and what a pool then does to calls."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Quota
from tests.costs.test_pools import OPUS, quotas

SUBJECT = "pool:aws-1/us-east-1/anthropic-claude-opus-4-8-v1/runtime"


def imported(quota: Quota, file: Path, value: int) -> None:
    file.write_text(quotas((f"On-demand model inference tokens per minute for {OPUS}", value)))
    done = quota("pool", "import", str(file), "--account", "aws-1")
    assert done.code == 0, done.err


def test_a_pool_holds_what_its_account_has(team: Quota, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    imported(team, file, 36_000)
    spend = ("reserve", "key:42", "--also", SUBJECT, "usd=1")
    first = team(*spend, "quota_tokens=36000", "--quiet")
    assert first.code == 0, first.err
    assert team(*spend, "quota_tokens=36000").code == 1
    assert team("settle", first.out.strip(), "usd=0.5", "quota_tokens=9000").code == 0
    rows = {
        (r["subject"], r["limit_name"]): r
        for r in json.loads(team("subject", "show", SUBJECT, "--json").out)["balance"]
    }
    assert rows[SUBJECT, "tpd"]["spent"] == "9000"
    assert rows[SUBJECT, "tpd"]["capacity"] == "51840000"
    assert rows[SUBJECT, "rpd"]["capacity"] is None
    imported(team, file, 72_000)
    again = json.loads(team("subject", "show", SUBJECT, "--json").out)["balance"]
    assert {row["limit_name"]: row["capacity"] for row in again}["tpm"] == "72000"


def test_quotas_that_an_account_does_not_have_are_counted_and_refuse_nothing(team: Quota, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    file.write_text(quotas((f"On-demand model inference requests per minute for {OPUS}", 1)))
    assert team("pool", "import", str(file), "--account", "aws-1").code == 0
    spend = ("reserve", "key:42", "--also", SUBJECT, "usd=1", "quota_tokens=999999999")
    assert team(*spend).code == 0
    refused = team(*spend)
    assert (refused.code, '"rpm"' in refused.err) == (1, True)
    rows = json.loads(team("subject", "show", SUBJECT, "--json").out)["balance"]
    (tpd,) = [row for row in rows if row["limit_name"] == "tpd"]
    assert (tpd["capacity"], tpd["reserved"]) == (None, "999999999")


def test_an_import_is_all_or_nothing(quota: Quota, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    imported(quota, file, 36_000)
    assert quota("limit", "remove", SUBJECT, "tpm").code == 0
    file.write_text(
        quotas(
            ("On-demand model inference tokens per minute for A", 5),
            (f"On-demand model inference tokens per minute for {OPUS}" + "x" * 200, 5),
        )
    )
    done = quota("pool", "import", str(file), "--account", "aws-1")
    assert (done.code, "invalid_name" in done.err) == (2, True)
    assert quota("subject", "show", "pool:aws-1/us-east-1/a/runtime").code != 0


def test_a_file_of_another_shape_names_its_line(quota: Quota, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    file.write_text('{"Quotas": [\n{"QuotaName": 7}]}')
    done = quota("pool", "import", str(file))
    assert (done.code, "line 2" in done.err) == (2, True)


def test_a_file_that_cannot_be_read(quota: Quota, tmp_path: Path) -> None:
    absent = quota("pool", "import", str(tmp_path / "absent.json"))
    assert (absent.code, "No such file" in absent.err) == (2, True)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    assert "it is not UTF-8" in quota("pool", "import", str(binary)).err
