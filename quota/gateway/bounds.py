"""Bounds beside cost: how many targets a request may name, and how long its period may be.

Rows do not tell all that a query costs: a hundred rows of one series and a hundred of ten cost the same, and a year
that has no rows was read all the same. What goes beyond a bound is refused before anything is held or asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from quota.costs.rows import Request
from quota.http.problems import Problem

__all__ = ["Period", "Targets"]

_DAY = timedelta(days=1)
_DATE_LENGTH = len("2026-01-31")
_MILLISECONDS_FROM = 10**11  # in seconds, this is the year 5138


@dataclass(frozen=True, slots=True)
class Targets:
    """At most so many targets, separated by commas or the parameter several times."""

    parameter: str
    most: int

    def __call__(self, request: Request) -> None:
        """Errors: `Problem` 422 for more."""
        given = _values(request, self.parameter)
        named = sum(1 for text in given for one in text.split(",") if one.strip())
        if named > self.most:
            what = f"{self.parameter} names {named}, at most {self.most} may be asked for at once; ask in parts."
            raise Problem(422, "too_many_targets", what, members={"parameter": self.parameter, "most": self.most})


@dataclass(frozen=True, slots=True)
class Period:
    """At most so long from the start to the end.

    Times are RFC 3339 (UTC when no offset is given), dates, or seconds or milliseconds of the Unix epoch. A date as
    the end counts to its own end; without an end the period lasts until now. The start is the upstream's to choose
    where it is left out.
    """

    start: str
    end: str
    longest: timedelta

    def __call__(self, request: Request) -> None:
        """Errors: `Problem` 422 for a longer one, and for times that cannot be read."""
        since = self._read(request, self.start)
        if since is None:
            return
        until = self._read(request, self.end, end=True) or datetime.now(UTC)
        if until - since > self.longest:
            what = f"From {self.start} to {self.end} is longer than {_told(self.longest)}; ask in parts."
            raise Problem(422, "period_too_long", what, members={"most_s": int(self.longest.total_seconds())})

    def _read(self, request: Request, parameter: str, *, end: bool = False) -> datetime | None:
        given = _values(request, parameter)
        if not given:
            return None
        try:
            (text,) = given
            return _instant(text, end=end)
        except (ValueError, OverflowError, OSError):
            what = f"{parameter} is no time; give it once, as 2026-01-31T12:00:00Z, 2026-01-31 or seconds since 1970."
            raise Problem(422, "invalid_period", what, members={"parameter": parameter}) from None


def _instant(text: str, *, end: bool) -> datetime:
    if text.isascii() and text.isdigit():
        seconds = int(text)
        return datetime.fromtimestamp(seconds / 1000 if seconds >= _MILLISECONDS_FROM else seconds, UTC)
    if len(text) == _DATE_LENGTH and "T" not in text:
        midnight = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
        return midnight + _DAY if end else midnight
    # A plus that was not encoded arrives as a space.
    found = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _told(span: timedelta) -> str:
    return f"{span.days} days" if span >= _DAY else f"{int(span.total_seconds())} s"


def _values(request: Request, parameter: str) -> Sequence[str]:
    # A query that cannot be read has no parameters, and would be within every bound.
    if not request.parameters and request.query.strip("&"):
        raise Problem(422, "invalid_query", "The query cannot be read, or has too many parameters; ask for less.")
    return request.parameters.get(parameter, ())
