"""Batches: reserve_many, settle_many and release_many. A final settle after partial ones may be repeated.

Views read the ledger's clock, once a statement; balance returns overdue holds to a bucket by the numbers in force; a
bond that is lifted is logged for its tenant. Safe on a live table: the new column has no default, so no row is
rewritten.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DROP FUNCTION quota_internal.seconds(interval)")
    # These take further arguments now; a second function of the same name would be ambiguous.
    op.execute("DROP FUNCTION quota_internal.expire(text, uuid[], bigint[])")
    op.execute("DROP FUNCTION quota_internal.overdue(text, bigint[], timestamptz, timestamptz)")
    op.execute(
        "DROP FUNCTION quota_internal.close_overdue_in_the_way(text, quota_internal.standing[], bigint[], timestamptz)"
    )
    install(revision, "tables", "batch_types", "clock", "units", "bind", "reserve", "reap", "settle", "adjust")
    install(revision, "reserve_many", "settle_many", "balance", "tenants", "views", "grants")


def downgrade() -> None:
    # With the types go the functions that speak of them: reserve_many, settle_many, release_many and their parts.
    op.execute("DROP TYPE quota.batch_decision, quota.batch_settlement, quota.batch_release CASCADE")
    op.execute("DROP TYPE quota_internal.batch_request, quota_internal.batch_group CASCADE")
    op.execute("DROP TYPE quota_internal.batch_closing, quota_internal.batch_change CASCADE")
    op.execute("DROP FUNCTION quota_internal.require_batch(text, integer, anyarray, boolean)")
    op.execute("DROP FUNCTION quota_internal.require_flag(text, boolean)")
    op.execute("DROP FUNCTION quota_internal.fail_batch(integer, text, text, text)")
    op.execute("DROP FUNCTION quota_internal.batch_costs(jsonb)")
    op.execute("DROP FUNCTION quota_internal.lock_batch(text, uuid[])")
    op.execute("DROP FUNCTION quota_internal.is_amount(numeric)")
    op.execute(
        "DROP FUNCTION quota_internal.judge_sums(quota_internal.accounts[], numeric[], numeric[], timestamptz, numeric)"
    )
    op.execute("DROP FUNCTION quota_internal.after_hold(quota_internal.accounts, quota_internal.standing, timestamptz)")
    op.execute("DROP FUNCTION quota_internal.after_holds(quota_internal.accounts[], numeric[], timestamptz, numeric)")
    op.execute(
        "DROP FUNCTION quota_internal.standings_at"
        "(quota_internal.accounts[], integer[], numeric[], numeric, timestamptz, numeric)"
    )
    op.execute("DROP FUNCTION quota_internal.refilled_accounts(quota_internal.accounts[], text, timestamptz)")
    op.execute("DROP FUNCTION quota_internal.locked_accounts(text, bigint[])")
    op.execute("DROP FUNCTION quota_internal.lock_touched(text, quota_internal.accounts[], bigint[])")
    op.execute("DROP FUNCTION quota_internal.expire(text, uuid[], bigint[], boolean, boolean)")
    op.execute("DROP FUNCTION quota_internal.overdue(text, bigint[], timestamptz[], timestamptz, timestamptz)")
    op.execute("DROP FUNCTION quota_internal.with_present_numbers(quota_internal.accounts[], text)")
    op.execute("DROP FUNCTION quota_internal.with_free_accounts(text, uuid[], bigint[])")
    op.execute("DROP FUNCTION quota_internal.few_overdue(text, timestamptz)")
    op.execute("DROP FUNCTION quota_internal.lock_due(text, uuid[], boolean)")
    op.execute(
        "DROP FUNCTION quota_internal.close_overdue_in_the_way"
        "(text, quota_internal.standing[], bigint[], timestamptz, boolean, boolean)"
    )
    op.execute(
        "DROP FUNCTION quota_internal.judge_raises(quota_internal.reservations, quota_internal.accounts[],"
        " quota_internal.costs, timestamptz, numeric)"
    )
    op.execute("DROP FUNCTION quota_internal.refuses(quota_internal.standing[])")
    op.execute("ALTER TABLE quota_internal.reservations DROP COLUMN partial")
    install("0001", "clock", "units", "reserve", "reap", "settle", "adjust", "balance", "tenants")
    install("0002", "bind", "views", "grants")
    op.execute("DROP VIEW quota_internal.present")
