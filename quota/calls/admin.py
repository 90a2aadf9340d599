"""What admins call: tenants, units, subjects, limits, tiers, corrections. Each is logged with actor and reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from uuid import UUID

from quota.calls.answers import Recorded, Repaired, Row, exact
from quota.calls.base import AMOUNT, COSTS, FLAG, ID, NAME, NAMES, ROLE, SPAN, WORD, Amount, Call, Costs, Function

__all__ = [
    "BindLogin",
    "ConfigureTenant",
    "CreateSubject",
    "CreateTenant",
    "CreateUnit",
    "Credit",
    "Freeze",
    "MoveSubject",
    "RemoveLimit",
    "Repair",
    "RetireSubject",
    "RetireTier",
    "SetLimit",
    "SetRateTier",
    "SetRateTiers",
    "SetTierLimit",
    "Unfreeze",
]


class _Command(Call[None]):
    """A call that answers nothing: it is done, or an error says why not."""

    def answer(self, rows: Sequence[Row]) -> None:
        """Nothing."""


class _Once(_Command):
    """A command that fails when it has been done already, so that a lost connection is the caller's to look into."""

    repeatable = False


@dataclass(frozen=True)
class CreateTenant(_Once):
    """`quota.create_tenant`: a new outer boundary."""

    name: str

    function = Function("create_tenant", None, name=NAME)


@dataclass(frozen=True)
class ConfigureTenant(_Command):
    """`quota.configure_tenant`: changes a tenant's settings; None leaves one as it is.

    Arguments:
        tenant: the tenant.
        ttl_maximum: longest life of a hold per step.
        polling_hint_s: seconds that a caller is told to wait while others' holds are in its way.
        keep: how long closed reservations are kept.
    """

    tenant: str
    ttl_maximum: timedelta | None = None
    polling_hint_s: Amount | None = None
    keep: timedelta | None = None

    function = Function("configure_tenant", None, tenant=NAME, ttl_maximum=SPAN, polling_hint_s=AMOUNT, keep=SPAN)


@dataclass(frozen=True)
class CreateUnit(_Once):
    """`quota.create_unit`: registers what is counted; `money`: exhausting it is a matter of payment."""

    name: str
    money: bool = False

    function = Function("create_unit", None, name=NAME, money=FLAG)


@dataclass(frozen=True)
class CreateSubject(_Once):
    """`quota.create_subject`: a new spender below `parent`; only keys have a `rate_tier`."""

    name: str
    parent: str | None = None
    rate_tier: str | None = None
    tenant: str = "default"

    function = Function("create_subject", None, name=NAME, parent=NAME, rate_tier=NAME, tenant=NAME)


@dataclass(frozen=True)
class MoveSubject(_Command):
    """`quota.move_subject`: hangs a subject below another parent (None: below nobody)."""

    name: str
    parent: str | None
    tenant: str = "default"

    function = Function("move_subject", None, name=NAME, parent=NAME, tenant=NAME)


@dataclass(frozen=True)
class Freeze(_Command):
    """`quota.freeze`: no new holds on the subject or below it."""

    name: str
    reason: str
    tenant: str = "default"

    function = Function("freeze", None, name=NAME, reason=WORD, tenant=NAME)


@dataclass(frozen=True)
class Unfreeze(_Command):
    """`quota.unfreeze`: holds are granted again."""

    name: str
    tenant: str = "default"

    function = Function("unfreeze", None, name=NAME, tenant=NAME)


@dataclass(frozen=True)
class RetireSubject(_Once):
    """`quota.retire_subject`: the subject and all below it spend no more; their ledger stays."""

    name: str
    tenant: str = "default"

    function = Function("retire_subject", None, name=NAME, tenant=NAME)


@dataclass(frozen=True)
class SetLimit(_Command):
    """`quota.set_limit`: makes a limit, or changes its numbers.

    Arguments:
        subject: `kind:id`, or `kind:*` for the default of every subject of that kind.
        name: the limit's name; a subject's own limit replaces a tier's, and that a kind's, of the same name.
        unit: what it counts.
        kind: `budget`, `bucket` or `concurrency`.
        capacity: the most; None: unlimited, counted, never refused (budgets only).
        refill_per_s: units per second that a bucket regains.
        period: of a budget: None, `day`, `week`, `month`, or an interval such as `1 hour`.
        time_zone: IANA zone of a calendar period.
        on_expiry: what becomes of overdue holds: `release` or `charge`.
        required: costs must name the unit.
        tenant: the tenant.
    """

    subject: str
    name: str
    unit: str
    kind: str
    capacity: Amount | None
    refill_per_s: Amount | None = None
    period: str | None = None
    time_zone: str = "UTC"
    on_expiry: str = "release"
    required: bool = False
    tenant: str = "default"

    function = Function(
        "set_limit", None, subject=NAME, name=NAME, unit=NAME, kind=WORD, capacity=AMOUNT, refill_per_s=AMOUNT,
        period=WORD, time_zone=WORD, on_expiry=WORD, required=FLAG, tenant=NAME,
    )  # fmt: skip


@dataclass(frozen=True)
class RemoveLimit(_Command):
    """`quota.remove_limit`: the limit takes no new holds and lives until its holds close."""

    subject: str
    name: str
    tenant: str = "default"

    repeatable = False
    function = Function("remove_limit", None, subject=NAME, name=NAME, tenant=NAME)


@dataclass(frozen=True)
class SetRateTier(_Command):
    """`quota.set_rate_tier`: the next reservation uses the tier's numbers; usage stays."""

    subject: str
    tier: str
    tenant: str = "default"

    function = Function("set_rate_tier", None, subject=NAME, tier=NAME, tenant=NAME)


@dataclass(frozen=True)
class SetRateTiers(_Command):
    """`quota.set_rate_tiers`: `SetRateTier` for up to 1000 keys, all or none."""

    subjects: Collection[str]
    tier: str
    tenant: str = "default"

    function = Function("set_rate_tiers", None, subjects=NAMES, tier=NAME, tenant=NAME)


@dataclass(frozen=True)
class SetTierLimit(_Command):
    """`quota.set_tier_limit`: a limit of a tier; arguments as in `SetLimit`, `tenant` None: of the built-in tier."""

    tier: str
    name: str
    unit: str
    kind: str
    capacity: Amount | None
    refill_per_s: Amount | None = None
    period: str | None = None
    tenant: str | None = None

    function = Function(
        "set_tier_limit", None, tier=NAME, name=NAME, unit=NAME, kind=WORD, capacity=AMOUNT, refill_per_s=AMOUNT,
        period=WORD, tenant=NAME,
    )  # fmt: skip


@dataclass(frozen=True)
class RetireTier(_Once):
    """`quota.retire_tier`: who has it acts as `basic` from now on."""

    tier: str
    tenant: str | None = None

    function = Function("retire_tier", None, tier=NAME, tenant=NAME)


@dataclass(frozen=True)
class Credit(Call[Recorded]):
    """`quota.credit`: takes back at most what the reservation booked, on all its accounts and in their windows.

    Arguments:
        reservation: whose booking is taken back.
        costs: amounts by unit.
        reason: why, for the log.
        id: the idempotency key; None: a client makes one.
        tenant: the tenant.
    """

    reservation: UUID | str
    costs: Costs
    reason: str
    id: UUID | str | None = None
    tenant: str = "default"

    keyed = True
    function = Function("credit", "entry, replayed", reservation=ID, costs=COSTS, reason=WORD, id=ID, tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> Recorded:
        """The ledger entry."""
        return Recorded(entry=rows[0]["entry"], replayed=rows[0]["replayed"])


@dataclass(frozen=True)
class Repair(Call[list[Repaired]]):
    """`quota.repair`: rebuilds a tenant's counters from its holds and entries, in one transaction."""

    tenant: str = "default"

    timeout_s = Decimal(60)
    function = Function("repair", "subject, limit_name, counter, was, is_now", tenant=NAME)

    def answer(self, rows: Sequence[Row]) -> list[Repaired]:
        """One value per counter that was wrong."""
        return [
            Repaired(
                subject=row["subject"],
                limit_name=row["limit_name"],
                counter=row["counter"],
                was=exact(row["was"]),
                is_now=exact(row["is_now"]),
            )
            for row in rows
        ]


@dataclass(frozen=True)
class BindLogin(_Command):
    """`quota.bind_login`: confines a database login to one tenant; None lifts it."""

    role: str
    tenant: str | None

    function = Function("bind_login", None, role=ROLE, tenant=NAME)
