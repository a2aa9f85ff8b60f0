import asyncio
from urllib.parse import unquote

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.routing.v1 import routing_pb2_grpc
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.api.tenant.v1 import tenant_pb2_grpc
from kvplane.client import KvplaneClient
from kvplane.client.channels import target
from kvplane.client.connect import IDEMPOTENT
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import (
    InvalidField,
    NotFound,
    NoWorker,
    QuotaExceeded,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)


async def fail(context, code, reason="", message="no", metadata=None, retry_after=None):
    status = status_pb2.Status(code=code.value[0], message=message)
    if reason:
        info = error_details_pb2.ErrorInfo(reason=reason, domain="kvplane", metadata=metadata or {})
        status.details.add().Pack(info)
    if retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    await context.abort_with_status(rpc_status.to_status(status))


class Fakes(
    lease_pb2_grpc.LeaseServiceServicer,
    routing_pb2_grpc.RoutingServiceServicer,
    routing_pb2_grpc.WorkerServiceServicer,
    tenant_pb2_grpc.TenantServiceServicer,
):
    """Answers with what a test queues; remembers what came."""

    def __init__(self):
        self.calls = []
        self.failures = []
        self.metadata = {}
        self.stream_cancelled = asyncio.Event()

    async def _answer(self, name, context, response):
        self.calls.append(name)
        self.metadata = dict(context.invocation_metadata())
        if self.failures:
            await fail(context, *self.failures.pop(0))
        return response

    async def GetLease(self, request, context):
        return await self._answer(
            "GetLease",
            context,
            lease.GetLeaseResponse(lease=lease.Lease(lease_id=request.lease_id, fencing_token=7)),
        )

    async def Route(self, request, context):
        return await self._answer("Route", context, routing.RouteResponse(turn=3))

    async def CreateTenant(self, request, context):
        return await self._answer("CreateTenant", context, tenant.CreateTenantResponse())

    async def ListWorkers(self, request, context):
        self.calls.append("ListWorkers")
        await asyncio.Event().wait()

    async def Connect(self, requests, context):
        self.metadata = dict(context.invocation_metadata())
        try:
            async for message in requests:
                if message.HasField("hello"):
                    yield lease.ConnectResponse(welcome=lease.Welcome(anchor=1))
                elif message.HasField("report"):
                    yield lease.ConnectResponse(
                        acknowledged=lease.Acknowledged(sequence=message.report.sequence)
                    )
                else:
                    await fail(context, grpc.StatusCode.ABORTED, "STALE_EPOCH")
            await asyncio.Event().wait()
        finally:
            self.stream_cancelled.set()


def serve(fakes):
    server = grpc.aio.server()
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(fakes, server)
    routing_pb2_grpc.add_RoutingServiceServicer_to_server(fakes, server)
    routing_pb2_grpc.add_WorkerServiceServicer_to_server(fakes, server)
    tenant_pb2_grpc.add_TenantServiceServicer_to_server(fakes, server)
    return server


@pytest.fixture
async def fakes():
    return Fakes()


@pytest.fixture
async def address(fakes):
    server = serve(fakes)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def client(address):
    async with KvplaneClient(address) as client:
        yield client


async def test_a_call_and_who_is_calling(client, fakes):
    set_caller(Caller("acme", "req-1"))
    answer = await client.leases.GetLease(lease.GetLeaseRequest(lease_id="lease-1"))
    assert (answer.lease.lease_id, answer.lease.fencing_token) == ("lease-1", 7)
    assert fakes.metadata["x-kvplane-tenant"] == "acme"
    assert fakes.metadata["x-request-id"] == "req-1"


async def test_a_request_id_with_odd_characters_fails_no_call(client, fakes):
    set_caller(Caller("acme", "réq\n1"))
    await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert fakes.metadata["x-request-id"] == "r?q?1"


async def test_a_fixed_tenant_and_token_win(address, fakes):
    set_caller(Caller("acme", ""))
    async with KvplaneClient(address, tenant="other", token="secret") as client:
        await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert fakes.metadata["x-kvplane-tenant"] == "other"
    assert fakes.metadata["authorization"] == "Bearer secret"
    assert "x-request-id" not in fakes.metadata


async def test_any_name_of_who_acts_goes_along(client, fakes):
    actor = "cert:operator/Zoë 100%\n/x"
    set_caller(Caller("acme", "", actor=actor))
    await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert unquote(fakes.metadata["x-kvplane-actor"]) == actor


async def test_the_newline_of_a_token_s_file_is_left_out(address, fakes):
    async with KvplaneClient(address, token="secret\n") as client:
        await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert fakes.metadata["authorization"] == "Bearer secret"


@pytest.mark.parametrize("name", ["token", "tenant"])
@pytest.mark.parametrize("value", ["sécret", "a\nb", "\x00"])
async def test_what_no_header_can_hold_is_named(address, name, value):
    with pytest.raises(InvalidField) as caught:
        await KvplaneClient(address, **{name: value}).__aenter__()
    assert caught.value.metadata["field"] == name
    assert value not in caught.value.message


async def test_the_trace_goes_along(client, fakes):
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, TraceFlags(1)))
    with use_span(span):
        await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert fakes.metadata["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", NotFound),
        (grpc.StatusCode.ABORTED, "STALE_EPOCH", StaleEpoch),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", InvalidField),
        (grpc.StatusCode.NOT_FOUND, "", NotFound),
        (grpc.StatusCode.UNAUTHENTICATED, "", Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "A_REASON_OF_TOMORROW", QuotaExceeded),
    ],
)
async def test_errors_are_rebuilt(client, fakes, code, reason, kind):
    fakes.failures = [(code, reason, "a sentence", {"field": "x"}, 1.5)]
    with pytest.raises(kind, match="a sentence") as caught:
        await client.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    assert type(caught.value) is kind
    assert caught.value.retry_after == 1.5
    assert caught.value.metadata == ({"field": "x"} if reason else {})
    assert fakes.calls == ["GetLease"]


async def test_a_broken_status_still_gives_the_code(client, fakes):
    class Garbage(Fakes):
        async def GetLease(self, request, context):
            context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    server = serve(Garbage())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with KvplaneClient(f"127.0.0.1:{port}") as other:
        with pytest.raises(NotFound, match="gone"):
            await other.leases.GetLease(lease.GetLeaseRequest(lease_id="x"))
    await server.stop(0)


async def test_an_outage_is_retried_where_that_is_safe(client, fakes):
    fakes.failures = [(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")] * 2
    assert (await client.routing.Route(routing.RouteRequest(request_id="r"))).turn == 3
    assert fakes.calls == ["Route"] * 3


async def test_an_outage_is_not_retried_where_it_is_not_safe(client, fakes):
    fakes.failures = [(grpc.StatusCode.UNAVAILABLE, "")]
    with pytest.raises(Unavailable):
        await client.tenants.CreateTenant(tenant.CreateTenantRequest(tenant_id="t"))
    assert fakes.calls == ["CreateTenant"]


async def test_no_worker_is_an_answer(client, fakes):
    fakes.failures = [(grpc.StatusCode.UNAVAILABLE, "NO_WORKER")]
    with pytest.raises(NoWorker):
        await client.routing.Route(routing.RouteRequest(request_id="r"))
    assert fakes.calls == ["Route"]


async def test_retries_end_with_the_deadline(address, fakes):
    fakes.failures = [(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")] * 1000
    loop = asyncio.get_running_loop()
    begin = loop.time()
    async with KvplaneClient(address, timeout=0.3) as client:
        with pytest.raises(Unavailable):
            await client.routing.Route(routing.RouteRequest(request_id="r"))
    assert loop.time() - begin < 1.0
    assert len(fakes.calls) < 10


async def test_a_silent_server_meets_the_deadline(address, fakes):
    async with KvplaneClient(address, timeout=0.1) as client:
        with pytest.raises(Unavailable):
            await client.workers.ListWorkers(routing.ListWorkersRequest())
    assert fakes.calls == ["ListWorkers"]


async def test_nobody_there_is_unavailable_in_time_and_heals(fakes):
    server = serve(fakes)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()  # one that never started keeps its port when it stops
    await server.stop(0)
    async with KvplaneClient(f"127.0.0.1:{port}", timeout=0.3) as client:
        with pytest.raises(Unavailable):
            await client.routing.Route(routing.RouteRequest(request_id="r"))
        server = serve(fakes)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        async with asyncio.timeout(5):
            while True:
                try:
                    answer = await client.routing.Route(routing.RouteRequest(request_id="r"))
                    break
                except Unavailable:
                    continue
        assert answer.turn == 3
        await server.stop(0)


async def test_replicas_share_the_calls_and_one_may_die():
    fakes = [Fakes(), Fakes()]
    servers, ports = [], []
    for fake in fakes:
        server = serve(fake)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    address = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with KvplaneClient(address) as client:
        async with asyncio.timeout(5):
            while not (fakes[0].calls and fakes[1].calls):
                await client.routing.Route(routing.RouteRequest(request_id="r"))
        await servers[0].stop(0)
        for _ in range(10):
            assert (await client.routing.Route(routing.RouteRequest(request_id="r"))).turn == 3
    await servers[1].stop(0)


async def test_a_stream_both_ways(client, fakes):
    set_caller(Caller("acme", "req-9"))
    outbox = asyncio.Queue()

    async def requests():
        while True:
            yield await outbox.get()

    await outbox.put(lease.ConnectRequest(hello=lease.Hello(worker_id="w", epoch=1)))
    stream = client.leases.Connect(requests())
    assert (await anext(stream)).welcome.anchor == 1
    await outbox.put(lease.ConnectRequest(report=lease.Report(sequence=4)))
    assert (await anext(stream)).acknowledged.sequence == 4
    assert fakes.metadata["x-kvplane-tenant"] == "acme"
    await outbox.put(lease.ConnectRequest(command_ack=lease.CommandAck()))
    with pytest.raises(StaleEpoch):
        await anext(stream)


async def test_closing_a_stream_ends_it_at_the_server(client, fakes):
    async def requests():
        yield lease.ConnectRequest(hello=lease.Hello(worker_id="w", epoch=1))
        await asyncio.Event().wait()

    stream = client.leases.Connect(requests())
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(2):
        await fakes.stream_cancelled.wait()


def test_every_retried_call_exists():
    from kvplane.api.audit.v1 import audit_pb2
    from kvplane.api.session.v1 import session_pb2

    names = set()
    for module in (audit_pb2, lease, routing, session_pb2, tenant):
        for service in module.DESCRIPTOR.services_by_name.values():
            names |= {method.name for method in service.methods}
    assert names >= IDEMPOTENT
    assert not IDEMPOTENT & {"CreateTenant", "CreateApiKey", "ExtendHold", "DeregisterWorker"}


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("localhost:7700", "dns:///localhost:7700"),
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:1, [::2]:2", "ipv6:[::1]:1,[::2]:2"),
        ("unix:/tmp/x", "unix:/tmp/x"),
    ],
)
def test_addresses(address, wanted):
    assert target(address) == wanted


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "a:1,b:2", "h:99999"])
def test_a_wrong_address_is_named(address):
    with pytest.raises(InvalidField, match="address"):
        target(address)


def test_light_imports():
    import subprocess
    import sys

    code = (
        "import sys, kvplane.client; "
        "bad = {'sqlalchemy', 'aiohttp', 'pydantic', 'structlog', 'opentelemetry', 'numpy'};"
        "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
