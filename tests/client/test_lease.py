"""Leased budgets against the real database."""

from __future__ import annotations

from quota.client import Client
from quota.lease import LeasedBudget
from tests.server import Connection


def test_smoke(client: Client, ledger: str, observer: Connection) -> None:
    with LeasedBudget(client, "user:1", {"usd": 10}) as budget:
        answer = budget.reserve({"usd": "0.25"})
        print(answer)
        assert answer.granted and answer.reservation
        print(observer.execute("select held, booked, details from quota.holds").fetchall())
        print(budget.settle(answer.reservation, {"usd": "0.2"}))
        print(budget.settle(answer.reservation, {"usd": "0.2"}))
        for _ in range(40):
            a = budget.reserve({"usd": 1}, id=None)
            assert a.granted
        print(observer.execute("select held, booked, details from quota.holds").fetchall())
        for _ in range(9):
            a = budget.reserve({"usd": 1}, id=None)
        r = budget.reserve({"usd": 1}, id=None)
        print(r)
        print(observer.execute("select held, booked, details from quota.holds").fetchall())
    print(observer.execute("select held, booked, details from quota.holds").fetchall())
