"""Lines of the log: what Python's own logging would write."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time

import pytest

from quota.http import logs


def as_python(at_s: float, text: str) -> str:
    made = logging.LogRecord("quota.admin", logging.INFO, __file__, 1, text, (), None)
    made.created, made.msecs = at_s, int(at_s % 1 * 1000)
    return logging.Formatter(logs._FORMAT).format(made) + "\n"


def test_a_line_is_what_python_writes_whenever_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = logs.writing_lines("quota.admin")
    for at_s in (0.0, 0.9375, 1.0, 1_800_000_000.0625, 1_800_000_000.5, 1_799_999_999.75, 0.25):
        monkeypatch.setattr(time, "time", lambda at_s=at_s: at_s)
        write('{"a": "60 % of %s"}')
        assert capsys.readouterr().err == as_python(at_s, '{"a": "60 % of %s"}')


def test_a_line_that_cannot_be_written_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    write = logs.writing_lines("quota.admin")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    write("into a closed file")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as nobody_reads:
        monkeypatch.setattr(sys, "stderr", nobody_reads)
        write("into a pipe without a reader")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # so that closing it can flush


def test_lines_of_threads_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    write = logs.writing_lines("quota.admin")
    with os.fdopen(writer, "w", buffering=1) as into:
        monkeypatch.setattr(sys, "stderr", into)

        def many(letter: str) -> None:
            for _ in range(50):
                write(letter * 100)

        threads = [threading.Thread(target=many, args=(letter,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with os.fdopen(reader) as out:
        lines = [line.split(" INFO ")[1] for line in out.read().splitlines()]
    assert sorted(lines) == sorted(letter * 100 for letter in "abcd" for _ in range(50))
