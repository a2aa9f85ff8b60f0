"""The processes that have the gateway in them; it needs more packages than the services."""

import json
import sys

import structlog
from sqlalchemy import make_url

from kvplane import client
from kvplane.cli.banner import dev_banner
from kvplane.cli.compose import PORTS, Assembly, Peers
from kvplane.client.quotas import QuotaBook
from kvplane.db.database import Database
from kvplane.gateway import main as gateway_main
from kvplane.gateway.config import GatewayConfig, static_workers_from_json
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import InvalidField
from kvplane.runtime.settings import Settings, WrongSettings, config_of


def gateway_config(settings: Settings) -> GatewayConfig:
    """Return the gateway's settings. Raises WrongSettings."""
    section = settings.gateway
    try:
        workers = static_workers_from_json(json.dumps(section.static_workers))
    except InvalidField as error:
        raise WrongSettings([f"gateway.{error.message}"]) from None
    return config_of(
        GatewayConfig,
        "gateway",
        section,
        static_workers=workers,
        upstream_api_key=section.upstream_api_key.get_secret_value(),
        auth=settings.auth.mode,
        auth_cache_s=settings.auth.key_cache_s,
        auth_stale_s=settings.auth.key_stale_s,
        internal_token=settings.auth.internal_token.get_secret_value(),
    )


class GatewayProcess:
    """The gateway alone."""

    def __init__(self, settings: Settings) -> None:
        peers = Peers(settings)
        self._settings = settings.gateway
        self._part = gateway_main.build(
            peers.routing(),
            peers.workers(),
            peers.sessions(),
            peers.leases(),
            gateway_config(settings),
            tenants=peers.tenants(),
        )

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        host = self._settings.host
        port = await self._part.start(host, self._settings.port)
        structlog.get_logger().info("listening", http=f"{host}:{port}")

    async def drain(self) -> None:
        """Finish the requests under way and end."""
        await self._part.stop()
        await client.close_channels()


class DevProcess:
    """Everything in one process: the services call each other directly."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        made = Assembly(settings, clock, Database(settings.database.url, clock))
        tenants = made.tenant()
        quotas = QuotaBook(tenants, clock)
        leases = made.lease(quotas)
        sessions = made.session(leases, quotas)
        made.audit()
        routing, workers = made.routing(leases, sessions)
        self._settings = settings
        self.grpc = made.process(tenants, PORTS["dev"])
        self._gateway = gateway_main.build(
            routing, workers, sessions, leases, gateway_config(settings), tenants=tenants
        )

    async def start(self) -> None:
        """Listen. Raises OSError when a port is taken."""
        await self.grpc.start()
        port = await self._gateway.start(self._settings.gateway.host, self._settings.gateway.port)
        sys.stdout.write(
            dev_banner(
                grpc=f"{self._settings.grpc.host}:{self.grpc.port}",
                status=f"{self._settings.grpc.host}:{self.grpc.status_port}",
                gateway=f"{self._settings.gateway.host}:{port}",
                database=make_url(self._settings.database.url).render_as_string(),
            )
        )
        sys.stdout.flush()

    async def drain(self) -> None:
        """Finish the requests under way, then the calls, and end."""
        await self._gateway.stop()
        await self.grpc.drain()
