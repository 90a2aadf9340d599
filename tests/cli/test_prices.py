"""quota price: set, end, list, import."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Quota


def test_a_price_is_set_listed_changed_and_ended(quota: Quota) -> None:
    done = quota("price", "set", "openai", "GPT-X", "--input", "2.5", "--output", "10", "--output-max", "16384")
    assert done.code == 0, done.err
    version = int(done.out.split()[-1])
    assert "gpt-x" in quota("price", "list").out
    assert quota("price", "set", "openai", "gpt-x", "--input", "2", "--output", "8", "--from", "2099-01-01").code == 0
    rows = [json.loads(line) for line in quota("price", "list", "gpt", "--json").out.splitlines()]
    assert [row["rates"]["input"] for row in rows] == ["2.5", "2"]
    assert rows[0]["effective_until"].startswith("2099-01-01")
    assert quota("price", "end", str(version)).code == 0
    assert len(quota("price", "list", "--json").out.splitlines()) == 1


def test_long_context_sound_and_a_fee_for_every_request(quota: Quota) -> None:
    done = quota(
        "price", "set", "google", "m", "--input", "1.25", "--output", "10", "--long-context", "200000", "2.5", "15",
        "--input-audio", "3", "--request", "0.000000000001", "--long-context", "100000", "2", "12", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    (row,) = quota("price", "list", "--json").rows
    assert row["rates"] == {
        "input": {"base": "1.25", "steps": [{"above": 100000, "price": "2"}, {"above": 200000, "price": "2.5"}]},
        "output": {"base": "10", "steps": [{"above": 100000, "price": "12"}, {"above": 200000, "price": "15"}]},
        "input_audio": "3",
        "request": "0.000000000001",
    }
    twice = ("--long-context", "5", "2", "2", "--long-context", "5", "3", "3")
    refused = quota("price", "set", "google", "n", "--input", "1", "--output", "1", *twice)
    assert (refused.code, "a step of input" in refused.err) == (2, True)


def test_mistakes_are_told_with_their_value(quota: Quota) -> None:
    free = quota("price", "set", "acme", "m", "--input", "0", "--output", "0")
    assert free.code == 2
    assert "not declared free" in free.err
    assert quota("price", "set", "acme", "m", "--input", "0", "--output", "0", "--free").code == 0
    assert '"x" is no time' in quota("price", "set", "acme", "m", "--input", "1", "--output", "1", "--from", "x").err


def test_a_map_is_imported_once_and_changes_from_now_on(quota: Quota, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    told: list[dict[str, object]] = [
        {"provider": "acme", "model": "m", "rates": {"input": "1", "output": "2"}, "output_max": 9},
        {"provider": "acme", "model": "n", "rates": {"input": "1"}},
    ]
    file.write_text(json.dumps(told))
    assert "1 read" in quota("price", "import", str(file), "--dry-run").out
    first = json.loads(quota("price", "import", str(file), "--json").out)
    assert (first["new"], first["remarks"][0]["model"]) == (1, "n")
    assert json.loads(quota("price", "import", str(file), "--json").out)["as before"] == 1
    told[0]["rates"] = {"input": "3", "output": "4"}
    file.write_text(json.dumps(told))
    assert json.loads(quota("price", "import", str(file), "--json").out)["changed from now on"] == 1
    (row,) = [json.loads(line) for line in quota("price", "list", "--json").out.splitlines()]
    assert row["rates"]["input"] == "3"


def test_a_file_that_is_no_map(quota: Quota, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text("{\n\n,}")
    done = quota("price", "import", str(file))
    assert done.code == 2
    assert "line 3" in done.err


def test_an_import_is_all_or_nothing(quota: Quota, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    fine = {"provider": "acme", "model": "m", "rates": {"input": "1", "output": "2"}, "output_max": 9}
    for wrong, told in (
        ({"model": "x\u200b"}, "invalid_name"),
        ({"model": "m"}, "entry 2"),
        ({"model": "n", "effective_from": "2030-02-01T00:00Z", "effective_until": "2030-01-01T00:00Z"}, "entry 2"),
        ({"model": "m", "effective_from": "2030-01-01T00:00Z"}, "in force at once"),
        ({"model": "n", "variant": "Batch!"}, "entry 2"),
        ({"model": "n", "effective_from": "tomorrow"}, "entry 2"),
    ):
        file.write_text(json.dumps([fine, {**fine, **wrong}]))
        done = quota("price", "import", str(file))
        assert done.code == 2
        assert told in done.err
    assert quota("price", "list", "--json").out == ""


def test_the_package_fills_the_book(quota: Quota) -> None:
    done = json.loads(quota("price", "import", "--provider", "cerebras", "--json").out)
    assert done["new"] > 0
    assert any(remark["problem"] == "no output maximum" for remark in done["remarks"])
    assert 'no provider "x"' in quota("price", "import", "--provider", "x").err


def test_a_file_that_cannot_be_read(quota: Quota, tmp_path: Path) -> None:
    absent = quota("price", "import", str(tmp_path / "absent.json"))
    assert (absent.code, "No such file" in absent.err) == (2, True)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    assert "it is not UTF-8" in quota("price", "import", str(binary)).err
