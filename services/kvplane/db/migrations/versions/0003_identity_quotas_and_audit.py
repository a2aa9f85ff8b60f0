"""identity, quotas and audit.

Keys get roles and an end, tenants a secret salt and limits; changes are written down.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# 128 random bits for each row, as hexadecimal digits.
_SALTS = {
    "sqlite": "UPDATE tenants SET cache_salt = lower(hex(randomblob(16)))",
    "postgresql": (
        "UPDATE tenants SET cache_salt = encode(substr(sha256(convert_to("
        "gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')), 1, 16), 'hex')"
    ),
}


def _tenants(*more: sa.Column[Any]) -> sa.Table:
    """Return the table as it is, for SQLite, which changes one by making it anew."""
    return sa.Table(
        "tenants",
        sa.MetaData(),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("display_name", sa.String(length=256), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        *more,
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenants"),
    )


def _api_keys(*more: sa.Column[Any] | sa.ForeignKeyConstraint) -> sa.Table:
    return sa.Table(
        "api_keys",
        sa.MetaData(),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("revoke_us", sa.BigInteger(), nullable=True),
        *more,
        sa.PrimaryKeyConstraint("tenant_id", "key_id", name="pk_api_keys"),
        sa.Index("uq_api_keys_key_id", "key_id", unique=True),
        sa.Index("uq_api_keys_secret_hash", "secret_hash", unique=True),
    )


def upgrade() -> None:
    # Workers' and operators' keys are no tenant's.
    owner = sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.tenant_id"], name="fk_api_keys_tenant_id"
    )
    with op.batch_alter_table("api_keys", copy_from=_api_keys(owner)) as batch_op:
        batch_op.drop_constraint("fk_api_keys_tenant_id", type_="foreignkey")
    # The keys that exist are tenants'.
    op.add_column(
        "api_keys",
        sa.Column("role", sa.String(length=16), nullable=False, server_default="tenant"),
    )
    op.add_column(
        "api_keys",
        sa.Column("worker_id", sa.String(length=128), nullable=False, server_default=""),
    )
    op.add_column("api_keys", sa.Column("expire_us", sa.BigInteger(), nullable=True))

    op.add_column("tenants", sa.Column("cache_salt", sa.String(length=32), nullable=True))
    op.execute(_SALTS[op.get_context().dialect.name])
    salt = sa.Column("cache_salt", sa.String(length=32), nullable=True)
    with op.batch_alter_table("tenants", copy_from=_tenants(salt)) as batch_op:
        batch_op.alter_column("cache_salt", existing_type=sa.String(length=32), nullable=False)

    op.create_table(
        "tenant_limits",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sessions", sa.BigInteger(), nullable=False),
        sa.Column("held_tokens", sa.BigInteger(), nullable=False),
        sa.Column("held_blocks", sa.BigInteger(), nullable=False),
        sa.Column("live_leases", sa.BigInteger(), nullable=False),
        sa.Column("requests_per_second", sa.Float(), nullable=False),
        sa.Column("tokens_per_second", sa.Float(), nullable=False),
        sa.Column("request_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_tenant_limits_tenant_id")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "level", name=op.f("pk_tenant_limits")),
    )

    op.create_table(
        "audit_events",
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=256), nullable=False),
        sa.Column("detail", sa.String(length=512), nullable=False),
        sa.Column("outcome", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_audit_events")),
    )
    op.create_index("ix_audit_events_time_us", "audit_events", ["time_us", "event_id"])
    op.create_index(
        "ix_audit_events_tenant_id_time_us", "audit_events", ["tenant_id", "time_us", "event_id"]
    )


def downgrade() -> None:
    op.drop_index("ix_audit_events_tenant_id_time_us", "audit_events")
    op.drop_index("ix_audit_events_time_us", "audit_events")
    op.drop_table("audit_events")
    op.drop_table("tenant_limits")

    op.drop_column("tenants", "cache_salt")

    # The build before knows tenants' keys only, and none that end by themselves.
    op.execute("DELETE FROM api_keys WHERE role <> 'tenant'")
    op.execute(
        "UPDATE api_keys SET revoke_us = expire_us"
        " WHERE revoke_us IS NULL AND expire_us IS NOT NULL"
    )
    for name in ("expire_us", "worker_id", "role"):
        op.drop_column("api_keys", name)
    with op.batch_alter_table("api_keys", copy_from=_api_keys()) as batch_op:
        batch_op.create_foreign_key(
            "fk_api_keys_tenant_id", "tenants", ["tenant_id"], ["tenant_id"]
        )
