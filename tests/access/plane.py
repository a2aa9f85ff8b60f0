"""A whole control plane that asks for credentials, and one of every kind of them."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.cli.compose import Assembly, authenticator
from kvplane.client.quotas import QuotaBook
from kvplane.db.database import Database
from kvplane.gateway import main as gateway_main
from kvplane.gateway.config import GatewayConfig
from kvplane.kernel.clock import FakeClock
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.process import GrpcProcess
from kvplane.runtime.settings import load
from prometheus_client import CollectorRegistry
from wire.plane import OPTIONS, Plane

TOKEN: Final = "the services' own secret"


class Guarded(Plane):
    """Its calls are our own services', unless another credential is given; "" is none."""

    async def call(
        self,
        name: str,
        request: Message | bytes,
        *,
        tenant: str = "default",
        credential: str = TOKEN,
        **options: Any,
    ) -> Any:
        metadata = (("authorization", f"Bearer {credential}"),) if credential else ()
        return await super().call(name, request, tenant=tenant, metadata=metadata, **options)

    async def key(self, role: Any, *, ttl: int = 0, **whose: str) -> tenant.CreateApiKeyResponse:
        """Make a key; `ttl` in seconds, 0 for ever."""
        request = tenant.CreateApiKeyRequest(role=role, **whose)
        if ttl:
            request.ttl.CopyFrom(Duration(seconds=ttl))
        made: tenant.CreateApiKeyResponse = await self.call("TenantService/CreateApiKey", request)
        return made

    async def worker_key(self, worker_id: str) -> str:
        return (await self.key(tenant.ROLE_WORKER, worker_id=worker_id)).secret


@dataclass(frozen=True)
class Credentials:
    """What may stand behind ``Bearer``."""

    expired: str
    revoked: str
    # Of a tenant that has nothing here.
    stranger: str
    operator: str
    # Of workers that nobody here is: one is registered, the other unknown.
    another_worker: str
    unknown_worker: str


@asynccontextmanager
async def guarded(template: Path, folder: Path, *, gateway: bool = True) -> AsyncIterator[Guarded]:
    """Start everything with `auth.mode` api_key over a copy of a migrated SQLite file."""
    file = folder / "plane.db"
    shutil.copy(template, file)
    settings = load(
        database={"url": f"sqlite:///{file}"},
        grpc={"port": 0, "status_port": 0, "drain_s": 0},
        auth={"mode": "api_key", "internal_token": TOKEN},
    )
    clock = FakeClock()
    made = Assembly(settings, clock, Database(settings.database.url, clock))
    tenants = made.tenant()
    quotas = QuotaBook(tenants, clock)
    leases = made.lease(quotas)
    sessions = made.session(leases, quotas)
    made.audit()
    routing, workers = made.routing(leases, sessions)
    process = GrpcProcess(
        settings,
        clock,
        made.database,
        authenticator(settings, tenants, clock),
        made.servicers,
        made.parts,
        0,
        RpcMetrics(CollectorRegistry()),
    )
    config = GatewayConfig(auth="api_key", internal_token=TOKEN, drain_s=0, refresh_interval_s=0.05)
    front = gateway_main.build(routing, workers, sessions, leases, config, tenants=tenants)
    await process.start()
    port = await front.start("127.0.0.1", 0) if gateway else 0
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{process.port}", options=OPTIONS)
    yield Guarded(file, channel, f"http://127.0.0.1:{port}", clock)
    await channel.close()
    if gateway:
        await front.stop()
    await process.drain()


async def issue(plane: Guarded) -> Credentials:
    """Make one of each. Time passes while one of them expires."""
    await plane.call("TenantService/CreateTenant", tenant.CreateTenantRequest(tenant_id="stranger"))
    expired = await plane.key(tenant.ROLE_OPERATOR, ttl=60)
    plane.clock.advance(61)
    revoked = await plane.key(tenant.ROLE_OPERATOR)
    await plane.call(
        "TenantService/RevokeApiKey", tenant.RevokeApiKeyRequest(key_id=revoked.api_key.key_id)
    )
    return Credentials(
        expired=expired.secret,
        revoked=revoked.secret,
        stranger=(await plane.key(tenant.ROLE_TENANT, tenant_id="stranger")).secret,
        operator=(await plane.key(tenant.ROLE_OPERATOR)).secret,
        another_worker=await plane.worker_key("p-bystander"),
        unknown_worker=await plane.worker_key("nobody"),
    )
