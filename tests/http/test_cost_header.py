"""The cost that an application reports: decimal digits and nothing else, and 0 is not the same as nothing."""

from __future__ import annotations

from typing import Any

import flask
import pytest
from fastapi import Response as FastAPIResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quota.http.cost_header import COST, FACTS, read_cost, read_facts, set_cost


@pytest.mark.parametrize(
    ("values", "cost"),
    [
        (["0"], 0),
        (["160"], 160),
        (["007"], 7),
        ([" 5 "], 5),
        (["9" * 18], 10**18 - 1),
        ([], None),
        ([""], None),
        (["-1"], None),
        (["+1"], None),
        (["1.0"], None),
        (["1e3"], None),
        (["1_000"], None),
        (["٣"], None),
        (["abc"], None),
        (["9" * 19], None),
        (["9" * 5000], None),
        (["1", "2"], None),
        (["1, 2"], None),
    ],
)
def test_read_cost(values: list[str], cost: int | None) -> None:
    assert read_cost(values) == cost


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), max_size=3))
def test_no_header_breaks_the_readers(values: list[str]) -> None:
    cost = read_cost(values)
    assert cost is None or 0 <= cost < 10**18
    assert all(0 <= value < 10**15 for value in read_facts(values).values())


_FACTS = st.lists(
    st.builds(
        "{}={}".format,
        st.sampled_from(["rows", "node_calls", "database_ms", "rows_read", "other", "a1", "Rows", ""]),
        st.one_of(
            st.integers(-1, 10**16).map(str),
            st.decimals(0, 10**13, places=2).map(str),
            st.sampled_from(["", "1.", ".5", "?1", '"5"', "5;a=1", "1.2345", "007", "1e3", "\u0663", "(1 2)"]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=300)
@example(["rows=1."], ", ", "")
@example(["rows=1.2345"], ", ", "")
@example(["rows=1234567890123"], ", ", "")
@example(["rows=1234567890123.5"], ", ", "")
@example(["rows=1", "rows=2"], ", ", "")
@given(_FACTS, st.sampled_from([", ", ",", " , ", ",, "]), st.sampled_from(["", ", ", " "]))
def test_plain_facts_are_read_as_the_parser_reads_them(facts: list[str], between: str, end: str) -> None:
    """What set_cost writes has a way of its own; it knows nothing that Structured Fields do not say."""
    text = between.join(facts) + end
    # In two lines it is not read in that way.
    assert read_facts([text]) == read_facts([text, "more=1"])


@pytest.mark.parametrize("response", [flask.Response(), FastAPIResponse()], ids=["flask", "fastapi"])
def test_an_application_sets_what_the_gateway_reads(response: Any) -> None:
    assert set_cost(response, 100, 3, rows_read=5000, database_ms=12.34567) == 160
    assert read_cost([response.headers[COST]]) == 160
    facts = read_facts([response.headers[FACTS]])
    assert facts == {"rows": 100, "node_calls": 3, "rows_read": 5000, "database_ms": 12.346}
    assert set_cost(response, 0) == 0
    assert read_cost([response.headers[COST]]) == 0
    with pytest.raises(ValueError, match="-1"):
        set_cost(response, -1)


def test_facts_that_mean_nothing_are_left_out() -> None:
    assert read_facts(["rows=1, rows_read=-1, database_ms=?1, other=3", "node_calls=2"]) == {"rows": 1, "node_calls": 2}
    assert read_facts(["rows=1, =", "rows=2"]) == {}
