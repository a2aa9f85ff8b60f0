"""Worker epochs: what ends with them, and that old messages change nothing."""

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.errors import StaleEpoch
from lease.harness import Plane, Replica


async def test_what_a_worker_owned_is_lost_with_its_epoch(replica: Replica):
    held = await replica.held("r1", "s1")
    leased = await replica.held("r2", "s2")
    lease = await replica.reading("q1", session_id="s2")
    other = (await replica.report(replica.ownership("x", "s3", engine="e2"), worker="d2"))[0]

    answer = await replica.end_epoch("d1", 2)

    assert (answer.ownerships_lost, answer.leases_lost) == (2, 1)
    for own in (held, leased):
        assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_LOST
    assert (await replica.owned(other)).state == pb.OWNERSHIP_STATE_HELD
    (renewal,) = await replica.renew(lease)
    assert (renewal.renewed, renewal.state) == (False, pb.LEASE_STATE_LOST)
    assert (await replica.grant("q2")).refusal_reason == pb.REFUSAL_REASON_OWNER_LOST
    again = await replica.end_epoch("d1", 2)
    assert (again.ownerships_lost, again.leases_lost) == (0, 0)


async def test_an_unread_lease_of_a_dead_reader_can_be_granted_again(replica: Replica):
    own = await replica.held()
    lease = (await replica.grant("q1")).lease
    assert (await replica.end_epoch("p1", 2)).leases_lost == 1
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_LOST
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD
    assert (await replica.grant("q2", epoch=2)).lease.fencing_token == 2


async def test_a_read_of_a_reader_thought_dead_drains_until_its_deadline(
    plane: Plane, replica: Replica
):
    own = await replica.held()
    lease = await replica.reading()
    await replica.end_epoch("p1", 2)
    lost = await replica.lease(lease)
    assert (lost.state, lost.draining) == (pb.LEASE_STATE_LOST, True)
    assert await replica.commands() == []
    assert (await replica.grant("q2", worker="p2")).refusal_reason == (
        pb.REFUSAL_REASON_ALREADY_LEASED
    )
    await plane.sleep(10.5)
    await replica.sweep()
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_an_owner_thought_dead_is_told_once_its_reader_is_done(replica: Replica):
    """It is the same process, in a new epoch, and still has the blocks pinned."""
    await replica.held()
    lease = await replica.reading()
    await replica.end_epoch("d1", 2)
    assert await replica.commands() == []
    await replica.release(lease)
    orders = await replica.execute("SELECT epoch, request_id FROM lease_commands")
    assert orders == [(2, "r1")]


async def test_old_messages_change_nothing(replica: Replica):
    await replica.held()
    await replica.end_epoch("d1", 3)
    with pytest.raises(StaleEpoch):
        await replica.report(replica.ownership("late", "s9"), epoch=2)
    with pytest.raises(StaleEpoch):
        await replica.withdraw("r1", epoch=1)
    await replica.report(replica.ownership("r3", "s3"), epoch=3)
    with pytest.raises(StaleEpoch):
        await replica.grant("q1", worker="d1", epoch=2, session_id="s3")
    assert await replica.execute("SELECT * FROM ownerships WHERE session_id = 's9'") == []
    assert (await replica.end_epoch("d1", 2)).ownerships_lost == 0
    assert (await replica.grant("q2", session_id="s3")).HasField("lease")


@pytest.mark.parametrize("message", ["report", "withdraw", "grant"])
async def test_any_message_of_a_newer_epoch_ends_the_older(replica: Replica, message: str):
    own = await replica.held()
    if message == "report":
        await replica.report(replica.ownership("r2", "s2"), epoch=2)
    elif message == "withdraw":
        await replica.withdraw("unknown", epoch=2)
    else:
        await replica.grant("q1", worker="d1", epoch=2, session_id="other")
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_LOST


async def test_pins_of_a_lost_epoch_are_freed_when_reported_again(replica: Replica):
    await replica.held()
    await replica.end_epoch("d1", 2)
    assert await replica.commands() == []
    (again,) = await replica.report(replica.ownership("r1"), epoch=2)
    assert again.state == pb.OWNERSHIP_STATE_LOST
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_pins_of_a_lost_epoch_are_none_of_another_workers(replica: Replica):
    await replica.held()
    await replica.end_epoch("d1", 2)
    await replica.report(replica.ownership("r1"), worker="d2", epoch=2)
    assert await replica.commands("d1") == await replica.commands("d2") == []


async def test_a_lost_ownership_is_not_freed_under_a_running_read(plane: Plane, replica: Replica):
    await replica.held()
    await replica.reading()
    await replica.end_epoch("d1", 2)
    await replica.report(replica.ownership("r1"), epoch=2)
    assert await replica.commands() == []
    await plane.sleep(11)
    await replica.sweep()
    await replica.report(replica.ownership("r1"), epoch=2)
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_orders_to_an_ended_epoch_are_void(replica: Replica):
    await replica.held()
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))
    assert len(await replica.commands()) == 1
    await replica.end_epoch("d1", 2)
    assert await replica.commands() == []
