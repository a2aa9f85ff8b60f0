"""One `kvplane dev` for all of these tests, and conversations to look at."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.client import KvplaneClient
from kvplane.kernel.compat import compatibility_key
from runtime.processes import running

COMPATIBILITY = {
    "model": "m",
    "revision": "1",
    "block_size": 16,
    "kv_layout": "x",
    "kv_dtype": "x",
    "engine_version": "1",
}


@dataclass
class Plane:
    """Where it is, and what is in it."""

    address: str
    session_id: str = ""
    lease_id: str = ""


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    folder = tmp_path_factory.mktemp("dev")
    # Nobody beats for the workers, however long the tests take.
    patient = {"KVPLANE_ROUTING_WORKER_TIMEOUT_S": "600"}
    with running("dev", "--port", "0", "--gateway-port", "0", cwd=folder, **patient) as dev:
        made = Plane(dev.wait_for(r"gRPC +(127\.0\.0\.1:\d+)")[1])
        dev.wait_for('"message":"ready"')
        asyncio.run(_fill(made))
        yield made


async def _fill(plane: Plane) -> None:
    """Two workers; a session of tenant acme, held at w1 and leased to w2."""
    async with KvplaneClient(plane.address, tenant="acme") as kvplane:
        for name, role in (("w1", "DECODE"), ("w2", "PREFILL")):
            worker = routing_pb2.Worker(
                worker_id=name,
                role=f"WORKER_ROLE_{role}",
                url=f"http://127.0.0.1/{name}".replace("/w", ":810"),
                engine_id=f"e-{name}",
                kv_host="127.0.0.1",
                kv_port=5600,
                compatibility=routing_pb2.Compatibility(**COMPATIBILITY),
                served_models=["m"],
                managed=True,
                bidirectional=True,
            )
            request = routing_pb2.RegisterWorkerRequest(worker=worker, instance_id="i")
            await kvplane.workers.RegisterWorker(request)
        created = await kvplane.sessions.CreateSession(
            session_pb2.CreateSessionRequest(name="the [bold]talk", model="m")
        )
        plane.session_id = created.session.session_id
        empty = lease_pb2.ReportOwnershipRequest(worker_id="w1", epoch=1)
        anchor = lease_pb2.TimeAnchor(anchor=(await kvplane.leases.ReportOwnership(empty)).anchor)
        ownership = lease_pb2.Ownership(
            tenant_id="acme",
            session_id=plane.session_id,
            turn=1,
            worker_id="w1",
            epoch=1,
            params=lease_pb2.KvTransferParams(
                remote_engine_id="e-w1",
                remote_request_id="r1",
                remote_host="127.0.0.1",
                remote_port=5600,
                remote_block_ids=[lease_pb2.BlockGroup(ids=[1, 2])],
                remote_num_tokens=1234,
            ),
            num_tokens=1234,
            block_size=16,
            digests=bytes(16 * 78),
            compatibility=compatibility_key(**COMPATIBILITY),
            cuttable=True,
            hold={"seconds": 300},
        )
        await kvplane.leases.ReportOwnership(
            lease_pb2.ReportOwnershipRequest(
                worker_id="w1", epoch=1, time_anchor=anchor, ownerships=[ownership]
            )
        )
        granted = await kvplane.leases.GrantLease(
            lease_pb2.GrantLeaseRequest(
                request_id="g1",
                holder=lease_pb2.Holder(
                    worker_id="w2", epoch=1, compatibility=ownership.compatibility
                ),
                session_id=plane.session_id,
                ttl={"seconds": 60},
            )
        )
        assert granted.lease.lease_id, granted
        plane.lease_id = granted.lease.lease_id


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The table's cells, its head first."""
        return [re.split(r" {2,}", line) for line in self.out.splitlines()]


@pytest.fixture
def cli(plane: Plane, monkeypatch: pytest.MonkeyPatch):
    """Runs a command in this process, as tenant acme at the server."""
    import os

    from kvplane.cli.app import app
    from typer.testing import CliRunner

    for name in list(os.environ):
        if name.startswith("KVPLANE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVPLANE_SERVER", plane.address)
    monkeypatch.setenv("KVPLANE_TENANT", "acme")

    def run(*arguments: str, **env: str) -> Done:
        result = CliRunner().invoke(app, list(arguments), env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        return Done(result.exit_code, result.stdout, result.stderr)

    return run
