"""Reports, withdrawals, holds and superseding, over both databases."""

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import InvalidField, NotFound
from lease.harness import Plane, Replica, seconds, to_seconds


async def test_a_report_is_stored_whole(replica: Replica):
    sent = replica.ownership("r1", turn=3)
    sent.params.extra_json = '{"k":1}'
    (stored,) = await replica.report(sent)

    found = await replica.owned(stored)

    assert found.state == pb.OWNERSHIP_STATE_HELD
    assert (found.worker_id, found.epoch, found.turn) == ("d1", 1, 3)
    assert found.params == sent.params
    assert found.digests == sent.digests
    assert not found.lease_id
    assert 0 < to_seconds(found.hold) <= 480 * replica.plane.unit


async def test_a_second_report_only_moves_the_hold_later(replica: Replica):
    first = await replica.held(hold=100)
    (second,) = await replica.report(replica.ownership("r1", turn=9, tokens=80, hold=200))
    (third,) = await replica.report(replica.ownership("r1", hold=50))

    found = await replica.owned(first)

    assert second.ownership_id == first.ownership_id
    assert (found.turn, found.num_tokens) == (1, 40)
    unit = replica.plane.unit
    assert 150 * unit < to_seconds(found.hold) <= 200 * unit
    assert to_seconds(third.hold) > 150 * unit


async def test_the_last_of_equal_items_counts(replica: Replica):
    reported = await replica.report(
        replica.ownership("r1", hold=100), replica.ownership("r1", hold=300)
    )
    assert [own.state for own in reported] == [pb.OWNERSHIP_STATE_HELD] * 2
    assert to_seconds((await replica.owned(reported[0])).hold) > 200 * replica.plane.unit


async def test_a_report_of_an_ended_ownership_changes_nothing(replica: Replica):
    own = await replica.held()
    await replica.withdraw("r1")
    (again,) = await replica.report(replica.ownership("r1"))
    assert again.state == pb.OWNERSHIP_STATE_EXPIRED
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_EXPIRED


async def test_a_late_report_does_not_revive_what_was_withdrawn_before_it(replica: Replica):
    assert await replica.withdraw("r1") == [pb.OWNERSHIP_STATE_UNSPECIFIED]
    (late,) = await replica.report(replica.ownership("r1"))
    assert late.state == pb.OWNERSHIP_STATE_EXPIRED
    assert (await replica.grant("q1")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD


async def test_a_hold_counts_from_when_the_report_was_sent(plane: Plane, replica: Replica):
    anchor = await replica.anchor("d1")
    await plane.sleep(6)
    (own,) = await replica.report(replica.ownership("r1", hold=100), anchor=anchor, elapsed=2)
    # Sent 2 after the anchor, which is 6 old at least.
    assert to_seconds(own.hold) <= 96 * plane.unit + 1e-6


async def test_an_anchor_of_the_future_counts_as_now(replica: Replica):
    anchor = await replica.anchor("d1")
    ahead = anchor + 10_000_000_000
    (own,) = await replica.report(replica.ownership("r1", hold=100), anchor=ahead)
    assert to_seconds(own.hold) <= 100 * replica.plane.unit


async def test_a_hold_that_was_over_on_arrival_is_expired(plane: Plane, replica: Replica):
    anchor = await replica.anchor("d1")
    await plane.sleep(3)
    (own,) = await replica.report(replica.ownership("r1", hold=2), anchor=anchor)
    assert own.state == pb.OWNERSHIP_STATE_EXPIRED


async def test_a_report_without_an_anchor_is_refused(replica: Replica):
    request = pb.ReportOwnershipRequest(
        worker_id="d1", epoch=1, ownerships=[replica.ownership("r1")]
    )
    with pytest.raises(InvalidField, match=r"time_anchor\.anchor"):
        await replica.rpc.ReportOwnership(request)
    assert await replica.execute("SELECT * FROM ownerships") == []


async def test_an_unknown_hold_lets_nobody_read_unless_policy_says(plane: Plane):
    strict, trusting = plane.replica(), plane.replica(unknown_hold_s=60)
    (own,) = await strict.report(strict.ownership("r1", hold=None))
    assert own.state == pb.OWNERSHIP_STATE_EXPIRED
    assert (await strict.grant("q1")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    (own,) = await trusting.report(trusting.ownership("r2", hold=None))
    assert own.state == pb.OWNERSHIP_STATE_HELD


async def test_blocks_of_another_tenant_or_worker_cannot_be_reported_over(replica: Replica):
    own = await replica.held()
    with pytest.raises(InvalidField, match="tenant_id"):
        await replica.report(replica.ownership("r1", tenant="other"))
    with pytest.raises(InvalidField, match="worker_id"):
        await replica.report(replica.ownership("r1"), worker="d2")
    assert (await replica.owned(own)).tenant_id == "default"


async def test_a_newer_turn_frees_the_older_ones(replica: Replica):
    old = await replica.held("r1", turn=1)
    other_session = await replica.held("x1", "s2", turn=1)
    for_decode = await replica.held("p1", turn=1, for_decode=True)
    new = await replica.held("r2", turn=2)

    states = [(await replica.owned(own)).state for own in (old, new, other_session, for_decode)]

    assert states == [
        pb.OWNERSHIP_STATE_RELEASED, pb.OWNERSHIP_STATE_HELD, pb.OWNERSHIP_STATE_HELD,
        pb.OWNERSHIP_STATE_HELD,
    ]  # fmt: skip
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_a_late_report_of_an_older_turn_is_freed_at_once(replica: Replica):
    await replica.held("r2", turn=2)
    late = await replica.held("r1", turn=1)
    assert late.state == pb.OWNERSHIP_STATE_RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_a_newer_turn_leaves_a_running_read_alone(replica: Replica):
    old = await replica.held("r1", turn=1)
    await replica.reading()
    await replica.held("r2", turn=2)
    assert (await replica.owned(old)).state == pb.OWNERSHIP_STATE_LEASED
    assert await replica.commands() == []


@pytest.mark.parametrize("begun", [True, False])
async def test_withdrawing_what_is_leased(replica: Replica, begun: bool):
    await replica.held()
    lease = await replica.reading() if begun else (await replica.grant("q1")).lease
    states = await replica.withdraw("r1", "r1", "unknown")
    ended = await replica.lease(lease)
    if begun:
        assert states[:2] == [pb.OWNERSHIP_STATE_CONSUMED] * 2
        assert ended.state == pb.LEASE_STATE_CONSUMED
    else:
        assert states[:2] == [pb.OWNERSHIP_STATE_EXPIRED] * 2
        assert ended.state == pb.LEASE_STATE_REVOKED
    assert states[2] == pb.OWNERSHIP_STATE_UNSPECIFIED
    assert [r.renewed for r in await replica.renew(lease)] == [False]


async def test_withdrawing_what_we_asked_to_free(replica: Replica):
    own = await replica.held()
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))
    assert await replica.withdraw("r1") == [pb.OWNERSHIP_STATE_RELEASED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert await replica.commands() == []


async def test_another_worker_cannot_withdraw(replica: Replica):
    own = await replica.held()
    assert await replica.withdraw("r1", worker="d2") == [pb.OWNERSHIP_STATE_UNSPECIFIED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD


async def test_freeing_a_session(replica: Replica):
    held = await replica.held("r1")
    granted_own = await replica.held("r2", turn=1)
    granted = (await replica.grant("q1", ownership_id=granted_own.ownership_id)).lease
    read_own = await replica.held("p1", for_decode=True)
    reading = await replica.reading("q2", ownership_id=read_own.ownership_id)
    elsewhere = await replica.held("x1", "s2")

    freed = await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))

    assert (freed.freed, freed.draining) == (2, 1)
    assert (await replica.owned(held)).state == pb.OWNERSHIP_STATE_RELEASED
    assert (await replica.lease(granted)).state == pb.LEASE_STATE_REVOKED
    draining = await replica.lease(reading)
    assert (draining.state, draining.draining) == (pb.LEASE_STATE_REVOKED, True)
    assert (await replica.owned(elsewhere)).state == pb.OWNERSHIP_STATE_HELD
    assert sorted(r for _, r, _ in await replica.commands()) == ["r1", "r2"]

    await replica.release(reading)

    assert sorted(r for _, r, _ in await replica.commands()) == ["p1", "r1", "r2"]
    again = await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))
    assert (again.freed, again.draining) == (0, 0)


async def test_a_hold_moves_only_when_the_owner_agrees(plane: Plane, replica: Replica):
    own = await replica.held(hold=50)
    ask = pb.ExtendHoldRequest(session_id="s1", hold=seconds(300 * plane.unit))
    assert (await replica.rpc.ExtendHold(ask)).asked == 1
    assert (await replica.rpc.ExtendHold(ask)).asked == 1
    assert to_seconds((await replica.owned(own)).hold) <= 50 * plane.unit
    ((order, request, command_id),) = await replica.commands()  # the second replaced the first
    assert (order, request) == ("hold", "r1")

    anchor = await replica.anchor("d1")
    await replica.part.service.acknowledge(
        "d1", 1, command_id, done=True, sent_by_us=anchor, hold_us=round(300e6 * plane.unit)
    )

    left = to_seconds((await replica.owned(own)).hold)
    assert 200 * plane.unit < left <= 300 * plane.unit
    assert await replica.commands() == []
    assert (await replica.rpc.ExtendHold(pb.ExtendHoldRequest(
        session_id="s1", hold=seconds(100 * plane.unit)))).asked == 0  # fmt: skip


async def test_an_acknowledged_hold_never_shortens(plane: Plane, replica: Replica):
    own = await replica.held(hold=100)
    ask = pb.ExtendHoldRequest(session_id="s1", hold=seconds(200 * plane.unit))
    await replica.rpc.ExtendHold(ask)
    ((_, _, command_id),) = await replica.commands()
    anchor = await replica.anchor("d1")
    await replica.part.service.acknowledge(
        "d1", 1, command_id, done=True, sent_by_us=anchor, hold_us=1000
    )
    assert to_seconds((await replica.owned(own)).hold) > 50 * plane.unit


async def test_an_owner_that_cannot_hold_longer_holds_nothing(replica: Replica):
    own = await replica.held(hold=100)
    ask = pb.ExtendHoldRequest(session_id="s1", hold=seconds(200))
    await replica.rpc.ExtendHold(ask)
    ((_, _, command_id),) = await replica.commands()
    await replica.part.service.acknowledge("d1", 1, command_id, done=False, sent_by_us=0, hold_us=0)
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_EXPIRED


async def test_ownerships_are_listed_by_page_and_filter(replica: Replica):
    for number in range(7):
        await replica.held(f"r{number}", f"s{number % 2}", turn=number + 1, for_decode=True)
        await replica.plane.sleep(0.01)
    await replica.held("foreign", tenant="other")
    seen: list[str] = []
    token = ""
    while True:
        page = await replica.rpc.ListOwnerships(
            pb.ListOwnershipsRequest(page_size=3, page_token=token)
        )
        assert len(page.ownerships) <= 3
        assert all(not own.digests for own in page.ownerships)
        seen += [own.ownership_id for own in page.ownerships]
        token = page.next_page_token
        if not token:
            break
    assert len(seen) == len(set(seen)) == 7

    async def count(**filters) -> int:
        request = pb.ListOwnershipsRequest(**filters)
        return len((await replica.rpc.ListOwnerships(request)).ownerships)

    assert await count(session_id="s1") == 3
    assert await count(worker_id="d1") == 7
    assert await count(worker_id="d2") == 0
    assert await count(states=[pb.OWNERSHIP_STATE_LOST]) == 0
    assert await count(states=[pb.OWNERSHIP_STATE_LOST, pb.OWNERSHIP_STATE_HELD]) == 7


async def test_another_tenants_ownership_is_unknown(replica: Replica):
    own = await replica.held(tenant="other", session="s1")
    request = pb.GetOwnershipRequest(ownership_id=own.ownership_id)
    with pytest.raises(NotFound) as foreign:
        await replica.rpc.GetOwnership(request)
    with pytest.raises(NotFound) as unknown:
        await replica.rpc.GetOwnership(pb.GetOwnershipRequest(ownership_id="own-no"))
    shown = foreign.value.message.replace(own.ownership_id, "own-no")
    assert shown == unknown.value.message
    assert (await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))).freed == 0
    ask = pb.ExtendHoldRequest(session_id="s1", hold=seconds(900))
    assert (await replica.rpc.ExtendHold(ask)).asked == 0
    set_caller(Caller("other"))
    assert (await replica.rpc.GetOwnership(request)).ownership.state == pb.OWNERSHIP_STATE_HELD
