"""Lines of the log: what Python's own formatter would write."""

from __future__ import annotations

import logging
import sys

from quota.http.logs import _Formatter

AS_PYTHON = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")


def record(at_s: float, **members: object) -> logging.LogRecord:
    made = logging.LogRecord("quota.admin", logging.INFO, __file__, 1, 'a "line" of %s', ("60 %",), None)
    made.created, made.msecs = at_s, at_s % 1 * 1000
    made.__dict__.update(members)
    return made


def test_a_line_is_what_python_writes_whenever_it_is_written() -> None:
    ours = _Formatter()
    for at_s in (0.0, 0.999, 1.0, 1_800_000_000.0625, 1_800_000_000.5, 1_799_999_999.75, 0.25):
        assert ours.format(record(at_s)) == AS_PYTHON.format(record(at_s))


def test_a_traceback_stands_below_its_line() -> None:
    try:
        int("none")
    except ValueError:
        found = sys.exc_info()
    text = _Formatter().format(record(1.5, exc_info=found))
    assert text == AS_PYTHON.format(record(1.5, exc_info=found))
    assert text.endswith("'none'")
