"""Who is lost and when, and what the lease service hears of it."""

import asyncio

import pytest
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import Unavailable
from kvplane.routing.domain import RoutingConfig
from routing.fakes import beat
from routing.harness import One, Plane

READY, LOST = pb.WORKER_STATE_READY, pb.WORKER_STATE_LOST


async def until(condition, seconds: float = 5.0) -> None:
    """Wait in real time until something asynchronous has happened."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)


async def settled() -> None:
    """Let a loop that the fake clock has woken run as far as it gets."""
    for _ in range(20):
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.001)


async def state(one: One, worker_id: str) -> int:
    return (await one.get(worker_id)).state


def past_grace(clock: FakeClock) -> None:
    clock.advance(5.0)


async def test_a_worker_is_lost_after_its_timeout_and_not_before(fake: One, clock: FakeClock):
    past_grace(clock)
    await fake.register("d")
    clock.advance(5.0)
    await fake.part.registry.sweep()
    assert await state(fake, "d") == READY
    clock.advance(0.001)
    await fake.part.registry.sweep()
    assert await state(fake, "d") == LOST
    assert fake.leases.ended == [("d", 2)]
    assert [(r.known, r.state) for r in await fake.beat(beat("d"))] == [(False, LOST)]


async def test_beats_without_traffic_keep_a_worker_for_ever(fake: One, clock: FakeClock):
    past_grace(clock)
    await fake.register("d")
    for _ in range(15):
        clock.advance(1.0)
        assert (await fake.beat(beat("d")))[0].known
        await fake.part.registry.sweep()
    assert await state(fake, "d") == READY
    assert fake.leases.ended == []


async def test_silence_is_shown(fake: One, clock: FakeClock):
    await fake.register("d")
    clock.advance(2.5)
    assert (await fake.get("d")).silent_for.ToMilliseconds() == 2500


async def test_the_default_interval_is_less_than_half_the_timeout(fake: One):
    request = pb.RegisterWorkerRequest(worker=await fake.register("d"), instance_id="i1")
    answer = await fake.part.worker_servicer.RegisterWorker(request)
    assert answer.heartbeat_interval.ToMilliseconds() == 1000
    with pytest.raises(ValueError, match="heartbeat_interval_s"):
        RoutingConfig(heartbeat_interval_s=2.5, worker_timeout_s=5.0)


async def test_a_worker_lost_by_mistake_comes_back_with_a_new_epoch(fake: One, clock: FakeClock):
    past_grace(clock)
    await fake.register("d", instance="i1")
    clock.advance(6.0)
    await fake.part.registry.sweep()
    back = await fake.register("d", instance="i1")
    assert (back.epoch, back.state) == (2, READY)
    assert (await fake.beat(beat("d", 2)))[0].known


async def test_a_restart_loses_nobody_who_is_heard_within_one_timeout(
    sqlite: Plane, clock: FakeClock
):
    before = One(sqlite, sqlite.replica())
    await before.register("d")
    await before.register("dead")
    clock.advance(60.0)  # down for a minute
    after = One(sqlite, sqlite.replica())
    await after.part.registry.sweep()
    assert await state(after, "d") == READY
    assert (await after.beat(beat("d")))[0].known
    clock.advance(5.0)
    await after.part.registry.sweep()
    assert await state(after, "d") == READY
    assert await state(after, "dead") == LOST


async def test_an_outage_of_the_database_loses_nobody(fake: One, clock: FakeClock, monkeypatch):
    past_grace(clock)
    await fake.register("d")
    store = fake.part.registry._store

    async def away(silent_us, in_time):
        raise Unavailable("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "sweep", away)
        for _ in range(10):
            clock.advance(1.0)
            with pytest.raises(Unavailable):
                await fake.part.registry.sweep()
    await fake.part.registry.sweep()
    assert await state(fake, "d") == READY
    clock.advance(6.0)
    await fake.part.registry.sweep()
    assert await state(fake, "d") == LOST


async def test_registration_does_not_need_the_lease_service(fake: One):
    await fake.register("d", instance="i1")
    fake.leases.go_away()
    assert (await fake.register("d", instance="i2")).epoch == 2
    await fake.part.registry.sweep()
    fake.leases.error = None
    assert fake.leases.ended == []
    await fake.part.registry.sweep()
    assert fake.leases.ended == [("d", 2)]
    await fake.part.registry.sweep()
    assert fake.leases.ended == [("d", 2)]


async def test_registration_does_not_wait_for_a_lease_service_that_hangs(fake: One):
    await fake.register("d", instance="i1")
    fake.leases.hangs = True
    began = asyncio.get_running_loop().time()
    assert (await fake.register("d", instance="i2")).epoch == 2
    assert asyncio.get_running_loop().time() - began < 2.0


async def test_what_the_lease_service_must_hear_outlives_the_process(
    sqlite: Plane, clock: FakeClock
):
    first = One(sqlite, sqlite.replica())
    sqlite.leases.go_away()
    for i in range(3):
        await first.register(f"d{i}", instance="i1")
        await first.register(f"d{i}", instance="i2")
    await first.deregister("d1", 2)
    sqlite.leases.error = None
    second = One(sqlite, sqlite.replica())
    await second.part.registry.sweep()
    assert sqlite.leases.ended == [("d0", 2), ("d1", 3), ("d2", 2)]


async def test_the_loop_sweeps_and_survives_failures(fake: One, clock: FakeClock, monkeypatch):
    await fake.part.start()
    await settled()
    await fake.register("d")
    store, healthy = fake.part.registry._store, fake.part.registry._store.sweep

    async def broken(silent_us, in_time):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(store, "sweep", broken)
    clock.advance(1.0)
    await settled()
    monkeypatch.setattr(store, "sweep", healthy)
    for _ in range(8):
        clock.advance(1.0)
        await settled()
    assert await state(fake, "d") == LOST
    await fake.part.stop()


async def test_who_could_not_be_heard_while_this_process_stood_still_is_not_lost(
    fake: One, clock: FakeClock
):
    await fake.part.start()
    await settled()
    await fake.register("d")
    for _ in range(6):
        clock.advance(1.0)
        await settled()
        await fake.beat(beat("d"))
    clock.advance(30.0)
    await settled()
    assert await state(fake, "d") == READY
    for _ in range(6):
        clock.advance(1.0)
        await settled()
    assert await state(fake, "d") == LOST
    await fake.part.stop()


async def test_a_slow_database_loses_nobody(fake: One, clock: FakeClock, monkeypatch):
    """Beats wait for it as the sweep does, so what the sweep finds says nothing."""
    registry = fake.part.registry
    clock.advance(6.0)
    await registry.sweep()
    await fake.register("d")
    database = registry._store._database
    quick = database.run

    async def slow_once(operation):
        monkeypatch.setattr(database, "run", quick)
        clock.advance(6.0)
        return await quick(operation)

    monkeypatch.setattr(database, "run", slow_once)
    await registry.sweep()
    clock.advance(4.0)
    await registry.sweep()
    assert await state(fake, "d") == READY
    clock.advance(2.0)
    await registry.sweep()
    assert await state(fake, "d") == LOST


async def test_old_routes_are_forgotten(fake: One, clock: FakeClock):
    await fake.register("d")
    await fake.route("r1")
    clock.advance(599.0)
    await fake.beat(beat("d"))
    await fake.route("r2")
    clock.advance(2.0)
    await fake.part.registry.sweep()
    rows = await fake.plane.execute("SELECT request_id FROM routes")
    assert rows == [("r2",)]


async def test_on_postgresql_the_database_clock_decides(postgres: Plane):
    """A replica whose own clock is an hour off loses nobody early and the silent in time."""
    config = RoutingConfig(heartbeat_interval_s=0.1, worker_timeout_s=0.5, sweep_interval_s=0.05)
    skewed = FakeClock(now_us=postgres.clock.now_us() + 3_600_000_000)
    true_clock, postgres.clock = postgres.clock, skewed
    one = One(postgres, postgres.replica(config))
    skewed.advance(1.0)  # past the grace
    await one.register("d")
    await one.part.registry.sweep()
    assert await state(one, "d") == READY
    began = true_clock.monotonic()

    async def lost() -> bool:
        await one.part.registry.sweep()
        return await state(one, "d") == LOST

    await until(lost)
    assert true_clock.monotonic() - began > 0.4


async def test_on_postgresql_a_beat_during_the_sweep_wins(postgres: Plane):
    config = RoutingConfig(heartbeat_interval_s=0.02, worker_timeout_s=0.2)
    replicas = [One(postgres, postgres.replica(config)) for _ in range(2)]
    await replicas[0].register("d")

    async def beats() -> None:
        for _ in range(200):
            assert (await replicas[0].beat(beat("d")))[0].known

    async def sweeps(work: asyncio.Task) -> None:
        while not work.done():
            await replicas[1].part.registry.sweep()

    work = asyncio.create_task(beats())
    await sweeps(work)
    await work
    assert await state(replicas[0], "d") == READY
