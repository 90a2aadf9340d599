"""Traces: what is read, what is refused with file, line and column, and what requests cost."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from quota.trace import Prices, Request, TraceError, read_trace, sample_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROOT = Path(__file__).parent.parent


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("\ufeffGeneratedTokens, ContextTokens ,Model\r\n7,100,a\r\n\r\n0,5,b", encoding="utf-8", newline="")
    assert read_trace(file) == [Request(100, 7), Request(5, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: empty; the first line must name the columns, ContextTokens and GeneratedTokens among them"),
        (HEADER, "t.csv: no request below the header line"),
        ("a,b\n1,2\n", 't.csv, line 1: column ContextTokens is not there (found "a, b")'),
        ("ContextTokens,ContextTokens,GeneratedTokens\n1,2,3\n", "line 1: column ContextTokens is twice"),
        (HEADER + "x,1,2\nx,1.5,2\n", 't.csv, line 3, column ContextTokens: "1.5" is not a whole number of tokens'),
        (HEADER + "x,1,-2\n", 't.csv, line 2, column GeneratedTokens: "-2" is not'),
        (HEADER + "x,1,1234567890\n", "is not a whole number of tokens below 10^9"),
        (HEADER + "x,1,\n", 't.csv, line 2, column GeneratedTokens: "" is not'),
        (HEADER + "x,٣,1\n", r'column ContextTokens: "\u0663" is not'),
        (HEADER + "x,1\n", "t.csv, line 2, column GeneratedTokens: missing, the line has only 2 of its values"),
        (HEADER + '"x,1,2\n', "t.csv, line 2: not CSV (unexpected end of data)"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError) as error:
        read_trace(file)
    assert message in str(error.value)


def test_bytes_that_are_no_text_are_found_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(HEADER.encode() + b"caf\xe9,1,2\nx,\xff,2\n")
    with pytest.raises(TraceError, match="line 3, column ContextTokens"):
        read_trace(file)
    with pytest.raises(TraceError, match="No such file or directory; give a CSV file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_costs_are_exact() -> None:
    prices, request = Prices(Decimal("3"), Decimal("0.000001")), Request(4808, 10)
    assert prices.worst(request, 2048) == Decimal("0.014424002048")
    assert prices.true(request) == Decimal("0.014424000010")
    most = Prices(Decimal("999999.999999"), Decimal("999999.999999"))
    assert most.cost(999_999_999, 999_999_999) == Decimal("1999999997.998000000002")


def test_the_packaged_trace_is_what_its_script_writes() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/make-trace"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(sample_trace()) == 1000
