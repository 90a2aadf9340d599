"""`quota demo …`: what the ledger is for, seen at work. One demonstration per module; the first is the default one."""

from __future__ import annotations

import click

from quota.cli.demos.agents import agents
from quota.cli.demos.fleet import fleet
from quota.cli.demos.gateway import gateway
from quota.cli.help import Defaulted

__all__ = ["demo"]


@click.group(cls=Defaulted, default="fleet")
def demo() -> None:
    """See the ledger at work; without a name: fleet.

    Each demonstration makes a tenant of its own, so that it meets nothing of yours, and ends with the ledger's proof.
    """


demo.add_command(fleet)
demo.add_command(agents)
demo.add_command(gateway)
