"""A reader behind fifty requests, and a hold that is too short for the wait."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvplane.lease.values import LeaseState

from fleet.books import Books
from fleet.client import Client
from fleet.cluster import NARROW_BLOCKS
from fleet.oracle import BLOCK
from fleet.scene import DECODE, PREFILL, Scene
from fleet.words import word_tokens

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

BEFORE_US = 50
# A tenth of the prefill's blocks each: the reader waits for blocks, not yet reading.
TOKENS = NARROW_BLOCKS // 10 * BLOCK
EACH_TAKES_S = 0.3
HOLD_S = 9.0


@asynccontextmanager
async def fifty_before_us(scene: Scene) -> AsyncIterator[None]:
    """Fill the prefill's queue."""
    rng = random.Random(scene.name)
    await scene.books.fault(PREFILL, prefill_delay_s=EACH_TAKES_S)
    async with asyncio.TaskGroup() as group:
        for _ in range(BEFORE_US):
            group.create_task(scene.compute(PREFILL, word_tokens(rng, TOKENS)))
        await scene.until(PREFILL, "waiting", BEFORE_US - 15)
        yield


async def test_the_owner_agrees_to_hold_longer_and_the_turn_reads(
    client: Client, books: Books
) -> None:
    scene = Scene(client, books)
    await books.fault(DECODE, hold_s=HOLD_S)
    await scene.begin()
    await books.fault(DECODE, hold_s=0)
    longer = await scene.stat(DECODE, "held_longer")
    began = asyncio.get_running_loop().time()
    async with fifty_before_us(scene):
        reply = await client.ask(scene.body(), scene.name)
    assert asyncio.get_running_loop().time() - began > HOLD_S
    assert reply.reused > 100
    assert await scene.stat(DECODE, "held_longer") > longer
    orders = await books.orders(scene.session_id)
    assert any(order.hold and order.worker_id == DECODE for order in orders)
    [lease] = await scene.leases()
    assert lease.state == LeaseState.CONSUMED


async def test_a_hold_that_runs_out_meanwhile_costs_the_reuse_and_nothing_else(
    client: Client, books: Books
) -> None:
    scene = Scene(client, books)
    await books.fault(DECODE, hold_s=HOLD_S, keep_holds=1000)
    await scene.begin()
    await books.fault(DECODE, hold_s=0)
    before = await books.states([PREFILL, DECODE])
    async with fifty_before_us(scene):
        turn = scene.send()
        await scene.lease(LeaseState.READING)
        await scene.lease(LeaseState.EXPIRED)
        # Not read by anybody any more: freed, and written over.
        await scene.until(
            DECODE, "freed_by_order", before[DECODE]["stats"]["freed_by_order"] + 1, HOLD_S
        )
        await scene.churn(DECODE, 60)
        assert not turn.done()
        reply = await turn
    assert reply.reused == 0
    after = await books.states([PREFILL, DECODE])
    assert after[PREFILL]["stats"]["nixl_reads"] == before[PREFILL]["stats"]["nixl_reads"]
    assert after[DECODE]["stats"]["held_longer"] == before[DECODE]["stats"]["held_longer"]
    orders = [o for o in await books.orders(scene.session_id) if not o.for_decode and not o.hold]
    assert len(orders) == 1
