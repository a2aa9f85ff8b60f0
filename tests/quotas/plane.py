"""Two whole control planes with a gateway each, over one database, in front of engines."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from gateway.bench import MODEL, Engine
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.api.tenant.v1 import tenant_pb2
from routing.fakes import PREFILL, worker_message
from wire.plane import Plane, running_on


@dataclass(frozen=True)
class Said:
    """What a client got."""

    status: int
    headers: Any
    body: dict[str, Any]

    @property
    def session(self) -> str:
        return self.headers.get("X-Kvplane-Session-Id", "")

    @property
    def decision(self) -> str:
        return self.headers["X-Kvplane-Decision"]


@dataclass
class Town:
    """The planes, their engines, and tenants with keys. Time passes only by `pass_time`."""

    planes: list[Plane]
    http: aiohttp.ClientSession
    engines: dict[str, Engine] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    async def add_engine(self, worker_id: str, **fields: Any) -> Engine:
        engine = await Engine(worker_id, 5600 + len(self.engines)).start()
        self.engines[worker_id] = engine
        worker = worker_message(
            worker_id,
            url=engine.url,
            kv_port=engine.kv_port,
            compatibility={"model": MODEL},
            **fields,
        )
        request = routing_pb2.RegisterWorkerRequest(worker=worker, instance_id="i1")
        await self.planes[0].call("WorkerService/RegisterWorker", request)
        return engine

    async def pair(self) -> tuple[Engine, Engine]:
        return await self.add_engine("p0", **PREFILL), await self.add_engine("d0")

    async def tenant(self, name: str, *, soft: Any = None, hard: Any = None) -> None:
        """Make a tenant with a key, and set its limits."""
        create = tenant_pb2.CreateTenantRequest(tenant_id=name)
        await self.planes[0].call("TenantService/CreateTenant", create)
        key = await self.planes[0].call(
            "TenantService/CreateApiKey", tenant_pb2.CreateApiKeyRequest(tenant_id=name)
        )
        self.keys[name] = key.secret
        await self.limit(name, soft=soft, hard=hard)

    async def limit(self, name: str, *, soft: Any = None, hard: Any = None) -> None:
        quotas = tenant_pb2.Quotas(
            soft=tenant_pb2.Limits(**soft or {}), hard=tenant_pb2.Limits(**hard or {})
        )
        request = tenant_pb2.SetQuotasRequest(tenant_id=name, quotas=quotas)
        await self.planes[0].call("TenantService/SetQuotas", request)

    async def pass_time(self, seconds: float) -> None:
        """Move both clocks; the workers live on."""
        while seconds > 0:
            for plane in self.planes:
                plane.clock.advance(min(seconds, 2.0))
            seconds -= 2.0
            beats = [
                routing_pb2.WorkerBeat(worker_id=worker_id, epoch=1) for worker_id in self.engines
            ]
            request = routing_pb2.HeartbeatRequest(beats=beats)
            answer = await self.planes[0].call("WorkerService/Heartbeat", request)
            assert all(result.known for result in answer.results)

    async def say(self, tenant: str, text: str = "hi", *, at: int = 0, session: str = "") -> Said:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        if session:
            headers["X-Session-Id"] = session
        url = f"{self.planes[at].gateway_url}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            return Said(response.status, response.headers, json.loads(await response.read()))

    async def usage(self, tenant: str, at: int = 0) -> session_pb2.GetUsageResponse:
        return await self.planes[at].call(
            "SessionService/GetUsage", session_pb2.GetUsageRequest(), tenant=tenant
        )

    async def sessions(self, tenant: str) -> list[session_pb2.Session]:
        answer = await self.planes[0].call(
            "SessionService/ListSessions", session_pb2.ListSessionsRequest(), tenant=tenant
        )
        return list(answer.sessions)

    async def without_control_plane(self) -> float:
        """Requests that went past Route, at any gateway."""
        total = 0.0
        for plane in self.planes:
            async with self.http.get(f"{plane.gateway_url}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if line.startswith("kvplane_gateway_without_control_plane_total "):
                        total += float(line.split()[1])
        return total


@asynccontextmanager
async def town(url: str, file: Path) -> AsyncIterator[Town]:
    """Start everything."""
    async with (
        running_on(url, file, gateway_auth="api_key") as one,
        running_on(url, file, gateway_auth="api_key") as two,
        aiohttp.ClientSession() as http,
    ):
        made = Town([one, two], http)
        try:
            yield made
        finally:
            for engine in made.engines.values():
                await engine.stop()
