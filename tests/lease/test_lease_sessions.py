"""A session has one thing to read, and nothing once it has ended."""

import asyncio

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from lease.harness import Plane, Replica

END = pb.FreeSessionRequest(session_id="s1")
HELD, RELEASED = pb.OWNERSHIP_STATE_HELD, pb.OWNERSHIP_STATE_RELEASED


async def state(replica: Replica, own: pb.Ownership) -> int:
    return (await replica.owned(own)).state


@pytest.mark.parametrize("for_decode", [False, True])
async def test_what_is_reported_after_the_end_is_freed_at_once(replica: Replica, for_decode: bool):
    """A turn that was running when its session ended holds its blocks for nobody."""
    await replica.rpc.FreeSession(END)
    late = await replica.held("late", for_decode=for_decode)
    assert late.state == RELEASED
    assert await state(replica, late) == RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "late")]
    assert (await replica.grant("q1")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    again = await replica.held("late", for_decode=for_decode)
    assert again.state == RELEASED
    assert len(await replica.commands()) == 1


async def test_an_end_concerns_one_session_of_one_tenant(replica: Replica):
    await replica.rpc.FreeSession(END)
    elsewhere = await replica.held("r2", "s2")
    others = await replica.held("r3", "s1", tenant="other")
    assert await state(replica, elsewhere) == HELD
    assert await state(replica, others) == HELD
    assert await replica.commands() == []


async def test_what_is_given_back_unread_is_freed_when_a_later_turn_is_there(replica: Replica):
    old = await replica.held("r1", turn=1)
    lease = (await replica.grant("q1")).lease
    new = await replica.held("r2", turn=2)
    assert await state(replica, old) == pb.OWNERSHIP_STATE_LEASED
    await replica.release(lease, outcome=pb.READ_OUTCOME_UNUSED)
    assert await state(replica, old) == RELEASED
    assert await state(replica, new) == HELD
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_what_is_given_back_unread_is_held_when_it_is_the_latest(replica: Replica):
    await replica.held("r1", turn=1)
    own = await replica.held("r2", turn=2)
    await replica.held("p", turn=3, for_decode=True)
    lease = (await replica.grant("q1")).lease
    await replica.release(lease, outcome=pb.READ_OUTCOME_UNUSED)
    assert await state(replica, own) == HELD


@pytest.mark.parametrize("ending", ["expiry", "lost reader"])
async def test_an_unread_lease_that_ends_frees_what_is_outdated(
    plane: Plane, replica: Replica, ending: str
):
    old = await replica.held("r1", turn=1)
    await replica.grant("q1")
    await replica.held("r2", turn=2)
    if ending == "expiry":
        await plane.sleep(10.5)
        await replica.sweep()
    else:
        await replica.end_epoch("p1", 2)
    assert await state(replica, old) == RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_two_replicas_that_report_at_once_leave_one_held(real_postgres: Plane):
    one, other = real_postgres.replica(), real_postgres.replica()
    for number in range(20):
        name = f"s{number}"
        await asyncio.gather(
            one.held(f"a{number}", name, turn=1), other.held(f"b{number}", name, turn=2)
        )
    held = await one.execute("SELECT request_id FROM ownerships WHERE state = 1")
    assert {row[0][0] for row in held} == {"b"}
    assert len(held) == 20


async def test_a_report_and_the_end_at_once_leave_nothing(real_postgres: Plane):
    one, other = real_postgres.replica(), real_postgres.replica()
    for number in range(20):
        name = f"s{number}"
        await asyncio.gather(
            one.held(f"a{number}", name),
            other.rpc.FreeSession(pb.FreeSessionRequest(session_id=name)),
        )
    assert await one.execute("SELECT request_id FROM ownerships WHERE state <= 2") == []
    assert len(await one.commands()) == 20
