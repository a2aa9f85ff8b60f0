"""ended sessions and stream numbers."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "ended_sessions",
        sa.Column("tenant_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "session_id", name=op.f("pk_ended_sessions")),
    )
    with op.batch_alter_table("ended_sessions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_ended_sessions_ended_us"), ["ended_us"], unique=False)
    op.add_column(
        "worker_epochs",
        sa.Column("stream_number", sa.BigInteger(), nullable=False, server_default="0"),
    )


def downgrade() -> None:
    op.drop_column("worker_epochs", "stream_number")
    with op.batch_alter_table("ended_sessions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_ended_sessions_ended_us"))
    op.drop_table("ended_sessions")
