"""Windows of budgets: intervals opened by the first use, and calendar tiles.

A calendar window starts at the first instant of its local date and ends where the next one starts. "First instant of a
date" is the earliest instant at which the local calendar has reached it: where a clock is set back across midnight a
date is reached twice and the first time counts; where a date is skipped its window is empty. So the windows tile the
time line, without a gap and without an overlap.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tests.model.errors import ModelError

CALENDAR = ("day", "week", "month")
_SPAN = re.compile(r"([1-9][0-9]*) (second|minute|hour|day|week|month|year)s?")


@dataclass(frozen=True)
class Window:
    """Half open: [start, end)."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class Span:
    """A length of time: months and days follow the local calendar, the rest the clock."""

    months: int = 0
    days: int = 0
    exact: timedelta = timedelta(0)


def check_period(period: str | None) -> str | None:
    """None (lifetime), `day`, `week`, `month`, or one number and one unit such as `1 hour`."""
    if period is not None and period not in CALENDAR:
        parse_span(period)
    return period


def check_zone(name: str) -> str:
    """A zone that the IANA database knows."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as failure:
        raise ModelError("invalid_argument", f"no time zone {name!r}") from failure
    return name


def parse_span(text: str) -> Span:
    """The interval notation of the model: `90 minutes`, `2 days`, `1 month`."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ModelError("invalid_argument", f"period {text!r}")
    count, unit = int(match[1]), match[2]
    if unit in ("month", "year"):
        return Span(months=count * (12 if unit == "year" else 1))
    if unit in ("day", "week"):
        return Span(days=count * (7 if unit == "week" else 1))
    return Span(exact=timedelta(**{f"{unit}s": count}))


def window_at(period: str, zone: str, now: datetime) -> Window:
    """The window that a use at `now` opens."""
    if period in CALENDAR:
        return calendar_window(period, zone, now)
    return Window(now, _add(now, parse_span(period), ZoneInfo(zone)))


def calendar_window(period: str, zone: str, now: datetime) -> Window:
    """The tile that contains `now`."""
    today = now.astimezone(ZoneInfo(zone)).date()
    while start_of(today + timedelta(days=1), zone) <= now:
        today += timedelta(days=1)
    if period == "day":
        first, following = today, today + timedelta(days=1)
    elif period == "week":
        first = today - timedelta(days=today.weekday())
        following = first + timedelta(days=7)
    else:
        first = today.replace(day=1)
        following = (first + timedelta(days=31)).replace(day=1)
    return Window(start_of(first, zone), start_of(following, zone))


@lru_cache(maxsize=4096)
def start_of(day: date, zone: str) -> datetime:
    """The earliest instant at which the local date in `zone` is `day` or later."""
    midnight = datetime.combine(day, time(0), UTC)
    for begin, end, offset in _stretches(midnight - timedelta(hours=48), midnight + timedelta(hours=48), zone):
        reached = max(begin, midnight - offset)
        if reached < end:
            return reached
    raise AssertionError(f"{day} is never reached in {zone}")


def _stretches(begin: datetime, end: datetime, zone: str) -> Iterator[tuple[datetime, datetime, timedelta]]:
    """The stretches of one UTC offset between two instants, in order."""
    info = ZoneInfo(zone)
    stretch, at = begin, begin
    while at < end:
        following = at + timedelta(hours=1)
        if _offset(at, info) != _offset(following, info):
            low, high = at, following
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) // 2
                middle = middle.replace(microsecond=0)
                low, high = (middle, high) if _offset(middle, info) == _offset(at, info) else (low, middle)
            yield stretch, high, _offset(at, info)
            stretch = high
        at = following
    yield stretch, end, _offset(end, info)


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _add(now: datetime, span: Span, zone: ZoneInfo) -> datetime:
    """now + span: whole months and days on the local calendar, then the exact part on the clock."""
    if not span.months and not span.days:
        return now + span.exact
    local = now.astimezone(zone).replace(tzinfo=None)
    month = local.year * 12 + local.month - 1 + span.months
    year, month = month // 12, month % 12 + 1
    day = min(local.day, calendar.monthrange(year, month)[1])
    wall = local.replace(year=year, month=month, day=day) + timedelta(days=span.days)
    return _instant(wall, zone) + span.exact


def _instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """The instant of a wall clock reading, as PostgreSQL reads it: the later of two; in a gap the old offset holds."""
    early, late = wall.replace(tzinfo=zone, fold=0), wall.replace(tzinfo=zone, fold=1)
    before, after = early.utcoffset(), late.utcoffset()
    assert before is not None
    assert after is not None
    return (late if before > after else early).astimezone(UTC)
