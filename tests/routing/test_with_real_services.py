"""Routing beside the real lease manager and the real session registry, on both databases."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.db.database import Database
from kvplane.db.metadata import metadata
from kvplane.kernel.clock import SystemClock
from kvplane.kernel.compat import compatibility_key
from kvplane.lease.main import LeasePart
from kvplane.lease.main import build as build_leases
from kvplane.routing.domain import RoutingConfig
from kvplane.routing.main import build as build_routing
from kvplane.session.main import build as build_sessions
from routing.conftest import create_tables
from routing.fakes import PREFILL, worker_message
from routing.harness import RECOMPUTE, REUSE, One, pair, reason, tag

# The machine of a test may be slow; what is bounded is tested elsewhere.
PATIENT = RoutingConfig(session_bound_s=5.0, lease_bound_s=5.0, store_bound_s=5.0)
_requests = itertools.count()


@dataclass
class Replica(One):
    """One replica of everything."""

    lease: LeasePart

    async def report(self, session_id: str, turn: int, worker: str = "d", epoch: int = 1) -> str:
        """Say that a worker holds a turn's blocks, as its connector does."""
        empty = lease_pb2.ReportOwnershipRequest(worker_id=worker, epoch=epoch)
        empty.time_anchor.anchor = SystemClock().now_us()
        mine = worker_message(worker).compatibility
        owned = lease_pb2.Ownership(
            tenant_id="default",
            session_id=session_id,
            turn=turn,
            num_tokens=100,
            block_size=16,
            digests=bytes(16 * 7),
            cuttable=True,
            compatibility=compatibility_key(
                **{name.name: getattr(mine, name.name) for name in mine.DESCRIPTOR.fields}
            ),
            params=lease_pb2.KvTransferParams(
                remote_engine_id=f"engine-{worker}",
                remote_request_id=f"request-{next(_requests)}",
                remote_host="127.0.0.1",
                remote_port=5600,
                remote_num_tokens=100,
                remote_block_ids=[lease_pb2.BlockGroup(ids=range(7))],
            ),
        )
        owned.hold.FromSeconds(60)
        empty.ownerships.append(owned)
        answer = await self.lease.servicer.ReportOwnership(empty)
        return answer.ownerships[0].ownership_id

    async def owned(self, ownership_id: str) -> str:
        request = lease_pb2.GetOwnershipRequest(ownership_id=ownership_id)
        answer = await self.lease.servicer.GetOwnership(request)
        return lease_pb2.OwnershipState.Name(answer.ownership.state).removeprefix(
            "OWNERSHIP_STATE_"
        )

    async def read(self, lease: lease_pb2.Lease) -> lease_pb2.Ownership:
        """Read and use up, as the prefill's connector does."""
        mine = worker_message(lease.holder.worker_id).compatibility
        holder = lease_pb2.Holder(
            worker_id=lease.holder.worker_id,
            epoch=lease.holder.epoch,
            compatibility=compatibility_key(
                **{name.name: getattr(mine, name.name) for name in mine.DESCRIPTOR.fields}
            ),
        )
        begun = await self.lease.servicer.BeginRead(
            lease_pb2.BeginReadRequest(
                lease_id=lease.lease_id, fencing_token=lease.fencing_token, holder=holder
            )
        )
        await self.lease.servicer.ReleaseLeases(
            lease_pb2.ReleaseLeasesRequest(
                holder=holder,
                releases=[
                    lease_pb2.LeaseRelease(
                        lease_id=lease.lease_id,
                        fencing_token=lease.fencing_token,
                        outcome=lease_pb2.READ_OUTCOME_CONSUMED,
                    )
                ],
            )
        )
        return begun.ownership


@dataclass
class World:
    url: str
    clock: SystemClock = field(default_factory=SystemClock)
    databases: list[Database] = field(default_factory=list)

    def replica(self, config: RoutingConfig = PATIENT) -> Replica:
        database = Database(self.url, self.clock)
        self.databases.append(database)
        leases = build_leases(database, self.clock)
        sessions = build_sessions(database, self.clock, leases.servicer)
        part = build_routing(database, self.clock, leases.servicer, sessions.servicer, config)
        return Replica(plane=None, part=part, lease=leases)


async def _worlds(url: str) -> AsyncIterator[World]:
    await create_tables(url, list(metadata.tables.values()))
    world = World(url)
    yield world
    for database in world.databases:
        await database.close()


@pytest.fixture
async def over_sqlite(tmp_path) -> AsyncIterator[World]:
    async for world in _worlds(f"sqlite:///{tmp_path}/kvplane.db"):
        yield world


@pytest.fixture
async def over_postgres(postgres_database: str) -> AsyncIterator[World]:
    async for world in _worlds(postgres_database):
        yield world


@pytest.fixture(params=["over_sqlite", "over_postgres"])
def world(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


async def test_a_conversation_reuses_turn_after_turn_over_alternating_replicas(world: World):
    replicas = [world.replica(), world.replica()]
    await pair(replicas[0])
    for turn in range(1, 6):
        one = replicas[turn % 2]
        answer = await one.route(f"r{turn}")
        assert answer.turn == turn
        assert answer.decode.worker_id == "d"
        if turn > 1:
            assert (answer.decision, answer.held_tokens) == (REUSE, 100)
            assert tag(answer.prefill_params)["lease_id"] == answer.lease.lease_id
            read = await replicas[(turn + 1) % 2].read(answer.lease)
            assert read.params.remote_engine_id == "engine-d"
            assert await one.owned(answer.lease.ownership_id) == "CONSUMED"
        reused = 100 if turn > 1 else 0
        await one.complete(answer, prompt_tokens=150, tokens_reused=reused)
        await replicas[0].report(answer.session_id, turn)


async def test_a_report_that_is_still_under_way_is_waited_for(world: World):
    one = world.replica()
    await pair(one)
    first = await one.route("r1")
    await one.complete(first)
    next_turn = asyncio.create_task(one.route("r2"))
    await asyncio.wait([next_turn], timeout=0.05)
    assert not next_turn.done()
    await one.report(first.session_id, 1)
    assert (await next_turn).decision == REUSE


async def test_a_repeated_route_has_the_same_lease(world: World):
    replicas = [world.replica(), world.replica()]
    await pair(replicas[0])
    await held_turn(replicas[0])
    answers = [await one.route("r2") for one in (*replicas, *replicas)]
    assert {answer.lease.lease_id for answer in answers} == {answers[0].lease.lease_id}
    assert answers[0].decision == REUSE
    assert {answer.turn for answer in answers} == {2}
    await replicas[1].read(answers[3].lease)


async def test_of_two_turns_at_once_one_reuses(world: World):
    replicas = [world.replica(), world.replica()]
    await pair(replicas[0])
    await held_turn(replicas[0])
    answers = await asyncio.gather(*(one.route(f"r{i}") for i, one in enumerate(replicas, 2)))
    assert sorted(answer.decision for answer in answers) == [REUSE, RECOMPUTE]
    assert {reason(answer) for answer in answers} == {"OWNER_HOLDS", "ALREADY_LEASED"}


async def test_a_restarted_owner_means_recompute_and_then_reuse_again(world: World):
    one = world.replica()
    await pair(one)
    session_id, owned = await held_turn(one)
    assert (await one.register("d", instance="i2")).epoch == 2
    assert await one.owned(owned) == "LOST"
    second = await one.route("r2")
    assert (second.decision, second.decode.epoch) == (RECOMPUTE, 2)
    assert reason(second) in {"NOTHING_HELD", "OWNER_LOST"}
    await one.complete(second)
    await one.report(session_id, 2, epoch=2)
    assert (await one.route("r3")).decision == REUSE


async def test_a_silent_owner_loses_what_it_owned(world: World):
    config = RoutingConfig(
        heartbeat_interval_s=0.1,
        worker_timeout_s=0.4,
        sweep_interval_s=0.1,
        session_bound_s=5.0,
        lease_bound_s=5.0,
    )
    one = world.replica(config)
    await pair(one)
    _, owned = await held_turn(one)
    await one.part.start()
    async with asyncio.timeout(20):
        while await one.owned(owned) != "LOST":
            await world.clock.sleep(0.05)
    await one.part.stop()
    await one.register("p", **PREFILL, instance="i2")
    await one.register("e")
    answer = await one.route("r2")
    assert (answer.decode.worker_id, reason(answer)) == ("e", "OWNER_LOST")


async def test_a_draining_owner_is_still_read(world: World):
    one = world.replica()
    await pair(one)
    await held_turn(one)
    await one.register("e")
    await one.drain("d")
    answer = await one.route("r2")
    assert (answer.decode.worker_id, answer.decision) == ("e", REUSE)
    await one.read(answer.lease)


async def test_a_caller_that_leaves_and_asks_again_may_read(world: World, monkeypatch):
    one = world.replica()
    await pair(one)
    _, owned = await held_turn(one)
    stored, store = asyncio.Event(), one.part.routing_servicer._router._routes
    settle = store.settle

    async def unheard(key, answer):
        await settle(key, answer)
        stored.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(store, "settle", unheard)
        call = asyncio.create_task(one.route("r2"))
        await stored.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (await one.route("r2")).decision == REUSE
    await one.part.leases.close()
    assert await one.owned(owned) == "LEASED"


async def held_turn(one: Replica) -> tuple[str, str]:
    """Play a first turn, after which `d` holds its blocks; return session and ownership."""
    first = await one.route("r1")
    await one.complete(first)
    return first.session_id, await one.report(first.session_id, 1)
