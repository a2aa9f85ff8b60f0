from collections.abc import AsyncIterator, Callable

import pytest
from db.counters import COUNTERS
from db.postgres import postgres, url
from kvplane.db.database import Database
from kvplane.kernel.clock import SystemClock

__all__ = ["postgres", "url"]


@pytest.fixture
async def replicas() -> AsyncIterator[Callable[[str], Database]]:
    """Makes instances over one database, as two processes would have them."""
    made: list[Database] = []

    def make(url: str) -> Database:
        made.append(Database(url, SystemClock()))
        return made[-1]

    yield make
    for database in made:
        await database.close()


@pytest.fixture
async def database(url: str, replicas: Callable[[str], Database]) -> Database:
    """One with the table of counters, empty."""
    one = replicas(url)
    await one.run(lambda tx: COUNTERS.create(tx.connection))
    return one
