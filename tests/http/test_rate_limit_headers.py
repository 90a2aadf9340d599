"""RateLimit headers: the design's examples letter by letter, and that whatever is written can be read."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import http_sf
from hypothesis import given, settings
from hypothesis import strategies as st

from quota.calls import LimitState, Reservation, Standing
from quota.http.headers import (
    QuotaPolicy,
    exposed,
    full_after,
    of_refusal,
    of_states,
    rate_limit_headers,
    unique_names,
)

D = Decimal
ME = "key:42"


def state(owner: str = ME, **fields: Any) -> LimitState:
    empty: dict[str, Any] = dict.fromkeys(LimitState.__slots__)
    return LimitState(**{**empty, "owner": owner, "unit": "cost", "money": False, **fields})


def bucket(level: Any, **fields: Any) -> LimitState:
    full = (D(1_000_000) - D(level)) / 3000
    return state(**{"limit_name": "bucket", "kind": "bucket", "capacity": D(1_000_000), "refill_per_s": D(3000),
                    "level": D(level), "available": D(level), "full_after_s": full, **fields})  # fmt: skip


def hourly(available: Any, ends_in_s: Any, **fields: Any) -> LimitState:
    return state(**{"limit_name": "hourly", "kind": "budget", "capacity": D(2_000_000), "period": "01:00:00",
                    "window_s": D(3600), "available": D(available), "resets_in_s": ends_in_s, **fields})  # fmt: skip


def standing(of: LimitState, reason: str | None = None, wait_s: Any = None, **fields: Any) -> Standing:
    return Standing(
        **{
            "subject": of.owner, "limit_name": of.limit_name, "unit": of.unit, "kind": of.kind,
            "capacity": of.capacity, "spent": None, "reserved": D(0), "level": of.level, "available": of.available,
            "reason": reason, "retry_after_s": None if wait_s is None else D(wait_s), **fields,
        }
    )  # fmt: skip


def refusal(*standings: Standing) -> Reservation:
    violated = [item for item in standings if item.reason]
    return Reservation(
        granted=False, reservation=None, state=None, reason=violated[0].reason, remaining=standings, violations=violated
    )


def told(states: list[LimitState]) -> dict[str, str]:
    policies = of_states(states, ME, {"cost"})
    return dict([*rate_limit_headers(policies, "draft-11"), *full_after(policies)])


def refused(*standings: Standing, states: list[LimitState]) -> dict[str, str]:
    policies, violated = of_refusal(refusal(*standings), states, ME)
    return dict([*rate_limit_headers(policies, "draft-11", violated), *full_after(policies)])


# -- the design's examples ---------------------------------------------------------------------------------------------

POLICY = '"bucket";q=1000000;qu="credits";w=334, "hourly";q=2000000;qu="credits";w=3600'


def test_an_answer_that_was_let_through() -> None:
    assert told([bucket(999_700), hourly(1_999_700, D("3589"))]) == {
        "RateLimit-Policy": POLICY,
        "RateLimit": '"bucket";r=999700;t=1, "hourly";r=1999700;t=3589',
        "Quota-Bucket-Full-After": "1",
    }


def test_a_bucket_that_is_short() -> None:
    short, hour = bucket(120_000), hourly(1_000_000, D(1800))
    headers = refused(standing(short, "rate", 60), standing(hour), states=[short, hour])
    assert headers == {
        "RateLimit-Policy": POLICY,
        "RateLimit": '"bucket";r=120000;t=60',
        "Quota-Bucket-Full-After": "294",
    }


def test_an_hour_that_is_spent_and_both() -> None:
    full, short, hour = bucket(1_000_000), bucket(120_000), hourly(0, D(3000))
    headers = refused(standing(full), standing(hour, "exhausted", 3000), states=[full, hour])
    assert headers["RateLimit"] == '"hourly";r=0;t=3000'
    assert headers["RateLimit-Policy"] == POLICY
    headers = refused(standing(short, "rate", 60), standing(hour, "exhausted", 3000), states=[short, hour])
    assert headers["RateLimit"] == '"bucket";r=120000;t=60, "hourly";r=0;t=3000'


# -- the rules ---------------------------------------------------------------------------------------------------------


def test_the_next_unit_of_a_bucket() -> None:
    slow = {"refill_per_s": D("0.25"), "capacity": D(10)}
    for level, seconds in (("9.5", 2), ("9.25", 3), ("0", 4), ("0.75", 1)):
        policy = of_states([bucket(level, **slow)], ME, {"cost"})[0]
        assert (policy.remaining, policy.reset_s, policy.window_s) == (int(D(level)), seconds, 40)
    assert of_states([bucket(10, **slow)], ME, {"cost"})[0].reset_s is None
    assert of_states([bucket(5, **{**slow, "refill_per_s": D(0)})], ME, {"cost"})[0].reset_s is None


def test_units_ancestors_money_and_what_is_unlimited() -> None:
    states = [
        hourly(5, D(60)),
        state(limit_name="calls", unit="requests", kind="budget", capacity=D(100), available=D("7.9"), window_s=D(60),
              resets_in_s=D("0.1")),
        state(limit_name="at once", unit="concurrency", kind="concurrency", capacity=D(4), available=D(3)),
        hourly(3, D(60), owner="user:7"),
        hourly(2, D(60), owner="user:8"),
        state(limit_name="month", unit="usd", kind="budget", money=True, capacity=D(50), available=D(1)),
        state(limit_name="all", kind="budget", capacity=None),
        state(limit_name="tpd", unit="tokens", kind="budget", capacity=D(9), available=D(1)),
        state(limit_name="é%", kind="budget", capacity=D(9), available=None),
    ]  # fmt: skip
    headers = told(states)
    assert headers["RateLimit-Policy"] == (
        '"hourly";q=2000000;qu="credits";w=3600, "calls";q=100;w=60, "at once";q=4;qu="concurrent-requests", '
        '"user-hourly";q=2000000;qu="credits";w=3600, "user-hourly-2";q=2000000;qu="credits";w=3600, '
        '"%C3%A9%25";q=9;qu="credits"'
    )
    assert headers["RateLimit"] == (
        '"hourly";r=5;t=60, "calls";r=7;t=1, "at once";r=3, "user-hourly";r=3;t=60, "user-hourly-2";r=2;t=60, '
        '"%C3%A9%25";r=0'
    )
    # Not even where the request is counted in money.
    assert [one.name for one in of_states(states, ME, {"usd"})] == ["calls", "at once"]
    assert "user:7" not in str(headers)


def test_what_only_others_hold_has_no_time() -> None:
    hour = hourly(0, D(60))
    slots = state(limit_name="slots", unit="concurrency", kind="concurrency", capacity=D(1), available=D(0))
    headers = refused(standing(hour, "held", 1), standing(slots, "concurrency", 1), states=[hour, slots])
    assert headers["RateLimit"] == '"hourly";r=0, "slots";r=0'


def test_a_limit_without_known_terms_is_left_out() -> None:
    short, hour = bucket(1), hourly(0, D(60))
    assert refused(standing(short, "rate", 9), standing(hour), states=[hour]) == {
        "RateLimit-Policy": '"hourly";q=2000000;qu="credits";w=3600'
    }
    assert refused(standing(short, "rate", 9), states=[]) == {}
    money = replace(hour, money=True)
    assert refused(standing(money, "held", 1), states=[money]) == {}


def test_legacy_tells_the_policy_that_binds() -> None:
    short, hour = bucket(120_000), hourly(0, D(3000))
    policies = of_states([bucket(999_700), hourly(100, D(60))], ME, {"cost"})
    assert rate_limit_headers(policies, "legacy") == [
        ("X-RateLimit-Policy", "1000000;w=334, 2000000;w=3600"),
        ("X-RateLimit-Limit", "2000000"),
        ("X-RateLimit-Remaining", "100"),
        ("X-RateLimit-Reset", "60"),
    ]
    policies, violated = of_refusal(
        refusal(standing(short, "rate", 60), standing(hour, "exhausted", 3000)), [short, hour], ME
    )
    assert dict(rate_limit_headers(policies, "legacy", violated))["X-RateLimit-Reset"] == "3000"
    assert rate_limit_headers(policies, "none") == []
    assert rate_limit_headers([], "legacy") == []
    assert exposed("draft-11") == ("RateLimit-Policy", "RateLimit", "Retry-After", "Quota-Bucket-Full-After")
    assert exposed("none") == ("Retry-After", "Quota-Bucket-Full-After")


# -- whatever is written can be read -----------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs")), min_size=1, max_size=40)
AMOUNTS = st.decimals(min_value=0, max_value=10**18, allow_nan=False, allow_infinity=False, places=12)


@st.composite
def states_of_limits(draw: st.DrawFn) -> LimitState:
    kind = draw(st.sampled_from(["bucket", "budget", "concurrency"]))
    return state(
        draw(st.sampled_from([ME, "user:7", "user:8", "org:acme"])),
        limit_name=draw(NAMES),
        unit=draw(st.sampled_from(["cost", "requests", "concurrency"])),
        kind=kind,
        capacity=draw(AMOUNTS),
        refill_per_s=draw(AMOUNTS) if kind == "bucket" else None,
        window_s=draw(st.none() | AMOUNTS),
        level=draw(AMOUNTS) if kind == "bucket" else None,
        available=draw(AMOUNTS),
        resets_in_s=draw(st.none() | AMOUNTS),
        full_after_s=draw(st.none() | AMOUNTS),
    )


@settings(deadline=None)
@given(st.lists(states_of_limits(), min_size=1, max_size=6))
def test_whatever_is_written_is_read_as_what_was_meant(states: list[LimitState]) -> None:
    policies = of_states(states, ME, {"cost"})
    headers = dict(rate_limit_headers(policies, "draft-11"))
    limits: Any = http_sf.parse(headers["RateLimit"].encode("ascii"), tltype="list")
    terms: Any = http_sf.parse(headers["RateLimit-Policy"].encode("ascii"), tltype="list")
    assert [_read(item, one) for item, one in zip(limits, policies, strict=True)] == [
        (one.name, {"r": one.remaining, "t": one.reset_s}) for one in policies
    ]
    assert [_read(item, one) for item, one in zip(terms, policies, strict=True)] == [
        (one.name, {"q": one.quota, "qu": one.unit, "w": one.window_s}) for one in policies
    ]
    assert len({one.name for one in policies}) == len(policies)
    for one in policies:
        for number in (one.quota, one.remaining, one.window_s, one.reset_s):
            assert number is None or 0 <= number < 10**15


def _read(item: Any, one: QuotaPolicy) -> tuple[str, dict[str, Any]]:
    """Name and parameters of an item as the library reads it; parameters that may be absent are None."""
    name, parameters = item if isinstance(item, tuple) else (item, {})
    assert type(name) is str  # a String, no Token
    keys = ("r", "t") if "r" in parameters else ("q", "qu", "w")
    assert set(parameters) <= set(keys)
    return name, {key: parameters.get(key) for key in keys}


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "a-2", "b"]), max_size=8))
def test_names_are_unique(names: list[str]) -> None:
    policies = [QuotaPolicy(name=name, quota=1, unit=None, window_s=None, remaining=1) for name in names]
    unique = [one.name for one in unique_names(policies)]
    assert len(set(unique)) == len(names)
    assert all(one.startswith(name) for one, name in zip(unique, names, strict=True))
