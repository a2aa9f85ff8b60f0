"""Each service's command from docker-compose.yml, as a local process, and a conversation."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from compose.compose_file import GIVEN, Container, Loopback, default_services, load
from demo import text
from demo.servers import stop_all, wait_for
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.client import KvplaneClient
from kvplane.kernel.errors import Unauthenticated
from postgresql import new_server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="needs the whole of 127/8 as loopback"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Everything in the file's start order, each waiting for what the file says."""
    folder = tmp_path_factory.mktemp("compose")
    postgres = new_server(folder / "pg")
    services = default_services(load())
    hosts = Loopback(tuple(services), postgres.get_uri())
    running: dict[str, Container] = {}
    try:
        with pytest.MonkeyPatch.context() as shell:
            for key in ("KVPLANE_CONFIG", "KVPLANE_DATABASE_URL"):
                shell.delenv(key, raising=False)
            for name, service in services.items():
                if name != "postgres":
                    start(name, service, hosts, running, folder)
            wait_for(list(running.values()), 60)
        yield hosts
    finally:
        stop_all(list(running.values()))
        postgres.cleanup()


def start(
    name: str,
    service: dict[str, Any],
    hosts: Loopback,
    running: dict[str, Container],
    logs: Path,
) -> None:
    """Do what compose does: wait for the conditions, then start."""
    for other, on in service["depends_on"].items():
        if on["condition"] == "service_healthy" and other != "postgres":
            running[other].wait(60)
    server = hosts.server(name, service, logs)
    if service["restart"] == "no":
        assert server.run_to_end(60) == 0, server.log_tail()
    else:
        running[name] = server.start()


def client(hosts: Loopback, token: str | None) -> KvplaneClient:
    return KvplaneClient(
        f"{hosts.address('routing')}:7703",
        session=f"{hosts.address('session')}:7701",
        lease=f"{hosts.address('lease')}:7702",
        token=token,
    )


async def test_two_turns_and_the_second_reads_what_the_first_left(hosts: Loopback) -> None:
    messages = [{"role": "user", "content": text.read("runbook.md")}]
    url = f"http://{hosts.address('gateway')}:8000/v1/chat/completions"
    body = {"model": "reference", "max_tokens": 16, "temperature": 0, "messages": messages}
    answers = []
    async with client(hosts, GIVEN["KVPLANE_AUTH_INTERNAL_TOKEN"]) as kvplane:
        made = await kvplane.tenants.CreateApiKey(tenant.CreateApiKeyRequest(tenant_id="default"))
    headers = {"x-session-id": "compose", "authorization": f"Bearer {made.secret}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as http:
        for question in ("What is slow?", "And what else?"):
            answer = await http.post(url, json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
            reply = answers[-1]["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": question}]
        fresh = await http.post(
            url,
            json={**body, "messages": messages[:3]},
            headers={"x-session-id": "compose-fresh"},
        )
    assert answers[1]["choices"][0]["message"] == fresh.json()["choices"][0]["message"]
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= answers[0]["usage"]["prompt_tokens"]

    async with client(hosts, made.secret) as kvplane:
        found = await kvplane.sessions.GetSession(session.GetSessionRequest(name="compose"))
        request = lease.ListLeasesRequest(
            session_id=found.session.session_id,
            worker_id="prefill",
            states=[lease.LEASE_STATE_CONSUMED],
        )
        assert len((await kvplane.leases.ListLeases(request)).leases) == 1
        assert found.session.turns == 2


async def test_nobody_gets_in_without_a_key(hosts: Loopback) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        base = f"http://{hosts.address('gateway')}:8000"
        for path in ("/v1/models", "/metrics"):
            assert (await http.get(base + path)).status_code == 401
    async with client(hosts, None) as kvplane:
        for call in (
            kvplane.tenants.ListTenants(tenant.ListTenantsRequest()),
            kvplane.sessions.ListSessions(session.ListSessionsRequest()),
            kvplane.leases.ListLeases(lease.ListLeasesRequest()),
            kvplane.workers.ListWorkers(routing.ListWorkersRequest()),
        ):
            with pytest.raises(Unauthenticated):
                await call
