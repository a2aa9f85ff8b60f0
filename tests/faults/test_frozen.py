"""SIGSTOP of each service and each engine while people talk, and SIGCONT."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from e2e.waiting import eventually

from faults.plane import (
    BOUND,
    READ_LIMIT,
    REUSE_BOUND,
    SERVICES,
    WORKER_TIMEOUT,
    Plane,
    debug,
)
from faults.talk import talking

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@asynccontextmanager
async def frozen(plane: Plane, name: str) -> AsyncIterator[None]:
    plane.servers[name].freeze()
    try:
        yield
    finally:
        plane.servers[name].thaw()


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_is_frozen_and_thawed(plane: Plane, name: str) -> None:
    async with talking(plane, bound=BOUND) as running:
        async with frozen(plane, name):
            await asyncio.sleep(4)
        await running.reuse_is_back()


async def test_another_gateway_takes_over_from_one_that_is_frozen(plane: Plane) -> None:
    async with talking(plane, bound=BOUND, patience=2) as running:
        async with frozen(plane, "gateway-1"):
            await running.reuse_is_back()
        await running.reuse_is_back()


async def test_a_decode_is_frozen_for_longer_than_it_takes_to_be_lost(plane: Plane) -> None:
    """What waits for it goes to the other decode, and its sessions are computed there."""
    async with talking(plane, bound=WORKER_TIMEOUT + BOUND) as running:
        async with frozen(plane, "decode-1"):
            await asyncio.sleep(WORKER_TIMEOUT + 1)
            await running.reuse_is_back()
        await running.reuse_is_back()


async def test_a_prefill_is_frozen_during_its_read(plane: Plane) -> None:
    """Its leases end and the blocks are freed; what it reads after that is thrown away."""
    prefill = plane.servers["prefill"]
    async with talking(plane, bound=REUSE_BOUND + WORKER_TIMEOUT + BOUND) as running:
        await debug(prefill, "faults", slow_reads_s=READ_LIMIT / 2)

        async def reads() -> bool:
            return bool((await debug(prefill))["stats"]["reading"])

        await eventually(reads)
        async with frozen(plane, "prefill"):
            await asyncio.sleep(6)
        await debug(prefill, "faults", slow_reads_s=0)
        await running.reuse_is_back()
