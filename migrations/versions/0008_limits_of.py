"""What a gateway tells its callers: the terms of a subject's limits beside where they stand.

Safe on a live table: only new functions are made.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "limits_of", "grants")


def downgrade() -> None:
    op.execute("DROP FUNCTION quota.limits_of(text, text)")
    op.execute("DROP FUNCTION quota_internal.nominal_s(text)")
    install("0007", "grants")
