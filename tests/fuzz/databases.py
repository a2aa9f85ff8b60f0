"""The databases of a search: copies of one that was planted, and what is stored in them."""

import hashlib
import itertools
import shutil
import sqlite3
from pathlib import Path
from typing import Any, Final, Protocol

from kvplane.db import migrate
from kvplane.db.database import Database, Tx, postgres_engine
from sqlalchemy import make_url, text

from fuzz.invariants import INVARIANTS

# What may change in any call: an event says that something was refused, too.
IGNORED: Final = frozenset({"audit_events", "alembic_version"})
_numbers = itertools.count()


class Kind(Protocol):
    """A sort of database."""

    async def empty(self) -> str:
        """Make a migrated database and return its URL."""
        ...

    async def keep(self, url: str) -> None:
        """Take it as what `copy` copies. Nobody is connected to it."""
        ...

    async def copy(self) -> str:
        """Return the URL of a copy."""
        ...

    async def drop(self, url: str) -> None:
        """Delete a copy."""
        ...

    def watch(self, url: str, database: Database) -> "Watch":
        """Look at what is stored in it."""
        ...


class Watch(Protocol):
    """Looks at what is stored."""

    async def tables(self) -> dict[str, str]:
        """Return a hash of each table's rows."""
        ...

    async def broken(self) -> list[str]:
        """Return which invariants do not hold."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class Sqlite:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def empty(self) -> str:
        """See Kind."""
        url = f"sqlite:///{self._folder / 'template.db'}"
        await migrate.upgrade(url)
        return url

    async def keep(self, url: str) -> None:
        """See Kind."""
        assert not (self._folder / "template.db-wal").exists()

    async def copy(self) -> str:
        """See Kind."""
        file = self._folder / f"copy{next(_numbers)}.db"
        shutil.copy(self._folder / "template.db", file)
        return f"sqlite:///{file}"

    async def drop(self, url: str) -> None:
        """See Kind."""
        for file in self._folder.glob(Path(url).name + "*"):
            file.unlink()

    def watch(self, url: str, database: Database) -> "Watch":
        """See Kind."""
        return SqliteWatch(Path(url.removeprefix("sqlite:///")))


class SqliteWatch:
    """Reads again only when somebody has written."""

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, isolation_level=None)
        self._seen = -1
        self._tables: dict[str, str] = {}

    async def tables(self) -> dict[str, str]:
        """See Watch."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._seen:
            self._seen = version
            names = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._tables = {
                name: self._hash(name) for (name,) in names.fetchall() if name not in IGNORED
            }
        return self._tables

    def _hash(self, table: str) -> str:
        rows = sorted(map(repr, self._connection.execute(f'SELECT * FROM "{table}"')))
        return f"{len(rows)} rows {hashlib.sha256(''.join(rows).encode()).hexdigest()[:16]}"

    async def broken(self) -> list[str]:
        """See Watch."""
        return [
            f"{name}: {row}"
            for name, query in INVARIANTS.items()
            if (row := self._connection.execute(query).fetchone()) is not None
        ]

    def close(self) -> None:
        """See Watch."""
        self._connection.close()


class Postgres:
    """Databases of a server of the tests' own."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)

    async def _administer(self, statement: str) -> None:
        engine = postgres_engine(self._url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            await connection.execute(text(statement))
        await engine.dispose()

    def _named(self, name: str) -> str:
        return self._url.set(database=name).render_as_string(hide_password=False)

    async def empty(self) -> str:
        """See Kind."""
        # Nothing here outlives the machine.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            await self._administer(f"ALTER SYSTEM SET {setting} = off")
        await self._administer("SELECT pg_reload_conf()")
        await self._administer("CREATE DATABASE template_of_fuzz")
        url = self._named("template_of_fuzz")
        await migrate.upgrade(url)
        return url

    async def keep(self, url: str) -> None:
        """See Kind."""

    async def copy(self) -> str:
        """See Kind."""
        name = f"fuzz{next(_numbers)}"
        await self._administer(f"CREATE DATABASE {name} TEMPLATE template_of_fuzz")
        return self._named(name)

    async def drop(self, url: str) -> None:
        """See Kind."""
        await self._administer(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def watch(self, url: str, database: Database) -> "Watch":
        """See Kind."""
        return PostgresWatch(database)


class PostgresWatch:
    """Reads beside the services, over their own pool."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._query = ""

    async def _rows(self, query: str) -> list[Any]:
        def read(tx: Tx) -> list[Any]:
            return [tuple(row) for row in tx.connection.execute(text(query))]

        return await self._database.read(read)

    async def tables(self) -> dict[str, str]:
        """See Watch."""
        if not self._query:
            names = await self._rows(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
            )
            self._query = " UNION ALL ".join(
                f"SELECT '{name}', coalesce(md5(string_agg(t::text, ',' ORDER BY t::text)), '')"
                f' FROM "{name}" t'
                for (name,) in sorted(names)
                if name not in IGNORED
            )
        return dict(await self._rows(self._query))

    async def broken(self) -> list[str]:
        """See Watch."""
        return [
            f"{name}: {rows[0]}"
            for name, query in INVARIANTS.items()
            if (rows := await self._rows(query))
        ]

    def close(self) -> None:
        """See Watch."""
