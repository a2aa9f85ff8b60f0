"""Routing over each database, with other services that a test can break."""

from collections.abc import AsyncIterator

import pytest
from kvplane.db.database import postgres_engine
from kvplane.db.metadata import metadata
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from kvplane.routing.store_sql import routes, workers
from routing.harness import One, Plane
from sqlalchemy import Table, create_engine, make_url


async def create_tables(url: str, tables: list[Table]) -> None:
    if url.startswith("sqlite"):
        engine = create_engine(url)
        metadata.create_all(engine, tables=tables)
        engine.dispose()
        return
    async_engine = postgres_engine(make_url(url))
    async with async_engine.begin() as connection:
        await connection.run_sync(lambda sync: metadata.create_all(sync, tables=tables))
    await async_engine.dispose()


async def _planes(url: str, clock: Clock) -> AsyncIterator[Plane]:
    await create_tables(url, [workers, routes])
    plane = Plane(url, clock)
    yield plane
    for database in plane.databases:
        await database.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def sqlite(tmp_path, clock: FakeClock) -> AsyncIterator[Plane]:
    """Over SQLite, with a clock that only the test moves."""
    async for plane in _planes(f"sqlite:///{tmp_path}/kvplane.db", clock):
        yield plane


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Plane]:
    """Over a real PostgreSQL server, in real time."""
    async for plane in _planes(postgres_database, SystemClock()):
        yield plane


@pytest.fixture(params=["sqlite", "postgres"])
def plane(request: pytest.FixtureRequest) -> Plane:
    return request.getfixturevalue(request.param)


@pytest.fixture
def one(plane: Plane) -> One:
    """One replica over each database."""
    return One(plane, plane.replica())


@pytest.fixture
def fake(sqlite: Plane) -> One:
    """One replica over SQLite, with the fake clock."""
    return One(sqlite, sqlite.replica())
