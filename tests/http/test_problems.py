"""The one shape of an error: statuses of refusals, waits that are whole, and secrets that are masked."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from quota.calls import Reservation, Standing
from quota.credentials import KEY, TOKEN, Credential, read
from quota.errors import ERRORS, CostError, NotAllowed, QuotaError, SchemaMismatch, Unavailable
from quota.http.problems import Problem, of_error, of_refusal


def refused(reason: str, wait: str | None = None, unit: str = "tokens") -> Reservation:
    standing: dict[str, Any] = dict.fromkeys(("capacity", "spent", "reserved", "level", "available"))
    violation = Standing(subject="org:a", limit_name="cap", unit=unit, kind="budget", reason=reason, **standing)
    return Reservation(
        granted=False, reservation=None, state=None, reason=reason, limit_subject="org:a", limit_name="cap", unit=unit,
        capacity=Decimal("10.50"), retry_after_s=None if wait is None else Decimal(wait), violations=(violation,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("refusal", "status", "wait"),
    [
        (refused("closed"), 409, None), (refused("frozen"), 403, None), (refused("too_large"), 422, None),
        (refused("exhausted"), 402, None), (refused("exhausted", "10.1"), 429, "11"),
        (refused("exhausted", "10.1", "usd"), 402, "11"), (refused("rate", "0.2"), 429, "1"),
        (refused("rate", "0.493"), 429, "1"), (refused("rate"), 429, None), (refused("held", "1"), 429, "1"),
        (refused("concurrency", "2.000001"), 429, "3"),
    ],
)  # fmt: skip
def test_refusals(refusal: Reservation, status: int, wait: str | None) -> None:
    problem = of_refusal(refusal, "key:1", lambda unit: unit == "usd")
    assert (problem.status, problem.headers.get("Retry-After")) == (status, wait)
    found = problem.document("urn:x")
    assert found["capacity"] == "10.50"
    assert found["violated-policies"] == ["org-cap"]
    assert of_refusal(refusal, "org:a", lambda _: False).document()["violated-policies"] == ["cap"]
    if status in (402, 429):
        assert problem.headers["Cache-Control"] == "no-store"


def test_every_error_of_the_contract_has_its_status() -> None:
    for row in ERRORS:
        problem = of_error(row.type(f"{row.name}: what was wrong", "what to do"))
        assert (problem.status, problem.name) == (row.http_status, row.name)
        assert problem.detail == "what was wrong. what to do"


@pytest.mark.parametrize("kind", CostError.__subclasses__())
def test_a_cost_that_cannot_be_told_is_the_callers_to_mend(kind: type[CostError]) -> None:
    problem = of_error(kind("max_tokens is missing"))
    assert (problem.status, problem.name, problem.detail) == (422, kind.name, "max_tokens is missing")


@pytest.mark.parametrize("error", [Unavailable("postgresql://h"), NotAllowed("login x"), SchemaMismatch("0001")])
def test_what_is_the_operators_to_mend_is_not_told_to_strangers(error: QuotaError) -> None:
    problem = of_error(error)
    assert problem.status == 503
    assert str(error) not in str(problem.document())


def test_secrets_are_masked_wherever_they_were_put() -> None:
    made = Credential.new(KEY, "web")
    random = made.secret.removeprefix("qk_web_")
    problem = Problem(404, "x", f'no "{made.secret}" and no "{random}"', members={"errors": [{"field": random}]})
    assert random not in str(problem.document("urn:x:0192f0c1-2b3c-7d4e-8f50-123456789abc"))
    assert "0192f0c1-2b3c-7d4e-8f50-123456789abc" in str(problem.document("urn:x:0192f0c1-2b3c-7d4e-8f50-123456789abc"))
    identity = UUID("0192f0c1-2b3c-7d4e-8f50-123456789abc")
    assert str(identity) in str(Problem(404, "x", f"no {identity}").document())


def test_credentials() -> None:
    made = Credential.new(TOKEN)
    assert read(made.secret, TOKEN) == made
    assert read(made.secret, KEY) is None
    assert made.secret not in repr(made)
    assert len(made.hash) == 32
    for wrong in ("", "qt_", made.secret + "x", made.secret[:-1], made.secret.upper(), "é" * 60, "\ud800", "x" * 10**6):
        assert read(wrong, TOKEN) is None
    assert len({Credential.new(KEY).id for _ in range(100)}) == 100
