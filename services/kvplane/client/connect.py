"""The services over the wire, behind the same interfaces as in one process.

Every call has a deadline (`timeout` in seconds), carries the caller of
`kvplane.kernel.context` and, where OpenTelemetry is loaded, the trace. Calls that may
be sent twice are sent again when the service is unavailable, within the deadline.
Errors are those of `kvplane.kernel.errors`.
"""

import random
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import grpc

from kvplane.api.audit.v1 import audit_pb2, audit_pb2_grpc
from kvplane.api.lease.v1 import lease_pb2, lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2, routing_pb2_grpc
from kvplane.api.session.v1 import session_pb2, session_pb2_grpc
from kvplane.api.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from kvplane.client.api import (
    AuditApi,
    LeaseApi,
    RoutingApi,
    SessionApi,
    TenantApi,
    WorkerApi,
)
from kvplane.client.channels import SHARED, Channels
from kvplane.client.errors import from_rpc_error
from kvplane.client.tls import TlsFiles
from kvplane.kernel.clock import Clock, SystemClock
from kvplane.kernel.context import caller
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.validate import header

DEFAULT_TIMEOUT: Final = 5.0

# The protos promise that these change nothing more when they come twice.
IDEMPOTENT: Final = frozenset(
    {
        "ReportOwnership", "WithdrawOwnership", "GetOwnership", "ListOwnerships",
        "GrantLease", "BeginRead", "RenewLeases", "ReleaseLeases", "GetLease", "ListLeases",
        "FreeSession", "EndWorkerEpoch",
        "Route", "Complete",
        "RegisterWorker", "Heartbeat", "DrainWorker", "GetWorker", "ListWorkers",
        "CreateSession", "GetSession", "ListSessions", "EndSession", "BeginTurn",
        "CompleteTurn",
        "GetTenant", "ListTenants", "ListApiKeys", "ResolveApiKey", "GetQuotas", "SetQuotas",
        "GetUsage", "ListAuditEvents",
    }
)  # fmt: skip

_FIRST_BACKOFF: Final = 0.05
_MAX_BACKOFF: Final = 0.5
# In an actor's name, which may be that of a certificate; the rest travels as %XX.
_AS_IT_IS: Final = ":/@+, "
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]")

_Metadata = tuple[tuple[str, str], ...]
_Api_co = TypeVar("_Api_co", covariant=True)


@dataclass(frozen=True)
class _Settings:
    tenant: str
    token: str
    timeout: float
    encrypted: bool
    clock: Clock = field(default_factory=SystemClock)

    def metadata(self) -> _Metadata:
        who = caller()
        items = [("x-kvplane-tenant", self.tenant or who.tenant_id)]
        if who.actor != "local":
            items.append(("x-kvplane-actor", quote(who.actor, safe=_AS_IT_IS)))
        if who.request_id:
            items.append(("x-request-id", _NOT_ASCII.sub("?", who.request_id)))
        if self.token:
            items.append(("authorization", f"Bearer {self.token}"))
        # Only a process that traces has it loaded; else it would be memory for nothing.
        if "opentelemetry.trace" in sys.modules:
            from opentelemetry import propagate  # noqa: PLC0415

            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            items.extend((key.lower(), value) for key, value in carrier.items())
        return tuple(items)


class _Unary:
    """One RPC: request in, response out."""

    def __init__(self, name: str, call: Any, settings: _Settings) -> None:
        self._call = call
        self._settings = settings
        self._again = name in IDEMPOTENT

    async def __call__(self, request: Any, /) -> Any:
        clock = self._settings.clock
        metadata = self._settings.metadata()
        end = clock.monotonic() + self._settings.timeout
        backoff = _FIRST_BACKOFF
        while True:
            try:
                return await self._call(
                    request, timeout=max(end - clock.monotonic(), 0.001), metadata=metadata
                )
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure, encrypted=self._settings.encrypted)
                pause = self._pause(failure, error, backoff)
                if pause is None or clock.monotonic() + pause >= end:
                    raise error from failure
            await clock.sleep(pause)
            backoff = min(backoff * 2, _MAX_BACKOFF)

    def _pause(
        self, failure: grpc.aio.AioRpcError, error: KvplaneError, backoff: float
    ) -> float | None:
        """Return the seconds before the next try, None to give up."""
        if not self._again or failure.code() is not grpc.StatusCode.UNAVAILABLE:
            return None
        if error.reason != "UNAVAILABLE":  # NO_WORKER: an answer, not an outage
            return None
        return max(backoff * random.uniform(0.5, 1.0), error.retry_after or 0.0)  # noqa: S311


class _Stream:
    """One streaming RPC. It has no deadline: it lasts until either side ends it."""

    def __init__(self, call: Any, settings: _Settings) -> None:
        self._call = call
        self._settings = settings

    async def __call__(self, request: Any, /) -> AsyncIterator[Any]:
        call = self._call(request, metadata=self._settings.metadata())
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as failure:
            raise from_rpc_error(failure, encrypted=self._settings.encrypted) from failure
        finally:
            call.cancel()


class _Remote:
    """A service as its API protocol describes it."""

    def __init__(self, descriptor: Any, stub: Any, settings: _Settings) -> None:
        for method in descriptor.methods:
            call = getattr(stub, method.name)
            if method.server_streaming:
                setattr(self, method.name, _Stream(call, settings))
            else:
                setattr(self, method.name, _Unary(method.name, call, settings))


class _Connect(Protocol[_Api_co]):
    def __call__(
        self,
        address: str,
        *,
        tenant: str | None = None,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        channels: Channels = SHARED,
        tls: TlsFiles | None = None,
    ) -> _Api_co:
        """Return the service at `address`. Call it inside a running event loop.

        `tenant` fixes the tenant; without it each call is for the current caller's. With
        `tls` the connection is encrypted, and both sides show a certificate.
        Raises InvalidField for a wrong address, tenant, token or file.
        """
        ...


def _service(module: Any, name: str, stub: Any) -> Any:
    def connect(
        address: str,
        *,
        tenant: str | None = None,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        channels: Channels = SHARED,
        tls: TlsFiles | None = None,
    ) -> Any:
        descriptor = module.DESCRIPTOR.services_by_name[name]
        settings = _Settings(
            header("tenant", tenant or ""),
            header("token", token or ""),
            timeout,
            encrypted=tls is not None,
        )
        return _Remote(descriptor, stub(channels.get(address, tls)), settings)

    return connect


lease_api: Final[_Connect[LeaseApi]] = _service(
    lease_pb2, "LeaseService", lease_pb2_grpc.LeaseServiceStub
)
session_api: Final[_Connect[SessionApi]] = _service(
    session_pb2, "SessionService", session_pb2_grpc.SessionServiceStub
)
routing_api: Final[_Connect[RoutingApi]] = _service(
    routing_pb2, "RoutingService", routing_pb2_grpc.RoutingServiceStub
)
worker_api: Final[_Connect[WorkerApi]] = _service(
    routing_pb2, "WorkerService", routing_pb2_grpc.WorkerServiceStub
)
tenant_api: Final[_Connect[TenantApi]] = _service(
    tenant_pb2, "TenantService", tenant_pb2_grpc.TenantServiceStub
)
audit_api: Final[_Connect[AuditApi]] = _service(
    audit_pb2, "AuditService", audit_pb2_grpc.AuditServiceStub
)


async def close_channels() -> None:
    """Close the running loop's shared channels."""
    await SHARED.close()
