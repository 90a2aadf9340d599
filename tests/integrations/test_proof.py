"""The load test: twenty threads and twenty processes, a slow provider, one dollar. Never above it; a naive guard is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import openai
import pytest

from quota.client import Client
from quota.fleet import Fleet
from tests.integrations.conftest import COST, Books
from tests.integrations.provider import Provider
from tests.integrations.worker import ASKED, in_a_process, work
from tests.server import connect

WORKERS = 20


class Watch:
    """Reads spent and reserved of a subject as fast as it can, and keeps the highest sum."""

    def __init__(self, url: str, subject: str) -> None:
        self.highest = Decimal(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(url, subject), daemon=True)

    def _look(self, url: str, subject: str) -> None:
        with connect(url) as connection:
            while not self._over.is_set():
                (row,) = connection.execute(
                    "SELECT spent + reserved FROM quota.balance(%s) WHERE limit_name = 'cap'", (subject,)
                ).fetchall()
                self.highest = max(self.highest, row[0])

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_twenty_threads_never_pass_the_cap(client: Client, books: Books, provider: Provider, priced: str) -> None:
    provider.delay_s = 0.2
    with Watch(priced, books.user) as watch, ThreadPoolExecutor(WORKERS) as pool:
        made = sum(pool.map(lambda _: work(client, provider.url, books.user, 3), range(WORKERS)))
    assert watch.highest <= 1
    assert books.spent() == (made * COST, 0)
    assert len(provider.reached) == made, "refused calls never reach the network"
    assert 2 <= made <= 7


def test_a_naive_guard_passes_it_by_far(provider: Provider) -> None:
    """Everybody checks, everybody passes, everybody calls."""
    provider.delay_s = 0.2
    spent = Decimal(0)
    lock = threading.Lock()

    def call(_: int) -> None:
        nonlocal spent
        with openai.OpenAI(api_key="secret", base_url=f"{provider.url}/v1") as ai:
            if spent < 1:
                ai.chat.completions.create(**ASKED)
                with lock:
                    spent += COST

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(call, range(WORKERS)))
    assert spent > 1


@pytest.mark.timeout(300)
def test_twenty_processes_never_pass_the_cap(books: Books, provider: Provider, priced: str) -> None:
    provider.delay_s = 0.2
    fleet_of = Fleet(WORKERS, priced, preload=["tests.integrations.worker"])
    with Watch(priced, books.user) as watch, fleet_of as fleet:
        made = sum(fleet.run(in_a_process, [(provider.url, books.user, 3)] * WORKERS))
    assert watch.highest <= 1
    assert books.spent() == (made * COST, 0)
    assert len(provider.reached) == made
    assert made >= 2
