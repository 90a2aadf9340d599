"""The price book in the database: versions, dates, tenants, what is refused, and who may."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from quota.calls import EndPrice, PriceOf, PricesOf, SetPrice
from quota.client import run
from quota.costs.tokens import Usage
from quota.errors import InvalidArgument, Misuse, PricesOverlap, UnpricedModel
from tests.server import Connection
from tests.sql.kit import value

RATES = {"input": "3", "output": "15"}
CHEAPER = {"input": "2", "output": "10"}


def at(day: int, month: int = 1) -> datetime:
    return datetime(2030, month, day, tzinfo=UTC)


def put(conn: Connection, rates: Any = RATES, **named: Any) -> int:
    return run(conn, SetPrice("openai", "m", rates, **named))[0]


def rates_at(conn: Connection, when: datetime, tenant: str = "default") -> dict[str, object]:
    return run(conn, PriceOf("openai", "m", at=when, tenant=tenant)).price.json()


def refused(conn: Connection, kind: type[Misuse], told: str, call: SetPrice) -> None:
    with pytest.raises(kind, match=told), conn.transaction():
        run(conn, call)


def test_a_price_with_all_its_parts_is_kept_exactly(tx_conn: Connection) -> None:
    rates = {
        "input": {"base": "0.000001", "steps": [{"above": 200_000, "price": "6.25"}]},
        "cached_input": "0.3",
        "cache_write_5m": "3.75",
        "cache_write_1h": "6",
        "output": "15",
        "input_audio": "40",
        "output_audio": "80",
        "request": "0.000000000001",
        "uses": {"web_search": "0.01"},
    }
    version = put(tx_conn, rates, output_max=64_000, input_max=200_000, source="a page", effective_from="-infinity")
    found = run(tx_conn, PriceOf("openai", "m"))
    assert found.price.json() == rates
    assert found.price.cost(Usage(input=1)) == Decimal("0.000000000002")
    assert (found.version, found.output_max, found.input_max, found.source) == (version, 64_000, 200_000, "a page")
    assert (found.effective_from, found.effective_until, found.tenant) == (None, None, None)
    assert list(run(tx_conn, PricesOf())) == [found]


def test_no_price_no_answer(tx_conn: Connection) -> None:
    put(tx_conn)
    for other in (PriceOf("openai", "M"), PriceOf("azure", "m"), PriceOf("openai", "m", "batch")):
        with pytest.raises(UnpricedModel, match="unpriced_model"), tx_conn.transaction():
            run(tx_conn, other)


def test_a_later_price_ends_the_one_before(tx_conn: Connection) -> None:
    first = put(tx_conn, effective_from="-infinity")
    second = put(tx_conn, CHEAPER, effective_from=at(10))
    assert second > first
    assert rates_at(tx_conn, at(9)) == RATES
    assert rates_at(tx_conn, at(10)) == CHEAPER
    assert len(run(tx_conn, PricesOf())) == 2


def test_the_same_price_again_is_the_same_version(tx_conn: Connection) -> None:
    first = put(tx_conn, effective_from="-infinity")
    assert run(tx_conn, SetPrice("openai", "m", RATES, effective_from="-infinity")) == (first, True)
    assert run(tx_conn, SetPrice("openai", "m", RATES)) == (first, True), "in force already"
    assert run(tx_conn, SetPrice("openai", "m", RATES, effective_from="-infinity", effective_until=at(5))) == (
        first,
        True,
    ), "it only ends now"
    with pytest.raises(UnpricedModel), tx_conn.transaction():
        rates_at(tx_conn, at(5))


def test_overlapping_dates_are_refused(tx_conn: Connection) -> None:
    put(tx_conn, effective_from=at(1), effective_until=at(20))
    for start, end in [(at(5), at(6)), (at(19), None), (at(1), None), ("-infinity", at(2)), ("-infinity", None)]:
        call = SetPrice("openai", "m", CHEAPER, effective_from=start, effective_until=end)  # type: ignore[arg-type]
        refused(tx_conn, PricesOverlap, "version", call)
    put(tx_conn, CHEAPER, effective_from=at(20))
    assert rates_at(tx_conn, at(20)) == CHEAPER


def test_a_refused_price_does_not_end_the_one_in_force(tx_conn: Connection) -> None:
    put(tx_conn, effective_from=at(1))
    put(tx_conn, CHEAPER, effective_from=at(1, 6), effective_until=at(1, 7))
    with pytest.raises(PricesOverlap), tx_conn.transaction():
        put(tx_conn, {"input": "1", "output": "1"}, effective_from=at(15, 6))
    assert rates_at(tx_conn, at(30, 5)) == RATES
    with pytest.raises(UnpricedModel), tx_conn.transaction():
        rates_at(tx_conn, at(1, 7))


def test_variants_are_prices_of_their_own(tx_conn: Connection) -> None:
    put(tx_conn)
    put(tx_conn, CHEAPER, variant="batch")
    assert run(tx_conn, PriceOf("openai", "m", "batch")).price.json() == CHEAPER
    assert run(tx_conn, PriceOf("openai", "m")).price.json() == RATES


def test_a_tenants_own_price_goes_first_and_is_seen_by_nobody_else(tx_conn: Connection) -> None:
    tx_conn.execute("SELECT quota.create_tenant('acme')")
    put(tx_conn, effective_from="-infinity")
    own = put(tx_conn, CHEAPER, tenant="acme", effective_from="-infinity")
    assert rates_at(tx_conn, at(1), "acme") == CHEAPER
    assert rates_at(tx_conn, at(1)) == RATES
    assert [entry.tenant for entry in run(tx_conn, PricesOf())] == [None]
    assert run(tx_conn, PricesOf("acme")).find("openai", "M").price.json() == CHEAPER
    with pytest.raises(InvalidArgument), tx_conn.transaction():
        run(tx_conn, EndPrice(own, at(2)))
    run(tx_conn, EndPrice(own, at(2), "acme"))
    assert rates_at(tx_conn, at(2), "acme") == RATES


def test_ending_a_price(tx_conn: Connection) -> None:
    version = put(tx_conn, effective_from="-infinity")
    run(tx_conn, EndPrice(version, at(10)))
    with pytest.raises(UnpricedModel), tx_conn.transaction():
        rates_at(tx_conn, at(10))
    for wrong in (EndPrice(version, at(11)), EndPrice(version + 1, at(1)), EndPrice(-1)):
        with pytest.raises(InvalidArgument, match="cannot end at"), tx_conn.transaction():
            run(tx_conn, wrong)


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({"input": "3"}, "name no input and output"),
        ({"input": "-3", "output": "1"}, "no amount"),
        ({"input": -3, "output": "1"}, "input"),
        ({"input": "3", "output": "0.0000001"}, "output is 0.0000001"),
        ({"input": "1000000", "output": "1"}, "input is 1000000"),
        ({"input": "3", "output": "1", "thinking": "1"}, '"thinking" is no part'),
        ({"input": "3", "output": "1", "uses": "1"}, '"uses" is no part'),
        ({"input": {"base": "3", "steps": [{"above": 5, "price": "1"}] * 2}, "output": "1"}, "a step of input"),
        ({"input": {"base": "3", "steps": [{"above": 1.5, "price": "1"}]}, "output": "1"}, "a step of input"),
        ({"input": {"steps": []}, "output": "1"}, "input is"),
        ({"input": "0", "output": "0"}, "not declared free"),
    ],
)  # fmt: skip
def test_what_is_no_price(tx_conn: Connection, rates: Any, told: str) -> None:
    refused(tx_conn, Misuse, told, SetPrice("openai", "m", rates))


def test_free_is_declared(tx_conn: Connection) -> None:
    put(tx_conn, {"input": "0", "output": "0"}, free=True)
    assert run(tx_conn, PriceOf("openai", "m")).price.free
    refused(tx_conn, InvalidArgument, "declared free, and is not zero", SetPrice("openai", "n", RATES, free=True))


@pytest.mark.parametrize(
    "call",
    [
        SetPrice("OpenAI", "m", RATES),
        SetPrice("openai", "M", RATES),
        SetPrice("openai", "m", RATES, variant="Batch!"),
        SetPrice("openai", "m", RATES, output_max=0),
        SetPrice("openai", "m", RATES, effective_from=at(2), effective_until=at(2)),
    ],
)
def test_names_dates_and_maxima(tx_conn: Connection, call: SetPrice) -> None:
    refused(tx_conn, InvalidArgument, "variant", call)


def test_changes_of_the_book_are_logged(tx_conn: Connection) -> None:
    version = put(tx_conn)
    run(tx_conn, EndPrice(version, at(1)))
    assert value(tx_conn, "SELECT count(*) FROM quota.log WHERE action IN ('set_price', 'end_price')") == 2
    after = value(tx_conn, "SELECT after FROM quota.log WHERE action = 'set_price'")
    assert (after["version"], after["rates"]) == (version, RATES)
    assert value(tx_conn, "SELECT count(*) FROM quota.prices WHERE effective_until = %s", at(1)) == 1


def test_the_history_of_the_book_stays_in_the_view(tx_conn: Connection) -> None:
    put(tx_conn, effective_from=datetime(2020, 1, 1, tzinfo=UTC), effective_until=datetime(2021, 1, 1, tzinfo=UTC))
    assert len(run(tx_conn, PricesOf())) == 0
    assert value(tx_conn, "SELECT count(*) FROM quota.prices") == 1
