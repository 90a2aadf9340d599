"""What the middleware keeps is what the calibration report reads."""

from __future__ import annotations

from collections.abc import Callable

from quota import Client
from quota.calls import ReportCalibration
from quota.metering import Policy, Route
from tests.metering.kit import Books, Gateway


def test_metered_calls_are_calibrated(serve: Callable[..., Gateway], books: Books, shared_ledger: str) -> None:
    name = f"rows of {books.subject}"
    gateway = serve(Policy(routes=(Route("/rows", name=name),)))
    for query, leave_after in (("cost=40", None), ("cost=400", None), ("", None), ("fail=500", None), ("cost=40", 0)):
        gateway.ask(query=query + "&stream=1", headers=books.key, leave_after=leave_after)
    with Client(shared_ledger, timeout_s=30) as client:
        (row,) = [row for row in client.call(ReportCalibration()) if row["route"] == name]
    outcomes = [call["details"]["outcome"] for call in books.calls()]
    assert outcomes == ["answered", "answered", "answered", "failed", "gone"]
    assert (row["calls"], row["failed"], row["header_missing"], row["cost"]) == (5, 1, 1, 40 + 400 + 1 + 1 + 40)
    assert str(row["estimate_short"]) == "0.2"
    assert row["load"] == "latency_ms"
    assert row["latency_p95_ms"] >= 0
    assert row["suggested_max_response_bytes"] == 15, "twelve bytes and a fifth"
