"""One database for all replicas of a world: SQLite in memory, slow or away at will.

`Database` is the product's own, with its queue, group commit and repetitions; only the
backend below it is ours: a transaction is atomic and takes time before and after.
"""

import asyncio
import random
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any, Final

import kvplane.lease.store_sql
import kvplane.routing.store_sql
import kvplane.session.store_sql
import kvplane.tenant.store_sql  # noqa: F401
from kvplane.db.database import Database, Tx, _outcomes
from kvplane.db.failures import InDoubt
from kvplane.db.metadata import metadata
from kvplane.kernel.errors import KvplaneError
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from simulation.loop import SimClock

_LEASE: Final = "kvplane/lease/"


@cache
def _named(names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names)


class _Rows:
    """A cursor, as SQLAlchemy's results are used."""

    __slots__ = ("_cursor", "all", "rowcount")

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor
        self.all, self.rowcount = cursor.fetchall, cursor.rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor)

    def first(self) -> Any:
        """Return the first row, its columns by their names too."""
        row = self._cursor.fetchone()
        if row is None:
            return None
        return _named(tuple(column[0] for column in self._cursor.description))._make(row)

    def scalars(self) -> Iterator[Any]:
        """Yield the first column."""
        return (row[0] for row in self._cursor)

    def scalar(self) -> Any:
        """Return the first column of the first row."""
        row = self._cursor.fetchone()
        return None if row is None else row[0]


class _Connection:
    """SQLAlchemy's connection; prepared statements go straight to the driver."""

    def __init__(self, connection: Any, raw: sqlite3.Connection) -> None:
        self._raw = raw
        self.dialect = connection.dialect
        self.execute, self.scalar, self.scalars = (
            connection.execute, connection.scalar, connection.scalars
        )  # fmt: skip

    def exec_driver_sql(self, sql: str, arguments: Any = ()) -> _Rows:
        """Run a statement, or many times when there is a list of arguments."""
        run = self._raw.executemany if isinstance(arguments, list) else self._raw.execute
        try:
            return _Rows(run(sql, arguments))
        except sqlite3.Error as error:
            raise DBAPIError.instance(
                sql, arguments, error, sqlite3.Error, dialect=self.dialect
            ) from error


@cache
def _connection() -> tuple[_Connection, sqlite3.Connection]:
    """Return the process's one connection, and the driver's below it.

    One engine for all worlds: its cache of compiled statements is what makes them quick.
    """
    engine = create_engine(
        "sqlite+pysqlite:///:memory:",
        connect_args={"isolation_level": None},
        pool_reset_on_return=None,
    )
    connection = engine.connect()
    # For SQLAlchemy this is one transaction that never ends; ours are below it.
    metadata.create_all(connection)
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return _Connection(connection, raw), raw


class Store:
    """What is durable. `commits` counts transactions; `watch` sees each one's outcome."""

    def __init__(self, clock: SimClock, rng: random.Random) -> None:
        self.connection, self.raw = _connection()
        for table in metadata.tables:
            self.raw.execute(f"DELETE FROM {table}")
        self.clock, self._rng = clock, rng
        self.away = False
        self.slow_s = 0.0
        self.in_doubt = 0.0  # the chance that a commit's answer gets lost
        self.transactions = 0
        self._views: dict[Any, Any] = {}
        self._version = 0  # of what the lease service stores
        self.watch: Callable[[], None] = lambda: None

    async def pause(self, most_s: float) -> None:
        """Take time, as a statement on its way does."""
        draw = self._rng.random()
        if self.slow_s or draw < 0.5:  # half the time, nobody else comes in between
            await asyncio.sleep(draw * 2 * (most_s + self.slow_s))

    def execute(self, operations: list[Callable[[Tx], Any]], write: bool) -> list[Any]:
        """Run them in one transaction."""
        self.transactions += 1
        changes = self.raw.total_changes
        self.raw.execute("BEGIN IMMEDIATE")
        try:
            outcomes = _outcomes(operations, Tx(self.connection, self.clock))  # type: ignore[arg-type]
        except BaseException:
            self.raw.execute("ROLLBACK")
            raise
        self.raw.execute("COMMIT")
        changed = write and self.raw.total_changes != changes
        if changed and any(_LEASE in _code(each).co_filename for each in operations):
            self._version += 1
            self.watch()
        return outcomes

    def look(self, operation: Callable[[Tx], Any]) -> Any:
        """Run a query. The polls of streams see the same again until something is stored."""
        if "watch" not in _code(operation).co_names:
            return self.execute([operation], write=False)[0]
        cells = tuple(repr(cell.cell_contents) for cell in operation.__closure__ or ())
        version, seen, view = self._views.get(cells, (-1, None, None))
        if version == self._version:
            return view
        # All that it depends on.
        rows = (
            self.select("SELECT * FROM worker_epochs"),
            self.select("SELECT * FROM lease_commands"),
        )
        if seen != rows:
            view = self.execute([operation], write=False)[0]
            if any(c.hold_us is not None for one in view.values() for c in one.commands):
                return view  # an order to hold longer asks for less each time
        self._views[cells] = self._version, rows, view
        return view

    def select(self, query: str, *args: Any) -> list[Any]:
        """Look without touching."""
        cursor: sqlite3.Cursor = self.raw.execute(query, args)
        return cursor.fetchall()

    def in_doubt_now(self) -> bool:
        """Draw whether this commit's answer gets lost."""
        return self.in_doubt > 0 and self._rng.random() < self.in_doubt


def _code(operation: Any) -> CodeType:
    while isinstance(operation, partial):
        operation = operation.func
    code: CodeType = operation.__code__
    return code


class _Backend:
    lanes: Final = 2

    def __init__(self, store: Store) -> None:
        self._store = store

    async def transaction(self, operations: list[Callable[[Tx], Any]], again: bool) -> list[Any]:
        store = self._store
        await store.pause(0.002)
        self._there()
        outcomes = store.execute(operations, write=True)
        if store.in_doubt_now():
            raise InDoubt
        await store.pause(0.001)
        return outcomes

    async def read(self, operation: Callable[[Tx], Any]) -> Any:
        await self._store.pause(0.002)
        self._there()
        outcome = self._store.look(operation)
        if isinstance(outcome, KvplaneError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Nothing to close."""

    def _there(self) -> None:
        if self._store.away:
            raise ConnectionRefusedError("the database is away")


class SimDatabase(Database):
    """A replica's own pool over the shared store."""

    def __init__(self, store: Store) -> None:
        self._backend = _Backend(store)  # type: ignore[assignment]
        self._queue, self._lanes, self._closed = [], set(), False
