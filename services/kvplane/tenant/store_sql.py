"""Tenants, API keys and limits over SQLite and PostgreSQL."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Database, Tx
from kvplane.kernel.context import Role
from kvplane.kernel.errors import AlreadyExists, NotFound, QuotaExceeded
from kvplane.kernel.limits import NO_LIMITS, Limits, Quotas
from kvplane.tenant import domain
from kvplane.tenant.domain import NO_TENANT, ApiKey, Changes, FoundKey, KeyOrder, Tenant
from kvplane.tenant.tables import HARD, SOFT, api_keys, tenant_limits, tenants

_by_hash = (
    select(api_keys, tenants.c.cache_salt)
    .outerjoin(tenants, tenants.c.tenant_id == api_keys.c.tenant_id)
    .where(api_keys.c.secret_hash == bindparam("hash"))
)


class SqlTenantStore:
    """TenantStore over `Database`; the tables are made by the migrations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ensure(self, tenant_id: str, display_name: str, salt: str) -> None:
        """See TenantStore."""

        def operation(tx: Tx) -> None:
            if tx.connection.scalar(_one(tenant_id)) is None:
                _insert_new(tx, Tenant(tenant_id, display_name, tx.now_us(), salt))

        await self._database.run(operation)

    async def create(self, tenant_id: str, display_name: str, salt: str) -> Tenant:
        """See TenantStore."""

        def operation(tx: Tx) -> Tenant | None:
            if tx.connection.scalar(_one(tenant_id)) is not None:
                return None
            tenant = Tenant(tenant_id, display_name, tx.now_us(), salt)
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
            lambda tx: [Tenant(**row._mapping) for row in tx.connection.execute(statement)]
        )

    async def set_salt(self, tenant_id: str, salt: str) -> Tenant:
        """See TenantStore."""
        statement = update(tenants).where(tenants.c.tenant_id == tenant_id).values(cache_salt=salt)

        def operation(tx: Tx) -> Tenant:
            if tx.connection.execute(statement).rowcount == 0:
                raise NotFound("tenant", tenant_id)
            return _existing(tx, tenant_id)

        return await self._database.run(operation)

    async def create_key(self, order: KeyOrder, key_id: str, secret: str) -> ApiKey:
        """See TenantStore."""
        most = domain.most_live_keys(order.tenant_id)

        def operation(tx: Tx) -> ApiKey:
            if order.tenant_id != NO_TENANT:
                # Locked, so that two at once count one another.
                _existing(tx, order.tenant_id, lock=True)
            now_us = tx.now_us()
            live = (
                select(func.count())
                .select_from(api_keys)
                .where(api_keys.c.tenant_id == order.tenant_id, _is_valid(now_us))
            )
            if tx.connection.scalar(live) >= most:  # type: ignore[operator]
                raise QuotaExceeded(
                    f"there are {most} API keys that work already: revoke some",
                    metadata={"quota": "api_keys"},
                )
            key = domain.new_key(order, key_id, secret, now_us)
            tx.connection.execute(insert(api_keys).values(**asdict(key)))
            return key

        return await self._database.run(operation)

    async def list_keys(self, tenant_id: str) -> list[ApiKey]:
        """See TenantStore."""
        own = api_keys.c.tenant_id == tenant_id
        newest_first = api_keys.c.create_us.desc(), api_keys.c.key_id.desc()

        def operation(tx: Tx) -> list[ApiKey]:
            if tenant_id != NO_TENANT:
                _existing(tx, tenant_id)
            valid = _is_valid(tx.now_us())
            statements = (
                select(api_keys).where(own, valid),
                select(api_keys)
                .where(own, ~valid)
                .order_by(*newest_first)
                .limit(domain.LISTED_ENDED_KEYS),
            )
            return [
                _key_of(row._mapping)
                for statement in statements
                for row in tx.connection.execute(statement)
            ]

        found = await self._database.read(operation)
        return sorted(found, key=lambda key: (key.create_us, key.key_id))

    async def revoke_key(self, key_id: str) -> ApiKey:
        """See TenantStore."""
        statement = select(api_keys).where(api_keys.c.key_id == key_id).with_for_update()

        def operation(tx: Tx) -> ApiKey:
            row = tx.connection.execute(statement).one_or_none()
            if row is None:
                raise NotFound("API key", key_id)
            key = domain.revoke(_key_of(row._mapping), tx.now_us())
            tx.connection.execute(
                update(api_keys)
                .where(api_keys.c.tenant_id == key.tenant_id, api_keys.c.key_id == key_id)
                .values(revoke_us=key.revoke_us)
            )
            return key

        return await self._database.run(operation)

    async def find_key(self, secret_hash: bytes) -> FoundKey | None:
        """See TenantStore."""

        def operation(tx: Tx) -> FoundKey | None:
            row = tx.connection.execute(_by_hash, {"hash": secret_hash}).one_or_none()
            now_us = tx.now_us()
            if row is None:
                return None
            values = dict(row._mapping)
            salt = values.pop("cache_salt") or ""
            return FoundKey(_key_of(values), salt, now_us)

        return await self._database.read(operation)

    async def quotas(self, tenant_id: str) -> Quotas:
        """See TenantStore."""

        def operation(tx: Tx) -> Quotas:
            _existing(tx, tenant_id)
            return _quotas_of(tx, tenant_id)

        return await self._database.read(operation)

    async def change_quotas(self, tenant_id: str, soft: Changes, hard: Changes) -> Quotas:
        """See TenantStore."""

        def operation(tx: Tx) -> Quotas:
            _existing(tx, tenant_id, lock=True)
            quotas = domain.change(_quotas_of(tx, tenant_id), soft, hard)
            tx.connection.execute(
                delete(tenant_limits).where(tenant_limits.c.tenant_id == tenant_id)
            )
            levels = ((SOFT, quotas.soft), (HARD, quotas.hard))
            tx.connection.execute(
                insert(tenant_limits),
                [{"tenant_id": tenant_id, "level": n, **asdict(limits)} for n, limits in levels],
            )
            return quotas

        return await self._database.run(operation)


def _one(tenant_id: str) -> Any:
    return select(tenants.c.tenant_id).where(tenants.c.tenant_id == tenant_id)


def _existing(tx: Tx, tenant_id: str, lock: bool = False) -> Tenant:
    statement = select(tenants).where(tenants.c.tenant_id == tenant_id)
    row = tx.connection.execute(statement.with_for_update() if lock else statement).one_or_none()
    if row is None:
        raise NotFound("tenant", tenant_id)
    return Tenant(**row._mapping)


def _insert_new(tx: Tx, tenant: Tenant) -> bool:
    new = postgresql.insert(tenants) if tx.is_postgres else sqlite.insert(tenants)
    result = tx.connection.execute(new.values(**asdict(tenant)).on_conflict_do_nothing())
    return result.rowcount == 1


def _is_valid(now_us: int) -> ColumnElement[bool]:
    """Return `ApiKey.valid_at` as a condition."""
    expire_us = api_keys.c.expire_us
    return api_keys.c.revoke_us.is_(None) & or_(expire_us.is_(None), expire_us > now_us)


def _key_of(values: Mapping[Any, Any]) -> ApiKey:
    return ApiKey(**{**values, "role": Role(values["role"])})


def _quotas_of(tx: Tx, tenant_id: str) -> Quotas:
    statement = select(tenant_limits).where(tenant_limits.c.tenant_id == tenant_id)
    found = {row.level: _limits_of(row._mapping) for row in tx.connection.execute(statement)}
    # A soft limit of leases could once be stored; it never did anything.
    soft = replace(found.get(SOFT, NO_LIMITS), live_leases=0)
    return Quotas(soft=soft, hard=found.get(HARD, NO_LIMITS))


def _limits_of(values: Mapping[Any, Any]) -> Limits:
    return Limits(**{name: values[name] for name in domain.LIMIT_NAMES})
