"""What storage must do for tenants."""

from typing import Protocol

from kvplane.kernel.limits import Quotas
from kvplane.tenant.domain import ApiKey, Changes, FoundKey, KeyOrder, Tenant


class TenantStore(Protocol):
    """Each method is one atomic transition; any of them raises Unavailable."""

    async def ensure(self, tenant_id: str, display_name: str, salt: str) -> None:
        """Make the tenant if there is none."""
        ...

    async def create(self, tenant_id: str, display_name: str, salt: str) -> Tenant:
        """Make a tenant. Raises AlreadyExists."""
        ...

    async def get(self, tenant_id: str) -> Tenant:
        """Raise NotFound for an unknown one."""
        ...

    async def list_tenants(self, after: str, limit: int) -> list[Tenant]:
        """Return tenants by id, after the given one."""
        ...

    async def set_salt(self, tenant_id: str, salt: str) -> Tenant:
        """Replace the tenant's salt. Raises NotFound."""
        ...

    async def create_key(self, order: KeyOrder, key_id: str, secret: str) -> ApiKey:
        """Store a key's hash. Raises NotFound for an unknown tenant, QuotaExceeded."""
        ...

    async def list_keys(self, tenant_id: str) -> list[ApiKey]:
        """Return the keys, oldest first: all that work, the newest of those that ended.

        Raises NotFound for an unknown tenant.
        """
        ...

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key; a revoked one stays as it is. Raises NotFound."""
        ...

    async def find_key(self, secret_hash: bytes) -> FoundKey | None:
        """Return the key with that hash, valid or not."""
        ...

    async def quotas(self, tenant_id: str) -> Quotas:
        """Return the tenant's limits. Raises NotFound."""
        ...

    async def change_quotas(self, tenant_id: str, soft: Changes, hard: Changes) -> Quotas:
        """Change these limits and leave the others. Raises NotFound, InvalidField."""
        ...
