"""Tenants and API keys over SQLite and PostgreSQL."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    LargeBinary,
    Row,
    String,
    Table,
    bindparam,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Database, Tx
from kvplane.db.metadata import metadata
from kvplane.kernel.errors import AlreadyExists, NotFound
from kvplane.tenant import domain
from kvplane.tenant.domain import ApiKey, Tenant

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("display_name", String(256), nullable=False),
    Column("create_us", BigInteger, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("revoke_us", BigInteger, nullable=True),
    # These two find the tenant, so they cannot begin with it.
    Index("uq_api_keys_secret_hash", "secret_hash", unique=True),
    Index("uq_api_keys_key_id", "key_id", unique=True),
)

_by_hash = select(api_keys).where(api_keys.c.secret_hash == bindparam("hash"))


class SqlTenantStore:
    """TenantStore over `Database`; the tables are made by the migrations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ensure(self, tenant_id: str, display_name: str) -> None:
        """See TenantStore."""

        def operation(tx: Tx) -> None:
            if tx.connection.scalar(_one(tenant_id)) is None:
                _insert_new(tx, Tenant(tenant_id, display_name, tx.now_us()))

        await self._database.run(operation)

    async def create(self, tenant_id: str, display_name: str) -> Tenant:
        """See TenantStore."""

        def operation(tx: Tx) -> Tenant | None:
            if tx.connection.scalar(_one(tenant_id)) is not None:
                return None
            tenant = Tenant(tenant_id, display_name, tx.now_us())
            # A replica that was first at this very moment wins.
            return tenant if _insert_new(tx, tenant) else None

        tenant = await self._database.run(operation)
        if tenant is None:
            raise AlreadyExists("tenant", tenant_id)
        return tenant

    async def get(self, tenant_id: str) -> Tenant:
        """See TenantStore."""
        return await self._database.read(lambda tx: _existing(tx, tenant_id))

    async def list_tenants(self, after: str, limit: int) -> list[Tenant]:
        """See TenantStore."""
        statement = (
            select(tenants)
            .where(tenants.c.tenant_id > after)
            .order_by(tenants.c.tenant_id)
            .limit(limit)
        )
        return await self._database.read(
            lambda tx: [_tenant_of(row) for row in tx.connection.execute(statement)]
        )

    async def create_key(self, tenant_id: str, key_id: str, secret: str) -> ApiKey:
        """See TenantStore."""

        def operation(tx: Tx) -> ApiKey:
            _existing(tx, tenant_id)
            key = domain.new_key(tenant_id, key_id, secret, tx.now_us())
            tx.connection.execute(
                insert(api_keys).values(
                    tenant_id=key.tenant_id,
                    key_id=key.key_id,
                    prefix=key.prefix,
                    secret_hash=key.secret_hash,
                    create_us=key.create_us,
                )
            )
            return key

        return await self._database.run(operation)

    async def list_keys(self, tenant_id: str) -> list[ApiKey]:
        """See TenantStore."""
        statement = (
            select(api_keys)
            .where(api_keys.c.tenant_id == tenant_id)
            .order_by(api_keys.c.create_us, api_keys.c.key_id)
        )

        def operation(tx: Tx) -> list[ApiKey]:
            _existing(tx, tenant_id)
            return [_key_of(row) for row in tx.connection.execute(statement)]

        return await self._database.read(operation)

    async def revoke_key(self, key_id: str) -> ApiKey:
        """See TenantStore."""
        statement = select(api_keys).where(api_keys.c.key_id == key_id).with_for_update()

        def operation(tx: Tx) -> ApiKey:
            row = tx.connection.execute(statement).one_or_none()
            if row is None:
                raise NotFound("API key", key_id)
            key = domain.revoke(_key_of(row), tx.now_us())
            tx.connection.execute(
                update(api_keys)
                .where(api_keys.c.tenant_id == key.tenant_id, api_keys.c.key_id == key_id)
                .values(revoke_us=key.revoke_us)
            )
            return key

        return await self._database.run(operation)

    async def find_key(self, secret_hash: bytes) -> ApiKey | None:
        """See TenantStore."""

        def operation(tx: Tx) -> ApiKey | None:
            row = tx.connection.execute(_by_hash, {"hash": secret_hash}).one_or_none()
            return None if row is None else _key_of(row)

        return await self._database.read(operation)


def _one(tenant_id: str) -> Any:
    return select(tenants.c.tenant_id).where(tenants.c.tenant_id == tenant_id)


def _existing(tx: Tx, tenant_id: str) -> Tenant:
    statement = select(tenants).where(tenants.c.tenant_id == tenant_id)
    row = tx.connection.execute(statement).one_or_none()
    if row is None:
        raise NotFound("tenant", tenant_id)
    return _tenant_of(row)


def _insert_new(tx: Tx, tenant: Tenant) -> bool:
    new = postgresql.insert(tenants) if tx.is_postgres else sqlite.insert(tenants)
    result = tx.connection.execute(
        new.values(
            tenant_id=tenant.tenant_id,
            display_name=tenant.display_name,
            create_us=tenant.create_us,
        ).on_conflict_do_nothing()
    )
    return result.rowcount == 1


def _tenant_of(row: Row[Any]) -> Tenant:
    return Tenant(**row._mapping)


def _key_of(row: Row[Any]) -> ApiKey:
    return ApiKey(**row._mapping)
