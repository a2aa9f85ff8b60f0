"""A request that is sent again: the same answer and the same rows.

A client cannot know whether a call that was lost has been done, so it sends it again.
"""

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from kvplane.api.lease.v1 import lease_pb2
from kvplane.client.connect import IDEMPOTENT
from wire.methods import METHODS
from wire.plane import Plane, refusal_of
from wire.seed import RIGHT, sow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Again:
    """What the second call may do that the first did not, and why."""

    why: str
    # Fields of the answer that may differ, as the second answer has them.
    fields: dict[str, Any] | None = None
    # The reason of the error that answers the second call.
    error: str = ""
    # A table and a column whose values may differ; "" for one more row.
    rows: tuple[str, str] | None = None


READS = {
    "LeaseService/GetOwnership", "LeaseService/ListOwnerships", "LeaseService/GetLease",
    "LeaseService/ListLeases", "WorkerService/GetWorker", "WorkerService/ListWorkers",
    "SessionService/GetSession", "SessionService/ListSessions", "SessionService/WatchSessions",
    "TenantService/GetTenant", "TenantService/ListTenants", "TenantService/ListApiKeys",
    "TenantService/ResolveApiKey", "TenantService/GetQuotas", "LeaseService/GetUsage",
    "SessionService/GetUsage", "AuditService/ListAuditEvents",
}  # fmt: skip

WRITES: dict[str, Again | None] = {
    "LeaseService/ReportOwnership": None,
    "LeaseService/WithdrawOwnership": None,
    "LeaseService/GrantLease": None,
    "LeaseService/BeginRead": None,
    "LeaseService/RenewLeases": None,
    "LeaseService/ReleaseLeases": None,
    "LeaseService/RevokeLease": None,
    "LeaseService/ExtendHold": Again(
        "the owner is asked again, in place of the first question",
        rows=("lease_commands", "command_id"),
    ),
    "LeaseService/FreeSession": Again("it counts what it freed now", fields={"freed": 0}),
    "LeaseService/EndWorkerEpoch": Again(
        "it counts what was lost now", fields={"ownerships_lost": 0, "leases_lost": 0}
    ),
    "LeaseService/Connect": Again(
        "each stream has a name and a number of its own", rows=("worker_epochs", "")
    ),
    "RoutingService/Route": None,
    "RoutingService/Complete": None,
    "WorkerService/RegisterWorker": None,
    "WorkerService/Heartbeat": None,
    "WorkerService/DrainWorker": None,
    "WorkerService/DeregisterWorker": None,
    "SessionService/CreateSession": Again("it says who made it", fields={"created": False}),
    "SessionService/EndSession": Again("it says who ended it", fields={"already_ended": True}),
    "SessionService/BeginTurn": None,
    "SessionService/CompleteTurn": None,
    "TenantService/CreateTenant": Again("the name is taken", error="ALREADY_EXISTS"),
    "TenantService/CreateApiKey": Again(
        "a secret is shown once, so another key is made",
        fields={},
        rows=("api_keys", ""),
    ),
    "TenantService/RevokeApiKey": None,
    "TenantService/SetQuotas": None,
    "TenantService/RotateCacheSalt": Again(
        "each time the last one is given up", rows=("tenants", "cache_salt")
    ),
}


async def test_every_rpc_is_in_the_table() -> None:
    assert READS | WRITES.keys() == METHODS.keys()
    assert not READS & WRITES.keys()


async def test_the_client_repeats_only_what_changes_nothing_more() -> None:
    harmful = {
        name.partition("/")[2]
        for name, again in WRITES.items()
        if again is not None and (again.rows or again.error)
    }
    # Streams are opened again by who has them.
    assert harmful.isdisjoint(IDEMPOTENT)
    repeated = {name for name in METHODS if name.partition("/")[2] in IDEMPOTENT}
    assert METHODS.keys() - repeated == {
        "LeaseService/RevokeLease", "LeaseService/ExtendHold", "LeaseService/Connect",
        "WorkerService/DeregisterWorker", "SessionService/WatchSessions",
        "TenantService/CreateTenant", "TenantService/CreateApiKey", "TenantService/RevokeApiKey",
        "TenantService/RotateCacheSalt",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(READS))
async def test_a_read_writes_nothing(plane: Plane, name: str) -> None:
    seed = await sow(plane, _tag(name))
    before = plane.dump()
    first = await plane.call(name, RIGHT[name](seed))
    assert await plane.call(name, RIGHT[name](seed)) == first
    assert first.ByteSize()
    assert plane.dump() == before


@pytest.mark.parametrize("name", sorted(WRITES))
async def test_a_write_again(plane: Plane, name: str) -> None:
    seed = await sow(plane, _tag(name))
    untouched = plane.dump()
    first = await plane.call(name, RIGHT[name](seed))
    once = plane.dump()
    assert once != untouched, "a right request that writes nothing shows nothing"
    again = WRITES[name] or Again("")
    if again.error:
        assert (await plane.refusal(name, RIGHT[name](seed))).reason == again.error
    else:
        assert_same(first, await plane.call(name, RIGHT[name](seed)), again)
    twice = plane.dump()
    if again.rows:
        once, twice = _without(once, *again.rows), _without(twice, *again.rows)
    assert twice == once


def assert_same(first: Message, second: Message, again: Again) -> None:
    if again.fields is None:
        assert second == first
        return
    # What is said to differ must: else the table is wrong.
    assert second != first
    for field, value in again.fields.items():
        assert getattr(second, field) == value
        second.ClearField(field)
        first.ClearField(field)
    if again.fields:
        assert second == first


async def test_a_streamed_report_again(plane: Plane) -> None:
    """A worker that lost its stream sends on the next one what was not acknowledged."""
    seed = await sow(plane, "stream")
    report = RIGHT["LeaseService/ReportOwnership"](seed)
    message = lease_pb2.ConnectRequest(
        report=lease_pb2.Report(
            sequence=7, time_anchor=report.time_anchor, ownerships=report.ownerships
        )
    )
    dumps = []
    for _ in range(2):
        stream = plane.stub(METHODS["LeaseService/Connect"])(timeout=20)
        hello = RIGHT["LeaseService/Connect"](seed)
        hello.hello.held.add(engine_id=f"engine-d-{seed.tag}", request_id=f"request1-{seed.tag}")
        hello.hello.held.add(engine_id=f"engine-d-{seed.tag}", request_id=f"new-{seed.tag}")
        await stream.write(hello)
        assert (await stream.read()).HasField("welcome")
        await stream.write(message)
        while (answer := await stream.read()).WhichOneof("message") != "acknowledged":
            assert answer is not grpc.aio.EOF
        assert answer.acknowledged.sequence == 7
        stream.cancel()
        dumps.append(_without(plane.dump(), "worker_epochs", ""))
    assert dumps[0] == dumps[1]


async def test_another_request_under_the_same_key_is_refused(plane: Plane) -> None:
    """An idempotency key stands for one request; a second meaning is a mistake."""
    seed = await sow(plane, "keys")
    ask = RIGHT["LeaseService/GrantLease"](seed)
    await plane.call("LeaseService/GrantLease", ask)
    turn = RIGHT["SessionService/BeginTurn"](seed)
    await plane.call("SessionService/BeginTurn", turn)
    route = RIGHT["RoutingService/Route"](seed)
    route.request_id = turn.request_id
    ask.holder.worker_id = "another"
    turn.key.name = "another"
    before = plane.dump()
    for name, request in (
        ("LeaseService/GrantLease", ask),
        ("SessionService/BeginTurn", turn),
        ("RoutingService/Route", route),
    ):
        refusal = await plane.refusal(name, request)
        assert refusal.metadata == {"field": "request_id"}
    assert plane.dump() == before


async def test_both_of_two_at_the_same_moment_get_the_same(plane: Plane) -> None:
    import asyncio

    seed = await sow(plane, "twins")
    for name in ("LeaseService/GrantLease", "RoutingService/Route", "SessionService/BeginTurn"):
        request = RIGHT[name](seed)
        if name == "RoutingService/Route":
            request.session.name = f"leased-{seed.tag}"
        answers = await asyncio.gather(
            *(plane.call(name, request) for _ in range(8)), return_exceptions=True
        )
        for answer in answers:
            assert not isinstance(answer, grpc.aio.AioRpcError), refusal_of(answer)
            assert answer == answers[0]


def _tag(name: str) -> str:
    return name.partition("/")[2].lower()


def _without(
    dump: dict[str, list[tuple[Any, ...]]], table: str, column: str
) -> dict[str, list[tuple[Any, ...]]]:
    """The dump without a column's values; without the table for ""."""
    if not column:
        return {name: rows for name, rows in dump.items() if name != table}
    from kvplane.db.metadata import metadata

    columns = list(metadata.tables[table].columns.keys())
    at = columns.index(column)
    rows = sorted((row[:at] + row[at + 1 :] for row in dump[table]), key=repr)
    return {**dump, table: rows}
