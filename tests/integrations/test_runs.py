"""Runs in Python, and the guards below them: who pays, which ceiling holds, what stops."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import openai
import pytest

from quota.calls import Balance, Freeze
from quota.client import AsyncClient, Client
from quota.errors import InvalidArgument, MissingCeiling, Refused, RunRefused
from quota.integrations.guard import AsyncGuard, Guard, spending
from quota.integrations.openai import guarded
from quota.runs import run, run_async
from tests.integrations.conftest import COST, Books
from tests.integrations.provider import Provider

ASKED: Any = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 100}


def test_calls_below_a_run_charge_run_lead_and_user(client: Client, books: Books, provider: Provider) -> None:
    with ExitStack() as stack:
        plain = stack.enter_context(openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1"))
        ai = stack.enter_context(guarded(plain, Guard(client)))
        lead = stack.enter_context(run(client, books.user, budget={"usd": "0.9"}, max_tokens=200, max_width=1))
        with lead.run(budget={"usd": "0.5"}, max_tokens=150) as worker, spending(worker):
            ai.chat.completions.create(**ASKED)
            for subject in (worker.subject, lead.subject):
                assert books.spent(subject, "slice usd") == (COST, 0)
            assert books.spent() == (COST, 0)
            with pytest.raises(MissingCeiling, match="may ask for 150"):
                ai.chat.completions.create(**{**ASKED, "max_completion_tokens": 151})
            with pytest.raises(RunRefused, match="width"):
                lead.run(budget={"usd": "0.1"}).__enter__()
            client.call(Freeze(lead.subject, "runaway"))
            with pytest.raises(Refused, match="frozen"):
                ai.chat.completions.create(**ASKED)
    assert len(provider.reached) == 1


def test_a_run_in_another_place_keeps_to_the_ceilings_above_it(
    client: Client, books: Books, provider: Provider
) -> None:
    """Whoever knows no more than the lead's name starts a run below it, and is told the least ceiling of all above."""
    with (
        openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1") as plain,
        guarded(plain, Guard(client)) as ai,
        run(client, books.user, budget={"usd": "0.9"}, max_tokens=99) as lead,
        run(client, lead.subject, budget={"usd": "0.5"}, max_tokens=500) as worker,
        run(client, worker.subject, budget={"usd": "0.4"}) as helper,
        spending(helper),
    ):
        assert helper.max_tokens == 99
        with pytest.raises(MissingCeiling, match="may ask for 99"):
            ai.chat.completions.create(**ASKED)
        ai.chat.completions.create(**{**ASKED, "max_completion_tokens": 99})
    assert len(provider.reached) == 1


def test_a_run_by_its_name_alone_would_lose_its_ceiling(client: Client) -> None:
    with pytest.raises(InvalidArgument, match='"run:x" is a run by its name alone'):
        Guard(client, "run:x")
    with pytest.raises(InvalidArgument, match='"run:x" is a run by its name alone'), spending("run:x"):
        pass


def test_a_run_that_is_over_gives_back_what_it_did_not_spend(client: Client, books: Books) -> None:
    with run(client, books.user, budget={"usd": 1}) as first:
        with pytest.raises(
            RunRefused, match='by limit "cap" .* promised to live runs 1, requested 0.1; retry after 1 s'
        ):
            run(client, books.user, budget={"usd": "0.1"}).__enter__()
        assert client.reserve(first.subject, {"usd": "0.1"}).granted
    assert client.reserve(first.subject, {"usd": "0.1"}).reason == "frozen"
    with run(client, books.user, budget={"usd": "0.9"}):
        pass


def test_the_work_fails_and_the_run_ends(client: Client, books: Books) -> None:
    with pytest.raises(ZeroDivisionError), run(client, books.user, budget={"usd": 1}):
        _ = 1 / 0
    assert run(client, books.user, budget={"usd": 1}).__enter__().subject.startswith("run:")


def test_starts_are_staggered(client: Client, books: Books) -> None:
    """The second start waits; how long exactly is the machine's business."""
    with run(client, books.user, budget={"usd": 1}, stagger_s="0.2", ttl=timedelta(minutes=1)) as lead:
        before = time.monotonic()
        with lead.run(budget={"usd": "0.1"}), lead.run(budget={"usd": "0.1"}), lead.run(budget={"usd": "0.1"}):
            assert time.monotonic() - before > 0.3


async def test_asynchronous_runs(async_client: AsyncClient, books: Books, provider: Provider) -> None:
    plain = openai.AsyncOpenAI(api_key="secret", base_url=f"{provider.url}/v1")
    async with (
        plain,
        guarded(plain, AsyncGuard(async_client)) as ai,
        run_async(async_client, books.user, budget={"usd": "0.9"}) as lead,
        lead.run(budget={"usd": "0.5"}) as worker,
    ):
        with spending(worker):
            await ai.chat.completions.create(**ASKED)
    assert books.spent(worker.subject, "slice usd") == (COST, 0)
    rows = await async_client.call(Balance(lead.subject))
    assert {row.spent for row in rows if row.unit == "usd"} == {COST}
