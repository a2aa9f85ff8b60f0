import functools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import wire.plane
from kvplane.gateway.config import GatewayConfig
from quotas.plane import Town, town
from wire.conftest import migrated

__all__ = ["migrated"]


@pytest.fixture
async def place(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Town]:
    """Two planes over one SQLite file, a prefill and a decode."""
    # A part that is slow is taken for one that is away, which limits nobody: here, on a busy
    # machine, that would be chance.
    monkeypatch.setenv("KVPLANE_ROUTING_SESSION_BOUND_S", "10")
    # These engines report nothing that could be waited for.
    monkeypatch.setenv("KVPLANE_ROUTING_REPORT_WAIT_S", "0")
    patient = functools.partial(GatewayConfig, route_timeout_s=20, complete_wait_s=20)
    monkeypatch.setattr(wire.plane, "GatewayConfig", patient)
    file = tmp_path / "plane.db"
    shutil.copy(migrated, file)
    async with town(f"sqlite:///{file}", file) as made:
        await made.pair()
        yield made
