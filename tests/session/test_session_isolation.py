"""N-01: what belongs to another tenant does not exist, and cannot be told from what does not."""

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import NotFound
from session.session_requests import OK, begin, call, complete, digest, tenant


def by_id(session_id):
    """Everything that takes a session id."""
    return [
        ("GetSession", pb.GetSessionRequest(session_id=session_id)),
        ("EndSession", pb.EndSessionRequest(session_id=session_id)),
        (
            "CompleteTurn",
            pb.CompleteTurnRequest(session_id=session_id, turn=1, outcome=OK, prompt_tokens=5),
        ),
        ("WatchSessions", pb.WatchSessionsRequest(session_id=session_id)),
    ]


def by_name(name):
    return [
        ("GetSession", pb.GetSessionRequest(name=name)),
        ("EndSession", pb.EndSessionRequest(name=name)),
    ]


async def refusal(service, method, request, ident):
    """Code, reason, text and metadata, without the id itself."""
    with pytest.raises(NotFound) as caught:
        await call(service, method, request)
    error = caught.value
    metadata = {key: value.replace(ident, "ID") for key, value in error.metadata.items()}
    return error.code, error.reason, error.message.replace(ident, "ID"), metadata


async def test_another_tenants_session_answers_as_an_unknown_one(registry):
    service = registry.replica().servicer
    with tenant("a"):
        mine = await service.BeginTurn(begin("r1", "chat"))
        before = await service.GetSession(pb.GetSessionRequest(name="chat"))
    foreign, unknown = mine.session.session_id, "session-" + "0" * 32
    with tenant("b"):
        for ours, theirs in zip(by_id(foreign), by_id(unknown), strict=True):
            assert await refusal(service, *ours, foreign) == await refusal(
                service, *theirs, unknown
            )
        for ours, theirs in zip(by_name("chat"), by_name("none"), strict=True):
            assert await refusal(service, *ours, "chat") == await refusal(service, *theirs, "none")
        assert list((await service.ListSessions(pb.ListSessionsRequest())).sessions) == []
    assert registry.leases.freed == []
    with tenant("a"):
        assert await service.GetSession(pb.GetSessionRequest(name="chat")) == before
    assert await registry.execute("SELECT outcome FROM turns") == [(0,)]


async def test_the_same_name_history_and_request_id_make_each_tenant_its_own(registry):
    service = registry.replica().servicer
    ids = {}
    for name in ("a", "b"):
        with tenant(name):
            named = await service.BeginTurn(begin("r1", "chat"))
            unnamed = await service.BeginTurn(begin("r2", history=[digest("1")]))
            await service.CompleteTurn(complete(unnamed, history_digest=digest("1")))
            assert (named.turn, unnamed.turn) == (1, 1)
            assert named.session.tenant_id == unnamed.session.tenant_id == name
            ids[name] = {named.session.session_id, unnamed.session.session_id}
    assert not ids["a"] & ids["b"]
    for name in ("a", "b"):
        with tenant(name):
            found = await service.BeginTurn(begin("r3", history=[digest("1")]))
            assert found.session.session_id in ids[name]


async def test_ending_a_name_ends_the_callers_session_only(registry):
    service = registry.replica().servicer
    for name in ("a", "b"):
        with tenant(name):
            await service.BeginTurn(begin("r", "chat"))
    with tenant("b"):
        ended = await service.EndSession(pb.EndSessionRequest(name="chat"))
    assert registry.leases.freed == [("b", ended.session.session_id)]
    with tenant("a"):
        kept = await service.GetSession(pb.GetSessionRequest(name="chat"))
    assert kept.session.state == pb.SESSION_STATE_ACTIVE


async def test_background_work_frees_in_the_name_of_each_tenant(registry):
    part = registry.replica()
    wanted = set()
    registry.leases.away = True
    for name in ("a", "b"):
        with tenant(name):
            begun = await part.servicer.BeginTurn(begin("r", "chat"))
            await part.servicer.EndSession(pb.EndSessionRequest(name="chat"))
            wanted.add((name, begun.session.session_id))
    registry.leases.away = False
    await registry.execute("UPDATE sessions SET free_due_us = 0")
    await part.service.sweep()
    assert set(registry.leases.freed) == wanted
