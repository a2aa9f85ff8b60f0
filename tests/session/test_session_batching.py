"""Calls that share a transaction do not share their fate."""

import asyncio

import pytest
from kvplane.kernel.errors import NotFound
from kvplane.session.batching import MAX_BATCH, Batches


class Handler:
    """Doubles numbers, a batch at a time, when it is let."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.go = asyncio.Event()
        self.fault: Exception | None = None

    async def __call__(self, tenant_id, items):
        self.batches.append((tenant_id, items))
        await self.go.wait()
        if self.fault:
            raise self.fault
        return [NotFound("number", str(item)) if item < 0 else item * 2 for item in items]


async def begun(handler: Handler, batches: int) -> None:
    """Wait until so many batches are with the handler."""
    async with asyncio.timeout(10):
        while len(handler.batches) < batches:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_calls_that_arrive_meanwhile_share_the_next_batch_of_their_tenant():
    handler = Handler()
    batches = Batches(handler)
    first = [asyncio.create_task(batches.submit("a", i)) for i in range(2)]
    await begun(handler, 1)
    later = [asyncio.create_task(batches.submit("a", i)) for i in range(2, 2 + MAX_BATCH + 1)]
    other = asyncio.create_task(batches.submit("b", 7))
    await begun(handler, 2)
    handler.go.set()
    assert await asyncio.gather(*first, *later) == [i * 2 for i in range(MAX_BATCH + 3)]
    assert await other == 14
    sizes = [len(items) for tenant_id, items in handler.batches if tenant_id == "a"]
    assert sizes == [2, MAX_BATCH, 1]
    assert ("b", [7]) in handler.batches


async def test_calls_that_arrive_a_few_turns_of_the_loop_apart_share_a_batch():
    handler = Handler()
    handler.go.set()
    batches = Batches(handler)
    calls = []
    for number in range(5):
        calls.append(asyncio.create_task(batches.submit("a", number)))
        for _ in range(4):
            await asyncio.sleep(0)
    assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8]
    assert handler.batches == [("a", [0, 1, 2, 3, 4])]


async def test_a_batch_does_not_wait_for_calls_without_end():
    handler = Handler()
    handler.go.set()
    batches = Batches(handler)
    first = asyncio.create_task(batches.submit("a", 0))
    more = []
    async with asyncio.timeout(10):
        while not first.done():
            more.append(asyncio.create_task(batches.submit("a", 1)))
            await asyncio.sleep(0)
    assert 1 < len(handler.batches[0][1]) < MAX_BATCH
    await asyncio.gather(*more)


async def test_each_gets_its_own_answer_or_error():
    handler = Handler()
    handler.go.set()
    batches = Batches(handler)
    answers = await asyncio.gather(
        *(batches.submit("a", i) for i in (1, -1, 2)), return_exceptions=True
    )
    assert answers[0] == 2
    assert isinstance(answers[1], NotFound)
    assert answers[2] == 4


async def test_a_fault_reaches_every_caller_and_the_next_batch_runs():
    handler = Handler()
    handler.go.set()
    handler.fault = RuntimeError("a fault")
    batches = Batches(handler)
    answers = await asyncio.gather(
        *(batches.submit("a", i) for i in range(3)), return_exceptions=True
    )
    assert answers == [handler.fault] * 3
    handler.fault = None
    assert await batches.submit("a", 4) == 8


async def test_a_caller_that_leaves_takes_nobody_along():
    handler = Handler()
    batches = Batches(handler)
    tasks = [asyncio.create_task(batches.submit("a", i)) for i in range(3)]
    await begun(handler, 1)
    tasks[1].cancel()
    handler.go.set()
    assert await tasks[0] == 0
    assert await tasks[2] == 4
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    # The queue is gone with the last of them, so a call made at once starts anew.
    assert await batches.submit("a", 5) == 10
