"""Route and Complete: targets, params, leases, reasons, repetition."""

import asyncio
from collections import Counter

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.kernel.compat import compatibility_key
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import NotFound, NoWorker
from routing.fakes import BOTH, PREFILL
from routing.harness import RECOMPUTE, REUSE, One, Plane, pair, reason, tag


async def test_a_first_turn_is_cold(one: One):
    await one.register("p", **PREFILL, url="http://127.0.0.1:1", managed=False, kv_port=1)
    await one.register("d/1", data_parallel_rank=1, url="http://127.0.0.1:2")
    answer = await one.route("r1")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "FIRST_TURN")
    assert (answer.session_id, answer.turn) == ("session-default-s", 1)
    assert answer.prefill == pb.Target(
        worker_id="p", epoch=1, url="http://127.0.0.1:1", managed=False
    )
    assert answer.decode == pb.Target(
        worker_id="d/1",
        epoch=1,
        url="http://127.0.0.1:2",
        headers={"X-data-parallel-rank": "1"},
        managed=True,
    )
    assert not answer.HasField("lease")
    mine = {"tenant": "default", "session": answer.session_id, "turn": 1}
    assert tag(answer.prefill_params) == tag(answer.decode_params) == mine
    # Present and false is not the same as absent.
    assert answer.prefill_params.HasField("do_remote_prefill")
    assert not answer.prefill_params.do_remote_prefill
    assert answer.prefill_params.do_remote_decode
    assert not answer.decode_params.HasField("do_remote_decode")
    assert one.leases.grants == []


async def test_the_next_turn_reads_from_its_owner(one: One):
    await pair(one)
    await one.turn("r1")
    answer = await one.route("r2")
    assert (answer.decision, reason(answer)) == (REUSE, "OWNER_HOLDS")
    assert (answer.decode.worker_id, answer.turn, answer.held_tokens) == ("d", 2, 300)
    lease = answer.lease
    assert (lease.lease_id, lease.holder.worker_id, lease.holder.epoch) == ("lease-1", "p", 1)
    mine = {"tenant": "default", "session": answer.session_id, "turn": 2}
    assert tag(answer.prefill_params) == {
        **mine,
        "lease_id": lease.lease_id,
        "fencing_token": lease.fencing_token,
    }
    assert tag(answer.decode_params) == mine
    # The block ids come from BeginRead, not from here.
    assert not answer.prefill_params.remote_block_ids
    assert not answer.prefill_params.HasField("remote_engine_id")
    assert one.leases.releases == []


async def test_the_lease_is_asked_for_the_prefill_worker(one: One):
    await pair(one, recompute_threshold=200)
    await one.turn("r1")
    await one.route("r2")
    (asked,) = one.leases.grants
    assert (asked.session_id, asked.min_tokens) == ("session-default-s", 200)
    assert (asked.holder.worker_id, asked.holder.epoch) == ("p", 1)
    assert asked.holder.compatibility == compatibility_key(
        model="m",
        revision="r1",
        block_size=16,
        kv_layout="NHD",
        kv_dtype="float32",
        engine_version="1",
    )


async def test_only_a_report_that_may_still_come_is_waited_for(one: One):
    await one.register("p", **PREFILL)
    await one.register("d", managed=False)
    await one.turn("r1", "plain")
    await one.route("r2", "plain")
    await one.register("d")
    await one.turn("r3", "managed")
    await one.route("r4", "managed")
    await one.route("r5", "open")
    one.sessions._sessions["default", "open"].last_decode_worker_id = "d"
    await one.route("r6", "open")
    await one.register("e")
    await one.drain("d")
    await one.turn("r7", "managed")
    waits = [asked.wait.ToMilliseconds() for asked in one.leases.grants]
    assert waits == [0, 250, 0, 0]


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ("NOT_HELD", "NOTHING_HELD"),
        ("ALREADY_LEASED", "ALREADY_LEASED"),
        ("EXPIRING", "EXPIRING"),
        ("INCOMPATIBLE", "INCOMPATIBLE"),
        ("BELOW_THRESHOLD", "BELOW_THRESHOLD"),
        ("OWNER_LOST", "OWNER_LOST"),
    ],
)
async def test_each_refusal_has_its_reason(fake: One, refusal: str, expected: str):
    await pair(fake)
    await fake.turn("r1")
    fake.leases.refuse(
        "session-default-s", lease_pb2.RefusalReason.Value(f"REFUSAL_REASON_{refusal}")
    )
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, expected)
    assert "lease_id" not in tag(answer.prefill_params)
    assert answer.held_tokens == 0


async def test_a_prefill_that_is_not_bidirectional_never_gets_a_handle(fake: One):
    await pair(fake, bidirectional=False)
    await fake.turn("r1")
    answer = await fake.route("r2")
    assert (answer.prefill.worker_id, reason(answer)) == ("p", "NOT_BIDIRECTIONAL")
    assert fake.leases.grants == []


async def test_forced_recompute_asks_for_no_lease(fake: One):
    await pair(fake)
    await fake.turn("r1")
    answer = await fake.route("r2", force_recompute=True)
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "FORCED")
    assert fake.leases.grants == []


async def test_a_draining_owner_is_read_but_decodes_no_more(fake: One):
    await pair(fake)
    await fake.turn("r1")
    await fake.register("e")
    await fake.drain("d")
    answer = await fake.route("r2")
    assert (answer.decode.worker_id, answer.decision) == ("e", REUSE)
    fake.leases.held.clear()
    assert reason(await fake.route("r3")) == "OWNER_DRAINING"


async def test_a_lost_owner_means_recompute_elsewhere(fake: One):
    await pair(fake)
    await fake.turn("r1")
    await fake.register("e")
    await fake.deregister("d")
    answer = await fake.route("r2")
    assert (answer.decode.worker_id, reason(answer)) == ("e", "OWNER_LOST")
    assert fake.leases.grants == []


async def test_an_excluded_owner_is_neither_used_nor_read(fake: One):
    await pair(fake)
    await fake.turn("r1")
    await fake.register("e")
    answer = await fake.route("r2", exclude_worker_ids=["d"])
    assert (answer.decode.worker_id, reason(answer)) == ("e", "OWNER_LOST")


async def test_an_overloaded_owner_is_left_for_good(fake: One):
    await pair(fake)
    await fake.turn("r1")
    await fake.register("e")
    await fake.load("d", running=8)
    stays = await fake.turn("r2")
    assert (stays.decode.worker_id, stays.decision) == ("d", REUSE)
    await fake.load("d", running=9)
    fake.plane.clock.advance(0.3)
    moved = await fake.turn("r3")
    assert (moved.decode.worker_id, reason(moved)) == ("e", "OWNER_OVERLOADED")
    await fake.load("d", running=0)
    fake.leases.live.clear()
    fake.plane.clock.advance(0.3)
    assert (await fake.route("r4")).decode.worker_id == "e"


async def test_a_grant_on_an_old_epoch_is_given_back(fake: One):
    """The owner has registered again while the lease service had not heard of it."""
    await pair(fake)
    first = await fake.turn("r1")
    await fake.register("d", instance="i2")
    fake.leases.hold(first.session_id, "d", epoch=1)
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "OWNER_LOST")
    await fake.part.leases.close()
    assert fake.leases.releases == [("lease-1", lease_pb2.READ_OUTCOME_NEVER_BEGUN)]


async def test_an_owner_that_another_replica_has_just_registered_is_believed(sqlite: Plane):
    one, other = One(sqlite, sqlite.replica()), One(sqlite, sqlite.replica())
    await pair(one)
    first = await one.turn("r1")
    await other.register("d", instance="i2")
    one.leases.hold(first.session_id, "d", epoch=2)
    answer = await one.route("r2")
    assert (answer.decision, reason(answer)) == (REUSE, "OWNER_HOLDS")


async def test_a_grant_on_what_the_reader_itself_holds_is_given_back(fake: One):
    await pair(fake)
    first = await fake.turn("r1")
    fake.leases.hold(first.session_id, "p")
    answer = await fake.route("r2")
    assert reason(answer) == "NOTHING_HELD"
    await fake.part.leases.close()
    assert len(fake.leases.releases) == 1


@pytest.mark.parametrize(
    "named", [("169.254.169.254", 5600), ("127.0.0.1", 5601), ("127.0.0.1", 0), ("", 5600)]
)
async def test_a_handle_that_names_another_side_channel_is_not_handed_out(fake: One, named):
    """Right host and wrong port, too: a worker's word sends no reader to any place but its own."""
    await pair(fake)
    first = await fake.turn("r1")
    fake.leases.hold(first.session_id, "d")
    fake.leases.held[first.session_id].side_channel = named
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "INCOMPATIBLE")
    assert not answer.HasField("lease")
    assert "lease_id" not in tag(answer.prefill_params)
    await fake.part.leases.close()
    assert len(fake.leases.releases) == 1


async def test_a_handle_of_another_s_engine_is_not_handed_out(fake: One):
    await pair(fake)
    first = await fake.turn("r1")
    fake.leases.hold(first.session_id, "d")
    fake.leases.held[first.session_id].engine_id = "engine-p"
    answer = await fake.route("r2")
    assert (answer.decision, reason(answer)) == (RECOMPUTE, "INCOMPATIBLE")


async def test_one_worker_alone_does_it_all(fake: One):
    await fake.register("p", **PREFILL)
    alone = await fake.turn("r1")
    assert (alone.decode.worker_id, reason(alone)) == ("p", "SINGLE_WORKER")
    assert not alone.HasField("prefill")
    assert not alone.HasField("prefill_params")
    assert tag(alone.decode_params)["turn"] == 1
    await fake.deregister("p")
    await fake.register("b", **BOTH)
    assert (await fake.route("r2")).decode.worker_id == "b"
    assert fake.leases.grants == []


async def test_nobody_there_is_said_before_a_turn_is_opened(one: One):
    await pair(one)
    for fields in ({"model": "other"}, {"exclude_worker_ids": ["p", "d"]}):
        with pytest.raises(NoWorker) as caught:
            await one.route("r1", **fields)
        assert caught.value.retry_after == 1.0
    assert one.sessions.begun == []


async def test_a_repeated_request_gets_the_first_answer(plane: Plane):
    """At the same replica, at another one, and at one that was started since."""
    first, second = (One(plane, plane.replica()) for _ in range(2))
    await pair(first)
    await first.turn("r1")
    answer = await first.route("r2")
    assert answer.decision == REUSE
    for one in (first, second, One(plane, plane.replica())):
        again = await one.route("r2")
        again.lease.ttl.CopyFrom(answer.lease.ttl)
        assert again == answer
        await one.part.leases.close()
    assert answer.lease.lease_id in plane.leases.live
    assert await plane.execute("SELECT count(*) FROM routes") == [(2,)]


async def test_a_repeated_answer_has_less_time_left(fake: One):
    await pair(fake)
    await fake.turn("r1")
    await fake.route("r2")
    fake.plane.clock.advance(3.0)
    assert (await fake.route("r2")).lease.ttl.seconds == 7
    other = One(fake.plane, fake.plane.replica())
    assert (await other.route("r2")).lease.ttl.seconds == 7
    fake.plane.clock.advance(30.0)
    assert (await fake.route("r2")).lease.ttl.ToMicroseconds() == 0


async def test_a_lease_that_lost_the_race_is_given_back(sqlite: Plane):
    first, second = (One(sqlite, sqlite.replica()) for _ in range(2))
    await pair(first)
    await first.turn("r1")
    answers = await asyncio.gather(first.route("r2"), second.route("r2"))
    assert answers[0].SerializeToString() == answers[1].SerializeToString()
    for one in (first, second):
        await one.part.leases.close()
    kept = {answers[0].lease.lease_id} - {""}
    assert set(sqlite.leases.live) == kept


async def test_a_retry_without_the_failed_worker_is_a_new_question_of_the_same_turn(one: One):
    await pair(one)
    await one.register("e")
    first = await one.route("r1")
    failed = first.decode.worker_id
    second = await one.route("r1", exclude_worker_ids=[failed])
    assert second.decode.worker_id != failed
    assert (second.session_id, second.turn) == (first.session_id, first.turn)
    assert await one.route("r1") == first
    assert await one.route("r1", exclude_worker_ids=[failed]) == second


async def test_tenants_do_not_meet(one: One):
    await pair(one)
    first = await one.turn("r1")
    set_caller(Caller("other"))
    theirs = await one.route("r1")
    assert (theirs.turn, reason(theirs)) == (1, "FIRST_TURN")
    assert theirs.session_id != first.session_id
    assert tag(theirs.decode_params)["tenant"] == "other"
    with pytest.raises(NotFound):
        await one.complete(first)


async def test_two_turns_at_once_share_no_lease(one: One):
    await pair(one)
    await one.turn("r1")
    answers = await asyncio.gather(one.route("r2"), one.route("r3"))
    assert Counter(reason(answer) for answer in answers) == {
        "OWNER_HOLDS": 1,
        "ALREADY_LEASED": 1,
    }


async def test_idle_workers_share_one_at_a_time_traffic(fake: One):
    await fake.register("p", **PREFILL)
    for i in range(4):
        await fake.register(f"d{i}")
    chosen: Counter[str] = Counter()
    for i in range(200):
        answer = await fake.turn(f"r{i}", f"s{i}")
        chosen[answer.decode.worker_id] += 1
        fake.plane.clock.advance(0.05)
    assert max(chosen.values()) <= 80
    for i in range(0, 200, 10):
        again = await fake.route(f"again{i}", f"s{i}")
        await fake.complete(again)
        assert again.decode.worker_id == fake.leases.held[again.session_id].owner


async def test_busy_workers_share_traffic_at_once(fake: One):
    await fake.register("p", **PREFILL)
    for i in range(4):
        await fake.register(f"d{i}")
    chosen: Counter[str] = Counter()

    async def client(number: int) -> None:
        for i in range(7):
            answer = await fake.turn(f"r{number}.{i}", f"s{number}.{i}")
            chosen[answer.decode.worker_id] += 1

    await asyncio.gather(*(client(number) for number in range(32)))
    assert max(chosen.values()) <= 0.4 * chosen.total()


async def test_turns_in_flight_count_until_they_are_complete(fake: One):
    await pair(fake)
    await fake.register("e")
    first = await fake.turn("r0")
    home = first.decode.worker_id
    waiting = [await fake.route(f"r{i}", f"s{i}", exclude_worker_ids=["e"]) for i in range(1, 10)]
    assert (await fake.route("r10")).decode.worker_id != home
    for answer in waiting:
        await fake.complete(answer)
        await fake.complete(answer)
    assert (await fake.route("r11")).decode.worker_id == home


async def test_completion_goes_to_the_registry_of_sessions(one: One):
    await pair(one)
    answer = await one.route("r1")
    await one.complete(answer, tokens_reused=5, prompt_tokens=9)
    (told,) = one.sessions.completed
    assert (told.decode_worker_id, told.tokens_reused, told.turn) == ("d", 5, 1)
