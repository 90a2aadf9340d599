"""The calls as values: what is sent, what is refused before it is sent, what is read. No database."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import pytest

import quota.calls
from quota.calls import (
    Adjust,
    BalanceRow,
    BindLogin,
    Call,
    Check,
    CreateSubject,
    CreateUnit,
    Credit,
    Extend,
    Freeze,
    Reap,
    Record,
    Release,
    Released,
    ReleaseMany,
    Reservation,
    Reserve,
    ReserveMany,
    SetLimit,
    SetTierLimit,
    Settle,
    SettleMany,
    Settlement,
)
from quota.calls.answers import amount, amounts
from quota.errors import (
    AmountOutOfRange,
    InvalidAmount,
    InvalidArgument,
    InvalidName,
    Misuse,
    Refused,
    UnknownReservation,
)
from quota.ids import uuid7

ID = UUID("0192f0c1-2b3c-7d4e-8f50-123456789abc")

CALLS: list[Any] = [
    value
    for value in vars(quota.calls).values()
    if isinstance(value, type) and issubclass(value, Call) and value.__name__ not in {"Call", "Batch"}
]


def costs_sent(costs: Any) -> Any:
    return json.loads(str(Reserve("key:1", costs).parameters()["costs"]))


# -- statements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_every_parameter_is_named_and_cast(kind: type[Call[Any]]) -> None:
    named = re.findall(r"(\w+) => %\((\w+)\)s::[a-z]+(?:\[\])?[,)]", kind.function.statement)
    # A batch sends the parameters of its requests as arrays.
    fields = [
        *getattr(kind, "arrays", {}),
        *(f.name for f in dataclasses.fields(cast("Any", kind)) if f.name != "requests"),
    ]
    assert named == [(name, name) for name in fields]
    assert list(kind.function.takes) == fields
    assert kind.function.statement.count("%") == len(fields)
    assert kind.__doc__ is not None
    assert f"`quota.{kind.function.name}`" in kind.__doc__


def test_a_statement() -> None:
    assert Extend(ID, timedelta(seconds=1)).statement == (
        "SELECT expires_at FROM quota.extend(id => %(id)s::uuid, ttl => %(ttl)s::interval, tenant => %(tenant)s::text)"
    )
    assert Freeze("key:1", "runaway").statement == (
        "SELECT quota.freeze(name => %(name)s::text, reason => %(reason)s::text, tenant => %(tenant)s::text)"
    )


def test_what_is_left_out_is_what_sql_leaves_out() -> None:
    assert Reserve("key:1", {"usd": "0.25"}).parameters() == {
        "subject": "key:1",
        "costs": '{"usd": "0.25"}',
        "ttl": timedelta(minutes=10),
        "id": None,
        "also": [],
        "headroom": "0",
        "on_expiry": None,
        "details": "{}",
        "tenant": "default",
    }
    assert Settle(ID).parameters() == {
        "id": str(ID), "costs": None, "final": True, "outcome": "ok", "details": "{}", "tenant": "default",
    }  # fmt: skip
    assert Reap().parameters() == {"max": 1000, "tenant": None}
    assert Check().parameters() == {"tenant": None}


def test_only_calls_with_an_idempotency_key_of_their_own_get_one() -> None:
    assert Reserve("key:1", {"usd": 1}).identified(lambda: ID).id == ID
    assert Record("key:1", {"usd": 1}).identified(lambda: ID).id == ID
    assert Credit(ID, {"usd": 1}, "why").identified(lambda: ID).id == ID
    kept = Reserve("key:1", {"usd": 1}, id="0192f0c1-2b3c-7d4e-8f50-000000000000")
    assert kept.identified(lambda: ID) is kept
    settle = Settle(ID)
    assert settle.identified(uuid7) is settle


# -- amounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (Decimal("0.1"), "0.1"),
        (Decimal("1E+3"), "1000"),
        (Decimal("1E-12"), "0.000000000001"),
        (Decimal("1.50"), "1.50"),
        (Decimal("-0"), "0"),
        (Decimal("0E+9"), "0"),
        (Decimal("999999999999999999.999999999999"), "999999999999999999.999999999999"),
        (7, "7"),
        (10**30, "1" + "0" * 30),
        ("0.25", "0.25"),
        # All of these are the database's to refuse, by name: they arrive as they are.
        (Decimal("NaN"), "NaN"),
        (Decimal("sNaN"), "sNaN"),
        (Decimal("-Infinity"), "-Infinity"),
        (Decimal("-1.5"), "-1.5"),
        (-1, "-1"),
        ("1e3", "1e3"),
        ("", ""),
    ],
)
def test_amounts_are_sent_exactly(given: Decimal | int | str, sent: str) -> None:
    assert costs_sent({"usd": given}) == {"usd": sent}


@pytest.mark.parametrize("given", [0.5, 1.0, float("nan"), True, False, None, b"1", [1], {"a": 1}, 1 + 2j])
def test_what_is_no_exact_number_is_a_type_error_that_names_the_unit(given: Any) -> None:
    with pytest.raises(TypeError, match="'usd'"):
        costs_sent({"tokens": 1, "usd": given})
    with pytest.raises(TypeError, match="'usd'"):
        Settle(ID, {"usd": given}).parameters()
    if given is not None:
        with pytest.raises(TypeError, match="capacity"):
            SetLimit("key:1", "cap", "usd", "budget", given).parameters()


@pytest.mark.parametrize("given", [Decimal("1E+999999"), Decimal("-1E+999999"), 10**5000, -(10**5000)], ids=range(4))
def test_an_amount_too_long_to_write_out_is_refused_before_it_is_written_out(given: Decimal | int) -> None:
    with pytest.raises(AmountOutOfRange):
        costs_sent({"usd": given})


def test_an_amount_too_precise_to_write_out_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(InvalidAmount):
        costs_sent({"usd": Decimal("1E-999999")})


@pytest.mark.parametrize("given", ["usd", [("usd", 1)], 1, {"usd"}])
def test_costs_are_a_map(given: Any) -> None:
    with pytest.raises(TypeError, match="costs must be a map"):
        costs_sent(given)


def test_empty_costs_are_the_databases_to_refuse() -> None:
    assert costs_sent({}) == {}


@pytest.mark.parametrize("given", ["0.2", Decimal("0.2")])
def test_headroom_is_a_number(given: Decimal | str) -> None:
    assert Reserve("key:1", {"usd": 1}, headroom=given).parameters()["headroom"] == "0.2"


def test_headroom_that_is_no_number() -> None:
    with pytest.raises(InvalidArgument, match="headroom"):
        Reserve("key:1", {"usd": 1}, headroom="a fifth").parameters()
    with pytest.raises(TypeError, match="headroom"):
        Reserve("key:1", {"usd": 1}, headroom=0.2).parameters()  # type: ignore[arg-type]


# -- names, ids, details ---------------------------------------------------------------------------------------------

BAD_TEXTS = ["a\0b", "a\ud800b", "\udfff"]


@pytest.mark.parametrize("text", BAD_TEXTS)
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda text: Reserve(f"key:{text}", {"usd": 1}), InvalidName),
        (lambda text: Reserve("key:1", {text: 1}), InvalidName),
        (lambda text: Reserve("key:1", {"usd": 1}, also=[f"key:{text}"]), InvalidName),
        (lambda text: Reserve("key:1", {"usd": 1}, tenant=text), InvalidName),
        (lambda text: CreateSubject(f"key:{text}"), InvalidName),
        (lambda text: SetTierLimit(text, "cap", "usd", "budget", 1), InvalidName),
        (lambda text: Reserve("key:1", {"usd": 1}, on_expiry=text), InvalidArgument),
        (lambda text: Reserve("key:1", {"usd": 1}, details={"note": text}), InvalidArgument),
        (lambda text: Settle(ID, outcome=text), InvalidArgument),
        (lambda text: Settle(ID, details={"deep": [{text: 1}]}), InvalidArgument),
        (lambda text: Freeze("key:1", text), InvalidArgument),
        (Release, InvalidArgument),
        (lambda text: Reserve("key:1", {"usd": text}), InvalidAmount),
    ],
)
def test_text_that_postgresql_cannot_take_is_refused_by_name(
    build: Callable[[str], Call[Any]], expected: type[Misuse], text: str
) -> None:
    with pytest.raises(expected) as caught:
        build(text).parameters()
    assert caught.value.message.startswith(f"{expected.name}: ")
    str(caught.value).encode()  # and the message itself can be printed anywhere


@pytest.mark.parametrize("given", ["", "x", "0192f0c1", str(ID) + "0", "{}"])
def test_a_malformed_id_is_an_invalid_argument(given: str) -> None:
    for call in (Reserve("key:1", {"usd": 1}, id=given), Settle(given), Adjust(given, {"usd": 1}), Release(given)):
        with pytest.raises(InvalidArgument, match="no UUID"):
            call.parameters()


@pytest.mark.parametrize("given", [ID, str(ID), str(ID).upper(), ID.hex])
def test_ids_may_be_uuids_or_their_text(given: UUID | str) -> None:
    assert Settle(given).parameters()["id"] == str(ID)


def test_details_are_plain_json() -> None:
    details = {"model": "opus", "price": Decimal("0.10"), "run": ID, "path": "C:\\u0000", "n": 0.5, "e": "é"}
    assert json.loads(str(Settle(ID, details=details).parameters()["details"])) == {
        "model": "opus", "price": "0.10", "run": str(ID), "path": "C:\\u0000", "n": 0.5, "e": "é",
    }  # fmt: skip


def test_details_that_are_no_json() -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"in": deep}
    for details in ({"x": float("nan")}, {"x": float("inf")}, loop, deep):
        with pytest.raises(InvalidArgument, match="details"):
            Settle(ID, details=details).parameters()
    for wrong in ({"x": object()}, {"x": datetime.now(UTC)}, [1], "x"):
        with pytest.raises(TypeError):
            Settle(ID, details=wrong).parameters()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Reserve(7, {"usd": 1}), "subject"),  # type: ignore[arg-type]
        (Reserve("key:1", {"usd": 1}, also="key:2"), "also"),
        (Reserve("key:1", {"usd": 1}, ttl=60), "ttl"),  # type: ignore[arg-type]
        (Reserve("key:1", {7: 1}), "unit"),  # type: ignore[dict-item]
        (Settle(7), "id"),  # type: ignore[arg-type]
        (Settle(ID, final="yes"), "final"),  # type: ignore[arg-type]
        (CreateUnit("usd", money=1), "money"),  # type: ignore[arg-type]
        (Reap(max=True), "max"),
        (Reap(max="9"), "max"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_named(call: Call[Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        call.parameters()


def test_a_number_of_holds_out_of_range() -> None:
    for given in (2**31, -(2**40), 10**5000):
        with pytest.raises(InvalidArgument, match="max"):
            Reap(max=given).parameters()


def test_a_role_name_is_never_cut() -> None:
    with pytest.raises(InvalidArgument, match="63"):
        BindLogin("r" * 64, "acme").parameters()


# -- answers ---------------------------------------------------------------------------------------------------------

STANDING = {
    "subject": "org:acme", "limit_name": "cap", "unit": "usd", "kind": "budget", "capacity": "50",
    "spent": "12.000000000001", "reserved": "0.1", "level": None, "available": "37.899999999999",
    "reason": None, "retry_after_s": None,
}  # fmt: skip
ROW: dict[str, Any] = {
    "granted": True, "reservation": ID, "state": "held",
    "expires_at": datetime(2026, 1, 1, 9, tzinfo=timezone(timedelta(hours=9))), "replayed": False, "reason": None,
    "limit_subject": "org:acme", "limit_name": "cap", "unit": "usd", "capacity": Decimal(50),
    "spent": Decimal("12.000000000001"), "reserved": Decimal("0.1"), "requested": Decimal("0.1"),
    "retry_after_s": None, "remaining": json.dumps([STANDING]), "violations": "[]",
}  # fmt: skip


def test_a_grant() -> None:
    answer = Reserve("key:1", {"usd": 1}).answer([ROW])
    assert answer.granted
    assert not answer.refused
    assert answer.raise_if_refused() is answer
    assert (answer.reservation, answer.state) == (ID, "held")
    assert answer.expires_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert answer.expires_at.utcoffset() == timedelta(0)
    [standing] = answer.remaining
    assert standing.spent == Decimal("12.000000000001")
    assert standing.available == Decimal("37.899999999999")
    assert (standing.level, standing.reason) == (None, None)
    assert answer.violations == ()


def test_a_refusal() -> None:
    violation = STANDING | {"reason": "rate", "retry_after_s": "0.000001"}
    row = ROW | {
        "granted": False, "reservation": None, "state": None, "expires_at": None, "reason": "rate",
        "retry_after_s": Decimal("0.000001"), "violations": json.dumps([violation]),
    }  # fmt: skip
    answer = Adjust(ID, {"usd": 1}).answer([row])
    assert answer.refused
    assert answer.retry_after_s == Decimal("0.000001")
    assert answer.violations[0].retry_after_s == Decimal("0.000001")
    with pytest.raises(Refused, match='rate by limit "cap" of org:acme: capacity 50 usd.*retry after 0.000001 s'):
        answer.raise_if_refused()


def test_other_drivers_texts_are_read_as_exactly() -> None:
    texts = {"reservation": str(ID), "spent": "12.000000000001", "capacity": 50}
    assert Reserve("key:1", {"usd": 1}).answer([ROW | texts]) == Reservation.of(ROW)


def test_an_amount_that_a_connection_turned_into_a_float_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        Reservation.of(ROW | {"spent": 12.0})


def test_amounts_in_json_are_never_floats() -> None:
    standing = STANDING | {"spent": 0.1}  # as a JSON number
    [read] = Reservation.of(ROW | {"remaining": json.dumps([standing])}).remaining
    assert read.spent == Decimal("0.1")
    assert amounts('{"usd": "0.1", "tokens": "5"}') == {"usd": Decimal("0.1"), "tokens": Decimal(5)}
    assert amounts(None) == {}
    assert amount(None) is None


def test_a_settlement() -> None:
    row = {"state": "settled", "late": True, "replayed": False, "overage": '{"usd": "0.000000000001"}'}
    assert Settle(ID).answer([row]) == Settlement(state="settled", late=True, overage={"usd": Decimal("1E-12")})


def test_a_balance_row() -> None:
    row = {
        "subject": "key:1", "limit_name": "bucket", "unit": "cost", "kind": "bucket", "capacity": Decimal(10),
        "spent": None, "reserved": Decimal(2), "level": Decimal("7.5"), "available": Decimal("7.5"),
        "window_start": None, "window_end": None, "full_after_s": Decimal("0.1"),
    }  # fmt: skip
    read = BalanceRow.of(row)
    assert dataclasses.asdict(read) == row


# -- ids -------------------------------------------------------------------------------------------------------------


def test_ids_are_uuids_of_version_7_in_order() -> None:
    before_ms = int(datetime.now(UTC).timestamp() * 1000)
    ids = [uuid7() for _ in range(20_000)]
    after_ms = int(datetime.now(UTC).timestamp() * 1000)
    assert ids == sorted(set(ids))
    assert {(one.version, one.variant) for one in ids} == {(7, "specified in RFC 4122")}
    assert before_ms <= ids[0].int >> 80 <= after_ms


def test_ids_stay_in_order_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = uuid7()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    second, third = uuid7(), uuid7()
    assert first < second < third
    assert (second.version, third.version) == (7, 7)


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_sends_its_requests_as_arrays() -> None:
    batch = ReserveMany([Reserve("key:1", {"usd": "0.25"}, id=ID, also=["user:2"]), Reserve("key:2", {"usd": 1})])
    assert batch.parameters() == {
        "subjects": '{"key:1","key:2"}',
        "costs": r'{"{\"usd\": \"0.25\"}","{\"usd\": \"1\"}"}',
        "ids": f'{{"{ID}",NULL}}',
        "ttls": [timedelta(minutes=10)] * 2,
        "also": r'{"[\"user:2\"]","[]"}',
        "headrooms": '{"0","0"}',
        "on_expiries": "{NULL,NULL}",
        "details": '{"{}","{}"}',
        "atomic": False,
        "tenant": "default",
    }
    first, second = batch.identified(uuid7).requests
    assert first.id == ID
    assert second.id is not None


def test_a_request_that_cannot_be_sent_is_named_by_its_position() -> None:
    with pytest.raises(TypeError) as caught:
        ReserveMany([Reserve("key:1", {"usd": 1}), Reserve("key:1", {"usd": 0.1})]).parameters()  # type: ignore[dict-item]
    assert caught.value.__notes__ == ["request 2 of the batch"]
    with pytest.raises(InvalidArgument, match="10001"):
        SettleMany([Settle(ID)] * 10_001).parameters()


def test_an_answer_or_an_error_each() -> None:
    error = {
        "error": "unknown_reservation",
        "error_code": "QT006",
        "error_message": "unknown_reservation: no",
        "error_remedy": "x",
    }
    fine = {"error": None, "state": "released", "replayed": False}
    answers = ReleaseMany([Release(ID), Release(ID)]).answer([fine, error])
    assert answers[0] == Released(state="released")
    assert isinstance(answers[1], UnknownReservation)
