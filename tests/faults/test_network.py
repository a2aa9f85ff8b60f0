"""Connections are cut, bytes come late, or nothing comes any more; then the network heals."""

import asyncio

import httpx
import pytest
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session

from faults.plane import (
    BOUND,
    DECODE_HOLD,
    ENGINES,
    GATEWAYS,
    LIVE,
    SERVICES,
    WORKER_TIMEOUT,
    Plane,
    links,
)
from faults.talk import Talk, talking

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

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


async def test_a_report_that_got_lost_is_made_again(plane: Plane) -> None:
    """It was sent, and swallowed by the network; the next connection brings it."""
    reports = links(["decode-1", "decode-2"], "lease")
    talk = Talk(plane, BOUND)
    async with httpx.AsyncClient(timeout=60) as http, plane.client() as client:
        messages = [{"role": "user", "content": "Which one is it?" * 10}]
        messages.append(
            {"role": "assistant", "content": await talk.turn(http, 0, "lost", messages)}
        )
        messages.append({"role": "user", "content": "And now?"})
        plane.links.silence("up", *reports)
        await talk.turn(http, 0, "lost", messages)
        found = await client.sessions.GetSession(session.GetSessionRequest(name="lost"))
        request = lease.ListOwnershipsRequest(session_id=found.session.session_id, states=LIVE)

        async def second_turn() -> bool:
            owned = (await client.leases.ListOwnerships(request)).ownerships
            return any(one.turn == 2 and not one.for_decode for one in owned)

        assert not await second_turn()
        plane.links.cut(*reports)
        plane.links.heal()
        await eventually(second_turn, DECODE_HOLD / 2)
    await talk.end()
    await plane.nothing_held(8)


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
