"""The example of under 100 lines, over real gRPC."""

import ast
import json
import sys
from pathlib import Path

import aiohttp
import grpc
import minimal_gateway
import pytest
from aiohttp import web
from gateway.bench import data_of
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2_grpc
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient

SOURCE = Path(minimal_gateway.__file__).read_text()


class Served:
    """Makes one object's methods those of a gRPC servicer."""

    def __init__(self, control):
        self._control = control

    def __getattr__(self, name):
        async def call(request, _context):
            return await getattr(self._control, name)(request)

        return call


@pytest.fixture
async def example(bench):
    await bench.pair()
    bench.control.lease_next = True
    server = grpc.aio.server()
    served = Served(bench.control)
    # Streams are not served here; the stubs want a name for each method.
    served.Connect = None
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(served, server)
    routing_pb2_grpc.add_RoutingServiceServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with KvplaneClient(f"127.0.0.1:{port}") as kvplane, aiohttp.ClientSession() as http:
        gateway = minimal_gateway.MinimalGateway(kvplane, http)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", gateway.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        await runner.cleanup()
    await server.stop(0)


async def ask(url, **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
    headers = {"X-Session-Id": "one"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


async def test_two_turns(bench, example):
    prefill, decode = bench.engines["prefill-0"], bench.engines["decode-0"]
    status, raw = await ask(example)
    assert status == 200
    assert json.loads(raw)["choices"][0]["message"]["content"] == "Hello there"
    assert b"kv_transfer_params" not in raw
    status, raw = await ask(example, stream=True, kv_transfer_params={"remote_host": "evil"})
    assert (
        "".join(c["choices"][0]["delta"].get("content", "") for c in data_of(raw)) == "Hellothere"
    )
    assert b"kv_transfer_params" not in raw
    assert raw.endswith(b"data: [DONE]\n\n")
    assert prefill.requests[1]["kv_transfer_params"]["kvplane"]["lease_id"] == "lease-2"
    assert decode.requests[1]["kv_transfer_params"]["remote_host"] == "127.0.0.1"
    turns = [(t.session_id, t.turn, t.outcome) for t in bench.control.completes]
    assert turns == [
        ("session-0", 1, session.TURN_OUTCOME_OK),
        ("session-0", 2, session.TURN_OUTCOME_OK),
    ]


async def test_a_failed_prefill_completes_the_turn_as_failed(bench, example):
    async def fail(_request, _body):
        return web.Response(status=500)

    bench.engines["prefill-0"].behave = fail
    status, _ = await ask(example)
    assert status == 500
    assert [t.outcome for t in bench.control.completes] == [session.TURN_OUTCOME_FAILED]


def test_it_is_short_and_uses_nothing_but_the_client():
    assert len(SOURCE.splitlines()) < 100
    used = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add(node.module)
    assert used - sys.stdlib_module_names == {"aiohttp", "kvplane.client"}
