"""Streams: nothing held back, nothing changed but what is not the client's."""

import asyncio
import json

import pytest
from gateway.bench import chunk, data_of, eventually, sse
from kvplane.api.session.v1 import session_pb2 as session


async def test_g01_an_event_is_forwarded_while_the_next_ones_are_not_there(bench):
    _, decode = await bench.pair()
    first = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    assert len(first) == 57
    go_on = asyncio.Event()

    async def slowly(request, body):
        rest = decode.events(body, decode.handle(prefill=False))
        parts = iter([first, *rest])

        async def gap():
            await go_on.wait()

        return await decode.stream(request, parts, gap)

    decode.behave = slowly
    await bench.start()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with bench.http.post("/v1/chat/completions", json=body) as response:
        async with asyncio.timeout(0.5):
            assert await response.content.readany() == first
        assert not go_on.is_set()
        go_on.set()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"kv_transfer_params" not in rest
    [turn] = bench.control.completes
    assert turn.outcome == session.TURN_OUTCOME_OK


async def test_g01_a_large_answer_keeps_its_bytes(bench):
    _, decode = await bench.pair()
    text = json.dumps('xé☃ \\ " {}[],:' * 20_000, ensure_ascii=False)
    head = '{ "id":"a", "choices": [ {"index":0,"message":{"role":"assistant","content":'
    tail = ',"kv_transfer_params":null},"finish_reason":"stop"}]'
    usage = ', "usage":{"prompt_tokens":7,"completion_tokens":1e0}'
    params = ', "kv_transfer_params" : ' + json.dumps(decode.handle(prefill=False))
    sent = f"{head}{text}{tail}{params}{usage}}}".encode()
    assert len(sent) > 300_000

    async def answer(request, body):
        from aiohttp import web

        return web.Response(body=sent, content_type="application/json")

    decode.behave = answer
    await bench.start()
    _, raw, headers = await bench.chat()
    tail = tail.replace(',"kv_transfer_params":null', "")
    assert raw == f"{head}{text}{tail}{usage}}}".encode()
    assert int(headers["Content-Length"]) == len(raw)
    assert bench.control.completes[0].prompt_tokens == 7


async def test_the_params_are_taken_out_of_the_chunk_they_are_in(bench):
    await bench.pair()
    await bench.start()
    raw = await bench.stream()
    assert b"kv_transfer_params" not in raw
    assert raw.endswith(b"data: [DONE]\n\n")
    last = data_of(raw)[-1]
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_g03_characters_cut_by_the_network_stay_whole(bench):
    _, decode = await bench.pair()
    text = "你好 🦀🌍é " * 5
    decode.pieces = [text]
    whole = b"".join(sse(chunk(text), chunk(finish="stop")))

    async def cut(request, body):
        # One byte each: every character is cut inside.
        return await decode.stream(request, [whole[i : i + 1] for i in range(len(whole))])

    decode.behave = cut
    await bench.start()
    first = [{"role": "user", "content": "再见 👋"}]
    raw = await bench.stream(messages=first)
    assert raw == whole
    assert "\ufffd" not in raw.decode()
    # The stored history is right: the next turn finds the session.
    decode.behave = None
    await bench.chat(
        [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    )
    assert [turn.session_id for turn in bench.control.completes] == ["session-0", "session-0"]


async def test_g04_usage_that_the_client_asked_for(bench):
    _, decode = await bench.pair()
    await bench.start()
    raw = await bench.stream(stream_options={"include_usage": True})
    expected = b"".join(decode.events(decode.requests[0], None))
    assert raw == expected
    assert data_of(raw)[-1]["choices"] == []
    assert bench.control.completes[0].prompt_tokens == 100


async def test_g04_usage_that_only_the_gateway_asked_for(bench):
    _, decode = await bench.pair()
    await bench.start()
    raw = await bench.stream(stream_options={"include_usage": False})
    assert decode.requests[0]["stream_options"] == {"include_usage": True}
    assert all(c["choices"] for c in data_of(raw))
    assert b'"usage"' not in raw
    assert bench.control.completes[0].completion_tokens == 5


async def test_usage_in_every_chunk_is_not_shown_unasked(bench):
    _, decode = await bench.pair()

    async def each(request, body):
        chunks = [chunk("a", usage={"prompt_tokens": 1}), chunk(finish="stop", usage=None)]
        return await decode.stream(request, sse(*chunks))

    decode.behave = each
    await bench.start()
    raw = await bench.stream()
    assert [set(c) & {"usage"} for c in data_of(raw)] == [set(), set()]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_all_line_ends_and_forms_of_events(bench, end):
    _, decode = await bench.pair()
    parts = [
        b": a comment" + end + end,
        b"id: 7" + end + b"event: message" + end + b'data:{"choices":' + end
        + b'data: [{"index":0,"delta":{"content":"hi"}}]}' + end + end,
        b"data: " + json.dumps(chunk(finish="stop", kv_transfer_params={"a": 1})).encode()
        + end + end,
        b"retry: 10" + end + end,
        b"data:[DONE]" + end + end,
    ]  # fmt: skip

    async def odd(request, body):
        return await decode.stream(request, parts)

    decode.behave = odd
    await bench.start()
    raw = await bench.stream()
    last = b"data: " + json.dumps(chunk(finish="stop")).encode() + end + end
    assert raw == parts[0] + parts[1] + last + parts[3] + parts[4]
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_OK


async def test_complete_is_sent_before_the_end_is(bench):
    await bench.pair()
    released = asyncio.Event()

    async def hold(_request):
        await released.wait()

    bench.control.before["Complete"] = hold
    await bench.start(complete_wait_s=30.0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with bench.http.post("/v1/chat/completions", json=body) as response:
        seen = b""
        while b'"stop"' not in seen:
            seen += await response.content.readany()
        assert b"[DONE]" not in seen
        released.set()
        seen += await response.content.read()
    assert seen.endswith(b"data: [DONE]\n\n")


async def test_a_slow_complete_delays_the_end_by_its_bound_only(bench):
    await bench.pair()
    released = asyncio.Event()

    async def hold(_request):
        await released.wait()

    bench.control.before["Complete"] = hold
    await bench.start(complete_wait_s=0.05)
    for stream in (True, False):
        async with asyncio.timeout(2):
            status, _, _ = await bench.chat(stream=stream)
        assert status == 200
    assert bench.control.completes == []
    released.set()
    await eventually(lambda: len(bench.control.completes) == 2)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (500, "The worker failed in the middle of the answer."),
        ("boom", "The worker failed in the middle of the answer."),
        (400, "EngineDeadError at http://10.0.0.1:8000"),
    ],
)
async def test_an_error_inside_a_stream_reaches_the_client_without_the_inside(bench, code, told):
    _, decode = await bench.pair()
    said = {"message": "EngineDeadError at http://10.0.0.1:8000", "type": "x", "code": code}
    error = {"error": {**said, "trace": "File x.py"}, "kv_transfer_params": {"a": 1}}

    async def late(request, body):
        return await decode.stream(request, sse(chunk("a"), error))

    decode.behave = late
    await bench.start()
    raw = await bench.stream()
    shown = data_of(raw)[-1]["error"]
    assert shown["message"] == told  # the engine's words only where they are of the request
    assert shown.keys() == {"message", "type", "param", "code"}
    assert b"kv_transfer_params" not in raw
    [turn] = bench.control.completes
    assert turn.outcome == session.TURN_OUTCOME_FAILED
    assert turn.history_digest == b""


async def test_a_stream_that_breaks_ends_with_an_error(bench):
    _, decode = await bench.pair()

    async def cut(request, body):
        response = await decode.stream_open(request)
        await response.write(sse(chunk("a"))[0] + b'data: {"half":[{"a')
        request.transport.abort()
        return response

    decode.behave = cut
    await bench.start()
    raw = await bench.stream()
    events = data_of(raw)
    assert events[0]["choices"][0]["delta"]["content"] == "a"
    assert events[1]["error"]["code"] == "upstream_error"
    assert len(events) == 2
    assert b"half" not in raw
    assert b"[DONE]" not in raw
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_FAILED


async def test_a_stream_that_just_ends_is_a_break(bench):
    _, decode = await bench.pair()

    async def cut(request, body):
        return await decode.stream(request, sse(chunk("a"), done=False))

    decode.behave = cut
    await bench.start()
    assert "error" in data_of(await bench.stream())[-1]


async def test_an_end_without_its_empty_line_still_counts(bench):
    _, decode = await bench.pair()

    async def short(request, body):
        parts = sse(chunk("a"), chunk(finish="stop"))
        return await decode.stream(request, [*parts[:-1], b"data: [DONE]"])

    decode.behave = short
    await bench.start()
    raw = await bench.stream()
    assert raw.endswith(b"data: [DONE]")
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_OK


async def test_an_event_without_end_is_cut_off(bench):
    _, decode = await bench.pair()
    go_on = asyncio.Event()

    async def endless(request, body):
        return await decode.stream(
            request, [sse(chunk("a"))[0], b"data: " + b"x" * 5000], go_on.wait
        )

    decode.behave = endless
    await bench.start(max_event_bytes=2000)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with bench.http.post("/v1/chat/completions", json=body) as response:
        raw = await response.content.readany()
        go_on.set()
        raw += await response.content.read()
    assert "error" in data_of(raw)[-1]
    assert b"xxx" not in raw


async def test_a_frozen_stream_ends_when_its_worker_is_lost(bench):
    _, decode = await bench.pair()

    async def freeze(request, body):
        response = await decode.stream_open(request)
        await response.write(sse(chunk("a"))[0])
        await asyncio.Event().wait()

    decode.behave = freeze
    await bench.start(lost_idle_timeout_s=0.1)
    request = asyncio.create_task(bench.stream())
    await decode.arrived.wait()
    bench.control.lose("decode-0")
    async with asyncio.timeout(3):
        events = data_of(await request)
    assert events[-1]["error"]["code"] == "service_unavailable"
    async with asyncio.timeout(2):
        await decode.aborted.wait()


async def test_a_lost_worker_that_still_speaks_may_finish(bench):
    _, decode = await bench.pair()
    lost = asyncio.Event()

    async def slowly(request, body):
        async def gap():
            await lost.wait()
            await asyncio.sleep(0.06)

        parts = sse(*[chunk(str(n)) for n in range(6)], chunk(finish="stop"))
        return await decode.stream(request, parts, gap)

    decode.behave = slowly
    await bench.start(lost_idle_timeout_s=0.25)
    request = asyncio.create_task(bench.stream())
    await decode.arrived.wait()
    bench.control.lose("decode-0")
    lost.set()
    raw = await request
    assert raw.endswith(b"data: [DONE]\n\n")
    assert "error" not in data_of(raw)[-1]


async def test_a_reply_of_tool_calls_is_stored_as_the_client_returns_it(bench):
    _, decode = await bench.pair()

    def call(index, **function):
        calls = [{"index": index, "function": function}]
        if "name" in function:
            calls[0].update(id="call_1", type="function")
        made = chunk()
        made["choices"][0]["delta"] = {"tool_calls": calls}
        return made

    async def tools(request, body):
        chunks = [
            call(0, name="look", arguments=""),
            call(0, arguments='{"b": 1.0,'),
            call(0, arguments=' "a": [1, "é"]}'),
            call(1, name="go", arguments="{}"),
            chunk(finish="tool_calls"),
        ]
        return await decode.stream(request, sse(*chunks))

    decode.behave = tools
    await bench.start()
    asked = [{"role": "user", "content": [{"type": "text", "text": "find it"}]}]
    await bench.stream(messages=asked)
    decode.behave = None
    again = [
        {"role": "user", "content": "find it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "other",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"a":[1,"\\u00e9"],"b":1}'},
                },
                {"id": "x", "type": "function", "function": {"name": "go", "arguments": "{ }"}},
            ],
        },
        {"role": "tool", "tool_call_id": "other", "content": "here"},
    ]
    await bench.chat(again)
    assert [turn.session_id for turn in bench.control.completes] == ["session-0"] * 2


async def test_of_several_choices_the_first_is_stored(bench):
    _, decode = await bench.pair()

    async def two(request, body):
        chunks = []
        for text in ("first", "second"):
            for index in (1, 0):
                made = chunk(f"{text}{index}")
                made["choices"][0]["index"] = index
                chunks.append(made)
        for index in (1, 0):
            made = chunk(finish="stop")
            made["choices"][0]["index"] = index
            chunks.append(made)
        return await decode.stream(request, sse(*chunks))

    decode.behave = two
    await bench.start()
    asked = [{"role": "user", "content": "x"}]
    await bench.stream(messages=asked, n=2)
    decode.behave = None
    await bench.chat([*asked, {"role": "assistant", "content": "first0second0"}])
    assert [turn.session_id for turn in bench.control.completes] == ["session-0"] * 2
