"""The certificates of docs/security-setup.md are what the services want."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import Channels, TlsFiles, lease_api
from kvplane.client.tls import load
from kvplane.kernel.errors import PermissionDenied

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "security-setup.md").read_text()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Where the page's commands have left what they made."""
    script = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)[0]
    done = subprocess.run(
        ["sh", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tmp_path


async def test_they_work_as_written(
    serve: Callable[..., Any], channels: Channels, made: Path
) -> None:
    def files(name: str) -> TlsFiles:
        paths = (made / each for each in ("ca.pem", f"{name}.pem", f"{name}-key.pem"))
        return TlsFiles(*map(str, paths))

    server = await serve(load(files("lease")))
    report = lease.ReportOwnershipRequest(worker_id="gpu-7")
    for host in ("127.0.0.1", "localhost"):
        address = f"{host}:{server.port}"
        worker = lease_api(address, channels=channels, tls=files("gpu-7"))
        await worker.ReportOwnership(report)
        for name in ("session", "routing", "gateway"):
            service = lease_api(address, channels=channels, tls=files(name))
            await service.ReportOwnership(report)
            assert server.leases.callers[-1].actor == f"cert:service/{name}"
        operator = lease_api(address, channels=channels, tls=files("ann"))
        await operator.GetLease(lease.GetLeaseRequest(lease_id="l1"))
        with pytest.raises(PermissionDenied, match="this credential's role is operator"):
            await operator.ReportOwnership(report)
