"""What callers see when the database is contended, away, or comes back."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from db.counters import COUNTERS, add_many, add_one, add_one_to_each, put, value
from kvplane.db.database import sqlite_engine
from kvplane.kernel.errors import Unavailable
from sqlalchemy import make_url, text

NAMES = [f"row{n:03}" for n in range(200)]


async def create(database, *names):
    await database.run(lambda tx: COUNTERS.create(tx.connection))
    await asyncio.gather(*(database.run(put(name)) for name in names))


async def soon(call, seconds: float):
    """Call again while the answer is Unavailable."""
    end = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except Unavailable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)


async def test_deadlocks_between_replicas_are_not_seen(postgres, replicas):
    url = await postgres.new_database()
    one, two = replicas(url), replicas(url)
    await create(one, *NAMES)
    rounds = 5
    for _ in range(rounds):
        await asyncio.gather(one.run(add_one_to_each(NAMES)), two.run(add_one_to_each(NAMES[::-1])))
    assert {await value(one, name) for name in NAMES} == {2 * rounds}


async def test_batches_that_lock_in_other_orders_lose_nothing(postgres, replicas):
    url = await postgres.new_database()
    one, two = replicas(url), replicas(url)
    names = NAMES[:20]
    await create(one, *names)
    ascending = [one.run(add_one(name)) for name in names for _ in range(3)]
    descending = [two.run(add_one(name)) for name in reversed(names) for _ in range(3)]
    await asyncio.gather(*ascending, *descending)
    assert {await value(one, name) for name in names} == {6}


async def test_an_idle_connection_that_was_cut_is_not_seen(postgres, replicas):
    url = await postgres.new_database()
    database, other = replicas(url), replicas(url)
    await create(database, "a")
    await value(database, "a")
    cut = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    for _ in range(3):
        await other.run(lambda tx: tx.connection.execute(cut))
        await add_many(database, "a", 5)
        await other.run(lambda tx: tx.connection.execute(cut))
        await value(database, "a")
    assert await value(database, "a") == 15


async def test_a_connection_cut_in_the_middle_happens_once_or_says_so(postgres, replicas):
    database = replicas(await postgres.new_database())
    await create(database, "a")
    tries = 0

    def op(tx):
        nonlocal tries
        tries += 1
        add_one("a")(tx)
        if tries == 1:
            tx.connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    await database.run(op)
    assert tries == 2
    assert await value(database, "a") == 1


async def test_stopped_it_is_unavailable_at_once_and_comes_back_by_itself(postgres, replicas):
    try:
        database = replicas(await postgres.new_database())
        await create(database, "a")
        postgres.stop()
        started = time.monotonic()
        results = await asyncio.gather(
            *(database.run(add_one("a")) for _ in range(300)),
            value(database, "a"),
            return_exceptions=True,
        )
        assert all(isinstance(result, Unavailable) for result in results)
        assert results[0].retry_after
        assert time.monotonic() - started < 2
        postgres.start()
        assert await soon(lambda: database.run(add_one("a")), 5) == 1
        assert await value(database, "a") == 1
    finally:
        postgres.start()


async def test_frozen_it_is_unavailable_after_a_bound_and_comes_back(postgres, replicas):
    database = replicas(await postgres.new_database())
    await create(database, "a")
    with postgres.frozen():
        started = time.monotonic()
        results = await asyncio.gather(
            *(database.run(add_one("a")) for _ in range(50)), return_exceptions=True
        )
        assert all(isinstance(result, Unavailable) for result in results)
        assert time.monotonic() - started < 9
    before = await soon(lambda: value(database, "a"), 10)
    assert await soon(lambda: database.run(add_one("a")), 10) == before + 1


async def test_one_slow_operation_does_not_fail_the_others(postgres, replicas):
    database = replicas(await postgres.new_database())
    await create(database, "a")
    slow = database.run(lambda tx: tx.connection.execute(text("SELECT pg_sleep(60)")))
    results = await asyncio.gather(
        slow, *(database.run(add_one("a")) for _ in range(4)), return_exceptions=True
    )
    assert isinstance(results[0], Unavailable)
    assert sorted(results[1:]) == [1, 2, 3, 4]


@pytest.mark.processes
def test_processes_on_one_sqlite_file_lose_nothing(tmp_path):
    url = f"sqlite:///{tmp_path}/shared.db"
    with sqlite_engine(make_url(url), "BEGIN IMMEDIATE").begin() as connection:
        COUNTERS.create(connection)
        connection.execute(COUNTERS.insert(), [{"name": n, "value": 0} for n in ("a", "b")])
    script = Path(__file__).with_name("hammer.py")
    command = [sys.executable, str(script), url, "200"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(3)
    ]
    for process in running:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    with sqlite_engine(make_url(url), "BEGIN").begin() as connection:
        rows = dict(list(connection.execute(COUNTERS.select())))
    assert rows == {"a": 600, "b": 600}


async def test_sqlite_locked_for_longer_than_it_waits_is_retried(tmp_path, replicas, monkeypatch):
    from kvplane.db import database as module

    quick = module.sqlite_engine
    monkeypatch.setattr(module, "sqlite_engine", lambda url, begin, **_: quick(url, begin, 0.05))
    url = f"sqlite:///{tmp_path}/x.db"
    database = replicas(url)
    await create(database, "a")
    with quick(make_url(url), "BEGIN IMMEDIATE").begin():
        call = asyncio.create_task(database.run(add_one("a")))
        await asyncio.sleep(0.15)
        assert not call.done()
    assert await call == 1
    with quick(make_url(url), "BEGIN IMMEDIATE").begin(), pytest.raises(Unavailable):
        await database.run(add_one("a"))


async def test_sqlite_that_cannot_be_opened_is_unavailable(tmp_path, replicas):
    (tmp_path / "x.db").mkdir()
    database = replicas(f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(Unavailable):
        await database.run(put("a"))
    with pytest.raises(Unavailable):
        await value(database, "a")
