"""How many leases tenants may have at once, where a transaction can look it up."""

from typing import Final

from kvplane.client.quotas import NoQuotas, QuotaSource
from kvplane.kernel.limits import NO_QUOTAS, Quotas

_MAX_TENANTS: Final = 10_000


class Limits:
    """What the tenant service has said, as of the last `learn` of each tenant."""

    def __init__(self, quotas: QuotaSource) -> None:
        self._quotas = quotas
        self._nobody = isinstance(quotas, NoQuotas)
        self._leases: dict[str, int] = {}

    def leases(self, tenant_id: str) -> int | None:
        """Return the most live leases of a tenant, 0 for any number, None when not known."""
        return 0 if self._nobody else self._leases.get(tenant_id)

    async def learn(self, tenant_id: str) -> Quotas:
        """Return a tenant's limits, and know them from now on. Never raises."""
        if self._nobody:
            return NO_QUOTAS
        quotas = await self._quotas.of(tenant_id)
        if len(self._leases) >= _MAX_TENANTS:
            self._leases.clear()
        self._leases[tenant_id] = quotas.hard.live_leases
        return quotas
