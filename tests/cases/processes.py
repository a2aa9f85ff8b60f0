"""The product as processes: `kvplane dev` or services of their own, and reference engines."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from demo.servers import Server, free_port
from e2e.waiting import eventually
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import KvplaneClient
from kvplane.kernel.clock import SystemClock

# Two busy cores for all of this: what is bounded is bounded wider here.
PATIENT = {
    "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": "5",
    "KVPLANE_ROUTING_SESSION_BOUND_S": "2",
    "KVPLANE_ROUTING_LEASE_BOUND_S": "2",
    "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
    "KVPLANE_LOG_FORMAT": "json",
}
CLOCK = SystemClock()
MODEL = "toy"
KINDS = ("session", "lease", "routing", "gateway")
CLI = (sys.executable, "-m", "kvplane.cli")


class Dev(Server):
    """One `kvplane dev`: everything behind one gRPC port, and a gateway."""

    def __init__(
        self, folder: Path, database: str = "", name: str = "dev", **settings: str
    ) -> None:
        """Settings are environment variables without their prefix."""
        port, http, status = free_port(), free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.status = f"http://127.0.0.1:{status}"
        self.database = database or f"sqlite:///{folder}/{name}.db"
        super().__init__(
            name,
            [
                *(*CLI, "dev", "--database", self.database),
                *("--port", str(port), "--gateway-port", str(http)),
            ],
            url=f"http://127.0.0.1:{http}",
            health="/readyz",
            env={**variables(settings), "KVPLANE_GRPC_STATUS_PORT": str(status)},
            logs=folder,
        )

    def addresses(self, _kind: str) -> str:
        """Return where any of the services is."""
        return self.address

    def gateway(self, _number: int = 1) -> str:
        """Return the base URL for clients."""
        return self.url

    @property
    def control_plane(self) -> str:
        """What engines are told."""
        return self.address


class Services:
    """Session, lease, routing and gateway as processes, so many replicas of each.

    Replica n of one knows only replicas n of the others, so that each turn goes through one
    row of them.
    """

    def __init__(self, folder: Path, database: str, replicas: int, **settings: str) -> None:
        self.numbers = range(1, replicas + 1)
        self.database = database
        self.env = {**variables(settings), "KVPLANE_DATABASE_URL": database}
        self.ports = {f"{kind}-{n}": free_port() for n in self.numbers for kind in KINDS}
        self.servers = {name: self._server(name, folder) for name in self.ports}

    def addresses(self, kind: str) -> str:
        """Return where a service's replicas are."""
        return ",".join(f"127.0.0.1:{self.ports[f'{kind}-{n}']}" for n in self.numbers)

    def gateway(self, number: int = 1) -> str:
        """Return the base URL for clients."""
        return self.servers[f"gateway-{number}"].url

    @property
    def control_plane(self) -> str:
        """What engines are told: all replicas."""
        return f"routing={self.addresses('routing')},lease={self.addresses('lease')}"

    def row(self, number: int) -> list[Server]:
        """Return one replica of each."""
        return [self.servers[f"{kind}-{number}"] for kind in KINDS]

    def kind(self, kind: str) -> list[Server]:
        """Return all replicas of one."""
        return [self.servers[f"{kind}-{n}"] for n in self.numbers]

    def start(self) -> None:
        """Migrate, and start all; they are ready a little later."""
        done = kvplane("migrate", "up", **self.env)
        assert done.returncode == 0, done.stderr
        for server in self.servers.values():
            server.start()

    def _server(self, name: str, folder: Path) -> Server:
        kind, _, number = name.partition("-")
        own = f"127.0.0.1:{self.ports[name]}"
        env = {
            **self.env,
            **{
                f"KVPLANE_{peer.upper()}_ADDRESS": f"127.0.0.1:{self.ports[f'{peer}-{number}']}"
                for peer in KINDS[:3]
            },
        }
        url = f"http://{own}"
        if kind == "gateway":
            env["KVPLANE_GATEWAY_PORT"] = str(self.ports[name])
        else:
            status = free_port()
            env["KVPLANE_GRPC_PORT"] = str(self.ports[name])
            env["KVPLANE_GRPC_STATUS_PORT"] = str(status)
            url = f"http://127.0.0.1:{status}"
        return Server(name, [*CLI, "serve", kind], url=url, health="/readyz", env=env, logs=folder)


def variables(settings: dict[str, str]) -> dict[str, str]:
    """Return settings as environment variables, over those that all have."""
    return {**PATIENT, **{f"KVPLANE_{name}": value for name, value in settings.items()}}


def kvplane(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [*CLI, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Engine(Server):
    """A reference engine, quick unless told otherwise."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        folder: Path,
        control_plane: str,
        *arguments: str,
        model: str = MODEL,
        program: tuple[str, ...] = ("-m", "kvplane.engine"),
    ) -> None:
        port = free_port()
        command = [
            *(sys.executable, *program, "--worker-id", worker_id, "--role", role),
            *("--port", str(port), "--model", model, "--control-plane", control_plane, "--debug"),
            *("--prefill-us-per-token", "0", "--decode-us-per-token", "50"),
            # A busy machine: who may read is asked with patience.
            *("--begin-wait", "3", "--grant-wait", "3", "--read-limit", "20", *arguments),
        ]
        super().__init__(worker_id, command, url=f"http://127.0.0.1:{port}", logs=folder)

    def state(self) -> dict[str, Any]:
        """Return what it holds and has counted."""
        found: dict[str, Any] = httpx.get(f"{self.url}/debug/state", timeout=10).json()
        return found

    def reads(self) -> int:
        """Return how many NIXL reads it has made."""
        return int(self.state()["stats"]["nixl_reads"])

    def held(self) -> list[dict[str, Any]]:
        """Return what it has pinned."""
        found: list[dict[str, Any]] = self.state()["held"]
        return found


@contextlib.contextmanager
def nowhere() -> Iterator[str]:
    """A URL where connecting takes for ever: the listener's queue is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def registered(plane: "Dev | Services", *worker_ids: str, seconds: float = 30) -> None:
    """Wait until the registry knows them, and each gateway a model."""
    async with client(plane) as kv:

        async def all_there() -> bool:
            ready = routing.ListWorkersRequest(states=[routing.WORKER_STATE_READY])
            found = {one.worker_id for one in (await kv.workers.ListWorkers(ready)).workers}
            return found >= set(worker_ids)

        await eventually(all_there, seconds)


def client(plane: "Dev | Services", tenant: str | None = None) -> KvplaneClient:
    """Return a client of the control plane, to be used with `async with`."""
    return KvplaneClient(
        plane.addresses("routing"),
        session=plane.addresses("session"),
        lease=plane.addresses("lease"),
        tenant=tenant,
    )
