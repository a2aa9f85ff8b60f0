"""Twelve reference engines behind two of each service, on PostgreSQL.

toy      3 prefill, 4 decode   under leases
narrow   1 prefill, 1 decode   under leases: little memory, slow tokens, a gate before the decode
plain    1 prefill, 2 decode   engines without our lease logic: the gateway is the holder
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo.servers import ROOT, Server, free_port, stop_all, wait_for
from kvplane.engine.config import ENGINE_VERSION, KV_DTYPE, KV_LAYOUT

from fleet.gate import Gate
from fleet.oracle import BLOCK

TOY, NARROW, PLAIN = "toy", "narrow", "plain"
TOKEN = "the services' own secret"
THRESHOLD = 16
NARROW_BLOCKS = 400
# vLLM declines what runs out within 5 s.
PLAIN_HOLD_S = 16.0
PLAIN_PREFILL_HOLD_S = 12.0

_PLAIN_HOLDS = (
    f"--kv-lease-duration={PLAIN_PREFILL_HOLD_S}",
    f"--decoder-kv-blocks-ttl={PLAIN_HOLD_S}",
)
_ENGINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{f"toy-p{i}": (TOY, "prefill", ()) for i in (1, 2, 3)},
    **{f"toy-d{i}": (TOY, "decode", ()) for i in (1, 2, 3, 4)},
    "narrow-p": (NARROW, "prefill", (f"--num-blocks={NARROW_BLOCKS}",)),
    "narrow-d": (NARROW, "decode", ("--decode-us-per-token=10000",)),
    "plain-p": (PLAIN, "prefill", _PLAIN_HOLDS),
    **{f"plain-d{i}": (PLAIN, "decode", _PLAIN_HOLDS) for i in (1, 2)},
}


class Fleet:
    """Start it with `start`, stop it with `stop`."""

    def __init__(self, database_url: str) -> None:
        self.database_url = database_url
        # Tenant -> API key.
        self.keys: dict[str, str] = {}
        self._logs = ROOT / "build" / "logs" / "fleet"
        self.ports = {
            name: free_port()
            for kind in ("session", "lease", "routing", "gateway")
            for name in (f"{kind}-1", f"{kind}-2")
        }
        self._engine_ports = {name: (free_port(), free_port()) for name in _ENGINES}
        self._gate_port = free_port()
        self.gate = Gate(self._gate_port, self._engine_ports["narrow-d"][0])
        self.services = {name: self._service(name) for name in self.ports}
        self.engines = {name: self._engine(name) for name in _ENGINES}

    def addresses(self, kind: str) -> str:
        """Return ``ip:port,ip:port`` of a service's replicas."""
        return ",".join(f"127.0.0.1:{self.ports[f'{kind}-{n}']}" for n in (1, 2))

    def gateway(self, number: int) -> str:
        """Return a gateway's base URL."""
        return f"http://127.0.0.1:{self.ports[f'gateway-{number}']}"

    def url(self, engine: str) -> str:
        """Return an engine's own URL, before any gate."""
        return f"http://127.0.0.1:{self._engine_ports[engine][0]}"

    @staticmethod
    def names(model: str = "", role: str = "", *, managed: bool | None = None) -> list[str]:
        """Return the names of engines."""
        return [
            name
            for name, (its_model, its_role, _) in _ENGINES.items()
            if model in ("", its_model)
            and role in ("", its_role)
            and managed in (None, its_model != PLAIN)
        ]

    def environment(self) -> dict[str, str]:
        """Return the settings that all services share."""
        return {
            "KVPLANE_DATABASE_URL": self.database_url,
            "KVPLANE_SESSION_ADDRESS": self.addresses("session"),
            "KVPLANE_LEASE_ADDRESS": self.addresses("lease"),
            "KVPLANE_ROUTING_ADDRESS": self.addresses("routing"),
            "KVPLANE_AUTH_MODE": "api_key",
            "KVPLANE_AUTH_INTERNAL_TOKEN": TOKEN,
            "KVPLANE_LOG_FORMAT": "json",
            # Two busy cores for all of this: what is bounded is bounded wider here.
            "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": "8",
            "KVPLANE_GATEWAY_REUSE_TIMEOUT_S": "60",
            "KVPLANE_ROUTING_SESSION_BOUND_S": "3",
            "KVPLANE_ROUTING_LEASE_BOUND_S": "3",
            "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
            "KVPLANE_ROUTING_WORKER_TIMEOUT_S": "20",
            # The tests look at what has ended.
            "KVPLANE_LEASE_RETENTION_S": "3600",
        }

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a `kvplane` command as an operator would."""
        return subprocess.run(
            [sys.executable, "-m", "kvplane.cli", *arguments],
            env={**os.environ, **self.environment(), "KVPLANE_TOKEN": TOKEN, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self) -> None:
        """Migrate, start everything, wait until it is ready."""
        migrated = self.command("migrate", "up")
        if migrated.returncode:
            raise RuntimeError(f"migration failed: {migrated.stdout}{migrated.stderr}")
        everything = [*self.services.values(), *self.engines.values()]
        for server in everything:
            server.start()
        wait_for(everything, timeout=240)

    def stop(self) -> None:
        """End everything."""
        stop_all([*self.services.values(), *self.engines.values()])
        self.gate.close()

    def _service(self, name: str) -> Server:
        kind = name.partition("-")[0]
        env = self.environment()
        url = f"http://127.0.0.1:{self.ports[name]}"
        if kind == "gateway":
            env["KVPLANE_GATEWAY_PORT"] = str(self.ports[name])
            env["KVPLANE_GATEWAY_STATIC_WORKERS"] = json.dumps(self._static_workers())
        else:
            env["KVPLANE_GRPC_PORT"] = str(self.ports[name])
            status = free_port()
            env["KVPLANE_GRPC_STATUS_PORT"] = str(status)
            url = f"http://127.0.0.1:{status}"
        command = [sys.executable, "-m", "kvplane.cli", "serve", kind]
        return Server(name, command, url=url, health="/readyz", env=env, logs=self._logs)

    def _engine(self, name: str) -> Server:
        model, role, options = _ENGINES[name]
        port, kv_port = self._engine_ports[name]
        command = [
            *(sys.executable, "-m", "kvplane.engine", "--debug"),
            *(f"--role={role}", f"--model={model}", f"--port={port}", f"--kv-port={kv_port}"),
            *(f"--block-size={BLOCK}", f"--kv-recompute-threshold={THRESHOLD}"),
            *("--num-blocks=2048", "--prefill-us-per-token=5", "--decode-us-per-token=200"),
            *options,
        ]
        if model != PLAIN:
            plane = f"routing={self.addresses('routing')},lease={self.addresses('lease')}"
            command += [
                *(f"--control-plane={plane}", f"--worker-id={name}"),
                *("--begin-wait=3", "--grant-wait=3", "--read-limit=30"),
            ]
        if name == "narrow-d":
            command.append(f"--url=http://127.0.0.1:{self._gate_port}")
        env = {"KVPLANE_TOKEN": TOKEN}
        return Server(name, command, url=self.url(name), env=env, logs=self._logs)

    def _static_workers(self) -> list[dict[str, Any]]:
        return [
            {
                "worker_id": name,
                "url": self.url(name),
                "role": _ENGINES[name][1],
                "model": PLAIN,
                "revision": "1",
                "block_size": BLOCK,
                "kv_layout": KV_LAYOUT,
                "kv_dtype": KV_DTYPE,
                "engine_version": ENGINE_VERSION,
                "kv_host": "127.0.0.1",
                "kv_port": self._engine_ports[name][1],
                "bidirectional": True,
                "recompute_threshold": THRESHOLD,
                "prefill_hold_s": PLAIN_PREFILL_HOLD_S,
                "decode_hold_s": PLAIN_HOLD_S,
            }
            for name in self.names(PLAIN)
        ]


def logs() -> Path:
    """Where what the tests found out is written."""
    return ROOT / "build" / "fleet"
