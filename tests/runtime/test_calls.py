"""What every call gets: its caller, a deadline, an error that can be rebuilt, a log line."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from kvplane.api.lease.v1 import lease_pb2
from kvplane.client import session_api
from kvplane.kernel import errors
from kvplane.kernel.context import Caller, set_caller
from kvplane.runtime.status import CODES, to_status
from runtime.until import until

GET = lease_pb2.GetLeaseRequest(lease_id="l1")


def raises(error):
    def behave():
        raise error

    return behave


EACH_ERROR = [
    errors.InvalidField("ttl", "must be positive"),
    errors.NotFound("lease", "l1"),
    errors.StaleEpoch("w1", 3),
    errors.StaleFencingToken("l1"),
    errors.IllegalTransition("lease", "l1", "EXPIRED", "renew it"),
    errors.QuotaExceeded("too many leases", metadata={"quota": "leases"}, retry_after=2.5),
    errors.Unavailable("the database is away", retry_after=1.0),
    errors.NoWorker("no worker serves m"),
    errors.Unauthenticated("no key"),
    errors.PermissionDenied("not yours"),
    errors.AlreadyExists("tenant", "t"),
    errors.Internal("broken"),
]


@pytest.mark.parametrize("error", EACH_ERROR, ids=lambda e: e.reason)
async def test_an_error_arrives_as_it_was_raised(start, error):
    running = await start()
    running.servicer.behaviour = raises(error)
    with pytest.raises(type(error)) as caught:
        await running.leases(timeout=0.9).GetLease(GET)
    assert caught.value.message == error.message
    assert caught.value.retry_after == error.retry_after
    assert error.metadata.items() <= caught.value.metadata.items()


def test_all_errors_are_covered():
    assert {e.reason for e in EACH_ERROR} == set(errors.ERRORS_BY_REASON)
    assert all(e.code in CODES for e in EACH_ERROR)


async def test_on_the_wire_it_is_a_google_rpc_status(start):
    running = await start()
    running.servicer.behaviour = raises(errors.InvalidField("ttl", "must be positive"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub().GetLease(GET)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "ttl: must be positive"
    raw = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    status.details[0].Unpack(info)
    status.details[1].Unpack(bad)
    assert (info.reason, info.domain, info.metadata["field"]) == ("INVALID_FIELD", "kvplane", "ttl")
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == (
        "ttl",
        "must be positive",
    )


async def test_a_long_message_is_cut_so_that_it_fits_into_trailers(start):
    running = await start()
    running.servicer.behaviour = raises(errors.NotFound("lease", "\ud800" + "é" * 100_000))
    with pytest.raises(errors.NotFound, match="no lease"):
        await running.leases().GetLease(GET)
    assert len(to_status(errors.Internal("x" * 99_999)).message) <= 1000


async def test_an_unknown_exception_tells_nothing_but_the_log_has_it(start, lines):
    running = await start()
    running.servicer.behaviour = raises(RuntimeError("secret path /etc/x"))
    set_caller(Caller(request_id="req-7"))
    with pytest.raises(errors.Internal) as caught:
        await running.leases().GetLease(GET)
    assert "secret" not in str(caught.value)
    assert caught.value.metadata == {"request_id": "req-7"}
    (entry,) = lines.all("call failed")
    assert "secret path" in str(entry["exception"])
    assert (entry["request_id"], entry["level"]) == ("req-7", "error")


async def test_the_caller_travels(start):
    running = await start()
    set_caller(Caller("acme", "req-1"))
    await running.leases().GetLease(GET)
    assert running.servicer.callers == [Caller("acme", "req-1")]


async def test_without_a_word_it_is_the_default_tenant_and_a_new_request_id(start):
    running = await start()
    for _ in range(2):
        await running.stub().GetLease(GET)
    first, second = running.servicer.callers
    assert first.tenant_id == second.tenant_id == "default"
    assert first.request_id != second.request_id != ""


async def test_a_tenant_that_cannot_be_one_is_refused(start):
    running = await start()
    with pytest.raises(errors.InvalidField) as caught:
        await running.leases(tenant="a b").GetLease(GET)
    assert caught.value.metadata["field"] == "x-kvplane-tenant"
    assert running.servicer.callers == []


async def test_one_call_s_caller_does_not_reach_the_next(start):
    running = await start()
    await running.leases(tenant="acme").GetLease(GET)
    await running.stub().GetLease(GET)
    assert [who.tenant_id for who in running.servicer.callers] == ["acme", "default"]


async def test_without_a_deadline_there_is_one(start, lines):
    running = await start(default_deadline=0.1)
    running.servicer.behaviour = lambda: asyncio.sleep(30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub().GetLease(GET)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.1 s" in caught.value.details()
    await until(lambda: lines.all("call"))
    assert lines.all("call")[0]["code"] == "DEADLINE_EXCEEDED"


async def test_the_client_s_deadline_wins_over_ours(start):
    running = await start(default_deadline=0.05)
    running.servicer.behaviour = lambda: asyncio.sleep(0.2)
    await running.leases(timeout=10).GetLease(GET)


async def test_a_part_that_took_too_long_is_unavailable(start):
    running = await start()
    running.servicer.behaviour = raises(TimeoutError())
    with pytest.raises(errors.Unavailable, match="too long"):
        await running.leases(timeout=0.2).GetLease(GET)


async def test_a_line_and_metrics_for_each_call(start, lines):
    running = await start()
    await running.leases(tenant="acme").GetLease(GET)
    running.servicer.behaviour = raises(errors.NotFound("lease", "l1"))
    with pytest.raises(errors.NotFound):
        await running.leases(tenant="acme").GetLease(GET)
    await until(lambda: len(lines.all("call")) == 2)
    good, bad = lines.all("call")
    assert (good["method"], good["code"], good["tenant"]) == (
        "LeaseService/GetLease",
        "OK",
        "acme",
    )
    assert good["ms"] >= 0
    assert good["request_id"]
    assert bad["code"] == "NOT_FOUND"
    method = "LeaseService/GetLease"
    for code in ("OK", "NOT_FOUND"):
        assert running.metric("kvplane_rpc_calls_total", method=method, code=code) == 1
    assert running.metric("kvplane_rpc_seconds_count", method=method) == 2
    assert running.metric("kvplane_rpc_open", method=method) == 0


async def test_a_client_that_leaves_is_counted_and_stops_the_work(start, lines):
    running = await start()
    gone = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            gone.set()
            raise

    running.servicer.behaviour = work
    with pytest.raises(errors.Unavailable):
        await running.leases(timeout=0.1).GetLease(GET)
    await until(lambda: gone.is_set() and lines.all("call"))
    assert lines.all("call")[0]["code"] == "CANCELLED"


async def test_while_the_gate_is_shut_every_call_hears_why(start):
    closed = errors.Unavailable("run `kvplane migrate up`", retry_after=1.0)
    answers = [closed, None]
    running = await start(gate=lambda: answers[0])
    with pytest.raises(errors.Unavailable, match="migrate up"):
        await running.leases(timeout=0.5).GetLease(GET)
    assert running.servicer.callers == []
    answers.pop(0)
    await running.leases().GetLease(GET)


async def test_streams_have_the_same_caller_errors_and_lines(start, lines):
    running = await start()
    hello = lease_pb2.ConnectRequest(hello=lease_pb2.Hello(worker_id="w"))
    metadata = (("x-kvplane-tenant", "acme"), ("x-request-id", "r9"))

    stream = running.stub().Connect(iter([hello, hello]), metadata=metadata)
    assert len([answer async for answer in stream]) == 2
    assert running.servicer.callers == [Caller("acme", "r9")]

    running.servicer.behaviour = raises(errors.StaleEpoch("w", 1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(running.stub().Connect(iter([hello]), metadata=metadata)))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    await until(lambda: len(lines.all("call")) == 2)
    assert [line["code"] for line in lines.all("call")] == ["OK", "ABORTED"]


async def test_a_stream_of_answers_knows_its_caller(start):
    running = await start()
    from kvplane.api.session.v1 import session_pb2

    watch = session_api(running.address, tenant="acme", channels=running.channels)
    changes = watch.WatchSessions(session_pb2.WatchSessionsRequest())
    assert (await anext(changes)).session.tenant_id == "acme"
    await changes.aclose()


async def test_a_message_over_the_limit_is_refused(start):
    running = await start()
    params = lease_pb2.Ownership(digests=b"x" * (9 << 20))
    with pytest.raises(errors.QuotaExceeded):
        await running.leases().ReportOwnership(
            lease_pb2.ReportOwnershipRequest(ownerships=[params])
        )
    params = lease_pb2.Ownership(digests=b"x" * (7 << 20))
    await running.leases().ReportOwnership(lease_pb2.ReportOwnershipRequest(ownerships=[params]))


async def test_a_method_that_does_not_exist(start):
    running = await start()
    call = running.channels.get(running.address).unary_unary("/kvplane.api.lease.v1.LeaseService/X")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
