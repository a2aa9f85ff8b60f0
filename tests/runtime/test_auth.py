"""Who is believed to be whom, with API keys."""

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel import errors
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.context import Caller, set_caller
from kvplane.runtime.auth import TENANT_METHODS, ApiKeys, KeyCache
from runtime.fakes import Tenants

GET = lease_pb2.GetLeaseRequest(lease_id="l1")


@pytest.fixture
def tenants():
    return Tenants()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
async def running(start, tenants, clock):
    return await start(ApiKeys(KeyCache(tenants, clock, 5.0), "internal-secret"))


async def test_a_key_names_the_tenant_whatever_else_is_said(running):
    await running.leases(token="kvp_a", tenant="bolt").GetLease(GET)
    assert running.servicer.callers[0].tenant_id == "acme"


@pytest.mark.parametrize("token", [None, "kvp_nobody", "nonsense", "internal-secre"])
async def test_without_a_good_one_nobody_gets_in(running, token):
    with pytest.raises(errors.Unauthenticated):
        await running.leases(token=token).GetLease(GET)
    assert running.servicer.callers == []


async def test_the_internal_token_speaks_for_any_tenant(running, tenants):
    set_caller(Caller("bolt", "r1"))
    await running.leases(token="internal-secret").GetLease(GET)
    await running.leases(token="internal-secret").ReportOwnership(
        lease_pb2.ReportOwnershipRequest()
    )
    assert running.servicer.callers == [Caller("bolt", "r1")] * 2
    assert tenants.asked == 0


async def test_a_key_cannot_do_what_workers_do(running):
    with pytest.raises(errors.PermissionDenied, match="ReportOwnership"):
        await running.leases(token="kvp_a").ReportOwnership(lease_pb2.ReportOwnershipRequest())
    assert running.servicer.callers == []


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


async def test_a_key_is_asked_for_once_in_a_while(running, tenants, clock):
    api = running.leases(token="kvp_a")
    for _ in range(5):
        await api.GetLease(GET)
    assert tenants.asked == 1
    del tenants.keys["kvp_a"]  # revoked: believed for 5 s more
    clock.advance(4.9)
    await api.GetLease(GET)
    clock.advance(0.2)
    with pytest.raises(errors.Unauthenticated):
        await api.GetLease(GET)


async def test_a_new_key_works_at_once(running, tenants):
    api = running.leases(token="kvp_new")
    with pytest.raises(errors.Unauthenticated):
        await api.GetLease(GET)
    tenants.keys["kvp_new"] = "nova"
    await api.GetLease(GET)
    assert running.servicer.callers[0].tenant_id == "nova"


def test_what_keys_may_call_exists():
    from kvplane.api.lease.v1 import lease_pb2
    from kvplane.api.routing.v1 import routing_pb2

    exist = {
        f"/{service.full_name}/{method.name}"
        for module in (lease_pb2, routing_pb2, session_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert exist >= TENANT_METHODS
    for internal in ("GrantLease", "BeginRead", "EndWorkerEpoch", "Connect", "RegisterWorker"):
        assert not any(method.endswith(f"/{internal}") for method in TENANT_METHODS)


def test_an_empty_internal_token_is_refused(tenants, clock):
    with pytest.raises(ValueError, match="internal_token"):
        ApiKeys(KeyCache(tenants, clock), "")
