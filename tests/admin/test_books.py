"""Ledger, export and usage: every line once, cells that are no formulas, days that add up in every zone."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pytest

from tests.admin.conftest import Api
from tests.server import Connection


@pytest.fixture
def booked(api: Api, db: Connection) -> Api:
    """A tree that has spent: 60 bookings over six days, at odd minutes, by children whose parent has no limit."""
    api.do("POST", "/subjects", {"name": "org:top"})
    for name in ("key:a", "key:b"):
        api.do("POST", "/subjects", {"name": name, "parent": "org:top"})
        api.do("PUT", f"/limits/{name}/cap", {"unit": "usd", "capacity": None})
        # A second limit of the same unit: what is spent is spent once.
        api.do("PUT", f"/limits/{name}/daily", {"unit": "usd", "capacity": None, "period": "day"})
    db.execute(
        "SELECT quota.record(CASE n %% 3 WHEN 0 THEN 'key:a' ELSE 'key:b' END, jsonb_build_object('usd', n),"
        " tenant => %s) FROM generate_series(1, 60) n",
        (api.tenant,),
    )
    # The ledger only grows, for everybody but the owner of its tables, who may stage its past.
    db.execute("ALTER TABLE quota_internal.entries DISABLE TRIGGER entries_are_append_only")
    db.execute(
        "UPDATE quota_internal.entries e SET at = timestamptz '2026-03-26 00:10Z' + x.n * interval '2 hours 23 minutes'"
        " FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM quota_internal.entries WHERE tenant = %(t)s) x"
        " WHERE e.tenant = %(t)s AND e.id = x.id",
        {"t": api.tenant},
    )
    db.execute("ALTER TABLE quota_internal.entries ENABLE TRIGGER entries_are_append_only")
    return api


SINCE, UNTIL = datetime(2026, 3, 26, tzinfo=UTC), datetime(2026, 4, 3, tzinfo=UTC)


def usage(api: Api, since: datetime = SINCE, until: datetime = UNTIL, **more: str) -> list[dict[str, Any]]:
    query = {"since": since.isoformat(), "until": until.isoformat(), **more}
    items: list[dict[str, Any]] = api.get("/usage?" + "&".join(f"{k}={quote(v)}" for k, v in query.items()))["items"]
    return items


def total(items: list[dict[str, Any]]) -> Decimal:
    return sum((Decimal(item["amount"]) for item in items), Decimal(0))


def test_children_are_rolled_up_and_nothing_counts_twice(booked: Api) -> None:
    assert total(usage(booked, subject="org:top")) == sum(range(1, 61))
    assert total(usage(booked, subject="key:a")) == sum(range(3, 61, 3))
    assert total(usage(booked)) == sum(range(1, 61))
    by_spender = usage(booked, subject="org:top", by_spender="true")
    assert total([item for item in by_spender if item["charged_to"] == "key:a"]) == sum(range(3, 61, 3))
    assert total(usage(booked, unit="tokens")) == 0


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"])
def test_days_add_up_to_their_range(booked: Api, zone: str) -> None:
    """Berlin's clocks change within: one of its days has 23 hours."""
    days = usage(booked, time_zone=zone)
    assert total(days) == sum(range(1, 61))
    starts = [datetime.fromisoformat(day["start"]) for day in days]
    assert starts == sorted(set(starts))
    # Asked for one by one, each says the same, and each booking lies in one of them.
    ends = [*starts[1:], starts[-1] + timedelta(days=1)]
    single = [total(usage(booked, start, end, time_zone=zone)) for start, end in zip(starts, ends, strict=True)]
    assert single == [Decimal(day["amount"]) for day in days]
    assert total(usage(booked, time_zone=zone, span="hour")) == total(days)


def test_the_ledger_page_by_page_and_as_export(booked: Api) -> None:
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        page = booked.get(f"/ledger?limit=7{after}")
        seen += page["items"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert len(seen) == 120  # two limits, sixty bookings
    assert len({(line["entry"], line["limit_name"]) for line in seen}) == 120
    exported = booked.request("GET", "/ledger/export?format=jsonl")
    assert exported.headers["Content-Type"] == "application/x-ndjson"
    assert [json.loads(line) for line in exported.body.splitlines()] == seen
    as_csv = booked.request("GET", "/ledger/export?subject=key:a&since=2026-03-28T00:00:00Z")
    rows = list(csv.DictReader(io.StringIO(as_csv.body.decode())))
    wanted = [line for line in seen if line["subject"] == "key:a" and line["at"] >= "2026-03-28"]
    assert [row["amount"] for row in rows] == [line["amount"] for line in wanted]
    assert booked.get("/ledger?kind=settle")["items"] == []
    assert booked.request("GET", "/ledger/export?format=xml").status == 422


def test_no_cell_of_an_export_is_a_formula(api: Api, db: Connection) -> None:
    api.do("POST", "/subjects", {"name": "key:x"})
    formula = '=HYPERLINK("http://x")'
    api.do("PUT", f"/limits/key:x/{quote(formula, safe='')}", {"unit": "usd", "capacity": None})
    api.do("PUT", "/limits/key:x/-1+1", {"unit": "usd", "capacity": None})
    api.do("POST", "/usage-records", {"subject": "key:x", "costs": {"usd": "3"}}, role="worker")
    text = api.request("GET", "/ledger/export").body.decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["limit_name"] for row in rows} == {f"'{formula}", "'-1+1"}
    assert {row["amount"] for row in rows} == {"3"}


def test_check_repair_and_health(api: Api) -> None:
    assert api.do("POST", "/checks", role="viewer") == {"violations": []}
    assert api.do("POST", "/repair") == {"items": []}
    assert api.get("/log?action=check")["items"][0]["after"] == {"violations": "0"}
    found = api.server.request("GET", "/health/ready").json
    assert found["last_check_at"] is not None
    assert found["status"] in ("ready", "degraded")
