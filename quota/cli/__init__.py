"""The command line: `quota …`. One command per act; `main` turns every error into one line and a stable exit code.

| module | commands |
|---|---|
| `demos`, `replay` | the main job, on processes of `quota.fleet` (`work`: what those do) |
| `server`, `service`, `gateway` | up, down, serve, gateway, migrate, sql |
| `access` | key, token |
| `admin` | tenant, unit, subject, limit, tier |
| `prices`, `pools` | price, pool |
| `reports` | report |
| `ledger` | reserve, settle, release, balance, holds, ledger, reap, check, repair |

`store` finds the server and looks at its schema, `screen` is how answers are given, `failures` how commands end.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence

import click

import quota
from quota.cli import access, admin, gateway, ledger, pools, prices, reports, server, service
from quota.cli.demos import demo
from quota.cli.failures import EXIT_CODES, PIPE_CLOSED, PipeClosed, debugging, explained
from quota.cli.help import Sections, examples
from quota.cli.replay import replay
from quota.cli.screen import Screen

__all__ = ["cli", "main"]

_EXITS = "\n".join(f"  {code:<3} {meaning}" for code, meaning in EXIT_CODES.items())


@click.group(
    cls=Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"\b\nExit codes:\n{_EXITS}",
)
@click.version_option(quota.__version__, "--version", prog_name="quota", message="%(prog)s %(version)s")
def cli() -> None:
    """A quota and budget ledger on PostgreSQL: hold the worst case, settle the true cost, never pass the cap.

    \b
    See it work:        quota demo
    Make a budget:      quota subject create team:a
                        quota limit set team:a lifetime --unit usd --capacity 50
    Spend under it:     id=$(quota reserve team:a usd=0.25 --quiet)
                        quota settle $id usd=0.11
    See what is left:   quota balance team:a

    Without a database at hand, quota starts a PostgreSQL of its own for as long as a command runs (`quota up` keeps it
    running, with the HTTP API). QUOTA_DATABASE_URL or --database-url names another one; `quota migrate` it first.

    Every command takes --json: one JSON document, or for lists one JSON object per line; amounts are exact strings.
    """


@click.command(epilog=examples('eval "$(quota completion bash)"', "quota completion fish | source"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete quota.

    Put the line into the shell's start-up file.
    """
    line = "env _QUOTA_COMPLETE=fish_source quota | source"
    click.echo(line if shell == "fish" else f'eval "$(_QUOTA_COMPLETE={shell}_source quota)"')


_SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "See it work": (demo, replay),
    "The server": (service.up, server.down, service.serve, gateway.gateway, server.migrate, server.sql),
    "Set up": (
        access.key,
        admin.subject,
        admin.limit,
        admin.tier,
        admin.tenant,
        admin.unit,
        prices.price,
        pools.pool,
        access.token,
    ),
    "Spend": (ledger.reserve, ledger.settle, ledger.release),
    "Look and prove": (
        ledger.balance,
        ledger.holds,
        ledger.ledger,
        reports.report,
        ledger.reap,
        ledger.check,
        ledger.repair,
    ),
    "Shell": (completion,),
}
for _commands in _SECTIONS.values():
    for _command in _commands:
        cli.add_command(_command)
assert isinstance(cli, Sections)
cli.sections = {heading: tuple(str(one.name) for one in commands) for heading, commands in _SECTIONS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Arguments:
        arguments: without the program's name; default those of this process.

    Result: the exit code, see `failures.EXIT_CODES`. No error leaves it as an exception.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not debugging():  # what the driver logs on the way comes back as the error that ends the command
        logging.getLogger("psycopg").propagate = False
        logging.getLogger("psycopg").handlers = [logging.NullHandler()]
    try:
        result = cli.main(args=list(arguments), prog_name="quota", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (PipeClosed, BrokenPipeError):
        # Whoever read the output has gone; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        failure = explained(error)
        if debugging():
            traceback.print_exc()
        found = {"name": failure.name, "message": failure.message, "hint": failure.hint, "exit_code": failure.code}
        Screen("--json" in arguments).document({"error": found})
        click.echo(f"quota: {failure.line}", err=True)
        return failure.code
