"""Authenticator: what is remembered, for how long, and what is not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quota import Client, credentials
from quota.authentication import Authenticator, Remembered
from quota.calls import CreateKey, Freeze, RevokeKey, RotateKey, SetRateTier
from quota.config import ConfigError


@pytest.fixture
def client(database: str) -> Iterator[Client]:
    with Client(database, timeout_s=20) as one:
        yield one


def make(client: Client, identity: str) -> str:
    made = credentials.Credential.new(credentials.KEY, identity)
    client.call(CreateKey(identity, identity, made.hash))
    return made.secret


def test_who_it_is(client: Client) -> None:
    secret = make(client, "a")
    who = Authenticator(client).authenticate(secret)
    assert who is not None
    assert (who.subject, who.tenant, who.rate_tier, who.active, who.frozen) == ("key:a", "default", "basic", True, None)
    for wrong in ("", "x", secret[:-1], secret[:-2] + "~~", secret.replace("_a_", "_b_"), "qk_none_" + "A" * 43):
        assert Authenticator(client).authenticate(wrong) is None


def test_the_bound(client: Client) -> None:
    secret = make(client, "a")
    remembering, asking = Authenticator(client, cache_s=1), Authenticator(client, cache_s=0)
    began = time.monotonic()
    assert remembering.authenticate(secret)
    client.call(SetRateTier("key:a", "bulk"))
    client.call(RevokeKey("a", "test"))
    now = asking.authenticate(secret)
    assert now is not None
    assert (now.state, now.rate_tier, now.active, now.frozen) == ("revoked", "bulk", False, "test")
    while time.monotonic() < began + 1.1:
        time.sleep(0.05)
    late = remembering.authenticate(secret)
    assert late is not None
    assert late.state == "revoked"


def test_money_never_reads_the_memory(client: Client) -> None:
    secret = make(client, "a")
    authenticator = Authenticator(client, cache_s=60)
    assert authenticator.authenticate(secret)
    client.call(RevokeKey("a", "test"))
    still = authenticator.authenticate(secret)
    assert still is not None
    assert still.active  # within the bound
    assert client.reserve("key:a", {"cost": 1}).reason == "frozen"


def test_a_new_key_works_although_it_was_asked_for_before(client: Client) -> None:
    authenticator = Authenticator(client, cache_s=60)
    made = credentials.Credential.new(credentials.KEY, "late")
    assert authenticator.authenticate(made.secret) is None
    client.call(CreateKey("late", "late", made.hash))
    assert authenticator.authenticate(made.secret) is not None


def test_rotations_and_freezes_show(client: Client) -> None:
    secret = make(client, "a")
    made = credentials.Credential.new(credentials.KEY, "a")
    client.call(RotateKey("a", made.hash))
    client.call(Freeze("key:a", "runaway"))
    asking = Authenticator(client, cache_s=0)
    assert asking.authenticate(secret) is None
    who = asking.authenticate(made.secret)
    assert who is not None
    assert (who.active, who.frozen) == (True, "runaway")


def test_the_memory_is_bounded() -> None:
    memory: Remembered[int] = Remembered(60, most=3)
    asked: list[int] = []

    def ask(value: int) -> int | None:
        def answer() -> int:
            asked.append(value)
            return value

        return memory.get(value, answer)

    for value in (1, 2, 3, 1, 4, 1, 2):
        assert ask(value) == value
    assert asked == [1, 2, 3, 4, 2]  # 2 was the one used least when 4 came
    for wrong in (-1, 3601):
        with pytest.raises(ConfigError):
            Remembered(wrong)
