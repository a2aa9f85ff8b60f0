"""What time ends: sweeping, retention and the grace after a restart."""

import asyncio

from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.db.database import Tx
from kvplane.kernel.clock import FakeClock
from kvplane.lease.sql import tables
from lease.harness import Plane, Replica, until


async def test_an_expired_lease_that_was_not_begun_is_held_again(plane: Plane, replica: Replica):
    own = await replica.held()
    lease = (await replica.grant("q1")).lease
    await plane.sleep(9.5)
    assert await replica.sweep() == (0, 0)
    await plane.sleep(1)
    assert await replica.sweep() == (1, 0)
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_EXPIRED
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_HELD
    assert (await replica.grant("q2", worker="p2")).lease.fencing_token == 2


async def test_an_expired_read_is_not_given_to_another(plane: Plane, replica: Replica):
    own = await replica.held()
    lease = await replica.reading()
    await plane.sleep(10.2)
    assert await replica.sweep() == (0, 0)  # the reader's clock may be slow
    assert [answer.renewed for answer in await replica.renew(lease)] == [False]
    assert await replica.commands() == []
    await plane.sleep(0.5)
    assert await replica.sweep() == (1, 0)
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_EXPIRED
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert [(order, r) for order, r, _ in await replica.commands()] == [("free", "r1")]
    assert (await replica.grant("q2")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert await replica.release(lease) == [pb.LEASE_STATE_EXPIRED]


async def test_nobody_waits_for_the_sweep(plane: Plane, replica: Replica):
    """An unread lease that is over when a grant is asked for is ended there and then."""
    await replica.held()
    first = (await replica.grant("q1")).lease
    await plane.sleep(10.2)
    second = await replica.reading("q2", worker="p1")
    assert second.fencing_token == 2
    assert (await replica.lease(first)).state == pb.LEASE_STATE_EXPIRED
    # What is being read is the sweep's, which waits after a start: see below.
    await plane.sleep(11)
    assert (await replica.grant("q3")).refusal_reason == pb.REFUSAL_REASON_ALREADY_LEASED
    assert await replica.commands() == []


async def test_a_renewed_lease_is_not_swept(plane: Plane, replica: Replica):
    await replica.held()
    lease = await replica.reading()
    for _ in range(4):
        await plane.sleep(8)
        assert [answer.renewed for answer in await replica.renew(lease)] == [True]
        assert await replica.sweep() == (0, 0)


async def test_l02_one_sweep_ends_what_is_over_and_nothing_else(plane: Plane, replica: Replica):
    """L-02: a long hold in front, renewed in place, hides nothing behind it."""
    first = await replica.held("a", "sa", hold=480)
    others = [await replica.held(name, f"s{name}", hold=30) for name in "bc"]
    lease = (await replica.grant("q1", session_id="sa")).lease
    for _ in range(6):
        await plane.sleep(5)
        await replica.renew(lease)
    await plane.sleep(1)
    assert await replica.sweep() == (0, 2)
    assert (await replica.owned(first)).state == pb.OWNERSHIP_STATE_LEASED
    for own in others:
        assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_EXPIRED
    assert await replica.commands() == []  # the engine frees them by itself


async def test_l02_ten_thousand_live_leases_do_not_hide_an_ended_one(
    plane: Plane, replica: Replica
):
    own = await replica.held("r1", "s1")
    lease = await replica.reading(ttl=10)
    await plane.sleep(9)

    def clone(tx: Tx) -> None:
        for table, key in ((tables.ownerships, "ownership_id"), (tables.leases, "lease_id")):
            row = dict(tx.connection.execute(table.select()).mappings().one())
            later = {"hold_deadline_us", "deadline_us"} & row.keys()
            copies = [
                row
                | {name: row[name] + 30_000_000 for name in later}
                | {key: f"a{number:05}", "session_id": "crowd"}
                | ({"ownership_id": f"a{number:05}"})
                | ({"lease_id": f"a{number:05}"})
                for number in range(10_000)
            ]
            tx.connection.execute(table.insert(), copies)

    await replica.database.run(clone)
    await plane.sleep(2)

    assert await replica.sweep() == (1, 0)

    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_EXPIRED


async def test_a_sweep_goes_on_until_all_is_done(plane: Plane):
    replica = plane.replica(sweep_rows=3)
    for number in range(10):
        await replica.held(f"r{number}", f"s{number}", hold=5)
    await plane.sleep(6)
    assert await replica.sweep() == (0, 10)


async def test_what_ended_stays_a_while_and_is_then_deleted(plane: Plane, replica: Replica):
    await replica.held("r1", "s1", hold=3000)
    await replica.held("r2", "s2", hold=3000)
    await replica.held("gone", "s3", hold=1)
    lease = await replica.reading()
    live = (await replica.grant("q2", session_id="s2")).lease
    await replica.release(lease)
    await replica.withdraw("never-reported")
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s9"))
    await plane.sleep(500)
    await replica.renew(live)
    await replica.sweep()
    assert await replica.part.service.purge() == 0
    assert (await replica.lease(lease)).state == pb.LEASE_STATE_CONSUMED
    # `live` expired meanwhile and is held again; it ended later than the first.
    await plane.sleep(150)
    assert await replica.part.service.purge() > 0
    left = await replica.execute("SELECT request_id FROM ownerships ORDER BY request_id")
    assert left == [("gone",), ("r2",)]
    assert await replica.execute("SELECT lease_id FROM leases") == [(live.lease_id,)]
    assert await replica.execute("SELECT request_id FROM lease_requests") == []
    assert len(await replica.execute("SELECT * FROM ownership_payloads")) == 2
    assert await replica.execute("SELECT * FROM ended_sessions") == []


async def test_more_than_one_transaction_s_worth_is_deleted_at_once(plane: Plane):
    """Else who makes rows faster than one transaction a sweep deletes them fills the disk."""
    replica = plane.replica(sweep_rows=3)
    for number in range(10):
        await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id=f"never-was-{number}"))
    await plane.sleep(700)
    assert await replica.part.service.purge() == 10
    assert await replica.execute("SELECT * FROM ended_sessions") == []


async def test_an_order_nobody_needs_any_more_is_thrown_away(plane: Plane, replica: Replica):
    await replica.held(hold=100)
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s1"))
    await plane.sleep(90)
    await replica.part.service.purge()
    assert len(await replica.commands()) == 1
    await plane.sleep(80)
    await replica.part.service.purge()
    assert await replica.commands() == []


async def test_nothing_is_swept_until_holders_could_come_back(sqlite: Plane):
    before = sqlite.replica()
    own = await before.held()
    await before.reading(ttl=10)
    await sqlite.sleep(60)

    after = sqlite.replica()
    await after.part.start()
    clock = sqlite.clock
    assert isinstance(clock, FakeClock)

    async def asleep() -> bool:
        return len(clock._waiting) >= 3

    async def released() -> bool:
        clock.advance(0.1)
        return (await after.owned(own)).state == pb.OWNERSHIP_STATE_RELEASED

    await until(asleep)
    start = clock.monotonic()
    await until(released)
    assert 10 <= clock.monotonic() - start <= 12


async def test_the_loops_outlive_an_outage(sqlite: Plane):
    replica = sqlite.replica(restart_grace_s=1)
    own = await replica.held(hold=5)
    await replica.execute("ALTER TABLE leases RENAME TO away")
    await replica.part.start()
    for _ in range(20):
        sqlite.clock.advance(1)
        await asyncio.sleep(0.01)
    await replica.execute("ALTER TABLE away RENAME TO leases")

    async def swept() -> bool:
        sqlite.clock.advance(1)
        return (await replica.owned(own)).state == pb.OWNERSHIP_STATE_EXPIRED

    await until(swept)
