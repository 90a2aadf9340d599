"""Model calls: the price book, runs, and the units that providers' quotas are counted in.

Safe on a live table: only new ones are made.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "tables", "errors", "price_types", "prices", "run_types", "runs", "grants")


def downgrade() -> None:
    op.execute("DROP VIEW quota.prices, quota.runs")
    op.execute("DROP TYPE quota.run_decision CASCADE")  # with it go create_run and judge_slices
    op.execute("DROP FUNCTION quota.end_run(text, text)")
    op.execute("DROP FUNCTION quota_internal.end_runs(text, text[], timestamptz)")
    op.execute("DROP FUNCTION quota_internal.runs_above(text, text[])")
    op.execute("DROP TABLE quota_internal.runs")
    op.execute("DROP TYPE quota.price_row CASCADE")  # with it go price, price_book and price_row
    op.execute(
        "DROP FUNCTION quota.set_price"
        "(text, text, jsonb, text, timestamptz, timestamptz, bigint, bigint, boolean, text, text)"
    )
    op.execute("DROP FUNCTION quota.end_price(bigint, timestamptz, text)")
    op.execute("DROP FUNCTION quota_internal.change_prices(text), quota_internal.require_rates(jsonb, boolean)")
    op.execute("DROP FUNCTION quota_internal.require_rate(text, jsonb)")
    op.execute("DROP FUNCTION quota_internal.require_price(text, jsonb, integer)")
    op.execute("DROP TABLE quota_internal.prices")
    # The units stay: limits may count them.
    install("0004", "errors")
    install("0004", "grants")
