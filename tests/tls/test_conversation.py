"""A whole kvplane over mutual TLS, each part a process with a certificate, and a conversation."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo.servers import Server, free_port, stop_all, wait_for
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.client import KvplaneClient, TlsFiles
from kvplane.kernel.clock import SystemClock, sleep_blocking

from tls.authority import Authority, write

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SERVICES = ("session", "lease", "routing")
# All of it shares a few busy cores here, so what is bounded is bounded wider.
PATIENT = {
    "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": "8",
    "KVPLANE_ROUTING_SESSION_BOUND_S": "3",
    "KVPLANE_ROUTING_LEASE_BOUND_S": "3",
    "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
    "KVPLANE_ROUTING_WORKER_TIMEOUT_S": "20",
}


def variables(files: TlsFiles) -> dict[str, str]:
    return {
        "KVPLANE_TLS_CA_FILE": files.ca_file,
        "KVPLANE_TLS_CERT_FILE": files.cert_file,
        "KVPLANE_TLS_KEY_FILE": files.key_file,
    }


class Plane:
    """The processes; nobody has a token."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self._folder, self._authority = folder, authority
        self.ports = {name: free_port() for name in (*SERVICES, "gateway", "prefill", "decode")}
        self.settings = {
            "KVPLANE_DATABASE_URL": f"sqlite:///{folder / 'plane.db'}",
            "KVPLANE_AUTH_MODE": "api_key",
            **{
                f"KVPLANE_{name.upper()}_ADDRESS": f"127.0.0.1:{self.ports[name]}"
                for name in SERVICES
            },
        }
        self.servers: list[Server] = []

    def files(self, kind: str, name: str) -> TlsFiles:
        """Give it a certificate."""
        pem = self._authority.issue(f"kvplane:{kind}/{name}")
        return write(self._folder / f"{kind}-{name}", pem)

    def service(self, name: str) -> Server:
        env = {**self.settings, **PATIENT, **variables(self.files("service", name))}
        url = f"http://127.0.0.1:{self.ports[name]}"
        if name == "gateway":
            env["KVPLANE_GATEWAY_PORT"] = str(self.ports[name])
        else:
            env["KVPLANE_GRPC_PORT"] = str(self.ports[name])
            env["KVPLANE_GRPC_STATUS_PORT"] = status = str(free_port())
            url = f"http://127.0.0.1:{status}"
        command = [sys.executable, "-m", "kvplane.cli", "serve", name]
        return self._start(name, command, url, "/readyz", env)

    def engine(self, role: str, name: str, files: TlsFiles) -> Server:
        port = self.ports.setdefault(name, free_port())
        address = ",".join(f"{name}=127.0.0.1:{self.ports[name]}" for name in ("routing", "lease"))
        command = [
            *(sys.executable, "-m", "kvplane.engine", f"--role={role}", f"--port={port}"),
            *("--model=reference", f"--worker-id={name}", f"--control-plane={address}"),
            *("--begin-wait=3", "--grant-wait=3", "--read-limit=30"),
            *("--kv-recompute-threshold=16", f"--tls-ca-file={files.ca_file}"),
            *(f"--tls-cert-file={files.cert_file}", f"--tls-key-file={files.key_file}"),
        ]
        return self._start(name, command, f"http://127.0.0.1:{port}", "/health", {})

    def operator(self) -> KvplaneClient:
        """Return a client with an operator's certificate, for tenant acme."""
        return KvplaneClient(
            self.settings["KVPLANE_ROUTING_ADDRESS"],
            session=self.settings["KVPLANE_SESSION_ADDRESS"],
            lease=self.settings["KVPLANE_LEASE_ADDRESS"],
            tenant="acme",
            tls=self.files("operator", "ann"),
        )

    def _start(
        self, name: str, command: list[str], url: str, health: str, env: dict[str, str]
    ) -> Server:
        server = Server(name, command, url=url, health=health, env=env, logs=self._folder)
        self.servers.append(server)
        return server.start()

    def command(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a `kvplane` command."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPLANE_")}
        return subprocess.run(
            [sys.executable, "-m", "kvplane.cli", *arguments],
            env={**clean, **self.settings, "NO_COLOR": "1", **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Everything, ready."""
    made = Plane(tmp_path_factory.mktemp("tls"), Authority())
    migrated = made.command("migrate", "up", **variables(made.files("operator", "ann")))
    assert migrated.returncode == 0, migrated.stderr
    try:
        for name in (*SERVICES, "gateway"):
            made.service(name)
        for role in ("prefill", "decode"):
            made.engine(role, role, made.files("worker", role))
        wait_for(made.servers, 90)
        yield made
    finally:
        stop_all(made.servers)


def known(gateway: str) -> int:
    """Return how many workers a gateway knows."""
    return int(httpx.get(f"{gateway}/readyz").json().get("workers", 0))


def eventually(condition: Callable[[], Any], seconds: float = 30) -> Any:
    clock = SystemClock()
    end = clock.monotonic() + seconds
    while not (value := condition()):
        assert clock.monotonic() < end, "it did not happen in time"
        sleep_blocking(0.2)
    return value


async def test_a_conversation_reads_back_what_its_first_turn_left(plane: Plane) -> None:
    gateway = f"http://127.0.0.1:{plane.ports['gateway']}"
    messages = [{"role": "user", "content": "Say what is slow in this system, in detail. " * 20}]
    async with plane.operator() as kvplane, httpx.AsyncClient(base_url=gateway, timeout=60) as http:
        await kvplane.tenants.CreateTenant(tenant.CreateTenantRequest(tenant_id="acme"))
        wanted = tenant.CreateApiKeyRequest(tenant_id="acme")
        key = (await kvplane.tenants.CreateApiKey(wanted)).secret

        async def say(name: str, past: list[dict[str, str]]) -> dict[str, Any]:
            answer = await http.post(
                "/v1/chat/completions",
                json={"model": "reference", "max_tokens": 16, "messages": past},
                headers={"authorization": f"Bearer {key}", "x-session-id": name},
            )
            assert answer.status_code == 200, answer.text
            said: dict[str, Any] = answer.json()
            return said

        eventually(lambda: known(gateway) == 2)
        first = await say("one", messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And else?"}]
        second, fresh = await say("one", messages), await say("fresh", messages)
        assert second["choices"][0]["message"] == fresh["choices"][0]["message"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"]
        assert (await http.get("/v1/models")).status_code == 401
        found = await kvplane.sessions.GetSession(session.GetSessionRequest(name="one"))
        assert found.session.turns == 2


def test_a_worker_with_anothers_certificate_is_not_registered(
    plane: Plane,
) -> None:
    intruder = plane.engine("decode", "intruder", plane.files("worker", "decode"))
    refused = (
        "the worker registry refuses us, worker 'intruder':"
        " this credential speaks for worker 'decode' only"
    )
    eventually(lambda: refused in intruder.log_tail(100))
    intruder.stop()
    ours = variables(plane.files("operator", "ann"))
    listed = plane.command("workers", "list", "--json", **ours)
    assert listed.returncode == 0, listed.stderr
    found = json.loads(listed.stdout)
    assert [worker["worker_id"] for worker in found] == ["decode", "prefill"]
