"""Connections are cut, bytes come late, or nothing comes any more; then the network heals."""

import asyncio

import pytest
from faults.plane import BOUND, ENGINES, GATEWAYS, SERVICES, WORKER_TIMEOUT, Plane, links
from faults.talk import talking

pytestmark = pytest.mark.processes

GATEWAY = links(GATEWAYS, *SERVICES)
TO_LEASES = links(list(ENGINES), "lease")
TO_REGISTRY = links(list(ENGINES), "routing")
ROUTER = links(["routing"], "session", "lease")
DATABASE = links(SERVICES, "postgres")


async def test_connections_are_cut(plane: Plane) -> None:
    async with talking(plane, bound=BOUND) as running:
        for names in (GATEWAY, TO_LEASES, TO_REGISTRY, ROUTER, DATABASE):
            assert plane.links.cut(*names)
            await asyncio.sleep(0.5)
            plane.links.heal()
            await running.reuse_is_back()


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        pytest.param(3, GATEWAY, id="gateway"),
        pytest.param(1, TO_LEASES + TO_REGISTRY, id="workers"),
        pytest.param(1, DATABASE, id="database"),
        pytest.param(3, DATABASE, id="database far away"),
    ],
)
async def test_bytes_come_late(plane: Plane, seconds: int, names: list[str]) -> None:
    async with talking(plane, bound=BOUND) as running:
        plane.links.delay(seconds, *names)
        await asyncio.sleep(3)
        plane.links.heal()
        await running.reuse_is_back()


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        pytest.param("down", GATEWAY, id="gateway hears nothing"),
        pytest.param("down", TO_LEASES, id="workers hear no leases"),
        pytest.param("up", TO_REGISTRY, id="registry hears no workers"),
        pytest.param("up", ROUTER, id="router is heard by nobody"),
        pytest.param("down", DATABASE, id="commits without an answer"),
    ],
)
async def test_nothing_comes_any_more(plane: Plane, direction: str, names: list[str]) -> None:
    """Longer than a worker may be silent; nobody is told that a connection has ended."""
    async with talking(plane, bound=BOUND) as running:
        plane.links.silence(direction, *names)
        await asyncio.sleep(WORKER_TIMEOUT + 1)
        assert plane.links.waiting(*names)
        plane.links.heal()
        await running.reuse_is_back()
