"""Changes under load: what is answered with 200 is in force for everything that is decided afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal

from tests.admin.conftest import Api
from tests.server import connect

WORKERS = 6


@contextmanager
def fleet(api: Api, statement: str) -> Iterator[list[tuple[float, float, bool]]]:
    """Workers that reserve through SQL; yields when each call began and ended, and whether it was granted."""
    seen: list[tuple[float, float, bool]] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def work() -> None:
        try:
            with connect(api.server.database.partition("&options")[0].partition("?options")[0]) as connection:
                while not stop.is_set():
                    began = time.monotonic()
                    row = connection.execute(statement.encode(), {"t": api.tenant}).fetchone()
                    assert row is not None
                    seen.append((began, time.monotonic(), bool(row[0])))
        except Exception as error:  # shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert errors == []


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def balance(api: Api, subject: str, limit: str) -> dict[str, str]:
    rows = api.get(f"/subjects/{subject}/balance")["items"]
    found: dict[str, str] = next(row for row in rows if row["limit_name"] == limit)
    return found


def test_a_cap_lowered_under_load(api: Api) -> None:
    api.do("POST", "/subjects", {"name": "org:load"})
    api.do("PUT", "/limits/org:load/cap", {"unit": "usd", "capacity": "1000000"})
    statement = "SELECT granted FROM quota.reserve('org:load', '{\"usd\": 1}', tenant => %(t)s)"
    with fleet(api, statement) as seen:
        wait_for(lambda: len(seen) > 200)
        api.do("PUT", "/limits/org:load/cap", {"unit": "usd", "capacity": "10"})
        answered = time.monotonic()
        before = len(seen)
        wait_for(lambda: len(seen) > before + 200)
    late = [granted for began, _, granted in seen if began > answered]
    assert late
    assert not any(late)
    held = Decimal(balance(api, "org:load", "cap")["reserved"])
    assert held == sum(granted for _, _, granted in seen)


def test_a_tier_changed_while_a_fleet_reserves(api: Api) -> None:
    for name, capacity in (("small", "500"), ("large", "1000000")):
        api.do("POST", "/tiers", {
            "name": name, "limits": [{"name": "hourly", "unit": "cost", "capacity": capacity, "period": "1 hour"}],
        })  # fmt: skip
    # Its bucket is the built-in one: wide enough not to matter here.
    api.do("POST", "/keys", {"name": "load", "id": "load", "rate_tier": "large"})
    statement = "SELECT granted FROM quota.reserve('key:load', '{\"cost\": 5}', tenant => %(t)s)"
    with fleet(api, statement) as seen:
        wait_for(lambda: len(seen) > 200)
        api.do("PATCH", "/keys/load", {"rate_tier": "small"})
        answered = time.monotonic()
        before = len(seen)
        wait_for(lambda: len(seen) > before + 100)
        used = Decimal(balance(api, "key:load", "hourly")["reserved"])
        api.do("PATCH", "/keys/load", {"rate_tier": "large"})
        again = time.monotonic()
        before = len(seen)
        wait_for(lambda: len(seen) > before + 100)
    between = [granted for began, ended, granted in seen if began > answered and ended < again]
    assert between
    assert not any(between[: len(between) // 2])
    # Usage is kept through both changes.
    assert used >= 5 * 200
    assert Decimal(balance(api, "key:load", "hourly")["reserved"]) == 5 * sum(granted for _, _, granted in seen)
    assert any(granted for began, _, granted in seen if began > again)
