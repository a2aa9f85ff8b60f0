"""What is another tenant's is answered like what does not exist, and nothing is stored."""

from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from wire.methods import METHODS, put
from wire.plane import Plane
from wire.seed import RIGHT, Seed, sow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def foreign(plane: Plane, seed: Seed) -> Seed:
    """The same things, of the tenant "acme"."""
    return await sow(plane, "theirs", "acme")


Names = Callable[[Seed], dict[str, Any]]

# What each RPC of a tenant is told about, by path. Then: NOT_FOUND with that kind, or the
# answer to both.
NOT_FOUND: list[tuple[str, str, Names]] = [
    ("LeaseService/GetOwnership", "ownership",
     lambda s: {"ownership_id": s.held.ownership_id}),
    ("LeaseService/RevokeLease", "lease", lambda s: {"lease_id": s.granted.lease_id}),
    ("LeaseService/GetLease", "lease", lambda s: {"lease_id": s.granted.lease_id}),
    ("SessionService/GetSession", "session", lambda s: {"session_id": s.session_id}),
    ("SessionService/GetSession", "session",
     lambda s: {"session_id": None, "name": f"held-{s.tag}"}),
    ("SessionService/EndSession", "session", lambda s: {"session_id": s.session_id}),
    ("SessionService/EndSession", "session",
     lambda s: {"session_id": None, "name": f"held-{s.tag}"}),
    ("SessionService/WatchSessions", "session", lambda s: {"session_id": s.session_id}),
    ("SessionService/CompleteTurn", "session", lambda s: {"session_id": s.session_id}),
    ("RoutingService/Complete", "session", lambda s: {"turn.session_id": s.session_id}),
]  # fmt: skip

EMPTY: list[tuple[str, Names, Message]] = [
    ("LeaseService/ListOwnerships", lambda s: {"session_id": s.session_id},
     lease.ListOwnershipsResponse()),
    ("LeaseService/ListOwnerships", lambda s: {"session_id": None, "worker_id": s.decode},
     lease.ListOwnershipsResponse()),
    ("LeaseService/ListLeases", lambda s: {"worker_id": s.prefill}, lease.ListLeasesResponse()),
    ("LeaseService/ExtendHold", lambda s: {"session_id": s.session_id},
     lease.ExtendHoldResponse()),
    ("LeaseService/FreeSession", lambda s: {"session_id": s.session_id},
     lease.FreeSessionResponse()),
    ("SessionService/ListSessions", lambda s: {"worker_id": s.decode},
     session.ListSessionsResponse()),
]  # fmt: skip

# Not of a tenant: for workers, the services themselves, and operators.
INTERNAL = {
    "LeaseService/ReportOwnership", "LeaseService/WithdrawOwnership", "LeaseService/BeginRead",
    "LeaseService/RenewLeases", "LeaseService/ReleaseLeases", "LeaseService/EndWorkerEpoch",
    "LeaseService/Connect", *(name for name in METHODS if name.startswith("Worker")),
    *(name for name in METHODS if name.startswith(("Tenant", "Audit"))),
}  # fmt: skip
# They make what they are not told about.
MAKING = {"RoutingService/Route", "SessionService/BeginTurn", "SessionService/CreateSession"}
# They are told about nothing.
OWN = {"LeaseService/GetUsage", "SessionService/GetUsage"}


async def test_every_rpc_is_in_a_table() -> None:
    named = {name for name, *_ in NOT_FOUND + EMPTY} | {"LeaseService/GrantLease"}
    assert named | INTERNAL | MAKING | OWN == METHODS.keys()


def about(seed: Seed, name: str, names: dict[str, Any]) -> Message:
    request = RIGHT[name](seed)
    for path, value in names.items():
        put(request, path, value)
    return request


def unknown(names: dict[str, Any]) -> dict[str, Any]:
    return {path: value and f"{value[:-3]}zzz" for path, value in names.items()}


@pytest.mark.parametrize(("name", "kind", "names"), NOT_FOUND)
async def test_not_found(
    plane: Plane, seed: Seed, foreign: Seed, name: str, kind: str, names: Names
) -> None:
    before = plane.dump()
    theirs, nobodys = names(foreign), unknown(names(foreign))
    refusals = []
    for asked in (theirs, nobodys):
        refusal = await plane.refusal(name, about(seed, name, asked))
        assert (refusal.code, refusal.domain, refusal.reason) == (
            "NOT_FOUND",
            "kvplane",
            "NOT_FOUND",
        )
        (ident,) = filter(None, asked.values())
        assert refusal.metadata == {"kind": kind, "id": ident}
        refusals.append(refusal.message.replace(ident, "X"))
    assert refusals[0] == refusals[1]
    assert plane.dump() == before
    # Its own tenant gets an answer.
    assert await plane.call(name, about(foreign, name, names(foreign)), tenant="acme")


@pytest.mark.parametrize(("name", "names", "answer"), EMPTY)
async def test_nothing_there(
    plane: Plane, seed: Seed, name: str, names: Names, answer: Message
) -> None:
    number = EMPTY.index((name, names, answer))
    foreign = await sow(plane, f"more{number}", f"tenant{number}")
    before = plane.dump()
    for asked in (names(foreign), unknown(names(foreign))):
        assert await plane.call(name, about(seed, name, asked)) == answer
    after = plane.dump()
    # An end is remembered, but only among the asker's own.
    new_ends = set(after.pop("ended_sessions")) - set(before.pop("ended_sessions"))
    assert {tenant_id for tenant_id, *_ in new_ends} <= {seed.tenant}
    assert after == before
    request = about(foreign, name, names(foreign))
    assert await plane.call(name, request, tenant=foreign.tenant) != answer


async def test_no_lease_on_another_tenants_blocks(plane: Plane, seed: Seed) -> None:
    foreign = await sow(plane, "owner", "owner")
    for number, target in enumerate(
        (
            {"ownership_id": foreign.held.ownership_id},
            {"ownership_id": "own-nobody"},
            {"session_id": foreign.session_id},
            {"session_id": "session-nobody"},
        )
    ):
        request = lease.GrantLeaseRequest(
            request_id=f"foreign{number}", holder=seed.holder(), **target
        )
        before = plane.dump()
        answer = await plane.call("LeaseService/GrantLease", request)
        assert answer == lease.GrantLeaseResponse(refusal_reason=lease.REFUSAL_REASON_NOT_HELD)
        after = plane.dump()
        # The refusal is remembered, under the asking tenant, for who asks again.
        new = set(after.pop("lease_requests")) - set(before.pop("lease_requests"))
        assert {row[0] for row in new} <= {"default"}
        assert after == before


WORKERS: list[tuple[str, Message]] = [
    ("WorkerService/GetWorker", routing.GetWorkerRequest(worker_id="nobody")),
    ("WorkerService/DrainWorker", routing.DrainWorkerRequest(worker_id="nobody")),
    ("WorkerService/DeregisterWorker",
     routing.DeregisterWorkerRequest(worker_id="nobody", epoch=1)),
    ("TenantService/GetTenant", tenant.GetTenantRequest(tenant_id="nobody")),
    ("TenantService/CreateApiKey", tenant.CreateApiKeyRequest(tenant_id="nobody")),
    ("TenantService/ListApiKeys", tenant.ListApiKeysRequest(tenant_id="nobody")),
    ("TenantService/RevokeApiKey", tenant.RevokeApiKeyRequest(key_id="nobody")),
    ("TenantService/GetQuotas", tenant.GetQuotasRequest(tenant_id="nobody")),
    ("TenantService/SetQuotas", tenant.SetQuotasRequest(tenant_id="nobody")),
    ("TenantService/RotateCacheSalt", tenant.RotateCacheSaltRequest(tenant_id="nobody")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "request_"), WORKERS, ids=lambda value: str(value)[:40])
async def test_unknown_workers_tenants_and_keys(plane: Plane, name: str, request_: Message) -> None:
    before = plane.dump()
    refusal = await plane.refusal(name, request_)
    assert (refusal.code, refusal.reason) == ("NOT_FOUND", "NOT_FOUND")
    assert refusal.metadata["id"] == "nobody"
    assert plane.dump() == before


async def test_another_holders_lease_is_not_found(plane: Plane, seed: Seed) -> None:
    """For reading; in a batch it is answered as unknown."""
    other = lease.Holder(worker_id=seed.decode, epoch=1, compatibility="any")
    before = plane.dump()
    for lease_id in (seed.granted.lease_id, "lease-nobody"):
        begin = lease.BeginReadRequest(lease_id=lease_id, fencing_token=1, holder=other)
        refusal = await plane.refusal("LeaseService/BeginRead", begin)
        assert refusal.code == "NOT_FOUND"
        assert refusal.metadata == {"kind": "lease", "id": lease_id}
        renew = lease.RenewLeasesRequest(
            holder=other, leases=[lease.LeaseRef(lease_id=lease_id, fencing_token=1)]
        )
        (result,) = (await plane.call("LeaseService/RenewLeases", renew)).results
        assert result == lease.RenewResult(lease_id=lease_id)
        release = lease.ReleaseLeasesRequest(
            holder=other,
            releases=[lease.LeaseRelease(lease_id=lease_id, fencing_token=1, outcome=1)],
        )
        (released,) = (await plane.call("LeaseService/ReleaseLeases", release)).results
        assert released == lease.ReleaseResult(lease_id=lease_id)
    assert plane.dump() == before


@pytest.mark.parametrize("secret", ["", "kvp_", "kvp_wrong", "\0", "x" * 100_000])
async def test_a_secret_that_is_nobodys(plane: Plane, secret: str) -> None:
    before = plane.dump()
    refusal = await plane.refusal(
        "TenantService/ResolveApiKey", tenant.ResolveApiKeyRequest(secret=secret)
    )
    assert (refusal.code, refusal.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert "secret" not in refusal.message.lower()
    assert plane.dump() == before


async def test_a_tenant_that_exists(plane: Plane, seed: Seed) -> None:
    before = plane.dump()
    refusal = await plane.refusal(
        "TenantService/CreateTenant", tenant.CreateTenantRequest(tenant_id="default")
    )
    assert (refusal.code, refusal.reason) == ("ALREADY_EXISTS", "ALREADY_EXISTS")
    assert refusal.metadata == {"kind": "tenant", "id": "default"}
    assert plane.dump() == before


@pytest.mark.parametrize("named", ["a b", "-a", "x" * 65, "a/b", "a:b", "$"])
async def test_a_tenant_that_cannot_be(plane: Plane, seed: Seed, named: str) -> None:
    before = plane.dump()
    refusal = await plane.refusal(
        "SessionService/CreateSession", RIGHT["SessionService/CreateSession"](seed), tenant=named
    )
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert refusal.metadata == {"field": "x-kvplane-tenant"}
    assert plane.dump() == before
