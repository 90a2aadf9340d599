"""How a service logs: lines on stderr with time, logger, level and message, cheap because every request has one."""

from __future__ import annotations

import logging

__all__ = ["log_to_stderr"]


class _Formatter(logging.Formatter):
    """`%(asctime)s %(name)s %(levelname)s %(message)s`, without looking for what else a format could ask for."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")
        self._known = (-1, "")  # one tuple: threads read a second with its own text

    def format(self, record: logging.LogRecord) -> str:
        """The line; with a traceback below it, where there is one."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.name} {record.levelname} {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - theirs
        """The time, its second written once for all that happens in it."""
        second, text = self._known
        if second != int(record.created):
            second, text = self._known = int(record.created), super().formatTime(record, self.default_time_format)
        return f"{text},{int(record.msecs):03d}"


def log_to_stderr() -> None:
    """Has this process log from `INFO` on, unless it does already."""
    # Nothing of these is shown, and each is found out for every line: thread, name of the process, and the line of code
    # that logs. So says the chapter "Optimization" of Python's logging HOWTO. (Its number gunicorn does show.)
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001 - documented
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
