"""Getting and listing sessions."""

import asyncio

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField, NotFound
from session.session_requests import begin, complete


async def names(service, **filters):
    """All pages' names."""
    found, token = [], ""
    while True:
        request = pb.ListSessionsRequest(page_token=token, **filters)
        page = await service.ListSessions(request)
        found += [session.name for session in page.sessions]
        token = page.next_page_token
        if not token:
            return found


async def test_pages_hold_every_session_once_newest_first(registry):
    service = registry.replica().servicer
    for number in range(10):
        await service.BeginTurn(begin(f"r{number}", f"chat{number}"))
    everything = await names(service)
    for size in (1, 3, 5, 10, 11):
        assert await names(service, page_size=size) == everything
    assert sorted(everything) == [f"chat{number}" for number in range(10)]


async def test_sessions_are_listed_newest_first(sqlite):
    service = sqlite.replica().servicer
    for number in range(4):
        await service.BeginTurn(begin(f"r{number}", f"chat{number}"))
        sqlite.clock.advance(1)
    await service.BeginTurn(begin("again", "chat0"))
    assert await names(service, page_size=3) == ["chat3", "chat2", "chat1", "chat0"]


async def test_pages_stay_put_while_sessions_come_move_and_end(registry):
    service = registry.replica().servicer
    for number in range(6):
        await service.BeginTurn(begin(f"r{number}", f"chat{number}"))
    everything = await names(service)
    first = await service.ListSessions(pb.ListSessionsRequest(page_size=3))
    registry.tick()
    await service.BeginTurn(begin("new", "new"))
    await service.BeginTurn(begin("moved", everything[-1]))
    await service.EndSession(pb.EndSessionRequest(name=everything[0]))
    second = await service.ListSessions(
        pb.ListSessionsRequest(page_size=3, page_token=first.next_page_token)
    )
    shown = [session.name for page in (first, second) for session in page.sessions]
    assert shown == everything
    assert second.next_page_token == ""


async def test_filters(registry):
    service = registry.replica().servicer
    for name, model, worker in (("a", "m", "d1"), ("b", "n", "d1"), ("c", "m", "d2")):
        begun = await service.BeginTurn(begin(name, name, model=model))
        await service.CompleteTurn(complete(begun, decode_worker_id=worker))
    await service.EndSession(pb.EndSessionRequest(name="c"))
    active, ended, expired = (
        pb.SESSION_STATE_ACTIVE,
        pb.SESSION_STATE_ENDED,
        pb.SESSION_STATE_EXPIRED,
    )
    assert sorted(await names(service, states=[active])) == ["a", "b"]
    assert await names(service, states=[ended, expired]) == ["c"]
    assert sorted(await names(service, states=[active, ended])) == ["a", "b", "c"]
    assert sorted(await names(service, model="m")) == ["a", "c"]
    assert sorted(await names(service, worker_id="d1")) == ["a", "b"]
    assert await names(service, model="m", worker_id="d1", states=[active]) == ["a"]
    assert await names(service, model="unknown") == []


async def test_a_page_token_belongs_to_its_filters(registry):
    service = registry.replica().servicer
    for number in range(3):
        await service.BeginTurn(begin(f"r{number}", f"chat{number}"))
    token = (await service.ListSessions(pb.ListSessionsRequest(page_size=1))).next_page_token
    with pytest.raises(InvalidField, match="page_token"):
        await service.ListSessions(pb.ListSessionsRequest(model="m", page_token=token))


async def test_get_fills_in_what_is_held_by_id_and_by_name(registry):
    service = registry.replica().servicer
    session_id = (await service.BeginTurn(begin("r", "chat"))).session.session_id
    registry.leases.held[("default", session_id)] = ["own-1", "own-2"]
    by_id = await service.GetSession(pb.GetSessionRequest(session_id=session_id))
    by_name = await service.GetSession(pb.GetSessionRequest(name="chat"))
    assert by_id == by_name
    assert list(by_id.session.ownership_ids) == ["own-1", "own-2"]


@pytest.mark.parametrize("trouble", ["away", "silent"])
async def test_get_answers_without_the_lease_service(registry, trouble):
    service = registry.replica().servicer
    await service.BeginTurn(begin("r", "chat"))
    setattr(registry.leases, trouble, True)
    async with asyncio.timeout(5):
        found = await service.GetSession(pb.GetSessionRequest(name="chat"))
    assert found.session.name == "chat"
    assert list(found.session.ownership_ids) == []


async def test_what_does_not_exist_is_not_found(registry):
    service = registry.replica().servicer
    for request in (
        pb.GetSessionRequest(session_id="session-unknown"),
        pb.GetSessionRequest(name="unknown"),
    ):
        with pytest.raises(NotFound, match="no session"):
            await service.GetSession(request)
