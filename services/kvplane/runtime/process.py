"""The life of a process: start, be ready, serve, drain at SIGTERM."""

import asyncio
import signal
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from kvplane.client import close_channels
from kvplane.db.database import Database
from kvplane.db.schema import schema_problem
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, Unavailable
from kvplane.runtime.auth import Authenticator
from kvplane.runtime.interceptors import CallInterceptor
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.readiness import Readiness
from kvplane.runtime.server import GrpcServer
from kvplane.runtime.settings import Settings
from kvplane.runtime.status_http import StatusHttp
from kvplane.runtime.telemetry import server_interceptors


class Part(Protocol):
    """Something with background work."""

    async def start(self) -> None:
        """Begin the background work."""
        ...

    async def stop(self) -> None:
        """End it."""
        ...


class Process(Protocol):
    """What `run` runs."""

    async def start(self) -> None:
        """Listen. Raises OSError when a port is taken."""
        ...

    async def drain(self) -> None:
        """Finish what is under way and end."""
        ...


class GrpcProcess:
    """Services behind one gRPC port, over one database."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        database: Database,
        authenticator: Authenticator,
        servicers: dict[str, Any],
        parts: Sequence[Part],
        port: int,
        metrics: RpcMetrics | None = None,
    ) -> None:
        """`servicers` by service name; `port` is the service's default port.

        Raises InvalidField for a wrong file of the settings `tls`.
        """
        self._settings = settings.grpc
        self._database = database
        self._parts = list(parts)
        self._started: list[Part] = []
        self._default_port = port
        self._schema_problem: str | None = "the database's schema is not checked yet"
        self._readiness = Readiness({"database": self._check_database}, clock, self._on_ready)
        self._status = StatusHttp(self._readiness)
        calls = CallInterceptor(
            authenticator,
            metrics or RpcMetrics(),
            clock,
            default_deadline=settings.grpc.default_deadline_s,
            gate=self._gate,
        )
        self._server = GrpcServer(
            servicers, calls, server_interceptors(settings.telemetry), settings.tls.files()
        )
        self.port = 0
        self.status_port = 0

    @property
    def ready(self) -> bool:
        """The database is there and its schema is right."""
        return self._readiness.ready

    async def start(self) -> None:
        """Listen; answer calls as soon as the schema is right. Raises OSError."""
        host, port = self._settings.host, self._settings.port
        self.port = await self._server.start(host, self._default_port if port is None else port)
        wanted = self._settings.status_port
        if wanted is None:
            wanted = self.port + 1000 if port != 0 else 0
        try:
            self.status_port = await self._status.start(host, wanted)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{wanted} (grpc.status_port)") from error
        log = structlog.get_logger()
        log.info("listening", grpc=f"{host}:{self.port}", status=f"{host}:{self.status_port}")
        await self._readiness.start()

    async def drain(self) -> None:
        """Be not ready, finish calls within the grace, end background work, close."""
        await self._readiness.drain()
        await self._server.stop(self._settings.drain_s)
        for part in reversed(self._started):
            await part.stop()
        await self._status.stop()
        await self._database.close()
        await close_channels()

    async def _check_database(self) -> str | None:
        problem = await schema_problem(self._database)  # raises when the database is away
        self._schema_problem = problem
        if problem is None:
            for part in self._parts[len(self._started) :]:
                await part.start()
                self._started.append(part)
        return problem

    async def _on_ready(self, ready: bool) -> None:
        await self._server.set_serving(ready)

    def _gate(self) -> KvplaneError | None:
        if self._schema_problem is None:
            return None
        return Unavailable(self._schema_problem, retry_after=1.0)


async def run(process: Process, name: str) -> None:
    """Run until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Raises OSError when a port is taken.
    """
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        log.info("draining", process=name, signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await process.start()
        log.info("serving", process=name)
        await stop.wait()
    finally:
        await process.drain()
    log.info("stopped", process=name)
