"""The gateway's edge: slow, stalled and odd connections, and too many of them."""

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace

import pytest
from gateway.bench import eventually
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.gateway.edge import Stalled, bounded

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.asynccontextmanager
async def connected(bench, first=b""):
    """A raw connection; `first` is sent at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
    writer.write(first)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_of(reader):
    """Read to the end of the connection; return status, headers, body."""
    async with asyncio.timeout(5):
        raw = await reader.read()
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), headers, body


def check_error(headers, body):
    """It is an OpenAI error that names neither our software nor its version."""
    assert headers["Content-Type"].startswith("application/json")
    assert headers["X-Request-Id"]
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    for inside in ("aiohttp", "Python", "Traceback", "kvplane"):
        assert inside not in str(headers)
        assert inside.encode() not in body


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
         400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET /v1/models/%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"DELETE /v1/sessions/%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://evil/v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (HEAD + b"Expect: tea\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 417),
        (b"GET /none HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nConnection: close\r\n\r\n", 417),
        (HEAD + b"Upgrade: websocket\r\nConnection: close, Upgrade\r\nContent-Length: 0\r\n\r\n",
         400),
    ],
)  # fmt: skip
async def test_odd_requests_get_json_that_names_nothing(bench, raw, status):
    await bench.start()
    async with connected(bench, raw) as (reader, _):
        got, headers, body = await answer_of(reader)
    assert got == status
    check_error(headers, body)
    async with bench.http.get("/health") as alive:
        assert alive.status == 200
        assert alive.headers["Server"] == "gateway"


async def test_a_head_that_does_not_end(bench):
    await bench.start(head_timeout_s=0.1)
    async with connected(bench, b"GET /health HTTP/1.1\r\n") as (reader, writer):
        writer.write(b"X-A: 1\r\n")  # a byte now and then is not enough
        status, headers, body = await answer_of(reader)
    assert status == 408
    check_error(headers, body)


async def test_a_second_head_that_does_not_end(bench):
    await bench.start(head_timeout_s=0.1)
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    async with connected(bench, ask + b"\r\n") as (reader, writer):
        async with asyncio.timeout(2):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok"}'))
        assert head.startswith(b"HTTP/1.1 200")
        writer.write(ask)
        status, _, _ = await answer_of(reader)
    assert status == 408


async def test_a_slow_answer_is_no_slow_head(bench):
    _, decode = await bench.pair()
    go_on = asyncio.Event()

    async def wait(request, body):
        await go_on.wait()

    decode.behave = wait
    await bench.start(head_timeout_s=0.05, keepalive_timeout_s=0.1)
    close = b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
    # The body comes in two parts, so there are bytes after the head.
    async with connected(bench, HEAD + close % (len(BODY), BODY[:5])) as (reader, writer):
        await writer.drain()
        writer.write(BODY[5:])
        await decode.arrived.wait()
        await asyncio.sleep(0.2)
        go_on.set()
        status, _, body = await answer_of(reader)
    assert status == 200
    assert json.loads(body)["choices"]


async def test_an_idle_connection_is_closed(bench):
    await bench.start(keepalive_timeout_s=0.1)
    async with connected(bench) as (reader, _):
        async with asyncio.timeout(2):
            assert await reader.read() == b""


async def test_too_many_connections(bench):
    await bench.start(max_connections=3)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            reader, writer = await stack.enter_async_context(connected(bench))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(2):
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        async with connected(bench) as (reader, _):
            status, headers, body = await answer_of(reader)
        assert status == 503
        assert headers["Retry-After"]
        check_error(headers, body)

    async def room():
        async with connected(bench, b"GET /health HTTP/1.0\r\n\r\n") as (reader, _):
            return (await answer_of(reader))[0] == 200

    async with asyncio.timeout(2):
        while not await room():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def stalled(bench, **body):
    """A client that asks and never reads."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", int(bench.url.rpartition(":")[2])))
        raw = json.dumps({**json.loads(BODY), **body}).encode()
        await loop.sock_sendall(client, HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        yield


async def test_a_stream_that_nobody_reads_is_ended_and_its_turn_given_back(bench):
    _, decode = await bench.pair()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 100_000)

    async def endless(request, body):
        response = await decode.stream_open(request)
        while True:
            await response.write(event)

    decode.behave = endless
    await bench.start(write_timeout_s=0.2)
    async with stalled(bench, stream=True):
        await eventually(decode.aborted.is_set, 10)
        await eventually(lambda: bench.control.completes)
    [turn] = bench.control.completes
    assert turn.outcome == session.TURN_OUTCOME_CANCELLED
    assert await bench.metric("kvplane_gateway_requests_running") == 0


async def test_a_write_that_does_not_end_ends_the_connection():
    """Also where the client takes a byte now and then, so that TCP sees it alive."""
    aborted = []
    http = SimpleNamespace(transport=SimpleNamespace(abort=lambda: aborted.append(True)))
    with pytest.raises(Stalled):
        await bounded(http, asyncio.Event().wait(), 0.01)
    assert aborted == [True]


async def test_what_is_in_the_systems_hands_is_bounded_too(bench):
    """A small answer is written at once, for us; the client may never take it."""
    await bench.start(write_timeout_s=7)
    async with connected(bench, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        [connection] = bench.gateway._runner.server.connections
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def test_requests_that_are_sent_ahead_are_not_taken_without_bound(bench):
    """Behind a slow one they stay in TCP's hands."""
    _, decode = await bench.pair()

    async def wait(_request, _body):
        await asyncio.Event().wait()

    decode.behave = wait
    await bench.start(drain_s=0.05)
    slow = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    async with connected(bench, slow) as (_, writer):
        await decode.arrived.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
                    await writer.drain()
        waiting = [len(one._messages) for one in bench.gateway._runner.server.connections]
    assert sum(waiting) < 1000


async def test_an_answer_that_nobody_reads_is_ended(bench):
    from aiohttp import web

    _, decode = await bench.pair()

    async def large(request, body):
        return web.json_response({**decode.whole(request, body, None), "x": "x" * 30_000_000})

    decode.behave = large
    await bench.start(write_timeout_s=0.2)
    async with stalled(bench):
        await eventually(lambda: bench.control.completes, 10)
        async with asyncio.timeout(10):
            while await bench.metric("kvplane_gateway_requests_running"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_large_answer_comes_whole(bench):
    from aiohttp import web

    _, decode = await bench.pair()

    async def large(request, body):
        return web.json_response({**decode.whole(request, body, None), "x": "é" * 100_000})

    decode.behave = large
    await bench.start()
    status, raw, headers = await bench.chat()
    assert status == 200
    assert json.loads(raw)["x"] == "é" * 100_000
    assert int(headers["Content-Length"]) == len(raw)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_engines_answer_without_end_is_cut_off(bench, leg, chunked):
    from aiohttp import web

    engines = dict(zip(("prefill", "decode"), await bench.pair(), strict=True))

    async def large(request, body):
        if not chunked:
            return web.Response(body=b" " * 200_000, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 1000)

    engines[leg].behave = large
    await bench.start(max_answer_bytes=50_000)
    async with asyncio.timeout(5):
        status, _, _ = await bench.chat()
    # The other one answers alone.
    assert status == 200
    assert await bench.metric("kvplane_gateway_retries_total") == 1
