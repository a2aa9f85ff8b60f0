"""What the registry needs of the lease service, bounded in time."""

import asyncio

from kvplane.api.lease.v1 import lease_pb2
from kvplane.client.api import LeaseApi
from kvplane.kernel.context import Caller, caller, set_caller
from kvplane.kernel.errors import KvplaneError, Unavailable


class LeaseBlocks:
    """Blocks of sessions, by way of the lease service."""

    def __init__(self, leases: LeaseApi, bound_s: float) -> None:
        self._leases = leases
        self._bound_s = bound_s

    async def held(self, session_id: str) -> list[str]:
        """Return the caller's live ownerships of a session; none when the service is away."""
        states = (lease_pb2.OWNERSHIP_STATE_HELD, lease_pb2.OWNERSHIP_STATE_LEASED)
        request = lease_pb2.ListOwnershipsRequest(session_id=session_id, states=states)
        try:
            async with asyncio.timeout(self._bound_s):
                answer = await self._leases.ListOwnerships(request)
        except (KvplaneError, TimeoutError):
            return []
        return [ownership.ownership_id for ownership in answer.ownerships]

    async def free(self, tenant_id: str, session_id: str) -> None:
        """Free what a session holds. Raises KvplaneError when that is not known to be done."""
        set_caller(Caller(tenant_id=tenant_id, request_id=caller().request_id))
        request = lease_pb2.FreeSessionRequest(session_id=session_id)
        try:
            async with asyncio.timeout(self._bound_s):
                await self._leases.FreeSession(request)
        except TimeoutError as error:
            raise Unavailable("the lease service does not answer") from error
