"""A gRPC server with all that our services share."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvplane.api.audit.v1 import audit_pb2, audit_pb2_grpc
from kvplane.api.lease.v1 import lease_pb2, lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2, routing_pb2_grpc
from kvplane.api.session.v1 import session_pb2, session_pb2_grpc
from kvplane.api.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from kvplane.client.tls import TlsFiles
from kvplane.runtime.interceptors import CallInterceptor
from kvplane.runtime.tls import server_credentials

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default C core closes the connection of a client that pings more often than
    # every 300 s (ENHANCE_YOUR_CALM). Clients may ping every 5 s, with calls or without.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Our own pings: a dead client is noticed, and its streams ended, within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The one that counts: without it, a ping may stay unanswered for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Two servers on one port would share its calls silently.
    ("grpc.so_reuseport", 0),
)

_Add = Callable[[Any, grpc.aio.Server], None]
_SERVICES: Final[dict[str, tuple[Any, _Add]]] = {
    "LeaseService": (lease_pb2, lease_pb2_grpc.add_LeaseServiceServicer_to_server),
    "SessionService": (session_pb2, session_pb2_grpc.add_SessionServiceServicer_to_server),
    "RoutingService": (routing_pb2, routing_pb2_grpc.add_RoutingServiceServicer_to_server),
    "WorkerService": (routing_pb2, routing_pb2_grpc.add_WorkerServiceServicer_to_server),
    "TenantService": (tenant_pb2, tenant_pb2_grpc.add_TenantServiceServicer_to_server),
    "AuditService": (audit_pb2, audit_pb2_grpc.add_AuditServiceServicer_to_server),
}


class GrpcServer:
    """Our servicers, health, reflection, and the drain."""

    def __init__(
        self,
        servicers: dict[str, Any],
        calls: CallInterceptor,
        before: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: TlsFiles | None = None,
    ) -> None:
        """`servicers` by the short name of their service, such as ``LeaseService``.

        `before` are interceptors around ours, such as tracing. With `tls` clients must
        speak TLS and show a certificate. Raises InvalidField for a wrong file.
        """
        self._calls = calls
        self._credentials = server_credentials(tls) if tls else None
        self._server = grpc.aio.server(interceptors=[*before, calls], options=OPTIONS)
        self.names: list[str] = []
        for short, servicer in servicers.items():
            module, add = _SERVICES[short]
            add(servicer, self._server)
            self.names.append(module.DESCRIPTOR.services_by_name[short].full_name)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        listed = [*self.names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(listed, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen, not yet as SERVING, and return the port, a free one for 0.

        Raises OSError when the port is taken.
        """
        await self.set_serving(False)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks, for the server as a whole and for each service."""
        kind = health_pb2.HealthCheckResponse
        state = kind.SERVING if serving else kind.NOT_SERVING
        for name in ["", *self.names]:
            await self._health.set(name, state)

    async def stop(self, grace: float) -> None:
        """Take no new calls, end streams, give unary calls `grace` seconds to finish."""
        await self._health.enter_graceful_shutdown()
        self._calls.end_streams()
        await self._server.stop(grace)
