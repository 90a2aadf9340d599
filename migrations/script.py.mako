"""${message}"""

from __future__ import annotations

from quota.migrate import install

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    ${upgrades if upgrades else "install(revision)"}


def downgrade() -> None:
    ${downgrades if downgrades else "raise RuntimeError('name the frozen files of the revision before')"}
