"""Typed async clients of the services: the same interface over the wire or in one process.

async with KvplaneClient("127.0.0.1:7700") as kvplane:
    answer = await kvplane.routing.Route(RouteRequest(...))
"""

from typing import Any, Self

from kvplane.api.audit.v1 import audit_pb2 as audit
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.client import kv_params
from kvplane.client.api import (
    AuditApi,
    LeaseApi,
    RoutingApi,
    SessionApi,
    TenantApi,
    WorkerApi,
)
from kvplane.client.channels import Channels
from kvplane.client.connect import (
    DEFAULT_TIMEOUT,
    audit_api,
    close_channels,
    lease_api,
    routing_api,
    session_api,
    tenant_api,
    worker_api,
)
from kvplane.client.tls import TlsFiles

__all__ = [
    "AuditApi",
    "Channels",
    "KvplaneClient",
    "LeaseApi",
    "RoutingApi",
    "SessionApi",
    "TenantApi",
    "TlsFiles",
    "WorkerApi",
    "audit",
    "audit_api",
    "close_channels",
    "kv_params",
    "lease",
    "lease_api",
    "routing",
    "routing_api",
    "session",
    "session_api",
    "tenant",
    "tenant_api",
    "worker_api",
]


class KvplaneClient:
    """All services of one kvplane. Use it as an async context manager."""

    routing: RoutingApi
    workers: WorkerApi
    sessions: SessionApi
    leases: LeaseApi
    tenants: TenantApi
    audit: AuditApi

    def __init__(
        self,
        address: str,
        *,
        session: str | None = None,
        lease: str | None = None,
        tenant: str | None = None,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        tls: TlsFiles | None = None,
    ) -> None:
        """Name the servers; nothing is opened yet.

        `address` (``host:port``) serves everything, as `kvplane dev` does. Where services
        run alone, it is the routing service's, `session` the session and tenant
        service's, `lease` the lease service's. `timeout` is each call's, in seconds.
        `tls`: the servers speak TLS, and want a certificate.
        """
        self._address = address
        self._session = session or address
        self._lease = lease or address
        self._channels = Channels()
        self._options: dict[str, Any] = {
            "tenant": tenant,
            "token": token,
            "timeout": timeout,
            "channels": self._channels,
            "tls": tls,
        }

    async def __aenter__(self) -> Self:
        """Open lazily: the first call connects. Raises InvalidField("address")."""
        self.routing = routing_api(self._address, **self._options)
        self.workers = worker_api(self._address, **self._options)
        self.sessions = session_api(self._session, **self._options)
        self.leases = lease_api(self._lease, **self._options)
        self.tenants = tenant_api(self._session, **self._options)
        self.audit = audit_api(self._session, **self._options)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channels.close()
