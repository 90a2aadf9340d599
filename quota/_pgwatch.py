"""The keeper of one embedded server: a small process that starts PostgreSQL and stops it when nobody uses it.

Run by path, with the standard library alone (`python -I -S _pgwatch.py`), by `quota.embedded`, which explains the
locks. It is the only code that runs `initdb` and `postgres`, and it does so as the server's own user: started by
root, it gives root up before it touches a file.

Speaks one line of JSON on its standard output, `{"ready": …}` or `{"error": …, "log": …}`, then nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import locale
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

PERIOD_S = 0.1
# A fast shutdown writes a checkpoint; past this the immediate one follows, which the next start recovers from.
STOP_S = 60.0
LOG_MAX_BYTES = 8 << 20
LOG_TAIL_BYTES = 2000
# sun_path holds 104 bytes on macOS and 108 on Linux, the closing NUL included; PostgreSQL adds ".lock" to no bind.
SOCKET_PATH_MAX = 103
PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """The server cannot be started; the text is for the person who asked."""


def try_lock(fd: int, operation: int) -> bool:
    """Takes an flock without waiting; returns whether it was free."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_lock(path: Path) -> int:
    """Opens a lock file, made if absent, never through a symbolic link; returns the descriptor, closed by exec."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replaces the state file in one step, so that a reader sees the old or the new one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(state), encoding="utf-8")
    fresh.replace(path)


class Keeper:
    """One embedded server from its start to its end.

    Arguments:
        order: what `quota.embedded` asks for: home, bin, uid and gid (null: stay), port, listen (addresses),
            settings, durable, version.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.home = Path(order["home"])
        self.data = self.home / "postgres"
        self.log = self.home / "server.log"
        self.bin = Path(order["bin"])
        self.server: subprocess.Popen[bytes] | None = None
        self.socket_dir: Path | None = None
        self.stopping = False

    # -- start ------------------------------------------------------------------------------------------------------

    def become_server_user(self) -> None:
        """Gives up root for good. PostgreSQL refuses it, and nothing below needs it."""
        uid, gid = self.order["uid"], self.order["gid"]
        if uid is not None:
            try:
                os.setgroups([])
                os.setgid(gid)
                os.setuid(uid)
            except OSError as error:
                raise StartError(
                    f"cannot become user {uid}, which the server has to run as ({error}); "
                    "run as a normal user, or set QUOTA_DATABASE_URL"
                ) from error
        os.umask(0o077)
        os.chdir("/")

    def environment(self) -> dict[str, str]:
        """Returns a clean environment: PGPORT, PGDATA and the locale of the caller would change the server."""
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
        return {"PATH": "/usr/bin:/bin", "HOME": "/", "LC_ALL": "C", "TZ": "UTC", **kept}

    def initialise(self) -> None:
        """Makes the cluster and the database, beside its place, and moves it there when it is whole."""
        fresh = self.home / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        if self.order["version"] >= 17:
            collation = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        else:
            collation = [f"--locale={_utf8_locale()}"]
        command: list[str | Path] = [self.bin / "initdb", "-D", fresh, "-U", "quota", "-E", "UTF8", *collation]
        command += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]
        if not self.order["durable"]:
            command.append("--no-sync")
        self.run(command)
        (fresh / "pg_hba.conf").write_text(
            "# The socket lies in a folder that only the server's user can enter: being there is the proof.\n"
            "local all all trust\n"
            "host all all 127.0.0.1/32 scram-sha-256\n",
            encoding="utf-8",
        )
        # Single-user mode: the database is there before anybody can connect, so nobody ever meets a server without it.
        fsync = "on" if self.order["durable"] else "off"
        self.run(
            [self.bin / "postgres", "--single", "-D", fresh, "-c", f"fsync={fsync}", "postgres"],
            stdin="CREATE DATABASE quota\n",
        )
        fresh.rename(self.data)

    def run(self, command: list[str | Path], stdin: str = "") -> None:
        """Runs one program of PostgreSQL to its end; its output goes to the log. Errors: StartError."""
        with self.log.open("ab") as log:
            done = subprocess.run(
                command, input=stdin.encode(), stdout=log, stderr=log, env=self.environment(), check=False
            )
        if done.returncode != 0:
            raise StartError(f"{Path(command[0]).name} failed with exit code {done.returncode}")

    def choose_socket_dir(self) -> Path:
        """Returns the home itself, where only the server's user can enter, or a short folder as private as it."""
        name = f".s.PGSQL.{self.order['port']}"
        if len(os.fsencode(self.home / name)) <= SOCKET_PATH_MAX:
            return self.home
        for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108 - mkdtemp is private
            if len(os.fsencode(parent)) + len("/quota-XXXXXXXX/") + len(name) <= SOCKET_PATH_MAX:
                self.socket_dir = Path(tempfile.mkdtemp(prefix="quota-", dir=parent))
                return self.socket_dir
        raise StartError(f"the path {self.home / name} is too long for a socket; choose a shorter QUOTA_DATA_DIR")

    def launch(self) -> None:
        """Starts postgres and waits until it answers. Errors: StartError."""
        socket_dir = self.choose_socket_dir()
        settings = {
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
            "listen_addresses": self.order["listen"],
            "port": str(self.order["port"]),
            **self.order["settings"],
        }
        command: list[str | Path] = [self.bin / "postgres", "-D", self.data]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        # Every process of the server inherits this lock, so "locked" means "some part of it is still alive",
        # whatever became of this process or of a pid in a file.
        server_lock = open_lock(self.home / "quota.server")
        if not try_lock(server_lock, fcntl.LOCK_EX):
            raise StartError("a former server of this folder is still going down")
        prctl = getattr(ctypes.CDLL(None), "prctl", None)

        def die_with_keeper() -> None:
            if prctl is not None:  # Linux: a keeper killed by SIGKILL takes the server along
                prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        with self.log.open("ab") as log:
            self.server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                pass_fds=(server_lock,),
                preexec_fn=die_with_keeper,  # noqa: PLW1509 - this process has one thread
            )
        os.close(server_lock)
        self.wait_ready()
        # Only now: a state file together with a living keeper means that the server answers.
        state = {name: self.order[name] for name in ("port", "listen", "durable", "version")}
        write_state(self.home / "quota.json", {"socket_dir": str(socket_dir), **state})

    def wait_ready(self) -> None:
        """Waits for line 8 of postmaster.pid to say "ready": recovery may take long, so there is no deadline here."""
        assert self.server is not None
        pid_file = self.data / "postmaster.pid"
        while not self.stop_wanted():
            if self.server.poll() is not None:
                raise StartError(f"postgres ended with exit code {self.server.returncode}")
            with contextlib.suppress(FileNotFoundError):
                lines = pid_file.read_text(encoding="utf-8").splitlines()
                if len(lines) >= 8 and lines[0] == str(self.server.pid) and lines[7].strip() == "ready":
                    return
            time.sleep(0.01)
        raise StartError("stopped while starting")

    # -- run and stop -----------------------------------------------------------------------------------------------

    def stop_wanted(self) -> bool:
        """Whether a signal or the file `quota.stop` asks for the end. A file, because a pid in a file goes stale."""
        return self.stopping or (self.home / "quota.stop").exists()

    def wait_until_unused(self) -> None:
        """Returns when the server has ended, a stop was asked for, or no user is left.

        When no user is left this process holds the mutex, and keeps it until it ends: whoever comes now waits until
        the server is down, then starts it anew, instead of meeting one that is going.
        """
        assert self.server is not None
        mutex, users = open_lock(self.home / "quota.lock"), open_lock(self.home / "quota.users")
        while not self.stop_wanted() and self.server.poll() is None:
            if not (self.home / "quota.detached").exists() and try_lock(mutex, fcntl.LOCK_EX):
                if try_lock(users, fcntl.LOCK_EX):
                    return
                fcntl.flock(mutex, fcntl.LOCK_UN)
            time.sleep(PERIOD_S)

    def shut_down(self) -> None:
        """Stops postgres (fast, and at once if that takes too long) and removes what only lives with it."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGINT)
            try:
                self.server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.server.send_signal(signal.SIGQUIT)
                self.server.wait()
        if self.socket_dir is not None:
            shutil.rmtree(self.socket_dir, ignore_errors=True)
        for name in ("quota.json", "quota.detached", "quota.stop"):
            with contextlib.suppress(OSError):
                (self.home / name).unlink(missing_ok=True)

    def handle_signal(self, _signum: int, _frame: object) -> None:
        """Asks the loops to end; they look every tenth of a second."""
        self.stopping = True

    def log_tail(self) -> str:
        """Returns the end of the server's log, for the person whose start failed."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                return log.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def start(self) -> None:
        """Everything up to a server that answers. Errors: StartError, OSError."""
        self.become_server_user()
        (self.home / "quota.stop").unlink(missing_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_MAX_BYTES:
            self.log.replace(self.log.with_name("server.log.1"))
        # A mark that outlived its server (power failure) must not keep this one up; who asked sets its own later.
        (self.home / "quota.detached").unlink(missing_ok=True)
        if not (self.data / "PG_VERSION").exists():
            self.initialise()
        self.launch()


def _utf8_locale() -> str:
    """Returns C.UTF-8 where the system has it: byte order and UTF-8 classes; else C. Servers before 17 have no own."""
    for name in ("C.UTF-8", "C.utf8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            return name
    return "C"


def _say(answer: dict[str, Any]) -> None:
    """Reports to the process that asked; it may have been killed meanwhile, which is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(answer).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


def main() -> NoReturn:
    """Reads the order from standard input, runs the server to its end."""
    keeper = Keeper(json.load(sys.stdin))
    # Twice removed from whoever asked: no child that they would have to wait for, no terminal whose Ctrl-C arrives.
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, keeper.handle_signal)
    try:
        try:
            keeper.start()
        except Exception as error:  # whatever it is, the one who waits has to hear it
            keeper.shut_down()
            _say({"error": str(error) or repr(error), "log": keeper.log_tail()})
            sys.exit(1)
        _say({"ready": True})
        keeper.wait_until_unused()
    finally:
        keeper.shut_down()
    sys.exit(0)


if __name__ == "__main__":
    main()
