"""Alembic's environment: one transaction a revision, short waits for locks, the database that quota.migrate names."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, pool, text

from quota.migrate import VERSION_TABLE, VERSION_TABLE_SCHEMA
from quota.tables import metadata


def _offline() -> None:
    context.configure(
        url="postgresql+psycopg://",
        target_metadata=metadata,
        literal_binds=True,
        version_table=VERSION_TABLE,
        version_table_schema=VERSION_TABLE_SCHEMA,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _online() -> None:
    url = context.config.attributes.get("url") or context.config.get_main_option("sqlalchemy.url")
    if not url:
        raise SystemExit("No database: use `quota migrate`, which knows it, or set sqlalchemy.url.")
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        # A migration that waits for a lock makes every reserve behind it wait too: give up soon, quota.migrate tries
        # again.
        # Sooner than deadlock_timeout (a second): where the two meet, the migration gives way, never a reserve.
        connection.execute(text("SET lock_timeout = '500ms'"))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=metadata,
            version_table=VERSION_TABLE,
            version_table_schema=VERSION_TABLE_SCHEMA,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()


if context.is_offline_mode():
    _offline()
else:
    _online()
