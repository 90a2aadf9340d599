"""What runs: `serve`, the HTTP API on a database; `up`, an embedded database with API and reaper."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from quota import reaper
from quota.calls import Reaped, pages
from quota.cli.desk import make_token
from quota.cli.help import examples
from quota.cli.screen import Screen
from quota.cli.server import DATA, embedded_target
from quota.cli.store import Session, Target, opened, target_options
from quota.config import ConfigError
from quota.errors import Unavailable

__all__ = ["run_beside", "serve", "up"]

_REAP_S = 10
_STOP_S = 40
_READY_S = 30


def _options(function: Any) -> Any:
    from quota.admin import serving  # gunicorn's configuration knows the defaults

    for option in (
        click.option(
            "--threads", type=click.IntRange(1, 100), help=f"Per process. [default: {serving.DEFAULT_THREADS}]"
        ),
        click.option("--workers", type=click.IntRange(1, 64), help=f"Processes. [default: {serving.DEFAULT_WORKERS}]"),
        click.option("--bind", metavar="HOST:PORT", help=f"Where to listen. [default: {serving.DEFAULT_BIND}]"),
    ):
        function = option(function)
    return function


def _environment(url: str, bind: str | None, workers: int | None, threads: int | None) -> dict[str, str]:
    given = {"QUOTA_BIND": bind, "QUOTA_WORKERS": workers, "QUOTA_THREADS": threads}
    chosen = {name: str(value) for name, value in given.items() if value is not None}
    # The URL travels in the environment: the process list shows arguments to everybody.
    return {**os.environ, **chosen, "QUOTA_DATABASE_URL": url}


_COMMAND = [sys.executable, "-m", "gunicorn", "--config", "python:quota.admin.serving"]


@click.command(epilog=examples("quota serve", "quota serve --bind 0.0.0.0:8080 --workers 4 --threads 8"))
@_options
@target_options
def serve(
    bind: str | None, workers: int | None, threads: int | None, database_url: str | None, data: Path | None
) -> None:
    """Serve the HTTP API until SIGTERM or Ctrl-C.

    Give it a database login with the role quota_api. The page for people is at /docs.
    """
    with opened(Target.of(database_url, data), Screen(False), None) as session:
        environment = _environment(session.url, bind, workers, threads)
        if session.target.embedded:
            run_beside(_COMMAND, environment)
            return
    # Nothing is left for this process to do: signals go to gunicorn itself.
    os.execve(_COMMAND[0], _COMMAND, environment)  # noqa: S606


def run_beside(command: list[str], environment: dict[str, str]) -> None:
    """Runs a server beside this process, which has the embedded database, until SIGTERM or Ctrl-C."""
    with _beside(command, environment) as server:
        _wait(server)


@contextlib.contextmanager
def _beside(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs gunicorn beside this process; ends it with grace, after what it has begun."""
    with subprocess.Popen(command, env={**environment, "QUOTA_PARENT": str(os.getpid())}) as api:
        try:
            yield api
        finally:
            api.terminate()
            try:
                api.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                api.kill()


def _wait(api: subprocess.Popen[bytes]) -> None:
    """Waits for SIGTERM, Ctrl-C, or the end of the server. Errors: `Unavailable` when that ended by itself."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(0.2):
        if api.poll() is not None:
            raise Unavailable(f"the server ended by itself with code {api.returncode}; what it said stands above")


@click.command(
    epilog=examples("quota up", "quota up --bind 127.0.0.1:9000", "quota up --detach --port 0", "quota down")
)
@DATA
@click.option("--port", type=click.IntRange(0, 65535), help="PostgreSQL also listens on this port; 0 chooses one.")
@click.option("--detach", is_flag=True, help="The database only; leave it running and return.")
@_options
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def up(
    data: Path | None,
    port: int | None,
    detach: bool,
    bind: str | None,
    workers: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run an embedded database, the HTTP API and the reaper until Ctrl-C.

    The schema is brought to this release. Shows the addresses and, the first time, a token.
    """
    target, screen = embedded_target(data), Screen(as_json)
    if detach and (bind, workers, threads) != (None, None, None):
        raise click.UsageError("--detach runs no API; leave --bind, --workers and --threads out")
    from quota.embedded import EmbeddedServer, start_detached

    folder = target.settings.data_dir
    if detach:
        start_detached(folder, tcp_port=port)
    with EmbeddedServer(folder, tcp_port=port) as server:
        answer = _prepared(server, target, screen, port)
        if detach:
            screen.document(answer)
            _tell(screen, answer, data)
            return
        with opened(Target(target.settings, server.url, embedded=False), screen, None) as session:
            _run(session, screen, answer, data, bind, workers, threads)


def _prepared(server: Any, target: Target, screen: Screen, port: int | None) -> dict[str, Any]:
    """Brings the schema to this release; returns what there is to say of the server."""
    from quota import migrate as migrations

    folder = target.settings.data_dir
    before = migrations.current(server.url)
    if before != migrations.head() and (before is None or before in migrations.revisions()):
        migrations.upgrade(server.url, report=screen.note)
    migrations.require_head(server.url)
    answer = {"data": folder, "url": server.url, "version": server.version, "revision": migrations.head()}
    if port is not None:
        answer |= {"tcp_url": re.sub(":[^:@]*@", "@", server.tcp_url), "password_file": folder / "password"}
    return answer


def _tell(screen: Screen, answer: dict[str, Any], data: Path | None) -> None:
    screen.line(f"PostgreSQL {answer['version']} is up in {answer['data']}, schema {answer['revision']}")
    screen.line(f"  url:   {answer['url']}")
    if "tcp_url" in answer:
        screen.line(f"  tcp:   {answer['tcp_url']} (password in {answer['password_file']})")
    screen.line(f'  psql:  psql "{answer["url"]}"')
    given = f" --data {data.expanduser().absolute()}" if data is not None else ""
    screen.line(f"  quota: quota balance key:42{given}, and every other command")
    if "api" in answer:
        screen.line(f"  api:   {answer['api']}, for people {answer['api']}/docs")
        if "token" in answer:
            screen.line(f"  token: {answer['token']} (an owner's, shown once)")
        else:
            screen.line("  token: made before; another one: quota token create NAME --role owner")
        screen.line("  stop:  Ctrl-C")
    else:
        screen.line(f"  stop:  quota down{given}")


def _run(
    session: Session, screen: Screen, answer: dict[str, Any], data: Path | None, bind: str | None,
    workers: int | None, threads: int | None,
) -> None:  # fmt: skip
    from quota.admin import serving

    if not session.call(pages.tokens(session.tenant, shared=True, most=1)):
        answer["token"] = make_token(session, "first token", "owner", None)[1]
    answer["api"] = f"http://{bind or os.environ.get('QUOTA_BIND', '').strip() or serving.DEFAULT_BIND}"
    stop = threading.Event()

    def report(done: Reaped | Unavailable) -> None:
        if isinstance(done, Unavailable):
            screen.note(f"quota: {done}; the next sweep tries again")

    sweeper = threading.Thread(target=reaper.run, args=(session.client, _REAP_S, stop, report), daemon=True)
    with _beside(_COMMAND, _environment(session.url, bind, workers, threads)) as api:
        sweeper.start()
        try:
            _await_ready(answer["api"], api)
            screen.document(answer)
            _tell(screen, answer, data)
            sys.stdout.flush()
            _wait(api)
        finally:
            stop.set()
    sweeper.join(_STOP_S)


def _await_ready(address: str, api: subprocess.Popen[bytes]) -> None:
    import urllib.request

    deadline = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/v1/health/live", timeout=2).close()  # noqa: S310 - our own address
            return
        if api.poll() is not None:
            raise ConfigError(f"the API did not start on {address}; what it said stands above. --bind chooses another")
        if time.monotonic() > deadline:
            raise Unavailable(f"the API did not answer on {address} within {_READY_S} s")
        time.sleep(0.05)
