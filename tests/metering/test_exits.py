"""Every way in which a call can end, whole and flowing: its hold is closed, at the right cost, in the right words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from quota import AsyncClient
from quota.calls import SetLimit
from quota.client import run
from quota.client.attempts import Execute, Together
from quota.integrations.asgi import MeteringMiddleware
from quota.metering import Policy, Route, fixed
from tests.metering.kit import Books, Gateway, asgi_app
from tests.server import Connection

# query, leave_after -> outcome and cost of a whole answer, then of a flowing one. The estimate is 300.
# A whole answer is settled when its head is known, so that what happens to its body later is no news.
WAYS: dict[str, tuple[str, int | None, str, int, str, int]] = {
    "answered": ("cost=40", None, "answered", 40, "answered", 40),
    "answered at 0": ("cost=0", None, "answered", 0, "answered", 0),
    "more than the hold": ("cost=400", None, "answered", 400, "answered", 400),
    "without the header": ("", None, "answered", 1, "answered", 1),
    "with a malformed one": ("cost=-5", None, "answered", 1, "answered", 1),
    "fails before the head": ("cost=40&fail=before", None, "exception", 1, "exception", 1),
    "answers 500": ("fail=500", None, "failed", 1, "failed", 1),
    "answers 503 with a cost": ("fail=503&cost=40", None, "failed", 40, "failed", 40),
    "answers 404": ("fail=404", None, "answered", 1, "answered", 1),
    "answers nothing at all": ("fail=silent", None, "failed", 1, "failed", 1),
    "fails at the first piece": ("cost=40&fail=first", None, "answered", 40, "cut", 40),
    "fails in the middle": ("cost=40&fail=mid", None, "answered", 40, "cut", 40),
    "fails in the middle, no cost": ("fail=mid", None, "answered", 1, "cut", 1),
    "fails at the end": ("cost=40&fail=end", None, "answered", 40, "cut", 40),
    "fails at close": ("cost=40&fail=close", None, "answered", 40, "answered", 40),
    "caller gone at once": ("cost=40", 0, "answered", 40, "gone", 40),
    "caller gone in the middle": ("cost=40", 2, "answered", 40, "gone", 40),
    "caller gone, no cost": ("", 1, "answered", 1, "gone", 1),
    "ran out of time": ("fail=504&note=timeout", None, "timeout", 1, "timeout", 1),
}
LEDGER = {"answered": "ok", "failed": "error", "exception": "error", "cut": "error", "gone": "cancelled",
          "timeout": "timeout"}  # fmt: skip
# In WSGI the first piece is asked for before the head goes out: until then the application may take it back.
BEFORE_THE_HEAD = {"wsgi": {"fails at the first piece"}}


@pytest.fixture
def slots(beside: Connection, books: Books) -> None:
    """One call at a time."""
    run(beside, SetLimit(books.subject, "slots", "concurrency", "concurrency", 1))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("slots")
def test_no_way_leaves_a_hold(way: str, stream: bool, serve: Callable[..., Gateway], books: Books) -> None:
    query, leave_after, whole_outcome, whole_cost, flowing_outcome, flowing_cost = WAYS[way]
    outcome, cost = (flowing_outcome, flowing_cost) if stream else (whole_outcome, whole_cost)
    gateway = serve(Policy())
    if way in BEFORE_THE_HEAD.get(gateway.kind, ()):
        outcome, cost = "exception", 1
    gateway.ask(query=query + "&stream=1" * stream, headers=books.key, leave_after=leave_after)
    last = books.last()
    assert (last["state"], last["outcome"], last["booked"]["cost"]) == ("settled", LEDGER[outcome], cost)
    details = last["details"]
    assert (details["outcome"], details["cost"], details["estimate"]) == (outcome, cost, 300)
    # Not a 404: whoever answers that has no rows to report.
    assert details["cost_header_missing"] is (cost == 1 and outcome == "answered" and "404" not in query)
    assert (books.spent(), books.reserved(), books.reserved("slots")) == (cost, 0, 0)
    # The slot is free again, and the next call finds it.
    assert gateway.ask(query="cost=1", headers=books.key).status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_cancelled_task_leaves_no_hold(stream: bool, serve: Callable[..., Gateway], books: Books) -> None:
    gateway = serve(Policy())
    if gateway.kind == "asgi":
        gateway.ask(query="cost=40&fail=cancel" + "&stream=1" * stream, headers=books.key)
        assert books.last()["details"]["outcome"] == ("gone" if stream else "answered")
        assert (books.spent(), books.reserved()) == (40, 0)


def test_a_coalesced_call_takes_two_round_trips(
    serve: Callable[..., Gateway], books: Books, beside: Connection
) -> None:
    """The look at the balances goes with the settlement and comes after it; a refusal's terms are known from it."""
    gateway = serve(Policy(), coalesce=True)
    gateway.meter.ledger._terms.seconds = 3600
    sent: list[list[str]] = []
    execute = gateway.meter.client._execute

    def spy(step: Execute | Together) -> Any:
        steps = step.steps if isinstance(step, Together) else (step,)
        sent.append([one.statement.partition("quota.")[2].partition("(")[0] for one in steps])
        return execute(step)

    gateway.meter.client._execute = spy
    answer = gateway.ask(query="cost=40", headers=books.key)
    assert sent == [["verify_key"], ["reserve"], ["settle", "limits_of"]]
    assert '"hourly";r=1999960' in answer.headers["ratelimit"]
    assert (books.spent(), books.reserved()) == (40, 0)
    sent.clear()
    run(beside, SetLimit(books.subject, "hourly", "cost", "budget", 320, period="1 hour"))
    assert gateway.ask(query="cost=40", headers=books.key).status == 429
    assert sent == [["reserve"]]


def test_a_stream_keeps_its_slot_until_its_end_and_no_more_than_its_cost(
    serve: Callable[..., Gateway], books: Books, beside: Connection
) -> None:
    """The difference to the estimate returns with the head, the slot with the end."""
    run(beside, SetLimit(books.subject, "slots", "concurrency", "concurrency", 1))
    gateway = serve(Policy())
    seen: list[Any] = []
    original = gateway.meter.ledger.looking

    def spy(*args: Any, **kwargs: Any) -> Any:
        snapshot = yield from original(*args, **kwargs)
        seen.append({state.limit_name: state.reserved for state in snapshot.states})
        return snapshot

    gateway.meter.ledger.looking = spy
    answer = gateway.ask(query="cost=40&stream=1", headers=books.key)
    assert seen == [{"bucket": 40, "hourly": 40, "slots": 1}]
    assert '"hourly";r=1999960' in answer.headers["ratelimit"]
    seen.clear()
    answer = gateway.ask(query="cost=400&stream=1", headers=books.key)
    assert '"hourly";r=1999560' in answer.headers["ratelimit"]
    assert books.spent() == 440


def test_who_has_the_whole_stream_finds_it_settled(shared_ledger: str, books: Books) -> None:
    """Before the last piece goes out: what an application does after its answer holds nothing."""
    states: list[tuple[str, str]] = []

    async def background(scope: Any, receive: Any, send: Any) -> None:
        await asgi_app(scope, receive, send)
        states.append(("after the answer", books.last()["state"]))

    async def asked() -> None:
        async with AsyncClient(shared_ledger, timeout_s=30) as client:
            app = MeteringMiddleware(background, client)

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    last = not message["more_body"]
                    states.append(("last piece" if last else "piece", books.last()["state"]))

            headers = [(name.lower().encode(), value.encode()) for name, value in books.key]
            scope = {"type": "http", "method": "GET", "path": "/rows", "query_string": b"cost=1&stream=1"}
            await app({**scope, "headers": headers}, lambda: None, send)  # type: ignore[arg-type, return-value]

    asyncio.run(asked())
    assert states == [*[("piece", "held")] * 3, ("last piece", "settled"), ("after the answer", "settled")]


def test_what_is_known_at_the_end_only(serve: Callable[..., Gateway], books: Books) -> None:
    gateway = serve(Policy())
    assert gateway.ask("/late", headers=books.key).body == b"row\n"
    last = books.last()
    assert (last["booked"]["cost"], last["details"]["rows"], last["details"]["response_bytes"]) == (77, 77, 4)
    assert last["details"]["cost_header_missing"] is False


def expiry(beside: Connection, books: Books) -> Any:
    row = beside.execute("SELECT expires_at FROM quota.holds WHERE subject = %s", (books.subject,)).fetchone()
    assert row is not None
    return row[0]


def test_a_long_stream_is_prolonged(serve: Callable[..., Gateway], books: Books, beside: Connection) -> None:
    """A piece that passes after half the time moves the expiry: here half of almost nothing."""
    gateway = serve(Policy(default=Route("/", ttl=timedelta(hours=2))))
    extended: list[Any] = []
    call = gateway.meter.call

    def made(request: Any) -> Any:
        one = call(request)
        original = one.extending
        one._extended_s -= 3601  # an hour has passed

        def extending() -> Any:
            before = expiry(beside, books)
            yield from original()
            extended.append(expiry(beside, books) > before)

        one.extending = extending
        return one

    gateway.meter.call = made
    gateway.ask(query="cost=3&stream=1", headers=books.key)
    assert extended == [True]
    assert (books.spent(), books.reserved()) == (3, 0)


@pytest.mark.parametrize(
    ("route", "query", "cost"),
    [
        ({"minimum_charge": 5}, "cost=0", 5),
        ({"minimum_charge": 5}, "fail=500", 5),
        ({"minimum_charge": 5}, "cost=9", 9),
        ({"failure_charge": 0}, "fail=500", 0),
        ({"failure_charge": 7}, "fail=before", 7),
        ({"failure_charge": 7}, "", 1),
        ({"on_timeout": "hold"}, "fail=504&note=timeout", 300),
        ({"on_timeout": "hold"}, "fail=504&note=failed", 1),
        ({"overrun": "cap"}, "cost=400", 300),
        ({"overrun": "cap"}, "cost=400&stream=1", 300),
        ({"overrun": "cap"}, "cost=40", 40),
        ({"estimate": fixed(0)}, "cost=0", 0),
    ],
)
def test_policies(route: dict[str, Any], query: str, cost: int, serve: Callable[..., Gateway], books: Books) -> None:
    gateway = serve(Policy(routes=(Route("/rows", **route),)))
    gateway.ask(query=query, headers=books.key)
    assert (books.spent(), books.reserved()) == (cost, 0)
    assert books.last()["details"]["cost"] == cost


def test_a_missing_header_is_counted_and_logged(
    serve: Callable[..., Gateway], books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = serve(Policy(routes=(Route("/rows", name="rows"),)))
    for query in ("", "cost=1.5", "cost=2", "fail=404", "fail=500"):
        gateway.ask(query=query, headers=books.key)
    assert gateway.meter.events == {("cost_header_missing", "rows"): 2}
    assert [record.message for record in caplog.records if "cost_header_missing" in record.message] == [
        f"cost_header_missing at rows, {number} so far: a 200 told no cost that can be read" for number in (1, 2)
    ]
    assert [one["details"]["cost_header_missing"] for one in books.calls()] == [True, True, False, False, False]
