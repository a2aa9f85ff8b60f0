"""What storage must do for tenants."""

from typing import Protocol

from kvplane.tenant.domain import ApiKey, Tenant


class TenantStore(Protocol):
    """Each method is one atomic transition; any of them raises Unavailable."""

    async def ensure(self, tenant_id: str, display_name: str) -> None:
        """Make the tenant if there is none."""
        ...

    async def create(self, tenant_id: str, display_name: str) -> Tenant:
        """Make a tenant. Raises AlreadyExists."""
        ...

    async def get(self, tenant_id: str) -> Tenant:
        """Raise NotFound for an unknown one."""
        ...

    async def list_tenants(self, after: str, limit: int) -> list[Tenant]:
        """Return tenants by id, after the given one."""
        ...

    async def create_key(self, tenant_id: str, key_id: str, secret: str) -> ApiKey:
        """Store a key's hash. Raises NotFound for an unknown tenant."""
        ...

    async def list_keys(self, tenant_id: str) -> list[ApiKey]:
        """Return a tenant's keys, oldest first. Raises NotFound for an unknown tenant."""
        ...

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key; a revoked one stays as it is. Raises NotFound."""
        ...

    async def find_key(self, secret_hash: bytes) -> ApiKey | None:
        """Return the key with that hash, revoked or not."""
        ...
