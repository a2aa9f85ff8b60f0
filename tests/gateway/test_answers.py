"""Engines that answer oddly or with malice: clients learn nothing of the inside."""

import asyncio
import contextlib
import gzip
import json
import time

import pytest
from aiohttp import web
from gateway.bench import chunk, data_of, sse
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway.reply import Reply

SECRET = b"10.9.8.7"
KV = b'"kv_transfer_params":{"remote_host":"10.9.8.7"}'
ESCAPED = b'"kv\\u005ftransfer\\u005Fparams":{"remote_host":"10.9.8.7"}'
CHOICE = b'"index":0,"finish_reason":"stop"'
FIRST, STOP, DONE = sse(chunk("a"), chunk(finish="stop"))
ENDING = b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'


def event(data):
    return b"data: " + data + b"\n\n"


def whole(body, **more):
    async def answer(_request, _body):
        return web.Response(**{"body": body, "content_type": "application/json", **more})

    return answer


def streamed(*parts, **headers):
    async def answer(request, _body):
        headers.setdefault("Content-Type", "text/event-stream")
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return answer


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b'{"choices":[{%b}],%b}' % (CHOICE, ESCAPED), b'{"choices":[{%b}]}' % CHOICE),
        (b'{"choices":[{%b,%b}]}' % (CHOICE, ESCAPED), b'{"choices":[{%b}]}' % CHOICE),
        (b'{"choices":[{%b,"message":{%b,"content":"kv_transfer_params"}}]}' % (CHOICE, KV),
         b'{"choices":[{%b,"message":{"content":"kv_transfer_params"}}]}' % CHOICE),
        (b'{"choices":[{%b,%b}],"choices":[{%b}]}' % (CHOICE, KV, CHOICE),
         b'{"choices":[{%b}],"choices":[{%b}]}' % (CHOICE, CHOICE)),
        (b'{"ch\\u006fices":[{%b,%b}],%b,%b}' % (CHOICE, KV, KV, ESCAPED),
         b'{"ch\\u006fices":[{%b}]}' % CHOICE),
        (b'{"choices":[[{%b}],{%b}],"logs":{"x":[{%b}],%b}}' % (KV, CHOICE, KV, KV),
         b'{"choices":[[{}],{%b}],"logs":{"x":[{}]}}' % CHOICE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_params_are_hidden_wherever_they_are_and_however_spelled(bench, sent, shown, stream):
    _, decode = await bench.pair()
    decode.behave = streamed(event(sent), DONE) if stream else whole(sent)
    await bench.start()
    _, raw, _ = await bench.chat(stream=stream)
    assert raw == (event(shown) + DONE if stream else shown)


@pytest.mark.parametrize(
    "said",
    [
        b": {%b}\n\n" % KV,
        b"kv_transfer_params: 10.9.8.7\n\n",
        b"id: {%b}\n" % KV + ENDING,
        b"event: kv_transfer_params 10.9.8.7\r\n" + ENDING,
        event(b"[{%b}]" % KV),
        event(b'"10.9.8.7"'),
        event(b"{%b,," % ESCAPED),
        event(b"Traceback: 10.9.8.7"),
        event(b'{"x":"\xff",%b}' % KV),
        event((b"{%b}" % KV).decode().encode("utf-16-le")),
        event(b'{"x":%b,%b}' % (b"[" * 5000 + b"]" * 5000, KV)),
        event(b'{"x":NaN,"y":%b,%b}' % (b"9" * 5000, KV)),
        b"data: {%b\ndata: ,,\n\n" % KV,
    ],
)
async def test_what_is_no_chunk_is_not_passed_on(bench, said):
    _, decode = await bench.pair()
    decode.behave = streamed(FIRST, said, STOP, DONE)
    await bench.start()
    raw = await bench.stream()
    assert SECRET not in raw.replace(b"\0", b"")
    assert b"kv_transfer_params" not in raw
    assert raw.endswith(STOP + DONE)
    assert (ENDING in raw) == (ENDING in said)


@pytest.mark.parametrize(
    "answer",
    [
        whole(b'"10.9.8.7"'),
        whole(b"[{%b}]" % KV),
        whole(b"null"),
        whole(b'{"error":{"message":"at 10.9.8.7","code":500}}'),
        whole(b'{"error":"at 10.9.8.7"}'),
        whole(b'{"error":{"message":"at 10.9.8.7","code":401}}'),
        whole((b'{"choices":[{%b}],%b}' % (CHOICE, KV)).decode().encode("utf-16")),
        whole(b'{"choices":%b}' % (b"[" * 100_000 + b"]" * 100_000)),
        streamed(FIRST, DONE, **{"Content-Type": "text/event-streams"}),
    ],
)
async def test_a_200_that_is_no_answer_is_the_engines_failure(bench, answer):
    _, decode = await bench.pair()
    decode.behave = answer
    await bench.start(drain_s=0.05)
    status, raw, headers = await bench.chat()
    assert status == 502
    assert json.loads(raw)["error"]["code"] == "upstream_error"
    assert SECRET not in raw
    assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    "answer",
    [
        whole(gzip.compress(b'{"choices":[{%b}]}' % CHOICE), headers={"Content-Encoding": "gzip"}),
        streamed(gzip.compress(FIRST + DONE), **{"Content-Encoding": "gzip"}),
    ],
)
async def test_what_is_compressed_unasked_is_not_opened(bench, answer):
    _, decode = await bench.pair()
    decode.behave = answer
    await bench.start()
    # The other one answers alone.
    assert json.loads((await bench.chat())[1])["choices"]
    assert await bench.metric("kvplane_gateway_retries_total") == 1


async def test_a_refusal_in_a_200_is_a_refusal(bench):
    _, decode = await bench.pair()
    decode.behave = whole(b'{"error":{"message":"too long","code":400,"trace":"x.py"}}')
    await bench.start()
    status, raw, _ = await bench.chat()
    assert status == 400
    assert json.loads(raw)["error"] == {
        "message": "too long", "type": "invalid_request_error", "param": None, "code": 400,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Text/Event-Stream", "text/event-stream ; host=10.9.8.7"])
async def test_an_engines_headers_stay_at_the_gateway(bench, kind):
    _, decode = await bench.pair()
    decode.behave = streamed(
        FIRST, STOP, DONE,
        **{"Content-Type": kind, "Set-Cookie": "a=10.9.8.7", "X-Internal": "10.9.8.7",
           "Server": "uvicorn", "Access-Control-Allow-Origin": "*"},
    )  # fmt: skip
    await bench.start()
    _, raw, headers = await bench.chat(stream=True)
    assert raw == FIRST + STOP + DONE
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Server"] == "gateway"
    assert "10.9.8.7" not in str(headers)
    assert not {"Set-Cookie", "X-Internal", "Access-Control-Allow-Origin"} & headers.keys()


@pytest.mark.parametrize(
    "said",
    [
        b'{"message":"\\ud800","code":400}',
        b'{"message":"x","code":"\\ud800","param":"\\ud800","type":"\\ud800"}',
        b'{"message":"x","code":12345678901234567890123,"y":NaN}',
        b'{"message":"x","code":true}',
        b'["\\ud800"]',
    ],
)
async def test_an_error_that_json_cannot_say_is_still_told(bench, said):
    _, decode = await bench.pair()
    decode.behave = streamed(FIRST, event(b'{"error":%b}' % said))
    await bench.start()
    error = data_of(await bench.stream())[-1]["error"]
    assert error["message"]
    assert error["code"] in (400, "upstream_error")


async def test_our_own_mistake_in_a_stream_is_an_event_not_a_second_answer(bench, monkeypatch):
    await bench.pair()
    await bench.start(drain_s=0.1)
    monkeypatch.setattr(Reply, "message", lambda _self: {}["none"])
    raw = await bench.stream()
    assert data_of(raw)[-1]["error"]["message"] == "Something went wrong."
    assert b"HTTP/1.1" not in raw
    assert b"[DONE]" not in raw


async def test_errors_before_a_stream_begins_are_seen_behind_comments(bench):
    """Another worker answers; and an `error` that is null is none."""
    _, first = await bench.pair()
    second = await bench.engine("decode-1", routing.WORKER_ROLE_DECODE)
    first.behave = streamed(b': hi\n\ndata: { "error" :{"message":"at 10.9.8.7","code":500}}\n\n')
    fine = event(json.dumps({**chunk("a"), "error": None}).encode())
    second.behave = streamed(fine, STOP, DONE)
    await bench.start()
    assert await bench.stream() == fine + STOP + DONE
    assert len(first.requests) == len(second.requests) == 1


def dripping(begin, piece):
    async def answer(request, _body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(begin)
        while True:
            await response.write(piece)
            await asyncio.sleep(0.02)

    return answer


@pytest.mark.parametrize("begin", [FIRST, b": hi\n\n"])
@pytest.mark.parametrize("piece", [b": ping\n\n", b"retry: 1\n\n", b"\n", b"data:\n\n", b"x",
                                   b"data: x\n\n"])  # fmt: skip
async def test_a_stream_that_says_nothing_is_ended(bench, begin, piece):
    """Comments are passed on, but do not count as a sign of life; nor do pieces of an event."""
    _, decode = await bench.pair()
    decode.behave = dripping(begin, piece)
    await bench.start(idle_timeout_s=0.15)
    async with asyncio.timeout(3):
        raw = await bench.stream()
        await decode.aborted.wait()
    assert raw.startswith(begin)
    assert data_of(raw[len(begin) :].lstrip(b"\n"))[-1]["error"]["code"] == "upstream_error"


async def test_a_stream_that_goes_on_slowly_is_not_ended(bench):
    _, decode = await bench.pair()

    async def slowly(request, _body):
        parts = [FIRST, b": ping\n\n", FIRST, b": ping\n\n", FIRST, STOP, DONE]
        return await decode.stream(request, parts, lambda: asyncio.sleep(0.1))

    decode.behave = slowly
    await bench.start(idle_timeout_s=0.4)
    assert (await bench.stream()).endswith(STOP + DONE)


@pytest.mark.parametrize("limit", [{"stream_timeout_s": 0.2}, {"max_stream_bytes": 2_000}])
async def test_a_stream_without_end_is_ended(bench, limit):
    _, decode = await bench.pair()
    decode.behave = dripping(FIRST, FIRST)
    await bench.start(**limit)
    async with asyncio.timeout(3):
        raw = await bench.stream()
        await decode.aborted.wait()
    assert data_of(raw)[-1]["error"]["code"] == "upstream_error"
    assert len(raw) < 10_000


# -- hand-overs ---------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        {"remote_request_id": None},
        {"remote_request_id": 5},
        {"remote_request_id": ""},
        {"remote_engine_id": ["e"]},
        {"remote_engine_id": "e" * 600},
        {"remote_port": "5600"},
        {"remote_port": True},
        {"do_remote_prefill": 1},
        {"remote_block_ids": []},
        {"deep": json.loads("[" * 400 + "]" * 400)},
    ],
)
async def test_a_handle_that_cannot_be_one_is_dropped(bench, odd):
    prefill, decode = await bench.pair()

    async def answer(request, body):
        return web.json_response(
            prefill.whole(request, body, {**prefill.handle(prefill=True), **odd})
        )

    prefill.behave = answer
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert "remote_block_ids" not in decode.requests[0]["kv_transfer_params"]


# -- the bytes of HTTP --------------------------------------------------------


class RawEngine:
    """An engine of which a test decides every byte."""

    kv_host, kv_port = "127.0.0.1", 5601

    def __init__(self, worker_id, speak):
        self.worker_id, self._speak = worker_id, speak

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error):
        self._server.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"
            )
            await reader.readexactly(length)
            await self._speak(writer)
        writer.close()


def saying(raw):
    async def speak(writer):
        writer.write(raw)
        await writer.drain()

    return speak


def endlessly(begin, piece):
    async def speak(writer):
        writer.write(begin)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    return speak


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "speak",
    [
        saying(b""),
        saying(b"hello 10.9.8.7"),
        saying(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"),
        saying(b"HTTP/1.1 204 No Content\r\n\r\n"),
        saying(b"HTTP/1.1 999 10.9.8.7\r\nContent-Length: 0\r\n\r\n"),
        saying(OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
        saying(OK + b"Content-Length: 500\r\n\r\n{}"),
        saying(CHUNKED + b"zz\r\n{}"),
        saying(OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n"),
        endlessly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        endlessly(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100),
        endlessly(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 1000),
        endlessly(OK + b"Content-Length: 500\r\n\r\n", b" "),
        endlessly(CHUNKED + b"1;", b"x" * 1000),
        endlessly(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: y\r\n" * 100),
    ],
)
async def test_broken_http_is_left_in_bounded_time_and_another_answers(bench, speak):
    good = await bench.engine("decode-1", routing.WORKER_ROLE_DECODE, register=False)
    async with RawEngine("decode-0", speak) as engine:
        bench.control.add(engine, routing.WORKER_ROLE_DECODE)
        bench.control.add(good, routing.WORKER_ROLE_DECODE)
        await bench.start(answer_timeout_s=0.3)
        begun = time.monotonic()
        status, raw, _ = await bench.chat()
    assert status == 200
    assert len(good.requests) == 1
    assert SECRET not in raw
    assert time.monotonic() - begun < 2


async def test_early_hints_and_trailers_are_no_part_of_the_answer(bench):
    body = b'{"choices":[{%b}]}' % CHOICE
    raw = (
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100
        + b"HTTP/1.1 103 Early Hints\r\nLink: <http://10.9.8.7>\r\n\r\n"
        + CHUNKED
        + b"%x\r\n%b\r\n0\r\nX-Inside: 10.9.8.7\r\n\r\n" % (len(body), body)
    )
    async with RawEngine("decode-0", saying(raw)) as engine:
        bench.control.add(engine, routing.WORKER_ROLE_DECODE)
        await bench.start()
        status, got, headers = await bench.chat()
    assert (status, got) == (200, body)
    assert "10.9.8.7" not in str(headers)
