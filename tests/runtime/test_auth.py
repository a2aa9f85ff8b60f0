"""Who is believed to be whom, with API keys and certificates, and what they may call."""

import asyncio

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.api.tenant.v1 import tenant_pb2
from kvplane.client.keys import Keys
from kvplane.kernel import errors
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.context import GATEWAY, Caller, Identity, Role, set_caller
from kvplane.runtime.auth import ApiKeys, TrustedNetwork
from runtime.fakes import Tenants
from runtime.until import until

GET = lease_pb2.GetLeaseRequest(lease_id="l1")
TOKEN = {"authorization": "Bearer internal-secret"}
TOKENS = frozenset({Role.SERVICE, Role.OPERATOR})


def report(worker_id):
    return lease_pb2.ReportOwnershipRequest(worker_id=worker_id)


def hello(worker_id):
    return lease_pb2.ConnectRequest(hello=lease_pb2.Hello(worker_id=worker_id))


@pytest.fixture
def tenants():
    return Tenants()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def keys(tenants, clock):
    return Keys(tenants, clock, ttl=5.0)


@pytest.fixture
def authenticator(keys):
    return ApiKeys(keys, "internal-secret")


@pytest.fixture
async def running(start, authenticator, clock):
    return await start(authenticator, clock=clock)


async def test_a_key_names_the_tenant_whatever_else_is_said(running):
    await running.leases(token="kvp_a", tenant="bolt").GetLease(GET)
    (who,) = running.servicer.callers
    assert (who.tenant_id, who.roles, who.actor) == ("acme", {Role.TENANT}, "key:id-kvp_a")


@pytest.mark.parametrize("token", [None, "kvp_nobody", "nonsense", "internal-secre"])
async def test_without_a_good_one_nobody_gets_in(running, token):
    with pytest.raises(errors.Unauthenticated):
        await running.leases(token=token).GetLease(GET)
    assert running.servicer.callers == []


async def test_the_internal_token_speaks_for_any_tenant_and_worker(running, tenants):
    set_caller(Caller("bolt", "r1", actor="key:someone"))
    api = running.leases(token="internal-secret")
    await api.GetLease(GET)
    await api.ReportOwnership(report("w1"))
    await api.ReportOwnership(report("w2"))
    assert running.servicer.callers == [Caller("bolt", "r1", TOKENS, "", "key:someone")] * 3
    assert tenants.asked == 0


async def test_a_tenants_key_cannot_do_what_workers_do(running):
    with pytest.raises(errors.PermissionDenied, match="ReportOwnership is for worker or service"):
        await running.leases(token="kvp_a").ReportOwnership(report("w1"))
    assert running.servicer.callers == []


async def test_a_workers_key_speaks_for_that_worker_only(running):
    api = running.leases(token="kvp_w", tenant="bolt")
    for own in ("w1", "w1-dp0", "w1-dp17"):
        await api.ReportOwnership(report(own))
    assert {who.tenant_id for who in running.servicer.callers} == {"bolt"}
    said = set()
    for other in ("w2", "w", "w11", "w1-dp", "w1-dpx", "w1-dp1-dp2", "nobody", "W1", "w1 ",
                  "w1-dp01", "w1-dp10000", "1"):  # fmt: skip
        with pytest.raises(errors.PermissionDenied) as caught:
            await api.ReportOwnership(report(other))
        said.add((caught.value.message, str(caught.value.metadata)))
    assert said == {("this credential speaks for worker 'w1' only", "{}")}
    assert len(running.servicer.callers) == 3
    with pytest.raises(errors.PermissionDenied, match="this credential's role is worker"):
        await api.GetLease(GET)


async def test_every_message_of_a_workers_stream_is_its_own(running):
    async def opened(*first):
        async def say():
            for worker_id in first:
                yield hello(worker_id)

        return [answer async for answer in running.leases(token="kvp_w").Connect(say())]

    assert len(await opened("w1", "w1-dp1")) == 2
    for others in (["w2"], ["nobody"], ["w1", "w2"]):
        with pytest.raises(errors.PermissionDenied, match="for worker 'w1' only"):
            await opened(*others)


async def test_streams_are_guarded_too(running):
    async def first(**options):
        changes = running.sessions(**options).WatchSessions(session_pb2.WatchSessionsRequest())
        try:
            return (await anext(changes)).session.tenant_id
        finally:
            await changes.aclose()

    assert await first(token="kvp_b") == "bolt"
    with pytest.raises(errors.Unauthenticated):
        await first()


async def test_a_stream_ends_soon_after_its_key_is_revoked(running, tenants, clock):
    changes = running.sessions(token="kvp_b").WatchSessions(session_pb2.WatchSessionsRequest())
    assert (await anext(changes)).session.tenant_id == "bolt"
    more = asyncio.ensure_future(anext(changes))

    def later(done):
        clock.advance(1)
        return done()

    await until(lambda: later(lambda: tenants.asked >= 3))
    assert not more.done()
    del tenants.keys["kvp_b"]
    await until(lambda: later(more.done))
    with pytest.raises(errors.Unauthenticated):
        await more


@pytest.mark.parametrize(
    ("mistake", "told"),
    [(ZeroDivisionError("ours"), errors.Internal), (TimeoutError(), errors.Unavailable)],
)
async def test_a_stream_ends_when_its_credentials_cannot_be_looked_at(start, lines, mistake, told):
    class Broken(TrustedNetwork):
        again_s, answers = 5.0, 0

        async def caller(self, metadata, certificate=None):
            self.answers += 1
            if self.answers > 1:
                raise mistake
            return await super().caller(metadata, certificate)

    clock = FakeClock()
    running = await start(Broken(), clock=clock)
    changes = running.sessions().WatchSessions(session_pb2.WatchSessionsRequest())
    await anext(changes)
    more = asyncio.ensure_future(anext(changes))

    def later():
        clock.advance(1)
        return more.done()

    await until(later)
    with pytest.raises(told):
        await more
    [line] = lines.all("call failed")
    assert line["exception"][0]["exc_type"] == type(mistake).__name__


async def test_a_revoked_key_is_believed_for_the_time_set(running, tenants, clock):
    api = running.leases(token="kvp_a")
    for _ in range(5):
        await api.GetLease(GET)
    assert tenants.asked == 1
    del tenants.keys["kvp_a"]
    clock.advance(4.9)
    await api.GetLease(GET)
    clock.advance(0.2)
    with pytest.raises(errors.Unauthenticated):
        await api.GetLease(GET)


# -- who a caller is -----------------------------------------------------------------


def certificate(kind, name):
    return Identity(kind, name)


def key(secret, **more):
    return {"authorization": f"Bearer {secret}", "x-request-id": "r", **more}


@pytest.mark.parametrize(
    ("identity", "roles", "worker_id"),
    [
        (certificate("service", "gateway"), {Role.SERVICE}, ""),
        (certificate("worker", "w1"), {Role.WORKER}, "w1"),
        (certificate("operator", "ann"), {Role.OPERATOR}, ""),
    ],
)
async def test_a_certificate_alone(authenticator, identity, roles, worker_id):
    who = await authenticator.caller({"x-kvplane-tenant": "bolt"}, identity)
    assert (who.tenant_id, who.roles, who.worker_id) == ("bolt", roles, worker_id)
    assert who.actor == f"cert:{identity.kind}/{identity.name}"


async def test_a_clients_certificate_needs_a_key_beside_it(authenticator):
    client = certificate("client", "someone")
    with pytest.raises(errors.Unauthenticated):
        await authenticator.caller({}, client)
    who = await authenticator.caller(key("kvp_a"), client)
    assert who == Caller("acme", "r", frozenset({Role.TENANT}), "", "key:id-kvp_a")


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer  ", "Basic dXNlcjpw", "kvp_a"])
async def test_a_certificate_mends_no_wrong_credential(authenticator, given):
    for identity in (None, certificate("operator", "ann")):
        with pytest.raises(errors.Unauthenticated):
            await authenticator.caller({"authorization": given}, identity)


async def test_a_key_and_a_workers_certificate(authenticator):
    async def worker_of(secret, name):
        who = await authenticator.caller(key(secret), certificate("worker", name))
        return who.roles, who.worker_id

    assert await worker_of("kvp_w", "w1") == ({Role.WORKER}, "w1")
    # Of an engine and one of its ranks, the rank is meant.
    assert await worker_of("kvp_w", "w1-dp2") == ({Role.WORKER}, "w1-dp2")
    assert await worker_of("kvp_o", "w1") == ({Role.OPERATOR}, "w1")
    assert await worker_of("internal-secret", "w1") == (TOKENS, "w1")
    with pytest.raises(errors.PermissionDenied):
        await worker_of("kvp_w", "w2")


async def test_only_services_say_who_called_them(authenticator):
    told = {"x-kvplane-actor": "key:k7"}
    assert (await authenticator.caller({**TOKEN, **told})).actor == "key:k7"
    service = certificate("service", "gateway")
    assert (await authenticator.caller(told, service)).actor == "key:k7"
    assert (await authenticator.caller(TOKEN)).actor == "token"
    odd = {"x-kvplane-actor": "cert:operator/Zo%C3%AB%00"}
    assert (await authenticator.caller({**TOKEN, **odd})).actor == "cert:operator/Zoë"
    assert (await authenticator.caller(told, certificate("operator", "a"))).actor == (
        "cert:operator/a"
    )
    for secret in ("kvp_a", "kvp_w", "kvp_o"):
        assert (await authenticator.caller(key(secret, **told))).actor == f"key:id-{secret}"


async def test_a_gateway_says_over_the_wire_what_it_does_by_itself(start, running):
    set_caller(Caller("acme", "r1", frozenset({Role.SERVICE}), actor=GATEWAY))
    trusting = await start(TrustedNetwork())
    await trusting.leases().GetLease(GET)
    await running.leases(token="internal-secret").GetLease(GET)
    # A tenant that says so is still that tenant.
    await running.leases(token="kvp_a").GetLease(GET)
    found = [who.actor for who in trusting.servicer.callers + running.servicer.callers]
    assert found == [GATEWAY, GATEWAY, "key:id-kvp_a"]


async def test_operators_and_workers_name_a_tenant(authenticator):
    for secret in ("kvp_o", "kvp_w"):
        who = await authenticator.caller(key(secret, **{"x-kvplane-tenant": "bolt"}))
        assert who.tenant_id == "bolt"
        with pytest.raises(errors.InvalidField, match="x-kvplane-tenant"):
            await authenticator.caller(key(secret, **{"x-kvplane-tenant": "a/b"}))


async def test_nobodys_key_is_about_the_asker(authenticator):
    """So that a gateway with a wrong token tells no tenant that its key is wrong."""
    for given in (key("kvp_nobody"), {}):
        with pytest.raises(errors.Unauthenticated) as caught:
            await authenticator.caller(given)
        assert caught.value.metadata == {"credential": "caller"}


async def test_on_loopback_everybody_may_everything():
    who = await TrustedNetwork().caller({"x-kvplane-tenant": "bolt", "x-request-id": "r"})
    assert who == Caller("bolt", "r", frozenset(Role), "", "local")


async def test_without_an_internal_token_an_empty_one_is_none(keys):
    for given in ("", "Bearer", "Bearer "):
        with pytest.raises(errors.Unauthenticated):
            await ApiKeys(keys, "").caller({"authorization": given})


async def test_a_role_of_the_future_is_good_for_nothing(authenticator, tenants):
    tenants.keys["kvp_x"] = tenant_pb2.ResolveApiKeyResponse(tenant_id="acme", role=99)
    # Neither is a worker's key without a worker, which would be any worker's.
    tenants.keys["kvp_y"] = tenant_pb2.ResolveApiKeyResponse(role=tenant_pb2.ROLE_WORKER)
    for secret in ("kvp_x", "kvp_y"):
        with pytest.raises(errors.Unauthenticated):
            await authenticator.caller(key(secret))
