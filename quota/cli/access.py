"""Who may speak: keys of subjects, tokens of the HTTP API."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from quota.calls import RenameKey, RevokeKey, RevokeToken, SetKeyExpiry
from quota.cli.desk import Desk, with_desk, with_plain_desk
from quota.cli.failures import REFUSED
from quota.cli.help import Ordered, examples
from quota.cli.params import DURATION
from quota.cli.screen import Screen, when

__all__ = ["key", "token"]


@click.group(cls=Ordered)
def key() -> None:
    """Keys: secrets that authenticate a subject key:ID.

    With QUOTA_API_URL and QUOTA_API_TOKEN these speak to the HTTP API, else to the database.
    """


def _show_secret(screen: Screen, row: dict[str, Any], secret: str, said: str) -> None:
    screen.document({**row, "secret": secret})
    screen.line(said)
    screen.line(f"  secret: {secret}")
    screen.line("  It is shown once and stored nowhere.")


@key.command(
    "create", epilog=examples("quota key create 'Web shop'", "quota key create 'Web shop' --id web --tier bulk")
)
@click.argument("name")
@click.option("--id", "identity", metavar="ID", help="Public id; the subject is key:ID. [default: a new one]")
@click.option("--parent", metavar="SUBJECT", help="The owner: what the key spends is charged to it as well.")
@click.option("--tier", metavar="NAME", help="Rate tier. [default: basic]")
@click.option("--expires-in", type=DURATION, help="When it stops letting in. [default: never]")
@with_desk
def key_create(
    desk: Desk, name: str, identity: str | None, parent: str | None, tier: str | None, expires_in: timedelta | None
) -> None:
    """Make a key and show its secret, once."""
    row, secret = desk.create_key(name, identity, parent, tier, expires_in)
    _show_secret(
        desk.screen, row, secret, f"key {row['id']} created, subject {row['subject']}, tier {row['rate_tier']}"
    )


@key.command("list", epilog=examples("quota key list", "quota key list --search shop --tier basic --json"))
@click.option("--search", metavar="TEXT", help="An id, or a part of a name.")
@click.option("--parent", metavar="SUBJECT", help="Only those of this owner.")
@click.option("--tier", metavar="NAME", help="Only those of this tier.")
@with_desk
def key_list(desk: Desk, search: str | None, parent: str | None, tier: str | None) -> None:
    """List keys, by id."""
    rows = desk.keys(search, parent, tier)
    columns = {
        "key": [row["id"] for row in rows],
        "name": [row["name"] for row in rows],
        "parent": [row["parent"] or "-" for row in rows],
        "tier": [row["rate_tier"] for row in rows],
        "state": [row["state"] for row in rows],
        "expires": [when(row["expires_at"]) for row in rows],
    }
    desk.screen.rows(rows, columns, "no keys; make one: quota key create NAME")


@key.command("show", epilog=examples("quota key show web"))
@click.argument("identity", metavar="ID")
@with_desk
def key_show(desk: Desk, identity: str) -> None:
    """Show a key."""
    _show(desk, identity)


def _show(desk: Desk, identity: str) -> None:
    row = desk.key(identity)
    desk.screen.document(row)
    frozen = f", frozen: {row['frozen']}" if row["frozen"] else ""
    desk.screen.line(f"key {row['id']} ({row['name']}): {row['state']}{frozen}, tier {row['rate_tier']}")
    desk.screen.line(f"subject: {row['subject']}, parent: {row['parent'] or '-'}, expires: {when(row['expires_at'])}")


@key.command("rename", epilog=examples("quota key rename web 'Web shop, Europe'"))
@click.argument("identity", metavar="ID")
@click.argument("name")
@with_desk
def key_rename(desk: Desk, identity: str, name: str) -> None:
    """Give a key another name."""
    desk.call(RenameKey(identity, name, desk.tenant))
    _show(desk, identity)


@key.command("expire", epilog=examples("quota key expire web --in 30d", "quota key expire web --never"))
@click.argument("identity", metavar="ID")
@click.option("--in", "expires_in", type=DURATION, help="From now.")
@click.option("--never", is_flag=True, help="Not by itself.")
@with_desk
def key_expire(desk: Desk, identity: str, expires_in: timedelta | None, never: bool) -> None:
    """Set when a key stops letting in."""
    if (expires_in is None) is not never:
        raise click.UsageError("give either --in DURATION or --never")
    desk.call(SetKeyExpiry(identity, None if expires_in is None else datetime.now(UTC) + expires_in, desk.tenant))
    _show(desk, identity)


@key.command("rotate", epilog=examples("quota key rotate web --overlap 1h"))
@click.argument("identity", metavar="ID")
@click.option("--overlap", type=DURATION, default="0s", show_default=True, help="How long the old secret stays good.")
@with_desk
def key_rotate(desk: Desk, identity: str, overlap: timedelta) -> None:
    """Give a key a new secret and show it, once."""
    row, secret = desk.rotate_key(identity, overlap)
    until = when(row["old_secret_until"])
    _show_secret(desk.screen, row, secret, f"key {identity} rotated; the old secret is good until: {until}")


@key.command("revoke", epilog=examples("quota key revoke web --reason 'leaked in a ticket'"))
@click.argument("identity", metavar="ID")
@click.option("--reason", required=True, help="Why, for the log and for whoever is refused.")
@with_desk
def key_revoke(desk: Desk, identity: str, reason: str) -> None:
    """End a key for ever and freeze its subject."""
    desk.call(RevokeKey(identity, reason, desk.tenant))
    _show(desk, identity)


@key.command("verify", epilog=examples("cat secret.txt | quota key verify"))
@with_desk
def key_verify(desk: Desk) -> None:
    """Whose secret is this? Read from standard input, which nobody else sees. Exit code 1: let nobody in."""
    answer = desk.verify(sys.stdin.readline().strip())
    desk.screen.document(answer)
    desk.screen.line(f"{answer['state']}{': ' + answer['subject'] if answer.get('subject') else ''}")
    if not answer["valid"]:
        click.get_current_context().exit(REFUSED)


# -- tokens ---------------------------------------------------------------------------------------------------------


@click.group(cls=Ordered)
def token() -> None:
    """Tokens: who may call the HTTP API.

    A worker reserves and settles, a viewer reads, an operator manages keys and caps, an owner manages tokens too.
    With QUOTA_API_URL and QUOTA_API_TOKEN these speak to the API itself, else to the database.
    """


@token.command(
    "create",
    epilog=examples("quota token create ops --role owner", "quota token create fleet --role worker --tenant acme"),
)
@click.argument("name")
@click.option("--role", type=click.Choice(["worker", "viewer", "operator", "owner"]), required=True)
@click.option("--expires-in", type=DURATION, help="When it stops being good. [default: never]")
@click.option("--tenant", metavar="NAME", help="For this tenant only. [default: for every tenant]")
@with_plain_desk
def token_create(desk: Desk, name: str, role: str, expires_in: timedelta | None) -> None:
    """Make a token and show its secret, once. The first one is made in the database."""
    row, secret = desk.create_token(name, role, expires_in)
    where = f"for tenant {row['tenant']}" if row["tenant"] else "for every tenant"
    _show_secret(desk.screen, row, secret, f"token {row['id']} created: {role}, {where}")


@token.command("list", epilog=examples("quota token list", "quota token list --tenant acme"))
@click.option("--tenant", metavar="NAME", help="Those of this tenant. [default: QUOTA_TENANT, else default]")
@with_plain_desk
def token_list(desk: Desk) -> None:
    """List a tenant's tokens and those for every tenant."""
    rows = desk.tokens()
    columns = {
        "token": [row["id"] for row in rows],
        "name": [row["name"] for row in rows],
        "role": [row["role"] for row in rows],
        "tenant": [row["tenant"] or "every" for row in rows],
        "state": [row["state"] for row in rows],
        "expires": [when(row["expires_at"]) for row in rows],
    }
    desk.screen.rows(rows, columns, "no tokens; make one: quota token create NAME --role owner")


@token.command("revoke", epilog=examples("quota token revoke 3kfp6e2mwx9qtr5a --reason 'left the company'"))
@click.argument("identity", metavar="ID")
@click.option("--reason", required=True, help="Why, for the log.")
@click.option("--tenant", metavar="NAME", help="Whose token it is, unless it is for every tenant.")
@with_plain_desk
def token_revoke(desk: Desk, identity: str, reason: str) -> None:
    """End a token for ever."""
    desk.call(RevokeToken(identity, reason, desk.token(identity)["tenant"]))
    desk.screen.document(desk.token(identity))
    desk.screen.line(f"token {identity} revoked")
