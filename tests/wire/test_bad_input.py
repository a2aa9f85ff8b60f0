"""Every RPC names the wrong field, says the fix, and stores nothing."""

import pytest
from kvplane.api.lease.v1 import lease_pb2
from wire.bad import Bad, duration
from wire.bad_lease import LEASE
from wire.bad_rest import AUDIT, ROUTING, SESSION, TENANT, WORKERS
from wire.methods import METHODS, is_field, put
from wire.plane import Plane, Refusal, refused
from wire.seed import RIGHT, Seed

pytestmark = pytest.mark.asyncio(loop_scope="module")

BAD = {
    f"{service}/{name}": cases
    for service, table in (
        ("LeaseService", LEASE),
        ("RoutingService", ROUTING),
        ("WorkerService", WORKERS),
        ("SessionService", SESSION),
        ("TenantService", TENANT),
        ("AuditService", AUDIT),
    )
    for name, cases in table.items()
}
# RPCs without an input that is wrong in itself, and why.
NEVER_WRONG = {
    "TenantService/ResolveApiKey": "any text is either a key or not one: UNAUTHENTICATED",
    "LeaseService/GetUsage": "it has no fields",
    "SessionService/GetUsage": "it has no fields",
}

CASES = [(name, case) for name, cases in BAD.items() for case in cases]
NAMES = [f"{name.partition('/')[2]}-{case}" for name, case in CASES]


async def test_every_rpc_has_bad_inputs_in_the_table() -> None:
    assert BAD.keys() == METHODS.keys()
    assert RIGHT.keys() == METHODS.keys()
    assert {name for name, cases in BAD.items() if not cases} == NEVER_WRONG.keys()


async def test_every_field_of_every_request_has_bad_inputs() -> None:
    """But for the flags, and what only the server sets."""
    missed = {
        f"{name}.{field.name}"
        for name, method in METHODS.items()
        for field in method.descriptor.input_type.fields
        if not any(
            path.partition(".")[0].partition("[")[0] == field.name
            for case in BAD[name]
            for path in (case.field, *case.put)
        )
    }
    assert missed == {
        "LeaseService/GrantLease.begin_read",
        "RoutingService/Route.force_recompute",
        "WorkerService/DrainWorker.undo",
        "TenantService/ResolveApiKey.secret",
    }


@pytest.mark.parametrize(("name", "case"), CASES, ids=NAMES)
async def test_bad_input(plane: Plane, seed: Seed, name: str, case: Bad) -> None:
    method = METHODS[name]
    request = later(seed, case.field) if case.later else RIGHT[name](seed)
    for path, value in case.put.items():
        put(request, path, value)
    if case.later:
        refusal, before = await second_message(plane, seed, request)
    else:
        before = plane.dump()
        refusal = await plane.refusal(name, request)
    assert (refusal.code, refusal.domain, refusal.reason) == (
        "INVALID_ARGUMENT",
        "kvplane",
        "INVALID_FIELD",
    ), refusal
    assert refusal.metadata == {"field": case.field}
    assert is_field(method.descriptor.input_type, case.field)
    assert refusal.message.startswith(f"{case.field}: ")
    problem = refusal.message.removeprefix(f"{case.field}: ")
    assert len(problem) > 5
    assert refusal.violations == [(case.field, problem)]
    assert plane.dump() == before


def later(seed: Seed, field: str) -> lease_pb2.ConnectRequest:
    """A right message for a stream that has begun, of the kind that the field is in."""
    anchor = lease_pb2.TimeAnchor(anchor=seed.anchor)
    kind = field.partition(".")[0]
    if kind == "report":
        own = seed.ownership("later", seed.session_id, 2)
        report = lease_pb2.Report(sequence=1, time_anchor=anchor, ownerships=[own])
        return lease_pb2.ConnectRequest(report=report)
    if kind == "withdraw":
        gone = lease_pb2.Withdraw(sequence=1, handles=[seed.handle()])
        return lease_pb2.ConnectRequest(withdraw=gone)
    ack = lease_pb2.CommandAck(command_id="c", time_anchor=anchor, done=True, hold=duration(9))
    return lease_pb2.ConnectRequest(command_ack=ack)


async def second_message(plane: Plane, seed: Seed, request: object) -> tuple[Refusal, dict]:
    """Send it on a stream that has begun well."""
    stream = plane.stub(METHODS["LeaseService/Connect"])(timeout=20)
    await stream.write(RIGHT["LeaseService/Connect"](seed))
    assert (await stream.read()).HasField("welcome")
    before = plane.dump()
    await stream.write(request)
    return await refused(stream), before
