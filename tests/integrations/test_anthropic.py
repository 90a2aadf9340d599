"""The real `anthropic` package against a provider on this machine: what leaves, what is held, what is settled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import anthropic
import pytest

from quota.client import AsyncClient, Client
from quota.errors import MissingCeiling, Refused, UnboundedInput, UnpricedModel
from quota.integrations.anthropic import guarded
from quota.integrations.guard import AsyncGuard, Guard, Pool
from tests.integrations.conftest import COST, Books
from tests.integrations.provider import Provider

MESSAGES: Any = [{"role": "user", "content": "Say hello"}]
ASKED: Any = {"model": "claude-opus-4-8", "messages": MESSAGES, "max_tokens": 100}

Make = Callable[..., anthropic.Anthropic]


@pytest.fixture
def make(provider: Provider, client: Client, books: Books) -> Iterator[Make]:
    """Makes guarded clients; takes the guard's options."""
    with ExitStack() as stack:

        def one(url: str = provider.url, **options: Any) -> anthropic.Anthropic:
            plain = stack.enter_context(anthropic.Anthropic(api_key="secret", base_url=url, timeout=20))
            return stack.enter_context(guarded(plain, Guard(client, books.user, **options)))

        yield one


@pytest.fixture
def ai(make: Make) -> anthropic.Anthropic:
    return make()


def test_an_answer_settles_at_its_usage(ai: anthropic.Anthropic, books: Books, provider: Provider) -> None:
    answer = ai.messages.create(**ASKED)
    assert answer.content[0].type == "text"
    assert books.spent() == (COST, 0)
    last = books.last()
    assert (last["state"], last["outcome"]) == ("settled", "ok")
    assert last["details"]["usage"] == {"input": 80, "cached_input": 20, "output": 30}
    assert len(provider.reached) == 1


def test_cache_writes_of_both_lengths_are_priced(ai: anthropic.Anthropic, books: Books, provider: Provider) -> None:
    split = {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 6}
    provider.usage = {"cache_creation_input_tokens": 10, "cache_creation": split}
    ai.messages.create(**ASKED)
    assert books.spent() == (COST + Decimal("0.01"), 0)
    assert books.last()["details"]["usage"]["cache_write_1h"] == 6


def test_a_pool_by_both_formulas(make: Make, books: Books) -> None:
    """Claude 4.8 burns 15 quota tokens an output token; the hold of `provider` is passed, and that is reported."""
    make(pool=Pool(books.pool)).messages.create(**ASKED)
    bound = books.last()["details"]["input_bound"]
    assert books.last()["held"]["quota_tokens"] == bound + 1500
    assert books.spent(books.pool, "tpd") == (80 + 30 * 15, 0)
    own = make(pool=Pool(books.pool, formula="provider"), input_tokens=100)
    own.messages.create(**ASKED)
    assert books.last()["held"]["quota_tokens"] == 200
    assert books.spent(books.pool, "tpd") == (2 * (80 + 30 * 15), 0)


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"model": "claude-unknown"}, UnpricedModel, "claude-unknown"),
        ({"max_tokens": 0}, MissingCeiling, "max_tokens is 0"),
        ({"max_tokens": 5000}, Refused, "too_large"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, UnboundedInput, "web_search"),
    ],
)
def test_nothing_leaves_without_a_hold(
    ai: anthropic.Anthropic, books: Books, provider: Provider, changed: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        ai.messages.create(**{**ASKED, **changed})
    assert provider.reached == []
    assert books.spent() == (0, 0)


@pytest.mark.parametrize("status", [400, 429, 529])
def test_turned_away_settles_at_nothing(ai: anthropic.Anthropic, books: Books, provider: Provider, status: int) -> None:
    provider.behave = [str(status)]
    with pytest.raises(anthropic.APIStatusError):
        ai.messages.create(**ASKED)
    assert len(provider.reached) == 1
    assert (books.spent(), books.spent(limit="calls")) == ((0, 0), (1, 0))


def test_resets_and_missing_usage_settle_at_the_hold(ai: anthropic.Anthropic, books: Books, provider: Provider) -> None:
    provider.behave = ["reset"]
    with pytest.raises(anthropic.APIConnectionError):
        ai.messages.create(**ASKED)
    assert books.spent() == (books.held(), 0)


def test_malformed_usage_settles_at_the_hold(ai: anthropic.Anthropic, books: Books, provider: Provider) -> None:
    provider.usage = {"output_tokens": -1}
    ai.messages.create(**ASKED)
    assert books.spent() == (books.held(), 0)
    assert books.last()["details"]["flag"] == "usage_malformed"


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_settles_at_its_end(ai: anthropic.Anthropic, books: Books) -> None:
    kinds = [event.type for event in ai.messages.create(**ASKED, stream=True)]
    assert kinds[-1] == "message_stop"
    assert books.spent() == (COST, 0)


def test_the_packages_own_stream_helper(ai: anthropic.Anthropic, books: Books) -> None:
    with ai.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "Hello"
        assert stream.get_final_message().usage.output_tokens == 30
    assert books.spent() == (COST, 0)


def test_a_stream_that_the_caller_leaves_settles_by_the_guards_policy(make: Make, books: Books) -> None:
    with make(on_cut="hold").messages.create(**ASKED, stream=True) as stream:
        next(iter(stream))
    first = books.held()
    assert books.spent() == (first, 0)
    with make(on_cut="usage").messages.create(**ASKED, stream=True) as stream:
        next(iter(stream))
    so_far = Decimal("0.084")  # the input, and one token of output
    assert books.spent() == (first + so_far, 0)
    assert books.last()["outcome"] == "cancelled"


@pytest.mark.parametrize(("formula", "quota"), [("worst", 80 + 100 * 15), ("provider", 80 + 100)])
def test_a_stream_holds_less_as_soon_as_its_input_is_known(make: Make, books: Books, formula: Any, quota: int) -> None:
    with make(pool=Pool(books.pool, formula=formula)).messages.create(**ASKED, stream=True) as stream:
        events = iter(stream)
        next(events)
        # 80 plain and 20 cached tokens of input, and the ceiling of 100.
        assert books.spent() == (0, Decimal("0.282"))
        assert books.spent(books.pool, "tpd") == (0, quota)
        list(events)
    assert books.spent() == (COST, 0)
    assert books.spent(books.pool, "tpd") == (80 + 30 * 15, 0)


def test_a_stream_that_the_provider_cuts(ai: anthropic.Anthropic, books: Books, provider: Provider) -> None:
    provider.behave = ["cut"]
    with pytest.raises(Exception, match="reset|Connection|peer"):
        list(ai.messages.create(**ASKED, stream=True))
    assert books.spent() == (books.held(), 0)


# -- asyncio --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def async_ai(
    provider: Provider, async_client: AsyncClient, books: Books
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    plain = anthropic.AsyncAnthropic(api_key="secret", base_url=provider.url, timeout=20)
    async with plain, guarded(plain, AsyncGuard(async_client, books.user)) as ai:
        yield ai


async def test_asynchronous_calls_and_streams(
    async_ai: anthropic.AsyncAnthropic, books: Books, provider: Provider
) -> None:
    await async_ai.messages.create(**ASKED)
    async with async_ai.messages.stream(**ASKED) as stream:
        assert [text async for text in stream.text_stream] == ["Hello"]
    assert books.spent() == (2 * COST, 0)
    with pytest.raises(UnpricedModel):
        await async_ai.messages.create(**{**ASKED, "model": "claude-unknown"})
    assert len(provider.reached) == 2
