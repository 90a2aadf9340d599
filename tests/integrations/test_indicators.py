"""What guards tell the reports: refusals in sums, routes, attempts, truncated answers; and batch beside others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest

from quota.calls import ReportModels, ReportPools, Reserve, SetLimit
from quota.client import AsyncClient, Client, run
from quota.errors import Refused, Shortage, Unavailable
from quota.integrations import anthropic as anthropics
from quota.integrations import openai as openais
from quota.integrations import refusals
from quota.integrations.guard import AsyncGuard, Guard, Pool, spending
from tests.integrations.conftest import Books
from tests.integrations.provider import Provider
from tests.integrations.test_openai import ASKED
from tests.sql.kit import PATIENCE_S

TOO_MUCH: Any = {**ASKED, "max_completion_tokens": 5000}


@pytest.fixture(autouse=True)
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first time refusals are told when they are asked for, however slow this machine is."""
    monkeypatch.setattr(refusals, "_EVERY_S", 1e9)


@pytest.fixture
def route(books: Books) -> str:
    """A route of the test's own, in a ledger that all tests here share."""
    return f"route of {books.user}"


@pytest.fixture
def guard(client: Client, books: Books, route: str) -> Guard:
    return Guard(client, books.user, details={"route": route})


@pytest.fixture
def ai(provider: Provider, guard: Guard) -> Iterator[openai.OpenAI]:
    with ExitStack() as stack:
        plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1", timeout=60))
        yield stack.enter_context(openais.guarded(plain, guard))


def reported(client: Client, route: str) -> dict[str, Any]:
    (row,) = [row for row in client.call(ReportModels()) if row["route"] == route]
    return row


def told(books: Books, route: str) -> list[tuple[Any, ...]]:
    """How often refusals of a route were told, and of how many calls."""
    return books.connection.execute(
        "SELECT reason, limit_subject, limit_name, refused, retried FROM quota.model_refusals WHERE route = %s"
        " ORDER BY refused",
        (route,),
    ).fetchall()


# -- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_are_told_in_sums_and_touch_no_account(
    ai: openai.OpenAI, guard: Guard, client: Client, books: Books, route: str
) -> None:
    for attempt in range(1, 6):
        with pytest.raises(Refused), spending(attempt=attempt):
            ai.chat.completions.create(**TOO_MUCH)
    assert told(books, route) == [("too_large", books.user, "cap", 1, 0)], "the first at once, the others not yet"
    guard.tell_refusals()
    assert told(books, route) == [
        ("too_large", books.user, "cap", 1, 0), ("too_large", books.user, "cap", 4, 4),
    ]  # fmt: skip
    assert books.spent() == books.spent(limit="calls") == (0, 0)
    guard.tell_refusals()
    assert len(told(books, route)) == 2, "nothing is told twice"
    ai.chat.completions.create(**ASKED)
    found = reported(client, route)
    assert (found["attempts"], found["refused"], found["retries"], found["answered"]) == (6, 5, 4, 1)


def test_the_limit_that_refused_is_named(
    ai: openai.OpenAI, guard: Guard, client: Client, books: Books, provider: Provider
) -> None:
    run(books.connection, SetLimit(books.pool, "tpm", "quota_tokens", "bucket", 100, 1))
    with ExitStack() as stack:
        plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1"))
        drawing = Guard(client, books.user, pool=Pool(books.pool))
        for _ in range(3):
            with pytest.raises(Refused):
                stack.enter_context(openais.guarded(plain, drawing)).chat.completions.create(**ASKED)
        drawing.tell_refusals()
    found = {row["limit_name"]: row for row in client.call(ReportPools()) if row["pool"] == books.pool}
    assert (found["tpm"]["refused"], found["tpd"]["refused"]) == (3, 0)


def test_a_call_that_waited_in_vain_counts_once(client: Client, books: Books, provider: Provider, route: str) -> None:
    run(books.connection, SetLimit(books.pool, "slots", "concurrency", "concurrency", 1))
    run(books.connection, Reserve(books.user, {"usd": 0}, also=[books.pool]))
    guard = Guard(client, books.user, pool=Pool(books.pool), wait=Decimal("0.1"), details={"route": route})
    plain = openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1")
    with plain, openais.guarded(plain, guard) as ai, pytest.raises(Shortage):
        ai.chat.completions.create(**ASKED)
    guard.tell_refusals()
    assert told(books, route) == [("concurrency", books.pool, "slots", 1, 0)]


def test_a_ledger_that_is_away_is_told_later(
    ai: openai.OpenAI, guard: Guard, books: Books, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def away(*_: object, **__: object) -> None:
            raise Unavailable("away", False)

        patch.setattr(guard.ledger, "record", away)
        for _ in range(2):
            with pytest.raises(Refused):
                ai.chat.completions.create(**TOO_MUCH)
        assert told(books, route) == []
    guard.tell_refusals()
    assert told(books, route) == [("too_large", books.user, "cap", 2, 0)]


def test_a_later_call_tells_what_is_due(ai: openai.OpenAI, guard: Guard, books: Books, route: str) -> None:
    for _ in range(2):
        with pytest.raises(Refused):
            ai.chat.completions.create(**TOO_MUCH)
    ai.chat.completions.create(**ASKED)
    assert len(told(books, route)) == 1
    guard.refusals._told_at -= 2e9
    ai.chat.completions.create(**ASKED)
    assert [row[3] for row in told(books, route)] == [1, 1]


async def test_asynchronous_guards_tell_too(
    async_client: AsyncClient, books: Books, provider: Provider, route: str
) -> None:
    guard = AsyncGuard(async_client, books.user)
    plain = openai.AsyncOpenAI(api_key="secret", base_url=f"{provider.url}/v1")
    async with plain, openais.guarded(plain, guard) as ai:
        for _ in range(3):
            with pytest.raises(Refused), spending(route=route):
                await ai.chat.completions.create(**TOO_MUCH)
    await guard.tell_refusals()
    assert [row[3] for row in told(books, route)] == [1, 2]


def test_more_kinds_than_can_be_kept_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    from quota.calls import Reservation

    counts = refusals.Refusals()
    refusal = Reservation(granted=False, reservation=None, state=None, reason="rate")
    for number in range(refusals._KINDS_MAX + 1):
        counts.count({"provider": "p", "model": f"m{number}", "route": ""}, refusal)
    counts.count({"provider": "p", "model": "m0", "route": ""}, refusal)
    found = counts.due(now=True)
    assert found is not None
    assert sum(one["refused"] for one in found["refusals"]) == refusals._KINDS_MAX + 1
    assert "left out" in caplog.text


# -- what reservations keep -----------------------------------------------------------------------------------------


def test_a_route_is_the_blocks_or_the_guards_or_what_is_called(
    ai: openai.OpenAI, client: Client, books: Books, provider: Provider, route: str
) -> None:
    ai.chat.completions.create(**ASKED)
    assert books.last()["details"]["route"] == route
    with spending(books.user, route="outer"), spending(attempt=3):
        ai.chat.completions.create(**ASKED)
    assert (books.last()["details"]["route"], books.last()["details"]["attempt"]) == ("outer", 3)
    plain = openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1")
    with plain, openais.guarded(plain, Guard(client, books.user)) as own:
        own.chat.completions.create(**ASKED, n=2)
        assert books.last()["details"]["route"] == "chat.completions"
        assert (books.last()["details"]["answers"], books.last()["details"]["ceiling"]) == (2, 200)
        own.responses.create(model="gpt-x", input="Say hello", max_output_tokens=100)
        assert books.last()["details"]["route"] == "responses"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_answers_that_end_at_their_ceiling(
    ai: openai.OpenAI, guard: Guard, books: Books, provider: Provider, stream: bool, truncated: bool
) -> None:
    provider.truncated = truncated
    found = ai.chat.completions.create(**ASKED, stream=stream)
    if stream:
        list(found)
    assert books.last()["details"]["truncated"] is truncated
    answer = ai.responses.create(model="gpt-x", input="Say hello", max_output_tokens=100, stream=stream)
    if stream:
        list(answer)
    assert books.last()["details"]["truncated"] is truncated
    plain = anthropic.Anthropic(api_key="secret", base_url=provider.url)
    with plain, anthropics.guarded(plain, guard) as claude:
        messages: Any = [{"role": "user", "content": "Say hello"}]
        told = claude.messages.create(model="claude-opus-4-8", messages=messages, max_tokens=100, stream=stream)
        if stream:
            list(told)
    assert books.last()["details"]["truncated"] is truncated


def test_429s_and_truncation_reach_the_report(
    ai: openai.OpenAI, client: Client, books: Books, provider: Provider, route: str
) -> None:
    provider.behave = ["429", "ok", "500", "ok"]
    provider.truncated = True
    for number in range(1, 5):
        try:
            with spending(attempt=number if number < 3 else None):
                ai.chat.completions.create(**ASKED)
        except openai.APIStatusError:
            pass
    found = reported(client, route)
    assert (found["attempts"], found["throttled"], found["retries"], found["failed"]) == (4, 1, 1, 1)
    assert (found["answered"], found["truncation_rate"], found["throttle_rate"]) == (2, 1, Decimal("0.25"))
    assert (found["ceiling_p50"], found["output_p50"], found["efficiency_p50"]) == (100, 30, Decimal("0.3"))


# -- batch beside interactive work ----------------------------------------------------------------------------------


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def test_batch_saturates_its_share_and_interactive_calls_are_all_granted(
    client: Client, books: Books, provider: Provider
) -> None:
    """Ten slots, and batch with a headroom of 0.2: it gets eight of them, however it asks, and others the last two."""
    run(books.connection, SetLimit(books.user, "cap", "usd", "budget", 1000))
    run(books.connection, SetLimit(books.pool, "slots", "concurrency", "concurrency", 10))
    provider.behave = ["wait"]
    ended: Counter[str] = Counter()
    with ExitStack() as stack:
        plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1", timeout=300))
        pool = Pool(books.pool)
        batch = stack.enter_context(
            openais.guarded(plain, Guard(client, books.user, pool=pool, headroom=Decimal("0.2")))
        )
        person = stack.enter_context(openais.guarded(plain, Guard(client, books.user, pool=pool)))

        def work() -> None:
            try:
                batch.chat.completions.create(**ASKED)
                ended["answered"] += 1
            except Refused as error:
                ended[str(error.refusal.reason)] += 1

        workers = [threading.Thread(target=work, daemon=True) for _ in range(12)]
        for worker in workers:
            worker.start()
        wait_for(lambda: len(provider.reached) == 8 and ended["concurrency"] == 4)
        provider.behave = ["ok"]
        for _ in range(20):
            assert person.chat.completions.create(**ASKED).choices
            with pytest.raises(Refused, match="concurrency"):
                batch.chat.completions.create(**ASKED)
        assert books.connection.execute(
            "SELECT reserved FROM quota.balance(%s) WHERE limit_name = 'slots'", (books.pool,)
        ).fetchone() == (8,)
        provider.released.set()
        for worker in workers:
            worker.join(PATIENCE_S)
    assert ended == {"concurrency": 4, "answered": 8}


def test_batch_never_takes_the_last_fifth_of_a_quota(client: Client, books: Books, provider: Provider) -> None:
    """A day's 100,000 quota tokens: batch stops at 80,000, and interactive calls have what is left."""
    run(books.connection, SetLimit(books.user, "cap", "usd", "budget", 1000))
    provider.usage = {"prompt_tokens": 6000, "completion_tokens": 2000}
    made: Counter[str] = Counter()
    with ExitStack() as stack:
        plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1", timeout=60))
        pool, asked = Pool(books.pool), {**ASKED, "max_completion_tokens": 2000}
        guards = {
            name: Guard(client, books.user, pool=pool, input_tokens=6000, headroom=headroom)
            for name, headroom in (("batch", Decimal("0.2")), ("person", Decimal(0)))
        }
        clients = {name: stack.enter_context(openais.guarded(plain, guard)) for name, guard in guards.items()}
        for name in ["batch"] * 12 + ["person", "batch"] * 2 + ["person"]:
            try:
                clients[name].chat.completions.create(**asked)
                made[name] += 1
            except Refused as error:
                made[f"{name}: {error.refusal.limit_name} {error.refusal.reason}"] += 1
    assert made == {"batch": 10, "batch: tpd exhausted": 4, "person": 2, "person: tpd exhausted": 1}
    assert books.spent(books.pool, "tpd") == (96_000 - 12 * 20, 0), "what the cache served is free"
