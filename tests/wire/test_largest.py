"""The largest values that pass the checks also pass the database, PostgreSQL above all.

It is strict where SQLite is not: lengths of texts, ranges of numbers.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest_asyncio
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.db import migrate
from wire.bad import MOST, duration
from wire.methods import METHODS, put
from wire.plane import Plane, running_on
from wire.seed import RIGHT, sow
from wire.test_bad_input import BAD

LONGEST = 4 << 20
YEAR = duration(366 * 86_400)

# Paths to the largest numbers, lists and times.
LARGEST: list[tuple[str, dict[str, Any]]] = [
    ("LeaseService/ReportOwnership", {
        "worker_id": "far", "epoch": MOST, "time_anchor.anchor": 2**62 - 1,
        "time_anchor.elapsed": YEAR,
        "ownerships[0].turn": MOST, "ownerships[0].epoch": MOST,
        "ownerships[0].num_tokens": LONGEST // 16 * 65_536, "ownerships[0].block_size": 65_536,
        "ownerships[0].digests": b"x" * LONGEST, "ownerships[0].hold": YEAR,
        "ownerships[0].params.remote_num_tokens": LONGEST // 16 * 65_536,
        "ownerships[0].params.remote_registration_generation": MOST,
        "ownerships[0].params.remote_block_ids[0].ids": [MOST] * 1000,
        "ownerships[0].params.remote_port": 65_535, "ownerships[0].params.tp_size": 65_536,
        "ownerships[0].params.extra_json": '{"a":"' + "\\u0000" * 10_000 + '"}',
    }),
    ("LeaseService/WithdrawOwnership", {"worker_id": "far2", "epoch": MOST}),
    ("LeaseService/GrantLease", {
        "holder.epoch": MOST, "holder.worker_id": "far3", "min_tokens": MOST, "ttl": YEAR,
    }),
    ("LeaseService/BeginRead", {"fencing_token": MOST, "ttl": YEAR}),
    ("LeaseService/BeginRead", {"holder.epoch": MOST}),
    ("LeaseService/RenewLeases", {"leases[0].fencing_token": MOST, "ttl": YEAR}),
    ("LeaseService/RenewLeases", {"ttl": YEAR}),
    ("LeaseService/RenewLeases", {"holder.epoch": MOST}),
    ("LeaseService/ReleaseLeases", {"releases[0].fencing_token": MOST}),
    ("LeaseService/ExtendHold", {"hold": YEAR}),
    ("LeaseService/EndWorkerEpoch", {"worker_id": "far4", "current_epoch": MOST}),
    ("LeaseService/Connect", {"hello.worker_id": "far5", "hello.epoch": MOST}),
    ("LeaseService/ListOwnerships", {"page_size": 1000}),
    ("LeaseService/ListLeases", {"states": [1, 2, 3, 4, 5] * 200}),
    ("RoutingService/Route", {"prompt_tokens_estimate": 2**53}),
    ("RoutingService/Complete", {"turn.turn": 2**53}),
    ("WorkerService/RegisterWorker", {
        "worker.max_model_len": 2**53, "worker.recompute_threshold": 2**31 - 1,
        "worker.kv_port": 65_535, "worker.data_parallel_rank": 65_535,
        "worker.compatibility.block_size": 65_536, "worker.served_models": ["é" * 128] * 64,
    }),
    ("WorkerService/Heartbeat", {
        "beats[0].load.running": 2**31 - 1, "beats[0].load.waiting": 2**31 - 1,
        "beats[0].load.held": 2**31 - 1, "beats[0].load.kv_usage": 1.0,
    }),
    ("WorkerService/Heartbeat", {"beats[0].epoch": 2**62}),
    ("SessionService/BeginTurn", {"key": session.SessionKey(name="\0" * 512)}),
    ("SessionService/BeginTurn", {"key": session.SessionKey(name="\U0001f600" * 128)}),
    ("SessionService/BeginTurn", {
        "key": session.SessionKey(history=[bytes([n]) * 16 for n in range(64)]),
    }),
    ("SessionService/CreateSession", {"name": "\0" * 512, "model": "\U0001f600" * 64}),
    ("SessionService/CompleteTurn", {"turn": 2**62}),
    ("SessionService/CompleteTurn", {
        "prompt_tokens": 10**9, "completion_tokens": 10**9, "tokens_reused": 10**9,
        "time_to_first_token": duration(86_400),
    }),
    ("TenantService/CreateTenant", {"display_name": "\U0001f600" * 64}),
    ("TenantService/ListTenants", {"page_size": 1000}),
    ("TenantService/ResolveApiKey", {"secret": "\0" * 1_000_000}),
]  # fmt: skip


def longest() -> dict[tuple[str, str], str]:
    """Of each text with a limit, what is one byte shorter than too long."""
    found: dict[tuple[str, str], str] = {}
    for name, cases in BAD.items():
        for path, value in (item for case in cases for item in case.put.items()):
            overlong = isinstance(value, str) and len(value) > 60 and set(value) == {"x"}
            if overlong and not path.startswith(("page_token", "report", "withdraw", "command")):
                found[name, path] = min(value[:-1], found.get((name, path), value[:-1]), key=len)
    return found


LONG = longest()


@pytest_asyncio.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Plane]:
    await migrate.upgrade(postgres_database)
    async with running_on(postgres_database) as plane:
        yield plane


# What a right request about something that is not there may get.
ANSWERS = {"OK", "NOT_FOUND", "ABORTED", "UNAUTHENTICATED"}
OTHER = (
    "holder.compatibility: differs from the owner's",
    "UNAVAILABLE: no live worker serves",
    # Of the worker that was registered before with the same one.
    "ALREADY_EXISTS: engine",
)


async def outcome(plane: Plane, name: str, request: Any) -> str:
    try:
        await plane.call(name, request)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_the_largest_numbers_and_lists(postgres: Plane) -> None:
    failed = []
    for number, (name, values) in enumerate(LARGEST):
        seed = await sow(postgres, f"n{number}")
        request = RIGHT[name](seed)
        for path, value in values.items():
            put(request, path, value)
        told = await outcome(postgres, name, request)
        if told.partition(":")[0] not in ANSWERS:
            failed.append((name, list(values), told))
    assert failed == []


async def test_the_longest_texts(postgres: Plane) -> None:
    assert len(LONG) > 50
    failed = []
    seed = await sow(postgres, "one")
    for number, ((name, path), long) in enumerate(LONG.items()):
        value = f"{number:03}{long[3:]}"
        told = await outcome(postgres, name, prepared(name, path, value, seed))
        if told.partition(":")[0] not in ANSWERS and not any(other in told for other in OTHER):
            failed.append((name, path, len(value), told))
    assert failed == []


def prepared(name: str, path: str, value: str, seed: Any) -> Any:
    request = RIGHT[name](seed)
    if name in {"SessionService/GetSession", "SessionService/EndSession"} and path == "name":
        request.ClearField("session_id")
    if hasattr(request, "request_id") and name != "SessionService/CompleteTurn":
        request.request_id = f"of-{path}"
    if (name, path) == ("TenantService/CreateApiKey", "worker_id"):
        request.tenant_id, request.role = "", tenant.ROLE_WORKER
    if name == "LeaseService/ReportOwnership":
        request.ownerships[0].params.remote_request_id = f"of-{path}"
    put(request, path, value)
    return request


async def test_what_is_largest_comes_back_as_it_was(postgres: Plane) -> None:
    seed = await sow(postgres, "back")
    report = RIGHT["LeaseService/ReportOwnership"](seed)
    own = report.ownerships[0]
    own.turn, own.params.remote_registration_generation = MOST, MOST
    own.params.remote_block_ids[0].ids[:] = [MOST, 0]
    own.params.extra_json = '{"text":"\\u0000\\ud800"}'
    own.params.remote_blocks_expiry_time = 1e308
    stored = (await postgres.call("LeaseService/ReportOwnership", report)).ownerships[0]
    got = await postgres.call(
        "LeaseService/GetOwnership", lease.GetOwnershipRequest(ownership_id=stored.ownership_id)
    )
    assert got.ownership.params == own.params
    assert got.ownership.turn == MOST
    for text in ("\0" * 512, "A", "a", "a ", "é", "e\u0301", "\U0001f600" * 128):
        made = await postgres.call(
            "SessionService/CreateSession", session.CreateSessionRequest(name=text, model="m")
        )
        assert made.created
        found = await postgres.call(
            "SessionService/GetSession", session.GetSessionRequest(name=text)
        )
        assert found.session == made.session
        assert found.session.name == text


def test_every_rpc_that_stores_a_text_is_among_the_longest() -> None:
    assert {name for name, *_ in LONG} >= {
        name for name in METHODS if name.partition("/")[2].startswith(("Report", "Begin", "Create"))
    } - {"TenantService/CreateApiKey"} | {"WorkerService/RegisterWorker", "RoutingService/Route"}
