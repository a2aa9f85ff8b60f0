"""Atomic transitions with group commit, the same over SQLite and PostgreSQL.

A store method is one synchronous function over a `Tx`. Calls that arrive while a
transaction runs are collected and share the next one: that is where a Python control
plane gets its throughput. On SQLite the batch runs in one thread (one hop for the whole
batch; with aiosqlite every statement would hop), in BEGIN IMMEDIATE. On PostgreSQL it
runs over asyncpg.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, Unavailable

T = TypeVar("T")
MAX_BATCH = 256
_LONE_TRIES = 4
# Deadlock, serialization failure, lock timeout: another replica was first. Try again.
_TRANSIENT_SQLSTATES = {"40P01", "40001", "55P03"}


class Tx:
    """One transaction: a connection and the clock that decides in it."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.connection = connection
        self._clock = clock
        self.is_postgres = connection.dialect.name == "postgresql"

    def now_us(self) -> int:
        """Return microseconds since 1970, by the clock that all replicas share.

        Call it after the rows are locked: time passes while waiting for a lock, and a
        transaction's own start time is too early.
        """
        if self.is_postgres:
            query = text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
            return int(self.connection.scalar(query))
        return self._clock.now_us()


@dataclass(slots=True)
class _Job(Generic[T]):
    operation: Callable[[Tx], T]
    done: asyncio.Future[T]


class Database:
    """A pool and the group-commit loop over it."""

    def __init__(self, url: str, clock: Clock) -> None:
        """Open lazily. `url` is ``sqlite:///path`` or ``postgresql://user@host/name``."""
        self._clock = clock
        parsed = make_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._async_engine: AsyncEngine | None = None
        self._engine: Engine | None = None
        if self.is_sqlite:
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = create_engine(
                parsed.set(drivername="sqlite+pysqlite"),
                connect_args={"timeout": 5, "check_same_thread": False, "isolation_level": None},
            )
            event.listen(self._engine, "connect", _sqlite_connect)
            event.listen(self._engine, "begin", _sqlite_begin)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvplane-sqlite")
        else:
            self._async_engine = create_async_engine(
                parsed.set(drivername="postgresql+asyncpg"),
                pool_size=4,
                max_overflow=0,
                pool_timeout=2,
                pool_pre_ping=True,
                connect_args={
                    "timeout": 2,
                    "command_timeout": 5,
                    "server_settings": {"lock_timeout": "2000", "statement_timeout": "4000"},
                },
            )
        self._queue: list[_Job[Any]] = []
        self._running: asyncio.Task[None] | None = None

    async def run(self, operation: Callable[[Tx], T]) -> T:
        """Run one atomic transition and return its result once it is durable.

        `operation` may run more than once, so it must not touch anything but `Tx`. It
        raises KvplaneError only before its first write: other transitions share the
        transaction.

        Raises Unavailable when the database is away.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Job(operation, done))
        if self._running is None:
            self._running = asyncio.create_task(self._drain())
        return await done

    async def close(self) -> None:
        """Finish what is queued and close the pool."""
        while self._running is not None:
            with contextlib.suppress(Exception):
                await self._running
        if self._engine is not None:
            self._thread.shutdown()
            self._engine.dispose()
        if self._async_engine is not None:
            await self._async_engine.dispose()

    async def _drain(self) -> None:
        try:
            while self._queue:
                batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
                await self._commit(batch)
        finally:
            self._running = None

    async def _commit(self, batch: list[_Job[Any]]) -> None:
        try:
            outcomes = await self._transaction(batch)
        except Exception as error:  # noqa: BLE001 - every job must hear of it
            if len(batch) == 1:
                await self._alone(batch[0], error)
                return
            # One of them spoilt it for all: each gets a transaction of its own.
            for job in batch:
                await self._commit([job])
            return
        for job, outcome in zip(batch, outcomes, strict=True):
            _settle(job, outcome)

    async def _alone(self, job: _Job[Any], error: Exception) -> None:
        for attempt in range(1, _LONE_TRIES):
            if not _is_transient(error):
                break
            await self._clock.sleep(0.005 * 2**attempt)
            try:
                _settle(job, (await self._transaction([job]))[0])
                return
            except Exception as again:  # noqa: BLE001
                error = again
        if isinstance(error, (SQLAlchemyError, OSError, TimeoutError)) and _is_outage(error):
            outage = Unavailable("the database is away", retry_after=1.0)
            outage.__cause__ = error
            error = outage
        if not job.done.done():
            job.done.set_exception(error)

    async def _transaction(self, batch: list[_Job[Any]]) -> list[Any]:
        def work(connection: Connection) -> list[Any]:
            tx = Tx(connection, self._clock)
            return [_outcome(job, tx) for job in batch]

        if self._async_engine is not None:
            async with self._async_engine.begin() as connection:
                return await connection.run_sync(work)
        assert self._engine is not None
        engine = self._engine

        def in_thread() -> list[Any]:
            with engine.begin() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)


def _outcome(job: _Job[Any], tx: Tx) -> Any:
    try:
        return job.operation(tx)
    except KvplaneError as refusal:
        return refusal


def _settle(job: _Job[Any], outcome: Any) -> None:
    if job.done.done():  # the caller has gone
        return
    if isinstance(outcome, KvplaneError):
        job.done.set_exception(outcome)
    else:
        job.done.set_result(outcome)


def _is_transient(error: Exception) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    sqlstate = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    return sqlstate in _TRANSIENT_SQLSTATES or error.connection_invalidated


def _is_outage(error: Exception) -> bool:
    """Tell a database that is away from a mistake in our own SQL."""
    from sqlalchemy.exc import (  # noqa: PLC0415
        DataError,
        IntegrityError,
        OperationalError,
        ProgrammingError,
    )

    if isinstance(error, (IntegrityError, ProgrammingError, DataError)):
        return False
    return isinstance(error, (OperationalError, DBAPIError, OSError, TimeoutError, SQLAlchemyError))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _sqlite_begin(connection: Connection) -> None:
    # The write lock from the start: a deferred transaction that upgrades later fails at
    # once with "database is locked", whatever the busy timeout.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
