"""The lease manager over SQLite with a fake clock and over a real PostgreSQL server."""

from collections.abc import AsyncIterator

import pytest
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from kvplane.lease.sql import tables
from lease.harness import Plane, Replica, install_clock

TABLES = [
    tables.ownerships, tables.ownership_payloads, tables.leases, tables.lease_requests,
    tables.lease_commands, tables.worker_epochs, tables.ended_sessions, tables.tenant_holds,
]  # fmt: skip


async def _plane(url: str, clock: Clock, unit: float) -> AsyncIterator[Plane]:
    database = Database(url, clock)
    await database.run(lambda tx: tables.metadata.create_all(tx.connection, tables=TABLES))
    if isinstance(clock, FakeClock) and not database.is_sqlite:
        await database.run(lambda tx: install_clock(tx, clock.now_us()))
    await database.close()
    plane = Plane(url, clock, unit)
    yield plane
    await plane.close()


@pytest.fixture
async def sqlite(tmp_path) -> AsyncIterator[Plane]:
    async for plane in _plane(f"sqlite:///{tmp_path}/kvplane.db", FakeClock(), 1.0):
        yield plane


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Plane]:
    async for plane in _plane(postgres_database, FakeClock(), 1.0):
        yield plane


@pytest.fixture
async def real_postgres(postgres_database: str) -> AsyncIterator[Plane]:
    """In real time, as PostgreSQL's own clock has it; a unit is 100 ms."""
    async for plane in _plane(postgres_database, SystemClock(), 0.1):
        yield plane


@pytest.fixture(params=["sqlite", "postgres"])
def plane(request: pytest.FixtureRequest) -> Plane:
    return request.getfixturevalue(request.param)


@pytest.fixture
def replica(plane: Plane) -> Replica:
    return plane.replica()
