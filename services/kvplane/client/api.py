"""What each service offers, one method an RPC: message in, message out.

A servicer called directly and a `kvplane.client` over the wire both fit these, so one
process can hold all services and call them without a network. Errors are
`kvplane.kernel.errors`, in both cases. Bound a call with `asyncio.timeout`.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from kvplane.api.audit.v1 import audit_pb2 as audit
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant


class LeaseApi(Protocol):
    """LeaseService of kvplane.api.lease.v1; the proto says what each call means."""

    async def ReportOwnership(
        self, request: lease.ReportOwnershipRequest, /
    ) -> lease.ReportOwnershipResponse:
        """See the proto."""
        ...

    async def WithdrawOwnership(
        self, request: lease.WithdrawOwnershipRequest, /
    ) -> lease.WithdrawOwnershipResponse:
        """See the proto."""
        ...

    async def GetOwnership(
        self, request: lease.GetOwnershipRequest, /
    ) -> lease.GetOwnershipResponse:
        """See the proto."""
        ...

    async def ListOwnerships(
        self, request: lease.ListOwnershipsRequest, /
    ) -> lease.ListOwnershipsResponse:
        """See the proto."""
        ...

    async def GrantLease(self, request: lease.GrantLeaseRequest, /) -> lease.GrantLeaseResponse:
        """See the proto."""
        ...

    async def BeginRead(self, request: lease.BeginReadRequest, /) -> lease.BeginReadResponse:
        """See the proto."""
        ...

    async def RenewLeases(self, request: lease.RenewLeasesRequest, /) -> lease.RenewLeasesResponse:
        """See the proto."""
        ...

    async def ReleaseLeases(
        self, request: lease.ReleaseLeasesRequest, /
    ) -> lease.ReleaseLeasesResponse:
        """See the proto."""
        ...

    async def RevokeLease(self, request: lease.RevokeLeaseRequest, /) -> lease.RevokeLeaseResponse:
        """See the proto."""
        ...

    async def GetLease(self, request: lease.GetLeaseRequest, /) -> lease.GetLeaseResponse:
        """See the proto."""
        ...

    async def ListLeases(self, request: lease.ListLeasesRequest, /) -> lease.ListLeasesResponse:
        """See the proto."""
        ...

    async def ExtendHold(self, request: lease.ExtendHoldRequest, /) -> lease.ExtendHoldResponse:
        """See the proto."""
        ...

    async def FreeSession(self, request: lease.FreeSessionRequest, /) -> lease.FreeSessionResponse:
        """See the proto."""
        ...

    async def GetUsage(self, request: lease.GetUsageRequest, /) -> lease.GetUsageResponse:
        """See the proto."""
        ...

    async def EndWorkerEpoch(
        self, request: lease.EndWorkerEpochRequest, /
    ) -> lease.EndWorkerEpochResponse:
        """See the proto."""
        ...

    def Connect(
        self, requests: AsyncIterator[lease.ConnectRequest], /
    ) -> AsyncIterator[lease.ConnectResponse]:
        """See the proto."""
        ...


class RoutingApi(Protocol):
    """RoutingService of kvplane.api.routing.v1; the proto says what each call means."""

    async def Route(self, request: routing.RouteRequest, /) -> routing.RouteResponse:
        """See the proto."""
        ...

    async def Complete(self, request: routing.CompleteRequest, /) -> routing.CompleteResponse:
        """See the proto."""
        ...


class WorkerApi(Protocol):
    """WorkerService of kvplane.api.routing.v1; the proto says what each call means."""

    async def RegisterWorker(
        self, request: routing.RegisterWorkerRequest, /
    ) -> routing.RegisterWorkerResponse:
        """See the proto."""
        ...

    async def Heartbeat(self, request: routing.HeartbeatRequest, /) -> routing.HeartbeatResponse:
        """See the proto."""
        ...

    async def DrainWorker(
        self, request: routing.DrainWorkerRequest, /
    ) -> routing.DrainWorkerResponse:
        """See the proto."""
        ...

    async def DeregisterWorker(
        self, request: routing.DeregisterWorkerRequest, /
    ) -> routing.DeregisterWorkerResponse:
        """See the proto."""
        ...

    async def GetWorker(self, request: routing.GetWorkerRequest, /) -> routing.GetWorkerResponse:
        """See the proto."""
        ...

    async def ListWorkers(
        self, request: routing.ListWorkersRequest, /
    ) -> routing.ListWorkersResponse:
        """See the proto."""
        ...


class SessionApi(Protocol):
    """SessionService of kvplane.api.session.v1; the proto says what each call means."""

    async def CreateSession(
        self, request: session.CreateSessionRequest, /
    ) -> session.CreateSessionResponse:
        """See the proto."""
        ...

    async def GetSession(self, request: session.GetSessionRequest, /) -> session.GetSessionResponse:
        """See the proto."""
        ...

    async def ListSessions(
        self, request: session.ListSessionsRequest, /
    ) -> session.ListSessionsResponse:
        """See the proto."""
        ...

    async def EndSession(self, request: session.EndSessionRequest, /) -> session.EndSessionResponse:
        """See the proto."""
        ...

    def WatchSessions(
        self, request: session.WatchSessionsRequest, /
    ) -> AsyncIterator[session.WatchSessionsResponse]:
        """See the proto."""
        ...

    async def BeginTurn(self, request: session.BeginTurnRequest, /) -> session.BeginTurnResponse:
        """See the proto."""
        ...

    async def CompleteTurn(
        self, request: session.CompleteTurnRequest, /
    ) -> session.CompleteTurnResponse:
        """See the proto."""
        ...

    async def GetUsage(self, request: session.GetUsageRequest, /) -> session.GetUsageResponse:
        """See the proto."""
        ...


class TenantApi(Protocol):
    """TenantService of kvplane.api.tenant.v1; the proto says what each call means."""

    async def CreateTenant(
        self, request: tenant.CreateTenantRequest, /
    ) -> tenant.CreateTenantResponse:
        """See the proto."""
        ...

    async def GetTenant(self, request: tenant.GetTenantRequest, /) -> tenant.GetTenantResponse:
        """See the proto."""
        ...

    async def ListTenants(
        self, request: tenant.ListTenantsRequest, /
    ) -> tenant.ListTenantsResponse:
        """See the proto."""
        ...

    async def CreateApiKey(
        self, request: tenant.CreateApiKeyRequest, /
    ) -> tenant.CreateApiKeyResponse:
        """See the proto."""
        ...

    async def ListApiKeys(
        self, request: tenant.ListApiKeysRequest, /
    ) -> tenant.ListApiKeysResponse:
        """See the proto."""
        ...

    async def RevokeApiKey(
        self, request: tenant.RevokeApiKeyRequest, /
    ) -> tenant.RevokeApiKeyResponse:
        """See the proto."""
        ...

    async def ResolveApiKey(
        self, request: tenant.ResolveApiKeyRequest, /
    ) -> tenant.ResolveApiKeyResponse:
        """See the proto."""
        ...

    async def GetQuotas(self, request: tenant.GetQuotasRequest, /) -> tenant.GetQuotasResponse:
        """See the proto."""
        ...

    async def SetQuotas(self, request: tenant.SetQuotasRequest, /) -> tenant.SetQuotasResponse:
        """See the proto."""
        ...

    async def RotateCacheSalt(
        self, request: tenant.RotateCacheSaltRequest, /
    ) -> tenant.RotateCacheSaltResponse:
        """See the proto."""
        ...


class AuditApi(Protocol):
    """AuditService of kvplane.api.audit.v1; the proto says what each call means."""

    async def ListAuditEvents(
        self, request: audit.ListAuditEventsRequest, /
    ) -> audit.ListAuditEventsResponse:
        """See the proto."""
        ...
