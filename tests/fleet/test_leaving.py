"""A client that leaves, at each stage of its turn: what it had is given back at once."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from kvplane.lease.values import LeaseState

from fleet.books import Books, eventually, nothing_of
from fleet.client import Client
from fleet.cluster import NARROW_BLOCKS
from fleet.oracle import BLOCK
from fleet.scene import DECODE, PREFILL, Scene

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SOON = 3.0


@pytest.fixture
async def scene(client: Client, books: Books) -> Scene:
    one = Scene(client, books)
    await one.begin()
    return one


class Stage:
    """Brings a turn to a stage and says when it is there."""

    def __init__(self, scene: Scene, stack: AsyncExitStack) -> None:
        self.scene, self.stack = scene, stack

    async def arrange(self) -> None: ...

    async def there(self) -> bool:
        raise NotImplementedError

    async def gone(self) -> None: ...


class DuringRoute(Stage):
    async def arrange(self) -> None:
        await self.stack.enter_async_context(self.scene.grants_waiting())

    async def there(self) -> bool:
        return await self.scene.grant_waits()


class InPrefillsQueue(Stage):
    """All of the prefill's blocks are another request's."""

    async def arrange(self) -> None:
        prompt = list(range(1, 100))
        rest = NARROW_BLOCKS * BLOCK - len(prompt)
        hog = asyncio.create_task(self.scene.compute(PREFILL, prompt, rest))

        async def end() -> None:
            hog.cancel()
            await asyncio.gather(hog, return_exceptions=True)

        self.stack.push_async_callback(end)
        await self.scene.until(PREFILL, "running", 1)

    async def there(self) -> bool:
        leases = await self.scene.leases()
        begun = bool(leases) and leases[-1].state == LeaseState.READING
        return begun and await self.scene.stat(PREFILL, "waiting") == 1


class DuringPrefillsRead(Stage):
    async def arrange(self) -> None:
        await self.scene.books.fault(PREFILL, slow_reads_s=1.5)

    async def there(self) -> bool:
        return await self.scene.stat(PREFILL, "reading") == 1


class DuringPrefill(Stage):
    async def arrange(self) -> None:
        await self.scene.books.fault(PREFILL, prefill_delay_s=30)

    async def there(self) -> bool:
        return await self.scene.stat(PREFILL, "running") == 1


class BetweenTheLegs(Stage):
    async def arrange(self) -> None:
        self.stack.enter_context(self.scene.books.fleet.gate.shut())

    async def there(self) -> bool:
        return self.scene.books.fleet.gate.waiting == 1

    async def gone(self) -> None:
        async def closed() -> bool:
            return self.scene.books.fleet.gate.waiting == 0

        await eventually(closed, SOON)


class DuringDecodesRead(Stage):
    async def arrange(self) -> None:
        await self.scene.books.fault(DECODE, slow_reads_s=1.5)

    async def there(self) -> bool:
        return await self.scene.stat(DECODE, "reading") == 1


class BeforeFirstToken(Stage):
    async def arrange(self) -> None:
        await self.scene.books.fault(DECODE, prefill_delay_s=30)

    async def there(self) -> bool:
        return await self.scene.stat(DECODE, "running") == 1


class InTheMiddle(Stage):
    async def arrange(self) -> None:
        self._before = await self.scene.stat(DECODE, "generation_tokens")

    async def there(self) -> bool:
        return await self.scene.stat(DECODE, "generation_tokens") > self._before + 5


# Stage, streams, the engine that sees the cancel, whether the turn before can still be read.
STAGES = [
    (DuringRoute, (True,), None, True),
    (InPrefillsQueue, (False,), PREFILL, True),
    (DuringPrefillsRead, (True, False), PREFILL, False),
    (DuringPrefill, (True,), PREFILL, False),
    (BetweenTheLegs, (True, False), None, False),
    (DuringDecodesRead, (True,), DECODE, False),
    (BeforeFirstToken, (True, False), DECODE, False),
    (InTheMiddle, (True, False), DECODE, False),
]


@pytest.mark.parametrize(
    ("stage", "stream", "cancelled", "readable"),
    [
        pytest.param(stage, stream, cancelled, readable, id=f"{stage.__name__}-{stream}")
        for stage, streams, cancelled, readable in STAGES
        for stream in streams
    ],
)
async def test_nothing_stays_behind(
    scene: Scene,
    stage: Callable[[Scene, AsyncExitStack], Stage],
    stream: bool,
    cancelled: str | None,
    readable: bool,
) -> None:
    books, left = scene.books, asyncio.Event()
    before = await books.states([PREFILL, DECODE])
    async with AsyncExitStack() as stack:
        here = stage(scene, stack)
        await here.arrange()
        body = scene.body(stream=stream, max_tokens=300)
        leaving = asyncio.create_task(scene.client.leave(body, scene.name, when=left))
        await eventually(here.there)
        assert not leaving.done()
        left.set()
        assert await leaving
        await nothing_of(books.requests_at_gateways, SOON)
        await here.gone()
        for engine in (PREFILL, DECODE):
            aborted = before[engine]["stats"]["aborted"] + (engine == cancelled)
            await scene.until(engine, "aborted", aborted, SOON)
    await nothing_of(books.unfinished, SOON)
    await books.mend()
    await nothing_of(lambda: live_leases(scene), SOON)
    after = await books.states([PREFILL, DECODE])
    for engine in (PREFILL, DECODE):
        grown = after[engine]["stats"]["aborted"] - before[engine]["stats"]["aborted"]
        hogs = stage is InPrefillsQueue and engine == PREFILL
        assert grown == (engine == cancelled) + hogs
        assert after[engine]["blocks"]["quarantined"] == 0
    # The prefill holds nothing for a decode that will not come; of the turn before, the
    # decode holds what was not read.
    await nothing_of(lambda: held_by(scene, PREFILL), SOON)
    assert len(await held_by(scene, DECODE)) == readable
    # The client comes back with the same turn.
    reply = await scene.client.ask(scene.body(), scene.name)
    assert (reply.reused > 0) == readable


async def live_leases(scene: Scene) -> list[object]:
    """Return the session's leases that have not ended, those of its decodes too."""
    return await scene.books.rows(
        "SELECT lease_id, holder_worker_id, state, draining FROM leases"
        " WHERE session_id = :session AND (state <= 2 OR draining)",
        session=scene.session_id,
    )


async def held_by(scene: Scene, engine: str) -> list[object]:
    """Return what an engine holds."""
    held: list[object] = (await scene.books.state(engine))["held"]
    return held
