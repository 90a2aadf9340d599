"""The private tables of the ledger: the truth of what is stored, and why.

All of them live in the schema ``quota_internal``; nobody but the owner of the schema touches them. The public
functions in ``quota/sql/`` write them, the views in ``quota/sql/views.sql`` read them. Constraints are named as
sentences, because their name is what an operator sees when one of them fires.

Two rules hold for every table that belongs to a tenant: ``tenant`` leads its primary key, its unique keys and its
foreign keys (so that a distributed PostgreSQL can keep a tenant on one node), and every text column compares byte by
byte (collation ``C``), so that the lock order is the same on every machine.
"""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

SCHEMA = "quota_internal"

metadata = MetaData(schema=SCHEMA)

# Amounts are below 10^18 with at most 12 fractional digits. A bucket's level may carry 18: refill per second (12) x
# microseconds (6).
NAME = Text(collation="C")
AMOUNT = Numeric()
INSTANT = DateTime(timezone=True)


def _amount_check(*columns: str) -> str:
    """The CHECK text that keeps amounts finite and not negative; NaN and Infinity sort above every number."""
    return " AND ".join(f"({c} >= 0 AND {c} < 'Infinity'::numeric)" for c in columns)


tenants = Table(
    "tenants",
    metadata,
    Column("name", NAME, nullable=False),
    # Moves with every change of a limit, tier, lineage or freeze of this tenant. A reserve reads it with what it
    # resolved and once more after its locks: the same number means that nothing it relied on has changed.
    Column("config_version", BigInteger, nullable=False, server_default=text("1")),
    # Moves when a definition that many subjects share (a kind's, a tier's) changes: the subjects then bind anew.
    Column("binding_version", BigInteger, nullable=False, server_default=text("1")),
    Column("ttl_maximum", Interval, nullable=False, server_default=text("'24:00:00'::interval")),
    Column("polling_hint_s", AMOUNT, nullable=False, server_default=text("1")),
    Column("keep", Interval, nullable=False, server_default=text("'30 days'::interval")),
    Column("created_at", INSTANT, nullable=False),
    PrimaryKeyConstraint("name", name="tenants_pkey"),
    CheckConstraint("ttl_maximum > '00:00:00'::interval", name="tenants_ttl_maximum_is_positive"),
    CheckConstraint(
        "polling_hint_s > 0 AND polling_hint_s < 'Infinity'::numeric", name="tenants_polling_hint_is_positive"
    ),
    # Written by every admin change and read by every reserve: room for HOT updates keeps the read at one page.
    postgresql_with={"fillfactor": 20},
    comment="The outer boundary: nothing of one tenant touches another's.",
)

logins = Table(
    "logins",
    metadata,
    Column("role", NAME, nullable=False),
    Column("tenant", NAME, nullable=False),
    PrimaryKeyConstraint("role", name="logins_pkey"),
    ForeignKeyConstraint(["tenant"], ["quota_internal.tenants.name"], name="logins_name_a_tenant"),
    comment="Database logins that see one tenant only (bind_login).",
)

units = Table(
    "units",
    metadata,
    Column("name", NAME, nullable=False),
    Column("money", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("name", name="units_pkey"),
    comment="What is counted; an amount of an unregistered unit is an error.",
)

subjects = Table(
    "subjects",
    metadata,
    Column("tenant", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    Column("kind", NAME, nullable=False),
    Column("parent", NAME),
    # Itself first, then its ancestors up to the root: what a charge to it charges.
    Column("lineage", ARRAY(NAME), nullable=False),
    Column("frozen", Text),
    Column("retired", Boolean, nullable=False, server_default=text("false")),
    # The tenant's binding_version when the accounts of this subject were last matched with the definitions in force.
    Column("binding_version", BigInteger, nullable=False, server_default=text("0")),
    Column("created_at", INSTANT, nullable=False),
    # A name, never numbers; unknown ones act as basic, so that no typing error lifts a limit. Only keys make use of it.
    Column("rate_tier", NAME, nullable=False, server_default=text("'basic'::text")),
    PrimaryKeyConstraint("tenant", "name", name="subjects_pkey"),
    ForeignKeyConstraint(["tenant"], ["quota_internal.tenants.name"], name="subjects_belong_to_a_tenant"),
    ForeignKeyConstraint(
        ["tenant", "parent"],
        ["quota_internal.subjects.tenant", "quota_internal.subjects.name"],
        name="subjects_parent_is_a_subject",
    ),
    CheckConstraint("cardinality(lineage) BETWEEN 1 AND 8", name="subjects_lineage_has_at_most_8"),
    Index("subjects_by_parent", "tenant", "parent"),
    comment="Who spends. frozen holds the reason while frozen.",
)

_SHAPE_AND_NUMBERS = (
    ("unit", NAME, False, None),
    ("kind", NAME, False, None),
    ("capacity", AMOUNT, True, None),
    ("refill_per_s", AMOUNT, True, None),
    ("period", NAME, True, None),
    ("time_zone", NAME, False, "'UTC'::text"),
)


def _limit_columns() -> list[Column[object]]:
    """The columns that a limit's definition has wherever it stands: on a subject, on a kind, in a tier."""
    return [
        Column(n, t, nullable=null, server_default=text(default) if default else None)
        for n, t, null, default in _SHAPE_AND_NUMBERS
    ]


def _limit_checks(table: str, *, on_expiry: bool = True) -> list[CheckConstraint]:
    """What is true of every definition of a limit; only those of subjects and kinds say what expiry does."""
    checks = [
        CheckConstraint("kind IN ('budget', 'bucket', 'concurrency')", name=f"{table}_kind_is_known"),
        CheckConstraint("capacity IS NOT NULL OR kind = 'budget'", name=f"{table}_only_budgets_are_unlimited"),
        CheckConstraint(_amount_check("capacity"), name=f"{table}_capacity_is_an_amount"),
        CheckConstraint(
            "(refill_per_s IS NOT NULL) = (kind = 'bucket')"
            f" AND (refill_per_s IS NULL OR {_amount_check('refill_per_s')})",
            name=f"{table}_buckets_and_only_buckets_refill",
        ),
        CheckConstraint("period IS NULL OR kind = 'budget'", name=f"{table}_only_budgets_have_a_period"),
    ]
    if on_expiry:
        checks.append(CheckConstraint("on_expiry IN ('release', 'charge')", name=f"{table}_on_expiry_is_known"))
    return checks


tiers = Table(
    "tiers",
    metadata,
    # '' for the built-in ones that every tenant sees.
    Column("tenant", NAME, nullable=False, server_default=text("''::text")),
    Column("name", NAME, nullable=False),
    Column("retired", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("tenant", "name", name="tiers_pkey"),
    comment="Named sets of limits for keys; a reference table on a distributed engine.",
)

tier_limits = Table(
    "tier_limits",
    metadata,
    Column("tenant", NAME, nullable=False, server_default=text("''::text")),
    Column("tier", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    *_limit_columns(),
    PrimaryKeyConstraint("tenant", "tier", "name", name="tier_limits_pkey"),
    ForeignKeyConstraint(
        ["tenant", "tier"],
        ["quota_internal.tiers.tenant", "quota_internal.tiers.name"],
        name="tier_limits_belong_to_a_tier",
    ),
    ForeignKeyConstraint(["unit"], ["quota_internal.units.name"], name="tier_limits_count_a_unit"),
    *_limit_checks("tier_limits", on_expiry=False),
    comment="The numbers of the tiers.",
)

limits = Table(
    "limits",
    metadata,
    Column("tenant", NAME, nullable=False),
    # A subject ('key:42') or a kind ('key:*').
    Column("owner", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    *_limit_columns(),
    Column("on_expiry", NAME, nullable=False, server_default=text("'release'::text")),
    Column("required", Boolean, nullable=False, server_default=text("false")),
    # A removed limit takes no new holds; its name keeps its shape.
    Column("removed", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("tenant", "owner", "name", name="limits_pkey"),
    ForeignKeyConstraint(["tenant"], ["quota_internal.tenants.name"], name="limits_belong_to_a_tenant"),
    ForeignKeyConstraint(["unit"], ["quota_internal.units.name"], name="limits_count_a_unit"),
    *_limit_checks("limits"),
    Index("limits_by_name", "tenant", "name"),
    comment="Named rules on subjects and on kinds.",
)

# The three tables below are written by every call and carry no CHECK: PostgreSQL parses each constraint's text anew for
# every statement that writes, which took a third of an account's update (docs/decisions/0004). Only the functions of
# the engine write them, and check() watches what the constraints would.
accounts = Table(
    "accounts",
    metadata,
    Column("tenant", NAME, nullable=False),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("subject", NAME, nullable=False),
    Column("limit_name", NAME, nullable=False),
    # The definition in force, copied here by bind(): the hot path reads one row, and the guard compares within it.
    *_limit_columns(),
    Column("on_expiry", NAME, nullable=False),
    Column("required", Boolean, nullable=False),
    # False once no definition is in force: no new holds, but the counters live on.
    Column("in_force", Boolean, nullable=False),
    Column("binding_version", BigInteger, nullable=False),
    Column("spent", AMOUNT, nullable=False, server_default=text("0")),
    Column("reserved", AMOUNT, nullable=False, server_default=text("0")),
    Column("level", AMOUNT),
    Column("level_at", INSTANT),
    Column("window_start", INSTANT),
    Column("window_end", INSTANT),
    # No open hold of this account expires before this instant: what spares most calls the search for overdue holds.
    Column("earliest_expiry", INSTANT, nullable=False, server_default=text("'infinity'::timestamptz")),
    PrimaryKeyConstraint("tenant", "id", name="accounts_pkey"),
    UniqueConstraint("tenant", "subject", "limit_name", name="accounts_one_per_limit_of_a_subject"),
    ForeignKeyConstraint(
        ["tenant", "subject"],
        ["quota_internal.subjects.tenant", "quota_internal.subjects.name"],
        name="accounts_belong_to_a_subject",
    ),
    # The hot rows: half a page free, so that their updates stay on their page and out of the indexes (HOT).
    postgresql_with={"fillfactor": 50},
    comment="The live counters of one limit of one subject: the row that the conditional UPDATE guards.",
)

reservations = Table(
    "reservations",
    metadata,
    Column("tenant", NAME, nullable=False),
    Column("id", UUID, nullable=False),
    Column("subject", NAME, nullable=False),
    Column("also", ARRAY(NAME), nullable=False),
    # What was first asked for, by value: the same id with another request is a conflict.
    Column("costs", JSONB, nullable=False),
    # Totals by unit: what is held in all (the costs, the implied units, adjustments), and what is booked of it so far.
    Column("held", JSONB, nullable=False),
    Column("booked", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("state", NAME, nullable=False, server_default=text("'held'::text")),
    Column("created_at", INSTANT, nullable=False),
    Column("expires_at", INSTANT, nullable=False),
    Column("closed_at", INSTANT),
    Column("headroom", AMOUNT, nullable=False, server_default=text("0")),
    # The lines, side by side: what each account holds, in which of its windows, how much of it is booked.
    Column("line_accounts", ARRAY(BigInteger), nullable=False),
    Column("line_windows", ARRAY(INSTANT), nullable=False),
    Column("line_held", ARRAY(AMOUNT), nullable=False),
    Column("line_booked", ARRAY(AMOUNT), nullable=False),
    Column("line_charged", ARRAY(Boolean), nullable=False),
    Column("outcome", NAME),
    Column("late", Boolean, nullable=False, server_default=text("false")),
    Column("details", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    # Once settled: the totals that partial settles had booked before, so that the final one repeated is a replay.
    Column("partial", JSONB),
    PrimaryKeyConstraint("tenant", "id", name="reservations_pkey"),
    # Open holds by expiry: the reaper's queue.
    Index("reservations_open_by_expiry", "tenant", "expires_at", postgresql_where=text("state = 'held'::text")),
    comment="One row per reservation; an open one is a hold.",
)

entries = Table(
    "entries",
    metadata,
    Column("tenant", NAME, nullable=False),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("at", INSTANT, nullable=False),
    Column("kind", NAME, nullable=False),
    Column("reservation", UUID),
    Column("subject", NAME, nullable=False),
    # One booking touches all accounts of its lineage at once: its lines, side by side.
    Column("line_accounts", ARRAY(BigInteger), nullable=False),
    Column("line_windows", ARRAY(INSTANT), nullable=False),
    Column("line_amounts", ARRAY(AMOUNT), nullable=False),
    # The caller's own id of a credit: the same id again is a replay.
    Column("request", UUID),
    Column("details", JSONB),
    PrimaryKeyConstraint("tenant", "id", name="entries_pkey"),
    Index("entries_by_reservation", "tenant", "reservation", postgresql_where=text("reservation IS NOT NULL")),
    Index("entries_request_is_unique", "tenant", "request", unique=True, postgresql_where=text("request IS NOT NULL")),
    comment="The append-only ledger: one row per booking, its lines in arrays;"
    " the view quota.entries shows a line each.",
)

prices = Table(
    "prices",
    metadata,
    # '' for the prices that every tenant sees.
    Column("tenant", NAME, nullable=False, server_default=text("''::text")),
    # The version that a reservation keeps.
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("provider", NAME, nullable=False),
    Column("model", NAME, nullable=False),
    Column("variant", NAME, nullable=False, server_default=text("''::text")),
    # Dollars per million tokens by part, as exact numbers; quota.costs.prices reads the same JSON.
    Column("rates", JSONB, nullable=False),
    Column("free", Boolean, nullable=False, server_default=text("false")),
    Column("effective_from", INSTANT, nullable=False),
    Column("effective_until", INSTANT, nullable=False, server_default=text("'infinity'::timestamptz")),
    Column("output_max", BigInteger),
    Column("input_max", BigInteger),
    Column("source", Text),
    Column("created_at", INSTANT, nullable=False),
    PrimaryKeyConstraint("tenant", "id", name="prices_pkey"),
    UniqueConstraint("tenant", "provider", "model", "variant", "effective_from", name="prices_begin_once"),
    CheckConstraint("effective_from < effective_until", name="prices_end_after_they_begin"),
    CheckConstraint("jsonb_typeof(rates) = 'object'", name="prices_are_objects"),
    Index("prices_by_version", "id"),
    comment="What models cost: one row per version, in force for a time. Changed only to end one.",
)

runs = Table(
    "runs",
    metadata,
    Column("tenant", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    Column("parent", NAME, nullable=False),
    # The slices, by unit: the limits of the run's subject say the same.
    Column("budget", JSONB, nullable=False),
    Column("started_at", INSTANT, nullable=False),
    Column("expires_at", INSTANT, nullable=False),
    Column("ended_at", INSTANT),
    # At most so many live runs right below it, and levels of runs below it.
    Column("max_width", Integer),
    Column("max_depth", Integer),
    # The most output tokens of a call; the least of its own and those above it.
    Column("max_tokens", BigInteger),
    # Children start so far apart; the next one not before next_start.
    Column("stagger_s", AMOUNT, nullable=False, server_default=text("0")),
    Column("next_start", INSTANT, nullable=False),
    PrimaryKeyConstraint("tenant", "name", name="runs_pkey"),
    ForeignKeyConstraint(
        ["tenant", "name"],
        ["quota_internal.subjects.tenant", "quota_internal.subjects.name"],
        name="runs_are_subjects",
    ),
    # Live children of a parent: their slices are promised.
    Index("runs_live_by_parent", "tenant", "parent", postgresql_where=text("ended_at IS NULL")),
    comment="Subjects that live for a while and spend slices of their parents.",
)

waiters = Table(
    "waiters",
    metadata,
    Column("tenant", NAME, nullable=False),
    # The reservation that is waited for.
    Column("id", UUID, nullable=False),
    # Whose limit binds; of another tenant's account, or one that is gone, nobody asks.
    Column("account", BigInteger, nullable=False),
    Column("amount", AMOUNT, nullable=False),
    Column("headroom", AMOUNT, nullable=False),
    # The first ask: with the headroom it makes the order.
    Column("since", INSTANT, nullable=False),
    # So many were ahead then: what they have become tells how fast the queue moves.
    Column("ahead", BigInteger, nullable=False),
    # From then on it stands in nobody's way, unless its owner asks again.
    Column("expires_at", INSTANT, nullable=False),
    PrimaryKeyConstraint("tenant", "id", name="waiters_pkey"),
    Index("waiters_by_account", "tenant", "account"),
    comment="Who waits for room, in which order: places in a queue, worth nothing after a crash.",
    # No hold and no amount depends on it, and every look writes one.
    prefixes=["UNLOGGED"],
)

admin_log = Table(
    "admin_log",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("at", INSTANT, nullable=False),
    Column("actor", NAME, nullable=False),
    Column("on_behalf_of", Text),
    Column("action", NAME, nullable=False),
    Column("tenant", NAME),
    Column("target", NAME),
    Column("reason", Text),
    Column("before", JSONB),
    Column("after", JSONB),
    # What the HTTP API calls the request that made the change, so that its log lines and this row can be matched.
    Column("request_id", Text),
    PrimaryKeyConstraint("id", name="admin_log_pkey"),
    Index("admin_log_by_tenant", "tenant", "at"),
    # When the books were last proven, whatever else the log holds.
    Index("admin_log_checks", "at", postgresql_where=text("action = 'check'::text")),
    comment="Who changed what: one row per admin change, written in its transaction.",
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("tenant", NAME, nullable=False),
    # Public: the first part of the secret.
    Column("id", NAME, nullable=False),
    # key:<id>; what the key may spend stands there. A column, so that a page of keys is a walk along two indexes.
    Column("subject", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    # SHA-256 of 256 random bits: nothing to guess, so nothing to slow down.
    Column("secret_hash", LargeBinary, nullable=False),
    # After a rotation the secret before is good until then.
    Column("old_secret_hash", LargeBinary),
    Column("old_secret_until", INSTANT),
    Column("created_at", INSTANT, nullable=False),
    Column("expires_at", INSTANT),
    Column("revoked_at", INSTANT),
    Column("changed_at", INSTANT, nullable=False),
    PrimaryKeyConstraint("tenant", "id", name="api_keys_pkey"),
    ForeignKeyConstraint(
        ["tenant", "subject"],
        ["quota_internal.subjects.tenant", "quota_internal.subjects.name"],
        name="api_keys_authenticate_a_subject",
    ),
    CheckConstraint("subject = 'key:' || id", name="api_keys_subject_is_the_id"),
    CheckConstraint("octet_length(secret_hash) = 32", name="api_keys_secret_hash_is_a_sha256"),
    CheckConstraint("octet_length(old_secret_hash) = 32", name="api_keys_old_secret_hash_is_a_sha256"),
    CheckConstraint("(old_secret_hash IS NULL) = (old_secret_until IS NULL)", name="api_keys_old_secret_has_an_end"),
    # A secret names its key, not its tenant.
    Index("api_keys_by_id", "id"),
    Index("api_keys_by_name", "tenant", "name", "id"),
    comment="Keys that authenticate a subject key:<id>; their secrets are not stored.",
)

api_tokens = Table(
    "api_tokens",
    metadata,
    # '' for those that may act for all tenants.
    Column("tenant", NAME, nullable=False, server_default=text("''::text")),
    Column("id", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    Column("role", NAME, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("created_at", INSTANT, nullable=False),
    Column("expires_at", INSTANT),
    Column("revoked_at", INSTANT),
    PrimaryKeyConstraint("tenant", "id", name="api_tokens_pkey"),
    CheckConstraint("role IN ('worker', 'viewer', 'operator', 'owner')", name="api_tokens_role_is_known"),
    CheckConstraint("octet_length(secret_hash) = 32", name="api_tokens_secret_hash_is_a_sha256"),
    Index("api_tokens_by_id", "id"),
    comment="Who may call the HTTP API, and as what; their secrets are not stored.",
)

api_requests = Table(
    "api_requests",
    metadata,
    Column("tenant", NAME, nullable=False, server_default=text("''::text")),
    Column("token", NAME, nullable=False),
    # The caller's Idempotency-Key.
    Column("key", NAME, nullable=False),
    # SHA-256 of method, path and body: the same key with another request is an error.
    Column("fingerprint", LargeBinary, nullable=False),
    Column("at", INSTANT, nullable=False),
    Column("status", Integer),
    Column("answer", Text),
    PrimaryKeyConstraint("tenant", "token", "key", name="api_requests_pkey"),
    Index("api_requests_by_age", "tenant", "at"),
    comment="Answers of writes over HTTP, by Idempotency-Key; kept for a day.",
)
