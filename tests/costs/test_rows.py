"""Row cost: the source text's formula and table, and estimates that keep to their bounds whatever is asked."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quota.costs.rows import Request, fixed, id_count, minimum, page_limit, row_cost, through_nodes


def request(query: str) -> Request:
    return Request("GET", "/rows", query, {})


@pytest.mark.parametrize(
    ("rows", "node_calls", "cost"), [(100, 0, 100), (100, 1, 120), (100, 3, 160), (1, 1, 2), (0, 3, 0), (100, -2, 100)]
)
def test_the_table_of_costs(rows: int, node_calls: int, cost: int) -> None:
    assert row_cost(rows, node_calls) == cost


def test_a_batch_counts_once_and_calls_do_not_compound() -> None:
    # Three series of one unit in one call; of three units in three; one day's call is not one a day.
    assert (row_cost(100, 1), row_cost(100, 3)) == (120, 160)
    assert row_cost(1000, 3) != round(1000 * 1.2**3)


@settings(deadline=None)
@given(st.integers(0, 10**17), st.integers(-5, 1000), st.integers(0, 500))
def test_the_formula_is_exact(rows: int, node_calls: int, percent: int) -> None:
    exact = Fraction(rows) * (100 + percent * max(0, node_calls)) / 100
    assert row_cost(rows, node_calls, percent) == math.ceil(exact)


@pytest.mark.parametrize(("wrong", "error"), [((-1,), ValueError), ((1, 1, -1), ValueError), ((1.5,), TypeError)])
def test_what_is_no_number_of_rows(wrong: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match=str(wrong[-1])):
        row_cost(*wrong)
    with pytest.raises(TypeError, match="True"):
        row_cost(True)


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("limit=1", 1),
        ("limit=40", 40),
        ("limit=300", 300),
        ("limit=007", 7),
        # Absent, above the most, or no positive whole number: the most.
        ("", 300),
        ("limit=", 300),
        ("limit=301", 300),
        ("limit=0", 300),
        ("limit=-5", 300),
        ("limit=2.5", 300),
        ("limit=%2B5", 300),
        ("limit=%205", 300),
        ("limit=1e2", 300),
        ("limit=%D9%A3", 300),  # digits of another script
        ("limit=abc", 300),
        ("limit=" + "9" * 5000, 300),
        # Which of them would count is anybody's guess.
        ("limit=1&limit=2", 300),
        ("&".join(["a=1"] * 1001) + "&limit=1", 300),
    ],
)
def test_page_limit(query: str, rows: int) -> None:
    assert page_limit(300)(request(query)) == rows


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("ids=7", 1),
        ("ids=a,b,c", 3),
        ("ids=a&ids=b,c", 3),
        ("ids=a,,b,%20", 2),
        ("ids=", 0),
        ("ids=" + ",".join(["x"] * 400), 300),
        ("", 300),
    ],
)
def test_id_count(query: str, rows: int) -> None:
    assert id_count("ids")(request(query)) == rows


def test_they_compose() -> None:
    estimate = minimum(id_count("ids"), page_limit(100), fixed(50))
    assert [estimate(request(q)) for q in ("ids=a,b", "ids=a,b&limit=1", "")] == [2, 1, 50]
    assert estimate == minimum(id_count("ids"), page_limit(100), fixed(50))
    assert through_nodes(page_limit(100), calls=3)(request("")) == 160
    assert fixed()(request("limit=9")) == 1
    with pytest.raises(ValueError, match="minimum of nothing"):
        minimum()


@given(st.text("ab=&%+2;é ", max_size=30), st.sampled_from([0, 999, 1000]))
def test_parameters_are_those_of_the_standard_library(query: str, more: int) -> None:
    """Queries without anything to decode are read in a shorter way, to the same end."""
    query += "&x=1" * more
    try:
        expected = parse_qs(query, keep_blank_values=True, max_num_fields=1000)
    except ValueError:
        expected = {}
    assert request(query).parameters == expected


@settings(deadline=None)
@given(st.text(), st.text())
def test_no_query_breaks_an_estimate(query: str, limit: str) -> None:
    for text in (query, f"limit={limit}", f"ids={limit}"):
        assert 1 <= page_limit(300)(request(text)) <= 300
        assert 0 <= id_count("ids")(request(text)) <= 300
