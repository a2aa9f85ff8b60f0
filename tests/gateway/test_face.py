"""The HTTP face: bad input, models, operations, and OpenAI's own client."""

import gzip
import json
import zlib

import openai
import pytest
from gateway.bench import chunk, sse
from kvplane.api.session.v1 import session_pb2 as session

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", b"{", "body"),
        ("chat/completions", b"[1]", "body"),
        ("chat/completions", b"", "body"),
        ("chat/completions", b'{"model":"\xff"}', "body"),
        ("chat/completions", {"messages": MESSAGES}, "model"),
        ("chat/completions", {"model": 5, "messages": MESSAGES}, "model"),
        ("chat/completions", {"model": "x" * 600, "messages": MESSAGES}, "model"),
        ("chat/completions", {"model": "tiny"}, "messages"),
        ("chat/completions", {"model": "tiny", "messages": []}, "messages"),
        ("chat/completions", {"model": "tiny", "messages": "hi"}, "messages"),
        ("chat/completions", {"model": "tiny", "messages": [MESSAGES[0], 5]}, "messages[1]"),
        ("chat/completions", {"model": "tiny", "messages": [{}]}, "messages[0].role"),
        ("chat/completions", {"model": "tiny", "messages": MESSAGES, "stream": "yes"}, "stream"),
        ("chat/completions", {"model": "tiny", "messages": MESSAGES, "cache_salt": ""},
         "cache_salt"),
        ("chat/completions", {"model": "tiny", "messages": MESSAGES, "session_id": "x" * 600},
         "session_id"),
        ("completions", {"model": "tiny"}, "prompt"),
        ("completions", {"model": "tiny", "prompt": 5}, "prompt"),
    ],
)  # fmt: skip
async def test_bad_input_is_named_and_goes_nowhere(bench, path, body, param):
    prefill, decode = await bench.pair()
    await bench.start()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with bench.http.post(f"/v1/{path}", data=raw) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert bench.control.routes == prefill.requests == decode.requests == []


async def test_nesting_without_end_is_the_clients_mistake(bench):
    await bench.pair()
    await bench.start()
    for depth in (300, 2000):
        body = {"model": "tiny", "messages": MESSAGES, "x": 0}
        deep = json.dumps(body).replace(": 0", ": " + "[" * depth + "]" * depth)
        async with bench.http.post("/v1/chat/completions", data=deep.encode()) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"


async def test_a_body_that_is_too_large(bench):
    await bench.pair()
    await bench.start(max_body_bytes=1000)
    status, raw, _ = await bench.chat([{"role": "user", "content": "x" * 2000}])
    assert status == 413
    assert json.loads(raw)["error"]["param"] == "body"
    assert bench.control.routes == []


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (gzip.compress(GOOD), "gzip", 200),
        (zlib.compress(GOOD), "deflate", 200),
        (gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:]), "gzip", 200),
        (gzip.compress(b" " * 5_000_000 + GOOD), "gzip", 413),
        (gzip.compress(b"") * 2_000 + gzip.compress(GOOD), "gzip", 400),
        (gzip.compress(GOOD) + b"more", "gzip", 400),
        (gzip.compress(gzip.compress(GOOD)), "gzip", 400),
        (GOOD, "gzip", 400),
    ],
)
async def test_bodies_that_are_compressed(bench, monkeypatch, body, coding, status):
    """What cannot be opened is the client's mistake, and no error in our log."""
    _, decode = await bench.pair()
    logged = []
    monkeypatch.setattr(
        "aiohttp.log.server_logger.exception", lambda *args, **_: logged.append(args)
    )
    await bench.start(max_body_bytes=1_000_000)
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with bench.http.post("/v1/chat/completions", data=body, headers=headers) as response:
        assert response.status == status
        if status != 200:
            assert (await response.json())["error"]["param"] == "body"
    assert len(decode.requests) == (status == 200)
    assert logged == []


async def test_too_many_headers(bench):
    await bench.pair()
    await bench.start(max_headers=20)
    headers = {f"X-Header-{n}": "x" for n in range(50)}
    async with bench.http.get("/v1/models", headers=headers) as response:
        assert response.status == 400


async def test_a_body_that_never_comes(bench):
    await bench.pair()
    await bench.start(body_timeout_s=0.1)

    async def slowly():
        yield b"{"
        import asyncio

        await asyncio.Event().wait()

    async with bench.http.post("/v1/chat/completions", data=slowly()) as response:
        assert response.status == 408


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/nothing", 404)],
)
async def test_paths_that_are_not_there(bench, method, path, status):
    await bench.start()
    async with bench.http.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert response.headers["X-Request-Id"].startswith("req-")


async def test_models(bench):
    await bench.pair()
    await bench.start()
    async with bench.http.get("/v1/models") as response:
        answer = await response.json()
    assert answer["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in answer["data"]] == [
        ("tiny", "model", 8192)
    ]
    async with bench.http.get("/v1/models/tiny") as response:
        assert (await response.json())["id"] == "tiny"
    async with bench.http.get("/v1/models/none") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_operations(bench):
    await bench.pair()
    await bench.start()
    for path in ("/health", "/healthz", "/readyz"):
        async with bench.http.get(path) as response:
            assert response.status == 200
    for own, kept in (("a.b-C_9", True), ("x" * 64, True), ("x" * 65, False), ("a b", False)):
        async with bench.http.get("/health", headers={"X-Request-Id": own}) as response:
            assert response.headers["X-Request-Id"].startswith(f"{own}-" if kept else "req-")
    await bench.chat(stream=True)
    assert await bench.metric("kvplane_gateway_requests_total") == 1
    assert await bench.metric("kvplane_gateway_time_to_first_token_seconds_count") == 1
    assert await bench.metric("kvplane_gateway_requests_running") == 0


def client(bench):
    return openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="kvp_a", max_retries=0)


async def test_openai_chat(bench):
    await bench.pair()
    await bench.start()
    async with client(bench) as api:
        answer = await api.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello there"
        assert answer.usage.prompt_tokens == 100
        stream = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [one async for one in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hellothere"
    assert chunks[-1].usage.completion_tokens == 5
    assert all("kv_transfer_params" not in (c.model_extra or {}) for c in chunks)
    assert [t.outcome for t in bench.control.completes] == [session.TURN_OUTCOME_OK] * 2


async def test_openai_tools_over_three_turns(bench):
    _, decode = await bench.pair()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    async def call_a_tool(request, body):
        made = chunk()
        made["choices"][0]["delta"] = {
            "role": "assistant",
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"where": "here"}'},
                }
            ],
        }
        if not body.get("stream"):
            whole = decode.whole(request, body, None)
            calls = made["choices"][0]["delta"]["tool_calls"]
            whole["choices"][0]["message"] = {
                "role": "assistant", "content": None,
                "tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls],
            }  # fmt: skip
            from aiohttp import web

            return web.json_response(whole)
        return await decode.stream(request, sse(made, chunk(finish="tool_calls")))

    await bench.start()
    messages = [*MESSAGES]
    async with client(bench) as api:
        decode.behave = call_a_tool
        answer = await api.chat.completions.create(model="tiny", messages=messages, tools=[tool])
        said = answer.choices[0].message
        assert said.tool_calls[0].function.name == "look"
        messages += [
            said.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "found"},
        ]
        async with api.chat.completions.stream(
            model="tiny", messages=messages, tools=[tool]
        ) as stream:
            final = await stream.get_final_completion()
        said = final.choices[0].message
        assert said.tool_calls[0].function.arguments == '{"where": "here"}'
        messages += [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": json.dumps(json.loads(call.function.arguments), indent=1),
                        },
                    }
                    for call in said.tool_calls
                ],
            },
            {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "again"},
        ]
        decode.behave = None
        await api.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    assert all(body["tools"] == [tool] for body in decode.requests)
    assert [turn.session_id for turn in bench.control.completes] == ["session-0"] * 3


async def test_openai_errors(bench):
    _, decode = await bench.pair()
    await bench.start(auth="api_key")
    async with client(bench) as api:
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="none", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"

        async def late(request, body):
            error = {"error": {"message": "boom", "type": "server_error", "code": 500}}
            return await decode.stream(request, sse(chunk("a"), error))

        decode.behave = late
        stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="in the middle"):
            [one async for one in stream]
    async with openai.AsyncOpenAI(
        base_url=f"{bench.url}/v1", api_key="wrong", max_retries=0
    ) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()


async def test_openai_completions_and_models(bench):
    await bench.pair()
    await bench.start()
    async with client(bench) as api:
        answer = await api.completions.create(model="tiny", prompt="once", logprobs=1)
        assert answer.choices[0].text == "Hello there"
        assert [model.id async for model in api.models.list()] == ["tiny"]
