"""Waiting in turn: who is refused and can wait takes a place in a queue.

Safe on a live table: only new ones are made.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "tables", "turn_types", "turns", "grants")


def downgrade() -> None:
    op.execute("DROP TYPE quota.turn CASCADE")  # with it goes reserve_in_turn
    op.execute("DROP TYPE quota_internal.queued CASCADE")  # with it goes queued_behind
    op.execute("DROP FUNCTION quota_internal.keep_place(quota_internal.waiters, timestamptz)")
    op.execute("DROP VIEW quota.waiting")
    op.execute("DROP TABLE quota_internal.waiters")
    install("0005", "grants")
