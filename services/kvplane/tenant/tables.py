"""The tables of tenants, keys and limits."""

from dataclasses import fields
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
)

from kvplane.db.metadata import metadata
from kvplane.kernel.limits import Limits

SOFT: Final = 1
HARD: Final = 2

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("display_name", String(256), nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("cache_salt", String(32), nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    # Empty for workers' and operators' keys, so no foreign key.
    Column("tenant_id", String(64), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("revoke_us", BigInteger, nullable=True),
    Column("role", String(16), nullable=False),
    Column("worker_id", String(128), nullable=False),
    Column("expire_us", BigInteger, nullable=True),
    # These two find the tenant, so they cannot begin with it.
    Index("uq_api_keys_secret_hash", "secret_hash", unique=True),
    Index("uq_api_keys_key_id", "key_id", unique=True),
)

# A row for the soft limits and one for the hard ones; none: no limits.
tenant_limits = Table(
    "tenant_limits",
    metadata,
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("level", Integer, primary_key=True, autoincrement=False),
    *[
        Column(field.name, BigInteger if field.type is int else Float, nullable=False)
        for field in fields(Limits)
    ],
)

TABLES: Final = (tenants, api_keys, tenant_limits)
