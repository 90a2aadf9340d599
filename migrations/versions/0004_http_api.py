"""What the HTTP API needs: keys, tokens, answers by Idempotency-Key, and a login role of its own.

New tables, functions and views, one nullable column on the admin log: no row is rewritten, and reserves go on.
"""

from __future__ import annotations

from alembic import op

from quota.migrate import install

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install(revision, "tables", "errors", "tenants", "tiers", "keys", "tokens", "operators", "views", "grants")


def downgrade() -> None:
    op.execute("DROP VIEW quota.keys, quota.tokens, quota.units, quota.tenants, quota.log")
    for function in (
        "quota.create_key(text, text, bytea, text, text, timestamptz, text)",
        "quota.rename_key(text, text, text)",
        "quota.set_key_expiry(text, timestamptz, text)",
        "quota.rotate_key(text, bytea, interval, text)",
        "quota.revoke_key(text, text, text)",
        "quota.verify_key(text, bytea)",
        "quota.create_token(text, text, text, bytea, timestamptz, text)",
        "quota.revoke_token(text, text, text)",
        "quota.verify_token(text, bytea)",
        "quota.begin_change(text, text, text, text)",
        "quota.begin_request(text, text, bytea, text)",
        "quota.end_request(text, text, integer, text, text)",
        "quota.operator_settle(uuid, jsonb, text, text)",
        "quota.operator_release(uuid, text, text)",
        "quota.logged_check(text)",
        "quota.set_rate_tiers(text[], text, text)",
        "quota_internal.require_token_scope(text)",
        "quota_internal.lock_key(text, text)",
        "quota_internal.require_not_revoked(text, text, timestamptz)",
        "quota_internal.same_secret(bytea, bytea)",
        "quota_internal.require_public_id(text, text)",
        "quota_internal.require_secret_hash(bytea)",
    ):
        op.execute(f"DROP FUNCTION {function}")
    op.execute("DROP TABLE quota_internal.api_keys, quota_internal.api_tokens, quota_internal.api_requests")
    install("0001", "errors")
    install("0003", "tenants")
    op.execute("DROP INDEX quota_internal.admin_log_checks")
    op.execute("ALTER TABLE quota_internal.admin_log DROP COLUMN request_id")
    install("0002", "tiers")
    install("0003", "views")
    # Roles belong to the server and stay; what this database granted to one goes.
    op.execute("REVOKE ALL ON ALL TABLES IN SCHEMA quota FROM quota_api")
    op.execute("REVOKE ALL ON ALL FUNCTIONS IN SCHEMA quota FROM quota_api")
    op.execute("REVOKE ALL ON SCHEMA quota FROM quota_api")
    install("0003", "grants")
