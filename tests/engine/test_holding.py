"""Holds of a prefill between its end and the decode's read; engines inside the test."""

import asyncio

from engine.harness import COLD, engine, eventually, generate, request, tokens

PROMPT = tokens("holding", 300)


async def test_a_waiting_decode_keeps_its_prefills_blocks_alive_by_heartbeats():
    short = {"kv_lease_duration_s": 0.6}
    async with engine(**short) as prefill, engine(**short) as decode:
        await generate(prefill, first := request("p", PROMPT, COLD, max_tokens=1))
        decode.faults.read_delay_s = 1.5
        running = asyncio.create_task(generate(decode, request("d", PROMPT, first.returned)))
        ids = await running
        assert ids == await generate(prefill, request("cold", PROMPT))
        assert prefill.stats.kv_expired == 0
        await eventually(lambda: len(prefill.blocks.pins) == 0)
        assert prefill.stats.kv_expired == 0
        assert prefill.stats.late_notifications == 0


async def test_without_a_decode_they_run_out():
    async with engine(kv_lease_duration_s=0.2) as prefill:
        await generate(prefill, request("p", PROMPT, COLD, max_tokens=1))
        assert len(prefill.blocks.pins) == 1
        await eventually(lambda: prefill.stats.kv_expired == 1)
        assert prefill.blocks.pool.in_use == 0


async def test_a_decode_that_is_aborted_before_it_reads_lets_the_prefill_free():
    async with engine() as prefill, engine() as decode:
        await generate(prefill, first := request("p", PROMPT, COLD, max_tokens=1))
        decode.faults.read_delay_s = 60
        running = asyncio.create_task(generate(decode, request("d", PROMPT, first.returned)))
        await eventually(lambda: decode.blocks.pool.in_use > 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: len(prefill.blocks.pins) == 0)
        assert decode.blocks.pool.in_use == 0
        assert decode.stats.nixl_reads == 0


async def test_a_request_waits_for_blocks_that_are_held_and_gets_them():
    async with engine(num_blocks=12, kv_lease_duration_s=0.5) as small:
        await generate(small, request("p", PROMPT, COLD, max_tokens=1))
        running = asyncio.create_task(generate(small, request("next", PROMPT)))
        await eventually(lambda: small.stats.waiting == 1)
        assert len(await running) == 8
        assert small.stats.kv_expired == 1
        assert small.blocks.pool.in_use == 0


async def test_local_hits_are_not_read_again():
    async with engine() as owner, engine(prefix_caching=True) as reader:
        await generate(owner, held := request("d", PROMPT, {"x": 1}))
        await generate(reader, request("warm", PROMPT[:160]))
        longer = PROMPT + held.output + [1, 2, 3]
        asked = request("r", longer, {**held.returned, **COLD})
        assert await generate(reader, asked) == await generate(owner, request("cold", longer))
        assert asked.cached_tokens == 307
        assert reader.stats.nixl_bytes == (10 - 5) * 1024
        await eventually(lambda: len(owner.blocks.pins) == 0)


async def test_a_full_local_hit_is_notified_and_not_read():
    async with engine() as owner, engine(prefix_caching=True) as reader:
        await generate(owner, held := request("d", PROMPT[:281], {"x": 1}))
        assert held.returned["remote_num_tokens"] == 288
        longer = [*PROMPT[:281], *held.output, 1, 2]
        await generate(reader, request("warm", longer))
        asked = request("r", longer, {**held.returned, **COLD})
        assert await generate(reader, asked) == await generate(owner, request("cold", longer))
        await eventually(lambda: len(owner.blocks.pins) == 0)
        assert reader.stats.nixl_reads == 0
        assert asked.cached_tokens == 288
