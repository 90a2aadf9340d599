"""The real `boto3` against a provider on this machine: what leaves, what is held, what is settled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from quota.client import Client
from quota.errors import InvalidArgument, MissingCeiling, Refused, UnboundedInput, UnpricedModel
from quota.integrations.bedrock import BedrockRuntime, guarded
from quota.integrations.guard import Guard, Pool
from tests.integrations.conftest import COST, Books
from tests.integrations.provider import Provider

MODEL = "us.anthropic.claude-opus-4-8-v1:0"
ASKED: Any = {
    "modelId": MODEL,
    "messages": [{"role": "user", "content": [{"text": "Say hello"}]}],
    "inferenceConfig": {"maxTokens": 100},
}

Make = Callable[..., BedrockRuntime]


def plain(url: str, **retries: Any) -> Any:
    return boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries=retries or {"total_max_attempts": 1}, read_timeout=20, connect_timeout=5),
    )


@pytest.fixture
def make(provider: Provider, client: Client, books: Books) -> Iterator[Make]:
    """Makes guarded clients; takes the guard's options."""
    made = []

    def one(url: str = provider.url, **options: Any) -> BedrockRuntime:
        made.append(plain(url))
        return guarded(made[-1], Guard(client, books.user, **options))

    yield one
    for client_ in made:
        client_.close()


@pytest.fixture
def bedrock(make: Make) -> BedrockRuntime:
    return make()


def test_converse_settles_money_and_quota(make: Make, books: Books, provider: Provider) -> None:
    answer = make(pool=Pool(books.pool)).converse(**ASKED)
    assert answer["output"]["message"]["content"][0]["text"] == "Hello there"
    assert books.spent() == (COST, 0)
    assert books.spent(books.pool, "tpd") == (80 + 30 * 15, 0)
    assert books.last()["details"]["model"] == MODEL
    assert len(provider.reached) == 1


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"modelId": "anthropic.claude-unknown"}, UnpricedModel, "claude-unknown"),
        ({"modelId": "global.anthropic.claude-opus-4-8"}, UnpricedModel, "global"),
        ({"inferenceConfig": {}}, MissingCeiling, "inferenceConfig.maxTokens"),
        ({"inferenceConfig": {"maxTokens": 5000}}, Refused, "too_large"),
    ],
)
def test_nothing_leaves_without_a_hold(
    bedrock: BedrockRuntime, books: Books, provider: Provider, changed: Any, error: type[Exception], told: str
) -> None:
    for call in (bedrock.converse, bedrock.converse_stream):
        with pytest.raises(error, match=told):
            call(**{**ASKED, **changed})
    assert provider.reached == []
    assert books.spent() == (0, 0)


def test_other_calls_do_not_leave(bedrock: BedrockRuntime, provider: Provider) -> None:
    with pytest.raises(UnboundedInput, match="start_async_invoke is not guarded"):
        bedrock.start_async_invoke(modelId=MODEL)
    assert bedrock.meta.region_name == "us-east-1"
    with pytest.raises(AttributeError):
        bedrock.no_such_call()


def test_a_throttle_settles_at_nothing(bedrock: BedrockRuntime, books: Books, provider: Provider) -> None:
    provider.behave = ["429"]
    with pytest.raises(ClientError):
        bedrock.converse(**ASKED)
    assert len(provider.reached) == 1
    assert (books.spent(), books.spent(limit="calls")) == ((0, 0), (1, 0))


@pytest.mark.parametrize("how", ["500", "reset", "no_usage"])
def test_what_nobody_knows_settles_at_the_hold(
    bedrock: BedrockRuntime, books: Books, provider: Provider, how: str
) -> None:
    provider.behave = [how]
    with contextlib.suppress(ClientError, BotoCoreError):
        bedrock.converse(**ASKED)
    assert books.spent() == (books.held(), 0)
    assert len(provider.reached) == 1


def test_a_call_that_never_left_is_released(make: Make, books: Books) -> None:
    with pytest.raises(Exception, match="Could not connect"):
        make(url="http://127.0.0.1:1").converse(**ASKED)
    with pytest.raises(Exception, match="Parameter validation failed"):
        make().converse(**ASKED, nonsense=1)
    assert books.spent() == (0, 0)
    assert books.last()["state"] == "released"


def test_a_stream_settles_at_its_end(bedrock: BedrockRuntime, books: Books) -> None:
    events = list(bedrock.converse_stream(**ASKED)["stream"])
    assert [next(iter(event)) for event in events][-1] == "metadata"
    assert books.spent() == (COST, 0)


def test_a_stream_that_is_left_or_cut_settles_at_the_hold(
    bedrock: BedrockRuntime, books: Books, provider: Provider
) -> None:
    stream = bedrock.converse_stream(**ASKED)["stream"]
    next(iter(stream))
    stream.close()
    first = books.held()
    assert books.spent() == (first, 0)
    provider.behave = ["cut"]
    with pytest.raises(Exception, match=r"."):
        list(bedrock.converse_stream(**ASKED)["stream"])
    assert books.spent() == (2 * first, 0)


def test_invoke_model_of_anthropic(bedrock: BedrockRuntime, books: Books) -> None:
    body = {
        "anthropic_version": "bedrock-2023-05-31",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 99,
    }
    answer = bedrock.invoke_model(modelId=MODEL, body=json.dumps(body))
    assert json.loads(answer["body"].read())["content"][0]["text"] == "Hello there"
    assert books.spent() == (COST, 0)


def test_invoke_model_of_others_by_bedrocks_headers(bedrock: BedrockRuntime, books: Books, provider: Provider) -> None:
    body = json.dumps({"prompt": "Hi", "max_gen_len": 50})
    bedrock.invoke_model(modelId=MODEL, body=body)
    assert books.spent() == (Decimal("0.16"), 0)
    provider.behave = ["no_usage"]
    bedrock.invoke_model(modelId=MODEL, body=body)
    assert books.spent() == (Decimal("0.16") + books.held(), 0)


def test_a_client_that_repeats_is_refused(client: Client, provider: Provider) -> None:
    for repeating in (plain(provider.url, max_attempts=3), plain(provider.url, mode="adaptive")):
        with pytest.raises(InvalidArgument, match="repeats calls by itself"):
            guarded(repeating, Guard(client, "user:7"))
        repeating.close()


@pytest.mark.parametrize("truncated", [False, True])
def test_answers_that_end_at_their_ceiling(
    bedrock: BedrockRuntime, books: Books, provider: Provider, truncated: bool
) -> None:
    provider.truncated = truncated
    body = {"anthropic_version": "bedrock-2023-05-31", "messages": [], "max_tokens": 99}
    for route, call in (
        ("converse", lambda: bedrock.converse(**ASKED)),
        ("converse_stream", lambda: list(bedrock.converse_stream(**ASKED)["stream"])),
        ("invoke_model", lambda: bedrock.invoke_model(modelId=MODEL, body=json.dumps(body))),
    ):
        call()
        details = books.last()["details"]
        assert (details["route"], details["truncated"]) == (route, truncated)
