"""The engine against the model: random histories, every answer and every balance compared after every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.model.batches import BatchEngine, BatchHistories
from tests.model.engine import Answer, Engine, Json
from tests.model.errors import ModelError
from tests.model.histories import Histories
from tests.model.ledger import Ledger
from tests.server import Connection


class ModelAlone(Histories):
    """The same histories without an engine: the oracle itself must keep its books whatever happens."""

    def both(
        self,
        function: str,
        arguments: dict[str, Any],
        modelled: Callable[[Answer | None], object],
        read: Callable[[Answer], object],
    ) -> None:
        with suppress(ModelError):
            modelled(None)

    @invariant()
    def balances_agree(self) -> None:
        for row in self.model.balance("run:r", self.tenant) if self.model.tenants[self.tenant].subjects else ():
            assert row.available is None or row.available >= 0

    @invariant()
    def books_are_right(self) -> None:
        assert self.model.check(self.tenant) == []


class NoEngine(Engine):
    """Stands in where only the model is exercised."""

    def __init__(self) -> None:
        """Needs no connection."""

    def set_clock(self, now: datetime) -> None:
        """Nobody reads it."""

    def call(self, function: str, arguments: Mapping[str, object]) -> list[Answer]:
        """Accepts everything."""
        return []


def histories(examples: int, steps: int = 30, fresh: bool = False) -> settings:
    """The same histories every time, unless they are to be fresh ones."""
    return settings(
        derandomize=not fresh,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def play(engine: Engine, machine: type[Histories], how: settings) -> None:
    """Play histories on one connection: a tenant each."""
    run_state_machine_as_test(lambda: machine(engine), settings=how)  # type: ignore[arg-type]


def test_the_model_keeps_its_own_books() -> None:
    play(NoEngine(), ModelAlone, histories(40))


@pytest.mark.timeout(1200)  # a disagreement is shrunk first, which takes minutes
def test_engine_and_model_answer_alike(conn: Connection) -> None:
    play(Engine(conn), Histories, histories(60, 25))


@pytest.mark.timeout(1200)
def test_the_batch_functions_and_the_model_answer_alike(conn: Connection) -> None:
    play(BatchEngine(conn), BatchHistories, histories(60, 25))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_batch_functions_and_the_model_answer_alike_for_long(conn: Connection) -> None:
    examples = int(os.environ.get("QUOTA_SOAK_HISTORIES", "4000"))
    play(BatchEngine(conn), BatchHistories, histories(examples, 50, fresh=True))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_engine_and_model_answer_alike_for_long(conn: Connection) -> None:
    play(Engine(conn), Histories, histories(int(os.environ.get("QUOTA_SOAK_HISTORIES", "4000")), 50, fresh=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"costs": {}},
        {"costs": None},
        {"costs": {"usd": -1}},
        {"costs": {"usd": "1e3"}},
        {"costs": {"usd": True}},
        {"costs": {"usd": Decimal("0.0000000000001")}},
        {"costs": {"usd": Decimal("0.100000000000000")}},
        {"costs": {"usd": 10**18}},
        {"costs": {"eur": 1}},
        {"costs": {"tokens": 1}},
        {"costs": {"usd": 0, "concurrency": Decimal("0.5")}},
        {"ttl": timedelta(0)},
        {"ttl": timedelta(hours=24)},
        {"ttl": timedelta(hours=24, microseconds=1)},
        {"headroom": Decimal(1)},
        {"headroom": Decimal("-0.1")},
        {"headroom": Decimal("0.999999")},
        {"on_expiry": "keep"},
        {"subject": "org:nobody"},
        {"subject": "acme"},
        {"subject": ""},
        {"subject": "org:"},
        {"subject": "org:*"},
        {"subject": " org:acme"},
        {"also": ["org:nobody"]},
        {"also": ["acme"]},
        {"tenant": "nowhere"},
    ],
    ids=repr,
)
def test_misuse_has_one_name(tx_conn: Connection, wrong: dict[str, Any]) -> None:
    engine, model = Engine(tx_conn), Ledger(datetime.fromisoformat("2026-03-02T12:00+00:00"))
    for name, arguments in (
        ("create_subject", {"name": "org:acme"}),
        ("set_limit", {"subject": "org:acme", "name": "cap", "unit": "usd", "kind": "budget", "capacity": 10}),
        (
            "set_limit",
            {"subject": "org:acme", "name": "slots", "unit": "concurrency", "kind": "concurrency", "capacity": 5},
        ),
    ):
        engine.call(name, arguments)
        getattr(model, name)(**arguments)
    arguments = {"subject": "org:acme", "costs": {"usd": 0}, **wrong}
    found = expected = None
    try:
        engine.call("reserve", arguments | {"costs": Json.of(arguments["costs"])})
    except ModelError as error:
        found = error.name
    try:
        model.reserve(**arguments)
    except ModelError as error:
        expected = error.name
    assert found == expected
