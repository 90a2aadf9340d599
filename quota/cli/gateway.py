"""The gateway: `quota gateway`, a reverse proxy in front of a query API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quota.cli.help import examples
from quota.cli.screen import Screen
from quota.cli.service import run_beside
from quota.cli.store import Target, opened, target_options
from quota.config import ConfigError

if TYPE_CHECKING:
    from quota.gateway.config import GatewayConfig
    from quota.metering import Policy, Route

__all__ = ["gateway"]

_COMMAND = [sys.executable, "-m", "gunicorn", "--config", "python:quota.gateway.serving"]


@click.command(
    epilog=examples(
        "quota gateway --config gateway.toml --check",
        "quota gateway --config gateway.toml --upstream http://127.0.0.1:9000",
        "quota gateway --config gateway.toml --bind 0.0.0.0:8081 --workers 2",
    )
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Routes and rules, TOML."
)
@click.option("--upstream", metavar="URL", help="The query API, in place of the file's `upstream`.")
@click.option("--check", is_flag=True, help="Judge the file, show its routes, start nothing.")
@click.option("--bind", metavar="HOST:PORT", help="Where to listen. [default: 127.0.0.1:8081]")
@click.option("--workers", type=click.IntRange(1, 64), help="Processes, as many as processors. [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="With --check: answer in JSON.")
@target_options
def gateway(
    file: Path, upstream: str | None, check: bool, bind: str | None, workers: int | None, as_json: bool,
    database_url: str | None, data: Path | None,
) -> None:  # fmt: skip
    """Put a reverse proxy in front of a query API, until SIGTERM or Ctrl-C.

    Every request is authenticated, estimated, held, forwarded and settled at what the API reports in `x-agent-cost`. A
    mistake in the file stops the start and names its line. Give it a database login with the role quota_worker.
    """
    try:
        from quota.gateway.config import read_config
    except ImportError as error:
        raise ConfigError(f"the gateway needs the package {error.name}: pip install 'quota-ledger[gateway]'") from None
    config = read_config(file, upstream=upstream)
    if check:
        _show(Screen(as_json), config)
        return
    with opened(Target.of(database_url, data), Screen(False), None) as session:
        given = {"QUOTA_BIND": bind, "QUOTA_WORKERS": workers, "QUOTA_UPSTREAM": upstream}
        chosen = {name: str(value) for name, value in given.items() if value is not None}
        # The URL travels in the environment: the process list shows arguments to everybody.
        environment = {
            **os.environ, **chosen, "QUOTA_GATEWAY_CONFIG": str(file.absolute()), "QUOTA_DATABASE_URL": session.url,
        }  # fmt: skip
        if session.target.embedded:
            run_beside(_COMMAND, environment)
            return
    # Nothing is left for this process to do: signals go to gunicorn itself.
    os.execve(_COMMAND[0], _COMMAND, environment)  # noqa: S606


def _show(screen: Screen, config: GatewayConfig) -> None:
    from quota.metering import Policy  # of the gateway's packages

    routes, lease = [table.route() for table in config.routes], config.lease
    policy = Policy(routes=tuple(routes), lease=None if lease is None else lease.leasing())
    screen.document({
        "upstream": config.upstream,
        "routes": [
            {"name": route.name, "metered": route.metered, "unit": route.unit, "leased": policy.leases(route)}
            for route in routes
        ],
        "lease": None if lease is None else {"size": lease.size, "unit": lease.unit, "from_per_s": lease.from_per_s},
        "keys": config.keys,
        "oauth_issuer": config.oauth.issuer if config.oauth else None,
    })  # fmt: skip
    screen.line(f"{len(routes)} routes to {config.upstream}")
    screen.table({
        "route": [route.name for route in routes],
        "estimate": [repr(route.estimate) if route.metered else "not metered" for route in routes],
        "bounds": [str(len(route.bounds)) for route in routes],
        "least": [str(route.minimum_charge) for route in routes],
        "on timeout": [route.on_timeout for route in routes],
        "decided by": [_decided_by(policy, route) for route in routes],
        "ledger away": ["pass some" if route.fail_open else "refuse" for route in routes],
    })  # fmt: skip


def _decided_by(policy: Policy, route: Route) -> str:
    if not route.metered:
        return "-"
    return f"lease of {policy.lease.size}" if policy.lease and policy.leases(route) else "ledger"
