"""A provider's quotas: the JSON of `aws service-quotas list-service-quotas`, and what is wrong with other files."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from quota.costs.pools import InvalidQuotas, PoolLimit, read_service_quotas

ARN = "arn:aws:servicequotas:us-east-1:123456789012:bedrock/L-1"


def quotas(*named: tuple[str, Any]) -> str:
    told = [{"ServiceCode": "bedrock", "QuotaArn": ARN, "QuotaName": name, "Value": value} for name, value in named]
    return json.dumps({"Quotas": told}, indent=4)


def limits(text: str, **named: Any) -> dict[str, dict[str, PoolLimit]]:
    pools = read_service_quotas(text, **named).pools
    return {pool.subject: {limit.name: limit for limit in pool.limits} for pool in pools}


OPUS = "Anthropic Claude Opus 4.8 V1"
SUBJECT = "pool:123456789012/us-east-1/anthropic-claude-opus-4-8-v1"


def test_rates_are_buckets_of_a_minute_and_a_day_is_a_budget() -> None:
    found = limits(
        quotas(
            (f"On-demand model inference requests per minute for {OPUS}", 250.0),
            (f"On-demand model inference tokens per minute for {OPUS}", 200000.0),
            (f"Model invocation max tokens per day for {OPUS} (doubled for cross-region calls)", 1000000),
        )
    )
    assert found == {
        f"{SUBJECT}/runtime": {
            "rpm": PoolLimit("rpm", "requests", "bucket", Decimal(250), Decimal("4.166666666666")),
            "tpm": PoolLimit("tpm", "quota_tokens", "bucket", Decimal(200_000), Decimal("3333.333333333333")),
            "tpd": PoolLimit("tpd", "quota_tokens", "budget", Decimal(1_000_000), None, "day"),
        }
    }


def test_a_minute_never_refills_more_than_the_quota() -> None:
    for value in (1, 7, 59, 61, 250, 200_001):
        found = limits(quotas((f"On-demand model inference tokens per minute for {OPUS}", value)))
        refill = found[f"{SUBJECT}/runtime"]["tpm"].refill_per_s
        assert refill is not None
        assert value - Decimal("0.000000001") < refill * 60 <= value


def test_a_day_is_1440_minutes_where_the_account_says_nothing_else() -> None:
    found = limits(quotas((f"Cross-region model inference tokens per minute for {OPUS}", 1000)))
    tpd = found[f"{SUBJECT}/runtime-cross-region"]["tpd"]
    assert (tpd.capacity, tpd.declared) == (Decimal(1_440_000), False)


def test_what_the_account_does_not_have_is_declared_unlimited() -> None:
    found = limits(quotas((f"On-demand model inference requests per minute for {OPUS}", 5)))[f"{SUBJECT}/runtime"]
    assert found["tpd"] == PoolLimit("tpd", "quota_tokens", "budget", None, None, "day", declared=False)
    assert "tpm" not in found
    tokens = limits(quotas((f"On-demand model inference tokens per minute for {OPUS}", 5)))[f"{SUBJECT}/runtime"]
    assert tokens["rpd"] == PoolLimit("rpd", "requests", "budget", None, None, "day", declared=False)


def test_scopes_are_pools_of_their_own() -> None:
    found = limits(
        quotas(
            (f"On-demand model inference tokens per minute for {OPUS}", 1),
            (f"Cross-region model inference tokens per minute for {OPUS}", 2),
            (f"Global cross-region model inference tokens per minute for {OPUS}", 3),
            (f"Global cross-region model inference tokens per day for {OPUS}", 4),
            (f"Model invocation max tokens per day for {OPUS} (doubled for cross-region calls)", 10),
            (f"On-demand latency-optimized model inference tokens per minute for {OPUS}", 5),
        )
    )
    days = {subject.rpartition("/")[2]: limits_["tpd"].capacity for subject, limits_ in found.items()}
    assert days == {"runtime": 10, "runtime-cross-region": 20, "runtime-global": 4, "runtime-fast": 7200}


def test_mantle_has_input_and_output_apart() -> None:
    found = limits(quotas(("Input tokens per minute for M", 60), ("Output tokens per minute for M", 120)))
    mantle = found["pool:123456789012/us-east-1/m/mantle"]
    assert (mantle["input-tpm"].unit, mantle["input-tpm"].refill_per_s) == ("quota_input_tokens", Decimal(1))
    assert (mantle["output-tpd"].unit, mantle["output-tpd"].capacity) == ("quota_output_tokens", Decimal(172_800))


def test_other_quotas_are_ignored_by_name_and_models_can_be_chosen() -> None:
    text = quotas(
        ("Knowledge bases per account", 100),
        ("On-demand model inference tokens per minute for Amazon Nova Pro", 7),
        (f"On-demand model inference tokens per minute for {OPUS}", 5),
    )
    found = read_service_quotas(text, model="opus 4.8")
    assert [pool.subject for pool in found.pools] == [f"{SUBJECT}/runtime"]
    assert found.ignored == (
        "Knowledge bases per account",
        "On-demand model inference tokens per minute for Amazon Nova Pro",
    )


def test_account_and_region_may_be_named() -> None:
    text = quotas((f"On-demand model inference tokens per minute for {OPUS}", 5))
    (subject,) = limits(text, account="aws-1", region="eu-west-1")
    assert subject == "pool:aws-1/eu-west-1/anthropic-claude-opus-4-8-v1/runtime"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: no JSON"),
        ('{"Quotas": [\n{"QuotaName": "a",\n}]}', "line 3: no JSON"),
        ("[]", 'line 1: no object with a list "Quotas"'),
        ('{"Quotas": {}}', 'line 1: no object with a list "Quotas"'),
        ('{"Quotas": [\n\n7]}', "line 3: .* is no quota"),
        ('{"Quotas": [\n{"Value": 1}]}', 'line 2: "QuotaName" is None'),
        (
            f'{{"Quotas": [\n{{"QuotaName": "a", "Value": 1, "QuotaArn": "{ARN}"}},\n{{"QuotaName": "b"}}]}}',
            "line 3: .*None",
        ),
        ('{"Quotas": [], "Quotas": [7]}', 'line 1: no JSON: the key "Quotas" stands twice'),
        ('{"x": {"Quotas": [1, 2]}, "Quotas":\n[7]}', "line 2: .* is no quota"),
        ('{"Quotas": [{"QuotaName": "a", "Value": "1"}]}', 'line 1: "Value" of "a" is 1'),
        ('{"Quotas": [{"QuotaName": "a", "Value": -1}]}', "-1"),
        ('{"Quotas": [{"QuotaName": "a", "Value": NaN}]}', "nan"),
        ('{"Quotas": [{"QuotaName": "a", "Value": 1e40}]}', "1E"),
        ('{"Quotas": [{"QuotaName": "a", "Value": true}]}', "True"),
        ('{"Quotas": [{"QuotaName": "a", "Value": 0.1234567890123}]}', "at most 12 decimals"),
        ('{"Quotas": [{"QuotaName": "a", "Value": 1e-999999999}]}', "at most 12 decimals"),
        ('{"Quotas": [{"QuotaName": "a", "Value": 1, "QuotaArn": "x"}]}', "names no account and region"),
    ],
)
def test_files_of_another_shape_are_refused_with_the_line(text: str, told: str) -> None:
    with pytest.raises(InvalidQuotas, match=told):
        read_service_quotas(text)
