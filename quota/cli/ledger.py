"""What workers do, what on-call looks at, and what proves the books: reserve to repair."""

from __future__ import annotations

import json
import signal
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from quota import reaper
from quota.calls import (
    Balance,
    Check,
    Reaped,
    Release,
    Repair,
    Reservation,
    Reserve,
    ReserveInTurn,
    Settle,
    views,
)
from quota.cli.failures import REFUSED
from quota.cli.help import examples
from quota.cli.params import AMOUNT, DETAILS, DURATION, costs_of
from quota.cli.screen import Screen, number, when
from quota.cli.store import Session, with_server, with_store
from quota.cli.tables import balance_columns, violation_columns
from quota.errors import QuotaError, Refused, Unavailable
from quota.ids import uuid7

__all__ = ["balance", "check", "holds", "ledger", "reap", "release", "repair", "reserve", "settle"]

_MOST = click.IntRange(1, 1_000_000)


# -- the life of a reservation --------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "quota reserve key:42 usd=0.25",
        "quota reserve key:42 usd=0.25 tokens=1200 --ttl 2m --id 01890a5d-ac96-774b-bcce-b302099a8057",
        "quota reserve key:42 tokens=1200 --wait 30s",
        "id=$(quota reserve key:42 usd=0.25 --quiet) && quota settle $id usd=0.11",
    )
)
@click.argument("subject")
@click.argument("costs", nargs=-1, required=True, metavar="UNIT=AMOUNT...")
@click.option("--ttl", type=DURATION, default="10m", show_default=True, help="How long the hold lives.")
@click.option(
    "--id", "identity", metavar="UUID", help="The idempotency key: repeat a lost call with it. [default: new]"
)
@click.option("--also", multiple=True, metavar="SUBJECT", help="A further subject that the cost counts on; repeatable.")
@click.option("--headroom", type=AMOUNT, default="0", help="Share of every capacity to leave untouched, such as 0.2.")
@click.option("--on-expiry", type=click.Choice(["charge"]), help="Book the hold if nobody settles it in time.")
@click.option("--details", type=DETAILS, help="A JSON object to keep with the reservation.")
@click.option("--wait", type=DURATION, help="Wait in turn for so long when there is no room. [default: do not wait]")
@click.option("-q", "--quiet", is_flag=True, help="Print the id of the reservation and nothing else.")
@with_store
def reserve(
    session: Session,
    subject: str,
    costs: tuple[str, ...],
    ttl: timedelta,
    identity: str | None,
    also: tuple[str, ...],
    headroom: Decimal,
    on_expiry: str | None,
    details: dict[str, object] | None,
    wait: timedelta | None,
    quiet: bool,
) -> None:
    """Hold the worst case of a call before it is made.

    All limits of SUBJECT and its ancestors take it, or none does: refused, exit code 1.
    """
    arguments: dict[str, Any] = {
        "ttl": ttl,
        "id": identity or uuid7(),
        "also": also,
        "headroom": headroom,
        "on_expiry": on_expiry,
        "details": details,
        "tenant": session.tenant,
    }
    answer: Reservation
    if wait is None:
        answer = session.call(Reserve(subject, costs_of(costs), **arguments))
    else:
        answer = session.call(ReserveInTurn(subject, costs_of(costs), patience=wait, **arguments))
    session.screen.document(answer)
    if answer.refused:
        session.screen.note(f"quota: {Refused(answer)}")
        click.get_current_context().exit(REFUSED)
    if quiet:
        session.screen.line(str(answer.reservation))
    else:
        _show_grant(session.screen, answer)


def _show_grant(screen: Screen, answer: Reservation) -> None:
    again = ", as before" if answer.replayed else ""
    screen.line(f"granted {answer.reservation} until {when(answer.expires_at)}{again}")
    if answer.limit_name is not None:
        screen.line(
            f'tightest limit "{answer.limit_name}" of {answer.limit_subject}: '
            f"capacity {number(answer.capacity, 'unlimited')} {answer.unit}, "
            f"spent {number(answer.spent)}, reserved {number(answer.reserved)}"
        )


@click.command(
    epilog=examples(
        "quota settle 01890a5d-ac96-774b-bcce-b302099a8057 usd=0.11",
        "quota settle 01890a5d-ac96-774b-bcce-b302099a8057",
        "quota settle 01890a5d-ac96-774b-bcce-b302099a8057 usd=0.05 --partial",
    )
)
@click.argument("reservation")
@click.argument("costs", nargs=-1, metavar="[UNIT=AMOUNT]...")
@click.option("--partial", is_flag=True, help="Book the totals so far and keep the rest held.")
@click.option(
    "--outcome",
    type=click.Choice(["ok", "error", "timeout", "cancelled", "unknown"]),
    default="ok",
    show_default=True,
    help="How the call ended; unknown books the whole hold, and one later settle may correct it.",
)
@click.option("--details", type=DETAILS, help="A JSON object to keep with the entry.")
@with_store
def settle(
    session: Session,
    reservation: str,
    costs: tuple[str, ...],
    partial: bool,
    outcome: str,
    details: dict[str, object] | None,
) -> None:
    """Book the true cost of a call.

    Totals of the reservation by unit, never steps. Units left out settle at the hold.
    """
    totals = costs_of(costs) if costs else None
    call = Settle(reservation, totals, final=not partial, outcome=outcome, details=details, tenant=session.tenant)
    answer = session.call(call)
    session.screen.document({"reservation": reservation, **_fields(answer)})
    marks = [mark for mark, so in (("late", answer.late), ("as before", answer.replayed)) if so]
    marks += [f"{number(amount)} {unit} above the hold" for unit, amount in answer.overage.items()]
    session.screen.line(", ".join([f"{answer.state} {reservation}", *marks]))


def _fields(answer: object) -> dict[str, Any]:
    import dataclasses

    assert dataclasses.is_dataclass(answer)
    return {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}


@click.command(epilog=examples("quota release 01890a5d-ac96-774b-bcce-b302099a8057"))
@click.argument("reservation")
@with_store
def release(session: Session, reservation: str) -> None:
    """Give a hold back: the call was never made."""
    answer = session.call(Release(reservation, tenant=session.tenant))
    session.screen.document({"reservation": reservation, **_fields(answer)})
    session.screen.line(f"{answer.state} {reservation}{', as before' if answer.replayed else ''}")


# -- looking --------------------------------------------------------------------------------------------------------


@click.command(epilog=examples("quota balance key:42", "quota balance key:42 --json | jq -r .available"))
@click.argument("subject")
@with_store
def balance(session: Session, subject: str) -> None:
    """Where every limit on a subject's lineage stands now."""
    rows = session.call(Balance(subject, session.tenant))
    empty = f"{subject} is under no limit; set one: quota limit set {subject} lifetime --unit usd --capacity 50"
    session.screen.rows(rows, balance_columns(rows), empty)


@click.command(epilog=examples("quota holds", "quota holds key:42 --json", "quota holds --overdue"))
@click.argument("subject", required=False)
@click.option("--overdue", is_flag=True, help="Only those that the reaper will close.")
@click.option("--max", "most", type=_MOST, default=1000, show_default=True, help="At most so many.")
@with_store
def holds(session: Session, subject: str | None, overdue: bool, most: int) -> None:
    """List open holds, those that expire first in front.

    A lease of a process shows what it strands: held for calls to come, and charged if the process dies.
    """
    rows = session.call(views.holds(session.tenant, subject, overdue=overdue, most=most))
    columns = {
        "reservation": [str(row["reservation"]) for row in rows],
        "subject": [row["subject"] for row in rows],
        "held": [_amounts(row["held"]) for row in rows],
        "booked": [_amounts(row["booked"]) for row in rows],
        "expires": [when(row["expires_at"]) + (" overdue" if row["overdue"] else "") for row in rows],
    }
    if any(row["lease"] for row in rows):
        columns["stranded"] = [_amounts(row["stranded"]) for row in rows]
        columns["lease of"] = [_owner(row["lease"]) for row in rows]
    session.screen.rows(rows, columns, "no open holds")


def _owner(lease: dict[str, Any] | None) -> str:
    return "-" if lease is None else f"{lease.get('host', '?')}:{lease.get('pid', '?')}"


def _amounts(by_unit: dict[str, Any] | None) -> str:
    return " ".join(f"{unit}={number(Decimal(amount))}" for unit, amount in (by_unit or {}).items()) or "-"


@click.command(
    epilog=examples(
        "quota ledger",
        "quota ledger team:a --max 20",
        "quota ledger --reservation 01890a5d-ac96-774b-bcce-b302099a8057 --json",
    )
)
@click.argument("subject", required=False)
@click.option("--reservation", type=click.UUID, metavar="UUID", help="Only what was booked for this reservation.")
@click.option("--max", "most", type=_MOST, default=50, show_default=True, help="The newest so many.")
@with_store
def ledger(session: Session, subject: str | None, reservation: object | None, most: int) -> None:
    """Show the newest lines of the append-only ledger.

    One line per limit that a booking touched.
    """
    identity = None if reservation is None else str(reservation)
    rows = session.call(views.entries(session.tenant, subject, identity, most=most))
    columns = {
        "entry": [str(row["entry"]) for row in rows],
        "at": [when(row["at"]) for row in rows],
        "kind": [row["kind"] for row in rows],
        "subject": [row["subject"] or row["charged_to"] or "-" for row in rows],
        "limit": [row["limit_name"] or "-" for row in rows],
        "amount": [number(row["signed_amount"]) for row in rows],
        "unit": [row["unit"] or "-" for row in rows],
        "reservation": [str(row["reservation"] or "-") for row in rows],
    }
    session.screen.rows(rows, columns, "the ledger has no such lines")


# -- housekeeping ---------------------------------------------------------------------------------------------------


@click.command(
    epilog=examples("quota reap", "quota reap --every 10s", "quota reap --every 10s --heartbeat /tmp/reaper")
)
@click.option("--every", type=DURATION, help="Go on, with this pause, until SIGTERM or Ctrl-C.")
@click.option(
    "--max", "batch", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Holds per transaction."
)
@click.option("--tenant", metavar="NAME", help="Only this tenant's holds. [default: all tenants']")
@click.option(
    "--heartbeat",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Touch this file after every sweep that reached the database, for health checks.",
)
@with_server
def reap(session: Session, every: timedelta | None, batch: int, heartbeat: Path | None) -> None:
    """Close the holds whose time has passed.

    Once, as from cron, or as a loop. Any number may run at once. Books are right without it; it brings holds
    back sooner.
    """
    if every is None:
        done = reaper.sweep(session.client, batch=batch, tenant=session.named_tenant)
        _touch(heartbeat)
        session.screen.document(done)
        session.screen.line(f"{done.released} released, {done.charged} charged")
        return
    if every <= timedelta(0):
        raise click.UsageError("--every 0s leaves no pause; give one, such as 10s")
    stop = threading.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, lambda *_: stop.set())
    session.screen.note(f"quota: reaping every {every.total_seconds():g} s")

    def report(done: Reaped | Unavailable) -> None:
        if isinstance(done, QuotaError):
            session.screen.note(f"quota: {done}; the next sweep tries again")
            return
        _touch(heartbeat)
        if session.screen.json:
            click.echo(
                json.dumps({"at": datetime.now(UTC).isoformat(), "released": done.released, "charged": done.charged})
            )
        elif done.released or done.charged:
            click.echo(f"{when(datetime.now(UTC))} {done.released} released, {done.charged} charged")

    reaper.run(session.client, every.total_seconds(), stop, report, batch=batch, tenant=session.named_tenant)
    session.screen.note("quota: reaper stopped")


def _touch(heartbeat: Path | None) -> None:
    if heartbeat is not None:
        try:
            heartbeat.touch()
        except OSError as error:
            raise click.UsageError(
                f"--heartbeat {heartbeat}: {error.strerror}; name a file that can be written"
            ) from None


@click.command(epilog=examples("quota check", "quota check --json | jq .ok"))
@click.option("--tenant", metavar="NAME", help="Only this tenant's books. [default: all tenants']")
@with_server
def check(session: Session) -> None:
    """Prove the books, in one snapshot and under load.

    Exit code 1 when a counter and the ledger disagree.
    """
    found = session.call(Check(session.named_tenant))
    session.screen.document({"ok": not found, "violations": found})
    if not found:
        session.screen.line("the books are right")
        return
    session.screen.table(violation_columns(found))
    session.screen.note(f"quota: {len(found)} violations. quota repair rebuilds counters from holds and entries")
    click.get_current_context().exit(REFUSED)


@click.command(epilog=examples("quota repair", "quota repair --tenant acme && quota check"))
@with_store
def repair(session: Session) -> None:
    """Rebuild a tenant's counters from holds and ledger.

    In one transaction, itself on the ledger.
    """
    changed = session.call(Repair(session.tenant))
    session.screen.document({"tenant": session.tenant, "repaired": changed})
    if not changed:
        session.screen.line("nothing to repair")
        return
    columns = {
        "subject": [row.subject for row in changed],
        "limit": [row.limit_name for row in changed],
        "counter": [row.counter for row in changed],
        "was": [number(row.was) for row in changed],
        "is now": [number(row.is_now) for row in changed],
    }
    session.screen.table(columns)
