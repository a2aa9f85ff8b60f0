"""Services without a database, for what surrounds every call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvplane.api.lease.v1 import lease_pb2, lease_pb2_grpc
from kvplane.api.session.v1 import session_pb2, session_pb2_grpc
from kvplane.api.tenant.v1 import tenant_pb2
from kvplane.kernel.context import Caller, caller
from kvplane.kernel.errors import Unauthenticated


class Leases(lease_pb2_grpc.LeaseServiceServicer):
    """GetLease does what the test says; Connect echoes Hello as Welcome."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.behaviour: Callable[[], Any] = lambda: None
        self.ended: list[str] = []

    async def GetLease(self, request, context=None):
        self.callers.append(caller())
        answer = self.behaviour()
        if asyncio.iscoroutine(answer):
            await answer
        return lease_pb2.GetLeaseResponse(lease=lease_pb2.Lease(lease_id=request.lease_id))

    async def ReportOwnership(self, request, context=None):
        self.callers.append(caller())
        return lease_pb2.ReportOwnershipResponse()

    async def Connect(
        self, requests: AsyncIterator[lease_pb2.ConnectRequest], context=None
    ) -> AsyncIterator[lease_pb2.ConnectResponse]:
        self.callers.append(caller())
        try:
            async for request in requests:
                answer = self.behaviour()
                if asyncio.iscoroutine(answer):
                    await answer
                assert request.HasField("hello")
                yield lease_pb2.ConnectResponse(welcome=lease_pb2.Welcome(anchor=1))
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("closed")


class Sessions(session_pb2_grpc.SessionServiceServicer):
    """WatchSessions says who asks and goes on for ever."""

    async def WatchSessions(self, request, context=None):
        session = session_pb2.Session(tenant_id=caller().tenant_id)
        yield session_pb2.WatchSessionsResponse(session=session)
        await asyncio.Event().wait()


class Tenants:
    """Knows keys: a tenant's of a name, else the whole answer. Counts how often it is asked."""

    def __init__(self) -> None:
        self.keys: dict[str, str | tenant_pb2.ResolveApiKeyResponse] = {
            "kvp_a": "acme",
            "kvp_b": "bolt",
            "kvp_w": tenant_pb2.ResolveApiKeyResponse(role=tenant_pb2.ROLE_WORKER, worker_id="w1"),
            "kvp_o": tenant_pb2.ResolveApiKeyResponse(role=tenant_pb2.ROLE_OPERATOR),
        }
        self.asked = 0
        self.behaviour: Callable[[], Any] = lambda: None

    async def ResolveApiKey(self, request, /):
        self.asked += 1
        answer = self.behaviour()
        if asyncio.iscoroutine(answer):
            await answer
        known = self.keys.get(request.secret)
        if known is None:
            raise Unauthenticated("nobody's key")
        made = tenant_pb2.ResolveApiKeyResponse(key_id=f"id-{request.secret}")
        if isinstance(known, str):
            made.tenant_id = known
        else:
            made.MergeFrom(known)
        return made
