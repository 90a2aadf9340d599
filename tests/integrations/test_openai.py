"""The real `openai` package against a provider on this machine: what leaves, what is held, what is settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import openai
import pytest

from quota.calls import Freeze, SetLimit, SetPrice
from quota.client import AsyncClient, Client, run
from quota.costs.tokens import QuotaTokens
from quota.errors import InvalidArgument, MissingCeiling, Refused, Shortage, UnboundedInput, UnpricedModel
from quota.integrations.guard import AsyncGuard, Guard, Pool, spending
from quota.integrations.openai import guarded
from tests.integrations.conftest import COST, RATES, Books
from tests.integrations.provider import Provider

MESSAGES: Any = [{"role": "user", "content": "Say hello"}]
ASKED: Any = {"model": "gpt-x", "messages": MESSAGES, "max_completion_tokens": 100}


Make = Callable[..., openai.OpenAI]


@pytest.fixture
def make(provider: Provider, client: Client, books: Books) -> Iterator[Make]:
    """Makes guarded clients: the subject, and the guard's options."""
    with ExitStack() as stack:

        def one(subject: str | None = books.user, url: str = f"{provider.url}/v1", **options: Any) -> openai.OpenAI:
            plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=url, timeout=20))
            return stack.enter_context(guarded(plain, Guard(client, subject, **options)))

        yield one


@pytest.fixture
def ai(make: Make) -> openai.OpenAI:
    return make()


# -- waiting --------------------------------------------------------------------------------------------------------


def test_a_call_waits_in_turn_and_never_leaves_without_room(
    make: Make, client: Client, books: Books, provider: Provider
) -> None:
    client.call(SetLimit(books.user, "slots", "concurrency", "concurrency", 1))
    busy = client.reserve(books.user, {"concurrency": 1, "usd": 0}).reservation
    assert busy is not None
    with pytest.raises(Shortage, match="no room"):
        make(wait=0.1).chat.completions.create(**ASKED)
    assert provider.reached == []
    client.release(busy)
    make(wait=60).chat.completions.create(**ASKED)
    assert len(provider.reached) == 1


# -- answered -------------------------------------------------------------------------------------------------------


def test_an_answer_settles_at_its_usage(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    answer = ai.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == "Hello there"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 100
    assert books.spent() == (COST, 0)
    last = books.last()
    assert (last["state"], last["outcome"]) == ("settled", "ok")
    assert books.held() > Decimal("0.2"), "100 tokens of output at 2000, and the input's bound"
    assert last["details"]["model"] == "gpt-x"
    assert isinstance(last["details"]["price_version"], int)
    assert last["details"]["usage"] == {"input": 80, "cached_input": 20, "output": 30}
    assert len(provider.reached) == 1
    assert provider.reached[0][1]["max_completion_tokens"] == 100


def test_responses_settle_too(ai: openai.OpenAI, books: Books) -> None:
    answer = ai.responses.create(model="gpt-x", input="Say hello", max_output_tokens=100)
    assert answer.output_text == "Hello there"
    assert books.spent() == (COST, 0)


def test_the_packages_own_ways_are_guarded_as_well(ai: openai.OpenAI, books: Books) -> None:
    raw = ai.chat.completions.with_raw_response.create(**ASKED)
    assert raw.parse().choices[0].message.content == "Hello there"
    ai.with_options(timeout=10).chat.completions.create(**ASKED)
    assert books.spent() == (2 * COST, 0)
    assert list(ai.models.list()) == [], "what costs nothing passes"


def test_money_and_quota_tokens_in_one_reservation(make: Make, books: Books) -> None:
    ai = make(pool=Pool(books.pool, tokens=QuotaTokens(15)))
    ai.chat.completions.create(**ASKED)
    last = books.last()
    bound = last["details"]["input_bound"]
    assert last["held"]["quota_tokens"] == bound + 100 * 15
    assert books.spent(books.pool, "tpd") == (80 + 30 * 15, 0)
    assert books.spent() == (COST, 0)
    assert last["also"] == [books.pool]


# -- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"model": "gpt-unknown"}, UnpricedModel, "gpt-unknown"),
        ({"max_completion_tokens": openai.omit}, MissingCeiling, "max_completion_tokens is missing"),
        ({"max_completion_tokens": 0}, MissingCeiling, "max_completion_tokens is 0"),
        ({"service_tier": "priority"}, UnpricedModel, 'variant "priority"'),
        ({"tools": [{"type": "web_search"}]}, UnboundedInput, "web_search"),
        ({"max_completion_tokens": 500}, Refused, "too_large"),
    ],
)
def test_nothing_leaves_without_a_hold(
    ai: openai.OpenAI, books: Books, provider: Provider, changed: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        ai.chat.completions.create(**{**ASKED, **changed})
    assert provider.reached == []
    assert books.spent() == (0, 0)


def test_what_is_not_guarded_does_not_leave(ai: openai.OpenAI, provider: Provider) -> None:
    with pytest.raises(UnboundedInput, match="/v1/embeddings is not guarded"):
        ai.embeddings.create(model="e", input="x")
    assert provider.reached == []


def test_a_refusal_tells_its_numbers(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    run(books.connection, SetLimit(books.user, "cap", "usd", "budget", "0.1"))
    with pytest.raises(Refused) as caught:
        ai.chat.completions.create(**ASKED)
    assert caught.value.refusal.reason == "too_large"
    assert caught.value.refusal.limit_name == "cap"
    run(books.connection, Freeze(books.user, "runaway"))
    with pytest.raises(Refused, match="frozen"):
        ai.chat.completions.create(**ASKED)
    assert provider.reached == []


def test_nobody_pays(make: Make, books: Books) -> None:
    ai = make(None)
    with pytest.raises(InvalidArgument, match="nobody pays"):
        ai.chat.completions.create(**ASKED)
    with spending(books.user):
        ai.chat.completions.create(**ASKED)
    assert books.spent() == (COST, 0)


def test_a_callers_largest_ceiling(make: Make, provider: Provider) -> None:
    with pytest.raises(MissingCeiling, match="may ask for 50"):
        make(max_tokens=50).chat.completions.create(**ASKED)
    assert provider.reached == []


# -- what a provider does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 503])
def test_turned_away_settles_at_nothing_and_counts_the_request(
    ai: openai.OpenAI, books: Books, provider: Provider, status: int
) -> None:
    provider.behave = [str(status)]
    with pytest.raises(openai.APIStatusError) as caught:
        ai.chat.completions.create(**ASKED)
    assert caught.value.status_code == status
    assert len(provider.reached) == 1, "one attempt, one hold: the package does not repeat it"
    assert books.spent() == (0, 0)
    assert books.spent(limit="calls") == (1, 0)
    assert books.last()["outcome"] == "error"


def test_a_failure_of_the_provider_settles_at_the_hold(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["500"]
    with pytest.raises(openai.InternalServerError):
        ai.chat.completions.create(**ASKED)
    assert books.spent() == (books.held(), 0)
    assert books.last()["details"]["flag"] == "provider_failed"


def test_a_reset_settles_at_the_hold(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["reset"]
    with pytest.raises(openai.APIConnectionError):
        ai.chat.completions.create(**ASKED)
    assert len(provider.reached) == 1
    assert books.spent() == (books.held(), 0)
    assert books.last()["outcome"] == "unknown"


def test_a_timeout_settles_at_the_hold(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["hang"]
    with pytest.raises(openai.APITimeoutError):
        ai.with_options(timeout=0.3).chat.completions.create(**ASKED)
    assert books.spent() == (books.held(), 0)
    assert books.last()["outcome"] == "timeout"


def test_a_call_that_never_left_is_released(make: Make, books: Books) -> None:
    with pytest.raises(openai.APIConnectionError):
        make(url="http://127.0.0.1:1/v1").chat.completions.create(**ASKED)
    assert books.spent() == (0, 0)
    assert books.last()["state"] == "released"


@pytest.mark.parametrize(
    ("how", "usage", "flag"),
    [
        ("no_usage", {}, "usage_missing"),
        ("ok", {"completion_tokens": -5}, "usage_malformed"),
        ("ok", {"completion_tokens": 10**12}, "usage_malformed"),
        ("ok", {"prompt_tokens": 10}, "usage_malformed"),  # fewer than are said to be cached
    ],
)
def test_usage_that_is_none_settles_at_the_hold_and_is_flagged(
    ai: openai.OpenAI, books: Books, provider: Provider, how: str, usage: dict[str, int], flag: str
) -> None:
    provider.behave, provider.usage = [how], usage
    ai.chat.completions.create(**ASKED)
    assert books.spent() == (books.held(), 0)
    assert books.last()["details"]["flag"] == flag


def test_usage_above_the_hold_is_booked_in_full(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.usage = {"completion_tokens": 100_000}
    ai.chat.completions.create(**ASKED)
    assert books.spent() == (Decimal("200.082"), 0)


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_settles_at_its_end_and_hides_what_was_not_asked_for(
    ai: openai.OpenAI, books: Books, provider: Provider
) -> None:
    texts, usages = [], []
    for chunk in ai.chat.completions.create(**ASKED, stream=True):
        texts.append(chunk.choices[0].delta.content or "")
        usages.append(chunk.usage)
    assert "".join(texts) == "Hello there"
    assert set(usages) == {None}
    assert provider.reached[0][1]["stream_options"] == {"include_usage": True}
    assert books.spent() == (COST, 0)


def test_a_caller_who_asked_sees_the_usage(ai: openai.OpenAI, books: Books) -> None:
    chunks = list(ai.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert books.spent() == (COST, 0)


def test_a_stream_of_a_response(ai: openai.OpenAI, books: Books) -> None:
    events = list(ai.responses.create(model="gpt-x", input="Say hello", max_output_tokens=100, stream=True))
    assert [event.type for event in events][-1] == "response.completed"
    assert books.spent() == (COST, 0)


def test_a_stream_that_the_provider_cuts(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["cut"]
    with pytest.raises(openai.APIConnectionError):
        list(ai.chat.completions.create(**ASKED, stream=True))
    assert books.spent() == (books.held(), 0)
    assert books.last()["details"]["flag"] == "stream_cut"


def test_a_stream_that_the_caller_leaves(ai: openai.OpenAI, books: Books) -> None:
    with ai.chat.completions.create(**ASKED, stream=True) as stream:
        next(iter(stream))
    assert books.spent() == (books.held(), 0)
    assert (books.last()["outcome"], books.last()["details"]["flag"]) == ("cancelled", "stream_cut")


def test_a_stream_without_usage(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["no_usage"]
    list(ai.chat.completions.create(**ASKED, stream=True))
    assert books.spent() == (books.held(), 0)


def test_a_stream_that_is_turned_away(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    provider.behave = ["429"]
    with pytest.raises(openai.RateLimitError):
        ai.chat.completions.create(**ASKED, stream=True)
    assert books.spent() == (0, 0)


# -- one attempt, one hold, one price ----------------------------------------------------------------------------------


def test_a_call_settles_by_the_price_it_was_held_at(
    client: Client, books: Books, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price changes while the stream is under way; who calls next pays the new one."""
    model = f"gpt-{books.user}"
    run(books.connection, SetPrice("openai", model, RATES, effective_from="-infinity"))
    guard = Guard(client, books.user)
    plain = openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1", timeout=20)
    with plain, guarded(plain, guard) as ai:
        asked = {**ASKED, "model": model}
        stream = ai.chat.completions.create(**asked, stream=True)
        version = books.last()["details"]["price_version"]
        run(books.connection, SetPrice("openai", model, {"input": "500", "output": "500"}))
        monkeypatch.setattr(guard, "known_book", lambda: None)  # as when a minute has passed
        ai.chat.completions.create(**asked)
        assert books.last()["details"]["price_version"] > version
        half = Decimal("0.065")  # 130 tokens at 500
        assert books.spent()[0] == half
        list(stream)
    assert books.spent() == (half + COST, 0)


def test_a_call_to_another_model_is_another_hold(ai: openai.OpenAI, books: Books, provider: Provider) -> None:
    other = f"gpt-{books.user}"
    run(books.connection, SetPrice("openai", other, {"input": "500", "output": "500"}, effective_from="-infinity"))
    provider.behave = ["429", "ok"]
    with pytest.raises(openai.RateLimitError):
        ai.chat.completions.create(**ASKED)
    first = books.last()
    ai.with_options().chat.completions.create(**{**ASKED, "model": other})
    assert (first["details"]["model"], first["details"]["status"]) == ("gpt-x", 429)
    assert books.last()["details"]["model"] == other
    assert (books.spent(), books.spent(limit="calls")) == ((Decimal("0.065"), 0), (2, 0))


# -- asyncio --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def async_ai(provider: Provider, async_client: AsyncClient, books: Books) -> AsyncIterator[openai.AsyncOpenAI]:
    plain = openai.AsyncOpenAI(api_key="secret", base_url=f"{provider.url}/v1", timeout=20)
    async with plain, guarded(plain, AsyncGuard(async_client, books.user)) as ai:
        yield ai


async def test_asynchronous_calls_and_streams(async_ai: openai.AsyncOpenAI, books: Books, provider: Provider) -> None:
    answer = await async_ai.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == "Hello there"
    stream = await async_ai.chat.completions.create(**ASKED, stream=True)
    assert len([chunk async for chunk in stream]) == 3
    await async_ai.responses.create(model="gpt-x", input="Say hello", max_output_tokens=100)
    assert books.spent() == (3 * COST, 0)
    with pytest.raises(UnpricedModel):
        await async_ai.chat.completions.create(**{**ASKED, "model": "gpt-unknown"})
    assert len(provider.reached) == 3


async def test_a_cancelled_call_settles_at_the_hold(
    async_ai: openai.AsyncOpenAI, books: Books, provider: Provider
) -> None:
    provider.behave = ["hang"]
    task = asyncio.ensure_future(async_ai.chat.completions.create(**ASKED))
    while not provider.reached:  # noqa: ASYNC110 - a thread of its own appends to it
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert books.spent() == (books.held(), 0)
    assert books.last()["outcome"] == "cancelled"


async def test_an_asynchronous_stream_that_the_caller_leaves(async_ai: openai.AsyncOpenAI, books: Books) -> None:
    async with await async_ai.chat.completions.create(**ASKED, stream=True) as stream:
        async for _ in stream:
            break
    assert books.spent() == (books.held(), 0)


async def test_who_spends_is_told_per_task(async_client: AsyncClient, provider: Provider, books: Books) -> None:
    other = Books(books.connection)
    plain = openai.AsyncOpenAI(api_key="secret", base_url=f"{provider.url}/v1")
    async with plain, guarded(plain, AsyncGuard(async_client)) as ai:

        async def call(subject: str) -> None:
            with spending(subject):
                await ai.chat.completions.create(**ASKED)

        await asyncio.gather(call(books.user), call(other.user))
    assert (books.spent(), other.spent()) == ((COST, 0), (COST, 0))


def test_guards_and_clients_go_together(client: Client) -> None:
    plain: Any = openai.AsyncOpenAI(api_key="secret")
    with pytest.raises(TypeError, match="a Guard goes with OpenAI"):
        guarded(plain, Guard(client, "user:7"))
