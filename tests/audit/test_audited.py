"""What is written down about calls, before and after, by whom."""

import asyncio
from contextvars import copy_context
from dataclasses import replace

import pytest
from kvplane.api.audit.v1 import audit_pb2 as pb
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.api.tenant.v1 import tenant_pb2
from kvplane.audit.actions import ACTIONS
from kvplane.audit.audited import audited
from kvplane.kernel.context import GATEWAY, Caller, Role, set_caller
from kvplane.kernel.errors import InvalidField, NotFound, Unavailable

OPERATOR = Caller("acme", "req-1", frozenset({Role.OPERATOR}), actor="key:op")
TENANT = Caller("acme", "req-2", frozenset({Role.TENANT}), actor="key:acme")
SERVICE = Caller("acme", "req-3", frozenset({Role.SERVICE, Role.OPERATOR}), actor="token")


class Leases:
    """Does what it is told, and sees what is written by then."""

    def __init__(self, look=None, error=None):
        self.look, self.error, self.calls, self.seen = look, error, 0, None

    async def RevokeLease(self, request, context=None):
        self.calls += 1
        if self.look is not None:
            self.seen = await self.look()
        if self.error is not None:
            raise self.error
        return lease_pb2.RevokeLeaseResponse(lease={"lease_id": request.lease_id})

    async def FreeSession(self, request, context=None):
        self.calls += 1
        return lease_pb2.FreeSessionResponse()

    async def GetLease(self, request, context=None):
        self.calls += 1
        return context

    async def Connect(self, requests, context=None):
        async for request in requests:
            yield request


async def events(book, **filters):
    request = pb.ListAuditEventsRequest(**filters)
    return list((await book.servicer().ListAuditEvents(request)).events)


async def as_(who, call, request):
    """Call as somebody, in a context of its own."""

    async def run():
        set_caller(who)
        return await call(request)

    return await asyncio.get_running_loop().create_task(run(), context=copy_context())


def revoke(lease_id="lease-1"):
    return lease_pb2.RevokeLeaseRequest(lease_id=lease_id)


async def test_started_before_and_done_after(book):
    leases = Leases(look=lambda: events(book))
    wrapped = audited(leases, book.log(), "LeaseService")
    answer = await as_(OPERATOR, wrapped.RevokeLease, revoke())
    assert answer.lease.lease_id == "lease-1"
    [during], [after] = leases.seen, await events(book)
    assert during.outcome == pb.OUTCOME_STARTED
    during.outcome = pb.OUTCOME_DONE
    assert after == during
    assert after.time.seconds > 1_700_000_000
    after.ClearField("time")
    assert after == pb.AuditEvent(
        event_id=after.event_id,
        actor="key:op",
        tenant_id="acme",
        action="LeaseService/RevokeLease",
        target="lease-1",
        outcome=pb.OUTCOME_DONE,
        request_id="req-1",
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotFound("lease", "lease-1"), "NOT_FOUND"),
        (Unavailable("away"), "UNAVAILABLE"),
        (ZeroDivisionError("a mistake of ours"), "INTERNAL"),
    ],
)
async def test_refused_with_its_reason(sqlite, error, reason):
    wrapped = audited(Leases(error=error), sqlite.log(), "LeaseService")
    with pytest.raises(type(error)) as caught:
        await as_(OPERATOR, wrapped.RevokeLease, revoke())
    assert caught.value is error
    [event] = await events(sqlite)
    assert (event.outcome, event.reason) == (pb.OUTCOME_REFUSED, reason)


@pytest.mark.parametrize("error", [NotFound("lease", "x"), InvalidField("lease_id", "no")])
async def test_a_tenant_that_asks_for_nothing_does_not_fill_the_log(book, error):
    leases = Leases(error=error)
    wrapped = audited(leases, book.log(), "LeaseService")
    with pytest.raises(type(error)):
        await as_(TENANT, wrapped.RevokeLease, revoke())
    assert await events(book) == []
    leases.error = Unavailable("it may have been done")
    with pytest.raises(Unavailable):
        await as_(TENANT, wrapped.RevokeLease, revoke())
    leases.error = None
    await as_(TENANT, wrapped.RevokeLease, revoke())
    assert [event.actor for event in await events(book)] == ["key:acme"] * 2


async def test_what_ends_again_does_not_fill_the_log(book):
    answer = session_pb2.EndSessionResponse(session={"session_id": "session-1"})

    class Sessions:
        async def EndSession(self, _request, context=None):
            return answer

    wrapped = audited(Sessions(), book.log(), "SessionService")
    request = session_pb2.EndSessionRequest(session_id="session-1")
    await as_(TENANT, wrapped.EndSession, request)
    first = await events(book)
    assert [event.outcome for event in first] == [pb.OUTCOME_DONE]
    answer.already_ended = True
    for who in (TENANT, OPERATOR):
        assert await as_(who, wrapped.EndSession, request) is answer
    assert await events(book) == first


async def test_nobody_asked_to_hold_longer_is_not_kept(book):
    answer = lease_pb2.ExtendHoldResponse()

    class Holds:
        async def ExtendHold(self, _request, context=None):
            return answer

    wrapped = audited(Holds(), book.log(), "LeaseService")
    request = lease_pb2.ExtendHoldRequest(session_id="never-was", hold={"seconds": 5})
    for who in (TENANT, OPERATOR):
        assert await as_(who, wrapped.ExtendHold, request) is answer
    assert await events(book) == []
    answer.asked = 1
    await as_(TENANT, wrapped.ExtendHold, request)
    assert [event.detail for event in await events(book)] == ["hold=5s"]


async def test_what_cannot_be_written_down_is_not_done(tmp_path):
    from kvplane.audit.main import log
    from kvplane.db.database import Database
    from kvplane.kernel.clock import FakeClock

    away = Database(f"sqlite:///{tmp_path}", FakeClock())  # a folder, not a file
    leases = Leases()
    wrapped = audited(leases, log(away, FakeClock()), "LeaseService")
    with pytest.raises(Unavailable):
        await wrapped.RevokeLease(revoke())
    assert leases.calls == 0
    # What changes nothing needs no log.
    await wrapped.GetLease(lease_pb2.GetLeaseRequest())
    await away.close()


async def test_what_was_done_is_answered_though_its_outcome_cannot_be_written(sqlite):
    leases, log = Leases(), sqlite.log()
    wrapped = audited(leases, log, "LeaseService")

    async def gone():
        await sqlite.databases[0].close()

    leases.look = gone
    assert (await wrapped.RevokeLease(revoke())).lease.lease_id == "lease-1"
    [event] = await events(sqlite)
    assert event.outcome == pb.OUTCOME_STARTED


async def test_a_caller_that_goes_away_leaves_it_open(sqlite):
    wrapped = audited(Leases(look=asyncio.Event().wait), sqlite.log(), "LeaseService")
    call = asyncio.create_task(wrapped.RevokeLease(revoke()))
    async with asyncio.timeout(5):
        while not await events(sqlite):
            await asyncio.tasks.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    [event] = await events(sqlite)
    assert event.outcome == pb.OUTCOME_STARTED


async def test_everything_else_passes_through(sqlite):
    leases = Leases()
    wrapped = audited(leases, sqlite.log(), "LeaseService")
    assert await wrapped.GetLease(lease_pb2.GetLeaseRequest(), "context") == "context"
    # Its very method: not one step more for what is called often.
    assert wrapped.GetLease == leases.GetLease

    async def two():
        yield 1
        yield 2

    assert [item async for item in wrapped.Connect(two())] == [1, 2]
    assert await events(sqlite) == []


async def test_housekeeping_of_services_and_workers_is_not_written_down(sqlite):
    wrapped = audited(Leases(), sqlite.log(), "LeaseService")
    request = lease_pb2.FreeSessionRequest(session_id="s")
    for who in (SERVICE, TENANT, Caller()):
        await as_(who, wrapped.FreeSession, request)
    assert await events(sqlite) == []
    await as_(OPERATOR, wrapped.FreeSession, request)
    [event] = await events(sqlite)
    assert (event.action, event.target) == ("LeaseService/FreeSession", "s")


async def test_what_a_gateway_gives_back_by_itself_is_not_written_down(sqlite):
    wrapped = audited(Leases(), sqlite.log(), "LeaseService")
    # In process, with the internal token, without credentials.
    for roles in ({Role.SERVICE}, SERVICE.roles, set(Role)):
        who = Caller("acme", "req-4", frozenset(roles), actor=GATEWAY)
        await as_(who, wrapped.RevokeLease, revoke())
        assert await events(sqlite) == []
    # Of what people do nothing is left out, whatever they call themselves.
    for who in (OPERATOR, TENANT, SERVICE, Caller(), replace(TENANT, actor=GATEWAY)):
        await as_(who, wrapped.RevokeLease, revoke())
    assert len(await events(sqlite)) == 5


async def test_hostile_text_is_one_bounded_line(book):
    wrapped = audited(Leases(), book.log(), "LeaseService")
    for text in ("\0a\n\x1b[31m\u202e", "x" * 10_000, "\u00e9\U0001f600"):
        await as_(OPERATOR, wrapped.RevokeLease, revoke(text))
    long, hostile, good = sorted(
        (event.target for event in await events(book)), key=len, reverse=True
    )
    assert hostile == "?a??[31m?"
    assert good == "\u00e9\U0001f600"
    assert long == "x" * 255 + "…"


def key(**fields):
    return tenant_pb2.CreateApiKeyResponse(api_key=fields, secret="kvp_secret")


REQUESTS = {
    "TenantService/CreateTenant": (
        tenant_pb2.CreateTenantRequest(tenant_id="nova"),
        tenant_pb2.CreateTenantResponse(),
        ("nova", "nova", ""),
    ),
    "TenantService/CreateApiKey": (
        tenant_pb2.CreateApiKeyRequest(
            role=tenant_pb2.ROLE_WORKER, worker_id="w1", ttl={"seconds": 60}
        ),
        key(key_id="key-1"),
        ("", "key-1", "role=worker worker_id=w1 ttl=60s"),
    ),
    "TenantService/RevokeApiKey": (
        tenant_pb2.RevokeApiKeyRequest(key_id="key-1"),
        tenant_pb2.RevokeApiKeyResponse(api_key={"tenant_id": "nova"}),
        ("nova", "key-1", ""),
    ),
    "TenantService/SetQuotas": (
        tenant_pb2.SetQuotasRequest(
            tenant_id="nova",
            quotas={"soft": {"sessions": 0}, "hard": {"requests_per_second": 2.5}},
        ),
        tenant_pb2.SetQuotasResponse(),
        ("nova", "nova", "soft.sessions=0 hard.requests_per_second=2.5"),
    ),
    "TenantService/RotateCacheSalt": (
        tenant_pb2.RotateCacheSaltRequest(tenant_id="nova"),
        tenant_pb2.RotateCacheSaltResponse(),
        ("nova", "nova", ""),
    ),
    "SessionService/EndSession": (
        session_pb2.EndSessionRequest(name="the talk"),
        session_pb2.EndSessionResponse(session={"session_id": "session-1"}),
        ("acme", "session-1", ""),
    ),
    "LeaseService/RevokeLease": (
        revoke(),
        lease_pb2.RevokeLeaseResponse(),
        ("acme", "lease-1", ""),
    ),
    "LeaseService/ExtendHold": (
        lease_pb2.ExtendHoldRequest(session_id="s", hold={"seconds": 5}),
        lease_pb2.ExtendHoldResponse(asked=1),
        ("acme", "s", "hold=5s"),
    ),
    "LeaseService/FreeSession": (
        lease_pb2.FreeSessionRequest(session_id="s"),
        lease_pb2.FreeSessionResponse(),
        ("acme", "s", ""),
    ),
    "WorkerService/DrainWorker": (
        routing_pb2.DrainWorkerRequest(worker_id="w1", undo=True),
        routing_pb2.DrainWorkerResponse(),
        ("", "w1", "undo"),
    ),
    "WorkerService/DeregisterWorker": (
        routing_pb2.DeregisterWorkerRequest(worker_id="w1"),
        routing_pb2.DeregisterWorkerResponse(),
        ("", "w1", ""),
    ),
}


def test_every_audited_call_is_tried_here():
    assert set(REQUESTS) == {
        f"{service}/{name}" for service in ACTIONS for name in ACTIONS[service]
    }


def test_the_audited_calls_exist():
    """A call that got another name would no longer be written down, without a word."""
    modules = (lease_pb2, routing_pb2, session_pb2, tenant_pb2)
    known = {
        f"{service.name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(REQUESTS) <= known


@pytest.mark.parametrize("action", REQUESTS)
async def test_whom_and_what_each_call_concerns(sqlite, action):
    request, answer, expected = REQUESTS[action]
    service, _, name = action.partition("/")

    async def call(self, _request, context=None):
        return answer

    servicer = type("Servicer", (), {name: call})()
    wrapped = audited(servicer, sqlite.log(), service)
    assert await as_(OPERATOR, getattr(wrapped, name), request) is answer
    [event] = await events(sqlite)
    assert event.action == action
    assert (event.tenant_id, event.target, event.detail) == expected
    assert "kvp_" not in str(event)
