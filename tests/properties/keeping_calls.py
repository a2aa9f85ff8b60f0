"""Calls about limits on what is held, as values and drawn at random."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

from hypothesis import strategies as st
from kvplane.kernel.limits import NO_QUOTAS, Limits, Quotas
from kvplane.lease.keeper import Keeper
from kvplane.lease.keeping import Amount, Bound, Hold
from kvplane.lease.limits import Limits as Known
from kvplane.lease.store import GrantOrder, LeaseQuota, ReportedItem
from kvplane.lease.store_sql import SqlLeaseStore
from kvplane.lease.values import Handle, Holder, Ownership, OwnershipState, Payload
from properties import lease_calls as calls
from properties import lease_drawn as drawn
from properties.lease_calls import Store
from properties.lease_state import CONFIG, micros
from properties.machine import replica_numbers
from properties.replicas import Rows

TENANTS = ["t1", "t2", "t3"]
WORKERS = ["d1", "d2"]


class KeptStore(SqlLeaseStore):
    """A store and the keeper of its replica."""

    def __init__(self, database: Any) -> None:
        super().__init__(database, CONFIG)
        self.quotas: Mapping[str, Quotas] = {}
        self.keeper = Keeper(self, CONFIG, Known(self), Mock())

    async def of(self, tenant_id: str) -> Quotas:
        """See `QuotaSource`."""
        return self.quotas.get(tenant_id, NO_QUOTAS)


@dataclass(frozen=True)
class LimitedHello(calls.Hello):
    blocks: int

    async def on(self, store: Store) -> Any:
        return await store.hello(
            self.worker, self.epoch, self.stream, self.number, self.held, self.blocks
        )


@dataclass(frozen=True)
class LimitedGrant(calls.Grant):
    quotas: Mapping[str, Quotas]

    async def on(self, store: Store) -> Any:
        most = LeaseQuota(lambda tenant: self.quotas[tenant].hard.live_leases if tenant else 0)
        return await store.grant(self.order, self.lease_id, final=self.final, quota=most)


@dataclass(frozen=True)
class Free:
    """Holds that were chosen, perhaps by what was so before."""

    bound: Bound
    chosen: list[Hold]

    async def on(self, store: Store) -> Any:
        freed, effects = await store.free_holds(self.bound, self.chosen)
        return [hold.ownership_id for hold in freed], effects.commanded


@dataclass(frozen=True)
class Count:
    """What is held is counted until now."""

    async def on(self, store: Store) -> Any:
        return await store.count_held(await store.stock())


@dataclass(frozen=True)
class Usage:
    tenant: str

    async def on(self, store: Store) -> Any:
        return await store.keeper.usage(self.tenant)


@dataclass(frozen=True)
class Keep:
    """A keeper's round."""

    quotas: Mapping[str, Quotas]

    async def on(self, store: Store) -> Any:
        store.quotas = self.quotas
        return await store.keeper.keep()


@dataclass
class KnownHolds(drawn.Known):
    """What calls can be about, with whose it is."""

    quotas: dict[str, Quotas] = field(default_factory=lambda: dict.fromkeys(TENANTS, NO_QUOTAS))
    holds: list[Hold] = field(default_factory=list)
    named: list[tuple[str, str, str]] = field(default_factory=list)

    def look(self, rows: Rows) -> None:
        super().look(rows)
        owns = sorted(rows["ownerships"], key=lambda row: row["ownership_id"])
        alive = [own for own in owns if own["state"] <= OwnershipState.LEASED]
        self.holds = [
            Hold(
                own["ownership_id"],
                own["tenant_id"],
                own["worker_id"],
                Amount(own["num_tokens"], own["blocks"]),
                own["reported_us"],
            )
            for own in alive
        ]
        self.named = [
            (own["ownership_id"], own["tenant_id"], own["session_id"])
            for own in alive
            if own["state"] == OwnershipState.HELD
        ]


tenants, workers = st.sampled_from(TENANTS), st.sampled_from(WORKERS)
numbers = st.integers(0, 9)
places = st.integers(0, 20)
blocks = st.sampled_from([0, 1, 3, 4, 5, 8, 12])
limits = st.builds(
    Limits,
    held_tokens=st.sampled_from([0, 0, 16, 63, 64, 65, 200]),
    held_blocks=blocks,
    live_leases=st.sampled_from([0, 1, 1, 2]),
)
few_leases = st.builds(Limits, live_leases=st.integers(1, 2))
quotas = st.builds(Quotas, soft=limits, hard=st.one_of(few_leases, st.just(Limits()), limits))
sizes = st.sampled_from([(16, 1), (16, 1), (64, 4), (64, 2), (60, 4), (8, 1), (160, 10), (0, 0)])


@st.composite
def reports(draw: st.DrawFn) -> drawn.Drawn:
    worker, tenant = draw(workers), draw(tenants)
    items = []
    for number in draw(st.lists(numbers, min_size=1, max_size=4, unique=True)):
        tokens, count = draw(sizes)
        whose = Handle(f"engine-{worker}", f"{tenant}-{number}")
        own = Ownership(
            whose.ownership_id, tenant, f"s{number}" if number else "", 1 + number % 2, worker, 0,
            whose.engine_id, whose.request_id, tokens, 16, "c", True, number == 9, 0,
            OwnershipState.HELD, 0, blocks=count,
        )  # fmt: skip
        hold_us = micros(draw(st.sampled_from([480.0, 480.0, 480.0, 20.0, 0.0])))
        items.append(ReportedItem(own, Payload(b"params", b"digests"), hold_us))

    def resolve(known: drawn.Known) -> calls.Report:
        epoch = known.epoch(worker, 0)
        owned = [replace(item, ownership=replace(item.ownership, epoch=epoch)) for item in items]
        return calls.Report(worker, epoch, drawn.FUTURE_US, owned, None)

    return resolve


@st.composite
def withdrawals(draw: st.DrawFn) -> drawn.Drawn:
    worker, tenant, number = draw(workers), draw(tenants), draw(numbers)
    handle = Handle(f"engine-{worker}", f"{tenant}-{number}")
    return lambda known: calls.Withdraw(worker, known.epoch(worker, 0), [handle])


@st.composite
def hellos(draw: st.DrawFn) -> drawn.Drawn:
    worker, most, again = draw(workers), draw(blocks), draw(st.booleans())

    def resolve(known: drawn.Known) -> LimitedHello:
        stream = known.streams.get(worker) if again else None
        known.streams[worker] = stream = stream or known.new_id("stream")
        kept = [whose for owner, whose in known.live if owner == worker]
        return LimitedHello(worker, known.epoch(worker, 0), stream, kept, most)

    return resolve


@st.composite
def epoch_ends(draw: st.DrawFn) -> drawn.Drawn:
    worker = draw(workers)
    return lambda known: calls.EndEpoch(worker, known.epoch(worker, 1))


@st.composite
def grants(draw: st.DrawFn) -> drawn.Drawn:
    place, by, begin, ttl_us = (
        draw(places),
        draw(st.integers(0, 2)),
        draw(st.booleans()),
        draw(drawn.ttls),
    )

    def resolve(known: KnownHolds) -> LimitedGrant:
        nobody = ("own-none", "t1", "s1")
        own, tenant, session = known.named[place % len(known.named)] if known.named else nobody
        by_session = by == 1 and session != ""
        order = GrantOrder(
            request_id=known.new_id("ask"),
            tenant_id=None if by == 2 else tenant,
            holder=Holder("p1", known.epoch("p1", 0), "c"),
            ownership_id="" if by_session else own,
            session_id=session if by_session else "",
            ttl_us=ttl_us,
            min_tokens=0,
            begin_read=begin,
        )
        return LimitedGrant(order, known.new_id("lease"), True, dict(known.quotas))

    return resolve


@st.composite
def frees(draw: st.DrawFn) -> drawn.Drawn:
    tenant, worker, most = draw(st.one_of(st.just(""), tenants)), draw(workers), draw(blocks)
    tokens, order = draw(st.sampled_from([0, 16, 100])), draw(st.permutations(range(8)))
    bound = Bound("" if tenant else worker, tenant, tokens, most)

    def resolve(known: KnownHolds) -> Free:
        mine = [h for h in known.holds if h.tenant_id == tenant or h.worker_id == bound.worker_id]
        return Free(bound, [mine[place] for place in order if place < len(mine)])

    return resolve


counts = st.just(lambda known: Count())
keeps = st.just(lambda known: Keep(dict(known.quotas)))
usages = tenants.map(lambda tenant: lambda known: Usage(tenant))
reads = st.one_of(drawn.begins(), drawn.releases(), drawn.releases(), drawn.revocations())
beginnings = st.lists(st.one_of(reports(), reports(), reports(), hellos()), min_size=5, max_size=8)
# At most one frees: of two that choose differently, each may do what is needed.
groups = st.builds(
    lambda *parts: [one for part in parts for one in part],
    st.lists(st.tuples(frees(), replica_numbers), max_size=1),
    st.lists(
        st.tuples(
            st.one_of(reports(), withdrawals(), grants(), grants(), reads, counts, drawn.sweeps),
            replica_numbers,
        ),
        min_size=1,
        max_size=3,
    ),
)
bursts = st.tuples(grants(), grants(), grants()).map(
    lambda some: list(zip(some, (0, 1, 0), strict=True))
)
