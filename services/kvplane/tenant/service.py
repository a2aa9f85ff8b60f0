"""Use cases of tenants, their API keys and their limits."""

import hmac
import logging

from kvplane.kernel.context import DEFAULT_TENANT
from kvplane.kernel.errors import KvplaneError, Unauthenticated
from kvplane.kernel.ids import Ids
from kvplane.kernel.limits import Quotas
from kvplane.tenant import domain
from kvplane.tenant.domain import ApiKey, Changes, FoundKey, KeyOrder, Tenant
from kvplane.tenant.store import TenantStore

_log = logging.getLogger(__name__)


class TenantService:
    """For operators, but for `resolve`. Requests are valid when they get here."""

    def __init__(self, store: TenantStore, ids: Ids) -> None:
        self._store = store
        self._ids = ids
        self._has_default = False

    async def prepare(self) -> None:
        """Make the default tenant, or leave it to the first call when the database is away."""
        try:
            await self._ensure_default()
        except KvplaneError as error:
            _log.warning("the default tenant is not made yet: %s", error.message)

    async def create(self, tenant_id: str, display_name: str) -> Tenant:
        """Make a tenant. Raises AlreadyExists."""
        await self._ensure_default()
        return await self._store.create(tenant_id, display_name, domain.new_salt())

    async def get(self, tenant_id: str) -> Tenant:
        """Raise NotFound for an unknown one."""
        await self._ensure_default()
        return await self._store.get(tenant_id)

    async def list_tenants(self, after: str, limit: int) -> list[Tenant]:
        """Return tenants by id, after the given one."""
        await self._ensure_default()
        return await self._store.list_tenants(after, limit)

    async def rotate_salt(self, tenant_id: str) -> Tenant:
        """Give the tenant a new, empty space in the engines' caches. Raises NotFound."""
        await self._ensure_default()
        return await self._store.set_salt(tenant_id, domain.new_salt())

    async def create_key(self, order: KeyOrder) -> tuple[ApiKey, str]:
        """Return a new key and its secret, which nobody can see again.

        Raises NotFound for an unknown tenant, QuotaExceeded.
        """
        await self._ensure_default()
        secret = domain.new_secret()
        return await self._store.create_key(order, self._ids.new("key"), secret), secret

    async def list_keys(self, tenant_id: str) -> list[ApiKey]:
        """Return a tenant's keys, ended ones too. Raises NotFound."""
        await self._ensure_default()
        return await self._store.list_keys(tenant_id)

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key. Raises NotFound."""
        return await self._store.revoke_key(key_id)

    async def resolve(self, secret: str) -> FoundKey:
        """Return the key of a secret. Raises Unauthenticated.

        The same hash, query and comparison for every secret, whatever it looks like; an
        expired key, a revoked one and none at all get one answer.
        """
        wanted = domain.secret_hash(secret)
        found = await self._store.find_key(wanted)
        same = hmac.compare_digest(found.key.secret_hash if found else bytes(len(wanted)), wanted)
        if found is None or not same or not found.key.valid_at(found.now_us):
            raise Unauthenticated("the API key is not valid")
        return found

    async def quotas(self, tenant_id: str) -> Quotas:
        """Return the tenant's limits. Raises NotFound."""
        await self._ensure_default()
        return await self._store.quotas(tenant_id)

    async def set_quotas(self, tenant_id: str, soft: Changes, hard: Changes) -> Quotas:
        """Change these limits and leave the others. Raises NotFound, InvalidField."""
        await self._ensure_default()
        return await self._store.change_quotas(tenant_id, soft, hard)

    async def _ensure_default(self) -> None:
        if not self._has_default:
            await self._store.ensure(DEFAULT_TENANT, "Default", domain.new_salt())
            self._has_default = True
