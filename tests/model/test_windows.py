"""Calendar windows tile the time line, whatever the clocks of the world do at midnight."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from tests.model.windows import Window, calendar_window, start_of, window_at

ZONES = (
    "America/Havana",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Pacific/Apia",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "Asia/Tokyo",
    "UTC",
)


def at(text: str) -> datetime:
    """An instant in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "day", "start"),
    [
        # Clocks fall back at 01:00 to 00:00: the day has two midnights and begins at the first.
        ("America/Havana", date(2026, 11, 1), "2026-11-01T04:00"),
        ("America/Havana", date(2026, 11, 2), "2026-11-02T05:00"),
        # Clocks spring forward at 00:00 to 01:00: the day has no midnight and begins at 01:00.
        ("America/Sao_Paulo", date(2018, 11, 4), "2018-11-04T03:00"),
        ("America/Sao_Paulo", date(2018, 11, 5), "2018-11-05T02:00"),
        # Clocks fall back at 00:00 to 23:00: midnight comes once, an hour after the date was nearly reached.
        ("America/Sao_Paulo", date(2018, 2, 18), "2018-02-18T03:00"),
        # Clocks fall back at 00:01 to 23:01: the new date lasted a minute, and that minute began its window.
        ("America/St_Johns", date(1995, 10, 29), "1995-10-29T02:30"),
        ("America/St_Johns", date(1995, 10, 30), "1995-10-30T03:30"),
        # Clocks spring forward at 00:01: midnight is there, and passes once.
        ("America/St_Johns", date(1995, 4, 2), "1995-04-02T03:30"),
        # A day that was skipped has an empty window.
        ("Pacific/Apia", date(2011, 12, 29), "2011-12-29T10:00"),
        ("Pacific/Apia", date(2011, 12, 30), "2011-12-30T10:00"),
        ("Pacific/Apia", date(2011, 12, 31), "2011-12-30T10:00"),
        ("Pacific/Apia", date(2012, 1, 1), "2011-12-31T10:00"),
        # Half an hour of daylight saving.
        ("Australia/Lord_Howe", date(2026, 4, 5), "2026-04-04T13:00"),
        ("Australia/Lord_Howe", date(2026, 4, 6), "2026-04-05T13:30"),
        ("Asia/Tokyo", date(2026, 6, 1), "2026-05-31T15:00"),
    ],
)
def test_a_date_starts_at_its_first_instant(zone: str, day: date, start: str) -> None:
    assert start_of(day, zone) == at(start)


def test_the_repeated_evening_belongs_to_the_day_that_has_begun() -> None:
    # 23:30 local, for the second time, on the 28th: the window of the 29th is open already.
    repeated = at("1995-10-29T03:00")
    assert calendar_window("day", "America/St_Johns", repeated) == Window(
        at("1995-10-29T02:30"), at("1995-10-30T03:30")
    )


def test_the_last_day_before_a_skipped_one_ends_where_the_next_begins() -> None:
    assert calendar_window("day", "Pacific/Apia", at("2011-12-30T09:59")).end == at("2011-12-30T10:00")
    assert calendar_window("day", "Pacific/Apia", at("2011-12-30T10:00")) == Window(
        at("2011-12-30T10:00"), at("2011-12-31T10:00")
    )


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("period", ["day", "week", "month"])
@pytest.mark.parametrize("begin", ["1995-10-20", "1995-03-25", "2011-12-20", "2018-02-10", "2018-10-25", "2026-10-25"])
def test_windows_tile_the_time_line(zone: str, period: str, begin: str) -> None:
    instant = at(begin)
    window = calendar_window(period, zone, instant)
    while instant < at(begin) + timedelta(days=21):
        instant += timedelta(minutes=47)
        found = calendar_window(period, zone, instant)
        assert found.start <= instant < found.end
        assert found == window or found.start == window.end
        window = found


def test_a_month_lasts_from_first_to_first() -> None:
    tokyo = calendar_window("month", "Asia/Tokyo", at("2026-02-28T14:59"))
    assert tokyo == Window(at("2026-01-31T15:00"), at("2026-02-28T15:00"))


def test_a_week_begins_on_monday() -> None:
    assert calendar_window("week", "UTC", at("2026-11-29T23:59")) == Window(at("2026-11-23"), at("2026-11-30"))


@pytest.mark.parametrize(
    ("period", "zone", "start", "end"),
    [
        ("1 hour", "UTC", "2026-01-01T10:17:03", "2026-01-01T11:17:03"),
        # An hour is an hour, also where the clock shows it twice.
        ("1 hour", "America/New_York", "2026-11-01T05:30", "2026-11-01T06:30"),
        ("1 hour", "America/New_York", "2026-11-01T04:30", "2026-11-01T05:30"),
        ("1 hour", "America/New_York", "2026-03-08T06:30", "2026-03-08T07:30"),
        # A local day across a change of the clock has 25 hours.
        ("1 day", "America/New_York", "2026-10-31T16:00", "2026-11-01T17:00"),
        ("1 month", "UTC", "2026-01-31T12:00", "2026-02-28T12:00"),
    ],
)
def test_an_interval_runs_from_its_first_use(period: str, zone: str, start: str, end: str) -> None:
    assert window_at(period, zone, at(start)) == Window(at(start), at(end))
