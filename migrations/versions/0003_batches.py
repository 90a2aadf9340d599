"""Batches: reserve_many, settle_many and release_many. A final settle after partial ones may be repeated.

Safe on a live table: the new column has no default, so no row is rewritten.
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
    op.execute(
        "DROP FUNCTION quota_internal.close_overdue_in_the_way(text, quota_internal.standing[], bigint[], timestamptz)"
    )
    install(revision, "tables", "batch_types", "clock", "reserve", "reap", "settle", "adjust")
    install(revision, "reserve_many", "settle_many", "grants")


def downgrade() -> None:
    op.execute(
        "DROP FUNCTION quota.reserve_many"
        "(text[], jsonb[], uuid[], interval[], jsonb[], numeric[], text[], jsonb[], boolean, text)"
    )
    op.execute("DROP FUNCTION quota.settle_many(uuid[], jsonb[], boolean[], text[], jsonb[], boolean, text)")
    op.execute("DROP FUNCTION quota.release_many(uuid[], jsonb[], boolean, text)")
    op.execute("DROP FUNCTION quota_internal.require_batch(text, integer, integer, integer)")
    op.execute(
        "DROP FUNCTION quota_internal.reserve_one"
        "(integer, text, jsonb, interval, uuid, text[], numeric, text, jsonb, text)"
    )
    op.execute("DROP FUNCTION quota_internal.settle_one(integer, uuid, jsonb, boolean, text, jsonb, text)")
    op.execute("DROP FUNCTION quota_internal.release_one(integer, uuid, jsonb, text)")
    op.execute("DROP TYPE quota.batch_decision, quota.batch_settlement, quota.batch_release")
    op.execute("DROP FUNCTION quota_internal.expire(text, uuid[], bigint[], boolean, boolean)")
    op.execute("DROP FUNCTION quota_internal.lock_due(text, uuid[], bigint[], boolean, boolean)")
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
    install("0001", "clock", "reserve", "reap", "settle", "adjust")
    install("0002", "grants")
