"""`quota demo fleet`: twenty processes and one budget; the naive guard breaks it, the ledger holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import click

from quota import reaper
from quota.cli.failures import REFUSED
from quota.cli.help import examples
from quota.cli.params import AMOUNT
from quota.cli.screen import Screen, number
from quota.cli.store import Session, with_server
from quota.cli.work import Books, Job, Pulse, Tally, books_of, cap_of, fresh_budget, fresh_tenant, guess, spend, stall
from quota.fleet import Fleet, Task
from quota.trace import Prices, Request, sample_trace

__all__ = ["fleet"]

NAIVE, LEDGER, CRASH = "team:naive", "team:ledger", "team:crash"
PRICES = Prices(Decimal(15), Decimal(75))
CEILING_TOKENS = 8192
_CRASH_TTL_S = 2.0
_REAP_WITHIN_S = 20.0
_LINE_EVERY_S = 0.5
_BAR = 50


@dataclass(frozen=True)
class Part:
    """One way of guarding the budget, when it is over."""

    name: str
    cap: Decimal
    tally: Tally
    books: Books
    seconds: float

    @property
    def overspend(self) -> Decimal:
        """Dollars above the cap."""
        return max(self.books.spent - self.cap, Decimal(0))

    @property
    def peak(self) -> Decimal:
        """The highest spent + reserved that was ever seen: in any grant's own answer, or on the books."""
        return max(self.tally.peak, self.books.spent)

    @property
    def held(self) -> bool:
        """True when the cap was held at every grant, no hold is left and the books are right."""
        return self.peak <= self.cap and self.books.holds == 0 and not self.books.violations

    def document(self) -> dict[str, Any]:
        """The part for programs."""
        return {
            "calls_wanted": self.tally.calls,
            "calls_made": self.tally.granted,
            "refused": self.tally.refused.total(),
            "refused_by_reason": dict(self.tally.refused),
            "retries": self.tally.retries,
            "spent": self.books.spent,
            "cap": self.cap,
            "overspend": self.overspend,
            "peak_spent_plus_reserved": self.peak,
            "holds_left": self.books.holds,
            "check_violations": len(self.books.violations),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Crash:
    """What became of the hold of a worker that was killed."""

    pid: int
    held: Decimal
    reserved_after_kill: Decimal
    released: int
    reserved_after_reap: Decimal

    @property
    def recovered(self) -> bool:
        """True when the hold came back."""
        return self.released == 1 and self.reserved_after_reap == 0


@click.command(
    epilog=examples("quota demo fleet", "quota demo fleet --workers 8 --cap 20 --calls 48", "quota demo fleet --json")
)
@click.option("--workers", type=click.IntRange(2, 150), default=20, show_default=True, help="Processes.")
@click.option("--cap", type=AMOUNT, default="50", show_default=True, help="The budget in dollars.")
@click.option(
    "--calls", type=click.IntRange(1, 1000), default=120, show_default=True, help="How many calls they want to make."
)
@click.option(
    "--call-ms", type=click.IntRange(1, 10_000), default=400, show_default=True, help="How long a call lasts."
)
@with_server
def fleet(session: Session, workers: int, cap: Decimal, calls: int, call_ms: int) -> None:
    """See a budget break, and the ledger hold it.

    Twenty processes share $50. Each call's worst case and true cost come from a small made-up trace of agent requests.
    First the naive guard: look whether something is left, call, add the cost. Then the ledger: hold the worst case,
    call, settle the true cost. At last a worker is killed in the middle of a call, and the reaper brings its hold back.

    Exit code 0 when the ledger held the cap, no hold is left and the books are right; else 1.
    """
    screen, requests = session.screen, sample_trace()[:calls]
    tenant = fresh_tenant(session.client, "demo")
    prepare = session.target.settings.prepare_threshold
    screen.line(f"{workers} processes, ${number(cap)}, {calls} calls they want to make. Starting them ...")
    with Fleet(workers, session.url, tenant=tenant, prepare_threshold=prepare, preload=[__name__]) as processes:
        stage = _Stage(session, processes, tenant, requests, cap, call_ms / 1000)
        screen.line("\n1. The naive guard: look whether something is left, call, add the cost.")
        rounds = -(-len(requests) // workers)
        naive = stage.part("naive guard", NAIVE, guess, rounds)
        screen.line(f"   ${number(naive.books.spent)} spent of ${number(cap)}: over by ${number(naive.overspend)}.")
        screen.line("\n2. The ledger: hold the worst case, call, settle the true cost.")
        ledger = stage.part("ledger", LEDGER, spend)
        screen.line(f"   ${number(ledger.books.spent)} spent of ${number(cap)}: over by ${number(ledger.overspend)}.\n")
    _closing_table(screen, naive, ledger)
    screen.line("\n3. A worker is killed in the middle of a call.")
    crash = _crash(session, tenant, PRICES.worst(requests[0], CEILING_TOKENS))
    books = books_of(session.client, tenant, CRASH)
    fine = ledger.held and crash.recovered and books.holds == 0 and not books.violations
    screen.document(
        {"naive": naive.document(), "ledger": ledger.document(), "crash": crash.__dict__, "ok": fine, "tenant": tenant}
    )
    screen.line("\nThe ledger held the cap." if fine else "\nTHE LEDGER DID NOT HOLD.")
    screen.line(f"Look at its books: quota ledger --tenant {tenant}")
    if not fine:
        click.get_current_context().exit(REFUSED)


class _Stage:
    """Where both guards play: the same fleet, the same requests, a budget each."""

    def __init__(
        self, session: Session, fleet: Fleet, tenant: str, requests: list[Request], cap: Decimal, call_s: float
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._tenant = tenant
        self._requests = requests
        self._cap = cap
        self._call_s = call_s

    def part(self, name: str, subject: str, task: Task, *more: Any) -> Part:
        """Plays one part to its end."""
        client, size = self._session.client, self._fleet.size
        fresh_budget(client, self._tenant, subject, self._cap)
        job = Job(subject, self._cap, PRICES, CEILING_TOKENS, self._call_s, retry_s=self._call_s / 2, pulse_s=0.0)
        with _view(self._session.screen, self._cap) as view:
            pulses: dict[int, Pulse] = {}

            def on_news(number_: int, news: Any) -> None:
                if isinstance(news, Pulse):
                    pulses[number_] = news
                    view(news, list(pulses.values()))

            started = time.perf_counter()
            tallies = self._fleet.run(task, [(job, self._requests[n::size], *more) for n in range(size)], on_news)
            seconds = time.perf_counter() - started
        return Part(name, self._cap, Tally.of(tallies), books_of(client, self._tenant, subject), seconds)


def _crash(session: Session, tenant: str, cost: Decimal) -> Crash:
    client, screen = session.client, session.screen
    fresh_budget(client, tenant, CRASH, cost * 10)
    with Fleet(1, session.url, tenant=tenant, preload=[__name__]) as process:
        process.start(stall, [(CRASH, cost, _CRASH_TTL_S)])
        next(process.news())
        held = cap_of(client, tenant, CRASH).reserved or Decimal(0)
        pid = process.kill(0)
    after_kill = cap_of(client, tenant, CRASH).reserved or Decimal(0)
    screen.line(f"   process {pid} held ${number(held)} and was killed with SIGKILL; reserved: ${number(after_kill)}")
    screen.line(f"   its hold lives for {_CRASH_TTL_S:g} s; the reaper looks every quarter of a second ...")
    released, deadline = 0, time.monotonic() + _REAP_WITHIN_S
    while released == 0 and time.monotonic() < deadline:
        time.sleep(0.25)
        released += reaper.sweep(client, tenant=tenant).released
    after_reap = cap_of(client, tenant, CRASH).reserved or Decimal(0)
    screen.line(f"   the reaper released {released} hold; reserved: ${number(after_reap)}")
    return Crash(pid, held, after_kill, released, after_reap)


# -- what is seen ---------------------------------------------------------------------------------------------------


@contextmanager
def _view(screen: Screen, cap: Decimal) -> Iterator[Callable[[Pulse, list[Pulse]], None]]:
    """Yields what shows the budget as the workers see it: a moving bar on a terminal, a line now and then otherwise."""
    if screen.lively:
        from rich.live import Live

        with Live(refresh_per_second=12) as live:
            yield lambda last, pulses: live.update(_bar(cap, last, pulses))
        return
    told = time.monotonic()

    def line(last: Pulse, pulses: list[Pulse]) -> None:
        nonlocal told
        if time.monotonic() - told >= _LINE_EVERY_S:
            told = time.monotonic()
            screen.line(f"   {_figures(cap, last, pulses)}")

    yield line


def _figures(cap: Decimal, last: Pulse, pulses: list[Pulse]) -> str:
    made, refused = sum(pulse.granted for pulse in pulses), sum(pulse.refused for pulse in pulses)
    return f"spent ${last.spent:.2f} + reserved ${last.reserved:.2f} of ${cap:.2f}   calls {made}   refused {refused}"


def _bar(cap: Decimal, last: Pulse, pulses: list[Pulse]) -> Any:
    from rich.text import Text

    def cells(dollars: Decimal) -> int:
        return int(min(dollars / cap, Decimal(2)) * _BAR) if cap else 0

    spent, reserved = cells(last.spent), cells(last.spent + last.reserved) - cells(last.spent)
    text = Text("   ")
    text.append("█" * min(spent, _BAR), "green")
    text.append("▒" * reserved, "yellow")
    text.append("·" * max(0, _BAR - spent - reserved), "dim")
    text.append("┃", "bold")
    text.append("█" * max(0, spent - _BAR), "red")
    text.append(f"\n   {_figures(cap, last, pulses)}")
    return text


def _closing_table(screen: Screen, *parts: Part) -> None:
    rows: dict[str, Callable[[Part], str]] = {
        "calls wanted": lambda part: str(part.tally.calls),
        "calls made": lambda part: str(part.tally.granted),
        "refused": lambda part: str(part.tally.refused.total()),
        "spent": lambda part: f"${number(part.books.spent)}",
        "over the cap by": lambda part: f"${number(part.overspend)}",
        "highest spent + reserved": lambda part: f"${number(part.peak)}",
        "holds left": lambda part: str(part.books.holds),
        "check()": lambda part: f"{len(part.books.violations)} violations" if part.books.violations else "right",
    }
    columns = {f"budget ${number(parts[0].cap)}": list(rows)}
    screen.table(columns | {part.name: [cell(part) for cell in rows.values()] for part in parts})
