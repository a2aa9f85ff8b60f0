"""Moving a database from one revision to another, by one process at a time.

The whole way is one transaction, on SQLite too: killed half-way, nothing has happened.
"""

import asyncio
import contextlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection, make_url, text
from sqlalchemy.pool import NullPool

from kvplane.db.database import postgres_engine, sqlite_engine
from kvplane.db.failures import Failure, classify
from kvplane.db.schema import MIGRATIONS, describe, known_revisions
from kvplane.kernel.errors import InvalidField, Unavailable

T = TypeVar("T")
# "kvplane" in ASCII. Whoever else wants to migrate waits for it.
_LOCK: Final = 0x6B76706C616E65
_NO_RIGHT: Final = "42501"  # insufficient privilege
_WAIT: Final = 300.0


@dataclass(frozen=True)
class SchemaState:
    """Where a database stands."""

    # None: no schema yet.
    current: str | None
    # What this build needs.
    head: str
    # What is wrong and what to run; None when they are equal.
    problem: str | None


async def upgrade(url: str, revision: str = "head") -> SchemaState:
    """Migrate up to `revision`. Several at once: one migrates, the others wait.

    Raises InvalidField("revision"), Unavailable: the database is away, or its schema is of
    a newer build.
    """
    return await _migrate(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: str, revision: str) -> SchemaState:
    """Migrate down to `revision`, ``base`` for an empty database. Data is lost.

    Raises InvalidField("revision"), Unavailable.
    """
    return await _migrate(url, lambda config: command.downgrade(config, revision))


async def state(url: str) -> SchemaState:
    """Return where the database stands. Raises Unavailable."""
    return await _with_connection(url, _state)


def sql(dialect: str, revision: str = "head") -> str:
    """Return the statements from nothing to `revision`, for `dialect` (postgresql, sqlite)."""
    out = io.StringIO()
    config = _config(output=out)
    config.attributes["dialect"] = dialect
    _translated(lambda: command.upgrade(config, revision, sql=True))
    return out.getvalue()


async def new_revision(message: str) -> None:
    """Write the revision that brings the newest schema to the tables that are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/empty.db"
        await upgrade(url)
        await _migrate(url, lambda c: command.revision(c, message, autogenerate=True))


async def _migrate(url: str, step: Callable[[Config], object]) -> SchemaState:
    def work(connection: Connection) -> SchemaState:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        before = _state(connection)
        if before.problem and before.current not in (None, *known_revisions()):
            # Alembic would only say that it cannot find that revision.
            raise Unavailable(before.problem)
        config = _config()
        config.attributes["connection"] = connection
        _translated(lambda: step(config))
        return _state(connection)

    return await _with_connection(url, work)


async def _with_connection(url: str, work: Callable[[Connection], T]) -> T:
    parsed = make_url(url)
    try:
        if parsed.get_backend_name() == "sqlite":
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            # Their turn comes when the one that has the write lock is done.
            engine = sqlite_engine(parsed, "BEGIN IMMEDIATE", busy_timeout=_WAIT)

            def in_thread() -> T:
                try:
                    with engine.begin() as connection:
                        return work(connection)
                finally:
                    engine.dispose()

            return await asyncio.to_thread(in_thread)
        async_engine = postgres_engine(parsed, poolclass=NullPool, connect_args={"timeout": 5})
        async with async_engine.begin() as connection:
            return await connection.run_sync(work)
    except Exception as error:
        may_not = getattr(getattr(error, "orig", None), "sqlstate", None) == _NO_RIGHT
        if classify(error) is Failure.MISTAKE and not may_not:
            raise
        raise Unavailable(f"the database cannot be used: {_first_line(error)}") from error


def _state(connection: Connection) -> SchemaState:
    current = MigrationContext.configure(connection).get_current_revision()
    return SchemaState(current, known_revisions()[0], describe(current))


def _config(output: io.StringIO | None = None) -> Config:
    config = Config(stdout=io.StringIO(), output_buffer=output)
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _translated(step: Callable[[], object]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            step()
    except CommandError as error:
        raise InvalidField("revision", str(error)) from error


def _first_line(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error
    return str(original).partition("\n")[0] or type(original).__name__
