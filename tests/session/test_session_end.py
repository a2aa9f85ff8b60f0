"""Ending, expiring, freeing and forgetting sessions."""

import asyncio

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import NotFound
from kvplane.session.domain import SessionConfig
from session.session_requests import OK, begin, complete, digest

DUE = "SELECT count(*) FROM sessions WHERE free_due_us IS NOT NULL"


async def test_ending_frees_at_once_and_may_be_repeated(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r", "chat"))
    session_id = begun.session.session_id
    ended = await service.EndSession(pb.EndSessionRequest(session_id=session_id))
    assert ended.session.state == pb.SESSION_STATE_ENDED
    assert not ended.session.HasField("expire_time")
    assert registry.leases.freed == [("default", session_id)]
    assert not ended.already_ended
    for request in ({"session_id": session_id}, {"name": "chat"}):
        again = await service.EndSession(pb.EndSessionRequest(**request))
        assert again == pb.EndSessionResponse(session=ended.session, already_ended=True)
    assert len(registry.leases.freed) == 1
    assert await registry.execute(DUE) == [(0,)]


async def test_the_name_of_an_ended_session_makes_a_new_one(registry):
    service = registry.replica().servicer
    ids = []
    for number in range(3):
        begun = await service.BeginTurn(begin(f"r{number}", "chat"))
        assert begun.turn == 1
        ids.append(begun.session.session_id)
        found = await service.GetSession(pb.GetSessionRequest(name="chat"))
        assert found.session.session_id == ids[-1]
        await service.EndSession(pb.EndSessionRequest(name="chat"))
        registry.tick()
    assert len(set(ids)) == 3
    # Without an active one, the name means the one that ended last.
    found = await service.GetSession(pb.GetSessionRequest(name="chat"))
    assert found.session.session_id == ids[-1]
    made = await service.CreateSession(pb.CreateSessionRequest(name="chat", model="m"))
    assert made.created
    assert made.session.session_id not in ids


async def test_an_ended_session_is_not_found_by_its_history(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(begun, history_digest=digest("1")))
    await service.EndSession(pb.EndSessionRequest(session_id=begun.session.session_id))
    assert await registry.execute("SELECT count(*) FROM session_history") == [(0,)]
    again = await service.BeginTurn(begin("r2", history=[digest("1")]))
    assert again.session.session_id != begun.session.session_id


@pytest.mark.parametrize("trouble", ["away", "silent"])
async def test_a_session_ends_without_the_lease_service_and_is_freed_later(registry, trouble):
    part = registry.replica(SessionConfig(free_retry_s=0.0, lease_bound_s=0.05))
    begun = await part.servicer.BeginTurn(begin("r", "chat"))
    # A bound that waits on the machine's clock, as the service does.
    setattr(registry.leases, trouble, True)
    async with asyncio.timeout(5):
        ended = await part.servicer.EndSession(pb.EndSessionRequest(name="chat"))
    assert ended.session.state == pb.SESSION_STATE_ENDED
    assert await registry.execute(DUE) == [(1,)]
    await part.service.sweep()
    assert await registry.execute(DUE) == [(1,)]
    setattr(registry.leases, trouble, False)
    await part.service.sweep()
    assert registry.leases.freed == [("default", begun.session.session_id)]
    assert await registry.execute(DUE) == [(0,)]
    await part.service.sweep()
    assert len(registry.leases.freed) == 1


async def test_attempts_to_free_are_spaced(sqlite):
    part = sqlite.replica()
    await part.servicer.BeginTurn(begin("r", "chat"))
    sqlite.leases.away = True
    await part.servicer.EndSession(pb.EndSessionRequest(name="chat"))
    sqlite.leases.away = False
    sqlite.clock.advance(4.9)
    await part.service.sweep()
    assert sqlite.leases.freed == []
    sqlite.clock.advance(0.2)
    await part.service.sweep()
    assert len(sqlite.leases.freed) == 1


async def test_ending_again_frees_what_is_still_pending(registry):
    service = registry.replica().servicer
    await service.BeginTurn(begin("r", "chat"))
    registry.leases.away = True
    await service.EndSession(pb.EndSessionRequest(name="chat"))
    registry.leases.away = False
    await service.EndSession(pb.EndSessionRequest(name="chat"))
    assert len(registry.leases.freed) == 1
    assert await registry.execute(DUE) == [(0,)]


async def test_a_turn_completed_after_the_end_has_its_blocks_freed_too(registry):
    part = registry.replica(SessionConfig(late_free_s=0.0))
    begun = await part.servicer.BeginTurn(begin("r", "chat"))
    await part.servicer.EndSession(pb.EndSessionRequest(name="chat"))
    done = await part.servicer.CompleteTurn(
        complete(begun, OK, prompt_tokens=5, decode_worker_id="d", history_digest=digest("1"))
    )
    assert done.session.state == pb.SESSION_STATE_ENDED
    assert done.session.tokens_recomputed == 5
    assert await registry.execute("SELECT count(*) FROM session_history") == [(0,)]
    await part.service.sweep()
    assert len(registry.leases.freed) == 2


async def test_an_idle_session_expires_and_is_freed(sqlite):
    part = sqlite.replica()
    idle = await part.servicer.BeginTurn(begin("r1", "idle"))
    sqlite.clock.advance(12 * 3600)
    busy = await part.servicer.BeginTurn(begin("r2", "busy"))
    sqlite.clock.advance(12 * 3600 - 1)
    await part.service.sweep()
    state = (await part.servicer.GetSession(pb.GetSessionRequest(name="idle"))).session.state
    assert state == pb.SESSION_STATE_ACTIVE
    sqlite.clock.advance(1)
    await part.service.sweep()
    sessions = (await part.servicer.ListSessions(pb.ListSessionsRequest())).sessions
    states = {session.session_id: session.state for session in sessions}
    assert states == {
        idle.session.session_id: pb.SESSION_STATE_EXPIRED,
        busy.session.session_id: pb.SESSION_STATE_ACTIVE,
    }
    assert sqlite.leases.freed == [("default", idle.session.session_id)]
    again = await part.servicer.BeginTurn(begin("r3", "idle"))
    assert again.session.session_id != idle.session.session_id


async def test_a_pass_is_bounded_and_passes_add_up(registry):
    part = registry.replica(SessionConfig(idle_expiry_s=0.0, sweep_batch=3))
    for number in range(7):
        await part.servicer.BeginTurn(begin(f"r{number}", f"chat{number}"))
    active = "SELECT count(*) FROM sessions WHERE state = 1"
    left = []
    for _ in range(3):
        await part.service.sweep()
        left += await registry.execute(active)
    assert left == [(4,), (1,), (0,)]
    assert len(registry.leases.freed) == 7


async def test_sessions_that_ended_long_ago_are_forgotten_but_not_before_they_are_free(registry):
    part = registry.replica(SessionConfig(ended_kept_s=0.0, free_retry_s=0.0))
    await part.servicer.BeginTurn(begin("r1", "chat"))
    await part.servicer.BeginTurn(begin("r2", "other"))
    registry.leases.away = True
    await part.servicer.EndSession(pb.EndSessionRequest(name="chat"))
    await part.service.sweep()
    assert await registry.execute("SELECT count(*) FROM sessions") == [(2,)]
    registry.leases.away = False
    await part.service.sweep()
    assert await registry.execute("SELECT count(*) FROM sessions") == [(1,)]
    assert await registry.execute("SELECT request_id FROM turns") == [("r2",)]
    with pytest.raises(NotFound):
        await part.servicer.GetSession(pb.GetSessionRequest(name="chat"))


async def test_the_background_work_sweeps_survives_errors_and_stops(sqlite, monkeypatch):
    part = sqlite.replica()
    await part.servicer.BeginTurn(begin("r", "chat"))
    sweeps = asyncio.Queue()
    real = part.service.sweep

    async def sweep():
        try:
            if sweeps.qsize() == 0 and not sqlite.leases.freed:
                sqlite.leases.freed.append("failed once")
                raise RuntimeError("a fault")
            await real()
        finally:
            sweeps.put_nowait(None)

    monkeypatch.setattr(part.service, "sweep", sweep)
    await part.start()
    sqlite.clock.advance(24 * 3600)
    for _ in range(2):
        async with asyncio.timeout(5):
            while sweeps.empty():
                sqlite.clock.advance(1)
                await asyncio.sleep(0.01)
        sweeps.get_nowait()
    await part.stop()
    found = await part.servicer.GetSession(pb.GetSessionRequest(name="chat"))
    assert found.session.state == pb.SESSION_STATE_EXPIRED
