"""What is held stays within limits: the keeper, over both databases; and how it counts."""

import asyncio
import random

import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.limits import NO_LIMITS, NO_QUOTAS, Limits, Quotas
from kvplane.lease.keeping import Amount, Bound
from kvplane.lease.metrics import FREED, TenantMetrics
from kvplane.lease.sql import grants, keeping
from lease.harness import BLOCK, Plane, Replica, until
from prometheus_client import REGISTRY

HELD = pb.OWNERSHIP_STATE_HELD
RELEASED = pb.OWNERSHIP_STATE_RELEASED
OVER_QUOTA = pb.REFUSAL_REASON_OVER_QUOTA


class Quotes:
    """What tenants may use, as a test says."""

    def __init__(self) -> None:
        self.known: dict[str, Quotas] = {}

    def set(self, tenant_id: str, soft: Limits = NO_LIMITS, hard: Limits = NO_LIMITS) -> None:
        self.known[tenant_id] = Quotas(soft, hard)

    async def of(self, tenant_id: str) -> Quotas:
        return self.known.get(tenant_id, NO_QUOTAS)


@pytest.fixture
def quotas() -> Quotes:
    return Quotes()


@pytest.fixture
def replica(plane: Plane, quotas: Quotes) -> Replica:
    return plane.replica(quotas=quotas)


async def hello(replica: Replica, limit: int, worker: str = "d1", number: int = 1, epoch: int = 1):
    await replica.part.streams.open(worker, epoch, number, [], limit)


async def hold(replica: Replica, name: str, tenant: str = "default", blocks: int = 1, **fields):
    own = replica.ownership(name, f"s-{name}", tokens=blocks * BLOCK, tenant=tenant, **fields)
    return (await replica.report(own))[0]


async def burst(replica: Replica, tenant: str, count: int, blocks: int = 1) -> None:
    """Hold that many, reported together."""
    owns = [
        replica.ownership(f"{tenant}{n}", f"s-{tenant}{n}", tokens=blocks * BLOCK, tenant=tenant)
        for n in range(count)
    ]
    for start in range(0, count, 1000):
        await replica.report(*owns[start : start + 1000])


async def held(replica: Replica, tenant: str) -> list[str]:
    rows = await replica.execute(
        "SELECT request_id FROM ownerships WHERE state <= 2 AND tenant_id = :t", t=tenant
    )
    return sorted(row[0] for row in rows)


async def usage(replica: Replica, tenant: str = "default") -> pb.GetUsageResponse:
    set_caller(Caller(tenant))
    try:
        return await replica.rpc.GetUsage(pb.GetUsageRequest())
    finally:
        set_caller(Caller())


def keep(replica: Replica):
    return replica.part.keeper.keep()


# -- a worker short of blocks ---------------------------------------------------------


async def test_one_tenants_burst_takes_no_other_holds(plane: Plane, replica: Replica):
    await hello(replica, 400)
    await burst(replica, "small", 10)
    await plane.sleep(300)  # the burst is worth more, each hold by itself
    await burst(replica, "burst", 1000)
    freed_before = FREED.labels("pressure")._value.get()

    assert await keep(replica) == 610

    assert len(await held(replica, "small")) == 10
    assert len(await held(replica, "burst")) == 390
    orders = await replica.commands()
    assert len(orders) == 610
    assert {order[0] for order in orders} == {"free"}
    assert FREED.labels("pressure")._value.get() - freed_before == 610
    assert await keep(replica) == 0


async def test_a_worker_that_said_nothing_holds_what_it_likes(replica: Replica):
    await burst(replica, "t", 50)
    assert await keep(replica) == 0
    await hello(replica, 0)
    await burst(replica, "t", 50)
    assert await keep(replica) == 0


async def test_a_workers_limit_ends_with_its_epoch(replica: Replica):
    await hello(replica, 5)
    await hello(replica, 7, number=2)
    await hello(replica, 9, worker="d2")
    assert (await replica.part.keeper._store.stock()).limits == {"d1": 7, "d2": 9}
    await replica.end_epoch("d1", 2)
    assert (await replica.part.keeper._store.stock()).limits == {"d2": 9}


async def test_soft_limits_matter_only_to_a_worker_short_of_blocks(
    replica: Replica, quotas: Quotes
):
    quotas.set("beyond", soft=Limits(held_blocks=10))
    await burst(replica, "large", 60)
    await burst(replica, "beyond", 30)
    assert await keep(replica) == 0

    await replica.part.streams.open(
        "d1", 1, 1,
        [_handle(f"large{n}") for n in range(60)] + [_handle(f"beyond{n}") for n in range(30)],
        75,
    )  # fmt: skip
    assert await keep(replica) == 15
    assert len(await held(replica, "beyond")) == 15
    assert len(await held(replica, "large")) == 60


def _handle(request: str):
    from kvplane.lease.values import Handle

    return Handle("engine-d1", request)


async def test_what_is_being_read_is_never_freed(replica: Replica):
    await hello(replica, 2)
    for name in ("a", "b", "c", "d"):
        await hold(replica, name)
    reading = await replica.reading("q1", session_id="s-a")
    granted = (await replica.grant("q2", session_id="s-b")).lease

    assert await keep(replica) == 2
    assert await held(replica, "default") == ["a", "b"]
    assert all(item.renewed for item in await replica.renew(reading, granted))
    await hold(replica, "e")
    assert await keep(replica) == 1
    assert await held(replica, "default") == ["a", "b"]


async def test_what_was_leased_since_the_choice_is_left_alone(replica: Replica):
    store = replica.part.keeper._store
    owns = [await hold(replica, name) for name in ("a", "b")]
    holds, _ = await store.holds_on("d1")
    lease = (await replica.grant("q1", ownership_id=owns[0].ownership_id)).lease
    chosen = sorted(holds, key=lambda each: each.ownership_id != owns[0].ownership_id)

    freed, effects = await store.free_holds(Bound(worker_id="d1", blocks=1), chosen)

    assert [each.ownership_id for each in freed] == [owns[1].ownership_id]
    assert effects.commanded == {"d1"}
    assert (await replica.renew(lease))[0].renewed


async def test_what_is_not_needed_any_more_is_not_freed(replica: Replica):
    store = replica.part.keeper._store
    await burst(replica, "default", 10)
    holds, _ = await store.holds_of("default")
    await replica.withdraw("default0", "default1", "default2")
    still = [each for each in holds if each.ownership_id in await _live(replica)]

    freed, _ = await store.free_holds(Bound(tenant_id="default", blocks=5), still)

    assert len(freed) == 2
    assert (await store.free_holds(Bound(tenant_id="default", blocks=5), still))[0] == []


async def _live(replica: Replica) -> set[str]:
    rows = await replica.execute("SELECT ownership_id FROM ownerships WHERE state <= 2")
    return {row[0] for row in rows}


async def test_a_hand_over_is_waited_for(plane: Plane, replica: Replica):
    await hello(replica, 1)
    await hold(replica, "p", blocks=3, for_decode=True)
    await hold(replica, "t", blocks=3)
    assert await keep(replica) == 1
    assert await held(replica, "default") == ["p"]
    await plane.sleep(9)
    assert await keep(replica) == 0
    await plane.sleep(2)
    assert await keep(replica) == 1


# -- a tenant's quota -----------------------------------------------------------------


async def test_a_hard_quota_is_cut_back_to(plane: Plane, replica: Replica, quotas: Quotes):
    quotas.set("t", hard=Limits(held_blocks=20))
    old = await hold(replica, "old", "t", blocks=10)
    await plane.sleep(60)
    new = await hold(replica, "new", "t", blocks=10)
    other = await hold(replica, "other", "u", blocks=100)
    assert await keep(replica) == 0

    await plane.sleep(1)
    newest = await hold(replica, "newest", "t", blocks=10)
    assert await keep(replica) == 1
    assert (await replica.owned(old)).state == RELEASED
    assert [order[:2] for order in await replica.commands()] == [("free", "old")]
    for own in (new, newest, other):
        assert (await replica.owned(own)).state == HELD

    quotas.set("t", hard=Limits(held_tokens=10 * BLOCK))
    assert await keep(replica) == 1
    assert await held(replica, "t") == ["newest"]
    # What is freed is over for good.
    refused = await replica.grant("q1", ownership_id=new.ownership_id)
    assert refused.refusal_reason == pb.REFUSAL_REASON_NOT_HELD


async def test_a_quota_counts_over_all_workers(replica: Replica, quotas: Quotes):
    quotas.set("t", hard=Limits(held_blocks=3))
    for worker in ("d1", "d2"):
        owns = [
            replica.ownership(
                f"{worker}-{n}", f"s-{worker}-{n}", tenant="t", tokens=BLOCK,
                engine=f"engine-{worker}",
            )
            for n in range(3)
        ]  # fmt: skip
        await replica.report(*owns, worker=worker)
    assert await keep(replica) == 3
    assert len(await held(replica, "t")) == 3


async def test_more_than_a_batch_goes_in_one_round(plane: Plane, quotas: Quotes):
    replica = plane.replica(quotas=quotas, sweep_rows=40)
    quotas.set("t", hard=Limits(held_blocks=10))
    await burst(replica, "t", 300)
    assert await keep(replica) == 290


async def test_the_sweeping_loop_keeps(sqlite: Plane, quotas: Quotes):
    replica = sqlite.replica(quotas=quotas)
    quotas.set("t", hard=Limits(held_blocks=5))
    await burst(replica, "t", 8)
    await replica.part.start()
    assert isinstance(sqlite.clock, FakeClock)
    sleeping = sqlite.clock._waiting

    async def asleep() -> bool:
        return len(sleeping) >= 3

    await until(asleep)
    await sqlite.sleep(9.9)
    assert len(await held(replica, "t")) == 8  # not before holders had time to come back

    async def cut_back() -> bool:
        await sqlite.sleep(0.2)
        return len(await held(replica, "t")) == 5

    await until(cut_back)


# -- two replicas ---------------------------------------------------------------------


async def test_two_replicas_free_no_more_than_needed(real_postgres: Plane, quotas: Quotes):
    one, two = (real_postgres.replica(quotas=quotas, sweep_rows=20) for _ in range(2))
    quotas.set("t", hard=Limits(held_blocks=60))
    await hello(one, 90)
    for start in range(0, 100, 50):
        await burst(one, "u" if start else "t", 100)
    freed = 0
    for _ in range(5):
        freed += sum(await asyncio.gather(*(keep(replica) for replica in (one, two) * 3)))
    assert freed == 110
    assert len(await held(one, "t")) + len(await held(one, "u")) == 90


async def test_what_another_replica_has_freed_is_beyond_no_soft_limit(
    replica: Replica, quotas: Quotes, monkeypatch: pytest.MonkeyPatch
):
    """Else the two would choose differently, and free more than needed."""
    quotas.set("t", soft=Limits(held_blocks=5), hard=Limits(held_blocks=5))
    await hello(replica, 12)
    await burst(replica, "t", 10)
    await burst(replica, "large", 9)
    store = replica.part.keeper._store
    before = await store.stock()
    holds, _ = await store.holds_of("t")
    await store.free_holds(Bound(tenant_id="t", blocks=5), holds)

    stocks = [before]
    now = store.stock

    async def stock():
        return stocks.pop() if stocks else await now()

    monkeypatch.setattr(store, "stock", stock)
    assert await keep(replica) == 2
    assert (len(await held(replica, "t")), len(await held(replica, "large"))) == (5, 7)


async def test_two_replicas_count_each_second_once(real_postgres: Plane):
    plane = real_postgres
    one, two = plane.replica(), plane.replica()
    began = plane.clock.monotonic()
    await hold(one, "r", blocks=100)
    reported = plane.clock.monotonic()
    for _ in range(5):
        await asyncio.gather(keep(one), keep(two), keep(two))
        await asyncio.sleep(0.02)
    last = plane.clock.monotonic()
    await keep(two)
    ended = plane.clock.monotonic()
    counted = (await usage(two)).held_token_seconds
    assert 1600 * (last - reported) - 1 <= counted <= 1600 * (ended - began) + 1


# -- what is used ---------------------------------------------------------------------


async def test_usage(plane: Plane, replica: Replica):
    own = await hold(replica, "a", blocks=10)
    await hold(replica, "b", "other", blocks=3)
    lease = (await replica.grant("q1", ownership_id=own.ownership_id)).lease
    now = await usage(replica)
    assert (now.held_tokens, now.held_blocks, now.live_leases) == (160, 10, 1)
    assert now.held_token_seconds == 0
    other = await usage(replica, "other")
    assert (other.held_tokens, other.held_blocks, other.live_leases) == (48, 3, 0)
    assert await usage(replica, "nobody") == pb.GetUsageResponse()

    await plane.sleep(2)
    await keep(replica)
    await keep(replica)
    assert (await usage(replica)).held_token_seconds == pytest.approx(320)
    await plane.sleep(1)
    await replica.release(lease)  # consumed
    await hold(replica, "short")
    await plane.sleep(0.5)
    await replica.withdraw("short")
    await plane.sleep(5)
    await keep(replica)
    now = await usage(replica)
    assert (now.held_tokens, now.held_blocks, now.live_leases) == (0, 0, 0)
    assert now.held_token_seconds == pytest.approx(480 + 8)
    assert (await usage(replica, "other")).held_token_seconds == pytest.approx(48 * 8.5)
    await plane.sleep(5)
    await keep(replica)
    assert (await usage(replica)).held_token_seconds == pytest.approx(488)


async def test_blocks_are_those_of_all_groups(replica: Replica):
    """A hybrid model's request has blocks in each group of its KV cache."""
    own = replica.ownership("r", "s", tokens=2 * BLOCK)
    own.params.remote_block_ids.add(ids=[7])
    await replica.report(own)
    assert (await usage(replica)).held_blocks == 3


def test_metrics_name_a_bounded_number_of_tenants():
    metrics = TenantMetrics()
    many = {f"metered{n}": (Amount(1000 - n, 1), 1) for n in range(300)}
    metrics.show(many)
    metrics.count({"metered0": 5.0, "metered299": 7.0})

    def value(name: str, tenant: str) -> float | None:
        return REGISTRY.get_sample_value(f"kvplane_tenant_{name}", {"tenant": tenant})

    assert value("held_tokens", "metered0") == 1000
    assert value("held_tokens", "metered200") is None
    assert value("held_blocks", "other") == 100
    assert value("live_leases", "other") == 100
    assert value("held_token_seconds_total", "metered0") == 5
    # Who was named keeps the name while it holds anything.
    metrics.show({"metered299": (Amount(10**6, 1), 0), "metered5": (Amount(1, 1), 0)})
    assert value("held_tokens", "metered0") is None
    assert value("held_tokens", "metered5") == 1
    assert value("held_tokens", "metered299") == 10**6
    assert value("held_tokens", "other") == 0
    metrics.show({})


# -- live leases ----------------------------------------------------------------------


async def test_live_leases_are_limited(plane: Plane, replica: Replica, quotas: Quotes):
    quotas.set("default", hard=Limits(live_leases=2))
    owns = [await hold(replica, f"r{n}") for n in range(4)]
    first = (await replica.grant("q0", session_id="s-r0")).lease
    handle = pb.OwnedHandle(engine_id="engine-d1", request_id="r1")
    second = await replica.grant("q1", handle=handle)
    assert second.HasField("lease")

    for target in (
        {"session_id": "s-r2"},
        {"handle": pb.OwnedHandle(engine_id="engine-d1", request_id="r2")},
        {"ownership_id": owns[2].ownership_id},
    ):
        refused = await replica.grant(f"q2-{next(iter(target))}", **target)
        assert refused.refusal_reason == OVER_QUOTA
    assert (await replica.owned(owns[2])).state == HELD
    # Another reason is told first, and the same request has the same answer.
    assert (await replica.grant("q3", session_id="no")).refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    assert (await replica.grant("q0", session_id="s-r0")).lease.lease_id == first.lease_id

    await replica.release(first, outcome=pb.READ_OUTCOME_UNUSED)
    again = await replica.grant("q2-session_id", session_id="s-r2")
    assert again.refusal_reason == OVER_QUOTA
    assert (await replica.grant("q4", session_id="s-r2")).HasField("lease")
    # One that is over counts no more, swept or not.
    await plane.sleep(11)
    assert (await replica.grant("q5", session_id="s-r3")).HasField("lease")


async def test_others_are_not_limited(replica: Replica, quotas: Quotes):
    quotas.set("default", hard=Limits(live_leases=1))
    set_caller(Caller("free"))
    try:
        for n in range(5):
            await hold(replica, f"f{n}", "free")
            assert (await replica.grant(f"q{n}", session_id=f"s-f{n}")).HasField("lease")
    finally:
        set_caller(Caller())


async def test_many_at_once_get_as_many_leases_as_they_may(plane: Plane, quotas: Quotes):
    """Also when two replicas are asked."""
    one_process = plane.url.startswith("sqlite")
    replicas = [plane.replica(quotas=quotas) for _ in range(1 if one_process else 2)]
    quotas.set("default", hard=Limits(live_leases=10))
    await burst(replicas[0], "default", 60)
    # A reader that is new would have the replicas wait for one another.
    await replicas[0].grant("before", session_id="none")
    asked = list(range(60))
    random.shuffle(asked)
    answers = await asyncio.gather(
        *(replicas[n % len(replicas)].grant(f"q{n}", session_id=f"s-default{n}") for n in asked)
    )
    assert sum(answer.HasField("lease") for answer in answers) == 10
    refusals = {answer.refusal_reason for answer in answers if not answer.HasField("lease")}
    assert refusals == {OVER_QUOTA}


async def test_sums_and_counts_do_not_go_through_all_that_has_ended(sqlite: Plane):
    """Ended rows stay for a while, and there are many more of them."""
    replica = sqlite.replica()

    def plans(tx):
        for query in (keeping._STOCK, keeping._LIVE_LEASES, keeping._ON_WORKER, grants._LIVE):
            sql, names = query._for(tx)
            explained = tx.connection.exec_driver_sql(
                f"EXPLAIN QUERY PLAN {sql}", (1,) * len(names)
            )
            yield from (row[3] for row in explained if row[3].startswith(("SCAN", "SEARCH")))

    found = " ".join(await replica.database.run(lambda tx: list(plans(tx)))).split(" ")
    assert [word for word in found if word.startswith("ix_")] == [
        "ix_ownerships_live", "ix_ownerships_ended_us", "ix_leases_live_tenant_id",
        "ix_ownerships_worker_id_state", "ix_leases_live_tenant_id",
    ]  # fmt: skip
    assert found.count("COVERING") == 2
