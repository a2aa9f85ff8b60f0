"""Two instances on one PostgreSQL, in real time; and waiting for a report."""

import asyncio
import contextlib
import random

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.errors import InvalidField, StaleEpoch
from lease.harness import Plane, Replica, SkewedClock, to_seconds


@pytest.fixture
def two(real_postgres: Plane) -> tuple[Replica, Replica]:
    return real_postgres.replica(), real_postgres.replica()


@pytest.mark.parametrize("skew", [5.0, -5.0])
async def test_l12_the_databases_clock_decides(real_postgres: Plane, skew: float):
    """L-12: a replica whose clock is wrong ends a lease neither early nor late."""
    plane = real_postgres
    right = plane.replica()
    wrong = plane.replica(SkewedClock(skew))
    own = await right.held(hold=600)
    lease = (await right.grant("q1", ttl=30)).lease  # 3 s
    granted_at = plane.clock.monotonic()

    assert await wrong.sweep() == (0, 0)
    refused = await wrong.grant("q2", worker="p2")
    assert refused.refusal_reason == pb.REFUSAL_REASON_ALREADY_LEASED
    (renewal,) = await wrong.renew(lease, ttl=1)
    assert renewal.renewed
    assert to_seconds(renewal.ttl) <= 3.0

    while not (swept := await wrong.sweep())[0]:
        await asyncio.sleep(0.05)
        assert plane.clock.monotonic() - granted_at < 10
    assert swept == (1, 0)
    assert plane.clock.monotonic() - granted_at >= 2.8
    assert (await right.owned(own)).state == pb.OWNERSHIP_STATE_HELD
    assert (await right.grant("q3", worker="p2")).HasField("lease")


async def test_s02_replicas_that_touch_the_same_rows_do_not_deadlock(real_postgres: Plane):
    """S-02: 200 rows, one replica ascending, one descending, at the same moment."""
    plane = real_postgres
    up, down = plane.replica(max_ttl_s=600), plane.replica(max_ttl_s=600)
    await up.report(*(up.ownership(f"r{n}", f"s{n}", hold=6000) for n in range(200)))
    leases = [(await up.grant(f"q{n}", session_id=f"s{n}", ttl=600)).lease for n in range(200)]
    for round_number in range(50):
        ttl = 600 + round_number / 100
        answers = await asyncio.gather(
            up.renew(*leases, leases[0], ttl=ttl),
            down.renew(*reversed(leases), leases[0], ttl=ttl),
            up.report(*(up.ownership(f"r{n}", f"s{n}", hold=6000) for n in range(0, 200, 9))),
            down.report(*(up.ownership(f"r{n}", f"s{n}", hold=6000) for n in range(198, -1, -9))),
            up.sweep(),
            down.sweep(),
        )
        assert all(answer.renewed for answer in answers[0] + answers[1])
    deadlines = await up.execute("SELECT count(DISTINCT deadline_us), count(*) FROM leases")
    assert deadlines == [(1, 200)]
    # Not even ones that were tried again.
    count = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await up.execute(count) == [(0,)]


async def test_two_replicas_grant_one_lease(two: tuple[Replica, Replica]):
    for turn in range(1, 6):
        await two[0].held(f"r{turn}", turn=turn)
        answers = await asyncio.gather(
            *(two[n % 2].grant(f"q{turn}-{n}", worker=f"p{n}") for n in range(8))
        )
        granted = [answer.lease for answer in answers if answer.HasField("lease")]
        assert len(granted) == 1
        refusals = {a.refusal_reason for a in answers if not a.HasField("lease")}
        assert refusals == {pb.REFUSAL_REASON_ALREADY_LEASED}


async def test_a_request_sent_to_both_replicas_has_one_answer(two: tuple[Replica, Replica]):
    for turn in range(1, 11):
        await two[0].held(f"r{turn}", turn=turn)
        answers = await asyncio.gather(*(one.grant(f"q{turn}") for one in two * 2))
        assert len({answer.lease.lease_id for answer in answers}) == 1
        assert answers[0].lease.lease_id
        await two[1].release(answers[0].lease)


async def test_replicas_see_each_others_work(two: tuple[Replica, Replica]):
    one, other = two
    own = await one.held()
    lease = (await other.grant("q1")).lease
    await one.begin(lease)
    assert (await other.renew(lease))[0].renewed
    assert await one.release(lease) == [pb.LEASE_STATE_CONSUMED]
    assert (await other.owned(own)).state == pb.OWNERSHIP_STATE_CONSUMED


async def test_an_epoch_ends_while_the_worker_reports(two: tuple[Replica, Replica]):
    """Whatever the order, nothing of the old epoch is left alive."""
    for epoch in range(1, 11):

        async def report(at: int = epoch) -> None:
            await asyncio.sleep(random.random() * 0.01)
            with contextlib.suppress(StaleEpoch):
                await two[0].report(two[0].ownership(f"r{at}", f"s{at}"), epoch=at)

        await asyncio.gather(report(), two[1].end_epoch("d1", epoch + 1))
        alive = "SELECT * FROM ownerships WHERE state <= 2"
        assert await two[0].execute(alive) == []


async def test_a_report_and_a_withdrawal_at_once_leave_nothing_held(two: tuple[Replica, Replica]):
    """The engine has freed it, whichever came first."""

    async def withdraw(request: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await two[1].withdraw(request)

    for number in range(150):
        request = f"r{number}"
        await asyncio.gather(
            two[0].held(request, f"s{number}"), withdraw(request, number % 15 / 2000)
        )
    assert await two[0].execute("SELECT * FROM ownerships WHERE state <= 2") == []


async def test_one_id_reported_by_two_tenants_at_once_is_ones(two: tuple[Replica, Replica]):
    async def report(replica: Replica, number: int, tenant: str) -> pb.Ownership | InvalidField:
        try:
            return await replica.held(f"r{number}", "", tenant=tenant)
        except InvalidField as error:
            return error

    for number in range(20):
        answers = await asyncio.gather(
            *(report(one, number, tenant) for one, tenant in zip(two, ("t1", "t2"), strict=True))
        )
        assert sum(isinstance(answer, InvalidField) for answer in answers) == 1


async def test_the_longer_of_two_holds_reported_at_once_counts(two: tuple[Replica, Replica]):
    for number in range(20):
        request = f"r{number}"
        await asyncio.gather(two[0].held(request, "", hold=100), two[1].held(request, "", hold=400))
    shortest = "SELECT min(hold_deadline_us - reported_us) FROM ownerships"
    assert (await two[0].execute(shortest))[0][0] > 35_000_000  # a unit is 100 ms


async def test_many_reports_at_once_need_few_locks(two: tuple[Replica, Replica]):
    """They share a transaction, and PostgreSQL has room for some thousand locks."""
    one = two[0]
    reports = [
        [one.ownership(f"r{a}-{b}", f"s{a}-{b}", hold=6000) for b in range(1000)] for a in range(16)
    ]
    answers = await asyncio.gather(*(one.report(*report) for report in reports))
    assert sum(len(answer) for answer in answers) == 16_000


async def test_a_grant_waits_for_a_report_to_another_replica(two: tuple[Replica, Replica]):
    one, other = two
    waiting = asyncio.create_task(one.grant("q1", wait=5))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    own = await other.held()
    assert (await waiting).lease.ownership_id == own.ownership_id


@pytest.mark.parametrize("by", ["session", "handle"])
async def test_a_grant_waits_for_a_report_to_itself(sqlite: Plane, by: str):
    replica = sqlite.replica()
    target = (
        {"session_id": "s1"}
        if by == "session"
        else {"handle": pb.OwnedHandle(engine_id="engine-d1", request_id="r1")}
    )
    waiting = asyncio.create_task(replica.grant("q1", wait=1, **target))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    own = await replica.held()  # no time passes: only the news can wake it
    async with asyncio.timeout(5):
        assert (await waiting).lease.ownership_id == own.ownership_id


async def test_waiting_ends_at_its_bound(sqlite: Plane):
    replica = sqlite.replica(max_wait_s=1)
    waiting = asyncio.create_task(replica.grant("q1", wait=60))
    for _ in range(12):
        await asyncio.sleep(0.02)
        sqlite.clock.advance(0.1)
    async with asyncio.timeout(5):
        assert (await waiting).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert not replica.part.service._arrivals._waiting


async def test_nobody_waits_for_what_has_ended(sqlite: Plane):
    replica = sqlite.replica()
    own = await replica.held()
    await replica.withdraw("r1")
    async with asyncio.timeout(5):  # the clock stands still
        answer = await replica.grant("q1", wait=1, ownership_id=own.ownership_id)
    assert answer.refusal_reason == pb.REFUSAL_REASON_NOT_HELD
