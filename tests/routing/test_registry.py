"""Epochs, signs of life, drain and listing, on both databases."""

import asyncio

import pytest
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.kernel.context import Caller, Role, set_caller
from kvplane.kernel.errors import (
    AlreadyExists,
    IllegalTransition,
    InvalidField,
    NotFound,
    StaleEpoch,
)
from routing.fakes import BOTH, PREFILL, beat
from routing.harness import One, Plane

READY, DRAINING, LOST = (
    pb.WORKER_STATE_READY,
    pb.WORKER_STATE_DRAINING,
    pb.WORKER_STATE_LOST,
)


async def test_a_worker_is_shown_as_it_registered(one: One):
    made = await one.register(
        "pool/d-0",
        data_parallel_rank=0,
        served_models=["main", "alias", "main"],
        recompute_threshold=128,
        state=LOST,
    )
    assert (made.epoch, made.state) == (1, READY)
    shown = await one.get("pool/d-0")
    assert shown.silent_for.ToMilliseconds() < 5000
    shown.ClearField("silent_for")
    made.ClearField("silent_for")
    assert shown == made
    assert list(shown.served_models) == ["main", "alias"]
    assert shown.HasField("data_parallel_rank")
    assert shown.recompute_threshold == 128
    assert shown.compatibility.kv_layout == "NHD"


async def test_what_is_left_out_gets_its_default(one: One):
    made = await one.register("d")
    assert made.recompute_threshold == 64
    assert list(made.served_models) == ["m"]
    assert not made.HasField("data_parallel_rank")


async def test_the_same_process_keeps_its_epoch_and_may_change_its_profile(one: One):
    await one.register("d", instance="i1")
    again = await one.register("d", instance="i1", url="http://127.0.0.1:9000")
    assert (again.epoch, again.url) == (1, "http://127.0.0.1:9000")
    assert (await one.get("d")).url == "http://127.0.0.1:9000"
    assert one.leases.ended == []


async def test_a_new_process_ends_the_old_epoch(one: One):
    await one.register("d", instance="i1")
    again = await one.register("d", instance="i2", engine_id="other")
    assert (again.epoch, again.state, again.engine_id) == (2, READY, "other")
    assert one.leases.ended == [("d", 2)]
    stale, now = await one.beat(beat("d", 1), beat("d", 2))
    assert (stale.known, now.known) == (False, True)


async def test_an_engine_is_one_live_worker_s(one: One):
    """Else readers could be sent to the blocks of another's engine."""
    await one.register("d", engine_id="e1")
    with pytest.raises(AlreadyExists):
        await one.register("thief", engine_id="e1", kv_port=5700)
    with pytest.raises(NotFound):
        await one.get("thief")
    await one.register("thief", engine_id="e2")
    with pytest.raises(AlreadyExists):
        await one.register("thief", engine_id="e1", instance="i2")
    assert (await one.get("thief")).engine_id == "e2"
    await one.register("d", engine_id="e1", instance="i2")
    await one.deregister("d", 2)
    assert (await one.register("moved", engine_id="e1")).epoch == 1


async def test_a_plain_engine_that_says_no_id_has_its_side_channel_alone(one: One):
    await one.register("plain", managed=False, engine_id="", kv_port=5601)
    with pytest.raises(AlreadyExists):
        await one.register("thief", kv_port=5601)
    await one.register("d", kv_port=5602)


async def test_a_worker_that_registers_itself_says_its_engine(one: One):
    set_caller(Caller(roles=frozenset({Role.WORKER}), worker_id="d"))
    with pytest.raises(InvalidField, match="engine_id"):
        await one.register("d", managed=False, engine_id="")


async def test_an_epoch_that_the_registry_has_forgotten_never_begins_again(one: One):
    """Its rows were deleted, or put back to an older state: the worker knows better."""
    assert (await one.register("d", instance="i1", epoch=7)).epoch == 8
    assert one.leases.ended == [("d", 8)]
    assert (await one.register("d", instance="i1", epoch=8)).epoch == 8
    assert (await one.register("d", instance="i1", epoch=9)).epoch == 10
    assert one.leases.ended == [("d", 8), ("d", 10)]
    assert (await one.register("d", instance="i2", epoch=3)).epoch == 11


async def test_a_drained_worker_stays_drained_until_a_new_process_comes(one: One):
    await one.register("d", instance="i1")
    assert (await one.drain("d")).state == DRAINING
    assert (await one.drain("d")).state == DRAINING
    assert (await one.register("d", instance="i1")).state == DRAINING
    assert (await one.beat(beat("d")))[0].state == DRAINING
    assert (await one.drain("d", undo=True)).state == READY
    await one.drain("d")
    assert (await one.register("d", instance="i2")).state == READY


async def test_beats_are_answered_one_by_one(one: One):
    await one.register("a")
    await one.register("b")
    await one.deregister("b")
    load = {"running": 3, "waiting": 2, "kv_usage": 0.25, "held": 1}
    results = await one.beat(
        beat("b"), beat("nobody"), beat("a", 9), beat("a", running=9), beat("a", **load)
    )
    assert [r.worker_id for r in results] == ["b", "nobody", "a", "a", "a"]
    assert [r.known for r in results] == [False, False, False, True, True]
    assert [r.state for r in results][:2] == [LOST, pb.WORKER_STATE_UNSPECIFIED]
    # Of two beats for one worker the later stays.
    assert (await one.get("a")).load == pb.Load(**load)


async def test_an_empty_heartbeat_is_fine(one: One):
    assert await one.beat() == []


async def test_deregistering_ends_the_epoch_once(one: One):
    await one.register("d")
    await one.deregister("d")
    await one.deregister("d")
    assert (await one.get("d")).state == LOST
    assert set(one.leases.ended) == {("d", 2)}
    with pytest.raises(IllegalTransition):
        await one.drain("d")
    with pytest.raises(IllegalTransition):
        await one.drain("d", undo=True)
    # The same process again: what it owned is void, so the epoch is a new one.
    assert (await one.register("d")).epoch == 2


async def test_only_the_present_epoch_can_be_deregistered(one: One):
    await one.register("d", instance="i1")
    await one.register("d", instance="i2")
    with pytest.raises(StaleEpoch):
        await one.deregister("d", 1)
    with pytest.raises(InvalidField):
        await one.deregister("d", 3)
    assert (await one.get("d")).state == READY


async def test_an_unknown_worker_is_not_found(one: One):
    for call in (one.get("x"), one.drain("x"), one.deregister("x")):
        with pytest.raises(NotFound) as caught:
            await call
        assert caught.value.metadata == {"kind": "worker", "id": "x"}


async def test_listing_filters_and_pages(one: One):
    for i in range(7):
        await one.register(f"d{i}", served_models=["m", "even" if i % 2 == 0 else "odd"])
    await one.register("p", **PREFILL)
    await one.register("b", **BOTH)
    await one.drain("d1")
    await one.deregister("d3")

    async def names(**fields) -> list[str]:
        found, token, pages = [], "", 0
        while True:
            request = pb.ListWorkersRequest(page_token=token, **fields)
            page = await one.part.worker_servicer.ListWorkers(request)
            found += [worker.worker_id for worker in page.workers]
            token, pages = page.next_page_token, pages + 1
            assert pages < 20
            if not token:
                return found

    everyone = ["b", "d0", "d1", "d2", "d3", "d4", "d5", "d6", "p"]
    assert await names() == everyone
    for size in (1, 2, 3, 9):
        assert await names(page_size=size) == everyone
    assert await names(role=pb.WORKER_ROLE_PREFILL) == ["p"]
    assert await names(role=pb.WORKER_ROLE_BOTH) == ["b"]
    assert await names(states=[DRAINING, LOST], page_size=1) == ["d1", "d3"]
    assert await names(model="even", page_size=2) == ["d0", "d2", "d4", "d6"]
    assert await names(model="even", page_size=3, states=[READY]) == ["d0", "d2", "d4", "d6"]
    assert await names(model="nothing") == []


async def test_registering_at_two_replicas_at_once_makes_one_epoch(plane: Plane):
    replicas = [One(plane, plane.replica()) for _ in range(2)]
    made = await asyncio.gather(*(one.register("d") for one in replicas * 5))
    assert {worker.epoch for worker in made} == {1}
    restarted = await asyncio.gather(*(one.register("d", instance="i2") for one in replicas * 5))
    assert {worker.epoch for worker in restarted} == {2}


async def test_replicas_beat_the_same_workers_in_any_order(plane: Plane):
    replicas = [One(plane, plane.replica()) for _ in range(2)]
    names = [f"d{i:02}" for i in range(40)]
    for name in names:
        await replicas[0].register(name)
    for round_ in range(10):
        beats = [beat(name, running=round_) for name in names]
        answers = await asyncio.gather(replicas[0].beat(*beats), replicas[1].beat(*reversed(beats)))
        assert all(result.known for results in answers for result in results)
    assert (await replicas[0].get("d07")).load.running == 9
