"""Every way a command can end other than well: one line for people, one object for programs, one stable exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass

import click
import psycopg

from quota.config import ConfigError
from quota.errors import (
    CostError,
    Fate,
    Misuse,
    NotAllowed,
    QuotaError,
    Refused,
    SchemaMismatch,
    Unavailable,
    fate,
    from_database_error,
)
from quota.trace import TraceError

__all__ = ["EXIT_CODES", "Failure", "PipeClosed", "debugging", "explained"]

OK, REFUSED, USAGE, UNAVAILABLE, SCHEMA, NOT_ALLOWED, FAULT = 0, 1, 2, 3, 4, 5, 70
INTERRUPTED, PIPE_CLOSED = 130, 141


class PipeClosed(Exception):  # noqa: N818 - nobody's error
    """Whoever read the output has gone."""


EXIT_CODES = {
    OK: "done; a reservation was granted, the books are right, the cap was held",
    REFUSED: "a refusal: no room for the reservation, violations in check, a cap not held",
    USAGE: "a mistake in the command, its values or the settings; nothing was changed",
    UNAVAILABLE: "the database is away or too slow; repeating with the same id is safe",
    SCHEMA: "the schema of the database is not the one of this release: quota migrate",
    NOT_ALLOWED: "the database login may not do this",
    FAULT: "a fault of quota itself or of the server; QUOTA_DEBUG=1 shows the traceback",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How a command ended.

    Fields:
        code: the exit code.
        name: the contract's error name, or what kind of failure it is.
        message: one line: what was wrong, with which value.
        hint: what to do about it; None when the message says so.
    """

    code: int
    name: str
    message: str
    hint: str | None = None

    @property
    def line(self) -> str:
        """The one line for people."""
        if not self.hint:
            return self.message
        message = self.message.rstrip(". ")
        return f"{message} {self.hint}" if message.endswith(("?", "!")) else f"{message}. {self.hint}"


def explained(error: BaseException) -> Failure:
    """Returns what to say about an error, and the code to end with. Passwords stay out of it."""
    known = _usage(error) or _ours(error) or _database(error)
    if known is None:
        known = Failure(FAULT, "fault", f"{type(error).__name__}: {error}", "QUOTA_DEBUG=1 shows where")
    return Failure(known.code, known.name, _one_line(known.message), known.hint and _one_line(known.hint))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _usage(error: BaseException) -> Failure | None:
    match error:
        case click.UsageError():
            path = error.ctx.command_path if error.ctx is not None else "quota"
            return Failure(USAGE, "usage", error.format_message(), f"See: {path} --help")
        case click.ClickException():
            return Failure(USAGE, "usage", error.format_message())
        case ConfigError() | TraceError():
            return Failure(USAGE, "invalid_argument", str(error))
        case KeyboardInterrupt() | click.Abort():
            return Failure(INTERRUPTED, "interrupted", "interrupted; what was committed stays, open holds expire")
        case _:
            return None


def _ours(error: BaseException) -> Failure | None:
    match error:
        case Refused():
            return Failure(REFUSED, "refused", str(error))
        case Misuse():
            return Failure(USAGE, error.name, error.message, error.hint)
        case CostError():
            return Failure(USAGE, error.name, error.message)
        case SchemaMismatch():
            return Failure(SCHEMA, "schema_mismatch", str(error))
        case NotAllowed():
            return Failure(
                NOT_ALLOWED, "not_allowed", str(error), "Use a login with the role that may, or ask its owner"
            )
        case Unavailable():
            return Failure(UNAVAILABLE, "unavailable", str(error))
        case QuotaError():
            return Failure(FAULT, "fault", str(error))
        case _:
            return Failure(UNAVAILABLE, "unavailable", str(error)) if _is_embedded(error) else None


def _is_embedded(error: BaseException) -> bool:
    try:
        from quota.embedded import EmbeddedError
    except ImportError:  # this system has no embedded server
        return False
    return isinstance(error, EmbeddedError)


def _database(error: BaseException) -> Failure | None:
    """The driver's own errors, alone or as SQLAlchemy wraps them in a migration."""
    cause = error if isinstance(error, psycopg.Error) else getattr(error, "orig", None)
    if not isinstance(cause, psycopg.Error):
        return None
    ours = from_database_error(cause)
    if ours is not None:
        return _ours(ours)
    if fate(cause) is not Fate.REJECTED:
        return Failure(UNAVAILABLE, "unavailable", f"the database is away or busy: {cause}")
    return Failure(FAULT, "fault", f"the database reports {cause.sqlstate or 'an error'}: {cause}")


def debugging() -> bool:
    """True when the environment asks for tracebacks."""
    return os.environ.get("QUOTA_DEBUG", "") not in ("", "0")
