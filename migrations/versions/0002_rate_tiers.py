"""Rate tiers: a key stores the name of one, its numbers stand in one place.

Safe on a live table: the new column has a constant default, so no row is rewritten and every existing key is `basic`;
the exclusive lock on `subjects` lasts for the milliseconds of this transaction, and is given up after half a second of
waiting. Accounts follow lazily: the tenants' binding_version moves on, and each subject binds at its next reserve.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DROP FUNCTION quota_internal.add_subject(text, text, text)")
    install(revision, "tables", "bind", "subjects", "tiers", "views", "grants")
    op.execute(
        "UPDATE quota_internal.tenants SET config_version = config_version + 1, binding_version = binding_version + 1"
    )


def downgrade() -> None:
    op.execute("DROP VIEW quota.tiers, quota.subjects")
    op.execute("DROP FUNCTION quota.set_rate_tier(text, text, text), quota.retire_tier(text, text)")
    op.execute("DROP FUNCTION quota.set_tier_limit(text, text, text, text, numeric, numeric, text, text)")
    op.execute("DROP FUNCTION quota_internal.add_subject(text, text, text, text)")
    op.execute("DROP FUNCTION quota_internal.require_tier(text, text), quota_internal.require_kind_with_tier(text)")
    op.execute("DROP FUNCTION quota_internal.change_tiers(text)")
    op.execute("DROP FUNCTION quota_internal.require_same_tier_shape(text, quota_internal.definition)")
    install("0001", "bind", "subjects", "views")
    op.execute("DROP TABLE quota_internal.tier_limits, quota_internal.tiers")
    op.execute("ALTER TABLE quota_internal.subjects DROP COLUMN rate_tier")
    install("0001", "grants")
    op.execute(
        "UPDATE quota_internal.tenants SET config_version = config_version + 1, binding_version = binding_version + 1"
    )
