"""The embedded PostgreSQL: a server of one's own in a folder, started at the first use and stopped after the last.

    with EmbeddedServer(Path("/home/me/.local/share/quota-ledger")) as server:
        psycopg.connect(server.url)

Processes that name the same folder share one server. It runs under a *keeper* (`_pgwatch.py`), a small process of
its own, so no user's death takes it down under the others, and the last user's death, SIGKILL included, ends it.
Everything is settled by flock, which the kernel releases when a process ends, however it ends:

| file in the folder | lock | held by |
|---|---|---|
| `quota.lock` | exclusive | who starts or stops the server, for that long: the mutex of all the rest |
| `quota.users` | shared | every user, as long as it uses the server; the keeper stops when it can have it alone |
| `quota.keeper` | exclusive | the keeper, all its life |
| `quota.server` | exclusive | every process of the server, by inheritance |

`quota.json` (how to reach it) exists only while the server answers, `quota.detached` keeps it up without users, and
`quota.stop` asks the keeper to stop it whoever uses it. The cluster is in `postgres/`, its log in `server.log`.
See docs/decisions/0002-embedded-server.md for what was tried and why this won.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

if sys.platform == "win32":  # pragma: no cover
    raise ImportError("the embedded server needs Linux or macOS; set QUOTA_DATABASE_URL to a running server")

import fcntl
import pwd
import signal

from quota import _pgwatch
from quota._pgbin import Binaries, BinariesError, blocked_folder, executable_by, find_binaries
from quota._pgwatch import open_lock, try_lock

__all__ = ["EmbeddedError", "EmbeddedServer", "Status", "start", "start_detached", "status", "stop_server"]

_WAIT_S = 0.02
_STOP_TIMEOUT_S = _pgwatch.STOP_S + 10
_NEW_CLUSTER_BYTES = 128 << 20
_START_BYTES = 24 << 20
_PORT = 5432
_SETTING_NAME = re.compile(r"[a-z_][a-z0-9_.]*")

_SETTINGS = {
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    "cluster_name": "quota-ledger",
    "max_connections": "200",
}
# For tests: a crash of the machine may lose everything, a crash of the server loses nothing.
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedError(RuntimeError):
    """The embedded server cannot be had. The message names the folder, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a folder's server without touching it.

    Fields:
        data_dir: the folder.
        running: a keeper lives (the server is up, starting or stopping).
        detached: it stays up without users.
        url: how to connect; None while it does not answer.
        version: major version of the server or, when none runs, of its data; None when there is none.
    """

    data_dir: Path
    running: bool
    detached: bool
    url: str | None
    version: int | None


class EmbeddedServer:
    """One process's use of the server of a folder: `start()` to `stop()`, or a `with` block.

    Arguments:
        data_dir: the folder; made if absent. Several processes (and several objects) may name the same one.
        durable: False turns fsync off, for tests. A server that others run without is refused to who asks for it.
        settings: further settings of PostgreSQL (name to value), used when this call is the one that starts it.
        tcp_port: also listen on this port of 127.0.0.1, with a password (`tcp_url`); 0 chooses a free one.
        timeout_s: how long `start()` waits, in seconds; recovery after a crash can take long.

    After a fork the child shares the parent's use: the server stays until both are gone, and `stop()` in the child
    only gives up the child's share.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        tcp_port: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.data_dir = Path(data_dir).expanduser().resolve()
        self.durable = durable
        self.settings = dict(settings or {})
        self.tcp_port = tcp_port
        self.timeout_s = timeout_s
        self._users_fd: int | None = None
        self._owner_pid = 0
        self._state: dict[str, Any] = {}
        for name in self.settings:
            if _SETTING_NAME.fullmatch(name) is None:
                raise EmbeddedError(f'"{name}" is not the name of a PostgreSQL setting; write it as in postgresql.conf')
        if tcp_port is not None and not 0 <= tcp_port < 65536:
            raise EmbeddedError(f"tcp_port {tcp_port} is not 0 to 65535; 0 chooses a free one")

    @property
    def url(self) -> str:
        """The `postgresql://` URL over the Unix socket: user and database `quota`, no password needed."""
        return _socket_url(self._running_state())

    @property
    def tcp_url(self) -> str:
        """The `postgresql://` URL over TCP, password included, for workers in other languages on this machine.

        Errors: `EmbeddedError` when the server was started without `tcp_port`.
        """
        state = self._running_state()
        if not state["listen"]:
            raise EmbeddedError(f"the server in {self.data_dir} has no TCP port; start it with tcp_port")
        password = (self.data_dir / "password").read_text(encoding="ascii").strip()
        return f"postgresql://quota:{password}@127.0.0.1:{state['port']}/quota"

    @property
    def version(self) -> int:
        """The server's major version."""
        return int(self._running_state()["version"])

    def _running_state(self) -> dict[str, Any]:
        if self._users_fd is None:
            raise EmbeddedError(f"the server in {self.data_dir} is not in use here; call start() first")
        return self._state

    def start(self, *, detached: bool = False) -> Self:
        """Uses the folder's server, starting it if need be; returns when it answers. Repeated calls do nothing.

        Arguments:
            detached: let it outlive its users, until `stop_server`.

        Errors: `EmbeddedError`.
        """
        if self._users_fd is not None:
            return self
        deadline = time.monotonic() + self.timeout_s
        home, user = _prepared_home(self.data_dir)
        with _explained(home), _mutex(home, user, deadline):
            users_fd = _open(home / "quota.users", user)
            try:
                fcntl.flock(users_fd, fcntl.LOCK_SH)  # waits for nobody: alone it is only held under the mutex
                self._state = self._find_or_launch(home, user, deadline)
                if detached:
                    os.close(_open(home / "quota.detached", user))
                if self._state["listen"]:
                    _ensure_password(home, user, _socket_url(self._state))
            except BaseException:
                os.close(users_fd)
                raise
        self._users_fd, self._owner_pid = users_fd, os.getpid()
        return self

    def _find_or_launch(self, home: Path, user: _User | None, deadline: float) -> dict[str, Any]:
        """Returns the state of a server that answers. Under the mutex."""
        while True:
            keeper_fd = _open(home / "quota.keeper", user)
            try:
                if try_lock(keeper_fd, fcntl.LOCK_EX):
                    _await_former_server(home, user, deadline)
                    (home / "quota.json").unlink(missing_ok=True)
                    self._launch(home, user, keeper_fd, deadline)
            finally:
                os.close(keeper_fd)
            state = _read_state(home)
            if state is not None:
                self._must_suit(state)
                return state
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"the server in {home} did not answer within {self.timeout_s:g} s; its log is {home}/server.log"
                )
            time.sleep(_WAIT_S)

    def _must_suit(self, state: dict[str, Any]) -> None:
        if self.durable and not state["durable"]:
            raise EmbeddedError(
                f"the server in {self.data_dir} runs without fsync (a test started it), so it keeps no promise; "
                "wait until that ends, or choose another folder"
            )
        if self.tcp_port is not None and (not state["listen"] or self.tcp_port not in (0, state["port"])):
            where = f"on port {state['port']}" if state["listen"] else "without a TCP port"
            raise EmbeddedError(
                f"the server in {self.data_dir} already runs {where}; stop it first to have it on port {self.tcp_port}"
            )

    def _launch(self, home: Path, user: _User | None, keeper_fd: int, deadline: float) -> None:
        """Starts a keeper, which inherits `keeper_fd` and so its lock, and waits for its report."""
        binaries = _binaries_for(home, user)
        new = not (home / "postgres/PG_VERSION").exists()
        _must_have_space(home, new=new)
        if new:
            _must_have_a_name(user.uid if user else os.geteuid())
        port = _free_port() if self.tcp_port == 0 else self.tcp_port or _PORT
        order = {
            "home": str(home),
            "bin": str(binaries.folder),
            "version": binaries.major,
            "uid": user.uid if user else None,
            "gid": user.gid if user else None,
            "port": port,
            "listen": "" if self.tcp_port is None else "127.0.0.1",
            "durable": self.durable,
            "settings": {**_SETTINGS, **({} if self.durable else _NOT_DURABLE), **self.settings},
        }
        # -I -S: the keeper needs the standard library only, starts in a few hundredths of a second, and reads no
        # file of the caller's while it is still root.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", _pgwatch.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(keeper_fd,),
            cwd="/",
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(order).encode())
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else b"{}"
        report = json.loads(line) if line else {"error": "its keeper ended without a word"}
        if "error" in report:
            tail = f"\nThe end of {home}/server.log:\n{report['log']}" if report.get("log") else ""
            raise EmbeddedError(f"the embedded PostgreSQL in {home} did not start: {report['error']}{tail}")

    def stop(self) -> None:
        """Gives the server up; the last one out waits until it is down. Repeated calls do nothing."""
        if self._users_fd is None:
            return
        os.close(self._users_fd)
        self._users_fd = None
        if os.getpid() == self._owner_pid:
            # Should this fail or be interrupted, the keeper does the same a moment later.
            with contextlib.suppress(EmbeddedError):
                _stop_if_unused(self.data_dir)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    data_dir: Path | str,
    *,
    durable: bool = True,
    settings: Mapping[str, str] | None = None,
    tcp_port: int | None = None,
    timeout_s: float = 60.0,
) -> EmbeddedServer:
    """Uses the folder's server until `stop()` or the end of this process; arguments and errors: `EmbeddedServer`."""
    return EmbeddedServer(data_dir, durable=durable, settings=settings, tcp_port=tcp_port, timeout_s=timeout_s).start()


def start_detached(
    data_dir: Path | str,
    *,
    settings: Mapping[str, str] | None = None,
    tcp_port: int | None = None,
    timeout_s: float = 60.0,
) -> Status:
    """Starts the folder's server so that it outlives this process, until `stop_server` (`quota up`, `quota down`).

    A server that runs already becomes detached. Result: its status. Errors: `EmbeddedError`.
    """
    server = EmbeddedServer(data_dir, settings=settings, tcp_port=tcp_port, timeout_s=timeout_s)
    server.start(detached=True)
    server.stop()
    return status(data_dir)


def stop_server(data_dir: Path | str, *, force: bool = False, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
    """Ends a detached server: at once when nobody uses it, else when the last user leaves.

    Arguments:
        data_dir: the folder.
        force: stop it now, under its users. Their open transactions are rolled back, nothing committed is lost.
        timeout_s: how long to wait for the shutdown, in seconds.

    Result: True when no server runs there any more (or never did), False when users still keep it up.
    Errors: `EmbeddedError` when it does not stop in time, or the folder belongs to another user.
    """
    return _stop_if_unused(Path(data_dir).expanduser().resolve(), detached_too=True, force=force, timeout_s=timeout_s)


def status(data_dir: Path | str) -> Status:
    """Reports on a folder's server; starts and changes nothing. Errors: `EmbeddedError` when it cannot be read."""
    home = Path(data_dir).expanduser().resolve()
    with _explained(home):
        running = _is_held(home / "quota.keeper")
        state = _read_state(home) if running else None
        version = int(state["version"]) if state else _data_version(home)
        return Status(
            data_dir=home,
            running=running,
            detached=running and (home / "quota.detached").exists(),
            url=_socket_url(state) if state else None,
            version=version,
        )


# -- locks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _User:
    """Who the server runs as when root asks for it."""

    uid: int
    gid: int
    name: str


def _open(path: Path, user: _User | None) -> int:
    """Opens a lock file; one that root makes belongs to the server's user, whose keeper opens it too."""
    fd = open_lock(path)
    if user is not None and os.fstat(fd).st_uid == 0:
        os.fchown(fd, user.uid, user.gid)
    return fd


def _is_held(path: Path) -> bool:
    """Whether somebody holds the lock file; made for looking, so it makes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _mutex(home: Path, user: _User | None, deadline: float) -> Iterator[None]:
    """Holds `quota.lock`. Errors: `EmbeddedError` when others hold it past the deadline (time.monotonic)."""
    fd = _open(home / "quota.lock", user)
    try:
        while not try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise EmbeddedError(f"another process has been starting or stopping the server in {home} for too long")
            time.sleep(_WAIT_S)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(home: Path) -> Iterator[None]:
    """Turns the system's refusals into errors that say what to do."""
    try:
        yield
    except BinariesError as error:
        raise EmbeddedError(str(error)) from error
    except PermissionError as error:
        raise EmbeddedError(
            f"no permission for {error.filename or home}: {error.strerror}; "
            "run as the user who owns the folder, or choose another (QUOTA_DATA_DIR)"
        ) from error
    except OSError as error:
        raise EmbeddedError(
            f"{error.filename or home}: {error.strerror}; free it, or choose another (QUOTA_DATA_DIR)"
        ) from error


def _stop_if_unused(
    home: Path, *, detached_too: bool = False, force: bool = False, timeout_s: float = _STOP_TIMEOUT_S
) -> bool:
    """Stops the server when nobody uses it (or by force); returns whether it is down."""
    deadline = time.monotonic() + timeout_s
    keeper, server = home / "quota.keeper", home / "quota.server"
    with _explained(home):
        if not _is_held(keeper) and not _is_held(server):
            return True
        user = _server_user(home)
        with _mutex(home, user, deadline):
            detached = home / "quota.detached"
            if detached_too:
                detached.unlink(missing_ok=True)
            users_fd = _open(home / "quota.users", user)
            try:
                if not force and (detached.exists() or not try_lock(users_fd, fcntl.LOCK_EX)):
                    return False
                os.close(_open(home / "quota.stop", user))
                while _is_held(keeper) or _is_held(server):
                    if time.monotonic() > deadline:
                        raise EmbeddedError(f"the server in {home} did not stop in time; see {home}/server.log")
                    time.sleep(_WAIT_S)
                (home / "quota.stop").unlink(missing_ok=True)
            finally:
                os.close(users_fd)
    return True


def _await_former_server(home: Path, user: _User | None, deadline: float) -> None:
    """Waits out a server whose keeper is gone. Linux ends it by itself; elsewhere it has to be told."""
    told = False
    while _is_held(home / "quota.server"):
        if not told and user is None and sys.platform != "linux":
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int((home / "postgres/postmaster.pid").read_text(encoding="utf-8").splitlines()[0])
                os.kill(pid, signal.SIGINT)
            told = True
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"a server without a keeper still runs in {home}; stop it (pg_ctl stop -D {home}/postgres)"
            )
        time.sleep(_WAIT_S)


# -- the folder -----------------------------------------------------------------------------------------------------


def _server_user(home: Path) -> _User | None:
    """Returns who the server runs as: None for ourselves; for root the folder's owner or, for a new one, nobody."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        owner = home.stat()
        if owner.st_uid != 0:
            return _User(owner.st_uid, owner.st_gid, str(owner.st_uid))
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedError(
            'PostgreSQL refuses to run as root and there is no user "nobody"; '
            "run as a normal user, or set QUOTA_DATABASE_URL"
        ) from None
    return _User(nobody.pw_uid, nobody.pw_gid, "nobody")


def _prepared_home(home: Path) -> tuple[Path, _User | None]:
    """Makes or checks the folder: ours, private, and within reach of who the server runs as."""
    with _explained(home):
        if home.exists() and not home.is_dir():
            raise EmbeddedError(f"{home} is not a folder; choose another (QUOTA_DATA_DIR)")
        user = _server_user(home)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _must_be_ours(home)
        if user is not None and (blocked := blocked_folder(home.parent, user.uid, user.gid)) is not None:
            raise EmbeddedError(
                f"PostgreSQL refuses to run as root, and {user.name}, whom it runs as instead, may not enter "
                f"{blocked}; choose a folder outside of it (QUOTA_DATA_DIR=/var/lib/quota-ledger), "
                "or run as a normal user"
            )
        if user is not None and home.stat().st_uid == 0:
            os.chown(home, user.uid, user.gid)
        if stat.S_IMODE(home.stat().st_mode) != 0o700:
            home.chmod(0o700)
    return home, user


def _must_be_ours(home: Path) -> None:
    content = {entry.name for entry in home.iterdir()}
    if "PG_VERSION" in content:
        raise EmbeddedError(
            f"{home} is a PostgreSQL data folder that quota did not make; set QUOTA_DATABASE_URL to its server, "
            "or choose another folder (QUOTA_DATA_DIR)"
        )
    if content and "quota.lock" not in content:
        raise EmbeddedError(
            f'{home} is not empty ("{min(content)}") and was not made by quota; choose an empty or new folder '
            "(QUOTA_DATA_DIR)"
        )
    if home.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH):
        raise EmbeddedError(f"{home} is shared with other users; choose a folder of your own (QUOTA_DATA_DIR)")


def _data_version(home: Path) -> int | None:
    try:
        return int((home / "postgres/PG_VERSION").read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def _binaries_for(home: Path, user: _User | None) -> Binaries:
    binaries = find_binaries(_data_version(home))
    return binaries if user is None else executable_by(binaries, user.uid, user.gid)


def _must_have_space(home: Path, *, new: bool) -> None:
    volume = os.statvfs(home)
    free, needed = volume.f_bavail * volume.f_frsize, _NEW_CLUSTER_BYTES if new else _START_BYTES
    if free < needed:
        raise EmbeddedError(
            f"the disk is full: {home} has {free >> 20} MiB left and the server needs {needed >> 20} MiB to start; "
            "free some space, or choose a folder on another disk (QUOTA_DATA_DIR)"
        )


def _must_have_a_name(uid: int) -> None:
    """In a container any number may be the user; initdb looks its name up and fails without one."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        raise EmbeddedError(
            f"user {uid} has no name on this machine (no line in /etc/passwd), which initdb needs; "
            "run as a user who has one, or set QUOTA_DATABASE_URL"
        ) from None


def _read_state(home: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((home / "quota.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(state, dict)
    return state


def _socket_url(state: Mapping[str, Any]) -> str:
    return f"postgresql://quota@/quota?host={quote(state['socket_dir'])}&port={state['port']}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ensure_password(home: Path, user: _User | None, url: str) -> None:
    """Gives the TCP role a password, once, kept in `password` beside the data (mode 0600). Under the mutex."""
    import psycopg  # only who listens on TCP needs it here
    from psycopg import sql

    fd = _open(home / "password", user)
    with open(fd, "r+", encoding="ascii") as file:  # noqa: PTH123 - opened above, never through a link
        if file.read().strip():
            return
        password = secrets.token_urlsafe(24)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("ALTER ROLE quota PASSWORD {}").format(sql.Literal(password)))
        file.seek(0)
        file.write(password + "\n")
