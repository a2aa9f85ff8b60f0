"""Whether the database's schema is the one that this build works with."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import column, inspect, select, table

from kvplane.db.database import Database, Tx

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

MIGRATIONS: Final = Path(__file__).parent / "migrations"
_VERSION: Final = table("alembic_version", column("version_num"))


@cache
def scripts() -> "ScriptDirectory":
    """Return this build's revisions."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    return ScriptDirectory(MIGRATIONS)


@cache
def known_revisions() -> tuple[str, ...]:
    """Return all revisions of this build, the newest first."""
    return tuple(script.revision for script in scripts().walk_revisions())


def describe(current: str | None) -> str | None:
    """Return what is wrong with a database at that revision and what to run, or None."""
    known = known_revisions()
    if current == known[0]:
        return None
    if current is None:
        return "the database has no schema yet: run `kvplane migrate up`"
    if current in known:
        return (
            f"the database's schema is behind ({current}, this build needs {known[0]}):"
            " run `kvplane migrate up`"
        )
    return (
        f"the database's schema is ahead ({current} is newer than this build's {known[0]}):"
        f" update this build, or run `kvplane migrate down {known[0]}` with the newer one"
    )


async def schema_problem(database: Database) -> str | None:
    """Return what is wrong with the database's schema and what to run, or None.

    Raises Unavailable when the database is away.
    """
    return describe(await database.read(_current))


def _current(tx: Tx) -> str | None:
    if not inspect(tx.connection).has_table(_VERSION.name):
        return None
    revision: str | None = tx.connection.scalar(select(_VERSION.c.version_num))
    return revision
