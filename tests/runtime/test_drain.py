"""The end of a server: health first, streams ended, unary calls finished within the grace."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel.errors import Unavailable
from runtime.until import until

GET = lease_pb2.GetLeaseRequest(lease_id="l1")
HELLO = lease_pb2.ConnectRequest(hello=lease_pb2.Hello(worker_id="w"))
LEASES = "kvplane.api.lease.v1.LeaseService"


async def health(running, service=""):
    stub = health_pb2_grpc.HealthStub(running.channels.get(running.address))
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def open_stream(running):
    """A worker's stream that has been answered once and goes on."""
    first = asyncio.Event()

    async def requests():
        yield HELLO
        await asyncio.Event().wait()

    async def follow():
        async for _ in running.leases().Connect(requests()):
            first.set()

    task = asyncio.create_task(follow())
    async with asyncio.timeout(5):
        await first.wait()
    return task


async def test_health_follows_serving_for_each_service(start):
    running = await start()
    assert await health(running) == "NOT_SERVING"
    await running.server.set_serving(True)
    assert await health(running) == await health(running, LEASES) == "SERVING"
    await running.server.set_serving(False)
    assert await health(running, LEASES) == "NOT_SERVING"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(running, "nobody.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_streams_end_so_that_clients_connect_elsewhere(start, lines):
    running = await start()
    stream = await open_stream(running)
    changes = running.sessions().WatchSessions(session_pb2.WatchSessionsRequest())
    await anext(changes)
    started = time.monotonic()
    await running.server.stop(10)
    assert time.monotonic() - started < 2
    with pytest.raises(Unavailable, match="shutting down"):
        await stream
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(changes)
    assert running.servicer.ended == ["cancelled"]
    await until(lambda: len(lines.all("call")) == 2)
    assert [line["code"] for line in lines.all("call")] == ["UNAVAILABLE"] * 2


async def test_calls_under_way_finish_and_new_ones_are_turned_away(start):
    running = await start()
    go_on = asyncio.Event()
    running.servicer.behaviour = go_on.wait
    call = asyncio.create_task(running.leases().GetLease(GET))
    await until(lambda: running.servicer.callers)
    stopping = asyncio.create_task(running.server.stop(10))
    await asyncio.sleep(0)  # let it begin
    with pytest.raises(Unavailable):
        await running.leases(timeout=0.5).ReportOwnership(lease_pb2.ReportOwnershipRequest())
    assert not stopping.done()
    go_on.set()
    assert (await call).lease.lease_id == "l1"
    async with asyncio.timeout(5):
        await stopping


async def test_after_the_grace_what_still_runs_is_cut(start):
    running = await start()
    running.servicer.behaviour = lambda: asyncio.sleep(60)
    call = asyncio.create_task(running.leases(timeout=30).GetLease(GET))
    await until(lambda: running.servicer.callers)
    async with asyncio.timeout(5):
        await running.server.stop(0.1)
    call.cancel()  # the client would try another replica


async def test_a_taken_port_is_an_error_not_a_second_listener(start):
    from kvplane.kernel.clock import SystemClock
    from kvplane.runtime.auth import TrustedNetwork
    from kvplane.runtime.interceptors import CallInterceptor
    from kvplane.runtime.metrics import RpcMetrics
    from kvplane.runtime.server import GrpcServer
    from prometheus_client import CollectorRegistry

    running = await start()
    metrics = RpcMetrics(CollectorRegistry())
    calls = CallInterceptor(TrustedNetwork(), metrics, SystemClock(), default_deadline=1)
    second = GrpcServer({}, calls)
    with pytest.raises(OSError, match="cannot listen"):
        await second.start("127.0.0.1", running.port)


async def test_reflection_names_our_services(start):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    running = await start()
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channels.get(running.address))
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answer = await anext(aiter(stub.ServerReflectionInfo(asked)))
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {LEASES, "kvplane.api.session.v1.SessionService", "grpc.health.v1.Health"}
