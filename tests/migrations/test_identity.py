"""Tenants and keys that were there before 0003 stay good, and go back as good as they can."""

import pytest
from kvplane.db import migrate
from kvplane.db.database import Database
from kvplane.kernel.clock import SystemClock
from sqlalchemy import text

KEY = "INSERT INTO api_keys (tenant_id, key_id, prefix, secret_hash, create_us{more}) VALUES ("


@pytest.fixture
async def database(url):
    one = Database(url, SystemClock())
    yield one
    await one.close()


async def execute(database, *statements):
    def operation(tx):
        return [tuple(row) for row in results(tx)]

    def results(tx):
        for statement in statements:
            result = tx.connection.execute(text(statement))
        return result if result.returns_rows else []

    return await database.run(operation)


async def test_tenants_get_salts_keys_get_roles_and_the_way_back_opens_nothing(url, database):
    await migrate.upgrade(url, "0002")
    old = KEY.format(more="")
    await execute(
        database,
        "INSERT INTO tenants VALUES ('acme', 'Acme', 1), ('nova', 'Nova', 2)",
        old + "'acme', 'key-1', 'kvp_1', 'hash-1', 1)",
    )

    await migrate.upgrade(url)
    salts = [salt for (salt,) in await execute(database, "SELECT cache_salt FROM tenants")]
    assert len(set(salts)) == 2
    assert all(len(salt) == 32 and int(salt, 16) for salt in salts)
    keys = "SELECT key_id, role, worker_id, expire_us, revoke_us FROM api_keys"
    assert await execute(database, keys) == [("key-1", "tenant", "", None, None)]

    new = KEY.format(more=", role, worker_id, expire_us")
    await execute(
        database,
        new + "'acme', 'key-2', 'kvp_2', 'hash-2', 1, 'tenant', '', 5)",
        new + "'', 'key-3', 'kvp_3', 'hash-3', 1, 'operator', '', NULL)",
        new + "'', 'key-4', 'kvp_4', 'hash-4', 1, 'worker', 'w', NULL)",
    )
    await migrate.downgrade(url, "0002")
    left = "SELECT key_id, revoke_us FROM api_keys ORDER BY key_id"
    assert await execute(database, left) == [("key-1", None), ("key-2", 5)]
