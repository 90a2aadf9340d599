"""What admins do: tenants, units, subjects, limits, tiers; in the database, or over HTTP when QUOTA_API_URL is set."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import click

from quota.calls import (
    CreateSubject,
    CreateTenant,
    CreateUnit,
    Freeze,
    MoveSubject,
    RemoveLimit,
    RetireSubject,
    RetireTier,
    SetLimit,
    SetRateTier,
    SetTierLimit,
    Unfreeze,
)
from quota.cli.desk import Desk, with_desk, with_plain_desk
from quota.cli.help import Ordered, examples
from quota.cli.params import AMOUNT, CAPACITY, UNLIMITED
from quota.cli.screen import number, when
from quota.cli.tables import balance_columns

__all__ = ["limit", "subject", "tenant", "tier", "unit"]


def _capacity(value: Decimal | str) -> Decimal | None:
    return None if value == UNLIMITED else Decimal(value)


def _shown(capacity: Decimal | str) -> str:
    return number(_capacity(capacity), UNLIMITED)


# -- tenants and units ----------------------------------------------------------------------------------------------


@click.group(cls=Ordered)
def tenant() -> None:
    """Tenants: outer boundaries.

    `default` is there from the start; what shares a limit lives in one tenant.
    """


@tenant.command("create", epilog=examples("quota tenant create acme", "quota subject list --tenant acme"))
@click.argument("name")
@with_plain_desk
def tenant_create(desk: Desk, name: str) -> None:
    """Make a tenant. Its name is never used again."""
    desk.call(CreateTenant(name))
    desk.screen.document({"tenant": name, "created": True})
    desk.screen.line(f"tenant {name} created")


@click.group(cls=Ordered)
def unit() -> None:
    """Units: what is counted.

    usd, tokens, requests, cost and concurrency are there from the start.
    """


@unit.command("create", epilog=examples("quota unit create images", "quota unit create eur --money"))
@click.argument("name")
@click.option("--money", is_flag=True, help="Running out of it is a matter of payment (HTTP 402, not 429).")
@with_plain_desk
def unit_create(desk: Desk, name: str, money: bool) -> None:
    """Register a unit, for all tenants."""
    desk.call(CreateUnit(name, money))
    desk.screen.document({"unit": name, "money": money, "created": True})
    desk.screen.line(f"unit {name} created{', money' if money else ''}")


# -- subjects -------------------------------------------------------------------------------------------------------


@click.group(cls=Ordered)
def subject() -> None:
    """Subjects: who spends.

    Named kind:id, such as key:42. A charge to one is a charge to every ancestor.
    """


@subject.command(
    "create",
    epilog=examples(
        "quota subject create team:a",
        "quota subject create key:42 --parent team:a --tier basic",
        "quota subject create key:42 --if-missing",
    ),
)
@click.argument("name")
@click.option("--parent", metavar="SUBJECT", help="Every charge to NAME is one to this subject and its ancestors too.")
@click.option("--tier", metavar="NAME", help="Rate tier of a key. [default: basic]")
@click.option("--if-missing", is_flag=True, help="Fine if it is there already, under the same parent.")
@with_desk
def subject_create(desk: Desk, name: str, parent: str | None, tier: str | None, if_missing: bool) -> None:
    """Make a subject."""
    if if_missing and tier is not None:
        raise click.UsageError("--if-missing does not set a tier; use quota tier set")
    created = True
    if if_missing:
        created = desk.ensure_subject(name, parent)
    else:
        desk.call(CreateSubject(name, parent, tier, desk.tenant))
    desk.screen.document({"subject": name, "parent": parent, "created": created})
    desk.screen.line(f"subject {name} {'created' if created else 'is there already'}")


@subject.command(
    "move", epilog=examples("quota subject move key:42 --parent team:b", "quota subject move key:42 --to-root")
)
@click.argument("name")
@click.option("--parent", metavar="SUBJECT", help="Its new parent.")
@click.option("--to-root", is_flag=True, help="It has no parent any more.")
@with_desk
def subject_move(desk: Desk, name: str, parent: str | None, to_root: bool) -> None:
    """Hang a subject below another parent. Refused while holds are open on it or below it."""
    if (parent is None) is not to_root:
        raise click.UsageError("give either --parent SUBJECT or --to-root")
    desk.call(MoveSubject(name, parent, desk.tenant))
    desk.screen.document({"subject": name, "parent": parent})
    desk.screen.line(f"subject {name} moved {'to the root' if to_root else f'below {parent}'}")


@subject.command("list", epilog=examples("quota subject list", "quota subject list --kind key --below team:a --json"))
@click.option("--kind", metavar="KIND", help="Only this kind, such as key.")
@click.option("--below", metavar="SUBJECT", help="Only this subject and all below it.")
@click.option("--retired", is_flag=True, help="Retired ones too.")
@with_desk
def subject_list(desk: Desk, kind: str | None, below: str | None, retired: bool) -> None:
    """List subjects, by name."""
    rows = desk.subjects(kind, below, retired)
    columns = {
        "subject": [row["name"] for row in rows],
        "parent": [row["parent"] or "-" for row in rows],
        "tier": [row["rate_tier"] if row["kind"] == "key" else "-" for row in rows],
        "state": [_state(row) for row in rows],
        "since": [when(row["created_at"]) for row in rows],
    }
    desk.screen.rows(rows, columns, "no subjects; make one: quota subject create key:42")


def _state(row: dict[str, Any]) -> str:
    if row["retired"]:
        return "retired"
    return "active" if row["frozen"] is None else f"frozen: {row['frozen']}"


@subject.command("show", epilog=examples("quota subject show key:42"))
@click.argument("name")
@with_desk
def subject_show(desk: Desk, name: str) -> None:
    """Show a subject: its lineage, its state, and where every limit stands that it is under."""
    row = desk.subject(name)
    standing = [] if row["retired"] else desk.balance(name)
    desk.screen.document({**row, "balance": standing})
    desk.screen.line(f"{name}: {_state(row)}, since {when(row['created_at'])}")
    desk.screen.line(f"lineage: {' < '.join(row['lineage'])}")
    if row["kind"] == "key":
        desk.screen.line(f"tier: {row['rate_tier']}")
    if standing:
        desk.screen.table(balance_columns(standing))


@subject.command("freeze", epilog=examples("quota subject freeze team:a --reason 'runaway loop'"))
@click.argument("name")
@click.option("--reason", required=True, help="Why, for whoever is refused and for the log.")
@with_desk
def subject_freeze(desk: Desk, name: str, reason: str) -> None:
    """No new holds on a subject or below it; what is open may settle."""
    desk.call(Freeze(name, reason, desk.tenant))
    desk.screen.document({"subject": name, "frozen": reason})
    desk.screen.line(f"subject {name} frozen: {reason}")


@subject.command("unfreeze", epilog=examples("quota subject unfreeze team:a"))
@click.argument("name")
@with_desk
def subject_unfreeze(desk: Desk, name: str) -> None:
    """Grant holds again."""
    desk.call(Unfreeze(name, desk.tenant))
    desk.screen.document({"subject": name, "frozen": None})
    desk.screen.line(f"subject {name} unfrozen")


@subject.command("retire", epilog=examples("quota subject retire key:42"))
@click.argument("name")
@with_desk
def subject_retire(desk: Desk, name: str) -> None:
    """End a subject and all below it. Its ledger stays, its name is never used again."""
    desk.call(RetireSubject(name, desk.tenant))
    desk.screen.document({"subject": name, "retired": True})
    desk.screen.line(f"subject {name} retired, and all below it")


# -- limits ---------------------------------------------------------------------------------------------------------


@click.group(cls=Ordered)
def limit() -> None:
    """Limits: what a subject may spend.

    On a subject, or on a kind (user:*) as the default for every subject of it.
    """


@limit.command(
    "set",
    epilog=examples(
        "quota limit set team:a lifetime --unit usd --capacity 50",
        "quota limit set team:a monthly --unit usd --capacity 500 --period month --time-zone Europe/Berlin",
        "quota limit set key:42 rpm --unit requests --kind bucket --capacity 60 --refill-per-s 1",
        "quota limit set 'user:*' at-once --unit concurrency --kind concurrency --capacity 5",
    ),
)
@click.argument("owner", metavar="SUBJECT")
@click.argument("name")
@click.option("--unit", "unit_name", required=True, help="What it counts.")
@click.option(
    "--kind",
    type=click.Choice(["budget", "bucket", "concurrency"]),
    default="budget",
    show_default=True,
    help="A total, a level that refills, or slots.",
)
@click.option("--capacity", type=CAPACITY, required=True, help="The most; unlimited: counted, never refused.")
@click.option("--refill-per-s", type=AMOUNT, help="Of a bucket: what it regains each second.")
@click.option("--period", help="Of a budget: day, week, month, or such as '1 hour'. [default: lifetime]")
@click.option("--time-zone", default="UTC", show_default=True, help="IANA zone of a calendar period.")
@click.option(
    "--on-expiry",
    type=click.Choice(["release", "charge"]),
    default="release",
    show_default=True,
    help="What becomes of a hold whose owner died.",
)
@click.option("--required", is_flag=True, help="Costs must name the unit.")
@with_desk
def limit_set(
    desk: Desk,
    owner: str,
    name: str,
    unit_name: str,
    kind: str,
    capacity: Decimal | str,
    refill_per_s: Decimal | None,
    period: str | None,
    time_zone: str,
    on_expiry: str,
    required: bool,
) -> None:
    """Set a limit, or change its numbers; usage stays. Numbers are exact decimals."""
    call = SetLimit(
        owner,
        name,
        unit_name,
        kind,
        _capacity(capacity),
        refill_per_s,
        period,
        time_zone,
        on_expiry,
        required,
        desk.tenant,
    )
    desk.call(call)
    desk.screen.document(call)
    desk.screen.line(f"limit {name} of {owner}: {_shown(capacity)} {unit_name}, {period or kind}")


@limit.command("remove", epilog=examples("quota limit remove team:a lifetime"))
@click.argument("owner", metavar="SUBJECT")
@click.argument("name")
@with_desk
def limit_remove(desk: Desk, owner: str, name: str) -> None:
    """Take a limit out of force. Open holds on it live on."""
    desk.call(RemoveLimit(owner, name, desk.tenant))
    desk.screen.document({"subject": owner, "name": name, "removed": True})
    desk.screen.line(f"limit {name} of {owner} removed")


@limit.command("list", epilog=examples("quota limit list", "quota limit list team:a --json"))
@click.argument("owner", metavar="[SUBJECT]", required=False)
@with_desk
def limit_list(desk: Desk, owner: str | None) -> None:
    """List limits as they were set; `quota balance` shows which are in force for a subject, and where they stand."""
    rows = desk.limits(owner)
    columns = {"of": [row["owner"] for row in rows], **_definition_columns(rows, "name")}
    columns["on expiry"] = [row["on_expiry"] for row in rows]
    desk.screen.rows(rows, columns, "no limits; set one: quota limit set team:a lifetime --unit usd --capacity 50")


def _definition_columns(rows: list[dict[str, Any]], name: str) -> dict[str, list[str]]:
    return {
        "limit": [row[name] or "-" for row in rows],
        "unit": [row["unit"] or "-" for row in rows],
        "kind": [row["kind"] or "-" for row in rows],
        "capacity": [number(row["capacity"], UNLIMITED if row["kind"] else "-") for row in rows],
        "refill/s": [number(row["refill_per_s"]) for row in rows],
        "period": [row["period"] or "-" for row in rows],
    }


# -- tiers ----------------------------------------------------------------------------------------------------------


@click.group(cls=Ordered)
def tier() -> None:
    """Tiers: named sets of limits for keys.

    Built-in: basic, extended, bulk. Moving a key to another one keeps its usage.
    """


@tier.command("list", epilog=examples("quota tier list"))
@with_desk
def tier_list(desk: Desk) -> None:
    """List the tiers that the tenant sees; its own override built-in ones of the same name limit by limit."""
    rows = desk.tiers()
    columns = {
        "tier": [row["tier"] + (" (retired)" if row["retired"] else "") for row in rows],
        "of": [row["tenant"] or "all" for row in rows],
        **_definition_columns(rows, "limit_name"),
    }
    desk.screen.rows(rows, columns, "no tiers")


@tier.command("set", epilog=examples("quota tier set key:42 extended"))
@click.argument("key", metavar="SUBJECT")
@click.argument("name", metavar="TIER")
@with_desk
def tier_set(desk: Desk, key: str, name: str) -> None:
    """Move a key to a tier, from its next reservation on; usage stays."""
    desk.call(SetRateTier(key, name, desk.tenant))
    desk.screen.document({"subject": key, "rate_tier": name})
    desk.screen.line(f"subject {key} is {name} now")


_BUILTIN = click.option("--builtin", is_flag=True, help="The built-in tier that all tenants see, not the tenant's own.")


@tier.command(
    "limit",
    epilog=examples(
        "quota tier limit gold bucket --unit cost --kind bucket --capacity 2000000 --refill-per-s 6000",
        "quota tier limit gold hourly --unit cost --capacity 4000000 --period '1 hour'",
    ),
)
@click.argument("name", metavar="TIER")
@click.argument("limit_name", metavar="NAME")
@click.option("--unit", "unit_name", required=True, help="What it counts.")
@click.option(
    "--kind",
    type=click.Choice(["budget", "bucket", "concurrency"]),
    default="budget",
    show_default=True,
    help="As in limit set.",
)
@click.option("--capacity", type=CAPACITY, required=True, help="The most; unlimited: counted, never refused.")
@click.option("--refill-per-s", type=AMOUNT, help="Of a bucket: what it regains each second.")
@click.option("--period", help="Of a budget: day, week, month, or such as '1 hour'. [default: lifetime]")
@_BUILTIN
@with_desk
def tier_limit(
    desk: Desk,
    name: str,
    limit_name: str,
    unit_name: str,
    kind: str,
    capacity: Decimal | str,
    refill_per_s: Decimal | None,
    period: str | None,
    builtin: bool,
) -> None:
    """Set a limit of a tier; its first one makes the tier."""
    owner = None if builtin else desk.tenant
    call = SetTierLimit(name, limit_name, unit_name, kind, _capacity(capacity), refill_per_s, period, owner)
    desk.set_tier_limit(call)
    desk.screen.document(call)
    desk.screen.line(f"limit {limit_name} of tier {name}: {_shown(capacity)} {unit_name}, {period or kind}")


@tier.command("retire", epilog=examples("quota tier retire gold"))
@click.argument("name", metavar="TIER")
@_BUILTIN
@with_desk
def tier_retire(desk: Desk, name: str, builtin: bool) -> None:
    """End a tier: who has it acts as basic, usage stays."""
    desk.call(RetireTier(name, None if builtin else desk.tenant))
    desk.screen.document({"tier": name, "retired": True})
    desk.screen.line(f"tier {name} retired; its keys act as basic")
