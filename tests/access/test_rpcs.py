"""Every RPC with every kind of credential: the outcomes, written down by hand."""

from dataclasses import replace
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio
from access.plane import TOKEN, Credentials, Guarded
from google.protobuf.message import Message
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from wire.methods import METHODS
from wire.plane import Refusal, refusal_of, refused
from wire.seed import RIGHT, Seed, sow

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Outcomes. YES: an answer. NO: PERMISSION_DENIED. GONE: NOT_FOUND, as for what never was.
# BARE: an answer with nothing in it, but for whose it is.
YES, NO, GONE, BARE = "yes", "no", "gone", "bare"

# By who calls: the tenant whose things are named, another tenant, the worker that is named,
# another worker, an operator, a service of ours. Nobody, somebody unknown, an expired and a
# revoked key are UNAUTHENTICATED everywhere.
MATRIX: Final[dict[str, tuple[str, str, str, str, str, str]]] = {
    #                                   tenant other worker another operator service
    "LeaseService/ReportOwnership":     (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/WithdrawOwnership":   (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/GetOwnership":        (YES, GONE, NO,  NO, YES, YES),
    "LeaseService/ListOwnerships":      (YES, BARE, NO,  NO, YES, YES),
    "LeaseService/GrantLease":          (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/BeginRead":           (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/RenewLeases":         (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/ReleaseLeases":       (NO,  NO,   YES, NO, NO,  YES),
    "LeaseService/RevokeLease":         (YES, GONE, NO,  NO, YES, YES),
    "LeaseService/GetLease":            (YES, GONE, NO,  NO, YES, YES),
    "LeaseService/ListLeases":          (YES, BARE, NO,  NO, YES, YES),
    "LeaseService/ExtendHold":          (YES, BARE, NO,  NO, YES, YES),
    "LeaseService/FreeSession":         (YES, BARE, NO,  NO, YES, YES),
    "LeaseService/EndWorkerEpoch":      (NO,  NO,   NO,  NO, NO,  YES),
    "LeaseService/GetUsage":            (YES, BARE, NO,  NO, YES, YES),
    "LeaseService/Connect":             (NO,  NO,   YES, NO, NO,  YES),
    "SessionService/CreateSession":     (YES, YES,  NO,  NO, YES, YES),
    "SessionService/GetSession":        (YES, GONE, NO,  NO, YES, YES),
    "SessionService/ListSessions":      (YES, BARE, NO,  NO, YES, YES),
    "SessionService/EndSession":        (YES, GONE, NO,  NO, YES, YES),
    "SessionService/WatchSessions":     (YES, GONE, NO,  NO, YES, YES),
    "SessionService/BeginTurn":         (NO,  NO,   NO,  NO, NO,  YES),
    "SessionService/CompleteTurn":      (NO,  NO,   NO,  NO, NO,  YES),
    "SessionService/GetUsage":          (YES, BARE, NO,  NO, YES, YES),
    "RoutingService/Route":             (NO,  NO,   NO,  NO, NO,  YES),
    "RoutingService/Complete":          (NO,  NO,   NO,  NO, NO,  YES),
    "WorkerService/RegisterWorker":     (NO,  NO,   YES, NO, NO,  YES),
    "WorkerService/Heartbeat":          (NO,  NO,   YES, NO, NO,  YES),
    "WorkerService/DrainWorker":        (NO,  NO,   NO,  NO, YES, YES),
    "WorkerService/DeregisterWorker":   (NO,  NO,   YES, NO, YES, YES),
    "WorkerService/GetWorker":          (NO,  NO,   NO,  NO, YES, YES),
    "WorkerService/ListWorkers":        (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/CreateTenant":       (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/GetTenant":          (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/ListTenants":        (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/CreateApiKey":       (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/ListApiKeys":        (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/RevokeApiKey":       (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/ResolveApiKey":      (NO,  NO,   NO,  NO, NO,  YES),
    "TenantService/GetQuotas":          (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/SetQuotas":          (NO,  NO,   NO,  NO, YES, YES),
    "TenantService/RotateCacheSalt":    (NO,  NO,   NO,  NO, YES, YES),
    "AuditService/ListAuditEvents":     (NO,  NO,   NO,  NO, YES, YES),
}  # fmt: skip

# The worker that a request names; the decode worker where it is not said.
NAMES: Final = {
    **dict.fromkeys(
        ("GrantLease", "BeginRead", "RenewLeases", "ReleaseLeases", "DeregisterWorker"), "p-"
    ),
    "RegisterWorker": "new-",
}


async def test_every_rpc_is_in_the_matrix() -> None:
    assert MATRIX.keys() == METHODS.keys()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seed(plane: Guarded, credentials: Credentials) -> Seed:
    """Something of every kind, in the tenant "acme"; nobody may change it."""
    return await sow(plane, "acme", "acme")


async def outcome(
    plane: Guarded, name: str, request: Message, tenant_id: str, credential: str
) -> Message | Refusal:
    try:
        answer: Message = await plane.call(name, request, tenant=tenant_id, credential=credential)
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    return answer


def request_of(name: str, seed: Seed) -> Message:
    made: Message = RIGHT[name](seed)
    return made


def worker_of(name: str, seed: Seed) -> str:
    return NAMES.get(name.partition("/")[2], "d-") + seed.tag


@pytest.mark.parametrize("name", MATRIX)
async def test_without_a_good_credential(
    plane: Guarded, credentials: Credentials, seed: Seed, name: str
) -> None:
    before = plane.dump()
    said = set()
    for credential in ("", "kvp_nobodys", credentials.expired, credentials.revoked, TOKEN[:-1]):
        told = await outcome(plane, name, request_of(name, seed), "acme", credential)
        assert isinstance(told, Refusal), (name, told)
        assert (told.code, told.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        said.add(told.message)
    # An expired and a revoked key are told what nobody's is told.
    assert len(said) <= 2
    assert plane.dump() == before


@pytest.mark.parametrize("name", MATRIX)
async def test_with_one_that_is_not_enough(
    plane: Guarded, credentials: Credentials, seed: Seed, name: str
) -> None:
    _, _, worker, _, operator, _ = MATRIX[name]
    given = {
        "tenant": (MATRIX[name][0], seed.secret),
        "other": (MATRIX[name][1], credentials.stranger),
        "worker": (worker, await plane.worker_key(worker_of(name, seed))),
        "another": (MATRIX[name][3], credentials.another_worker),
        "nobody": (MATRIX[name][3], credentials.unknown_worker),
        "operator": (operator, credentials.operator),
    }
    before = _without_traces(plane)
    for who, (expected, credential) in given.items():
        if expected == YES:
            continue
        told = await outcome(plane, name, request_of(name, seed), "acme", credential)
        if expected == BARE:
            bare = METHODS[name].response()
            if getattr(told, "tenant_id", ""):
                bare.tenant_id = "stranger"
            assert told == bare, (name, who)
            continue
        assert isinstance(told, Refusal), (name, who, told)
        assert told.code == {NO: "PERMISSION_DENIED", GONE: "NOT_FOUND"}[expected], (who, told)
    assert _without_traces(plane) == before


@pytest.mark.parametrize("who", ["tenant", "other", "worker", "operator", "service"])
async def test_with_one_that_is_enough(plane: Guarded, credentials: Credentials, who: str) -> None:
    """Each RPC on things of its own, since it may change them."""
    column = ("tenant", "other", "worker", "another", "operator", "service").index(who)
    for number, (name, expected) in enumerate(MATRIX.items()):
        if expected[column] != YES:
            continue
        tag = f"{who}{number}"
        seed = await sow(plane, tag, tag)
        credential = {
            "tenant": seed.secret,
            "other": credentials.stranger,
            "operator": credentials.operator,
            "service": TOKEN,
        }.get(who) or await plane.worker_key(worker_of(name, seed))
        told = await outcome(plane, name, request_of(name, seed), tag, credential)
        assert not isinstance(told, Refusal), (name, told)


def _without_traces(plane: Guarded) -> dict[str, list[tuple[Any, ...]]]:
    """The database, but for the ends of nobody's sessions, which are remembered."""
    rows = plane.dump()
    rows.pop("ended_sessions")
    return rows


async def test_another_workers_id_and_an_unknown_one_are_told_the_same(
    plane: Guarded, credentials: Credentials, seed: Seed
) -> None:
    nobody = replace(seed, tag="nobody-at-all")
    for name, expected in MATRIX.items():
        if expected[2] != YES:
            continue
        told = [
            await outcome(plane, name, request_of(name, one), "acme", credentials.another_worker)
            for one in (seed, nobody)
        ]
        assert told[0] == told[1], name
        assert isinstance(told[0], Refusal)
        assert told[0].message == "this credential speaks for worker 'p-bystander' only"


async def test_a_tenants_key_is_that_tenant_whatever_it_says(
    plane: Guarded, credentials: Credentials, seed: Seed
) -> None:
    request = session.ListSessionsRequest()
    for named in ("acme", "stranger", "nobody"):
        listed = await plane.call(
            "SessionService/ListSessions", request, tenant=named, credential=seed.secret
        )
        assert {one.tenant_id for one in listed.sessions} == {"acme"}


async def test_a_stream_of_a_worker_is_its_own_to_the_end(
    plane: Guarded, credentials: Credentials
) -> None:
    """A later Hello could name another; nothing comes of it."""
    seed = await sow(plane, "streams", "streams")
    key = await plane.worker_key(seed.decode)
    method = METHODS["LeaseService/Connect"]
    metadata = (("authorization", f"Bearer {key}"),)
    stream = plane.stub(method)(metadata=metadata, timeout=20)
    await stream.write(request_of("LeaseService/Connect", seed))
    assert (await stream.read()).HasField("welcome")
    await stream.write(
        lease.ConnectRequest(hello=lease.Hello(worker_id="p-bystander", epoch=1, number=1))
    )
    assert (await refused(stream)).code == "PERMISSION_DENIED"


async def test_a_workers_address_is_no_other_workers_to_change(
    plane: Guarded, credentials: Credentials, seed: Seed
) -> None:
    """What a worker may do for itself tells nothing of others."""
    told = await outcome(
        plane,
        "WorkerService/RegisterWorker",
        routing.RegisterWorkerRequest(
            worker=routing.Worker(worker_id=seed.decode, url="http://10.6.6.6:1"), instance_id="x"
        ),
        "acme",
        credentials.another_worker,
    )
    assert isinstance(told, Refusal)
    assert told.code == "PERMISSION_DENIED"
