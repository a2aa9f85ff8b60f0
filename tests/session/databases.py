"""Tables for the tests, in a database of either kind."""

from kvplane.db.database import postgres_engine
from kvplane.db.metadata import metadata
from sqlalchemy import Table, create_engine, make_url


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
