"""`quota demo agents`: a lead spawns agents, a process each, and one of them runs away; every cap above them holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Any

import click

from quota.calls import BalanceRow, Freeze, Violation, views
from quota.cli.demos.provider import Provider
from quota.cli.demos.tree import News, Node, View, watching
from quota.cli.failures import REFUSED
from quota.cli.help import examples
from quota.cli.params import AMOUNT
from quota.cli.screen import Screen, number
from quota.cli.store import Session, with_server
from quota.cli.work import fresh_budget, fresh_pool, fresh_tenant
from quota.client import Client
from quota.config import ConfigError
from quota.costs.catalogs import read_catalog
from quota.costs.prices import PriceBook
from quota.costs.tokens import QuotaTokens
from quota.errors import Refused, RunRefused
from quota.fleet import Fleet, Worker
from quota.runs import Run, run

__all__ = ["agents"]

USER, POOL, LEAD = "user:demo", "pool:demo/here/demo-1/runtime", "run:lead"
MODEL = "demo-1"
CEILING_TOKENS, AGENT_TOKENS = 200, 150
BURNDOWN = QuotaTokens(5)
BOOK = PriceBook(
    read_catalog('[{"provider": "openai", "model": "demo-1", "rates": {"input": "15", "output": "75"}}]').entries
)
# A call waits for its turn at the pool as long as it takes; no agent waits for money.
_WAIT_S = 600
_CALL_S = 60
_LEAST, _MOST = Decimal("0.05"), Decimal(5)


@dataclass(frozen=True, slots=True)
class Job:
    """What one agent is to do.

    Fields:
        name: its run.
        provider: where the model is.
        slice: what it may spend, in dollars.
        calls: how many calls it plans to make; None: it runs away, and calls until it is stopped.
        helper: the run that it spawns below itself for its last call; None: it has no helper.
    """

    name: str
    provider: str
    slice: Decimal
    calls: int | None
    helper: str | None


@dataclass(frozen=True)
class Proof:
    """What the ledger and the provider say when all is over, each by its own books."""

    user: BalanceRow
    lead: BalanceRow
    quota_tokens: Decimal
    holds: int
    violations: list[Violation]
    billed: Decimal
    burnt: Decimal
    calls: int
    stopped: str | None

    @property
    def fine(self) -> bool:
        """True when no cap was passed, both books agree, no hold is left and the ledger's books are right."""
        spent = {self.user.spent, self.lead.spent, self.billed}
        within = self.billed <= (self.lead.capacity or 0) and self.quota_tokens == self.burnt
        return within and len(spent) == 1 and self.holds == 0 and not self.violations and self.stopped == "frozen"

    def document(self) -> dict[str, Any]:
        """The proof for programs."""
        return {
            "user_cap": self.user.capacity,
            "lead_slice": self.lead.capacity,
            "spent": self.user.spent,
            "billed_by_provider": self.billed,
            "quota_tokens": self.quota_tokens,
            "burnt_at_provider": self.burnt,
            "provider_calls": self.calls,
            "holds_left": self.holds,
            "check_violations": len(self.violations),
            "stopped_by_kill_switch": self.stopped,
            "ok": self.fine,
        }


@click.command(
    epilog=examples(
        "quota demo agents", "quota demo agents --agents 8 --budget 2 --tpm 30000", "quota demo agents --json"
    )
)
@click.option(
    "--agents", "size", type=click.IntRange(2, 30), default=5, show_default=True, help="Agents below the lead."
)
@click.option("--budget", type=AMOUNT, default="0.60", show_default=True, help="The lead's slice in dollars.")
@click.option("--calls", type=click.IntRange(1, 100), default=4, show_default=True, help="Calls that an agent plans.")
@click.option(
    "--tpm", type=click.IntRange(2_000), default=15_000, show_default=True, help="The pool's tokens a minute."
)
@click.option(
    "--call-ms", type=click.IntRange(1, 10_000), default=150, show_default=True, help="How long a call lasts."
)
@with_server
def agents(session: Session, size: int, budget: Decimal, calls: int, tpm: int, call_ms: int) -> None:
    """Put a hard cap on a tree of agents, and see it hold.

    A lead with a slice of its user's budget spawns agents, each a process with a slice of the lead's. They call a model
    on this machine, through the openai package with a guard under it, and draw on one pool of tokens per minute: when
    that is short they wait in turn. One agent runs away, and ends at its slice. A helper that wants a helper of its own
    is refused by the tree's depth. At last the lead is frozen, and nothing below it leaves any more.

    Exit code 0 when no cap was passed and the ledger's books agree with the provider's; else 1.
    """
    _require_openai()
    if not _LEAST <= budget <= _MOST:
        raise click.BadParameter(f"{budget} is not {_LEAST} to {_MOST}: the runaway spends it call by call")
    screen, url, prepare = session.screen, session.url, session.target.settings.prepare_threshold
    tenant = fresh_tenant(session.client, "demo")
    fresh_budget(session.client, tenant, USER, budget * 2)
    fresh_pool(session.client, tenant, POOL, tpm)
    screen.line(f"${number(budget * 2)} for {USER}, {tpm} tokens a minute for all. Starting {size} agents ...\n")
    preload = [__name__, "quota.integrations.openai"]
    with (
        Client(url, tenant=tenant, prepare_threshold=prepare, timeout_s=_CALL_S) as ledger,
        Provider(call_ms / 1000) as provider,
        Fleet(size, url, tenant=tenant, prepare_threshold=prepare, preload=preload) as processes,
        watching(ledger, USER, POOL, screen) as view,
    ):
        jobs = _jobs(size, budget, calls, provider.url)
        stopped = _lead(ledger, processes, jobs, budget, view)
        proof = _proof(ledger, provider, stopped)
    _closing_tables(screen, list(view.nodes.values()), proof)
    runs = [node.document() for node in view.nodes.values()]
    screen.document({"tenant": tenant, "runs": runs, **proof.document()})
    screen.line("\nEvery cap held." if proof.fine else "\nA CAP DID NOT HOLD.")
    screen.line(f"Look at the books: quota ledger --tenant {tenant}")
    if not proof.fine:
        click.get_current_context().exit(REFUSED)


def _require_openai() -> None:
    try:
        import openai  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError(
            "quota demo agents calls a model through the openai package, which is not installed: "
            "pip install 'quota-ledger[openai]'"
        ) from None


def _jobs(size: int, budget: Decimal, calls: int, provider: str) -> list[Job]:
    """The first agent has a helper, the last one runs away. A tenth of the budget is left for the lead's own calls."""
    share = (budget * Decimal("0.9") / size).quantize(Decimal("0.0001"), ROUND_DOWN)
    return [
        Job(f"run:agent-{n}", provider, share, calls if n < size else None, "run:helper" if n == 1 else None)
        for n in range(1, size + 1)
    ]


# -- who calls ------------------------------------------------------------------------------------------------------


@contextmanager
def _model(ledger: Client, url: str) -> Iterator[Callable[[Run], str | None]]:
    """Yields what makes a call on behalf of a run, and returns why it was refused; None: it was made."""
    import openai

    from quota.integrations.guard import Guard, Pool, spending
    from quota.integrations.openai import guarded

    guard = Guard(ledger, prices=BOOK, pool=Pool(POOL, tokens=BURNDOWN), wait=_WAIT_S)
    with openai.OpenAI(api_key="none", base_url=url, timeout=_CALL_S) as plain, guarded(plain, guard) as client:

        def call(own: Run) -> str | None:
            message: Any = {"role": "user", "content": f"{own.subject}: think about budgets that hold."}
            try:
                with spending(own):
                    client.chat.completions.create(
                        model=MODEL, messages=[message], max_completion_tokens=own.max_tokens or CEILING_TOKENS
                    )
            except Refused as error:
                return str(error.refusal.reason)
            return None

        yield call


def _lead(ledger: Client, processes: Fleet, jobs: list[Job], budget: Decimal, view: View) -> str | None:
    """Plays the lead's part; returns why its call was refused after the kill switch."""
    lead = run(
        ledger, USER, name=LEAD, budget={"usd": budget}, max_tokens=CEILING_TOKENS, max_width=len(jobs), max_depth=2,
        stagger_s=Decimal("0.1"),
    )  # fmt: skip
    with lead, _model(ledger, jobs[0].provider) as call:
        view.see(News("started", LEAD, USER, budget))
        view.see(_called(LEAD, call(lead)))  # its plan
        processes.run(agent, [(job,) for job in jobs], lambda _, news: view.see(news))
        view.see(_called(LEAD, call(lead)))  # its summary
        ledger.call(Freeze(LEAD, "the demonstration is over", tenant=ledger.tenant))
        stopped = call(lead)
        view.see(_called(LEAD, stopped))
    view.see(News("ended", LEAD))
    return stopped


def agent(worker: Worker, job: Job) -> None:
    """An agent's part, in its process: a run below the lead, its calls, and perhaps a helper for the last one."""
    own = run(worker.client, LEAD, name=job.name, budget={"usd": job.slice}, max_tokens=AGENT_TOKENS)
    with own, _model(worker.client, job.provider) as call:
        worker.tell(News("started", job.name, LEAD, job.slice))
        made, refused = 0, None
        while refused is None and (job.calls is None or made < job.calls - (job.helper is not None)):
            refused = call(own)
            made += 1
            worker.tell(_called(job.name, refused))
        if job.helper is not None:
            _with_helper(worker, own, job.helper, job.slice / 4, call)
    worker.tell(News("ended", job.name))


def _with_helper(worker: Worker, own: Run, name: str, share: Decimal, call: Callable[[Run], str | None]) -> None:
    with own.run(name=name, budget={"usd": share}, max_tokens=AGENT_TOKENS // 2) as helper:
        worker.tell(News("started", name, own.subject, share))
        worker.tell(_called(name, call(helper)))
        try:
            helper.run(budget={"usd": share}).__enter__()
        except RunRefused as error:
            worker.tell(News("refused", name, text=f"a run: {error.decision.reason}"))
    worker.tell(News("ended", name))


def _called(name: str, refused: str | None) -> News:
    return News("called", name) if refused is None else News("refused", name, text=f"a call: {refused}")


# -- the proof ------------------------------------------------------------------------------------------------------


def _proof(ledger: Client, provider: Provider, stopped: str | None) -> Proof:
    price = BOOK.find("openai", MODEL).price
    rows = {
        (row.subject, row.unit): row for name in (LEAD, POOL) for row in ledger.balance(name) if row.kind == "budget"
    }
    return Proof(
        user=rows[USER, "usd"],
        lead=rows[LEAD, "usd"],
        quota_tokens=rows[POOL, "quota_tokens"].spent or Decimal(0),
        holds=len(ledger.call(views.holds(ledger.tenant, None, overdue=False, most=1_000_000))),
        violations=ledger.check(ledger.tenant),
        billed=sum((price.cost(used) for used in provider.answers), Decimal(0)).normalize(),
        burnt=Decimal(sum(sum(BURNDOWN.settled(used).values()) for used in provider.answers)),
        calls=len(provider.answers),
        stopped=stopped,
    )


def _closing_tables(screen: Screen, nodes: list[Node], proof: Proof) -> None:
    screen.line()
    screen.table(
        {
            "run": [node.name for node in nodes],
            "below": [node.parent for node in nodes],
            "slice": [f"${number(node.slice)}" for node in nodes],
            "spent": [f"${number(node.figure('spent'))}" for node in nodes],
            "held": [f"${number(node.figure('reserved'))}" for node in nodes],
            "left": [f"${number(node.figure('available'))}" for node in nodes],
            "calls": [str(node.calls) for node in nodes],
            "refused": [", ".join(node.refused) or "-" for node in nodes],
        }
    )
    screen.line()
    ledger = [f"${number(proof.user.spent)}", number(proof.quota_tokens), str(sum(node.calls for node in nodes))]
    screen.table(
        {
            "in total": ["spent", "quota tokens", "calls", "holds left", "check()"],
            "the ledger says": [
                *ledger,
                str(proof.holds),
                f"{len(proof.violations)} violations" if proof.violations else "right",
            ],
            "the provider says": [f"${number(proof.billed)}", number(proof.burnt), str(proof.calls), "-", "-"],
            "at most": [f"${number(proof.lead.capacity)}", "-", "-", "0", "-"],
        }
    )
