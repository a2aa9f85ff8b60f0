"""Faults between a permit and its end: slow reads, and owners that do not hold longer."""

import asyncio

from engine.harness import CLOCK, FREE, engine, eventually, generate, request, tokens
from engine.scripted import ScriptedAgent
from engine.test_managed import LEASED, PROMPT, cold, hold, owner_and_reader
from kvplane.engine.managed import Managed
from kvplane.worker.agent import FreeNow, HoldLonger, Permit


async def test_a_slow_read_touches_the_owners_blocks_at_its_end_only():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        agent.answers = [Permit(400, held.returned)]
        reader.faults.slow_reads_s = 1.0
        asked = request("r", [*PROMPT, 1], LEASED)
        began = CLOCK.monotonic()
        reading = asyncio.create_task(generate(reader, asked))
        await CLOCK.sleep(0.3)
        assert "held" in owner.blocks.pins
        assert not reading.done()
        # Nobody's word counts here: what lies there when it is read at last is what comes.
        owner.model.memory[held.returned["remote_block_ids"][0]] = 7
        wrong = await reading
        assert CLOCK.monotonic() - began > 1.0
        assert asked.cached_tokens == 400
        assert wrong != await cold(owner, [*PROMPT, 1])


async def test_a_slow_read_whose_request_leaves_keeps_its_blocks_to_the_end():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        agent.answers = [Permit(400, held.returned)]
        reader.faults.slow_reads_s = 0.5
        reading = asyncio.create_task(generate(reader, request("r", [*PROMPT, 1], LEASED)))
        await eventually(lambda: reader.blocks.pool.in_use > 0)
        await CLOCK.sleep(0.1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reader.stats.reads_abandoned == 1
        assert reader.reader.parked_blocks > 0
        await eventually(lambda: reader.reader.parked_blocks == 0)
        assert reader.blocks.pool.in_use == 0
        await eventually(lambda: owner.blocks.pool.in_use == 0)
        assert agent.finished == [("r", True, False)]


async def test_orders_are_counted_and_an_owner_may_keep_its_hold():
    agent = ScriptedAgent()
    async with engine(FREE, Managed(agent, CLOCK), decoder_kv_blocks_ttl_s=2.0) as owner:
        asked = {"kvplane": {"tenant": "t", "session": "s", "turn": 1}}
        await generate(owner, request("a", tokens("a", 100), asked))
        owner.faults.keep_holds = 1
        agent.orders = [HoldLonger("a", 60.0, "c1")]
        await eventually(lambda: agent.done)
        assert owner.stats.held_longer == 0
        assert agent.done[0][1] is True
        assert agent.done[0][2] <= 2.0
        agent.orders = [HoldLonger("a", 60.0, "c2")]
        await eventually(lambda: len(agent.done) == 2)
        assert owner.stats.held_longer == 1
        assert agent.done[1][2] == 60.0
        agent.orders = [FreeNow("a", "c3"), FreeNow("a", "c4")]
        await eventually(lambda: len(agent.done) == 4)
        assert owner.stats.freed_by_order == 1
        assert owner.blocks.pool.in_use == 0
