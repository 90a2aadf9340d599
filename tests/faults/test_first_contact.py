"""The first calls of a subject, all at once: one row each, nobody refused who fits, nobody granted who does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from tests.server import Connection, connect
from tests.sql.kit import (
    PATIENCE_S,
    Background,
    bucket,
    budget,
    call,
    in_parallel,
    new_id,
    reserve,
    spent_reserved,
    value,
    word_of,
)


def test_fifty_first_reserves_of_a_new_key(conn: Connection, database: str) -> None:
    """L20, D17, D18: ten fit, ten pass; no errors, one account."""
    budget(conn, "key:*", 10)
    call(conn, "ensure_subject", "key:new")
    answers = in_parallel(database, [("reserve", ("key:new", {"usd": 1}), {})] * 50)
    words = [word_of(answer) for answer in answers]
    assert (words.count("ok"), words.count("refused:held")) == (10, 40)
    assert spent_reserved(conn, "key:new") == (0, 10)
    assert value(conn, "SELECT count(*) FROM quota_internal.accounts WHERE unit = 'usd'") == 1


def test_first_contact_ensures_and_reserves_at_once(conn: Connection, database: str) -> None:
    """G2, D18: the kind's default cap is there before any hold, for whoever comes first."""
    budget(conn, "user:*", "0.000000001")
    start = threading.Barrier(8)
    words: list[str] = []

    def contact() -> None:
        with connect(database) as connection:
            start.wait(PATIENCE_S)
            call(connection, "ensure_subject", "user:unknown")
            words.append(word_of(reserve(connection, "user:unknown", {"usd": "0.01"})))

    threads = [threading.Thread(target=contact, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert words == ["refused:too_large"] * 8
    assert spent_reserved(conn, "user:unknown") == (0, 0)


def test_one_of_many_concurrent_ensure_subjects_creates(conn: Connection, database: str) -> None:
    budget(conn, "user:*", 10)
    answers = in_parallel(database, [("ensure_subject", ("user:new",), {})] * 20)
    assert sorted(word_of(answer) for answer in answers) == ["ok"] * 20
    assert [answer["created"] for answer in answers if isinstance(answer, dict)].count(True) == 1


def test_of_two_concurrent_parents_one_wins(conn: Connection, database: str) -> None:
    for parent in ("org:a", "org:b"):
        call(conn, "ensure_subject", parent)
    for n in range(5):
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("ensure_subject", (f"user:{n}", parent), {}) for parent in ("org:a", "org:b") for _ in range(4)
        ]
        words = sorted(word_of(answer) for answer in in_parallel(database, calls))
        assert words == ["ok"] * 4 + ["parent_differs"] * 4


def test_an_ensure_waits_for_a_birth_in_flight(conn: Connection, database: str) -> None:
    call(conn, "ensure_subject", "org:a")
    with connect(database) as other:
        with other.transaction():
            assert call(other, "ensure_subject", "user:1", "org:a")["created"]
            waiting = Background(database, "ensure_subject", "user:1", "org:a")
            waiting.must_block(conn)
        assert waiting.row() == {"created": False}
        with other.transaction(force_rollback=True):
            assert call(other, "ensure_subject", "user:2", "org:a")["created"]
            waiting = Background(database, "ensure_subject", "user:2", "org:a")
            waiting.must_block(conn)
        assert waiting.row() == {"created": True}


def test_a_kind_default_set_while_first_reserves_come(conn: Connection, database: str) -> None:
    """Whoever is granted is counted by the default, whether its account was there before it or not."""
    budget(conn, "user:*", None, "declared")
    for n in range(6):
        call(conn, "ensure_subject", f"user:{n}")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("reserve", (f"user:{n}", {"usd": 1}), {"id": new_id()}) for n in range(6) for _ in range(4)
    ]
    calls.insert(3, ("set_limit", ("user:*", "cap", "usd", "budget", 2), {}))
    answers = in_parallel(database, calls)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    for n in range(6):
        # From now on the default binds: what came before it was not its to count.
        while reserve(conn, f"user:{n}", {"usd": 1})["granted"]:
            pass
        assert spent_reserved(conn, f"user:{n}")[1] == 2


def test_a_hundred_calls_on_a_full_minute(conn: Connection, database: str) -> None:
    """G3: 100 a minute, 100 at once: of 50 each two pass, of 200 each none, and those can never fit."""
    bucket(conn, "user:1", 100, 0, unit="tokens")
    for cost, fits, reason in ((200, 0, "refused:too_large"), (50, 2, "refused:rate")):
        answers = in_parallel(database, [("reserve", ("user:1", {"tokens": cost}), {})] * 50)
        words = [word_of(answer) for answer in answers]
        assert (words.count("ok"), words.count(reason)) == (fits, 50 - fits)


@pytest.mark.parametrize("cost", ["0.20", "0.30", "0.07"])
def test_concurrent_callers_of_a_small_cap(
    conn: Connection, database: str, cost: str, soaked: Callable[[int, int], int]
) -> None:
    """A01, G1, L21, D1: exactly so many pass as fit, and the cap holds in every answer."""
    for n in range(soaked(10, 200)):
        budget(conn, f"user:{n}", 1)
        answers = in_parallel(database, [("reserve", (f"user:{n}", {"usd": cost}), {})] * 20)
        assert not any(isinstance(answer, psycopg.Error) for answer in answers)
        words = [word_of(answer) for answer in answers]
        assert words.count("ok") == 1 // Decimal(cost)
        assert all(a["spent"] + a["reserved"] <= 1 for a in answers if isinstance(a, dict) and a["granted"])
