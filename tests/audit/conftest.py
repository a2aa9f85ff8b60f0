"""An audit log over each database."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from kvplane.audit.domain import AuditConfig
from kvplane.audit.main import AuditPart, log
from kvplane.audit.service import AuditLog
from kvplane.audit.servicer import AuditServicer
from kvplane.audit.tables import TABLES
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from session.databases import create_tables


@dataclass
class Book:
    """Makes replicas of the log over one database."""

    url: str
    clock: Clock
    databases: list[Database] = field(default_factory=list)

    def log(self, kept_days: int = 400) -> AuditLog:
        database = Database(self.url, self.clock)
        self.databases.append(database)
        return log(database, self.clock, AuditConfig(kept_days))

    def part(self, kept_days: int = 400) -> AuditPart:
        return AuditPart(self.log(kept_days))

    def servicer(self) -> AuditServicer:
        return AuditServicer(self.log())


async def _book(url: str, clock: Clock) -> AsyncIterator[Book]:
    await create_tables(url, list(TABLES))
    book = Book(url, clock)
    yield book
    for database in book.databases:
        await database.close()


@pytest.fixture
async def sqlite(tmp_path) -> AsyncIterator[Book]:
    async for book in _book(f"sqlite:///{tmp_path}/kvplane.db", FakeClock()):
        yield book


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Book]:
    async for book in _book(postgres_database, SystemClock()):
        yield book


@pytest.fixture(params=["sqlite", "postgres"])
def book(request: pytest.FixtureRequest) -> Book:
    return request.getfixturevalue(request.param)
