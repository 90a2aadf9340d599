"""What can go wrong, as one tree, and the only place that knows SQLSTATEs.

- QuotaError
  - Misuse: the call was wrong and nothing changed; one subclass per error name of the contract, see `ERRORS`
  - CostError: what a call costs cannot be told: MissingCeiling, UnboundedInput, UnknownBurndown, InvalidPrice,
    MalformedUsage
  - Refused: a refusal that the caller asked to have raised (`raise_if_refused`, `hold`)
    - RunRefused: a run may not start
    - Shortage: a reservation that waited in turn, and whose time ran out
  - Unavailable: the database is away, or slower than the call's deadline
  - NotAllowed: the database login may not do this
  - SchemaMismatch: the installed schema is not the one that this release needs
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import psycopg

if TYPE_CHECKING:
    from quota.calls.answers import Reservation, Turn
    from quota.calls.runs import RunDecision

__all__ = [
    "ERRORS",
    "AlreadyExists",
    "AlreadyReleased",
    "AlreadySettled",
    "AmountOutOfRange",
    "CostError",
    "Cycle",
    "ErrorRow",
    "Expired",
    "Fate",
    "HasOpenHolds",
    "IdConflict",
    "InvalidAmount",
    "InvalidArgument",
    "InvalidCosts",
    "InvalidName",
    "InvalidPrice",
    "InvalidTtl",
    "LimitDiffers",
    "MalformedUsage",
    "MissingCeiling",
    "Misuse",
    "NoLimit",
    "NotAllowed",
    "ParentDiffers",
    "PricesOverlap",
    "QuotaError",
    "Refused",
    "Revoked",
    "RunRefused",
    "SchemaMismatch",
    "Shortage",
    "TooDeep",
    "TotalDecreased",
    "Unavailable",
    "UnboundedInput",
    "UnitMissing",
    "UnitNotHeld",
    "UnknownBurndown",
    "UnknownKey",
    "UnknownLimit",
    "UnknownReservation",
    "UnknownSubject",
    "UnknownTenant",
    "UnknownTier",
    "UnknownToken",
    "UnknownUnit",
    "UnpricedModel",
    "fate",
    "from_database_error",
    "misuse_named",
]


class QuotaError(Exception):
    """Anything that this library raises on its own account."""


class Refused(QuotaError):  # noqa: N818 - the contract's word
    """A reservation was refused and the caller asked for an exception instead of a value.

    Fields:
        refusal: the whole answer: reason, binding limit, its numbers, every violation, `retry_after_s` in seconds.
    """

    def __init__(self, refusal: Reservation) -> None:
        super().__init__(refusal)
        self.refusal = refusal

    def __str__(self) -> str:
        r = self.refusal
        if r.limit_name is None:
            where = f" ({r.limit_subject})" if r.limit_subject else ""
        else:
            where = (
                f' by limit "{r.limit_name}" of {r.limit_subject}: capacity {r.capacity} {r.unit}, '
                f"spent {r.spent}, reserved {r.reserved}, requested {r.requested}"
            )
        wait = "" if r.retry_after_s is None else f"; retry after {r.retry_after_s} s"
        return f"refused, {r.reason}{where}{wait}"


class RunRefused(Refused):
    """A run may not start.

    Fields:
        decision: the whole answer of `create_run`.
    """

    def __init__(self, decision: RunDecision) -> None:
        QuotaError.__init__(self, decision)
        self.decision = decision

    def __str__(self) -> str:
        d = self.decision
        if d.limit_name is not None:
            why = (
                f' by limit "{d.limit_name}" of {d.limit_subject}: capacity {d.capacity} {d.unit}, '
                f"available {d.available}, promised to live runs {d.promised}, requested {d.requested}"
            )
        else:
            most = "" if d.capacity is None else f": at most {d.capacity}, this would be {d.requested}"
            why = f" ({d.limit_subject}{most})" if d.limit_subject else ""
        wait = "" if d.retry_after_s is None else f"; retry after {d.retry_after_s} s"
        return f"{d.run} is refused, {d.reason}{why}{wait}"


class Shortage(Refused):
    """A reservation waited in turn until its caller's time was over: more is asked of the limit than it gives.

    That is no matter of retrying: raise the limit, ask for less (a lower `max_tokens`), or move work to another time or
    pool. A caller who asks again stands at the end of the queue.

    Fields:
        refusal: the last answer, with the binding limit and its numbers.
        ahead: how many were still ahead.
        waited_s: how long it waited, in seconds.
    """

    def __init__(self, refusal: Turn, waited_s: float) -> None:
        super().__init__(refusal)
        self.args = (refusal, waited_s)
        self.ahead = refusal.ahead
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"no room in {self.waited_s:.3g} s, {self.ahead} still ahead; last answer: {super().__str__()}"


class Unavailable(QuotaError):  # noqa: N818 - the contract's word
    """The database is away or slower than the deadline: nothing is known to be granted, so nothing may be spent.

    Fields:
        in_doubt: True when the call may have taken effect all the same. Repeating it with the same id is always safe;
            an abandoned hold returns when its time has passed.
    """

    def __init__(self, message: str, in_doubt: bool = False) -> None:
        super().__init__(message, in_doubt)
        self.message = message
        self.in_doubt = in_doubt

    def __str__(self) -> str:
        return self.message


class NotAllowed(QuotaError):  # noqa: N818 - the contract's word
    """The database login lacks the right to call this function, or to act for this tenant."""


class SchemaMismatch(QuotaError):  # noqa: N818 - the contract's word
    """The schema in the database is not the one that this release needs.

    Fields:
        current: the revision found, None when there is none or it could not be read.
        head: the revision needed, None when the caller did not look.
    """

    def __init__(self, message: str, current: str | None = None, head: str | None = None) -> None:
        super().__init__(message, current, head)
        self.message = message
        self.current = current
        self.head = head

    def __str__(self) -> str:
        return self.message


class Misuse(QuotaError):  # noqa: N818 - the contract's word
    """The call was wrong; nothing changed.

    Fields:
        name: the contract's error name, such as `unknown_subject`; every subclass has its own.
        sqlstate: its SQLSTATE.
        http_status: the status that HTTP faces answer with.
        message: what was wrong, with which value; begins with the name.
        hint: what to do about it, None when the database gave none.
    """

    name: ClassVar[str] = "misuse"
    sqlstate: ClassVar[str] = "QT000"
    http_status: ClassVar[int] = 422

    def __init_subclass__(cls, *, name: str, sqlstate: str, http_status: int) -> None:
        cls.name, cls.sqlstate, cls.http_status = name, sqlstate, http_status

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class UnknownTenant(Misuse, name="unknown_tenant", sqlstate="QT001", http_status=404):
    """No tenant has this name."""


class UnknownSubject(Misuse, name="unknown_subject", sqlstate="QT002", http_status=404):
    """No subject of the tenant has this name."""


class UnknownUnit(Misuse, name="unknown_unit", sqlstate="QT003", http_status=422):
    """The unit is not registered: not "without a limit", but a mistake."""


class UnknownLimit(Misuse, name="unknown_limit", sqlstate="QT004", http_status=404):
    """The subject has no limit of this name."""


class UnknownTier(Misuse, name="unknown_tier", sqlstate="QT005", http_status=422):
    """No tier has this name."""


class UnknownReservation(Misuse, name="unknown_reservation", sqlstate="QT006", http_status=404):
    """No reservation of the tenant has this id."""


class NoLimit(Misuse, name="no_limit", sqlstate="QT007", http_status=422):
    """A unit of the costs is covered by no limit on the lineage; unlimited is declared, never assumed."""


class UnitMissing(Misuse, name="unit_missing", sqlstate="QT008", http_status=422):
    """A required limit's unit is missing from the costs."""


class UnitNotHeld(Misuse, name="unit_not_held", sqlstate="QT009", http_status=422):
    """A total names a unit that the reservation does not hold."""


class InvalidCosts(Misuse, name="invalid_costs", sqlstate="QT010", http_status=422):
    """The costs are not a map of units to amounts, or an empty one."""


class InvalidAmount(Misuse, name="invalid_amount", sqlstate="QT011", http_status=422):
    """Not a finite decimal >= 0 with at most 12 fractional digits."""


class AmountOutOfRange(Misuse, name="amount_out_of_range", sqlstate="QT012", http_status=422):
    """10^18 or more, or more than there is to take."""


class InvalidName(Misuse, name="invalid_name", sqlstate="QT013", http_status=422):
    """Not 1 to 200 printable characters in NFC without white space at the ends, or without the kind that is due."""


class InvalidTtl(Misuse, name="invalid_ttl", sqlstate="QT014", http_status=422):
    """A time to live that is not more than 0 and at most the configured maximum."""


class InvalidArgument(Misuse, name="invalid_argument", sqlstate="QT015", http_status=422):
    """Any other argument that cannot mean anything, such as a malformed id."""


class IdConflict(Misuse, name="id_conflict", sqlstate="QT016", http_status=409):
    """The id belongs to another request."""


class AlreadySettled(Misuse, name="already_settled", sqlstate="QT017", http_status=409):
    """The reservation is settled, with other totals or beyond this operation."""


class AlreadyReleased(Misuse, name="already_released", sqlstate="QT018", http_status=409):
    """The reservation is released."""


class Expired(Misuse, name="expired", sqlstate="QT019", http_status=409):
    """The hold's time has passed; it can only be settled, finally and late."""


class TotalDecreased(Misuse, name="total_decreased", sqlstate="QT020", http_status=409):
    """A total is below what is booked: totals of a reservation only grow."""


class ParentDiffers(Misuse, name="parent_differs", sqlstate="QT021", http_status=409):
    """The subject is known under another parent; moving it is an act of its own."""


class LimitDiffers(Misuse, name="limit_differs", sqlstate="QT022", http_status=409):
    """A limit of this name has another unit, kind, period or time zone."""


class Cycle(Misuse, name="cycle", sqlstate="QT023", http_status=409):
    """The subject would become its own ancestor."""


class TooDeep(Misuse, name="too_deep", sqlstate="QT024", http_status=409):
    """The lineage would have more than 8 subjects."""


class HasOpenHolds(Misuse, name="has_open_holds", sqlstate="QT025", http_status=409):
    """Open holds stand on the subject or below it."""


class AlreadyExists(Misuse, name="already_exists", sqlstate="QT026", http_status=409):
    """The name is taken, now or in the past."""


class UnknownKey(Misuse, name="unknown_key", sqlstate="QT027", http_status=404):
    """No key has this public id."""


class UnknownToken(Misuse, name="unknown_token", sqlstate="QT028", http_status=404):
    """No token has this public id."""


class Revoked(Misuse, name="revoked", sqlstate="QT029", http_status=409):
    """The key or token is revoked, which is final."""


class UnpricedModel(Misuse, name="unpriced_model", sqlstate="QT030", http_status=422):
    """The price book has no price for the model at that time: no price, no call."""


class PricesOverlap(Misuse, name="prices_overlap", sqlstate="QT031", http_status=409):
    """Two prices of one model would be in force at the same time."""


class CostError(QuotaError):
    """What a call may cost, or did cost, cannot be told. But for `MalformedUsage` it is raised before anything is sent.

    Fields:
        name: the error's name, such as `missing_output_ceiling`.
        http_status: the status that HTTP faces answer with.
        message: what is wrong, with which value, and what to do.
    """

    name: ClassVar[str] = "cost_unknown"
    http_status: ClassVar[int] = 422

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = f"{self.name}: {message}"

    def __str__(self) -> str:
        return self.message


class MissingCeiling(CostError, name="missing_output_ceiling"):  # noqa: N818
    """The request names no ceiling on its output, or one that cannot be one; the message names the parameter."""


class UnboundedInput(CostError, name="unbounded_input"):  # noqa: N818
    """A part of the request has no bound on the tokens it costs; the message names the part."""


class UnknownBurndown(CostError, name="unknown_burndown"):  # noqa: N818
    """Nobody has said how many quota tokens an output token of this model burns."""


class InvalidPrice(CostError, name="invalid_price"):  # noqa: N818
    """A price that is no price: negative, too precise, of an unknown unit, without input or output."""


class MalformedUsage(CostError, name="malformed_usage"):  # noqa: N818
    """Usage that a provider reported and that cannot be: negative, no whole number, absurdly large."""


class ErrorRow(NamedTuple):
    """One line of the error table: the contract's name, its SQLSTATE, the class, the HTTP status."""

    name: str
    sqlstate: str
    type: type[Misuse]
    http_status: int


ERRORS: tuple[ErrorRow, ...] = tuple(
    ErrorRow(c.name, c.sqlstate, c, c.http_status) for c in sorted(Misuse.__subclasses__(), key=lambda c: c.sqlstate)
)
"""Every error name of the contract, ordered by SQLSTATE."""

_BY_SQLSTATE = {row.sqlstate: row.type for row in ERRORS}

# invalid_schema_name, undefined_table, undefined_column, undefined_function
_SCHEMA_MISSING = frozenset({"3F000", "42P01", "42703", "42883"})
_INSUFFICIENT_PRIVILEGE = "42501"

# serialization_failure, deadlock_detected, lock_not_available: the server says that nothing happened.
_ROLLED_BACK = frozenset({"40001", "40P01", "55P03"})
# statement_completion_unknown, read_only_sql_transaction (this server is no primary any more),
# admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped, idle_session_timeout
_CONNECTION_USELESS = frozenset({"40003", "25006", "57P01", "57P02", "57P03", "57P04", "57P05"})
_CONNECTION_EXCEPTION = "08"
# insufficient_resources (too many connections, disk full), query_canceled: away for now, and nothing happened.
_OVERLOADED = ("53", "57014")


class Fate(Enum):
    """What is known about a statement that failed, and so what may be done about it."""

    ROLLED_BACK = "rolled back"
    """Nothing happened; the same statement may well succeed at once."""
    IN_DOUBT = "in doubt"
    """The connection is lost; the statement may have taken effect or not."""
    OVERLOADED = "overloaded"
    """Nothing happened; the server cannot serve it now."""
    REJECTED = "rejected"
    """Nothing happened, and repeating it will not change that."""


def fate(error: BaseException) -> Fate:
    """Returns what is known about the statement that raised `error`.

    Arguments:
        error: a psycopg error, as it came from the driver.
    """
    state = getattr(error, "sqlstate", None)
    if state is None:
        # Raised by the driver: lost and unusable connections. Its other errors say that an argument cannot be sent.
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Fate.IN_DOUBT if lost else Fate.REJECTED
    if state in _ROLLED_BACK:
        return Fate.ROLLED_BACK
    if state in _CONNECTION_USELESS or state.startswith(_CONNECTION_EXCEPTION):
        return Fate.IN_DOUBT
    if state.startswith(_OVERLOADED):
        return Fate.OVERLOADED
    return Fate.REJECTED


def misuse(sqlstate: str, message: str, remedy: str | None = None) -> Misuse:
    """Returns the error that the database has named by its code: raised, or in the row of a batch.

    Arguments: `sqlstate`, `QT0xx`; `message`; `remedy`, what to do. Result: of the class of the code; a plain `Misuse`
    for a code of a newer schema.
    """
    return _BY_SQLSTATE.get(sqlstate, Misuse)(message, remedy)


def misuse_named(name: str, message: str) -> Misuse:
    """Returns the error of a name, as an HTTP face of the ledger has reported it.

    Result: of the class of that name; `InvalidArgument` for a name that is none of the contract's.
    """
    kind = next((row.type for row in ERRORS if row.name == name), InvalidArgument)
    return kind(f"{name}: {message}")


def from_database_error(error: psycopg.Error) -> QuotaError | None:
    """Translates what the database reported into this library's tree.

    Arguments:
        error: a psycopg error, as it came from the driver.

    Result: the error to raise in its place; None when it is not about the call (a lost connection, a serialization
    failure, a fault of the server): see `fate`.
    """
    state = error.sqlstate
    if state is None:
        if isinstance(error, psycopg.DataError):
            return InvalidArgument(f"invalid_argument: {error}", "send text without NUL characters, numbers in range")
        return None
    message = error.diag.message_primary or str(error)
    hint = error.diag.message_hint
    if state.startswith("QT"):
        return misuse(state, message, hint)
    if state.startswith("22"):  # data exceptions: a value that cannot be what the function takes
        return InvalidArgument(f"invalid_argument: {message}", hint)
    if state == _INSUFFICIENT_PRIVILEGE:
        return NotAllowed(message)
    if state in _SCHEMA_MISSING:
        return SchemaMismatch(
            f"the schema of this database does not serve this release: {message}; run `quota migrate`"
        )
    return None
