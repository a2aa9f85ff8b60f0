"""Atomic transitions with group commit, the same over SQLite and PostgreSQL.

A store method is one synchronous function over a `Tx`. Calls that arrive while a
transaction runs, or in one turn of the event loop, are collected and share one: that is
where a Python control plane gets its throughput. On SQLite the batch runs in the event
loop's thread, in BEGIN IMMEDIATE. On PostgreSQL it runs over asyncpg.

SQLite commits survive the death of a process, not that of the machine's power
(synchronous=NORMAL).
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kvplane.db.failures import Failure, InDoubt, classify
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, Unavailable

T = TypeVar("T")
MAX_BATCH: Final = 256
_TRIES: Final = 6
# Transactions, of a few pages each.
_CHECKPOINT_EVERY: Final = 300
_PATIENT: Final = text("SET LOCAL lock_timeout = 1500")
# An arbitrary number that nothing else uses: "again" in ASCII.
_ONE_AT_A_TIME: Final = text("SELECT pg_advisory_xact_lock(418346264942)")
_POSTGRES_NOW: Final = text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")


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
            return int(self.connection.scalar(_POSTGRES_NOW))
        return self._clock.now_us()


@dataclass(slots=True)
class _Job(Generic[T]):
    operation: Callable[[Tx], T]
    done: asyncio.Future[T]
    order: str


class Database:
    """A pool and the group-commit loop over it. It belongs to one event loop."""

    def __init__(self, url: str, clock: Clock) -> None:
        """Open lazily. `url` is ``sqlite:///path`` or ``postgresql://user@host/name``."""
        parsed = make_url(url)
        self._backend: _Sqlite | _Postgres = (
            _Sqlite(parsed, clock)
            if parsed.get_backend_name() == "sqlite"
            else _Postgres(parsed, clock)
        )
        self._queue: list[_Job[Any]] = []
        self._lanes: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def is_sqlite(self) -> bool:
        """SQLite, so one machine only."""
        return isinstance(self._backend, _Sqlite)

    async def run(self, operation: Callable[[Tx], T], *, order: str = "") -> T:
        """Run one atomic transition and return its result once it is committed.

        `order` is for what locks a row that many want: of the transitions that share a
        transaction, those with a name go first, in the order of their names, so that no
        two replicas lock such rows crosswise.

        `operation` may run more than once, so it must touch nothing but `Tx`. It runs
        outside of the caller's context: `kernel.context.caller()` must be read before.
        It raises KvplaneError only before its first write: other transitions share the
        transaction. When the caller is cancelled, it may or may not have happened.

        Raises Unavailable when the database is away.
        """
        if self._closed:
            raise Unavailable("the database is closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._queue.append(_Job(operation, done, order))
        if len(self._lanes) < self._backend.lanes:
            lane = loop.create_task(self._drain(), context=Context())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)  # one cancelled before it began
        return await done

    async def read(self, operation: Callable[[Tx], T]) -> T:
        """Run queries that change nothing, beside the transitions instead of among them.

        It sees everything that was committed before. Raises Unavailable.
        """
        if self._closed:
            raise Unavailable("the database is closed")
        for again in (True, False):
            try:
                return await self._backend.read(operation)
            except Exception as error:
                told = _told(error)
                if told is error:
                    raise
                # The pool may have held connections from before a restart.
                if not again or classify(error) is not Failure.AWAY:
                    raise told from error
        raise AssertionError

    async def close(self) -> None:
        """Finish what is queued and close the pool."""
        self._closed = True
        while self._lanes:
            await asyncio.wait(self._lanes)
        await self._backend.close()

    async def _drain(self) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        try:
            while self._queue:
                batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
                batch.sort(key=lambda job: (not job.order, job.order))
                await self._commit(batch)
        except asyncio.CancelledError:
            _fail(self._queue, Unavailable("the database is closed"))
            self._queue = []
            raise
        finally:
            # At once, not in a callback: who was just answered may call again before it runs,
            # and would wait for a lane that has ended.
            self._lanes.discard(lane)

    async def _commit(self, batch: list[_Job[Any]], tries: int = 1) -> None:
        batch = [job for job in batch if not job.done.done()]  # without callers that have gone
        if not batch:
            return
        try:
            operations = [job.operation for job in batch]
            outcomes = await self._backend.transaction(operations, again=tries > 1)
        except asyncio.CancelledError:
            _fail(batch, Unavailable("the database is closed"))
            raise
        except Exception as error:  # noqa: BLE001 - every job must hear of it
            await self._again(batch, tries, error)
            return
        for job, outcome in zip(batch, outcomes, strict=True):
            if job.done.done():
                continue
            if isinstance(outcome, KvplaneError):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    async def _again(self, batch: list[_Job[Any]], tries: int, error: Exception) -> None:
        failure = classify(error)
        if failure is Failure.AWAY and tries == 1:
            # The pool may hold connections from before a restart; they are gone now.
            await self._commit(batch, tries + 1)
        elif failure in {Failure.BUSY, Failure.CONFLICT} and tries < _TRIES:
            await self._commit(batch, tries + 1)
        elif failure in {Failure.MISTAKE, Failure.SLOW} and len(batch) > 1:
            # Find the one that is at fault.
            half = len(batch) // 2
            await self._commit(batch[:half])
            await self._commit(batch[half:])
        else:
            _fail(batch, _told(error))


class _Sqlite:
    """SQLite in the event loop's own thread.

    A transaction takes tens of microseconds, less than the way to a thread and back. Only
    what has to wait (another process has the write lock) or to sync goes to the thread.
    """

    lanes: Final = 1

    def __init__(self, url: URL, clock: Clock) -> None:
        self._clock = clock
        self._in_file = bool(url.database) and url.database != ":memory:"
        if self._in_file:
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        # The write lock from the start: a deferred transaction that upgrades later fails
        # at once with "database is locked", whatever the busy timeout.
        self._writer = sqlite_engine(url, "BEGIN IMMEDIATE", busy_timeout=0)
        self._reader = sqlite_engine(url, "BEGIN", busy_timeout=0)
        self._patient = sqlite_engine(url, "BEGIN IMMEDIATE")
        self._write: Connection | None = None
        self._read: Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvplane-sqlite")
        self._since_checkpoint = 0
        self._checkpoint: asyncio.Future[None] | None = None

    async def transaction(self, operations: list[Callable[[Tx], Any]], again: bool) -> list[Any]:
        self._checkpoint_when_due()
        if not again:
            try:
                return self._now(operations)
            except Exception as error:
                if not self._in_file or classify(error) is not Failure.BUSY:
                    raise
        return await self._in_thread(lambda: self._waiting(operations))

    async def read(self, operation: Callable[[Tx], T]) -> T:
        if not self._in_file:  # known to one connection only
            result = self._now([operation])[0]
            if isinstance(result, KvplaneError):
                raise result
            return cast(T, result)
        try:
            if self._read is None:
                self._read = self._reader.connect()
            with self._read.begin():
                return operation(Tx(self._read, self._clock))
        except Exception as error:
            if classify(error) is not Failure.BUSY:
                raise

        def waiting() -> T:
            with self._patient.begin() as connection:
                return operation(Tx(connection, self._clock))

        return await self._in_thread(waiting)

    async def close(self) -> None:
        self._thread.shutdown()
        for connection in (self._write, self._read):
            if connection is not None:
                connection.close()
        for engine in (self._writer, self._reader, self._patient):
            engine.dispose()

    def _now(self, operations: list[Callable[[Tx], Any]]) -> list[Any]:
        if self._write is None:
            self._write = self._writer.connect()
        with self._write.begin():
            return _outcomes(operations, Tx(self._write, self._clock))

    def _waiting(self, operations: list[Callable[[Tx], Any]]) -> list[Any]:
        with self._patient.begin() as connection:
            return _outcomes(operations, Tx(connection, self._clock))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _checkpoint_when_due(self) -> None:
        """Have the log copied into the database in the thread: that syncs to disk.

        SQLite would do it by itself, in the event loop, and still does when the log has
        grown far beyond that.
        """
        self._since_checkpoint += 1
        due = self._since_checkpoint >= _CHECKPOINT_EVERY and self._in_file
        if due and (self._checkpoint is None or self._checkpoint.done()):
            self._since_checkpoint = 0
            loop = asyncio.get_running_loop()
            self._checkpoint = loop.run_in_executor(self._thread, self._checkpoint_now)

    def _checkpoint_now(self) -> None:
        # Busy or away: the next one does it.
        with contextlib.suppress(DBAPIError, sqlite3.Error), self._reader.connect() as connection:
            _driver(connection).execute("PRAGMA wal_checkpoint(PASSIVE)")


class _Postgres:
    # Beside the one that waits for a lock of another replica, one more.
    lanes: Final = 2

    def __init__(self, url: URL, clock: Clock) -> None:
        self._clock = clock
        self._engine = postgres_engine(
            url,
            pool_size=4,
            max_overflow=0,
            pool_timeout=2,
            connect_args={
                "timeout": 2,
                "command_timeout": 3,
                # Milliseconds. A lock that is not free by then is a deadlock as a rule,
                # which PostgreSQL itself takes a second to see.
                "server_settings": {"lock_timeout": "300", "statement_timeout": "2000"},
            },
        )
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    async def transaction(self, operations: list[Callable[[Tx], Any]], again: bool) -> list[Any]:
        async with self._engine.connect() as connection:
            if again:
                # Among all replicas, those that lost a conflict go one after another, and
                # wait longer for a lock than the others do: each wins the second time.
                await connection.execute(_PATIENT)
                await connection.execute(_ONE_AT_A_TIME)
            outcomes = await connection.run_sync(
                lambda sync: _outcomes(operations, Tx(sync, self._clock))
            )
            try:
                await connection.commit()
            except Exception as error:
                if classify(error) is Failure.AWAY:
                    raise InDoubt from error
                raise
            return outcomes

    async def read(self, operation: Callable[[Tx], T]) -> T:
        async with self._autocommit.connect() as connection:
            return await connection.run_sync(lambda sync: operation(Tx(sync, self._clock)))

    async def close(self) -> None:
        await self._engine.dispose()


def sqlite_engine(url: URL, begin: str, busy_timeout: float = 5.0) -> Engine:
    """Return an engine whose transactions begin with the statement `begin`."""
    engine = create_engine(
        url.set(drivername="sqlite+pysqlite"),
        connect_args={
            "timeout": busy_timeout,
            "check_same_thread": False,
            "isolation_level": None,  # the driver must not begin transactions by itself
        },
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "wal_autocheckpoint=8000",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Straight to the driver: SQLAlchemy's way takes ten times as long as SQLite does.
        _driver(connection).execute(begin)

    return engine


def _driver(connection: Connection) -> sqlite3.Connection:
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver


def postgres_engine(url: URL, **options: Any) -> AsyncEngine:
    """Return an engine over asyncpg; `options` as of `create_async_engine`."""
    # Its parameters, such as sslmode, are libpq's: asyncpg knows them, SQLAlchemy does not.
    dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
    options["connect_args"] = {"dsn": dsn, **options.get("connect_args", {})}
    return create_async_engine("postgresql+asyncpg://", **options)


def _outcomes(operations: list[Callable[[Tx], Any]], tx: Tx) -> list[Any]:
    outcomes: list[Any] = []
    for operation in operations:
        try:
            outcomes.append(operation(tx))
        except KvplaneError as refusal:
            outcomes.append(refusal)
    return outcomes


def _fail(batch: list[_Job[Any]], error: Exception) -> None:
    for job in batch:
        if not job.done.done():
            job.done.set_exception(error)


def _told(error: Exception) -> Exception:
    """Return what the caller is told: its own mistake, or that the database is away."""
    if isinstance(error, KvplaneError) or classify(error) is Failure.MISTAKE:
        return error
    away = Unavailable("the database is away", retry_after=1.0)
    away.__cause__ = error
    return away
