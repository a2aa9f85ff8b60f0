import asyncio

import pytest
from engine.harness import FREE
from kvplane.engine.blocks import Blocks
from kvplane.engine.pool import BlockPool, Pin, Pins

TOKENS = list(range(70))


def pin(pool: BlockPool, ident: str, deadline: float, count: int = 2) -> Pin:
    blocks = pool.allocate(count)
    assert blocks is not None
    return Pin(ident, blocks, deadline, by_decode=True)


def test_a_freed_block_is_the_next_one_used():
    pool = BlockPool(8, 32)
    first = pool.allocate(3)
    second = pool.allocate(2)
    pool.release(first)
    assert set(pool.allocate(3)) == set(first)
    assert pool.in_use == 5
    pool.release(second)


def test_more_than_there_is_gives_nothing_and_a_double_free_is_an_error():
    pool = BlockPool(4, 32)
    assert pool.allocate(5) is None
    blocks = pool.allocate(4)
    assert pool.allocate(1) is None
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks[:1])


def test_a_prefix_is_found_by_its_tokens_and_shared():
    pool = BlockPool(8, 32, prefix_caching=True)
    blocks = pool.allocate(3)
    pool.remember(TOKENS, blocks)
    assert pool.take_prefix(TOKENS) == blocks[:2]
    pool.release(blocks)
    assert pool.in_use == 2
    pool.release(blocks[:2])
    assert pool.take_prefix([*TOKENS[:40], 999, *TOKENS[41:]]) == blocks[:1]
    assert pool.take_prefix(TOKENS, salt="other") == []


def test_a_prefix_never_covers_the_last_token():
    pool = BlockPool(8, 32, prefix_caching=True)
    blocks = pool.allocate(2)
    pool.remember(TOKENS[:64], blocks)
    assert pool.take_prefix(TOKENS[:64]) == blocks[:1]


def test_cached_blocks_are_used_again_when_nothing_else_is_free():
    pool = BlockPool(3, 32, prefix_caching=True)
    blocks = pool.allocate(2)
    pool.remember(TOKENS[:64], blocks)
    pool.release(blocks)
    assert pool.available == 3
    assert len(pool.allocate(3)) == 3
    assert pool.take_prefix(TOKENS) == []


def test_a_pin_is_freed_once():
    pool = BlockPool(8, 32)
    pins = Pins(pool)
    pins.add(pin(pool, "a", 10.0))
    assert pool.in_use == 2
    assert pins.free("a")
    assert not pins.free("a")
    assert pool.in_use == 0


def test_pins_run_out_one_by_one_and_a_deadline_only_grows():
    pool = BlockPool(8, 32)
    pins = Pins(pool)
    pins.add(pin(pool, "a", 10.0))
    pins.add(pin(pool, "b", 20.0))
    assert pins.extend("a", 15.0) == 15.0
    assert pins.extend("b", 1.0) == 20.0
    assert pins.extend("c", 1.0) is None
    assert pins.expire(14.9) == []
    assert pins.expire(15.0) == ["a"]
    assert pool.in_use == 2
    assert [held.request_id for held in pins.held()] == ["b"]


async def test_who_finds_no_block_waits_in_turn_and_a_waiter_that_leaves_takes_nothing():
    blocks = Blocks(FREE)
    everything = await blocks.allocate(FREE.num_blocks)
    large = asyncio.create_task(blocks.allocate(3))
    small = asyncio.create_task(blocks.allocate(1))
    await asyncio.sleep(0)
    blocks.release(everything[:1])
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done(), "nobody overtakes"
    large.cancel()
    blocks.release(everything[1:2])
    assert len(await small) == 1
    assert blocks.pool.available == 1
