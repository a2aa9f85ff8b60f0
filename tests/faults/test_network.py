"""Connections are cut, bytes come late, or nothing comes any more; then the network heals."""

import asyncio

import pytest
from faults.plane import ENGINES, GATEWAYS, ROUTE_BOUND, SERVICES, WORKER_TIMEOUT, Plane, links
from faults.talk import talking

pytestmark = pytest.mark.processes

LINKS = {
    "gateway": links(GATEWAYS, *SERVICES),
    "workers to leases": links(list(ENGINES), "lease"),
    "workers to registry": links(list(ENGINES), "routing"),
    "router": links(["routing"], "session", "lease"),
    "database": links(SERVICES, "postgres"),
}
BOUND = ROUTE_BOUND + 3


@pytest.mark.parametrize("where", LINKS)
async def test_connections_are_cut(plane: Plane, where: str) -> None:
    names = LINKS[where]
    async with talking(plane, bound=BOUND) as running:
        assert plane.links.cut(*names)
        await asyncio.sleep(1)
        plane.links.heal()
        await running.reuse_is_back(10)


@pytest.mark.parametrize("where", LINKS)
@pytest.mark.parametrize("seconds", [1, 3])
async def test_bytes_come_late(plane: Plane, where: str, seconds: int) -> None:
    names = LINKS[where]
    async with talking(plane, bound=BOUND) as running:
        plane.links.delay(seconds, *names)
        await asyncio.sleep(3)
        plane.links.heal()
        await running.reuse_is_back(10)


@pytest.mark.parametrize("where", LINKS)
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_nothing_comes_any_more(plane: Plane, where: str, direction: str) -> None:
    names = LINKS[where]
    async with talking(plane, bound=BOUND) as running:
        plane.links.silence(direction, *names)
        await asyncio.sleep(WORKER_TIMEOUT + 2)
        assert plane.links.waiting(*names)
        plane.links.heal()
        await running.reuse_is_back(10)
