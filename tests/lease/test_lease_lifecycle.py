"""Grant, read, renew, release, revoke, over both databases."""

import asyncio

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import (
    IllegalTransition,
    InvalidField,
    NotFound,
    StaleEpoch,
    StaleFencingToken,
)
from kvplane.lease.metrics import UNKNOWN
from lease.harness import Plane, Replica, to_seconds

UNUSED, CONSUMED = pb.READ_OUTCOME_UNUSED, pb.READ_OUTCOME_CONSUMED
NEVER_BEGUN = pb.READ_OUTCOME_NEVER_BEGUN


async def test_a_grant_by_each_kind_of_target(replica: Replica):
    own = await replica.held("r1")
    first = await replica.grant("q1", ownership_id=own.ownership_id)
    assert (first.lease.state, first.lease.fencing_token) == (pb.LEASE_STATE_GRANTED, 1)
    assert first.lease.holder.worker_id == "p1"
    assert first.ownership.params == replica.ownership("r1").params
    assert first.ownership.digests == b""
    await replica.release(first.lease, outcome=UNUSED)

    by_session = await replica.grant("q2", session_id="s1")
    assert by_session.lease.ownership_id == own.ownership_id
    await replica.release(by_session.lease, outcome=UNUSED)

    handle = pb.OwnedHandle(engine_id="engine-d1", request_id="r1")
    by_handle = await replica.grant("q3", handle=handle, worker="p2")
    assert (by_handle.lease.ownership_id, by_handle.lease.fencing_token) == (own.ownership_id, 3)
    assert (await replica.owned(own)).lease_id == by_handle.lease.lease_id


async def test_a_grant_can_begin_the_read(replica: Replica):
    await replica.held()
    request = pb.GrantLeaseRequest(
        request_id="q1",
        holder=pb.Holder(worker_id="d9", epoch=1, compatibility='{"model":"m"}'),
        handle=pb.OwnedHandle(engine_id="engine-d1", request_id="r1"),
        begin_read=True,
    )
    answer = await replica.rpc.GrantLease(request)
    assert answer.lease.state == pb.LEASE_STATE_READING
    assert answer.ownership.digests == replica.ownership("r1").digests
    again = await replica.rpc.GrantLease(request)
    assert again.lease.lease_id == answer.lease.lease_id
    assert again.ownership.digests == answer.ownership.digests


async def test_a_session_gets_its_newest_ownership_but_not_one_for_a_decode(replica: Replica):
    await replica.held("r1", turn=1)
    newest = await replica.held("r2", turn=2)
    await replica.held("p3", turn=3, for_decode=True)
    assert (await replica.grant("q1")).lease.ownership_id == newest.ownership_id


async def test_refusals(plane: Plane, replica: Replica):
    async def refusal(request_id: str, **fields) -> int:
        answer = await replica.grant(request_id, **fields)
        assert not answer.HasField("lease")
        assert not answer.HasField("ownership")
        return answer.refusal_reason

    assert await refusal("q1") == pb.REFUSAL_REASON_NOT_HELD
    own = await replica.held(tokens=40)
    assert await refusal("q2", compatibility="other") == pb.REFUSAL_REASON_INCOMPATIBLE
    request = pb.GrantLeaseRequest(
        request_id="q3",
        holder=pb.Holder(worker_id="p1", epoch=1, compatibility='{"model":"m"}'),
        session_id="s1",
        min_tokens=41,
    )
    answer = await replica.rpc.GrantLease(request)
    assert answer.refusal_reason == pb.REFUSAL_REASON_BELOW_THRESHOLD
    assert (await replica.grant("q4")).HasField("lease")
    assert await refusal("q5") == pb.REFUSAL_REASON_ALREADY_LEASED
    await replica.end_epoch("d1", 2)
    assert await refusal("q6") == pb.REFUSAL_REASON_OWNER_LOST
    by_id = await refusal("q7", ownership_id=own.ownership_id)
    assert by_id == pb.REFUSAL_REASON_OWNER_LOST


async def test_l01_a_hold_that_ends_soon_is_declined(plane: Plane):
    """L-01: granted within the hold, then "expiring", then gone."""
    replica = plane.replica(margin_s=1)
    await replica.held("r1", "s1", hold=8)
    await replica.held("r2", "s2", hold=8)
    await plane.sleep(4)
    granted = await replica.grant("q1", ttl=60)
    assert granted.lease.state == pb.LEASE_STATE_GRANTED
    assert to_seconds(granted.lease.ttl) <= 3 * plane.unit
    await plane.sleep(3)
    late = await replica.grant("q2", session_id="s2")
    assert late.refusal_reason == pb.REFUSAL_REASON_EXPIRING
    await plane.sleep(2)
    gone = await replica.grant("q3", session_id="s2")
    assert gone.refusal_reason == pb.REFUSAL_REASON_NOT_HELD


async def test_the_same_request_gets_the_first_answer(replica: Replica):
    refused = await replica.grant("q0")
    assert refused.refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    await replica.held()
    assert (await replica.grant("q0")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    first = await replica.grant("q1")
    second = await replica.grant("q1")
    assert second.lease.lease_id == first.lease.lease_id
    assert second.lease.fencing_token == first.lease.fencing_token == 1
    assert second.ownership.params == first.ownership.params
    assert to_seconds(second.lease.ttl) <= to_seconds(first.lease.ttl)

    await replica.release(first.lease)

    third = await replica.grant("q1")
    assert (third.lease.lease_id, third.lease.state) == (
        first.lease.lease_id, pb.LEASE_STATE_CONSUMED,
    )  # fmt: skip
    assert not third.HasField("ownership")
    assert to_seconds(third.lease.ttl) == 0


async def test_the_same_key_for_another_question_is_a_mistake(replica: Replica):
    await replica.held()
    await replica.grant("q1")
    for other in ({"worker": "p2"}, {"session_id": "s2"}, {"epoch": 2}):
        with pytest.raises(InvalidField, match="request_id"):
            await replica.grant("q1", **other)
    set_caller(Caller("other"))  # keys are a tenant's own
    assert (await replica.grant("q1")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD


async def test_another_tenants_session_or_ownership_is_not_held(replica: Replica):
    own = await replica.held(tenant="other")
    for number, target in enumerate(({"session_id": "s1"}, {"ownership_id": own.ownership_id})):
        answer = await replica.grant(f"q{number}", **target)
        assert answer.refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD


async def test_many_askers_get_one_lease(replica: Replica):
    await replica.held()
    answers = await asyncio.gather(*(replica.grant(f"q{n}", worker=f"p{n}") for n in range(20)))
    assert sum(answer.HasField("lease") for answer in answers) == 1


async def test_beginning_a_read(plane: Plane, replica: Replica):
    await replica.held()
    lease = (await replica.grant("q1")).lease
    begun = await replica.begin(lease)
    again = await replica.begin(lease)
    assert begun.lease.state == again.lease.state == pb.LEASE_STATE_READING
    assert again.ownership.digests == replica.ownership("r1").digests
    assert again.ownership.params == replica.ownership("r1").params

    with pytest.raises(NotFound):
        await replica.begin(lease, worker="p2")
    with pytest.raises(StaleEpoch):
        await replica.begin(lease, epoch=2)
    with pytest.raises(StaleFencingToken):
        await replica.begin(lease, token=7)
    with pytest.raises(InvalidField, match=r"holder\.compatibility"):
        await replica.begin(lease, compatibility="other")
    with pytest.raises(NotFound):
        await replica.begin(pb.Lease(lease_id="lease-no", fencing_token=1))
    await replica.release(lease)
    with pytest.raises(IllegalTransition) as ended:
        await replica.begin(lease)
    assert ended.value.metadata["state"] == "CONSUMED"


async def test_a_read_cannot_begin_after_the_deadline(plane: Plane, replica: Replica):
    await replica.held()
    lease = (await replica.grant("q1", ttl=1)).lease
    await plane.sleep(1.2)
    with pytest.raises(IllegalTransition) as ended:
        await replica.begin(lease)
    assert ended.value.metadata["state"] == "EXPIRED"


async def test_renewal_extends_and_never_shortens(plane: Plane, replica: Replica):
    await replica.held()
    lease = (await replica.grant("q1", ttl=40)).lease
    (longer,) = await replica.renew(lease, ttl=60)
    (shorter,) = await replica.renew(lease, ttl=1)
    assert longer.renewed
    assert shorter.renewed
    assert shorter.state == pb.LEASE_STATE_GRANTED
    assert to_seconds(longer.ttl) > 50 * plane.unit
    assert to_seconds(shorter.ttl) > 45 * plane.unit


async def test_ttls_are_clamped(plane: Plane, replica: Replica):
    await replica.held("r1", "s1")
    await replica.held("r2", "s2")
    await replica.held("r3", "s3")
    huge = (await replica.grant("q1", ttl=3600)).lease
    tiny = (await replica.grant("q2", session_id="s2", ttl=0.001)).lease
    default = (await replica.grant("q3", session_id="s3")).lease
    unit = plane.unit
    assert 60 * unit == pytest.approx(to_seconds(huge.ttl))
    assert 1 * unit == pytest.approx(to_seconds(tiny.ttl))
    assert 10 * unit == pytest.approx(to_seconds(default.ttl))


async def test_renewal_never_passes_the_hold(plane: Plane, replica: Replica):
    await replica.held(hold=30)
    lease = (await replica.grant("q1")).lease
    (renewed,) = await replica.renew(lease, ttl=60)
    assert 20 * plane.unit < to_seconds(renewed.ttl) <= 28 * plane.unit
    await replica.report(replica.ownership("r1", hold=45))
    (renewed,) = await replica.renew(lease, ttl=60)
    assert 30 * plane.unit < to_seconds(renewed.ttl) <= 43 * plane.unit


async def test_renewal_never_revives(plane: Plane, replica: Replica):
    await replica.held()
    lease = (await replica.grant("q1", ttl=1)).lease
    await plane.sleep(1.2)
    for _ in range(2):
        (answer,) = await replica.renew(lease)
        assert (answer.renewed, answer.state) == (False, pb.LEASE_STATE_EXPIRED)
        await replica.sweep()
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_EXPIRED


async def test_l03_each_renewal_has_its_own_answer(replica: Replica):
    """L-03: an unknown id is answered and counted, never dropped."""
    await replica.held("r1", "s1")
    await replica.held("r2", "s2")
    one = (await replica.grant("q1")).lease
    two = (await replica.grant("q2", session_id="s2")).lease
    unknown = pb.Lease(lease_id="chatcmpl-client-request", fencing_token=1)
    before = UNKNOWN._value.get()

    answers = await replica.renew(one, unknown, two, one)

    assert [a.lease_id for a in answers] == [
        one.lease_id, unknown.lease_id, two.lease_id, one.lease_id,
    ]  # fmt: skip
    assert [a.renewed for a in answers] == [True, False, True, True]
    assert answers[1].state == pb.LEASE_STATE_UNSPECIFIED
    assert to_seconds(answers[0].ttl) > 0
    assert UNKNOWN._value.get() == before + 1


@pytest.mark.parametrize("wrong", ["worker", "epoch", "token"])
async def test_others_neither_renew_nor_release(replica: Replica, wrong: str):
    await replica.held()
    lease = (await replica.grant("q1")).lease
    seen = pb.Lease(lease_id=lease.lease_id, fencing_token=1 + (wrong == "token"))
    who = {"worker": {"worker": "p2"}, "epoch": {"epoch": 2}, "token": {}}[wrong]
    (renewal,) = await replica.renew(seen, **who)
    assert (renewal.renewed, renewal.state) == (False, pb.LEASE_STATE_UNSPECIFIED)
    assert await replica.release(seen, **who) == [pb.LEASE_STATE_UNSPECIFIED]
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_GRANTED


async def test_a_read_uses_an_ownership_up(replica: Replica):
    own = await replica.held()
    lease = await replica.reading()
    assert await replica.release(lease, lease) == [pb.LEASE_STATE_CONSUMED] * 2
    assert await replica.release(lease, outcome=UNUSED) == [pb.LEASE_STATE_CONSUMED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_CONSUMED
    assert (await replica.grant("q2")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert await replica.commands() == []


async def test_an_unused_lease_can_be_granted_again(replica: Replica):
    own = await replica.held()
    lease = await replica.reading()
    assert await replica.release(lease, outcome=UNUSED) == [pb.LEASE_STATE_RELEASED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD
    second = (await replica.grant("q2", worker="p2")).lease
    assert second.fencing_token > lease.fencing_token
    assert await replica.release(lease) == [pb.LEASE_STATE_RELEASED]  # of the first: too late
    assert (await replica.lease(second)).state == pb.LEASE_STATE_GRANTED


async def test_what_was_never_begun_is_held_again(replica: Replica):
    own = await replica.held()
    lease = (await replica.grant("q1")).lease
    for _ in range(2):
        assert await replica.release(lease, outcome=NEVER_BEGUN) == [pb.LEASE_STATE_RELEASED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD


@pytest.mark.parametrize("revoked", [False, True])
async def test_a_read_that_has_begun_is_not_given_back_by_others(replica: Replica, revoked: bool):
    own = await replica.held()
    lease = await replica.reading()
    if revoked:
        await replica.rpc.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
    state = pb.LEASE_STATE_REVOKED if revoked else pb.LEASE_STATE_READING
    assert await replica.release(lease, outcome=NEVER_BEGUN) == [state]
    assert (await replica.lease(lease)).draining == revoked
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_LEASED
    assert await replica.commands() == []


async def test_a_late_word_that_it_was_read_is_believed(plane: Plane, replica: Replica):
    own = await replica.held()
    lease = (await replica.grant("q1", ttl=1)).lease
    await plane.sleep(1.2)
    await replica.sweep()
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD
    assert await replica.release(lease) == [pb.LEASE_STATE_EXPIRED]
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_CONSUMED


async def test_revoking_what_was_not_begun(replica: Replica):
    own = await replica.held()
    lease = (await replica.grant("q1")).lease
    for _ in range(2):
        revoked = await replica.rpc.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
        assert (revoked.lease.state, revoked.lease.draining) == (pb.LEASE_STATE_REVOKED, False)
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]
    (renewal,) = await replica.renew(lease)
    assert (renewal.renewed, renewal.state) == (False, pb.LEASE_STATE_REVOKED)


@pytest.mark.parametrize("outcome", [CONSUMED, UNUSED])
async def test_a_revoked_read_drains_until_its_release(replica: Replica, outcome: int):
    own = await replica.held()
    lease = await replica.reading()
    revoked = await replica.rpc.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
    assert (revoked.lease.state, revoked.lease.draining) == (pb.LEASE_STATE_REVOKED, True)
    (renewal,) = await replica.renew(lease)
    assert (renewal.renewed, renewal.state, renewal.draining) == (
        False, pb.LEASE_STATE_REVOKED, True,
    )  # fmt: skip
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_LEASED
    assert await replica.commands() == []
    assert (await replica.grant("q2")).refusal_reason == pb.REFUSAL_REASON_ALREADY_LEASED

    assert await replica.release(lease, outcome=outcome) == [pb.LEASE_STATE_REVOKED]

    assert not (await replica.lease(lease)).draining
    ended = pb.OWNERSHIP_STATE_CONSUMED if outcome == CONSUMED else pb.OWNERSHIP_STATE_RELEASED
    assert (await replica.owned(own)).state == ended
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]


async def test_a_revoked_read_drains_no_longer_than_its_lease(plane: Plane, replica: Replica):
    own = await replica.held()
    lease = await replica.reading(ttl=10)
    await replica.rpc.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
    await replica.sweep()
    assert await replica.commands() == []
    await plane.sleep(10.5)
    await replica.sweep()
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]
    ended = await replica.lease(lease)
    assert (ended.state, ended.draining) == (pb.LEASE_STATE_REVOKED, False)


async def test_what_has_ended_cannot_be_revoked(replica: Replica):
    await replica.held()
    lease = await replica.reading()
    await replica.release(lease)
    with pytest.raises(IllegalTransition):
        await replica.rpc.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))


async def test_another_tenants_lease_is_unknown(replica: Replica):
    await replica.held()
    lease = (await replica.grant("q1")).lease
    set_caller(Caller("other"))
    for call, request in (
        (replica.rpc.RevokeLease, pb.RevokeLeaseRequest),
        (replica.rpc.GetLease, pb.GetLeaseRequest),
    ):
        with pytest.raises(NotFound) as foreign:
            await call(request(lease_id=lease.lease_id))
        with pytest.raises(NotFound) as unknown:
            await call(request(lease_id="lease-no"))
        assert foreign.value.message.replace(lease.lease_id, "lease-no") == unknown.value.message
    assert not (await replica.rpc.ListLeases(pb.ListLeasesRequest())).leases
    set_caller(Caller())
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_GRANTED


async def test_leases_are_listed_by_page_and_filter(replica: Replica):
    for number in range(5):
        await replica.held(f"r{number}", f"s{number}")
        await replica.grant(f"q{number}", session_id=f"s{number}", worker=f"p{number % 2}")
    seen: list[str] = []
    token = ""
    while True:
        page = await replica.rpc.ListLeases(pb.ListLeasesRequest(page_size=2, page_token=token))
        seen += [lease.lease_id for lease in page.leases]
        token = page.next_page_token
        if not token:
            break
    assert len(seen) == len(set(seen)) == 5

    async def count(**filters) -> int:
        return len((await replica.rpc.ListLeases(pb.ListLeasesRequest(**filters))).leases)

    assert await count(session_id="s1") == 1
    assert await count(worker_id="p0") == 3
    assert await count(states=[pb.LEASE_STATE_READING]) == 0
    assert await count(states=[pb.LEASE_STATE_READING, pb.LEASE_STATE_GRANTED]) == 5


async def test_a_handle_that_nobody_has_reported_yet_is_refused_again(replica):
    handle = pb.OwnedHandle(engine_id="engine-d1", request_id="r1")
    first = await replica.grant("q1", handle=handle)
    own = await replica.held()

    again = await replica.grant("q1", handle=handle)

    assert first.refusal_reason == again.refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert not again.HasField("lease")
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD
