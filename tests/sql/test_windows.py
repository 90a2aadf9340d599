"""Windows: first instants of local dates, months and weeks, intervals, and clocks that step back or that others set."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from tests.server import Connection
from tests.sql.kit import (
    NOON,
    advance,
    balance,
    bucket,
    budget,
    call,
    entries,
    hold,
    nothing_changes,
    outcome,
    reserve,
    set_clock,
    spent_reserved,
    value,
)

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Havana",  # leaves and re-enters summer time at midnight
    "America/Sao_Paulo",  # skipped midnights
    "America/St_Johns",  # changed at one minute past midnight
    "Pacific/Apia",  # lost a whole day
    "Australia/Lord_Howe",  # half an hour of summer time
    "Asia/Kolkata",
    "Asia/Tehran",
    "Africa/Cairo",
    "Asia/Seoul",
]
# Days around which a clock was changed in some of them.
DATES = [
    date(2006, 10, 29),
    date(2008, 4, 5),
    date(2011, 3, 13),
    date(2011, 11, 6),
    date(2011, 12, 30),
    date(2016, 3, 27),
    date(2018, 11, 4),
    date(2023, 4, 28),
    date(2024, 3, 10),
    date(2024, 11, 3),
    date(2026, 4, 5),
    date(2026, 10, 25),
]


def first_instant(day: date, zone: ZoneInfo) -> datetime:
    """The earliest instant, to the minute, at which the local calendar has reached the date: found by walking."""
    at = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(hours=16)
    while at.astimezone(zone).date() < day:
        at += timedelta(minutes=15)
    at -= timedelta(minutes=15)
    while at.astimezone(zone).date() < day:
        at += timedelta(minutes=1)
    return at


def _same_zone_data(conn: Connection, zone: str, days: list[date]) -> bool:
    """The server and Python may know different releases of the zones; only where both agree can they be compared."""
    for day in days:
        at = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
        local = value(conn, "SELECT %s::timestamptz AT TIME ZONE %s", at, zone)
        if local != at.astimezone(ZoneInfo(zone)).replace(tzinfo=None):
            return False
    return True


@pytest.mark.parametrize("zone", ZONES)
def test_a_day_begins_at_the_first_instant_of_its_date(tx_conn: Connection, zone: str) -> None:
    """G12: compare instants, not wall clocks. Days tile: each ends where the next begins."""
    days = [day + timedelta(days=n) for day in DATES for n in (-1, 0, 1, 2)]
    assert _same_zone_data(tx_conn, zone, days)
    expected = {day: first_instant(day, ZoneInfo(zone)) for day in days}
    found: dict[date, datetime] = dict(
        tx_conn.execute(
            "SELECT d, quota_internal.first_instant(d, %s) FROM unnest(%s::date[]) d", (zone, days)
        ).fetchall()
    )
    assert found == expected


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("period", ["day", "week", "month"])
def test_every_instant_lies_in_its_window_and_windows_tile(tx_conn: Connection, zone: str, period: str) -> None:
    for day in DATES:
        at = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(days=2)
        until = at + timedelta(days=4 if period == "day" else 40)
        step = timedelta(minutes=47) if period == "day" else timedelta(hours=11)
        instants = []
        while at < until:
            instants.append(at)
            at += step
        found = tx_conn.execute(
            "SELECT a, w.window_start, w.window_end FROM unnest(%s::timestamptz[]) a,"
            " quota_internal.window_at(%s, %s, a) w ORDER BY a",
            (instants, period, zone),
        ).fetchall()
        assert all(start <= a < end for a, start, end in found)
        windows = sorted({(start, end) for _, start, end in found})
        assert all(one[1] == two[0] for one, two in pairwise(windows)), windows


@pytest.mark.parametrize(
    ("zone", "at", "period", "start", "end", "hours"),
    [
        ("Europe/Berlin", "2026-03-29 12:00+00", "day", "2026-03-28 23:00+00", "2026-03-29 22:00+00", 23),
        ("Europe/Berlin", "2026-10-25 12:00+00", "day", "2026-10-24 22:00+00", "2026-10-25 23:00+00", 25),
        ("America/Havana", "2026-03-08 12:00+00", "day", "2026-03-08 05:00+00", "2026-03-09 04:00+00", 23),
        ("America/Havana", "2026-11-01 12:00+00", "day", "2026-11-01 04:00+00", "2026-11-02 05:00+00", 25),
        ("America/Sao_Paulo", "2018-11-04 12:00+00", "day", "2018-11-04 03:00+00", "2018-11-05 02:00+00", 23),
        ("Australia/Lord_Howe", "2026-04-05 02:00+00", "day", "2026-04-04 13:00+00", "2026-04-05 13:30+00", 24.5),
        ("Pacific/Apia", "2011-12-31 00:00+00", "day", "2011-12-30 10:00+00", "2011-12-31 10:00+00", 24),
        ("Asia/Tokyo", "2026-05-01 00:00+00", "month", "2026-04-30 15:00+00", "2026-05-31 15:00+00", 744),
        ("UTC", "2026-02-28 23:59:59.999999+00", "month", "2026-02-01 00:00+00", "2026-03-01 00:00+00", 672),
        ("UTC", "2028-02-29 12:00+00", "month", "2028-02-01 00:00+00", "2028-03-01 00:00+00", 696),
        ("UTC", "2027-01-03 12:00+00", "week", "2026-12-28 00:00+00", "2027-01-04 00:00+00", 168),
        ("UTC", "2027-01-04 00:00+00", "week", "2027-01-04 00:00+00", "2027-01-11 00:00+00", 168),
        ("Asia/Seoul", "2026-05-03 15:00+00", "week", "2026-05-03 15:00+00", "2026-05-10 15:00+00", 168),
    ],
)
def test_known_windows(
    tx_conn: Connection, zone: str, at: str, period: str, start: str, end: str, hours: float
) -> None:
    budget(tx_conn, "user:1", 50, period=period, time_zone=zone)
    set_clock(tx_conn, at)
    hold(tx_conn, "user:1", {"usd": 1})
    row = balance(tx_conn, "user:1")
    assert (row["window_start"], row["window_end"]) == (datetime.fromisoformat(start), datetime.fromisoformat(end))
    assert (row["window_end"] - row["window_start"]).total_seconds() == hours * 3600


def test_the_months_tile_for_four_years_in_every_zone(tx_conn: Connection) -> None:
    """A20: never thirty days, never a day that slides."""
    for zone in ZONES:
        broken = value(
            tx_conn,
            "SELECT count(*) FROM (SELECT %s) z(zone), generate_series(0, 47) n,"
            " LATERAL (SELECT make_date(2024 + n / 12, n %% 12 + 1, 1) AS day) d,"
            " quota_internal.first_instant(day, zone) first,"
            " quota_internal.first_instant((day + interval '1 month')::date, zone) next,"
            " quota_internal.window_at('month', zone, first) w"
            " WHERE (w.window_start, w.window_end) <> (first, next)",
            zone,
        )
        assert broken == 0, zone


@pytest.mark.parametrize(
    ("zone", "opened", "period", "seconds"),
    [
        ("America/New_York", "2026-11-01 05:30+00", "1 hour", 3600),  # 1:30, the first of two
        ("America/New_York", "2026-11-01 04:30+00", "1 hour", 3600),
        ("America/New_York", "2026-03-08 06:30+00", "1 hour", 3600),  # 1:30, half an hour before the jump
        ("America/New_York", "2026-03-08 05:00+00", "24 hours", 86400),
        ("America/New_York", "2026-03-08 05:00+00", "1 day", 82800),  # a day of the calendar
        ("Australia/Lord_Howe", "2026-04-04 14:45+00", "30 minutes", 1800),
        ("Asia/Shanghai", "2026-05-01 00:00+00", "24 hours", 86400),
        ("UTC", "2026-01-31 12:00+00", "1 month", 28 * 86400),
    ],
)
def test_an_interval_opens_at_the_first_use_and_lasts_its_length(
    tx_conn: Connection, zone: str, opened: str, period: str, seconds: int
) -> None:
    """R4, G12: hours are hours, whatever the wall clock does; days and months follow the calendar of the zone."""
    budget(tx_conn, "user:1", 50, period=period, time_zone=zone)
    set_clock(tx_conn, opened)
    assert balance(tx_conn, "user:1")["window_start"] is None
    hold(tx_conn, "user:1", {"usd": 1})
    row = balance(tx_conn, "user:1")
    assert row["window_start"] == datetime.fromisoformat(opened)
    assert (row["window_end"] - row["window_start"]).total_seconds() == seconds


@pytest.mark.parametrize("session_zone", ["UTC", "Asia/Seoul", "America/St_Johns"])
def test_the_sessions_zone_has_no_say(tx_conn: Connection, session_zone: str) -> None:
    """A17, D43: neither in windows nor in time-outs."""
    tx_conn.execute(f"SET LOCAL timezone = '{session_zone}'".encode())
    budget(tx_conn, "user:1", 50, "day", period="day", time_zone="Asia/Tokyo")
    budget(tx_conn, "user:1", 50, "interval", period="1 day")
    set_clock(tx_conn, "2026-03-28 15:00:00+00")
    answer = reserve(tx_conn, "user:1", {"usd": 1}, ttl="1 day")
    assert answer["expires_at"] == datetime(2026, 3, 29, 15, tzinfo=UTC)
    day, interval = (balance(tx_conn, "user:1", name) for name in ("day", "interval"))
    assert day["window_start"] == datetime(2026, 3, 28, 15, tzinfo=UTC)
    assert interval["window_end"] == datetime(2026, 3, 29, 15, tzinfo=UTC)


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", [0, 1, 2])
@pytest.mark.parametrize("actual", [1, 5])
def test_a_window_turns_between_reserve_and_settle(tx_conn: Connection, resets: int, actual: int) -> None:
    """A12: the settle touches only its own period."""
    budget(tx_conn, "user:1", 5, period="day", time_zone="Europe/Berlin")
    set_clock(tx_conn, "2026-03-28 22:59:59+00")
    key = hold(tx_conn, "user:1", {"usd": 4}, ttl="3 hours")
    set_clock(tx_conn, "2026-03-28 23:00:01+00")
    for _ in range(resets):
        call(tx_conn, "release", hold(tx_conn, "user:1", {"usd": 5}))
    call(tx_conn, "settle", key, {"usd": actual})
    assert spent_reserved(tx_conn, "user:1") == (0, 0)
    assert outcome(tx_conn, "reserve", "user:1", {"usd": 5}) == "ok"
    assert sum(amount for _, amount in entries(tx_conn, key)) == actual


@pytest.mark.parametrize("on_expiry", ["release", "charge"])
@pytest.mark.parametrize("used_since", [False, True])
def test_a_hold_that_expires_after_its_window_is_not_the_new_windows_affair(
    tx_conn: Connection, on_expiry: str, used_since: bool
) -> None:
    """R8: whether or not a call has opened the new window when the reaper comes."""
    set_clock(tx_conn, NOON)
    budget(tx_conn, "user:1", 10, "hourly", period="1 hour", on_expiry=on_expiry)
    budget(tx_conn, "user:1", 10, "life", on_expiry=on_expiry)
    overdue = hold(tx_conn, "user:1", {"usd": 4}, ttl="1 minute")
    advance(tx_conn, "1 hour")
    if used_since:
        hold(tx_conn, "user:1", {"usd": 3})
    now_held = 3 if used_since else 0
    assert call(tx_conn, "reap", 100) == {
        "released": int(on_expiry == "release"),
        "charged": int(on_expiry == "charge"),
    }
    assert value(tx_conn, "SELECT state FROM quota.reservations WHERE reservation = %s", overdue) == "expired"
    assert spent_reserved(tx_conn, "user:1", "hourly") == (0, now_held)
    assert spent_reserved(tx_conn, "user:1", "life") == (4 if on_expiry == "charge" else 0, now_held)
    assert tx_conn.execute("SELECT * FROM quota.check()").fetchall() == []


def test_rejected_calls_renew_nothing(tx_conn: Connection) -> None:
    """G10, D27, L30: the first call of the new window sees nothing spent, however often one asked before."""
    budget(tx_conn, "user:1", 50, period="month")
    set_clock(tx_conn, "2026-05-31 23:59:00+00")
    call(tx_conn, "record", "user:1", {"usd": "55.69"})
    with nothing_changes(tx_conn):
        for _ in range(20):
            assert reserve(tx_conn, "user:1", {"usd": 1})["retry_after_s"] == 60
    set_clock(tx_conn, "2026-06-01 00:00:00+00")
    assert spent_reserved(tx_conn, "user:1") == (0, 0)
    assert reserve(tx_conn, "user:1", {"usd": 50})["granted"]


def test_a_window_is_half_open(tx_conn: Connection) -> None:
    budget(tx_conn, "user:1", 100, period="1 hour")
    set_clock(tx_conn, NOON)
    call(tx_conn, "record", "user:1", {"usd": 100})
    advance(tx_conn, "59 minutes 59.999999 seconds")
    assert reserve(tx_conn, "user:1", {"usd": 1})["reason"] == "exhausted"
    advance(tx_conn, "1 microsecond")
    hold(tx_conn, "user:1", {"usd": 100})
    assert balance(tx_conn, "user:1")["window_start"] == datetime(2026, 5, 4, 13, tzinfo=UTC)


# -- clocks that step back --------------------------------------------------------------------------------------------


def test_a_clock_that_steps_back_refills_nothing_and_moves_no_stamp_back(tx_conn: Connection) -> None:
    """A18, L16."""
    bucket(tx_conn, "user:1", 10, 1)
    set_clock(tx_conn, "2026-05-04 12:00:11+00")
    hold(tx_conn, "user:1", {"cost": 4})
    set_clock(tx_conn, "2026-05-04 12:00:00+00")
    assert balance(tx_conn, "user:1", "rate")["level"] == 6
    for _ in range(3):
        hold(tx_conn, "user:1", {"cost": 2})
    answer = reserve(tx_conn, "user:1", {"cost": 1})
    assert (answer["reason"], answer["retry_after_s"]) == ("rate", 12)
    set_clock(tx_conn, "2026-05-04 12:00:12+00")
    assert balance(tx_conn, "user:1", "rate")["level"] == 1


def test_a_clock_that_steps_back_reopens_no_window(tx_conn: Connection) -> None:
    budget(tx_conn, "user:1", 10, "hour", period="1 hour")
    budget(tx_conn, "user:1", 10, "day", period="day")
    set_clock(tx_conn, "2026-05-04 00:30:00+00")
    call(tx_conn, "record", "user:1", {"usd": 9})
    set_clock(tx_conn, "2026-05-03 23:00:00+00")
    assert reserve(tx_conn, "user:1", {"usd": 2})["reason"] == "exhausted"
    hold(tx_conn, "user:1", {"usd": 1})
    assert [spent_reserved(tx_conn, "user:1", name) for name in ("hour", "day")] == [(9, 1), (9, 1)]


def test_a_bucket_idle_for_years_is_full_and_no_more(tx_conn: Connection) -> None:
    """L18."""
    bucket(tx_conn, "user:1", 10, "0.000000000001")
    set_clock(tx_conn, NOON)
    call(tx_conn, "settle", hold(tx_conn, "user:1", {"cost": 10}))
    set_clock(tx_conn, "2126-05-04 12:00:00+00")
    assert 0 < balance(tx_conn, "user:1", "rate")["level"] < 10
    bucket(tx_conn, "user:2", 10, 1)
    hold(tx_conn, "user:2", {"cost": 10})
    set_clock(tx_conn, "2226-05-04 12:00:00+00")
    assert balance(tx_conn, "user:2", "rate")["level"] == 10


def test_a_part_of_a_refill_counts(tx_conn: Connection) -> None:
    """L1, L3, L5: the wait is exact; whole seconds are for who speaks HTTP."""
    bucket(tx_conn, "user:1", 5, "0.016666666667")
    set_clock(tx_conn, NOON)
    hold(tx_conn, "user:1", {"cost": 5})
    advance(tx_conn, "59 seconds")
    wait = reserve(tx_conn, "user:1", {"cost": 1})["retry_after_s"]
    assert 0.99 < wait < 1.01
    advance(tx_conn, timedelta(seconds=float(wait)))
    assert reserve(tx_conn, "user:1", {"cost": 1})["granted"]


def test_two_workers_whose_clocks_differ_by_five_seconds(tx_conn: Connection) -> None:
    """A18: whatever the order of their calls, no more is granted than the capacity and the true refill."""
    bucket(tx_conn, "user:1", 10, 1)
    granted = 0
    start = datetime(2026, 5, 4, 12, tzinfo=UTC)
    for n in range(40):
        set_clock(tx_conn, start + timedelta(seconds=n // 4) + timedelta(seconds=5 * (n % 2)))
        granted += outcome(tx_conn, "reserve", "user:1", {"cost": 1}) == "ok"
    assert granted <= 10 + 9 + 5
