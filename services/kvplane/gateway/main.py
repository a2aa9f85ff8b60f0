"""Puts the gateway together."""

import asyncio

from aiohttp import web

from kvplane.client.api import LeaseApi, RoutingApi, SessionApi, TenantApi, WorkerApi
from kvplane.gateway.app import Gateway
from kvplane.gateway.auth import Tenants
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.edge import Edge
from kvplane.gateway.giveback import GiveBack
from kvplane.gateway.legs import Legs
from kvplane.gateway.metrics import Metrics
from kvplane.gateway.plain import PlainLeases
from kvplane.gateway.plan import Planner
from kvplane.gateway.static import StaticWorkers
from kvplane.gateway.tasks import Background
from kvplane.gateway.turn import Parts
from kvplane.gateway.upstream import Upstream
from kvplane.gateway.workers import WorkerWatch
from kvplane.kernel.clock import Clock, SystemClock


class GatewayPart:
    """A gateway: `start` it, `stop` it."""

    def __init__(
        self,
        routing: RoutingApi,
        workers: WorkerApi,
        sessions: SessionApi,
        leases: LeaseApi,
        config: GatewayConfig,
        tenants: TenantApi | None,
        clock: Clock,
    ) -> None:
        self._config = config
        self._upstream = Upstream(config)
        self._background = Background()
        self.metrics = Metrics()
        self._watch = WorkerWatch(workers, clock, config)
        self._static = StaticWorkers(workers, self._upstream, clock, config)
        give_back = GiveBack(leases, self._watch, self._background, clock)
        planner = Planner(
            routing,
            give_back,
            self._watch,
            self._upstream,
            self._background,
            self.metrics,
            clock,
            config,
        )
        plain = PlainLeases(leases, self._upstream, self._watch, give_back, clock, config)
        parts = Parts(
            config=config,
            clock=clock,
            routing=routing,
            watch=self._watch,
            planner=planner,
            legs=Legs(self._upstream, self._watch, config),
            plain=plain,
            give_back=give_back,
            metrics=self.metrics,
            background=self._background,
        )
        self._gateway = Gateway(parts, sessions, Tenants(tenants, clock, config))
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0. Raises OSError when it is taken."""
        config = self._config
        await self._upstream.start()
        await self._watch.start()
        await self._static.start()
        self._runner = web.AppRunner(
            self._gateway.app(),
            # A client that leaves ends its request at once.
            handler_cancellation=True,
            shutdown_timeout=config.drain_s,
        )
        await self._runner.setup()
        try:
            await Edge(self._runner, host, port, config).start()
        except OSError:
            await self.stop()
            raise
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Take no new requests, finish those under way within `drain_s`, close."""
        self._gateway.draining = True
        if self._runner is not None:
            await self._runner.cleanup()
        await self._background.drain(min(self._config.drain_s, self._config.complete_timeout_s))
        await asyncio.gather(self._static.stop(), self._watch.stop())
        await self._upstream.stop()


def build(
    routing: RoutingApi,
    workers: WorkerApi,
    sessions: SessionApi,
    leases: LeaseApi,
    config: GatewayConfig | None = None,
    tenants: TenantApi | None = None,
    clock: Clock | None = None,
) -> GatewayPart:
    """Return a gateway over these services, not started.

    `tenants` is needed for auth "api_key". Raises ValueError without it.
    """
    return GatewayPart(
        routing,
        workers,
        sessions,
        leases,
        config or GatewayConfig(),
        tenants,
        clock or SystemClock(),
    )
