"""Traces: passed on through every hop when asked for, nothing loaded when not."""

import asyncio
import subprocess
import sys

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.runtime import telemetry
from kvplane.runtime.sections import TelemetrySettings
from kvplane.runtime.settings import WrongSettings

GET = lease_pb2.GetLeaseRequest(lease_id="l1")
TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_call_belongs_to_its_caller_s_trace(start):
    from opentelemetry import trace

    interceptors = telemetry.server_interceptors(TelemetrySettings(enabled=True))
    running = await start(before=tuple(interceptors))
    seen = []
    running.servicer.behaviour = lambda: seen.append(
        trace.get_current_span().get_span_context().trace_id
    )
    parent = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
    await running.stub().GetLease(GET, metadata=(parent,))
    assert [f"{one:032x}" for one in seen] == [TRACE]


async def test_it_goes_on_to_the_next_service(start):
    """first -> second, as routing calls lease: our client takes the trace along."""
    from opentelemetry import trace

    interceptors = tuple(telemetry.server_interceptors(TelemetrySettings(enabled=True)))
    first, second = await start(before=interceptors), await start(before=interceptors)
    seen = []

    async def ask_the_second():
        await second.leases().GetLease(GET)

    first.servicer.behaviour = ask_the_second
    second.servicer.behaviour = lambda: seen.append(
        trace.get_current_span().get_span_context().trace_id
    )
    parent = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
    await asyncio.gather(first.stub().GetLease(GET, metadata=(parent,)))
    assert [f"{one:032x}" for one in seen] == [TRACE]


async def test_streams_and_errors_work_with_tracing_on(start):
    import grpc
    from kvplane.kernel.errors import NotFound

    interceptors = telemetry.server_interceptors(TelemetrySettings(enabled=True))
    running = await start(before=tuple(interceptors))
    hello = lease_pb2.ConnectRequest(hello=lease_pb2.Hello(worker_id="w"))
    assert len([one async for one in running.stub().Connect(iter([hello]))]) == 1

    def fail():
        raise NotFound("lease", "l1")

    running.servicer.behaviour = fail
    with pytest.raises(NotFound):
        await running.leases().GetLease(GET)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub().GetLease(GET)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_off_nothing_of_it_is_loaded():
    code = (
        "import sys\nimport kvplane.runtime.process\n"
        "from kvplane.runtime import telemetry\n"
        "from kvplane.runtime.sections import TelemetrySettings\n"
        "telemetry.configure(TelemetrySettings(), 'lease')\n"
        "assert telemetry.server_interceptors(TelemetrySettings()) == []\n"
        "sys.exit(', '.join(m for m in sys.modules if m.startswith('opentelemetry')) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_on_it_is_loaded_for_the_client_to_find():
    code = (
        "import sys\nfrom kvplane.runtime import telemetry\n"
        "from kvplane.runtime.sections import TelemetrySettings\n"
        "telemetry.configure(TelemetrySettings(enabled=True), 'gateway')\n"
        "assert 'opentelemetry.propagate' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_without_the_exporter_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    settings = TelemetrySettings(enabled=True, otlp_endpoint="http://127.0.0.1:4317")
    with pytest.raises(WrongSettings, match="pip install"):
        telemetry.configure(settings, "lease")
