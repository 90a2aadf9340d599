"""How a service logs: lines on stderr with time, logger, level and message."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable

__all__ = ["log_to_stderr", "writing_lines"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Has this process log from `INFO` on, unless it does already."""
    logging.basicConfig(level=logging.INFO, format=_FORMAT)


def writing_lines(name: str) -> Callable[[str], None]:
    """Returns what writes a line as the logger `name` would on level `INFO`, for lines that every request has.

    A record of Python's logging is made with a dozen members that are not shown, handed through loggers, filters and
    handlers, and formatted; that takes longer than everything that the line tells. A line that cannot be written is
    left out, as it is there.
    """
    known = (-1, "")  # one tuple: threads read a second with its own text

    def write(text: str) -> None:
        nonlocal known
        now_s = time.time()
        second, shown = known
        if second != int(now_s):
            second, shown = known = int(now_s), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it is closed
            # In one piece: lines of threads and processes stay whole.
            sys.stderr.write(f"{shown},{int((now_s - second) * 1000):03d} {name} INFO {text}\n")

    return write
