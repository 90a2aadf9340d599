"""The server and its schema: down, migrate, sql. What runs on it: `service`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quota import sql as engine
from quota.cli.help import examples
from quota.cli.screen import Screen
from quota.cli.store import Target, client_of, json_option, revision_of, running, target_options
from quota.config import ConfigError

__all__ = ["DATA", "down", "embedded_target", "migrate", "sql"]

DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Its folder. [default: QUOTA_DATA_DIR, else your data folder]",
)


def embedded_target(data: Path | None) -> Target:
    target = Target.of(None, data)
    if not target.embedded:
        raise ConfigError(
            f"QUOTA_DATABASE_URL: {target.shown} is not quota's to start or stop; unset it, or give --data DIR"
        )
    if sys.platform == "win32":
        raise ConfigError("the embedded server needs Linux or macOS; set QUOTA_DATABASE_URL to a running server")
    return target


@click.command(epilog=examples("quota down", "quota down --force"))
@DATA
@click.option("--force", is_flag=True, help="At once, under its users; nothing committed is lost.")
@json_option
def down(data: Path | None, force: bool, as_json: bool) -> None:
    """Stop the embedded server; its data stays."""
    target, screen = embedded_target(data), Screen(as_json)
    from quota.embedded import status, stop_server

    folder = target.settings.data_dir
    was_running = status(folder).running
    stopped = stop_server(folder, force=force)
    screen.document({"data": folder, "was_running": was_running, "stopped": stopped})
    if not was_running:
        screen.line(f"no server runs in {folder}")
    elif stopped:
        screen.line(f"the server in {folder} is down")
    else:
        screen.line(f"the server in {folder} is still in use; it stops when its last user leaves (--force: now)")


@click.command(
    epilog=examples(
        "quota migrate",
        "quota migrate --show",
        "quota migrate --sql > schema.sql",
        "quota migrate --sql --from 0001",
        "quota migrate 0001 --down",
    )
)
@click.argument("revision", default="head")
@click.option("--show", is_flag=True, help="Say where the database is and where this release is; change nothing.")
@click.option("--sql", "offline", is_flag=True, help="Print the statements for somebody else to run; needs no server.")
@click.option("--from", "start", metavar="REVISION", help="With --sql: where the database is. [default: empty]")
@click.option(
    "--down", "back", is_flag=True, help="Go back to an older REVISION; base takes the ledger away, data and all."
)
@json_option
@target_options
def migrate(
    revision: str,
    show: bool,
    offline: bool,
    start: str | None,
    back: bool,
    as_json: bool,
    database_url: str | None,
    data: Path | None,
) -> None:
    """Bring the schema to this release (head), or to REVISION.

    Safe under load: a revision waits at most half a second for a lock and is tried again.
    """
    screen = Screen(as_json)
    _checked_revision(revision, back)
    if offline:
        _print_offline(screen, revision, start)
        return
    if start is not None:
        raise click.UsageError("--from goes with --sql; a database knows where it is")
    with running(Target.of(database_url, data)) as target:
        _migrate(target, screen, revision, show=show, back=back)


def _checked_revision(revision: str, back: bool) -> None:
    from quota import migrate as migrations

    known = migrations.revisions()
    if revision not in ("head", *known, *(["base"] if back else [])):
        if revision == "base":
            raise click.UsageError(
                "base is an older revision, the ledger would be lost with all data; say so with --down"
            )
        raise click.UsageError(f'no revision "{revision}" in this release; it has {", ".join(known)} and head')


def _print_offline(screen: Screen, revision: str, start: str | None) -> None:
    from quota import migrate as migrations

    if start is not None:
        _checked_revision(start, back=False)
    text = migrations.sql(start, revision)
    if screen.json:
        screen.document({"from": start, "to": revision, "sql": text})
    else:
        click.echo(text, nl=False)


def _migrate(target: Target, screen: Screen, revision: str, *, show: bool, back: bool) -> None:
    from quota import migrate as migrations

    assert target.url is not None
    known, head = migrations.revisions(), migrations.head()
    goal = head if revision == "head" else revision
    with client_of(target) as client:
        before = revision_of(client)
    if before is not None and before not in known:
        migrations.require_head(target.url)  # of a newer release: says so
    screen.line(f"{target.shown}: at {before or 'none'}, head is {head}")
    if show:
        screen.document({"current": before, "head": head, "at_head": before == head})
        return
    is_older = before is not None and (goal == "base" or known.index(goal) < known.index(before))
    if is_older and not back:
        raise click.UsageError(f"{goal} is older than {before}, data would be lost; say so with --down")
    if back and not is_older:
        raise click.UsageError(f"--down: {goal} is not older than {before or 'none'}; leave it out")
    if goal != before:
        (migrations.downgrade if back else migrations.upgrade)(target.url, goal, report=screen.note)
        screen.line(f"now at {'none' if goal == 'base' else goal}")
    after = None if goal == "base" else goal
    screen.document({"before": before, "current": after, "head": head, "at_head": after == head})


@click.command(epilog=examples("quota sql", "quota sql reserve", "quota sql --all", "quota sql --json"))
@click.argument("name", required=False, type=click.Choice(engine.FILES), metavar="[NAME]")
@click.option("--all", "everything", is_flag=True, help="All files, in the order in which they are installed.")
@json_option
def sql(name: str | None, everything: bool, as_json: bool) -> None:
    """Read the engine: its SQL files, or one of them.

    Needs no server. For a prompt on the data there is psql; `quota up --detach` prints how to connect.
    """
    screen = Screen(as_json)
    chosen = engine.FILES if name is None else (name,)
    if screen.json:
        for file in chosen:
            screen.document({"name": file, "about": _about(file), "sql": engine.text(file)})
    elif name is None and not everything:
        screen.table({"file": list(chosen), "about": [_about(file) for file in chosen]})
    else:
        click.echo("\n".join(engine.text(file) for file in chosen), nl=False)


def _about(file: str) -> str:
    """The first sentence of the file's opening comment."""
    lines = []
    for line in engine.text(file).splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")
