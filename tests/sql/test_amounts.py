"""Units, amounts, cost maps and names: what is not exactly right is refused, never rounded or altered."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.server import Connection
from tests.sql.kit import budget, call, hold, misuse, reserve, spent_reserved, value

# JSON text of an amount, and the error it gets. Case ids: A13, A25, L23, L24, L25, D9.
BAD_AMOUNTS = [
    ("-1", "invalid_amount", "-1"),
    ("-0.000001", "invalid_amount", "-0.000001"),
    ('"-1"', "invalid_amount", "-1"),
    ('"+1"', "invalid_amount", "+1"),
    ('"NaN"', "invalid_amount", "NaN"),
    ('"Infinity"', "invalid_amount", "Infinity"),
    ('"-Infinity"', "invalid_amount", "-Infinity"),
    ('"1e3"', "invalid_amount", "1e3"),
    ('"\uff11\uff12"', "invalid_amount", "\uff11\uff12"),
    ('" 1"', "invalid_amount", " 1"),
    ('"1."', "invalid_amount", "1."),
    ('".5"', "invalid_amount", ".5"),
    ('"0x10"', "invalid_amount", "0x10"),
    ('"1_000"', "invalid_amount", "1_000"),
    ('""', "invalid_amount", '""'),
    ("true", "invalid_amount", "true"),
    ("null", "invalid_amount", "null"),
    ("[1]", "invalid_amount", "[1]"),
    ("{}", "invalid_amount", "{}"),
    ("0.0000000000001", "invalid_amount", "0.0000000000001"),
    ('"0.1234567890123"', "invalid_amount", "0.1234567890123"),
    ("1e-13", "invalid_amount", "0.0000000000001"),
    ("1000000000000000000", "amount_out_of_range", "1000000000000000000"),
    ("9223372036854775808", "amount_out_of_range", "9223372036854775808"),
    ("1e999", "amount_out_of_range", "1000"),
    ('"1000000000000000000.5"', "amount_out_of_range", "1000000000000000000.5"),
]
BAD_MAPS = ["{}", "[]", "null", "1", '"usd"', "true", '[{"usd": 1}]']
CALLS = ["reserve", "record", "settle", "settle_partial", "adjust", "credit"]


@pytest.fixture
def ledger(tx_conn: Connection) -> Connection:
    budget(tx_conn, "user:1", 50)
    return tx_conn


def _with(ledger: Connection, function: str, costs: str | None, key: Any) -> None:
    if function in {"reserve", "record"}:
        call(ledger, function, "user:1", costs)
    elif function == "settle_partial":
        call(ledger, "settle", key, costs, False)
    elif function == "credit":
        call(ledger, "credit", key, costs, "why")
    else:
        call(ledger, function, key, costs)


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(("amount", "error", "named"), BAD_AMOUNTS)
def test_a_bad_amount_is_refused_everywhere(
    ledger: Connection, function: str, amount: str, error: str, named: str
) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    call(ledger, "settle", key, {"usd": 5}, False)
    with misuse(ledger, error, named, "usd"):
        _with(ledger, function, f'{{"usd": {amount}}}', key)


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("costs", BAD_MAPS)
def test_a_bad_cost_map_is_refused_everywhere(ledger: Connection, function: str, costs: str) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    with misuse(ledger, "invalid_costs", costs):
        _with(ledger, function, costs, key)


@pytest.mark.parametrize("function", ["reserve", "record", "settle_partial", "adjust", "credit"])
def test_a_null_cost_map_is_refused(ledger: Connection, function: str) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    with misuse(ledger, "invalid_costs"):
        _with(ledger, function, None, key)


@pytest.mark.parametrize(
    ("amount", "booked"),
    [
        ("0", "0"),
        ("-0", "0"),
        ('"0.30"', "0.3"),
        ("1e1", "10"),
        ("0.000000000001", "0.000000000001"),
        ('"0.1000000000000000000000"', "0.1"),
        ("1.50000000000000000", "1.5"),
        ('"007"', "7"),
        ("999999999999999999.999999999999", "999999999999999999.999999999999"),
    ],
)
def test_amounts_are_exact_and_judged_by_value(tx_conn: Connection, amount: str, booked: str) -> None:
    """A07: no float on the way; trailing zeros do not count."""
    budget(tx_conn, "user:1", None)
    call(tx_conn, "record", "user:1", f'{{"usd": {amount}}}')
    assert format(spent_reserved(tx_conn, "user:1")[0], "f") == booked


@pytest.mark.parametrize("unit", ["eur", "USD", "usd ", "", "\u200b"])
@pytest.mark.parametrize("function", ["reserve", "record"])
def test_an_unknown_unit_is_an_error_not_no_limit(ledger: Connection, function: str, unit: str) -> None:
    with misuse(ledger, "unknown_unit", f'"{unit}"'):
        call(ledger, function, "user:1", {unit: 1})


@pytest.mark.parametrize("function", ["reserve", "record"])
def test_a_unit_that_no_limit_covers_is_an_error(ledger: Connection, function: str) -> None:
    with misuse(ledger, "no_limit", '"tokens"', '"user:1"'):
        call(ledger, function, "user:1", {"usd": 1, "tokens": 1})


@pytest.mark.parametrize("function", ["settle", "settle_partial", "adjust", "credit"])
def test_a_unit_that_is_not_held_is_an_error(ledger: Connection, function: str) -> None:
    key = hold(ledger, "user:1", {"usd": 10})
    with misuse(ledger, "unit_not_held", '"tokens"', str(key)):
        _with(ledger, function, '{"tokens": 1}', key)


def test_a_null_character_never_gets_in(ledger: Connection) -> None:
    """A24: PostgreSQL refuses it in jsonb and in text."""
    for details in ('{"t": "x\\u0000y"}', '{"x\\u0000y": 1}'):
        with pytest.raises(psycopg.errors.UntranslatableCharacter), ledger.transaction():
            reserve(ledger, "user:1", {"usd": 1}, details=details)
    with pytest.raises(psycopg.DataError), ledger.transaction():
        call(ledger, "create_subject", "user:a\0b")


@pytest.mark.parametrize("malformed", ["", "1", "not-a-uuid", "12345678-1234-1234-1234-1234567890", "{}"])
def test_a_malformed_id_is_refused(ledger: Connection, malformed: str) -> None:
    for function, args in (("settle", (malformed,)), ("release", (malformed,)), ("adjust", (malformed, {"usd": 1}))):
        with pytest.raises(psycopg.errors.InvalidTextRepresentation), ledger.transaction():
            call(ledger, function, *args)


# -- names ------------------------------------------------------------------------------------------------------------

BAD_NAMES = [
    "",
    " ",
    " a",
    "a ",
    "a\n",
    "a\tb",
    "a\x7fb",
    "a\x85b",
    "a\u200bb",
    "a\u202eb",
    "a\ufeffb",
    "a\u00adb",
    "e\u0301",
    "\u00a0a",
    "a\u3000",
    "x" * 201,
    "\U000e0041",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_never_altered(tx_conn: Connection, name: str) -> None:
    """L32, L33."""
    call(tx_conn, "ensure_subject", "key:1")
    with misuse(tx_conn, "invalid_name"):
        call(tx_conn, "create_tenant", name)
    with misuse(tx_conn, "invalid_name"):
        call(tx_conn, "create_unit", name)
    with misuse(tx_conn, "invalid_name"):
        call(tx_conn, "set_limit", "key:1", name, "usd", "budget", 1)
    with misuse(tx_conn, "invalid_name"):
        call(tx_conn, "set_tier_limit", name, "l", "usd", "budget", 1)


@pytest.mark.parametrize(
    "name",
    [
        "key",
        ":1",
        "key:",
        "Key:1",
        "1key:1",
        "_key:1",
        "ke y:1",
        "key:*",
        "kéy:1",
        "key :1",
        " key:1",
        "key:1 ",
        "key:a\nb",
    ]
    + [f"key:{name}" for name in BAD_NAMES if name not in {"", " ", " a", "\u00a0a"}]
    + [None, "", "   "],
)
@pytest.mark.parametrize("function", ["create_subject", "ensure_subject"])
def test_bad_names_of_subjects_are_refused(tx_conn: Connection, function: str, name: str | None) -> None:
    with misuse(tx_conn, "invalid_name"):
        call(tx_conn, function, name)


@pytest.mark.parametrize(
    "name", ["key:" + "x" * 196, "key:a b", "key:a:b", "k-e_y9:é", "key:😀", "key:'; DROP TABLE x; --", 'key:"']
)
def test_good_names_are_kept_as_they_are(tx_conn: Connection, name: str) -> None:
    """L33: distinct rows, whatever stands in them."""
    call(tx_conn, "create_subject", name)
    budget(tx_conn, name, 1)
    assert reserve(tx_conn, name, {"usd": 1})["limit_subject"] == name
    assert value(tx_conn, "SELECT count(*) FROM quota.subjects WHERE name = %s", name) == 1


def test_kinds_and_colons_never_collide(tx_conn: Connection) -> None:
    """L33, R10: each of these names is a subject of its own."""
    names = ["a:b:c", "a-b:c", "ab:c", "oauth:1", "key:1"]
    for name in names:
        budget(tx_conn, name, 1)
    assert [reserve(tx_conn, name, {"usd": 1})["granted"] for name in names] == [True] * 5


@pytest.mark.parametrize("function", ["reserve", "record"])
@pytest.mark.parametrize("subject", ["user:2", "user:10", "user:1:1", "users:1"])
def test_an_unknown_subject_fails_closed(ledger: Connection, function: str, subject: str) -> None:
    with misuse(ledger, "unknown_subject", f'"{subject}"', "default"):
        call(ledger, function, subject, {"usd": 1})
    with misuse(ledger, "unknown_subject", f'"{subject}"'):
        call(ledger, function, "user:1", {"usd": 1}, also=[subject])
    with misuse(ledger, "unknown_subject", f'"{subject}"'):
        call(ledger, "balance", subject)


@pytest.mark.parametrize("function", ["reserve", "record", "balance"])
@pytest.mark.parametrize("subject", ["", "   ", None, "user:*", "user:1 ", "USER:1", "user:1\n", "user"])
def test_a_malformed_subject_is_an_invalid_name(ledger: Connection, function: str, subject: str | None) -> None:
    """L32: refused, nothing written; it never falls back to a shared bucket or to no limit."""
    with misuse(ledger, "invalid_name"):
        call(ledger, function, subject, *([] if function == "balance" else [{"usd": 1}]))


TENANT_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("reserve", ("user:1", {"usd": 1})),
    ("settle", ("00000000-0000-0000-0000-000000000001",)),
    ("release", ("00000000-0000-0000-0000-000000000001",)),
    ("adjust", ("00000000-0000-0000-0000-000000000001", {"usd": 1})),
    ("extend", ("00000000-0000-0000-0000-000000000001", "1 minute")),
    ("record", ("user:1", {"usd": 1})),
    ("balance", ("user:1",)),
    ("ensure_subject", ("user:1",)),
    ("reap", ()),
    ("check", ()),
    ("create_subject", ("user:3",)),
    ("move_subject", ("user:1", None)),
    ("freeze", ("user:1", "why")),
    ("unfreeze", ("user:1",)),
    ("retire_subject", ("user:1",)),
    ("set_limit", ("user:1", "cap", "usd", "budget", 1)),
    ("remove_limit", ("user:1", "cap")),
    ("set_rate_tier", ("key:1", "basic")),
    ("set_tier_limit", ("own", "cap", "usd", "budget", 1)),
    ("retire_tier", ("basic",)),
    ("credit", ("00000000-0000-0000-0000-000000000001", {"usd": 1}, "why")),
    ("repair", ()),
    ("retain", ()),
    ("bind_login", ("quota_worker",)),
    ("configure_tenant", ()),
]


@pytest.mark.parametrize(("function", "args"), TENANT_CALLS, ids=[name for name, _ in TENANT_CALLS])
def test_an_unknown_tenant_is_an_error_of_every_function(
    ledger: Connection, function: str, args: tuple[Any, ...]
) -> None:
    with misuse(ledger, "unknown_tenant", '"nobody"'):
        call(ledger, function, *args, tenant="nobody")
