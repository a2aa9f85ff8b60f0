import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import structlog
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.client import Channels, lease_api, session_api
from kvplane.client.api import LeaseApi, SessionApi
from kvplane.kernel.clock import Clock, SystemClock
from kvplane.runtime import logs
from kvplane.runtime.auth import Authenticator, TrustedNetwork
from kvplane.runtime.interceptors import CallInterceptor
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.server import GrpcServer
from prometheus_client import CollectorRegistry
from runtime.fakes import Leases, Sessions


class Lines:
    """Log lines, parsed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False

    def all(self, message: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["message"] == message]


@pytest.fixture
def lines():
    """What is logged, as JSON."""
    written = Lines()
    logs.configure("info", "json", written)
    yield written
    structlog.reset_defaults()


@dataclass
class Running:
    """A server on a port of its own, and clients of it."""

    server: GrpcServer
    calls: CallInterceptor
    servicer: Leases
    registry: CollectorRegistry
    port: int
    channels: Channels = field(default_factory=Channels)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def leases(self, **options: Any) -> LeaseApi:
        return lease_api(self.address, channels=self.channels, **options)

    def sessions(self, **options: Any) -> SessionApi:
        return session_api(self.address, channels=self.channels, **options)

    def stub(self) -> Any:
        """The generated stub, as a foreign client has it."""
        return lease_pb2_grpc.LeaseServiceStub(self.channels.get(self.address))

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


Start = Callable[..., Any]


@pytest.fixture
async def start(lines: Lines) -> AsyncIterator[Start]:
    """Starts servers."""
    running: list[Running] = []

    async def go(
        authenticator: Authenticator | None = None,
        *,
        default_deadline: float = 30.0,
        before: tuple[grpc.aio.ServerInterceptor, ...] = (),
        clock: Clock | None = None,
        **options: Any,
    ) -> Running:
        registry = CollectorRegistry()
        calls = CallInterceptor(
            authenticator or TrustedNetwork(),
            RpcMetrics(registry),
            clock or SystemClock(),
            default_deadline=default_deadline,
            **options,
        )
        servicer = Leases()
        servicers = {"LeaseService": servicer, "SessionService": Sessions()}
        server = GrpcServer(servicers, calls, before)
        port = await server.start("127.0.0.1", 0)
        running.append(Running(server, calls, servicer, registry, port))
        return running[-1]

    yield go
    for one in running:
        await one.channels.close()
        await one.server.stop(0)
