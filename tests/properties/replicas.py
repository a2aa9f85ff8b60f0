"""Two replicas over one database, each with a thread and an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

from kvplane.db import database as databases
from kvplane.db.database import Database, postgres_engine
from kvplane.db.metadata import metadata
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import KvplaneError
from lease.harness import install_clock, move_clock
from sqlalchemy import Table

Call = Callable[[Any], Coroutine[Any, Any, Any]]
Rows = dict[str, list[dict[str, Any]]]
# No call takes as long, unless it hangs.
_LIMIT_S = 60


class Replica:
    """A store as one process has it."""

    def __init__(self, url: str, clock: FakeClock, make_store: Callable[[Database], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        with patch.object(databases, "postgres_engine", _patient_engine):
            self.database = Database(url, clock)
        self.store = make_store(self.database)

    def begin(self, call: Call) -> Future[Any]:
        """Start a call of the store."""
        return asyncio.run_coroutine_threadsafe(call(self.store), self._loop)

    def run(self, operation: Callable[[Any], Any]) -> Any:
        """Run an operation on the database itself."""
        return self.begin(lambda _: self.database.run(operation)).result(_LIMIT_S)

    def close(self) -> None:
        self.begin(lambda _: self.database.close()).result(_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()


class Replicas:
    """The two of them, and the clock that decides in both."""

    def __init__(
        self, url: str, tables: Sequence[Table], make_store: Callable[[Database], Any]
    ) -> None:
        self._tables = list(tables)
        self._clock = FakeClock()
        self._replicas = [Replica(url, self._clock, make_store) for _ in range(2)]
        first = self._replicas[0]
        first.run(lambda tx: metadata.create_all(tx.connection, tables=self._tables))
        self._moves = not first.database.is_sqlite
        if self._moves:
            first.run(lambda tx: install_clock(tx, self._clock.now_us()))
            # The clock is found by a setting that only new connections have.
            first.close()
            self._replicas[0] = Replica(url, self._clock, make_store)

    @property
    def now_us(self) -> int:
        return self._clock.now_us()

    def advance(self, seconds: float) -> None:
        """Let time pass, in the process and in the database."""
        self._clock.advance(seconds)
        if self._moves:
            self._replicas[0].run(lambda tx: move_clock(tx, seconds))

    def together(self, calls: Sequence[tuple[int, Call]]) -> list[Any]:
        """Run calls at once, each on the replica of that number; an error is an answer too."""
        started = [self._replicas[number].begin(call) for number, call in calls]
        return [_outcome(future) for future in started]

    def rows(self) -> Rows:
        """Return all that is stored, by table."""

        def read(tx: Any) -> Rows:
            return {
                table.name: [dict(row._mapping) for row in tx.connection.execute(table.select())]
                for table in self._tables
            }

        return self._replicas[0].run(read)

    def clear(self) -> None:
        """Delete all that is stored."""

        def delete(tx: Any) -> None:
            for table in self._tables:
                tx.connection.execute(table.delete())

        self._replicas[0].run(delete)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()


def _patient_engine(url: Any, **options: Any) -> Any:
    """Give a busy machine more time, except for locks: who waits for one has lost a race."""
    arguments = options["connect_args"]
    settings = arguments["server_settings"] | {"statement_timeout": "60000"}
    patient = {"timeout": 60, "command_timeout": 60, "server_settings": settings}
    return postgres_engine(
        url, **options | {"pool_timeout": 60, "connect_args": arguments | patient}
    )


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result(_LIMIT_S)
    except KvplaneError as error:
        return error
