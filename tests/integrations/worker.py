"""What the processes of the load test do; a module of its own, so that they need nothing else of the tests."""

from __future__ import annotations

from typing import Any

import openai

from quota.client import Client
from quota.errors import Refused
from quota.fleet import Worker
from quota.integrations.guard import Guard
from quota.integrations.openai import guarded

# At 2000 dollars a million: 0.12 of output at most. With the input's bound, a few fit into a dollar at once.
ASKED: Any = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 60}


def attempt(ai: openai.OpenAI) -> bool:
    """Makes a call; False when it was refused."""
    try:
        ai.chat.completions.create(**ASKED)
    except Refused:
        return False
    return True


def work(ledger: Client, url: str, subject: str, calls: int) -> int:
    """Makes calls with a client of its own; returns how many were made."""
    with (
        openai.OpenAI(api_key="secret", base_url=f"{url}/v1", timeout=60) as plain,
        guarded(plain, Guard(ledger, subject)) as ai,
    ):
        return sum(attempt(ai) for _ in range(calls))


def in_a_process(worker: Worker, url: str, subject: str, calls: int) -> int:
    """`work` as a task of a fleet: all begin together."""
    worker.together()
    return work(worker.client, url, subject, calls)
