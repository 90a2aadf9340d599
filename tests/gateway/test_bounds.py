"""Bounds beside cost: targets and periods, judged before anything is held."""

from __future__ import annotations

from datetime import timedelta

import pytest

from quota.costs.rows import Request
from quota.gateway.bounds import Period, Targets
from quota.http.problems import Problem

BOUNDS = (Targets("ids", 3), Period("from", "to", timedelta(days=31)))


def judge(query: str) -> None:
    for bound in BOUNDS:
        bound(Request("GET", "/v1/series", query, {}))


@pytest.mark.parametrize(
    "query",
    [
        "", "ids=", "ids=a,b,c", "ids=a&ids=b&ids=c", "ids=,a,,b,c,", "other=a,b,c,d",
        "from=2026-01-01&to=2026-01-31", "from=2026-01-01T00:00:00Z&to=2026-02-01T00:00:00Z",
        "from=2026-01-01T00:00:00+09:00&to=2026-01-01", "from=1767225600&to=1769904000",
        "from=1767225600000&to=1769904000000", "to=2026-01-01", "from=2999-01-01", "from=2026-02-01&to=2026-01-01",
    ],
)  # fmt: skip
def test_within(query: str) -> None:
    judge(query)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("ids=a,b,c,d", "too_many_targets"),
        ("ids=a,b&ids=c,d", "too_many_targets"),
        ("%69ds=a%2Cb%2Cc%2Cd", "too_many_targets"),
        ("from=2026-01-01&to=2026-02-01", "period_too_long"),  # the last day counts
        ("from=2026-01-01T00:00:00Z&to=2026-02-01T00:00:01Z", "period_too_long"),
        ("from=2026-01-01T00:00:00Z&to=2026-02-01T00:00:00-01:00", "period_too_long"),
        ("from=2020-01-01", "period_too_long"),  # until now
        ("from=0&to=9999999999", "period_too_long"),
        ("from=yesterday", "invalid_period"),
        ("from=2026-01-01&to=now", "invalid_period"),
        ("from=2026-01-01&from=2026-01-02", "invalid_period"),
        ("from=", "invalid_period"),
        ("from=" + "9" * 400, "invalid_period"),
        ("from=0&to=9999-12-31", "invalid_period"),
        ("&".join(f"a{n}=1" for n in range(2000)) + "&ids=a,b,c,d", "invalid_query"),
    ],
)
def test_beyond(query: str, name: str) -> None:
    with pytest.raises(Problem) as caught:
        judge(query)
    assert (caught.value.status, caught.value.name) == (422, name)
