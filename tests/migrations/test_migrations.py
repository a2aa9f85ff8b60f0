"""The schema's history: what it makes, both ways, and by several at once."""

import asyncio
import signal
import subprocess
import sys

import kvplane.cli.compose  # noqa: F401 - loads the tables of all services
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from kvplane.db import migrate, schema
from kvplane.db.database import Database
from kvplane.db.metadata import metadata
from kvplane.kernel.clock import SystemClock
from kvplane.kernel.errors import InvalidField, Unavailable
from sqlalchemy import CheckConstraint, inspect, text

HEAD = schema.known_revisions()[0]


@pytest.fixture
async def database(url):
    one = Database(url, SystemClock())
    yield one
    await one.close()


def differences(tx):
    context = MigrationContext.configure(tx.connection, opts={"compare_type": True})
    return compare_metadata(context, metadata)


def tables(tx):
    return set(inspect(tx.connection).get_table_names())


def indexes(tx):
    """Names, columns, uniqueness and conditions: compare_metadata does not see the last."""
    found = inspect(tx.connection)
    return {
        (
            table,
            index["name"],
            tuple(index["column_names"]),
            bool(index["unique"]),
            "postgresql_where" in index["dialect_options"]
            or "sqlite_where" in index["dialect_options"],
        )
        for table in found.get_table_names()
        for index in found.get_indexes(table)
    }


async def test_the_migrated_schema_is_the_one_in_the_code(url, database):
    await migrate.upgrade(url)
    assert await database.read(differences) == []
    assert await database.read(tables) == {*metadata.tables, "alembic_version"}


async def test_indexes_with_conditions_are_the_same_too(url, database, tmp_path):
    await migrate.upgrade(url)
    migrated = await database.read(indexes)
    await migrate.downgrade(url, "base")
    await database.run(lambda tx: metadata.create_all(tx.connection))
    assert await database.read(indexes) == migrated
    assert any(has_condition for *_, has_condition in migrated)


async def test_up_down_and_up_again(url, database):
    for _ in range(2):
        up = await migrate.upgrade(url)
        assert (up.current, up.head, up.problem) == (HEAD, HEAD, None)
        down = await migrate.downgrade(url, "base")
        assert down.current is None
        assert await database.read(tables) == {"alembic_version"}


async def test_up_twice_changes_nothing(url, database):
    await migrate.upgrade(url)
    await database.run(
        lambda tx: tx.connection.execute(
            text("INSERT INTO tenants VALUES ('acme', 'Acme', 1, 'salt')")
        )
    )
    await migrate.upgrade(url)
    count = await database.read(
        lambda tx: tx.connection.scalar(text("SELECT count(*) FROM tenants"))
    )
    assert count == 1


async def test_every_table_begins_its_keys_with_the_tenant_or_has_one_owner(url):
    """Tenant first, but for what is told apart by ids that are nobody's choice."""
    own = {
        "ownerships", "ownership_payloads", "leases", "lease_commands", "worker_epochs", "workers",
        "audit_events",
    }  # fmt: skip
    for table in metadata.sorted_tables:
        first = next(iter(table.primary_key.columns)).name
        assert first == "tenant_id" or table.name in own, table.name
        assert not any(isinstance(c, CheckConstraint) for c in table.constraints)


async def test_what_readiness_says(url, database):
    assert "kvplane migrate up" in await schema.schema_problem(database)
    await migrate.upgrade(url)
    assert await schema.schema_problem(database) is None
    await database.run(
        lambda tx: tx.connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    )
    ahead = await schema.schema_problem(database)
    assert "is ahead" in ahead
    assert f"kvplane migrate down {HEAD}" in ahead
    for move in (migrate.upgrade(url), migrate.downgrade(url, "base")):
        with pytest.raises(Unavailable) as refused:
            await move
        assert refused.value.message == ahead


async def test_a_known_older_revision_is_behind(monkeypatch):
    monkeypatch.setattr(schema, "known_revisions", lambda: ("0002", "0001"))
    assert schema.describe("0002") is None
    behind = schema.describe("0001")
    assert "is behind (0001, this build needs 0002)" in behind
    assert "`kvplane migrate up`" in behind


async def test_a_revision_that_does_not_exist(url):
    with pytest.raises(InvalidField, match="nowhere"):
        await migrate.upgrade(url, "nowhere")
    assert (await migrate.state(url)).current is None


async def test_a_database_that_is_away():
    with pytest.raises(Unavailable, match=r"cannot be used: .*Connect call failed"):
        await migrate.upgrade("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.processes
def test_several_at_once_all_succeed_and_one_migrates(url):
    """Eight processes at the same moment, as services with replicas start (S-03)."""
    script = (
        f"import asyncio; from kvplane.db import migrate; asyncio.run(migrate.upgrade({url!r}))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(8)
    ]
    for process in running:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output

    assert asyncio.run(migrate.state(url)).problem is None


@pytest.mark.processes
def test_one_killed_half_way_leaves_the_work_to_another(url, tmp_path):
    """The first stops inside its migration, then dies; the second waits, then does it all."""
    mark = tmp_path / "half-way"
    script = f"""
import asyncio, pathlib, time
from kvplane.db import migrate
from sqlalchemy import event
from sqlalchemy.engine import Engine
def before(connection, cursor, statement, *rest):
    if statement.lstrip().startswith("CREATE TABLE sessions"):
        pathlib.Path({str(mark)!r}).touch()
        time.sleep(60)
event.listen(Engine, "before_cursor_execute", before)
asyncio.run(migrate.upgrade({url!r}))
"""
    first = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(mark)
        go_on = (
            f"import asyncio; from kvplane.db import migrate; asyncio.run(migrate.upgrade({url!r}))"
        )
        second = subprocess.Popen([sys.executable, "-c", go_on])
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(2)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert second.wait(60) == 0
    assert asyncio.run(migrate.state(url)).problem is None


def wait_for(path):
    import time

    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_as_sql(dialect):
    statements = migrate.sql(dialect)
    for table in metadata.tables:
        assert f"CREATE TABLE {table} (" in statements
    assert "INSERT INTO alembic_version" in statements


async def test_the_sql_makes_the_same_schema(tmp_path):
    import sqlite3

    path = tmp_path / "by-hand.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(migrate.sql("sqlite"))
    connection.close()
    by_hand = Database(f"sqlite:///{path}", SystemClock())
    assert await by_hand.read(differences) == []
    assert await schema.schema_problem(by_hand) is None
    await by_hand.close()
