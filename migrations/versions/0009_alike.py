"""The usual batch, all of one subject, is decided and settled by its sums; balances are read from the accounts.

Safe on a live table: functions are made and replaced. Answers and meaning stay as they were, but that adjust
looks at its amounts before the state of the reservation, as settle does.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "alike", "adjust", "balance", "limits_of", "reserve_many", "settle_many", "grants")


def downgrade() -> None:
    install("0003", "adjust", "balance", "reserve_many", "settle_many")
    install("0008", "limits_of", "grants")
    op.execute("DROP FUNCTION quota_internal.reserve_alike(text, text, jsonb[], uuid[], interval[], jsonb[])")
    op.execute("DROP FUNCTION quota_internal.settle_alike(text, uuid[], jsonb[], text[], jsonb[])")
    op.execute("DROP FUNCTION quota_internal.is_batch(integer, anyarray, boolean)")
    op.execute("DROP FUNCTION quota_internal.exact(jsonb)")
    op.execute(
        "DROP FUNCTION quota_internal.fits_at_sight("
        "text, numeric, numeric, numeric, numeric, numeric, timestamptz, text, timestamptz, timestamptz)"
    )
    op.execute("DROP FUNCTION quota_internal.lineage_of(text, text)")
    op.execute("DROP FUNCTION quota_internal.period_in_force(text, text, text)")
