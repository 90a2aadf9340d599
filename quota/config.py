"""The environment, read once: `Settings.from_env()` gives one frozen value or one clear `ConfigError`.

| variable | meaning | default |
|---|---|---|
| `QUOTA_DATABASE_URL` | `postgresql://` URL or libpq connection string | none: the embedded server |
| `QUOTA_DATA_DIR` | folder of the embedded server, an absolute path | see `default_data_dir` |
| `QUOTA_TENANT` | tenant of calls that name none | `default` |
| `QUOTA_TIMEOUT_S` | deadline of one call, in seconds, more than 0 | `2` |
| `QUOTA_POOL_MAX` | connections per pool, 1 to 1000 | `8` |
| `QUOTA_PREPARE_THRESHOLD` | uses before a statement is prepared; `none`: never (for old poolers) | `5` |
| `QUOTA_FAIL_OPEN` | let calls pass while the database is away | `false` |

A variable that is set but empty counts as not set.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlsplit

__all__ = ["ConfigError", "Settings", "default_data_dir", "redact_url"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TIMEOUT_MAX_S = Decimal(3600)
_POOL_MAX = 1000
_PREPARE_MAX = 1_000_000
_NAME_MAX = 200
_SECRET = "***"  # noqa: S105 - what stands in a secret's place

# A password may hold an unescaped "@", "/" or "?", so it is taken to end at the very last "@" of the text.
# The scheme may have been forgotten, which is one of the errors whose message shows the text.
_URL_PASSWORD = re.compile(r"^([a-zA-Z][\w+.-]*://[^:]*:|(?![\w+.-]+://)[^:=]*:).*@", re.DOTALL)
_QUERY_SECRET = re.compile(r"([?&;](?:password|passwd|sslpassword|passfile)=)[^&#]*", re.IGNORECASE)
_DSN_SECRET = re.compile(r"((?:^|\s)(?:password|sslpassword)\s*=\s*)('(?:[^'\\]|\\.)*'?|(?:\\.|\S)*)", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting is wrong. The message names the variable, its value (never a password) and the remedy."""


def redact_url(url: str) -> str:
    """Returns `url` fit for logs and messages: passwords replaced by `***`.

    Arguments:
        url: a `scheme://` URL or a libpq connection string (`host=… password=…`), well formed or not.

    Result: the same text without the password of the user information, and without password parameters. When a
    malformed URL leaves it unclear where the password ends, more is hidden rather than less.
    """
    url = _URL_PASSWORD.sub(rf"\1{_SECRET}@", url)
    return (_QUERY_SECRET if "://" in url else _DSN_SECRET).sub(rf"\1{_SECRET}", url)


def default_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of the embedded server when `QUOTA_DATA_DIR` names none.

    Arguments:
        environ: the environment; default `os.environ`.

    Result: an absolute path, not created: `$XDG_DATA_HOME/quota-ledger`, else `~/.local/share/quota-ledger`. Root
    gets `/var/lib/quota-ledger`, because PostgreSQL refuses to run as root and the account that it runs as cannot
    reach below root's home.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_DATA_HOME", "")
    if base.startswith("/"):  # the XDG specification: a relative path is to be ignored
        return Path(base) / "quota-ledger"
    if os.geteuid() == 0:
        return Path("/var/lib/quota-ledger")
    home = environ.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path("~").expanduser()) / ".local/share/quota-ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that the environment decides, validated.

    Fields:
        database_url: `postgresql://` URL or libpq connection string; None means the embedded server.
        data_dir: folder of the embedded server (absolute).
        tenant: tenant of calls that name none.
        timeout_s: deadline of one call in seconds.
        pool_max: largest number of connections of one pool.
        prepare_threshold: uses before a statement is prepared on the server; None: never.
        fail_open: let calls pass while the database is away.
    """

    database_url: str | None = None
    data_dir: Path
    tenant: str = "default"
    timeout_s: Decimal = Decimal(2)
    pool_max: int = 8
    prepare_threshold: int | None = 5
    fail_open: bool = False

    def __repr__(self) -> str:
        """Shows the settings without the database password, so that they may be logged."""
        url = None if self.database_url is None else redact_url(self.database_url)
        return (
            f"Settings(database_url={url!r}, data_dir={str(self.data_dir)!r}, tenant={self.tenant!r}, "
            f"timeout_s={self.timeout_s}, pool_max={self.pool_max}, prepare_threshold={self.prepare_threshold}, "
            f"fail_open={self.fail_open})"
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads and validates the environment.

        Arguments:
            environ: the environment; default `os.environ`.

        Result: the settings. Errors: `ConfigError` for the first variable that is wrong.
        """
        environ = os.environ if environ is None else environ

        def get(name: str) -> str | None:
            return environ.get(name, "").strip() or None

        url, data_dir, tenant = get("QUOTA_DATABASE_URL"), get("QUOTA_DATA_DIR"), environ.get("QUOTA_TENANT") or None
        timeout_s, pool_max = get("QUOTA_TIMEOUT_S"), get("QUOTA_POOL_MAX")
        prepare, fail_open = get("QUOTA_PREPARE_THRESHOLD"), get("QUOTA_FAIL_OPEN")
        return cls(
            database_url=None if url is None else _database_url(url),
            data_dir=default_data_dir(environ) if data_dir is None else _data_dir(data_dir),
            tenant="default" if tenant is None else _tenant(tenant),
            timeout_s=Decimal(2) if timeout_s is None else _timeout_s(timeout_s),
            pool_max=8 if pool_max is None else _integer("QUOTA_POOL_MAX", pool_max, 1, _POOL_MAX, "8"),
            prepare_threshold=5 if prepare is None else _prepare_threshold(prepare),
            fail_open=False if fail_open is None else _boolean("QUOTA_FAIL_OPEN", fail_open),
        )


def _error(variable: str, value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f'{variable}: "{value}" {rule}; {remedy}')


def _database_url(value: str) -> str:
    variable, shown = "QUOTA_DATABASE_URL", redact_url(value)
    remedy = (
        "write postgresql://user:password@host:5432/database or host=… dbname=…, or unset it for the embedded server"
    )
    if "://" not in value:
        if re.match(r"\s*[a-z_]+\s*=", value) is None:
            raise _error(variable, shown, "is neither a URL nor a libpq connection string", remedy)
        return value
    scheme = value.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        if scheme.startswith(("postgresql+", "postgres+")):
            remedy = "leave the driver out: postgresql://…"
        raise _error(variable, shown, f'has the scheme "{scheme}", not postgresql', remedy)
    try:
        parts = urlsplit(value)
        hosts = parts.netloc.rpartition("@")[2]
        for host in hosts.split(","):  # libpq takes several hosts, urlsplit's own .port does not
            _, colon, port = host.rpartition("]")[2].rpartition(":")
            if colon and port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise _error(variable, shown, "has a port that is not 1 to 65535", remedy)
        parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except ConfigError:
        raise
    except ValueError:
        # from None: the library's own message may quote the URL, password and all.
        raise _error(variable, shown, "is not a well-formed URL", remedy) from None
    return value


def _data_dir(value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute() or "\0" in value:
        raise _error("QUOTA_DATA_DIR", value, "is not an absolute path", "give one that starts with / (or ~)")
    return path


def _tenant(value: str) -> str:
    proper = (
        len(value) <= _NAME_MAX
        and value == value.strip()
        and unicodedata.is_normalized("NFC", value)
        and not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in value)
    )
    if not proper:
        shown = value.encode("unicode_escape").decode("ascii")[:_NAME_MAX]
        rule = f"is not a name of 1 to {_NAME_MAX} printable characters (NFC, no white space at the ends)"
        raise _error("QUOTA_TENANT", shown, rule, "correct it, or unset it for the tenant default")
    return value


def _timeout_s(value: str) -> Decimal:
    remedy = "give seconds, such as 2 or 0.5"
    try:
        seconds = Decimal(value)
    except InvalidOperation:
        raise _error("QUOTA_TIMEOUT_S", value, "is not a number", remedy) from None
    if not (seconds.is_finite() and 0 < seconds <= _TIMEOUT_MAX_S):
        raise _error("QUOTA_TIMEOUT_S", value, f"is not more than 0 and at most {_TIMEOUT_MAX_S}", remedy)
    return seconds


def _integer(variable: str, value: str, least: int, most: int, example: str) -> int:
    # Not int(): it takes "1_000", " 7" and other scripts' digits.
    if re.fullmatch(r"[0-9]{1,9}", value) is None or not least <= int(value) <= most:
        raise _error(variable, value, f"is not a whole number from {least} to {most}", f"give one, such as {example}")
    return int(value)


def _prepare_threshold(value: str) -> int | None:
    if value.lower() == "none":
        return None
    try:
        return _integer("QUOTA_PREPARE_THRESHOLD", value, 0, _PREPARE_MAX, "5")
    except ConfigError as error:
        raise ConfigError(f"{error}, or none for poolers that cannot keep prepared statements") from None


def _boolean(variable: str, value: str) -> bool:
    lowered = value.lower()
    if lowered not in _TRUE | _FALSE:
        raise _error(variable, value, "is neither true nor false", "give true or false")
    return lowered in _TRUE
