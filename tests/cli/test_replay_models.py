"""quota replay by the book: a named model's price, under a budget and a pool of quota tokens at once."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from tests.cli.conftest import Quota

MODEL = "us.anthropic.claude-opus-4-8"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.csv"
    file.write_text("ContextTokens,GeneratedTokens\n" + "1000,100\n" * 8)
    return str(file)


@pytest.fixture
def priced(quota: Quota) -> Quota:
    done = quota("price", "set", "aws", f"regional.{MODEL[3:]}", "--input", "10", "--output", "20")
    assert done.code == 0, done.err
    return quota


def replayed(quota: Quota, trace: str, *options: str) -> dict[str, object]:
    fast = ("--workers", "2", "--call-ms", "0", "--ceiling", "100", "--json")
    done = quota("replay", trace, "--model", f"aws/{MODEL}", *fast, *options)
    assert done.code == 0, done.err
    document: dict[str, object] = done.document
    return document


def test_the_book_prices_the_trace(priced: Quota, trace: str) -> None:
    found = replayed(priced, trace)
    assert Decimal(str(found["spent"])) == 8 * Decimal("0.012")


def test_a_budget_and_a_pool_at_once(priced: Quota, trace: str) -> None:
    """A call burns 1,000 + 100 x 15 quota tokens; four of them make a minute's quota."""
    worst = replayed(priced, trace, "--pool-tpm", "10000")
    assert (worst["cap_held"], worst["quota_held"], worst["quota_overage"]) == (True, True, "0")
    assert 4 <= int(str(worst["granted"])) < 8
    assert worst["refused_by_reason"] == {"rate": 8 - int(str(worst["granted"]))}
    own = replayed(priced, trace, "--pool-tpm", "1000000", "--formula", "provider")
    assert (own["cap_held"], own["quota_held"], own["granted"]) == (True, False, 8)
    assert Decimal(str(own["quota_overage"])) == 8 * 1400, "held 1,100 each, settled 2,500"
    cap = replayed(priced, trace, "--pool-tpm", "1000000", "--cap", "0.05")
    assert (cap["cap_held"], cap["granted"]) == (True, 4)


def test_models_that_nobody_has_priced(quota: Quota, trace: str) -> None:
    assert "unpriced_model" in quota("replay", trace, "--model", "openai/nothing").err
    assert "names no provider" in quota("replay", trace, "--model", "gpt").err
