"""Group commit over both databases: what each caller can rely on."""

import asyncio

import pytest
from db.counters import COUNTERS, add_many, add_one, put, value
from kvplane.db.database import Database, sqlite_engine
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.context import Caller, caller, set_caller
from kvplane.kernel.errors import NotFound, Unavailable
from sqlalchemy import make_url, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError


async def test_concurrent_read_modify_writes_all_survive(database):
    await database.run(put("a"))
    await add_many(database, "a", 80)
    assert await value(database, "a") == 80


async def test_two_replicas_lose_nothing_either(database, url, replicas):
    await database.run(put("a"))
    await asyncio.gather(add_many(database, "a", 60), add_many(replicas(url), "a", 60))
    assert await value(database, "a") == 120


async def test_each_call_gets_its_own_result(database):
    for n in range(20):
        await database.run(put(f"c{n}", n * 10))
    got = await asyncio.gather(*(database.run(add_one(f"c{n}")) for n in range(20)))
    assert got == [n * 10 + 1 for n in range(20)]


async def test_concurrent_calls_share_transactions(database):
    await database.run(put("a"))
    transactions = await asyncio.gather(*(database.run(lambda tx: tx) for _ in range(200)))
    assert len({id(tx) for tx in transactions}) <= 4


async def test_what_locks_rows_that_many_want_goes_first_and_in_one_order(database):
    done = []
    names = ["", "b", "", "a", "c"]
    await asyncio.gather(
        *(database.run(lambda _tx, name=name: done.append(name), order=name) for name in names)
    )
    assert done == ["a", "b", "c", "", ""]


async def test_a_refusal_reaches_only_its_caller(database):
    await database.run(put("a"))
    calls = [database.run(add_one(name)) for name in ("a", "nobody", "a")]
    first, refused, second = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(refused, NotFound)
    assert [first, second] == [1, 2]
    assert await value(database, "a") == 2


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda tx: 1 / 0, ZeroDivisionError),
        (lambda tx: tx.connection.execute(text("SELECT nonsense FROM nowhere")), DBAPIError),
        (put("a"), IntegrityError),
    ],
    ids=["python", "sql", "constraint"],
)
async def test_a_mistake_reaches_only_its_caller(database, mistake, error):
    await database.run(put("a"))
    operations = [add_one("a")] * 5 + [mistake] + [add_one("a")] * 5
    results = await asyncio.gather(*map(database.run, operations), return_exceptions=True)
    assert isinstance(results.pop(5), error)
    assert sorted(results) == list(range(1, 11))
    assert await value(database, "a") == 10


async def test_what_a_mistake_had_written_is_undone(database):
    def op(tx):
        put("half")(tx)
        raise RuntimeError("after the write")

    with pytest.raises(RuntimeError, match="after the write"):
        await database.run(op)
    assert await value(database, "half") is None


async def test_who_has_gone_before_the_turn_came_changes_nothing(database):
    await database.run(put("a"))
    calls = [asyncio.create_task(database.run(add_one("a"))) for _ in range(10)]
    await asyncio.sleep(0)  # all are queued, none has run
    for task in calls[::2]:
        task.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
    assert sorted(results[1::2]) == [1, 2, 3, 4, 5]
    assert await value(database, "a") == 5


async def test_who_goes_meanwhile_spoils_nothing(url, replicas):
    database = replicas(url)
    await database.run(lambda tx: COUNTERS.create(tx.connection))
    await database.run(put("a"))
    started = asyncio.Event()

    def slow(tx):
        started.set()
        tx.connection.execute(select(COUNTERS)).all()
        return add_one("a")(tx)

    goer, stayer = (asyncio.create_task(database.run(slow)) for _ in range(2))
    await started.wait()
    goer.cancel()
    assert await stayer in {1, 2}
    assert await database.run(add_one("a")) in {2, 3}


async def test_operations_do_not_see_the_context_of_any_caller(database):
    async def one(tenant):
        set_caller(Caller(tenant))
        return await database.run(lambda tx: caller().tenant_id)

    seen = await asyncio.gather(*(one(f"tenant-{n}") for n in range(5)))
    assert seen == ["default"] * 5


async def test_a_read_sees_what_was_committed_before(database):
    await database.run(put("a"))
    for n in range(1, 30):
        await database.run(add_one("a"))
        assert await value(database, "a") == n


async def test_a_mistaken_read_is_told_so(database):
    with pytest.raises(DBAPIError):
        await database.read(lambda tx: tx.connection.execute(text("SELECT nonsense FROM nowhere")))
    assert await value(database, "a") is None


async def test_close_finishes_what_is_queued_and_refuses_the_rest(database, url, replicas):
    await database.run(put("a"))
    calls = [asyncio.create_task(database.run(add_one("a"))) for _ in range(10)]
    await asyncio.sleep(0)
    await database.close()
    assert sorted(await asyncio.gather(*calls)) == list(range(1, 11))
    with pytest.raises(Unavailable):
        await database.run(add_one("a"))
    with pytest.raises(Unavailable):
        await value(database, "a")
    assert await value(replicas(url), "a") == 10


async def test_the_clock_is_the_database_s_where_replicas_share_one(postgres, tmp_path, replicas):
    fake = FakeClock(now_us=5)
    alone = Database(f"sqlite:///{tmp_path}/x.db", fake)
    assert await alone.run(lambda tx: tx.now_us()) == 5
    await alone.close()
    shared = Database(await postgres.new_database(), fake)
    # After a lock it is later than before it: not the transaction's start.
    times = await shared.run(
        lambda tx: (
            tx.now_us(),
            tx.connection.execute(text("SELECT pg_sleep(0.02)")),
            tx.now_us(),
        )
    )
    assert times[2] - times[0] >= 20_000
    await shared.close()


async def test_sqlite_reads_do_not_wait_for_a_writer(tmp_path, replicas):
    database = replicas(f"sqlite:///{tmp_path}/x.db")
    await database.run(lambda tx: COUNTERS.create(tx.connection))
    await database.run(put("a"))
    other = sqlite_engine(make_url(f"sqlite:///{tmp_path}/x.db"), "BEGIN IMMEDIATE")
    with other.begin():
        writing = asyncio.create_task(database.run(add_one("a")))
        for _ in range(3):
            async with asyncio.timeout(2):
                assert await value(database, "a") == 0
        assert not writing.done()
    assert await writing == 1


async def test_sqlite_s_log_does_not_grow_without_end(tmp_path, replicas):
    database = replicas(f"sqlite:///{tmp_path}/x.db")
    await database.run(lambda tx: COUNTERS.create(tx.connection))
    await database.run(put("a"))
    log = tmp_path / "x.db-wal"

    def pages(n):
        rows = [{"name": f"{n}-{i}" + "x" * 3000, "value": 0} for i in range(250)]
        return lambda tx: tx.connection.execute(COUNTERS.insert(), rows)

    sizes = []
    for n in range(60):  # 15,000 pages and more; the log is begun anew at 8,000
        await database.run(pages(n))
        sizes.append(log.stat().st_size)
    assert max(sizes) < 45 << 20


async def test_a_database_in_memory_works_too():
    database = Database("sqlite://", FakeClock())
    await database.run(lambda tx: COUNTERS.create(tx.connection))
    await database.run(put("a", 3))
    assert await value(database, "a") == 3
    await database.close()


async def test_a_read_in_memory_raises_its_refusal():
    database = Database("sqlite:///:memory:", FakeClock())

    def refuse(tx):
        raise NotFound("counter", "a")

    with pytest.raises(NotFound):
        await database.read(refuse)
    await database.close()
