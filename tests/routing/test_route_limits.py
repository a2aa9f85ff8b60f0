"""Tenants' limits on the way through Route."""

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel.errors import InvalidField, QuotaExceeded
from routing.harness import RECOMPUTE, One, pair, reason, tag


async def test_begin_turn_is_told_what_the_request_costs(fake: One):
    await pair(fake)
    await fake.route("r1", prompt_tokens_estimate=12, request_bytes=345)
    (begun,) = fake.sessions.begun
    assert (begun.prompt_tokens_estimate, begun.request_bytes) == (12, 345)
    with pytest.raises(InvalidField, match="request_bytes"):
        await fake.route("r2", request_bytes=-1)


async def test_a_hard_limit_passes_through_as_it_is(fake: One):
    await pair(fake)
    told = QuotaExceeded("enough", metadata={"quota": "tokens_per_second"}, retry_after=3.5)
    fake.sessions.error = told
    with pytest.raises(QuotaExceeded) as caught:
        await fake.route("r1")
    assert caught.value.metadata == {"quota": "tokens_per_second"}
    assert caught.value.retry_after == 3.5
    # Nothing was kept of it: the next try is one.
    fake.sessions.error = None
    assert (await fake.route("r1")).turn == 1


async def test_beyond_a_soft_limit_nothing_is_leased_and_nothing_will_be_held(fake: One):
    await pair(fake)
    first = await fake.turn("r1")
    fake.sessions.over_quota = "sessions"
    over = await fake.route("r2")
    assert (over.decision, reason(over)) == (RECOMPUTE, "OVER_QUOTA")
    assert (over.session_id, over.turn, over.HasField("lease")) == ("", 0, False)
    assert over.prefill.worker_id
    assert over.decode.worker_id
    # Workers hold a conversation's blocks only for a session that has a name.
    for params in (over.prefill_params, over.decode_params):
        assert tag(params) == {"tenant": "default", "session": "", "turn": 0}
    assert fake.leases.grants == []
    fake.sessions.over_quota = ""
    assert (await fake.turn("r3")).session_id == first.session_id


async def test_a_turn_without_a_session_is_completed_by_its_request(fake: One):
    await pair(fake)
    fake.sessions.over_quota = "sessions"
    for request_id in ("r1", "r2"):
        await fake.route(request_id)
    turn = session_pb2.CompleteTurnRequest(
        request_id="r1", outcome=session_pb2.TURN_OUTCOME_OK, prompt_tokens=10
    )
    await fake.part.routing_servicer.Complete(pb.CompleteRequest(turn=turn))
    assert fake.sessions.completed == [turn]
    turn.session_id, turn.turn = "s", 1
    with pytest.raises(InvalidField, match="request_id"):
        await fake.part.routing_servicer.Complete(pb.CompleteRequest(turn=turn))


async def test_each_turn_without_a_session_counts_as_load(fake: One):
    await fake.register("d1")
    await fake.register("d2")
    fake.sessions.over_quota = "sessions"
    went = [(await fake.route(f"r{i}")).decode.worker_id for i in range(4)]
    assert sorted(went) == ["d1", "d1", "d2", "d2"]
    loads = fake.part.routing_servicer._router._in_flight.loads
    assert sorted(loads.values()) == [2, 2]
    turn = session_pb2.CompleteTurnRequest(
        request_id="r0", outcome=session_pb2.TURN_OUTCOME_OK, prompt_tokens=10
    )
    await fake.part.routing_servicer.Complete(pb.CompleteRequest(turn=turn))
    assert sorted(loads.values()) == [1, 2]


async def test_the_lease_services_refusal_is_a_reason(fake: One):
    await pair(fake)
    first = await fake.turn("r1")
    fake.leases.refuse(first.session_id, lease_pb2.REFUSAL_REASON_OVER_QUOTA)
    again = await fake.route("r2")
    assert (again.decision, reason(again)) == (RECOMPUTE, "OVER_QUOTA")
    assert (again.session_id, again.turn) == (first.session_id, 2)
