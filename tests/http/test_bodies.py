"""The parser of strangers' JSON: what it takes is exact, what it refuses it never quotes."""

from __future__ import annotations

import contextlib
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.http.bodies import BODY_BYTES_MAX, Malformed, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc\u00e9", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_json_says_is_what_comes_out(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Decimal("0.1")), ("1e3", Decimal(1000)), ("-0", 0), ("123456789012345678", 123456789012345678),
        ("1234567890123456789", Decimal("1234567890123456789")), ("1e999", Decimal("1e999")),
        ("0.30", Decimal("0.30")), ('"\\u00e9"', "\u00e9"), ('"\\\\u0000"', "\\u0000"),
    ],
)  # fmt: skip
def test_numbers_keep_their_digits(text: str, value: Any) -> None:
    found = parse(text.encode())
    assert found == value
    assert type(found) is type(value)
    if "e" not in text:
        assert str(found) == str(value)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"{", b"[1,]", b"{'a':1}", b"NaN", b"Infinity", b"-Infinity", b"01", b"+1", b"1_000", b"1" * 101,
        b"1e99999999999999999999", b'{"a":1,"a":2}', b'[{"a":{"b":1,"b":1}}]', b'"\\u0000"', b'"\x00"', b'"\\ud800"',
        b'{"\\udfff":1}', b"\xff", b'"\xc3"', b"\xef\xbb\xbf1", '"a"'.encode("utf-16"), b"[" * 33 + b"]" * 33,
        b"[" * 60_000, b'{"a":' * 10_000, b'"' + b"a" * BODY_BYTES_MAX + b'"', b'"unterminated', b"1 2",
    ],
)  # fmt: skip
def test_what_is_refused(raw: bytes) -> None:
    with pytest.raises(Malformed) as caught:
        parse(raw)
    assert len(str(caught.value)) < 100


def test_brackets_within_strings_are_no_depth() -> None:
    assert parse(b'["' + b"[{" * 100 + b'\\"[[[["]') == ["[{" * 100 + '"[[[[']
    assert parse(b"[" * 32 + b"]" * 32)


@given(st.binary(max_size=200))
def test_anything_is_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(Malformed):
        parse(raw)
