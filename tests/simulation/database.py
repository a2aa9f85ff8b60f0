"""One database for all replicas of a world: SQLite in memory, slow or away at will.

`Database` is the product's own, with its queue, group commit and repetitions; only the
backend below it is ours: a transaction is atomic and takes time before and after.
"""

import asyncio
import random
import sqlite3
from collections.abc import Callable
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

from simulation.loop import SimClock

_LEASE: Final = "kvplane/lease/"


@cache
def _connection() -> tuple[Any, Any]:
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
    return connection, connection.connection.driver_connection


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
            self.watch()
        return outcomes

    def look(self, operation: Callable[[Tx], Any]) -> Any:
        """Run a query. The polls of streams see the same again until something is stored."""
        if "watch" not in _code(operation).co_names:
            return self.execute([operation], write=False)[0]
        cells = tuple(repr(cell.cell_contents) for cell in operation.__closure__ or ())
        # All that it depends on.
        rows = (
            self.select("SELECT * FROM worker_epochs"),
            self.select("SELECT * FROM lease_commands"),
        )
        seen, view = self._views.get(cells, (None, None))
        if seen != rows:
            view = self.execute([operation], write=False)[0]
            ages = any(c.hold_us is not None for one in view.values() for c in one.commands)
            if not ages:  # an order to hold longer asks for less each time
                self._views[cells] = rows, view
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
