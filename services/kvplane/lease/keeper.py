"""Keeps what is held within limits, and counts it: once at each sweep."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from kvplane.kernel.limits import Quotas
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.holds import HoldStore, Usage
from kvplane.lease.keeping import Amount, Bound, Hold, bound_of, over_quota, short_of_blocks
from kvplane.lease.limits import Limits
from kvplane.lease.metrics import FREED, TenantMetrics
from kvplane.lease.streams import Streams

# Transactions for one tenant or worker in one round, so that they do not crowd out the calls.
_MAX_BATCHES: Final = 20


class Keeper:
    """Frees the cheapest holds of tenants beyond a hard limit, and of workers short of blocks."""

    def __init__(
        self, store: HoldStore, config: LeaseConfig, limits: Limits, streams: Streams
    ) -> None:
        self._store, self._config = store, config
        self._limits, self._streams = limits, streams
        self._asked: set[str] = set()
        self._metrics = TenantMetrics()

    async def keep(self) -> int:
        """Do one round and return how many holds were freed. Raises Unavailable."""
        stock = await self._store.stock()
        held, on_worker = stock.by_tenant(), stock.by_worker()
        tenants = held.keys() | stock.leases.keys()
        self._metrics.show({
            tenant_id: (held.get(tenant_id, Amount()), stock.leases.get(tenant_id, 0))
            for tenant_id in tenants | stock.token_seconds.keys()
        })  # fmt: skip
        if await self._store.count_held(stock):
            self._metrics.count(stock.token_seconds)
        quotas = await self._learn(tenants)
        freed = 0
        for tenant_id, amount in sorted(held.items()):
            bound = bound_of(tenant_id, quotas[tenant_id].hard)
            if bound.excess(amount).some:
                for hold in await self._free_for_tenant(bound):
                    held[tenant_id] -= hold.amount
                    on_worker[hold.worker_id] -= hold.amount
                    freed += 1
        for worker_id, most in sorted(stock.limits.items()):
            if on_worker[worker_id].blocks > most:
                beyond = _beyond(held, quotas)
                if beyond:  # perhaps no more: other replicas free too, and must choose the same
                    held = (await self._store.stock()).by_tenant()
                    beyond = _beyond(held, quotas)
                freed += len(await self._free_on_worker(worker_id, most, beyond))
        return freed

    async def usage(self, tenant_id: str) -> Usage:
        """Return what a tenant holds and has held."""
        return await self._store.usage(tenant_id)

    async def _learn(self, tenants: Iterable[str]) -> dict[str, Quotas]:
        """Return these tenants' limits. New ones are asked for together: each may take a while."""
        known = set(tenants)
        await asyncio.gather(*(self._limits.learn(t) for t in sorted(known - self._asked)))
        self._asked = known
        return {tenant_id: await self._limits.learn(tenant_id) for tenant_id in known}

    async def _free_for_tenant(self, bound: Bound) -> list[Hold]:
        holds, now_us = await self._store.holds_of(bound.tenant_id)
        return await self._free(bound, over_quota(holds, bound, now_us, self._config), "quota")

    async def _free_on_worker(
        self, worker_id: str, most: int, beyond: Mapping[str, Amount]
    ) -> list[Hold]:
        holds, now_us = await self._store.holds_on(worker_id)
        chosen = short_of_blocks(holds, most, beyond, now_us, self._config)
        return await self._free(Bound(worker_id=worker_id, blocks=most), chosen, "pressure")

    async def _free(self, bound: Bound, chosen: list[Hold], reason: str) -> list[Hold]:
        """Free them in their order, as far as that is still needed."""
        size, freed = self._config.sweep_rows, []
        for start in range(0, min(len(chosen), size * _MAX_BATCHES), size):
            batch = chosen[start : start + size]
            done, effects = await self._store.free_holds(bound, batch)
            if effects.commanded:
                self._streams.look()
            freed += done
            if not done:  # it is enough by now, or another replica frees the same
                break
        FREED.labels(reason).inc(len(freed))
        return freed


def _beyond(held: Mapping[str, Amount], quotas: Mapping[str, Quotas]) -> dict[str, Amount]:
    """Return which tenants are beyond a soft limit, and by how much."""
    excess = {
        tenant_id: bound_of(tenant_id, quotas[tenant_id].soft).excess(amount)
        for tenant_id, amount in held.items()
        if tenant_id in quotas  # else it came after they were asked for
    }
    return {tenant_id: amount for tenant_id, amount in excess.items() if amount.some}
