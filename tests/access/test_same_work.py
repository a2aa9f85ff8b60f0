"""Another tenant's id costs the database what an unknown one does: the very same statements."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from access.plane import Guarded, guarded
from google.protobuf.message import Message
from kvplane.api.lease.v1 import lease_pb2 as lease
from sqlalchemy import Engine, event
from wire.methods import METHODS, put
from wire.plane import Refusal, refusal_of
from wire.seed import RIGHT, Seed, sow

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ids = Callable[[Seed], dict[str, Any]]

# What names something of a tenant's, or of a worker's, for each RPC that takes such an id.
# Not a handle: by the engines' own names, workers read for every tenant.
IDS: list[tuple[str, Ids]] = [
    ("LeaseService/GetOwnership", lambda s: {"ownership_id": s.held.ownership_id}),
    ("LeaseService/ListOwnerships", lambda s: {"session_id": s.session_id, "worker_id": None}),
    ("LeaseService/ListOwnerships", lambda s: {"session_id": None, "worker_id": s.decode}),
    ("LeaseService/GrantLease",
     lambda s: {"handle": None, "ownership_id": s.held.ownership_id, "request_id": s.tag}),
    ("LeaseService/GrantLease",
     lambda s: {"handle": None, "session_id": s.session_id, "request_id": s.tag}),
    ("LeaseService/BeginRead", lambda s: {"lease_id": s.granted.lease_id}),
    ("LeaseService/RenewLeases", lambda s: {"leases": [lease.LeaseRef(**s.ref())]}),
    ("LeaseService/ReleaseLeases",
     lambda s: {"releases": [lease.LeaseRelease(**s.ref(), outcome=1)]}),
    ("LeaseService/RevokeLease", lambda s: {"lease_id": s.granted.lease_id}),
    ("LeaseService/GetLease", lambda s: {"lease_id": s.granted.lease_id}),
    ("LeaseService/ListLeases", lambda s: {"session_id": s.session_id, "worker_id": None}),
    ("LeaseService/ListLeases", lambda s: {"worker_id": s.prefill}),
    ("LeaseService/ExtendHold", lambda s: {"session_id": s.session_id}),
    ("LeaseService/FreeSession", lambda s: {"session_id": s.session_id}),
    ("SessionService/GetSession", lambda s: {"session_id": s.session_id}),
    ("SessionService/GetSession", lambda s: {"session_id": None, "name": f"held-{s.tag}"}),
    ("SessionService/ListSessions", lambda s: {"worker_id": s.decode}),
    ("SessionService/EndSession", lambda s: {"session_id": s.session_id}),
    ("SessionService/EndSession", lambda s: {"session_id": None, "name": f"held-{s.tag}"}),
    ("SessionService/WatchSessions", lambda s: {"session_id": s.session_id}),
    ("SessionService/CreateSession", lambda s: {"name": f"held-{s.tag}"}),
    ("SessionService/BeginTurn",
     lambda s: {"key.history": None, "key.name": f"held-{s.tag}", "request_id": f"t-{s.tag}"}),
    ("SessionService/CompleteTurn", lambda s: {"session_id": s.session_id}),
    ("RoutingService/Complete", lambda s: {"turn.session_id": s.session_id}),
]  # fmt: skip

# They take no id of a tenant's things: workers' own reports, operators' and services' RPCs.
OTHERS = {
    "LeaseService/ReportOwnership", "LeaseService/WithdrawOwnership", "LeaseService/Connect",
    "LeaseService/EndWorkerEpoch", "LeaseService/GetUsage", "SessionService/GetUsage",
    # It begins a turn as BeginTurn does.
    "RoutingService/Route",
    *(name for name in METHODS if name.startswith(("Worker", "Tenant", "Audit"))),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """Without a gateway, which would ask for workers meanwhile."""
    async with guarded(migrated, tmp_path_factory.mktemp("plane"), gateway=False) as plane:
        yield plane


async def test_every_rpc_is_thought_of() -> None:
    assert {name for name, _ in IDS} | OTHERS == METHODS.keys()
    assert not {name for name, _ in IDS} & OTHERS


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect what is executed on any database."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def nobodys(seed: Seed, ids: dict[str, Any]) -> dict[str, Any]:
    """The same, of the same length, of things that never were."""

    def other(value: Any) -> Any:
        if isinstance(value, list):
            return [other(item) for item in value]
        if isinstance(value, Message):
            made = type(value)()
            made.CopyFrom(value)
            for name in ("lease_id", "request_id"):
                if name in made.DESCRIPTOR.fields_by_name:
                    setattr(made, name, other(getattr(made, name)))
            return made
        return value and f"{value[:-3]}zzz"

    return {path: other(value) for path, value in ids.items()}


@pytest.mark.parametrize("number", range(len(IDS)), ids=lambda n: IDS[n][0])
async def test_the_same_statements(plane: Guarded, number: int) -> None:
    name, ids = IDS[number]
    mine = await sow(plane, f"mine{number}", f"mine{number}")
    theirs = await sow(plane, f"theirs{number}", f"theirs{number}")
    asked = []
    for named in (ids(theirs), nobodys(theirs, ids(theirs))):
        request = RIGHT[name](mine)
        for path, value in named.items():
            put(request, path, value)
        if name == "LeaseService/BeginRead":
            put(request, "holder", mine.holder())
        asked.append(request)
    # What is looked up once in a while, such as limits, has been.
    await told(plane.call(name, asked[1], tenant="warm"))
    answers, done = [], []
    for request in asked:
        with statements() as seen:
            answers.append(await told(plane.call(name, request, tenant=mine.tenant)))
        done.append(list(seen))
    assert done[0] == done[1]
    assert done[0]
    assert _kind(answers[0]) == _kind(answers[1])


async def told(call: Awaitable[Any]) -> Message | Refusal:
    try:
        answer: Message = await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    return answer


def _kind(answer: Message | Refusal) -> Any:
    """What of an answer is not the id that was asked for."""
    if isinstance(answer, Refusal):
        return answer.code, answer.reason, sorted(answer.metadata)
    return type(answer), sorted(field.name for field, _ in answer.ListFields())


async def test_the_statements_of_ones_own_are_seen(plane: Guarded) -> None:
    """So that the comparison is not one of nothing."""
    own = await sow(plane, "own", "own")
    with statements() as seen:
        await plane.call("SessionService/GetSession", RIGHT["SessionService/GetSession"](own),
                         tenant="own")  # fmt: skip
    assert any("sessions" in statement for statement in seen)
