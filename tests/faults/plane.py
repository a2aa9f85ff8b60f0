"""A whole kvplane as separate processes, with a proxy on every way between two of them.

gateway-1,2 -> routing, session, lease -> PostgreSQL
            -> prefill, decode-1,2 (reference engines: real NIXL reads, under leases)

An engine that has no control plane and reads nothing is the oracle.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from demo.servers import ROOT, Server, free_port, stop_all, wait_for
from e2e.waiting import eventually
from engine.harness import EngineProcess
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import KvplaneClient
from runtime.processes import environment
from sqlalchemy import make_url

from faults.proxy import Links
from faults.shifted import WallClock

MODEL = "reference"
# Seconds. What is held is gone after this, whatever was lost.
DECODE_HOLD = 15.0
PREFILL_HOLD = 6.0
WORKER_TIMEOUT = 4.0
READ_LIMIT = 3.0
ROUTE_BOUND = 4.0
REUSE_BOUND = 4.0
TTL = 4.0
# What a turn may take when nobody has to wait for an engine: Route's bound, and computing on
# a busy machine.
BOUND = ROUTE_BOUND + 6

SETTINGS = {
    "KVPLANE_LOG_FORMAT": "json",
    "KVPLANE_LEASE_TTL_S": str(TTL),
    "KVPLANE_LEASE_MAX_TTL_S": str(TTL),
    "KVPLANE_LEASE_MARGIN_S": "1",
    "KVPLANE_LEASE_SWEEP_INTERVAL_S": "0.5",
    "KVPLANE_LEASE_RESTART_GRACE_S": str(TTL),
    "KVPLANE_ROUTING_HEARTBEAT_INTERVAL_S": "0.5",
    "KVPLANE_ROUTING_WORKER_TIMEOUT_S": str(WORKER_TIMEOUT),
    "KVPLANE_GATEWAY_REUSE_TIMEOUT_S": str(REUSE_BOUND),
    # A busy machine must not pass for an outage.
    "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": str(ROUTE_BOUND),
    "KVPLANE_ROUTING_SESSION_BOUND_S": "1.5",
    "KVPLANE_ROUTING_LEASE_BOUND_S": "1.5",
    "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
}
SERVICES = ("session", "lease", "routing")
GATEWAYS = ("gateway-1", "gateway-2")
LIVE = (lease.OWNERSHIP_STATE_HELD, lease.OWNERSHIP_STATE_LEASED)
ENGINES = {"prefill": "prefill", "decode-1": "decode", "decode-2": "decode"}


class Plane:
    """Start it with `start`, stop it with `stop`. Links are named ``client>service``."""

    def __init__(self, database_url: str, folder: str = "faults") -> None:
        self.folder = ROOT / "build" / "logs" / folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._direct_database = database_url
        self.links = Links()
        self._ports = {name: free_port() for name in (*SERVICES, *GATEWAYS)}
        self.clocks: dict[str, WallClock] = {}
        self.servers: dict[str, Server] = {}
        for name in SERVICES:
            self._add_service(name, name)
        for name in GATEWAYS:
            self._add_service(name, "gateway")
        for name, role in ENGINES.items():
            self._add_engine(name, role)

    def gateway(self, number: int) -> str:
        """Return a gateway's base URL."""
        return self.servers[GATEWAYS[number % len(GATEWAYS)]].url

    def engines(self) -> list[Server]:
        return [self.servers[name] for name in ENGINES]

    def address(self, client: str, service: str) -> str:
        """Return a service's address for a kind of client: a link's."""
        return self.links.open(f"{client}>{service}", ("127.0.0.1", self._ports[service]))

    def _database(self, client: str) -> str:
        url = make_url(self._direct_database)
        if url.get_backend_name() == "sqlite":
            return self._direct_database
        folder = url.query["host"]
        assert isinstance(folder, str)
        socket = Path(folder) / f".s.PGSQL.{url.port or 5432}"
        host, port = self.links.open(f"{client}>postgres", socket).split(":")
        through = url.set(host=host, port=int(port), query={})
        return through.render_as_string(hide_password=False)

    def _clock(self, name: str) -> WallClock:
        clock = self.clocks[name] = WallClock(self.folder / f"{name}.clock")
        return clock

    def _add_service(self, name: str, kind: str) -> None:
        port, status = self._ports[name], free_port()
        env = {**SETTINGS, "KVPLANE_DATABASE_URL": self._database(name)}
        for service in SERVICES:
            if service != kind:
                env[f"KVPLANE_{service.upper()}_ADDRESS"] = self.address(name, service)
        if kind == "gateway":
            env["KVPLANE_GATEWAY_PORT"] = str(port)
            status = port
        else:
            env["KVPLANE_GRPC_PORT"] = str(port)
            env["KVPLANE_GRPC_STATUS_PORT"] = str(status)
        self.servers[name] = Server(
            name,
            self._clock(name).command("kvplane.cli", "serve", kind),
            url=f"http://127.0.0.1:{status}",
            health="/readyz",
            env=environment(**env),
            logs=self.folder,
        )

    def _add_engine(self, name: str, role: str) -> None:
        port = free_port()
        control = ",".join(f"{s}={self.address(name, s)}" for s in ("routing", "lease"))
        command = self._clock(name).command(
            "kvplane.engine",
            f"--role={role}",
            f"--worker-id={name}",
            f"--model={MODEL}",
            f"--port={port}",
            f"--kv-port={free_port()}",
            f"--control-plane={control}",
            f"--decoder-kv-blocks-ttl={DECODE_HOLD}",
            f"--kv-lease-duration={PREFILL_HOLD}",
            f"--read-limit={READ_LIMIT}",
            "--begin-wait=1.5",
            "--grant-wait=1.5",
            "--num-blocks=1024",
            "--debug",
        )
        url = f"http://127.0.0.1:{port}"
        self.servers[name] = Server(name, command, url=url, env=environment(), logs=self.folder)

    def start(self) -> None:
        """Migrate, start everything, wait until it is ready."""
        for server in self.engines():
            server.start()
        migrate = self.clocks["session"].command("kvplane.cli", "migrate", "up")
        env = environment(KVPLANE_DATABASE_URL=self._direct_database)
        subprocess.run(migrate, env=env, capture_output=True, timeout=60, check=True)
        for name in (*SERVICES, *GATEWAYS):
            self.servers[name].start()
        self.oracle = EngineProcess(
            f"--model={MODEL}", "--prefill-us-per-token=0", "--decode-us-per-token=0"
        )
        asyncio.run(self.mend())

    def stop(self) -> None:
        """End everything."""
        self.links.heal()
        stop_all(list(self.servers.values()))
        self.oracle.kill()
        self.links.close()

    async def mend(self) -> None:
        """Undo whatever a test did, and wait until all is well again."""
        self.links.heal()
        for name, server in self.servers.items():
            server.thaw()
            self.clocks[name].set(0.0)
            if not server.alive():
                server.start()
        await asyncio.to_thread(wait_for, list(self.servers.values()), 60)
        for engine in self.engines():
            await debug(engine, "faults", read_delay_s=0, slow_reads_s=0)
        await eventually(self._all_known, 30)

    async def _all_known(self) -> bool:
        async with self.client() as client:
            answer = await client.workers.ListWorkers(routing.ListWorkersRequest())
        ready = {w.worker_id for w in answer.workers if w.state == routing.WORKER_STATE_READY}
        async with httpx.AsyncClient(timeout=10) as http:
            models = [(await http.get(f"{self.servers[g].url}/v1/models")).text for g in GATEWAYS]
        return ready == set(ENGINES) and all(MODEL in known for known in models)

    async def restart(self, name: str) -> None:
        """Start a process that was killed, and wait until it is ready."""
        self.servers[name].start()
        await asyncio.to_thread(wait_for, [self.servers[name]], 60)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[KvplaneClient]:
        """Open a client of the control plane, past the proxies."""
        at = {name: f"127.0.0.1:{self._ports[name]}" for name in SERVICES}
        async with KvplaneClient(at["routing"], session=at["session"], lease=at["lease"]) as client:
            yield client

    async def nothing_held(self, seconds: float) -> None:
        """Wait until no engine uses or holds a block."""

        async def none() -> bool:
            states = await asyncio.gather(*(debug(engine) for engine in self.engines()))
            left = {
                engine.name: {"blocks": state["blocks"], "held": state["held"]}
                for engine, state in zip(self.engines(), states, strict=True)
                if state["blocks"]["in_use"]
            }
            self.left = left
            return not left

        try:
            await eventually(none, seconds)
        except AssertionError:
            async with self.client() as client:
                known = await client.leases.ListOwnerships(
                    lease.ListOwnershipsRequest(states=LIVE, page_size=1000)
                )
            raise AssertionError(
                f"still held after {seconds:g} s: {self.left}; the lease service has {known}"
            ) from None


async def debug(engine: Server, path: str = "state", **body: Any) -> dict[str, Any]:
    """Ask an engine's debug face."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=10) as http:
        if body:
            answer = await http.post(f"/debug/{path}", json=body)
        else:
            answer = await http.get(f"/debug/{path}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def links(clients: Sequence[str], *services: str) -> list[str]:
    """Name the links of some clients to some services."""
    return [f"{client}>{service}" for client in clients for service in services]
