"""Reports: views and functions that read what calls have told in their details.

Only new views and functions, no table: reserves go on.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "reports", "grants")


def downgrade() -> None:
    for name in ("report_models", "report_pools", "report_calibration"):
        op.execute(f"DROP FUNCTION quota.{name}(timestamptz, timestamptz, text)")
    op.execute("DROP FUNCTION quota_internal.report_range(timestamptz, timestamptz)")
    op.execute("DROP FUNCTION quota_internal.ratio(numeric, numeric), quota_internal.shown(double precision)")
    op.execute("DROP VIEW quota.model_calls, quota.model_refusals, quota.route_calls")
    install("0006", "grants")
