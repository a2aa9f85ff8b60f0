"""kill -9 of each service while people talk, and its start."""

import asyncio

import pytest

from faults.plane import BOUND, SERVICES, Plane
from faults.talk import talking

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_is_killed_and_started(plane: Plane, name: str) -> None:
    async with talking(plane, bound=BOUND) as running:
        plane.servers[name].kill()
        await asyncio.sleep(1)
        await plane.restart(name)
        await running.reuse_is_back()


async def test_another_gateway_takes_over_from_one_that_is_killed(plane: Plane) -> None:
    """A client whose connection breaks sends the turn again, to the other one."""
    async with talking(plane, bound=BOUND, patience=4) as running:
        plane.servers["gateway-1"].kill()
        await running.reuse_is_back()
        await plane.restart("gateway-1")
        await running.reuse_is_back()
