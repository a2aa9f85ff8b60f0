"""PostgreSQL ends while people talk, in order or not, and is started again."""

import asyncio

import pytest

from faults.conftest import Database
from faults.plane import BOUND, Plane
from faults.talk import talking

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_postgresql_ends_and_is_started(plane: Plane, database: Database, how: str) -> None:
    async with talking(plane, bound=BOUND) as running:
        await asyncio.to_thread(database.stop if how == "stopped" else database.kill)
        try:
            await asyncio.sleep(2)
        finally:
            await asyncio.to_thread(database.start)
        await running.reuse_is_back()
