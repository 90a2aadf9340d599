"""Batches: reserve_many, settle_many and release_many; views and balance by the right clock and numbers.

Views read the ledger's clock, once a statement; balance returns overdue holds to a bucket by the numbers in force;
a bond that is lifted is logged for its tenant.
Functions, types and views only: no table is touched, and what runs goes on with the functions it has begun with.
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
    install(
        revision,
        "batch_types",
        "clock",
        "reserve",
        "reserve_many",
        "settle_many",
        "balance",
        "tenants",
        "views",
        "grants",
    )


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
    install("0001", "clock", "reserve", "balance", "tenants")
    install("0002", "views", "grants")
    op.execute("DROP VIEW quota_internal.present")
