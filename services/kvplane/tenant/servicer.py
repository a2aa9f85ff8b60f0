"""TenantService of kvplane.api.tenant.v1, over the wire or called directly."""

from typing import Any

from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.api.tenant.v1 import tenant_pb2_grpc
from kvplane.kernel import validate
from kvplane.tenant import codec
from kvplane.tenant.service import TenantService


class TenantServicer(tenant_pb2_grpc.TenantServiceServicer):
    """For operators and the gateway, not for tenants; errors are kvplane.kernel.errors."""

    def __init__(self, service: TenantService) -> None:
        self._service = service

    async def CreateTenant(
        self, request: pb.CreateTenantRequest, context: Any = None
    ) -> pb.CreateTenantResponse:
        """Make a tenant."""
        tenant_id = validate.tenant_id("tenant_id", request.tenant_id)
        display_name = codec.display_name(request.display_name)
        tenant = await self._service.create(tenant_id, display_name)
        return pb.CreateTenantResponse(tenant=codec.tenant_message(tenant))

    async def GetTenant(
        self, request: pb.GetTenantRequest, context: Any = None
    ) -> pb.GetTenantResponse:
        """Return a tenant."""
        tenant = await self._service.get(validate.tenant_id("tenant_id", request.tenant_id))
        return pb.GetTenantResponse(tenant=codec.tenant_message(tenant))

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any = None
    ) -> pb.ListTenantsResponse:
        """Return a page of tenants, by id."""
        size = validate.page_size(request.page_size)
        # One more than asked for tells whether there is another page.
        page = await self._service.list_tenants(codec.after(request.page_token), size + 1)
        return pb.ListTenantsResponse(
            tenants=[codec.tenant_message(tenant) for tenant in page[:size]],
            next_page_token=codec.page_token(page[size - 1]) if len(page) > size else "",
        )

    async def CreateApiKey(
        self, request: pb.CreateApiKeyRequest, context: Any = None
    ) -> pb.CreateApiKeyResponse:
        """Make a key and show its secret, once."""
        key, secret = await self._service.create_key(codec.key_order(request))
        return pb.CreateApiKeyResponse(api_key=codec.key_message(key), secret=secret)

    async def ListApiKeys(
        self, request: pb.ListApiKeysRequest, context: Any = None
    ) -> pb.ListApiKeysResponse:
        """Return a tenant's keys, or those of workers and operators."""
        keys = await self._service.list_keys(codec.whose_keys(request.tenant_id))
        return pb.ListApiKeysResponse(api_keys=[codec.key_message(key) for key in keys])

    async def RevokeApiKey(
        self, request: pb.RevokeApiKeyRequest, context: Any = None
    ) -> pb.RevokeApiKeyResponse:
        """Revoke a key."""
        key = await self._service.revoke_key(codec.key_id(request.key_id))
        return pb.RevokeApiKeyResponse(api_key=codec.key_message(key))

    async def ResolveApiKey(
        self, request: pb.ResolveApiKeyRequest, context: Any = None
    ) -> pb.ResolveApiKeyResponse:
        """Say whose key it is, and what it is good for."""
        return codec.resolved_message(await self._service.resolve(request.secret))

    async def GetQuotas(
        self, request: pb.GetQuotasRequest, context: Any = None
    ) -> pb.GetQuotasResponse:
        """Return a tenant's limits."""
        quotas = await self._service.quotas(validate.tenant_id("tenant_id", request.tenant_id))
        return pb.GetQuotasResponse(quotas=codec.quotas_message(quotas))

    async def SetQuotas(
        self, request: pb.SetQuotasRequest, context: Any = None
    ) -> pb.SetQuotasResponse:
        """Change some of a tenant's limits."""
        tenant_id = validate.tenant_id("tenant_id", request.tenant_id)
        soft = codec.soft_changes(request.quotas.soft)
        hard = codec.changes("quotas.hard", request.quotas.hard)
        quotas = await self._service.set_quotas(tenant_id, soft, hard)
        return pb.SetQuotasResponse(quotas=codec.quotas_message(quotas))

    async def RotateCacheSalt(
        self, request: pb.RotateCacheSaltRequest, context: Any = None
    ) -> pb.RotateCacheSaltResponse:
        """Give a tenant a new, empty space in the engines' caches."""
        tenant = await self._service.rotate_salt(validate.tenant_id("tenant_id", request.tenant_id))
        return pb.RotateCacheSaltResponse(tenant=codec.tenant_message(tenant))
