"""A whole kvplane as separate processes: PostgreSQL, two replicas of each service, vLLM.

gateway-1 gateway-2 -> routing-1,2 -> session-1,2  lease-1,2 -> PostgreSQL
                    -> prefill, decode (real vLLM with the connector)
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
from demo.build_model import build
from demo.servers import ROOT, Server, free_port, stop_all, wait_for
from demo.vllm_worker import VllmWorker
from kvplane.kernel.clock import SystemClock, sleep_blocking
from postgresql import begin, new_server

MODEL = "tiny"
BLOCK = 32
KV_BYTES_PER_TOKEN = 1024
# A decode holds its blocks so long for the next turn.
HOLD_SECONDS = 15
LEASE_SECONDS = 5
# Longer than a lease: a test freezes an owner until one has ended.
LOST_SECONDS = 12


class Cluster:
    """Start it with `start`, stop it with `stop`; every part can be killed and brought back."""

    def __init__(self, database_url: str, logs: Path, *, template: str | None = None) -> None:
        self.database_url = database_url
        self.logs = logs
        self.ports = {
            name: free_port()
            for kind in ("session", "lease", "routing", "gateway")
            for name in (f"{kind}-1", f"{kind}-2")
        }
        self.services = {name: self._service(name) for name in self.ports}
        self.prefill = self._worker("prefill", "kv_producer", prefix_caching=False)
        self.decode = self._worker("decode", "kv_consumer")

    def addresses(self, kind: str) -> str:
        """Return ``ip:port,ip:port`` of a service's replicas."""
        return ",".join(f"127.0.0.1:{self.ports[f'{kind}-{n}']}" for n in (1, 2))

    def gateway(self, number: int = 1) -> str:
        """Return a gateway's base URL."""
        return f"http://127.0.0.1:{self.ports[f'gateway-{number}']}"

    def environment(self) -> dict[str, str]:
        """Return the settings that all services share."""
        return {
            "KVPLANE_DATABASE_URL": self.database_url,
            "KVPLANE_SESSION_ADDRESS": self.addresses("session"),
            "KVPLANE_LEASE_ADDRESS": self.addresses("lease"),
            "KVPLANE_ROUTING_ADDRESS": self.addresses("routing"),
            "KVPLANE_LOG_FORMAT": "json",
            # Two busy cores for all of this: what is bounded is bounded wider here.
            "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": "5",
            "KVPLANE_ROUTING_SESSION_BOUND_S": "2",
            "KVPLANE_ROUTING_LEASE_BOUND_S": "2",
            "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
            # A request that reads may queue for longer than a hold.
            "KVPLANE_GATEWAY_REUSE_TIMEOUT_S": "60",
            "KVPLANE_LEASE_TTL_S": str(LEASE_SECONDS),
            "KVPLANE_ROUTING_WORKER_TIMEOUT_S": str(LOST_SECONDS),
        }

    def _service(self, name: str) -> Server:
        kind = name.partition("-")[0]
        env = self.environment()
        url = f"http://127.0.0.1:{self.ports[name]}"
        if kind == "gateway":
            env["KVPLANE_GATEWAY_PORT"] = str(self.ports[name])
        else:
            env["KVPLANE_GRPC_PORT"] = str(self.ports[name])
            status = free_port()
            env["KVPLANE_GRPC_STATUS_PORT"] = str(status)
            url = f"http://127.0.0.1:{status}"
        return Server(name, command(kind), url=url, health="/readyz", env=env, logs=self.logs)

    def _worker(self, name: str, kv_role: str, *, prefix_caching: bool = True) -> Server:
        port = free_port()
        control = {"routing": self.addresses("routing"), "lease": self.addresses("lease")}
        return VllmWorker(
            name,
            build("tiny"),
            port,
            free_port(),
            kv_role,
            served_name=MODEL,
            kv_cache_bytes=32 << 20,
            prefix_caching=prefix_caching,
            # A test brings a reasoning model's template. A long prompt takes several steps.
            arguments=["--trust-request-chat-template", "--max-num-batched-tokens", "128"],
            connector_module="kvplane_vllm.connector",
            connector_config={
                "decoder_kv_blocks_ttl": HOLD_SECONDS,
                "kvplane": {
                    "control_plane": control,
                    "worker_id": name,
                    "url": f"http://127.0.0.1:{port}",
                    "begin_wait_seconds": 3,
                    "grant_wait_seconds": 3,
                    "lease_ttl_seconds": LEASE_SECONDS,
                },
            },
        ).server(self.logs)

    def start(self) -> None:
        """Migrate, start everything, wait until it is ready."""
        # The engines take longest.
        self.prefill.start()
        self.decode.start()
        migrate = [sys.executable, "-m", "kvplane.cli", "migrate", "up"]
        done = subprocess.run(
            migrate,
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"migration failed: {done.stdout}{done.stderr}")
        for service in self.services.values():
            service.start()
        wait_for([*self.services.values(), self.prefill, self.decode], timeout=420)
        for number in (1, 2):
            wait_for_model(self.gateway(number))

    def stop(self) -> None:
        """End everything."""
        stop_all([*self.services.values(), self.prefill, self.decode])

    def both(self, kind: str) -> list[Server]:
        """Return both replicas of a service."""
        return [self.services[f"{kind}-1"], self.services[f"{kind}-2"]]


def command(kind: str) -> list[str]:
    """Return what starts a service."""
    return [sys.executable, "-m", "kvplane.cli", "serve", kind]


def wait_for_model(gateway: str, seconds: float = 30) -> None:
    """Wait until a gateway knows an engine that serves the model."""
    clock = SystemClock()
    end = clock.monotonic() + seconds
    while MODEL not in (answer := httpx.get(f"{gateway}/v1/models", timeout=5).text):
        if clock.monotonic() > end:
            raise RuntimeError(f"{gateway} knows no engine: {answer}")
        sleep_blocking(0.2)


class Postgres:
    """A PostgreSQL server of one's own, which can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self._server = new_server(folder)
        self.url = self._server.get_uri()

    def stop(self) -> None:
        """End the server; clients lose their connections."""
        self._server.stop()

    def start(self) -> None:
        """Start it again, at the same address."""
        begin(self._server)
        assert self._server.get_uri() == self.url

    def close(self) -> None:
        """Stop it for good."""
        self._server.cleanup()


def default_logs() -> Path:
    """Where the logs of the tests go."""
    return ROOT / "build" / "logs" / "e2e"
