"""`quota demo gateway`: a query API behind the proxy, keys of three tiers, and what the ledger says afterwards."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from quota import credentials
from quota.calls import Balance, BalanceRow, Check, CreateKey, CreateSubject, SetTierLimit, views
from quota.cli.failures import REFUSED
from quota.cli.help import examples
from quota.cli.screen import Screen, number
from quota.cli.store import Session, with_server
from quota.cli.work import fresh_tenant
from quota.config import ConfigError
from quota.costs.rows import row_cost

__all__ = ["gateway"]

# The built-in tiers at a thousandth, so that a demonstration reaches their end.
TIERS = {"basic": (1_000, 3, 2_000), "extended": (5_000, 15, 10_000), "bulk": (20_000, 60, 40_000)}
_CALLERS_PER_KEY = 4
_STOP_S = 40
_PATIENCE_S = 30

CONFIG = """\
upstream = "{upstream}"
{oauth}
[[routes]]
path = "/v1/tables"
estimate = {{ fixed = 1 }}

[[routes]]
path = "/v1/rows/<table>"
estimate = {{ page_limit = 300 }}
minimum_charge = 1

[[routes]]
path = "/v1/current"
estimate = {{ through_nodes = {{ id_count = "ids" }}, calls = 1 }}

[[routes]]
path = "/v1/series"
estimate = {{ through_nodes = {{ page_limit = 300 }}, calls = 3 }}
max_targets = 20
max_period = "31d"

[[routes]]
path = "/v1/broken"
estimate = {{ fixed = 100 }}
"""

# What each caller asks, over and over: path, and the calls to data nodes that it takes.
MIX = (
    ("/v1/rows/orders?limit=100", 0),
    ("/v1/tables", 0),
    ("/v1/series?ids=plant.a,plant.b,site.c&limit=50", 2),
    ("/v1/rows/events", 0),
    ("/v1/current?ids=plant.a,plant.b,plant.c", 1),
    ("/v1/broken", 0),
    ("/v1/rows/users?limit=nonsense", 0),
)


@dataclass
class Tally:
    """What one key's callers saw.

    Fields:
        answers: how many of each status.
        refusals: how many for each reason.
        rows: rows received.
        cost: what the ledger should have booked for them, computed from the answers themselves.
        retry_after_s: the last that was told.
    """

    answers: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    cost: int = 0
    retry_after_s: int | None = None

    def add(self, other: Tally) -> None:
        """Takes another caller's in."""
        self.answers += other.answers
        self.refusals += other.refusals
        self.rows += other.rows
        self.cost += other.cost
        self.retry_after_s = other.retry_after_s or self.retry_after_s


@dataclass(frozen=True)
class Outcome:
    """One key, when it is over."""

    tier: str
    subject: str
    tally: Tally
    bucket: BalanceRow
    hourly: BalanceRow

    @property
    def true(self) -> bool:
        """The ledger has booked exactly what the answers cost, and nothing is held."""
        return self.hourly.spent == self.tally.cost and not self.hourly.reserved

    def document(self) -> dict[str, Any]:
        """The key for programs."""
        return {
            "tier": self.tier,
            "subject": self.subject,
            "requests": self.tally.answers.total(),
            "answers": {str(status): count for status, count in sorted(self.tally.answers.items())},
            "rows": self.tally.rows,
            "refused": self.tally.refusals.total(),
            "refused_by_reason": dict(self.tally.refusals),
            "retry_after_s": self.tally.retry_after_s,
            "cost_of_answers": self.tally.cost,
            "booked": self.hourly.spent,
            "bucket_level": self.bucket.level,
            "bucket_capacity": self.bucket.capacity,
            "hourly_left": self.hourly.available,
            "hourly_capacity": self.hourly.capacity,
        }


@click.command(epilog=examples("quota demo gateway", "quota demo gateway --requests 140", "quota demo gateway --json"))
@click.option(
    "--requests", type=click.IntRange(7, 10_000), default=84, show_default=True, help="How many each key makes."
)
@with_server
def gateway(session: Session, requests: int) -> None:
    """Put the gateway in front of a query API, and let three keys of three tiers use it.

    Every answer is priced by the rows in it and the data nodes behind it; the small key reaches the end of its bucket
    and of its hour, the large one does not. At last the ledger is asked whether it has booked what the answers cost.

    Exit code 0 when it has, to the unit, no hold is left and the books are right; else 1.
    """
    if find_spec("aiohttp") is None:
        raise ConfigError("this needs the package aiohttp: pip install 'quota-ledger[gateway]'")
    screen, tenant = session.screen, fresh_tenant(session.client, "demo")
    keys = _keys(session, tenant)
    screen.line("A query API and the gateway in front of it. Starting them ...")
    with _service(session, tenant) as port:
        each = requests // _CALLERS_PER_KEY + (requests % _CALLERS_PER_KEY > 0)
        screen.line(f"{len(keys)} keys, {_CALLERS_PER_KEY} callers each, {each * _CALLERS_PER_KEY} requests a key.\n")
        tallies = _traffic(port, keys, each)
    outcomes = [_outcome(session, tenant, tier, subject, tallies[subject]) for tier, (subject, _) in keys.items()]
    holds = session.call(views.holds(tenant, None, overdue=False, most=1_000_000))
    violations = session.call(Check(tenant))
    fine = all(outcome.true for outcome in outcomes) and not holds and not violations
    _show(screen, outcomes)
    screen.document({
        "keys": [outcome.document() for outcome in outcomes], "holds_left": len(holds),
        "check_violations": len(violations), "ok": fine, "tenant": tenant,
    })  # fmt: skip
    screen.line(f"\nHolds left: {len(holds)}. Violations that quota check finds: {len(violations)}.")
    screen.line("What is booked is what the answers cost." if fine else "THE LEDGER AND THE ANSWERS DISAGREE.")
    screen.line(f"Look at its books: quota ledger --tenant {tenant}")
    if not fine:
        click.get_current_context().exit(REFUSED)


def _keys(session: Session, tenant: str) -> dict[str, tuple[str, str]]:
    """Makes the tiers and a key of each; returns subject and secret by tier."""
    session.call(CreateSubject("org:demo", tenant=tenant))
    keys = {}
    for tier, (capacity, refill_per_s, hourly) in TIERS.items():
        session.call(SetTierLimit(tier, "bucket", "cost", "bucket", capacity, refill_per_s, tenant=tenant))
        session.call(SetTierLimit(tier, "hourly", "cost", "budget", hourly, period="1 hour", tenant=tenant))
        made = credentials.Credential.new(credentials.KEY)
        session.call(CreateKey(made.id, f"demo {tier}", made.hash, "org:demo", tier, tenant=tenant))
        keys[tier] = (f"key:{made.id}", made.secret)
    return keys


# -- processes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _service(session: Session, tenant: str) -> Iterator[int]:
    """Runs the query API and the gateway; yields the gateway's port. Both listen before they start."""
    with (
        tempfile.TemporaryDirectory(prefix="quota-demo-") as folder,
        _listening() as behind,
        _listening() as front,
        contextlib.ExitStack() as running,
    ):
        config = Path(folder) / "gateway.toml"
        config.write_text(CONFIG.format(upstream=f"http://127.0.0.1:{behind.getsockname()[1]}", oauth=""))
        environment = {
            **os.environ, "QUOTA_DATABASE_URL": session.url, "QUOTA_TENANT": tenant,
            "QUOTA_GATEWAY_CONFIG": str(config), "QUOTA_PARENT": str(os.getpid()),
        }  # fmt: skip
        sample = ["-k", "gthread", "--threads", "4", "--log-level", "error", "quota.gateway.sample:create_app()"]
        running.enter_context(_process(sample, behind, environment))
        proxy = ["--config", "python:quota.gateway.serving", "--log-level", "warning"]
        running.enter_context(_process(proxy, front, environment))
        yield front.getsockname()[1]


def _listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=128)


@contextlib.contextmanager
def _process(arguments: Sequence[str], listener: socket.socket, environment: Mapping[str, str]) -> Iterator[None]:
    number_ = listener.fileno()
    command = [sys.executable, "-m", "gunicorn", "--bind", f"fd://{number_}", *arguments]
    log = None if os.environ.get("QUOTA_DEBUG") else subprocess.DEVNULL
    with subprocess.Popen(
        command, env=dict(environment), pass_fds=[number_], stdout=subprocess.DEVNULL, stderr=log
    ) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


# -- traffic --------------------------------------------------------------------------------------------------------


def _traffic(port: int, keys: Mapping[str, tuple[str, str]], each: int) -> dict[str, Tally]:
    """Lets all callers of all keys ask at the same time."""
    callers = [(subject, secret, first) for subject, secret in keys.values() for first in range(_CALLERS_PER_KEY)]
    tallies = {subject: Tally() for subject, _ in keys.values()}
    with ThreadPoolExecutor(len(callers)) as pool:
        for (subject, *_), tally in zip(
            callers, pool.map(lambda caller: _ask(port, caller[1], caller[2], each), callers), strict=True
        ):
            tallies[subject].add(tally)
    return tallies


def _ask(port: int, secret: str, first: int, each: int) -> Tally:
    """One caller: `each` requests on one connection, each as soon as the one before is answered."""
    tally = Tally()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        for turn in range(each):
            path, node_calls = MIX[(first + turn) % len(MIX)]
            connection.request("GET", path, headers={"Authorization": f"Bearer {secret}"})
            answer = connection.getresponse()
            _count(tally, answer.status, answer.read(), answer.headers.get("Retry-After"), node_calls, path)
    finally:
        connection.close()
    return tally


def _count(tally: Tally, status: int, body: bytes, retry_after: str | None, node_calls: int, path: str) -> None:
    tally.answers[status] += 1
    if status == 200:
        rows = len(json.loads(body)["rows"])
        tally.rows += rows
        # An empty table costs what the route says at least.
        tally.cost += max(row_cost(rows, node_calls), 1 if path.startswith("/v1/rows/") else 0)
    elif status >= 500:
        tally.cost += 1
    else:
        tally.refusals[str(json.loads(body).get("reason", status))] += 1
        if retry_after is not None:
            tally.retry_after_s = int(retry_after)


# -- what is shown --------------------------------------------------------------------------------------------------


def _outcome(session: Session, tenant: str, tier: str, subject: str, tally: Tally) -> Outcome:
    rows = {row.limit_name: row for row in session.call(Balance(subject, tenant))}
    return Outcome(tier, subject, tally, rows["bucket"], rows["hourly"])


def _show(screen: Screen, outcomes: Sequence[Outcome]) -> None:
    def left(of: Decimal | None, capacity: Decimal | None) -> str:
        return f"{int(of or 0):,} of {int(capacity or 0):,}"

    screen.table({
        "key": [outcome.tier for outcome in outcomes],
        "requests": [str(outcome.tally.answers.total()) for outcome in outcomes],
        "answered": [str(outcome.tally.answers[200]) for outcome in outcomes],
        "failed": [str(outcome.tally.answers[500]) for outcome in outcomes],
        "refused": [str(outcome.tally.refusals.total()) for outcome in outcomes],
        "why": [", ".join(f"{why} {count}" for why, count in o.tally.refusals.items()) or "-" for o in outcomes],
        "rows": [f"{outcome.tally.rows:,}" for outcome in outcomes],
        "their cost": [f"{outcome.tally.cost:,}" for outcome in outcomes],
        "booked": [number(outcome.hourly.spent) for outcome in outcomes],
        "bucket": [left(outcome.bucket.level, outcome.bucket.capacity) for outcome in outcomes],
        "hour": [left(outcome.hourly.available, outcome.hourly.capacity) for outcome in outcomes],
    })  # fmt: skip
