"""hold limits and what tenants hold."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_LIVE = sa.text("state <= 2")


def upgrade() -> None:
    op.create_table(
        "tenant_holds",
        sa.Column("tenant_id", sa.String(length=128), nullable=False),
        sa.Column("held_token_seconds", sa.Double(), nullable=False),
        sa.Column("counted_until_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_holds")),
    )
    op.add_column(
        "worker_epochs",
        sa.Column("hold_limit_blocks", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.add_column(
        "ownerships", sa.Column("blocks", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.execute("UPDATE ownerships SET blocks = (num_tokens + block_size - 1) / block_size")
    op.create_index(
        "ix_ownerships_live",
        "ownerships",
        ["worker_id", "tenant_id", "num_tokens", "blocks", "reported_us", "state"],
        unique=False,
        sqlite_where=_LIVE,
        postgresql_where=_LIVE,
    )
    op.create_index(
        "ix_leases_live_tenant_id",
        "leases",
        ["tenant_id", "state"],
        unique=False,
        sqlite_where=_LIVE,
        postgresql_where=_LIVE,
    )


def downgrade() -> None:
    op.drop_index("ix_leases_live_tenant_id", table_name="leases")
    op.drop_index("ix_ownerships_live", table_name="ownerships")
    op.drop_column("ownerships", "blocks")
    op.drop_column("worker_epochs", "hold_limit_blocks")
    op.drop_table("tenant_holds")
