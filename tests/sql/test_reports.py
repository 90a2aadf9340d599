"""Reports: known calls in, known figures out; and details that are nonsense break nothing."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from tests.server import Connection
from tests.sql.kit import NOON, Row, advance, bucket, budget, call, hold, misuse, rows, set_clock, value

MODEL = {"provider": "openai", "model": "gpt-x", "route": "summarise"}
REFUSED = {**MODEL, "reason": "rate", "limit_subject": "pool:a", "limit_name": "tpm"}


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    """A user without limits to speak of, at noon."""
    set_clock(tx_conn, NOON)
    for unit in ("usd", "cost", "quota_tokens"):
        budget(tx_conn, "user:1", None, unit, unit)
    call(tx_conn, "ensure_subject", "meter:refusals")
    return tx_conn


def close(conn: Connection, identity: UUID, costs: Any = None, outcome: str = "ok", **details: Any) -> None:
    call(conn, "settle", identity, costs, outcome=outcome, details=json.dumps(details))


def model_call(
    conn: Connection, output: int | None = None, ceiling: int = 1000, outcome: str = "ok", **told: Any
) -> UUID:
    """A guarded call that was answered with so many tokens, unless `output` is None."""
    asked = {name: told.pop(name) for name in ("attempt", "answers") if name in told}
    identity = hold(conn, "user:1", {"usd": 1}, details=json.dumps({**MODEL, "ceiling": ceiling, **asked}))
    usage = {} if output is None else {"usage": {"input": 10, "cached_input": 5, "cache_write_5m": 3, "output": output}}
    close(conn, identity, {"usd": 0}, outcome, **usage, **told)
    return identity


def tell(conn: Connection, refused: int, **more: Any) -> None:
    """Somebody was refused so often."""
    details = {"refusals": [{**REFUSED, "refused": refused, **more}]}
    call(conn, "record", "meter:refusals", {"requests": 0}, details=json.dumps(details))


def report(conn: Connection, name: str, **named: Any) -> list[Row]:
    """A report as a reader gets it, up to a moment after the ledger's now."""
    with conn.transaction():
        conn.execute("SET LOCAL ROLE quota_reader")
        found = rows(conn, f"report_{name}", **{"until": "2026-05-05 00:00:00+00", **named})
        conn.execute("RESET ROLE")
    return found


def models(conn: Connection, **named: Any) -> Row:
    (row,) = report(conn, "models", **named)
    return row


# -- models ---------------------------------------------------------------------------------------------------------


def test_throttle_rate_counts_refusals_and_429s_of_all_attempts(ledger: Connection) -> None:
    for _ in range(5):
        model_call(ledger, 10)
    for status in (429, 429, 503):
        model_call(ledger, outcome="error", status=status)
    tell(ledger, 1)
    tell(ledger, 1, reason="held", limit_name="rpm")
    found = models(ledger)
    assert (found["attempts"], found["refused"], found["throttled"]) == (10, 2, 2)
    assert found["throttle_rate"] == Decimal("0.4")
    assert (found["failed"], found["answered"]) == (1, 5)


def test_refusals_alone_are_a_row(ledger: Connection) -> None:
    """A budget that is exhausted grants nothing any more: that is when the report matters."""
    tell(ledger, 7, retried=6)
    found = models(ledger)
    assert (found["attempts"], found["refused"], found["throttle_rate"]) == (7, 7, 1)
    assert (found["retries"], found["retry_rate"]) == (6, Decimal("0.8571"))
    assert (found["answered"], found["output_p95"], found["recommended_ceiling"], found["output_tokens"]) == (
        0, None, None, 0,
    )  # fmt: skip


def test_how_much_of_the_ceilings_comes_back(ledger: Connection) -> None:
    for output in range(1, 101):
        model_call(ledger, output)
    found = models(ledger)
    assert [found[f"output_{p}"] for p in ("p50", "p95", "p99")] == [50, 95, 99]
    assert (found["ceiling_p50"], found["efficiency_p50"]) == (1000, Decimal("0.05"))
    assert found["recommended_ceiling"] == 114, "95 and a fifth"
    assert (found["input_tokens"], found["cached_tokens"], found["cache_write_tokens"]) == (1000, 500, 300)
    assert (found["output_tokens"], found["billed_tokens"]) == (5050, 6850)


def test_a_few_answers_recommend_nothing(ledger: Connection) -> None:
    for _ in range(19):
        model_call(ledger, 10)
    assert models(ledger)["recommended_ceiling"] is None
    model_call(ledger, 10)
    assert models(ledger)["recommended_ceiling"] == 12


def test_a_ceiling_that_cuts_off_is_recommended_to_be_raised(ledger: Connection) -> None:
    for number in range(20):
        ended: dict[str, Any] = {"truncated": number < 5} if number < 10 else {}
        model_call(ledger, 100, ceiling=100, **ended)
    found = models(ledger)
    assert (found["truncated"], found["truncation_rate"]) == (5, Decimal("0.5")), "of the ten that said how they ended"
    assert found["recommended_ceiling"] == 120


def test_ceilings_and_outputs_are_of_one_answer(ledger: Connection) -> None:
    model_call(ledger, 90, ceiling=400, answers=4)
    found = models(ledger)
    assert (found["ceiling_p50"], found["output_p50"], found["efficiency_p50"]) == (100, 23, Decimal("0.225"))


def test_what_did_not_end_well_is_no_answer(ledger: Connection) -> None:
    model_call(ledger, 5, outcome="cancelled")  # a stream that was left
    hold(ledger, "user:1", {"usd": 1}, details=json.dumps({**MODEL, "ceiling": 9}))  # under way
    model_call(ledger, outcome="timeout")
    found = models(ledger)
    assert (found["attempts"], found["answered"], found["failed"], found["output_p50"]) == (3, 0, 1, None)


@pytest.mark.parametrize(("retries", "correlation"), [((0, 2, 4), 1), ((4, 2, 0), -1), ((2, 2, 2), None)])
def test_retries_that_rise_with_what_is_pushed_back(
    ledger: Connection, retries: tuple[int, ...], correlation: int | None
) -> None:
    for minute, retried in enumerate(retries):
        for _ in range(minute + 1):
            model_call(ledger, outcome="error", status=429)
        for _ in range(retried):
            model_call(ledger, 10, attempt=2)
        advance(ledger, "1 minute")
    found = models(ledger)
    assert (found["retries"], found["retry_correlation"]) == (sum(retries), correlation)


def test_billing_and_quota_are_two_formulas(ledger: Connection) -> None:
    details = json.dumps({**MODEL, "ceiling": 32_000})
    identity = hold(ledger, "user:1", {"usd": 1, "quota_tokens": 36_000}, details=details)
    call(ledger, "adjust", identity, {"quota_tokens": 20_000})  # as a stream does when its input is known
    usage = {"input": 3_000, "cache_write_1h": 1_000, "output": 1_000}
    close(ledger, identity, {"usd": "0.1", "quota_tokens": 9_000}, usage=usage)
    found = models(ledger)
    assert (found["billed_tokens"], found["quota_held"], found["quota_settled"]) == (5_000, 36_000, 9_000)


def test_rows_are_by_model_and_route(ledger: Connection) -> None:
    for route in ("summarise", "translate"):
        for model in ("gpt-x", "gpt-y"):
            hold(
                ledger,
                "user:1",
                {"usd": 1},
                details=json.dumps({**MODEL, "model": model, "route": route, "ceiling": 1}),
            )
    found = [(row["model"], row["route"]) for row in report(ledger, "models")]
    assert found == [("gpt-x", "summarise"), ("gpt-x", "translate"), ("gpt-y", "summarise"), ("gpt-y", "translate")]


def test_a_report_is_about_its_time_and_its_tenant(ledger: Connection) -> None:
    model_call(ledger, 1)
    advance(ledger, "1 hour")
    model_call(ledger, 1)
    tell(ledger, 1)
    assert models(ledger)["attempts"] == 3
    assert models(ledger, until="2026-05-04 13:00+00")["attempts"] == 1, "up to, not including"
    assert models(ledger, since="2026-05-04 13:00+00")["attempts"] == 2
    advance(ledger, "7 days")
    assert report(ledger, "models", until=None, since="2026-05-04 13:00:00.000001+00") == []
    assert models(ledger, until=None)["attempts"] == 2, "seven days, unless somebody says otherwise"
    call(ledger, "create_tenant", "acme")
    for name in ("models", "pools", "calibration"):
        assert report(ledger, name, since=None, until=None, tenant="acme") == []
        with misuse(ledger, "invalid_argument", "2026-05-06"):
            rows(ledger, f"report_{name}", since="2026-05-06 00:00+00", until="2026-05-05 00:00+00")


NONSENSE = [
    {"ceiling": "many", "usage": {"output": "x"}, "status": "429", "attempt": {}, "answers": 0},
    {"ceiling": 1e300, "usage": {"output": -5, "input": None}, "status": -1, "attempt": -3, "truncated": "yes"},
    {"ceiling": None, "usage": [1], "refusals": 7, "answers": "2", "route": None},
    {"ceiling": [], "usage": 5, "refusals": [{"refused": "x"}, 7, None], "route": {"a": 1}},
]


@pytest.mark.parametrize("told", NONSENSE)
def test_nonsense_in_details_breaks_no_report(ledger: Connection, told: dict[str, Any]) -> None:
    both = {**MODEL, "outcome": "answered", "cost": "free", "latency_ms": "x", "rows": -1, **told}
    close(ledger, hold(ledger, "user:1", {"usd": 1}, details=json.dumps(both)), {"usd": 0})
    call(ledger, "record", "meter:refusals", {"requests": 0}, details=json.dumps(both))
    found = report(ledger, "models")
    assert [(row["attempts"], row["throttled"], row["retries"], row["output_tokens"]) for row in found] == [
        (2, 0, 0, 0)
    ]
    assert found[0]["ceiling_p50"] is None
    assert report(ledger, "pools") == report(ledger, "calibration") == []


# -- pools ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(ledger: Connection) -> Connection:
    bucket(ledger, "pool:a", 1000, "16.666666666666", "tpm", unit="quota_tokens")
    budget(ledger, "pool:a", 10_000, "tpd", "quota_tokens", period="day")
    budget(ledger, "pool:a", None, "rpd", "requests", period="day")
    return ledger


def drawn(conn: Connection, held: int, settled: int | None, **details: Any) -> UUID:
    identity = hold(conn, "user:1", {"quota_tokens": held}, also=["pool:a"], details=json.dumps(details))
    if settled is not None:
        close(conn, identity, {"quota_tokens": settled})
    return identity


def limits(conn: Connection, **named: Any) -> dict[str, Row]:
    return {row["limit_name"]: row for row in report(conn, "pools", **named)}


def test_the_use_of_a_quota_by_minute_and_day(pool: Connection) -> None:
    drawn(pool, 500, 400)
    advance(pool, "59 seconds")
    drawn(pool, 400, 300)
    advance(pool, "1 second")  # another minute
    drawn(pool, 200, 200)
    found = limits(pool)
    tpm, tpd = found["tpm"], found["tpd"]
    assert (tpm["pool"], tpm["unit"], tpm["span"], tpm["quota"]) == ("pool:a", "quota_tokens", "minute", 1000)
    assert (tpm["settled"], tpm["spans"], tpm["mean_use"], tpm["peak_use"]) == (900, 2, Decimal("0.45"), Decimal("0.7"))
    assert str(tpm["peak_at"].astimezone(None)) == str(value(pool, "SELECT %s::timestamptz", NOON).astimezone(None))
    assert (tpd["span"], tpd["settled"], tpd["spans"], tpd["peak_use"]) == ("day", 900, 1, Decimal("0.09"))
    assert (found["rpd"]["quota"], found["rpd"]["settled"], found["rpd"]["peak_use"]) == (None, 3, None)


def test_a_spike_of_holds_shows_before_anything_is_settled(pool: Connection) -> None:
    for _ in range(3):
        drawn(pool, 300, None)
    found = limits(pool)["tpm"]
    assert (found["peak_holds"], found["peak_held_use"]) == (3, Decimal("0.9"))
    assert (found["settled"], found["peak_use"]) == (0, None)


def test_what_was_credited_is_not_used(pool: Connection) -> None:
    identity = drawn(pool, 500, 400)
    call(pool, "credit", identity, {"quota_tokens": 100}, "an answer that was none")
    assert limits(pool)["tpm"]["settled"] == 300


def test_refusals_by_the_limit_that_refused_and_429s_by_pool(pool: Connection) -> None:
    tell(pool, 5)
    tell(pool, 3, limit_name="tpd", reason="exhausted")
    tell(pool, 9, limit_subject="user:1", limit_name="usd")
    details = json.dumps({**MODEL, "ceiling": 5})
    identity = hold(pool, "user:1", {"quota_tokens": 1}, also=["pool:a"], details=details)
    close(pool, identity, {"quota_tokens": 0}, "error", status=429)
    found = limits(pool)
    assert (found["tpm"]["refused"], found["tpd"]["refused"], found["rpd"]["refused"]) == (5, 3, 0)
    assert found["tpm"]["throttled"] == 1


# -- calibration ----------------------------------------------------------------------------------------------------


def routed(conn: Connection, route: str, cost: int, outcome: str = "answered", **told: Any) -> None:
    """A call of a route as the middleware settles it."""
    details = {"route": route, "cost": cost, "outcome": outcome, **told}
    identity = hold(conn, "user:1", {"cost": 100_000})
    call(conn, "settle", identity, {"cost": cost}, details=json.dumps(details))


def calibration(conn: Connection) -> dict[str | None, Row]:
    return {row["route"]: row for row in report(conn, "calibration")}


def test_coefficients_of_a_known_relation_are_found(ledger: Connection) -> None:
    """A call loads 5 ms, a row 0.5 ms, and each node call 30 % more a row."""
    for number in range(40):
        sent, nodes = 10 + 7 * number, number % 4
        load = 5 + 0.5 * sent * (1 + 0.3 * nodes)
        routed(
            ledger,
            "query",
            -(-sent * (100 + 20 * nodes) // 100),
            rows=sent,
            node_calls=nodes,
            database_ms=load,
            latency_ms=50,
        )
    routed(
        ledger, "query", 1, "timeout", rows=1000, node_calls=1, database_ms=9, latency_ms=50
    )  # no rows were answered
    found = calibration(ledger)["query"]
    assert (found["ms_per_row"], found["suggested_node_percent"], found["suggested_base_cost"]) == (
        Decimal("0.5"), 30, 10,
    )  # fmt: skip
    assert found["load"] == "database_ms"
    assert found["database_correlation"] > Decimal("0.9")
    assert found["latency_correlation"] is None, "it never changes"


def test_without_node_calls_rows_alone_are_fitted(ledger: Connection) -> None:
    for sent in (10, 20, 40):
        routed(ledger, "list", sent, rows=sent, node_calls=0, latency_ms=3 + 2 * sent)
    found = calibration(ledger)["list"]
    assert (found["ms_per_row"], found["suggested_node_percent"], found["suggested_base_cost"]) == (
        2,
        None,
        Decimal("1.5"),
    )
    assert (found["load"], found["latency_correlation"]) == ("latency_ms", 1)


def test_the_worst_underpriced_route_stands_in_front(ledger: Connection) -> None:
    """Two ms a unit of cost overall: 3 for the dear route, 0.5 for the cheap one; one costs nothing at all."""
    routed(ledger, "cheap", 100, latency_ms=50)
    routed(ledger, "dear", 100, latency_ms=300)
    routed(ledger, "free", 0, latency_ms=50)
    found = report(ledger, "calibration")
    assert [row["route"] for row in found] == [None, "free", "dear", "cheap"]
    assert [row["suggested_factor"] for row in found] == [1, None, Decimal("1.5"), Decimal("0.25")]
    assert [row["ms_per_cost"] for row in found] == [2, None, 3, Decimal("0.5")]
    assert (found[0]["calls"], found[0]["cost"], found[0]["load_ms"]) == (3, 200, 400)


def test_the_databases_time_decides_where_half_of_the_calls_tell_it(ledger: Connection) -> None:
    routed(ledger, "a", 10, latency_ms=100, database_ms=20)
    routed(ledger, "b", 10, latency_ms=40)
    found = calibration(ledger)
    assert (found[None]["load"], found["a"]["load_ms"], found["b"]["load_ms"]) == ("database_ms", 20, None)
    assert found[None]["ms_per_cost"] == 2, "of the calls that tell it"
    routed(ledger, "b", 10, latency_ms=40)
    found = calibration(ledger)
    assert (found[None]["load"], found["a"]["load_ms"], found["b"]["load_ms"]) == ("latency_ms", 100, 80)


def test_failures_estimates_and_missing_headers(ledger: Connection) -> None:
    for _ in range(6):
        routed(ledger, "query", 50, estimate=60, latency_ms=100)
    routed(ledger, "query", 100, estimate=60, latency_ms=195)
    for outcome in ("timeout", "failed"):
        routed(ledger, "query", 1, outcome, estimate=60, latency_ms=400)
    routed(ledger, "query", 1, "gone", estimate=60, latency_ms=5, cost_header_missing=True)
    found = calibration(ledger)["query"]
    assert (found["calls"], found["failed"], found["failure_rate"]) == (10, 2, Decimal("0.2"))
    assert (found["header_missing"], found["estimate_short"]) == (1, Decimal("0.1"))
    # 1600 ms for 403 of cost; a failure takes 400.
    assert found["suggested_failure_cost"] == Decimal("100.75")
    assert found["failure_correlation"] < 0


def test_bounds_are_the_p99_and_a_fifth(ledger: Connection) -> None:
    for number in range(1, 101):
        routed(ledger, "query", number, latency_ms=number, response_bytes=10 * number, rows_read=1000 * number)
    found = calibration(ledger)["query"]
    assert (found["latency_p50_ms"], found["latency_p95_ms"]) == (Decimal("50.5"), Decimal("95.05"))
    assert (found["suggested_max_latency_ms"], found["suggested_max_response_bytes"]) == (119, 1188)
    assert found["suggested_max_rows_read"] == 118_800
    assert (found["bytes_correlation"], found["rows_read_correlation"]) == (1, 1)
