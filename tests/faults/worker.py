"""One worker of a fleet, a process of its own: `python -m tests.faults.worker URL GUARD SEED SECONDS`.

It spends from `user:fleet` until its time is over, and writes a line of JSON for every decision: what it was told that
each limit has spent and reserved. The guard is the ledger, or the naive one that it replaces: check, call, add.
"""

from __future__ import annotations

import json
import random
import sys
import time
from decimal import Decimal
from typing import Any

import psycopg
from psycopg.rows import dict_row

SUBJECT = "user:fleet"
TTL = "1 second"
CALL_S = 0.004


def with_ledger(connection: psycopg.Connection[dict[str, Any]], chance: random.Random) -> dict[str, Any]:
    worst = Decimal(chance.randint(100, 500)) / 100
    answer = connection.execute(
        "SELECT * FROM quota.reserve(%s, jsonb_build_object('usd', %s::numeric), %s)", (SUBJECT, worst, TTL)
    ).fetchone()
    assert answer is not None
    if not answer["granted"]:
        return {"granted": False}
    time.sleep(CALL_S)
    if chance.random() < 0.1:
        connection.execute("SELECT quota.release(%s)", (answer["reservation"],))
    elif chance.random() < 0.95:  # the others are forgotten, and expire
        cost = worst * chance.randint(10, 100) / 100
        connection.execute(
            "SELECT quota.settle(%s, jsonb_build_object('usd', %s::numeric))", (answer["reservation"], cost)
        )
    return {"granted": True, "limits": answer["remaining"]}


def naively(connection: psycopg.Connection[dict[str, Any]], chance: random.Random) -> dict[str, Any]:
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
    until = time.monotonic() + float(seconds)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        while time.monotonic() < until:
            print(json.dumps(decide(connection, chance)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
