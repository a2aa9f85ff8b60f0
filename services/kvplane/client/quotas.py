"""Tenants' limits, asked of the tenant service and remembered for a few seconds."""

import asyncio
from dataclasses import fields
from typing import Final, Protocol

from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.client.api import TenantApi
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.limits import NO_QUOTAS, Limits, Quotas

_WAIT_S: Final = 0.2
_MAX_TENANTS: Final = 10_000
_NAMES: Final = tuple(field.name for field in fields(Limits))


class QuotaSource(Protocol):
    """Knows what a tenant may use."""

    async def of(self, tenant_id: str) -> Quotas:
        """Return the tenant's limits. Never raises: who cannot be asked limits nobody."""
        ...


class NoQuotas:
    """Limits nobody."""

    async def of(self, _tenant_id: str) -> Quotas:
        """Return no limits."""
        return NO_QUOTAS


class QuotaBook:
    """Limits as of a few seconds ago; the last known ones while nobody answers."""

    def __init__(self, tenants: TenantApi, clock: Clock, ttl: float = 5.0) -> None:
        """`ttl` is in seconds; a changed limit holds after that at the latest."""
        self._tenants = tenants
        self._clock = clock
        self._ttl = ttl
        self._known: dict[str, tuple[float, Quotas]] = {}
        self._asking: dict[str, asyncio.Task[Quotas]] = {}

    async def of(self, tenant_id: str) -> Quotas:
        """Return the tenant's limits; waits only for those of a tenant not seen before."""
        entry = self._known.get(tenant_id)
        if entry is not None:
            if self._clock.monotonic() - entry[0] >= self._ttl:
                self._ask(tenant_id, entry[1])
            return entry[1]
        return await asyncio.shield(self._ask(tenant_id, NO_QUOTAS))

    def _ask(self, tenant_id: str, otherwise: Quotas) -> "asyncio.Task[Quotas]":
        task = self._asking.get(tenant_id)
        if task is None:
            task = asyncio.ensure_future(self._fetch(tenant_id, otherwise))
            self._asking[tenant_id] = task
        return task

    async def _fetch(self, tenant_id: str, otherwise: Quotas) -> Quotas:
        quotas = otherwise
        try:
            async with asyncio.timeout(_WAIT_S):
                answer = await self._tenants.GetQuotas(pb.GetQuotasRequest(tenant_id=tenant_id))
            quotas = from_message(answer.quotas)
        except (KvplaneError, TimeoutError, OSError):
            pass
        finally:
            del self._asking[tenant_id]
        if len(self._known) >= _MAX_TENANTS:
            self._known.clear()
        self._known[tenant_id] = (self._clock.monotonic(), quotas)
        return quotas


def from_message(message: pb.Quotas) -> Quotas:
    """Return the values; absent ones are no limit."""
    soft, hard = (
        Limits(**{name: getattr(limits, name) for name in _NAMES})
        for limits in (message.soft, message.hard)
    )
    return Quotas(soft=soft, hard=hard)
