"""Route while other parts are away, slow or wrong: a bounded wait, then an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.kernel.errors import (
    Internal,
    InvalidField,
    NoWorker,
    QuotaExceeded,
    StaleEpoch,
    Unavailable,
)
from kvplane.routing.domain import RoutingConfig
from prometheus_client import REGISTRY
from routing.fakes import PREFILL
from routing.harness import RECOMPUTE, REUSE, One, Plane, pair, reason, tag

NEVER_BEGUN = lease_pb2.READ_OUTCOME_NEVER_BEGUN


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    began = asyncio.get_running_loop().time()
    yield
    assert asyncio.get_running_loop().time() - began < seconds


@pytest.mark.parametrize("error", [Unavailable("gone"), Internal("?"), RuntimeError("a mistake")])
async def test_without_the_session_registry_turns_go_on(fake: One, error: Exception):
    await pair(fake)
    await fake.turn("r1")
    fake.sessions.error = error
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "SESSION_SERVICE_UNAVAILABLE")
    assert (answer.session_id, answer.turn) == ("", 0)
    assert (answer.prefill.worker_id, answer.decode.worker_id) == ("p", "d")
    # The decode's read of this turn's prefill still needs our key.
    mine = {"tenant": "default", "session": "", "turn": 0}
    assert tag(answer.prefill_params) == tag(answer.decode_params) == mine
    await fake.part.routing_servicer.Complete(
        pb.CompleteRequest(turn={"decode_worker_id": "d", "outcome": "TURN_OUTCOME_OK"})
    )
    fake.sessions.error = None
    assert (await fake.route("r3")).decision == REUSE


async def test_a_slow_session_registry_is_not_waited_for(fake: One):
    await pair(fake)
    fake.sessions.hangs = True
    async with within(2.0):
        assert reason(await fake.route("r1")) == "SESSION_SERVICE_UNAVAILABLE"
    with pytest.raises(Unavailable):
        async with within(2.0):
            await fake.complete(pb.RouteResponse(session_id="s", turn=1))


async def test_what_the_caller_must_know_is_told_in_its_own_words(fake: One):
    await pair(fake)
    fake.sessions.error = QuotaExceeded("turns")
    with pytest.raises(QuotaExceeded):
        await fake.route("r1")
    fake.sessions.error = InvalidField("key.name", "too odd")
    with pytest.raises(InvalidField, match=r"^session\.name: too odd$"):
        await fake.route("r1")
    fake.sessions.error = InvalidField("tokens_reused", "too many")
    with pytest.raises(InvalidField, match=r"^turn\.tokens_reused: too many$") as caught:
        await fake.complete(pb.RouteResponse(session_id="s", turn=1))
    assert caught.value.metadata["field"] == "turn.tokens_reused"


@pytest.mark.parametrize("error", [Unavailable("gone"), Internal("?"), RuntimeError("a mistake")])
async def test_without_the_lease_service_turns_recompute(fake: One, error: Exception):
    await pair(fake)
    await fake.turn("r1")
    fake.leases.error = error
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "LEASE_SERVICE_UNAVAILABLE")
    assert (answer.session_id, answer.turn) == ("session-default-s", 2)
    fake.leases.error = None
    assert (await fake.route("r3")).decision == REUSE


async def test_a_grant_that_comes_too_late_is_given_back(fake: One):
    await pair(fake)
    await fake.turn("r1")
    fake.leases.hangs = True
    async with within(3.0):
        assert reason(await fake.route("r2")) == "LEASE_SERVICE_UNAVAILABLE"
    fake.leases.hangs = False
    fake.leases.resume.set()
    await fake.part.leases.close()
    assert fake.leases.releases == [("lease-1", NEVER_BEGUN)]


async def test_a_reader_that_has_just_registered_again_is_cold(fake: One):
    await pair(fake)
    await fake.turn("r1")
    fake.leases.error = StaleEpoch("p", 1)
    assert reason(await fake.route("r2")) == "NOTHING_HELD"


async def test_a_caller_that_leaves_during_the_grant_leaves_no_lease(fake: One):
    await pair(fake)
    await fake.turn("r1")
    fake.leases.hangs = True
    asked = asyncio.Event()
    fake.leases.before_grant = asked.set
    call = asyncio.create_task(fake.route("r2"))
    await asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    fake.leases.hangs = False
    fake.leases.resume.set()
    await fake.part.leases.close()
    assert fake.leases.releases == [("lease-1", NEVER_BEGUN)]
    assert (await fake.route("r3")).decision == REUSE


@pytest.mark.parametrize("how", ["leaves", "waits", "hears that it failed"])
async def test_a_lease_that_may_be_in_a_stored_answer_is_for_whoever_asks_again(
    sqlite: Plane, monkeypatch, how: str
):
    # A release that comes late would free what the second one's engine is reading.
    one = One(sqlite, sqlite.replica(RoutingConfig(store_bound_s=0.2)))
    await pair(one)
    await one.turn("r1")
    stored, store = asyncio.Event(), one.part.routing_servicer._router._routes
    settle = store.settle

    async def unheard(key, answer):
        await settle(key, answer)
        stored.set()
        if how == "hears that it failed":
            raise Unavailable("the answer got lost")
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(store, "settle", unheard)
        call = asyncio.create_task(one.route("r2"))
        await stored.wait()
        if how == "leaves":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert not (await call).HasField("lease")
    assert (await one.route("r2")).lease.lease_id == "lease-1"
    await one.part.leases.close()
    assert one.leases.releases == []


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_answer_that_cannot_be_kept_has_no_lease(sqlite: Plane, monkeypatch, hangs: bool):
    one = One(sqlite, sqlite.replica(RoutingConfig(store_bound_s=0.2)))
    await pair(one)
    await one.turn("r1")

    async def fail(key, answer):
        if hangs:
            await asyncio.Event().wait()
        raise Unavailable("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(one.part.routing_servicer._router._routes, "settle", fail)
        async with within(2.0):
            answer = await one.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "LEASE_SERVICE_UNAVAILABLE")
    assert not answer.HasField("lease")
    assert answer.decode.worker_id == "d"


async def test_a_mistake_after_the_grant_leaves_no_load(fake: One, monkeypatch):
    await pair(fake)
    await fake.turn("r1")
    router = fake.part.routing_servicer._router
    before = dict(router._in_flight.loads)

    async def broken(key, answer):
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(router._routes, "settle", broken)
        with pytest.raises(RuntimeError):
            await fake.route("r2")
    assert dict(router._in_flight.loads) == before


async def test_while_the_database_is_away_turns_go_where_they_last_could(fake: One, monkeypatch):
    await pair(fake)
    await fake.turn("r1")
    router = fake.part.routing_servicer._router

    async def away(*args):
        raise Unavailable("the database is away")

    with monkeypatch.context() as patched:
        for store, method in ((router._snapshots._store, "live"), (router._routes, "settle")):
            patched.setattr(store, method, away)
        fake.plane.clock.advance(60.0)
        fake.sessions.go_away()
        answer = await fake.route("r2")
        assert (answer.decode.worker_id, answer.decision) == ("d", RECOMPUTE)
        # A replica that has never seen a worker has nothing to offer.
        fresh = One(fake.plane, fake.plane.replica())
        patched.setattr(fresh.part.routing_servicer._router._snapshots._store, "live", away)
        with pytest.raises(Unavailable):
            await fresh.route("r3")
    fake.sessions.error = None
    assert (await fake.route("r4")).decision == REUSE


async def test_only_the_first_turn_waits_for_a_database_that_hangs(sqlite: Plane, monkeypatch):
    one = One(sqlite, sqlite.replica(RoutingConfig(store_bound_s=1.0)))
    await pair(one)
    await one.route("r1")
    store = one.part.routing_servicer._router._snapshots._store
    healthy, resume = store.live, asyncio.Event()

    async def hang():
        await resume.wait()
        return await healthy()

    monkeypatch.setattr(store, "live", hang)
    sqlite.clock.advance(1.0)
    assert (await one.route("r2")).decode.worker_id == "d"
    async with within(3.0):
        for i in range(5):
            assert (await one.route(f"hung{i}")).decode.worker_id == "d"
    assert await sqlite.execute("SELECT request_id FROM routes") == [("r1",)]
    resume.set()
    sqlite.clock.advance(1.0)
    assert (await one.route("r3")).decode.worker_id == "d"
    assert ("r3",) in await sqlite.execute("SELECT request_id FROM routes")


async def test_why_turns_reuse_or_recompute_is_counted(fake: One):
    def count(reason: str) -> float:
        return REGISTRY.get_sample_value("kvplane_routing_decisions_total", {"reason": reason})

    before = count("first_turn"), count("owner_holds")
    await pair(fake)
    await fake.turn("r1")
    for _ in range(2):
        await fake.route("r2")
    assert (count("first_turn"), count("owner_holds")) == (before[0] + 1, before[1] + 1)


async def test_a_lost_worker_is_seen_by_the_next_route(fake: One):
    await pair(fake)
    await fake.register("e")
    assert (await fake.route("r1")).decode.worker_id == "d"
    await fake.deregister("e")
    assert (await fake.route("r2")).decode.worker_id == "d"
    await fake.deregister("d")
    assert reason(await fake.route("r3")) == "SINGLE_WORKER"
    await fake.deregister("p")
    with pytest.raises(NoWorker):
        await fake.route("r4")


async def test_other_replicas_see_it_within_the_age_of_a_snapshot(sqlite: Plane):
    one, other = (One(sqlite, sqlite.replica()) for _ in range(2))
    await one.register("p", **PREFILL)
    await one.register("d")
    assert (await other.route("r1")).decode.worker_id == "d"
    await one.deregister("d")
    sqlite.clock.advance(0.2)
    assert (await other.route("r2")).decode.worker_id == "p"
