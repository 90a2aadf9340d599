"""The engine: tables, functions, views and roles; limits on subjects and kinds."""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "tables", "types", "clock", "errors", "units", "limits", "answers", "bind")
    install(revision, "reserve", "reap", "settle", "adjust", "record", "balance", "check")
    install(revision, "tenants", "subjects", "definitions", "retain", "views", "append_only", "grants")
    # Server commands of any login look here before they do anything else.
    op.execute("GRANT SELECT ON public.quota_alembic_version TO PUBLIC")
    op.execute("INSERT INTO quota_internal.tenants (name, created_at) VALUES ('default', quota_internal.clock())")
    op.execute(
        "INSERT INTO quota_internal.units (name, money) VALUES"
        " ('usd', true), ('tokens', false), ('requests', false), ('cost', false), ('concurrency', false)"
    )


def downgrade() -> None:
    # The roles stay: they belong to the server, and another database may use them.
    op.execute("DROP SCHEMA quota CASCADE")
    op.execute("DROP SCHEMA quota_internal CASCADE")
