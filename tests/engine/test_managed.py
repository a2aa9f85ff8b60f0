"""The engine under leases: it does what the agent says, and never more."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from engine.harness import CLOCK, COLD, FREE, engine, eventually, generate, request, tokens
from engine.scripted import ScriptedAgent
from kvplane.engine.core import Request
from kvplane.engine.managed import Managed
from kvplane.engine.transfer import Read
from kvplane.worker.agent import FreeNow, HoldLonger, Pending, Permit, Refused

KEY = {"tenant": "t", "session": "s", "turn": 2}
LEASED = {**COLD, "kvplane": {**KEY, "lease_id": "lease-1", "fencing_token": 7}}
PROMPT = tokens("managed", 400)


@asynccontextmanager
async def owner_and_reader(agent, **changes):
    async with (
        engine() as owner,
        engine(FREE, Managed(agent, CLOCK), **changes) as reader,
    ):
        yield owner, reader


async def hold(owner, prompt=PROMPT, ident="held") -> Request:
    """Let a decode hold the blocks of a turn."""
    ended = request(ident, prompt, {"x": 1})
    await generate(owner, ended)
    return ended


async def cold(owner, prompt) -> list[int]:
    return await generate(owner, request("cold", prompt))


async def test_a_permit_is_read_exactly_as_cut():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        edited = PROMPT[:128] + tokens("edited", 200)
        cut = dict(held.returned, remote_num_tokens=128)
        cut["remote_block_ids"] = [held.returned["remote_block_ids"][0][:4]]
        agent.answers = [Pending(), Pending(), Permit(128, cut)]
        asked = request("r", edited, LEASED)
        assert await generate(reader, asked) == await cold(owner, edited)
        assert asked.cached_tokens == 128
        assert reader.stats.nixl_bytes == 4 * 1024
        assert agent.begun == [
            (
                "r",
                {
                    "lease": ("lease-1", 7),
                    "handle": None,
                    "address": (None, None),
                    "min_tokens": 64,
                    "tenant_id": "t",
                    "salt": "",
                },
            )
        ]
        assert agent.finished == [("r", True, False)]
        await eventually(lambda: owner.blocks.pool.in_use == 0)


async def test_a_decode_asks_with_the_handle_it_was_given():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        prefill = request("p", PROMPT, COLD, max_tokens=1)
        await generate(owner, prefill)
        agent.answers = [Permit(400, prefill.returned)]
        asked = request("d", PROMPT, {**prefill.returned, "kvplane": KEY})
        assert await generate(reader, asked) == await cold(owner, PROMPT)
        how = agent.begun[0][1]
        assert how["handle"] == (owner.engine_id, "p")
        assert how["address"] == (owner.config.kv_host, owner.kv_port)
        assert how["min_tokens"] == 1
        assert asked.cached_tokens == 399


@pytest.mark.parametrize("params", [COLD, {**COLD, "kvplane": KEY}])
async def test_without_a_lease_nothing_is_asked_nor_read(params):
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        asked = request("r", PROMPT, {**held.returned, **params})
        assert await generate(reader, asked) == await cold(owner, PROMPT)
        assert agent.begun == []
        assert reader.stats.nixl_reads == 0
        assert len(owner.blocks.pins) == 1


async def test_a_refusal_is_computed_and_sends_the_owner_nothing():
    agent = ScriptedAgent([Pending(), Refused("no")])
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        asked = request("r", PROMPT, {**held.returned, **LEASED})
        assert await generate(reader, asked) == await cold(owner, PROMPT)
        assert asked.cached_tokens == 0
        assert agent.finished == [("r", False, False)]
        assert len(owner.blocks.pins) == 1
        assert owner.stats.late_notifications == 0


async def test_a_permit_that_ran_out_before_the_read_is_computed():
    agent = ScriptedAgent(starts=False)
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        agent.answers = [Permit(407, held.returned)]
        assert await generate(reader, request("r", PROMPT, LEASED)) == await cold(owner, PROMPT)
        assert agent.finished == [("r", False, False)]
        assert reader.stats.nixl_reads == 0


async def test_a_lease_lost_during_the_read_drops_what_came():
    agent = ScriptedAgent(valid=False)
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        agent.answers = [Permit(407, held.returned)]
        asked = request("r", PROMPT, LEASED)
        assert await generate(reader, asked) == await cold(owner, PROMPT)
        assert asked.cached_tokens == 0
        assert reader.stats.reads_dropped == 1
        await eventually(lambda: agent.finished == [("r", True, False)])
        assert reader.reader.parked_blocks == 0


async def test_a_lease_that_ended_before_the_reads_end_was_seen_drops_it_too(monkeypatch):
    agent = ScriptedAgent()
    seen = Read.state

    def state(read):
        found = seen(read)
        agent.valid = found != "DONE"
        return found

    monkeypatch.setattr(Read, "state", state)
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        agent.answers = [Permit(407, held.returned)]
        asked = request("r", PROMPT, LEASED)
        assert await generate(reader, asked) == await cold(owner, PROMPT)
        assert asked.cached_tokens == 0
        assert reader.stats.reads_dropped == 1


@pytest.mark.parametrize("fault", ["fail_reads", "dead owner"])
async def test_a_failed_read_is_computed(fault):
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        handle = dict(held.returned)
        if fault == "fail_reads":
            reader.faults.fail_reads = 1
        else:
            handle["remote_port"] = 1
        agent.answers = [Permit(407, handle)]
        assert await generate(reader, request("r", PROMPT, LEASED)) == await cold(owner, PROMPT)
        assert agent.finished == [("r", False, True)]
        assert reader.stats.nixl_failed == 1


@pytest.mark.processes
async def test_a_frozen_owner_costs_no_more_than_the_lease_and_its_blocks_stay_apart(start):
    """The destination of a read that nobody waits for any more is not handed out."""
    owner = await asyncio.to_thread(start, "--role", "decode")
    agent = ScriptedAgent()
    async with engine(FREE, Managed(agent, CLOCK), num_blocks=40) as reader:
        for number in range(2):
            held = await asyncio.to_thread(owner.complete, PROMPT, {"x": 1}, 8)
            agent.answers = [Permit(407, held.params)]
            if number == 0:
                assert await generate(reader, request("warm", PROMPT, LEASED)) == held.ids
        freeze = {"seconds": 2.5}
        await asyncio.to_thread(owner.http.post, "/debug/freeze", json=freeze)
        began = CLOCK.monotonic()
        running = asyncio.create_task(generate(reader, request("r", PROMPT, LEASED)))
        await CLOCK.sleep(0.3)
        assert not running.done()
        agent.valid = False
        assert await running == held.ids
        assert CLOCK.monotonic() - began < 1.5
        assert reader.reader.parked_blocks == 13
        assert reader.blocks.pool.in_use == 13 + 2 * 13, "beside what two ended requests hold"
        assert agent.finished[1:] == [], "the lease is not given back while the read may go on"
        agent.valid = True
        await eventually(lambda: reader.blocks.pool.in_use == 2 * 13)
        assert agent.finished[1][:2] == ("r", True)


async def test_what_ends_is_reported_with_its_session():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (_, worker):
        prefill = request("p", PROMPT, {**COLD, "kvplane": KEY}, max_tokens=1, cache_salt="salt")
        await generate(worker, prefill)
        decode = request("d", PROMPT, {"kvplane": KEY})
        await generate(worker, decode)
        first, second = agent.held
        assert (first.request_id, first.for_decode, first.num_tokens) == ("p", True, 400)
        assert (first.tenant_id, first.session_id, first.turn) == ("t", "s", 2)
        assert (first.hold_seconds, first.salt, first.cuttable) == (30.0, "salt", True)
        assert first.params == prefill.returned
        assert (second.for_decode, second.num_tokens, second.hold_seconds) == (False, 407, 480.0)
        assert second.tokens[:407] == (PROMPT + decode.output)[:407]


async def test_what_is_not_ours_is_not_reported():
    agent = ScriptedAgent()
    async with owner_and_reader(agent) as (_, worker):
        await generate(worker, request("d", PROMPT, {"x": 1}))
        assert agent.held == []
        assert len(worker.blocks.pins) == 1


async def test_a_read_by_a_peer_is_reported_as_freed():
    agent = ScriptedAgent()
    async with engine(FREE, Managed(agent, CLOCK)) as owner, engine() as reader:
        await generate(owner, ended := request("d", PROMPT, {"kvplane": KEY}))
        longer = PROMPT + ended.output + [1, 2, 3]
        await generate(reader, request("r", longer, {**ended.returned, **COLD}))
        await eventually(lambda: agent.freed == ["d"])


async def test_an_order_to_free_is_carried_out_at_once():
    agent = ScriptedAgent()
    async with engine(FREE, Managed(agent, CLOCK)) as owner:
        await generate(owner, request("d", PROMPT, {"kvplane": KEY}))
        agent.orders = [FreeNow("d", "c1"), FreeNow("never", "c2")]
        await eventually(lambda: len(agent.done) == 2)
        assert [(order.command_id, done) for order, done, _ in agent.done] == [
            ("c1", True),
            ("c2", False),
        ]
        assert owner.blocks.pool.in_use == 0
        assert "d" in agent.freed


async def test_an_order_to_hold_longer_outlives_the_engines_own_ttl():
    agent = ScriptedAgent()
    async with engine(FREE, Managed(agent, CLOCK), decoder_kv_blocks_ttl_s=0.4) as owner:
        await generate(owner, request("d", PROMPT, {"kvplane": KEY}))
        await generate(owner, request("e", PROMPT, {"kvplane": KEY}))
        agent.orders = [HoldLonger("d", 60, "c1")]
        await eventually(lambda: agent.freed == ["e"])
        assert agent.done == [(HoldLonger("d", 60, "c1"), True, 60.0)]
        assert "d" in owner.blocks.pins


async def test_an_abort_at_any_stage_leaves_nothing():
    agent = ScriptedAgent([Pending()])
    async with owner_and_reader(agent) as (owner, reader):
        held = await hold(owner)
        running = asyncio.create_task(generate(reader, request("a", PROMPT, LEASED)))
        await eventually(lambda: len(agent.begun) == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        agent.answers = [Permit(407, held.returned)]
        reader.faults.read_delay_s = 60
        running = asyncio.create_task(generate(reader, request("b", PROMPT, LEASED)))
        await eventually(lambda: reader.blocks.pool.in_use > 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert set(agent.abandoned) == {"a", "b"}
        assert reader.blocks.pool.in_use == 0
        assert (reader.stats.running, reader.stats.waiting, reader.stats.aborted) == (0, 0, 2)
        assert len(owner.blocks.pins) == 1
