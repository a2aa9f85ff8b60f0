"""Watching sessions: the present first, then what changes, wherever it is changed."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import NotFound
from kvplane.session.domain import SessionConfig
from session.session_requests import begin, complete, tenant

FAST = SessionConfig(watch_poll_s=0.05)
SLOW = SessionConfig(watch_poll_s=3600.0)


@asynccontextmanager
async def watching(part, session_id=""):
    """A function that waits for the next change, a few seconds at most."""
    stream = part.servicer.WatchSessions(pb.WatchSessionsRequest(session_id=session_id))
    async with aclosing(stream):

        async def following():
            async with asyncio.timeout(5):
                return (await anext(stream)).session

        yield following


async def quiet(following, seconds=0.3):
    """Nothing comes for a while."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await following()


async def test_the_present_comes_first_then_changes_of_this_process_at_once(registry):
    part = registry.replica(SLOW)
    service = part.servicer
    a = await service.BeginTurn(begin("r1", "a"))
    await service.BeginTurn(begin("r2", "b"))
    await service.BeginTurn(begin("r3", "ended"))
    await service.EndSession(pb.EndSessionRequest(name="ended"))
    async with watching(part) as following:
        assert {(await following()).name, (await following()).name} == {"a", "b"}
        await service.BeginTurn(begin("r4", "a"))
        assert (await following()).turns == 2
        await service.CompleteTurn(complete(a, prompt_tokens=7, decode_worker_id="d"))
        changed = await following()
        assert (changed.name, changed.tokens_recomputed) == ("a", 7)
        await service.CreateSession(pb.CreateSessionRequest(name="c", model="m"))
        assert (await following()).name == "c"
        await service.EndSession(pb.EndSessionRequest(name="b"))
        changed = await following()
        assert (changed.name, changed.state) == ("b", pb.SESSION_STATE_ENDED)


async def test_an_expiry_is_a_change(registry):
    part = registry.replica(SessionConfig(idle_expiry_s=0.0, watch_poll_s=3600.0))
    await part.servicer.BeginTurn(begin("r1", "a"))
    async with watching(part) as following:
        assert (await following()).state == pb.SESSION_STATE_ACTIVE
        await part.service.sweep()
        assert (await following()).state == pb.SESSION_STATE_EXPIRED


async def test_changes_of_another_replica_arrive_once(postgres):
    here, there = postgres.replica(FAST), postgres.replica(FAST)
    begun = await there.servicer.BeginTurn(begin("r1", "a"))
    async with watching(here) as following:
        assert (await following()).turns == 1
        await there.servicer.BeginTurn(begin("r2", "a"))
        assert (await following()).turns == 2
        await here.servicer.BeginTurn(begin("r3", "a"))
        assert (await following()).turns == 3
        await there.servicer.CompleteTurn(complete(begun, prompt_tokens=5))
        assert (await following()).tokens_recomputed == 5
        await there.servicer.BeginTurn(begin("r4", "new"))
        assert (await following()).name == "new"
        # Several more looks at the store, and nothing twice.
        await quiet(following)


async def test_a_busy_process_still_looks_at_the_others(postgres):
    here, there = postgres.replica(FAST), postgres.replica(FAST)
    stop = asyncio.Event()

    async def busy():
        number = 0
        while not stop.is_set():
            number += 1
            await here.servicer.BeginTurn(begin(f"busy{number}", "busy"))

    async with watching(here) as following:
        task = asyncio.create_task(busy())
        await following()
        await there.servicer.BeginTurn(begin("r", "elsewhere"))
        async with asyncio.timeout(5):
            while (await following()).name != "elsewhere":
                pass
        stop.set()
        await task


async def test_a_slow_watcher_sees_the_newest_state_only(registry):
    part = registry.replica(SLOW)
    await part.servicer.BeginTurn(begin("r0", "a"))
    async with watching(part) as following:
        assert (await following()).turns == 1
        for number in range(1, 20):
            await part.servicer.BeginTurn(begin(f"r{number}", "a"))
        assert (await following()).turns == 20


async def test_one_session_is_watched_to_its_end(registry):
    part = registry.replica(SLOW)
    one = await part.servicer.BeginTurn(begin("r1", "one"))
    await part.servicer.BeginTurn(begin("r2", "two"))
    async with watching(part, one.session.session_id) as following:
        assert (await following()).turns == 1
        await part.servicer.BeginTurn(begin("r3", "two"))
        await part.servicer.BeginTurn(begin("r4", "one"))
        changed = await following()
        assert (changed.name, changed.turns) == ("one", 2)
        await part.servicer.EndSession(pb.EndSessionRequest(name="one"))
        assert (await following()).state == pb.SESSION_STATE_ENDED
        with pytest.raises(StopAsyncIteration):
            await following()
    async with watching(part, one.session.session_id) as following:
        assert (await following()).state == pb.SESSION_STATE_ENDED
        with pytest.raises(StopAsyncIteration):
            await following()


async def test_the_end_of_the_service_ends_watches(sqlite):
    part = sqlite.replica(SLOW)
    await part.servicer.BeginTurn(begin("r1", "a"))
    stream = part.servicer.WatchSessions(pb.WatchSessionsRequest())
    await anext(stream)
    rest = asyncio.create_task(anext(stream, None))
    await part.stop()
    async with asyncio.timeout(5):
        assert await rest is None


async def test_other_tenants_and_unknown_ones_cannot_be_watched(registry):
    part = registry.replica(FAST)
    mine = await part.servicer.BeginTurn(begin("r1", "a"))
    with tenant("other"):
        async with watching(part, mine.session.session_id) as following:
            with pytest.raises(NotFound):
                await following()
        async with watching(part) as following:
            await quiet(following, 0.2)
    async with watching(part, "session-unknown") as following:
        with pytest.raises(NotFound):
            await following()
