"""Who may speak: keys that authenticate a subject, tokens of the HTTP API, and what its operators do in their name.

Secrets never travel: the functions take the SHA-256 of one, see `quota.credentials`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from quota.calls.answers import Released, Row, Settlement, Violation, amounts, instant
from quota.calls.base import BYTES, COSTS, ID, NAME, SPAN, TIME, WHOLE, WORD, Call, Costs, Function

__all__ = [
    "BeginChange",
    "BeginRequest",
    "CreateKey",
    "CreateToken",
    "EndRequest",
    "KeyHolder",
    "LoggedCheck",
    "OperatorRelease",
    "OperatorSettle",
    "RenameKey",
    "RequestClaim",
    "RevokeKey",
    "RevokeToken",
    "RotateKey",
    "SetKeyExpiry",
    "TokenHolder",
    "VerifyKey",
    "VerifyToken",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """Whose secret it is.

    Fields:
        tenant, subject: who spends.
        name: of the key.
        parent: the subject above; None: nobody.
        rate_tier: the name of the tier; unknown and retired ones act as `basic`.
        state: `active`, `expired`, `revoked` or `retired`; only the first may be let in.
        frozen: why the subject itself is frozen; None: it is not.
        expires_at: when this secret stops being good (UTC); None: not by itself.
    """

    tenant: str
    subject: str
    name: str
    parent: str | None
    rate_tier: str
    state: str
    frozen: str | None
    expires_at: datetime | None

    @property
    def active(self) -> bool:
        """True when the holder may be let in."""
        return self.state == "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHolder:
    """What a token may do: `role`; for `tenant` (None: every one); until `expires_at` (UTC)."""

    tenant: str | None
    role: str
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClaim:
    """The answer of `begin_request`.

    Fields:
        fresh: nobody has used the key before: do the work, then `end_request`.
        same: it was used for the same request.
        status, answer: what was answered then.
    """

    fresh: bool
    same: bool
    status: int | None
    answer: str | None


class _Command(Call[None]):
    """A call that answers nothing."""

    def answer(self, rows: Sequence[Row]) -> None:
        """Nothing."""


class _Once(_Command):
    """A command that fails when it has been done already."""

    repeatable = False


@dataclass(frozen=True)
class CreateKey(_Once):
    """`quota.create_key`: a key for the subject `key:<id>`, which is made if it is not there.

    Arguments:
        id: public: 1 to 63 of a-z, 0-9 and `-`.
        name: for people.
        secret_hash: SHA-256 of the secret, 32 bytes.
        parent: the subject that its charges are charged to as well.
        rate_tier: None: basic, or what the subject has.
        expires_at: when it stops letting in; None: never.
        tenant: the tenant.
    """

    id: str
    name: str
    secret_hash: bytes
    parent: str | None = None
    rate_tier: str | None = None
    expires_at: datetime | None = None
    tenant: str = "default"

    function = Function(
        "create_key", None, id=NAME, name=NAME, secret_hash=BYTES, parent=NAME, rate_tier=NAME, expires_at=TIME,
        tenant=NAME,
    )  # fmt: skip


@dataclass(frozen=True)
class RenameKey(_Command):
    """`quota.rename_key`: another name for people; the id stays."""

    id: str
    name: str
    tenant: str = "default"

    function = Function("rename_key", None, id=NAME, name=NAME, tenant=NAME)


@dataclass(frozen=True)
class SetKeyExpiry(_Command):
    """`quota.set_key_expiry`: when the key stops letting in; None: never."""

    id: str
    expires_at: datetime | None
    tenant: str = "default"

    function = Function("set_key_expiry", None, id=NAME, expires_at=TIME, tenant=NAME)


@dataclass(frozen=True)
class RotateKey(Call[datetime]):
    """`quota.rotate_key`: a new secret; the one before stays good for `overlap` (at most 30 days)."""

    id: str
    secret_hash: bytes
    overlap: timedelta = timedelta(0)
    tenant: str = "default"

    repeatable = False
    function = Function("rotate_key", "old_secret_until", id=NAME, secret_hash=BYTES, overlap=SPAN, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> datetime:
        """Until when the secret before is good (UTC)."""
        at = instant(rows[0]["old_secret_until"])
        assert at is not None
        return at


@dataclass(frozen=True)
class RevokeKey(_Command):
    """`quota.revoke_key`: ends the key for ever and freezes its subject."""

    id: str
    reason: str
    tenant: str = "default"

    function = Function("revoke_key", None, id=NAME, reason=WORD, tenant=NAME)


@dataclass(frozen=True)
class VerifyKey(Call[KeyHolder | None]):
    """`quota.verify_key`: whose secret this is; None: nobody's."""

    id: str
    secret_hash: bytes

    writes = False
    function = Function(
        "verify_key", "tenant, subject, name, parent, rate_tier, state, frozen, expires_at", id=NAME, secret_hash=BYTES
    )

    def answer(self, rows: Sequence[Row]) -> KeyHolder | None:
        """The holder."""
        return KeyHolder(**{**rows[0], "expires_at": instant(rows[0]["expires_at"])}) if rows else None


@dataclass(frozen=True)
class CreateToken(_Once):
    """`quota.create_token`: a token of the HTTP API; `tenant` None: for every tenant.

    Arguments: `id`, `name`, `secret_hash` and `expires_at` as in `CreateKey`; `role`: worker, viewer, operator, owner.
    """

    id: str
    name: str
    role: str
    secret_hash: bytes
    expires_at: datetime | None = None
    tenant: str | None = None

    function = Function(
        "create_token", None, id=NAME, name=NAME, role=WORD, secret_hash=BYTES, expires_at=TIME, tenant=NAME
    )


@dataclass(frozen=True)
class RevokeToken(_Command):
    """`quota.revoke_token`: ends a token for ever. `tenant`: its scope."""

    id: str
    reason: str
    tenant: str | None = None

    function = Function("revoke_token", None, id=NAME, reason=WORD, tenant=NAME)


@dataclass(frozen=True)
class VerifyToken(Call[TokenHolder | None]):
    """`quota.verify_token`: what a token may do; None: it is unknown, wrong, expired or revoked."""

    id: str
    secret_hash: bytes

    writes = False
    function = Function("verify_token", "tenant, role, expires_at", id=NAME, secret_hash=BYTES)

    def answer(self, rows: Sequence[Row]) -> TokenHolder | None:
        """The holder."""
        return TokenHolder(**{**rows[0], "expires_at": instant(rows[0]["expires_at"])}) if rows else None


# -- the HTTP API's transactions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BeginChange(_Command):
    """`quota.begin_change`: who acts in this transaction, in which request and why; no other change meanwhile."""

    actor: str
    request_id: str
    reason: str | None
    tenant: str | None

    function = Function("begin_change", None, actor=WORD, request_id=WORD, reason=WORD, tenant=NAME)


@dataclass(frozen=True)
class BeginRequest(Call[RequestClaim]):
    """`quota.begin_request`: claims an Idempotency-Key, or finds what was answered to it."""

    token: str
    key: str
    fingerprint: bytes
    tenant: str | None

    function = Function(
        "begin_request", "fresh, same, status, answer", token=WORD, key=WORD, fingerprint=BYTES, tenant=NAME
    )

    def answer(self, rows: Sequence[Row]) -> RequestClaim:
        """The claim."""
        return RequestClaim(**rows[0])


@dataclass(frozen=True)
class EndRequest(_Command):
    """`quota.end_request`: stores the answer of a claimed request."""

    token: str
    key: str
    status: int
    answer_text: str
    tenant: str | None

    function = Function("end_request", None, token=WORD, key=WORD, status=WHOLE, answer_text=WORD, tenant=NAME)


@dataclass(frozen=True)
class OperatorSettle(Call[Settlement]):
    """`quota.operator_settle`: settles somebody else's reservation, with a reason; `costs` None: the whole hold."""

    id: UUID | str
    costs: Costs | None
    reason: str
    tenant: str = "default"

    function = Function(
        "operator_settle", "state, late, replayed, overage::text AS overage",
        id=ID, costs=COSTS, reason=WORD, tenant=NAME,
    )  # fmt: skip

    def answer(self, rows: Sequence[Row]) -> Settlement:
        """What was settled."""
        return Settlement(**{**rows[0], "overage": amounts(rows[0]["overage"])})


@dataclass(frozen=True)
class OperatorRelease(Call[Released]):
    """`quota.operator_release`: releases somebody else's reservation, with a reason."""

    id: UUID | str
    reason: str
    tenant: str = "default"

    function = Function("operator_release", "state, replayed", id=ID, reason=WORD, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> Released:
        """The state after it."""
        return Released(**rows[0])


@dataclass(frozen=True)
class LoggedCheck(Call[list[Violation]]):
    """`quota.logged_check`: `Check`, and a row of the log that says when; `tenant` None: all tenants."""

    tenant: str | None = None

    function = Function("logged_check", "tenant, invariant, subject, limit_name, expected, found", tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> list[Violation]:
        """One value per violation."""
        return [Violation(**row) for row in rows]
