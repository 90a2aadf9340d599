"""One worker of a fleet, a process of its own: `python -m tests.faults.worker URL GUARD SEED SECONDS`.

It spends from `user:fleet` until its time is over, and writes a line of JSON for every decision: what it was told that
each limit has spent and reserved. The guard is the ledger, or the naive one that it replaces: check, call, add.

What becomes of a hold goes by turns, not by chance: after a few grants a fleet has seen every end of one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from itertools import cycle
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.faults.processes import wait_for_the_start

SUBJECT = "user:fleet"
TTL_S = 4
CALL_S = 0.004
ENDS = ("forgotten", "released", *["settled"] * 16)  # a forgotten one expires
Ends = Iterator[str]


def with_ledger(connection: psycopg.Connection[dict[str, Any]], chance: random.Random, ends: Ends) -> dict[str, Any]:
    worst = Decimal(chance.randint(100, 500)) / 100
    began_s = time.monotonic()
    answer = connection.execute(
        "SELECT * FROM quota.reserve(%s, jsonb_build_object('usd', %s::numeric), make_interval(secs => %s))",
        (SUBJECT, worst, TTL_S),
    ).fetchone()
    assert answer is not None
    if not answer["granted"]:
        return {"granted": False}
    time.sleep(CALL_S)
    end = next(ends)
    if end == "released":
        connection.execute("SELECT quota.release(%s)", (answer["reservation"],))
    # A settle after the hold's time is accepted above the cap: the machine may be slow, this worker is not late.
    elif end == "settled" and time.monotonic() - began_s < TTL_S / 4:
        cost = worst * chance.randint(10, 100) / 100
        connection.execute(
            "SELECT quota.settle(%s, jsonb_build_object('usd', %s::numeric))", (answer["reservation"], cost)
        )
    return {"granted": True, "limits": answer["remaining"]}


def naively(connection: psycopg.Connection[dict[str, Any]], chance: random.Random, _ends: Ends) -> dict[str, Any]:
    worst = Decimal(chance.randint(100, 500)) / 100
    limits = connection.execute("SELECT * FROM quota.balance(%s)", (SUBJECT,)).fetchall()
    if any(row["spent"] + worst > row["capacity"] for row in limits):
        return {"granted": False}
    time.sleep(CALL_S)
    cost = worst * chance.randint(10, 100) / 100
    connection.execute("SELECT quota.record(%s, jsonb_build_object('usd', %s::numeric))", (SUBJECT, cost))
    limits = connection.execute("SELECT * FROM quota.balance(%s)", (SUBJECT,)).fetchall()
    shown = [{key: str(row[key]) for key in ("limit_name", "capacity", "spent", "reserved")} for row in limits]
    return {"granted": True, "limits": shown}


def main(url: str, guard: str, seed: str, seconds: str) -> None:
    chance = random.Random(int(seed))
    decide = {"ledger": with_ledger, "naive": naively}[guard]
    ends = cycle(ENDS)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        wait_for_the_start()
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            print(json.dumps(decide(connection, chance, ends)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
