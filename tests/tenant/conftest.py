"""Tenants over each database."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from kvplane.tenant.main import TenantPart, build
from kvplane.tenant.tables import TABLES
from session.databases import create_tables
from sqlalchemy import text


@dataclass
class Directory:
    """Makes replicas of the tenant service over one database."""

    url: str
    clock: Clock
    databases: list[Database] = field(default_factory=list)

    def replica(self) -> TenantPart:
        database = Database(self.url, self.clock)
        self.databases.append(database)
        return build(database, self.clock)

    async def execute(self, statement: str) -> list[tuple]:
        return await self.databases[0].read(
            lambda tx: [tuple(row) for row in tx.connection.execute(text(statement))]
        )


async def _directory(url: str, clock: Clock) -> AsyncIterator[Directory]:
    await create_tables(url, list(TABLES))
    directory = Directory(url, clock)
    yield directory
    for database in directory.databases:
        await database.close()


@pytest.fixture
async def sqlite(tmp_path) -> AsyncIterator[Directory]:
    async for directory in _directory(f"sqlite:///{tmp_path}/kvplane.db", FakeClock()):
        yield directory


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Directory]:
    async for directory in _directory(postgres_database, SystemClock()):
        yield directory


@pytest.fixture(params=["sqlite", "postgres"])
def directory(request: pytest.FixtureRequest) -> Directory:
    return request.getfixturevalue(request.param)
