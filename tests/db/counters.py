"""A table, and transitions over it that read before they write."""

import asyncio
from collections.abc import Sequence

from kvplane.db.database import Database, Tx
from kvplane.kernel.errors import NotFound
from sqlalchemy import BigInteger, Column, MetaData, String, Table, insert, select, update

COUNTERS = Table(
    "counters",
    MetaData(),
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
_c = COUNTERS.c


def put(name: str, value: int = 0):
    return lambda tx: tx.connection.execute(insert(COUNTERS).values(name=name, value=value))


def add_one(name: str):
    """Read, then write what was read plus one; NotFound before the write."""

    def op(tx: Tx) -> int:
        query = select(_c.value).where(_c.name == name).with_for_update()
        value = tx.connection.scalar(query)
        if value is None:
            raise NotFound("counter", name)
        tx.connection.execute(update(COUNTERS).where(_c.name == name).values(value=value + 1))
        return value + 1

    return op


def add_one_to_each(names: Sequence[str]):
    """The same for many, locking them one by one in the order given."""

    def op(tx: Tx) -> None:
        for name in names:
            add_one(name)(tx)

    return op


async def value(database: Database, name: str) -> int | None:
    query = select(_c.value).where(_c.name == name)
    return await database.read(lambda tx: tx.connection.scalar(query))


async def add_many(database: Database, name: str, times: int) -> None:
    await asyncio.gather(*(database.run(add_one(name)) for _ in range(times)))
