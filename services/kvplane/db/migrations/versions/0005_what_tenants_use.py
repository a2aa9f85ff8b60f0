"""what tenants use."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "tenant_rates",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("soft_requests", sa.Double(), nullable=False),
        sa.Column("soft_tokens", sa.Double(), nullable=False),
        sa.Column("hard_requests", sa.Double(), nullable=False),
        sa.Column("hard_tokens", sa.Double(), nullable=False),
        sa.Column("settled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("settled_unheld_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_rates")),
    )
    op.create_table(
        "tenant_usage",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("turns", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("tokens_reused", sa.BigInteger(), nullable=False),
        sa.Column("tokens_recomputed", sa.BigInteger(), nullable=False),
        sa.Column("corrected_tokens", sa.BigInteger(), nullable=False),
        sa.Column("corrected_unheld_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "part", name=op.f("pk_tenant_usage")),
    )
    op.create_table(
        "unheld_turns",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("key_digest", sa.LargeBinary(), nullable=False),
        sa.Column("quota", sa.String(length=64), nullable=False),
        sa.Column("open_us", sa.BigInteger(), nullable=False),
        sa.Column("charged_tokens", sa.BigInteger(), nullable=True),
        sa.Column("completed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "request_id", name=op.f("pk_unheld_turns")),
    )
    with op.batch_alter_table("unheld_turns", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_unheld_turns_open_us"), ["open_us"], unique=False)
    op.add_column("turns", sa.Column("charged_tokens", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "charged_tokens")
    with op.batch_alter_table("unheld_turns", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_unheld_turns_open_us"))
    op.drop_table("unheld_turns")
    op.drop_table("tenant_usage")
    op.drop_table("tenant_rates")
