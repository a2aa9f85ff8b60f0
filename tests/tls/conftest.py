"""Real servers and clients over mutual TLS."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from kvplane.client import Channels
from kvplane.client.keys import Keys
from kvplane.client.tls import Pem, TlsFiles
from kvplane.kernel.clock import SystemClock
from kvplane.runtime.auth import ApiKeys
from kvplane.runtime.interceptors import CallInterceptor
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.server import GrpcServer
from prometheus_client import CollectorRegistry
from runtime.fakes import Leases, Tenants

from tls.authority import Authority, write


@pytest.fixture(scope="session")
def authority() -> Authority:
    """The CA that the servers believe."""
    return Authority()


@pytest.fixture(scope="session")
def stranger() -> Authority:
    """Another CA."""
    return Authority()


class Server:
    """A lease service that remembers who called; it wants a key or a certificate."""

    def __init__(self, folder: Path, pem: Pem | None) -> None:
        self.folder = folder
        self.leases = Leases()
        clock = SystemClock()
        calls = CallInterceptor(
            ApiKeys(Keys(Tenants(), clock), "", again_s=0.05),
            RpcMetrics(CollectorRegistry()),
            clock,
            default_deadline=10.0,
        )
        files = write(folder, pem) if pem else None
        self._server = GrpcServer({"LeaseService": self.leases}, calls, tls=files)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "Server":
        self.port = await self._server.start("127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        await self._server.stop(0)


@pytest.fixture
async def serve(tmp_path: Path, authority: Authority) -> AsyncIterator[Callable[..., Any]]:
    """Starts servers, over TLS unless they have `pem` None."""
    started: list[Server] = []

    async def go(pem: Pem | str | None = "a service's") -> Server:
        if isinstance(pem, str):
            pem = authority.issue("kvplane:service/lease")
        server = Server(tmp_path / f"server{len(started)}", pem)
        started.append(server)
        return await server.start()

    yield go
    for server in started:
        await server.stop()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    made = Channels()
    yield made
    await made.close()


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., TlsFiles]:
    """Writes a client's files."""
    written = 0

    def go(pem: Pem, server_name: str = "") -> TlsFiles:
        nonlocal written
        written += 1
        return write(tmp_path / f"client{written}", pem, server_name)

    return go
