"""OpenAI's own client, with nothing changed but its base_url."""

import asyncio
import json

import openai
import pytest
from aiohttp import web
from gateway.bench import chunk, sse
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.kernel.errors import NoWorker, QuotaExceeded

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
         for name in ("look", "go")]  # fmt: skip


def client(bench, **more):
    return openai.AsyncOpenAI(
        **{"base_url": f"{bench.url}/v1", "api_key": "kvp_a", "max_retries": 0, **more}
    )


async def test_the_synchronous_client(bench):
    await bench.pair()
    await bench.start()

    def talk():
        with openai.OpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=0) as api:
            answer = api.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            said = "".join(one.choices[0].delta.content or "" for one in stream)
            models = [model.id for model in api.models.list()]
            return answer.choices[0].message.content, said, models, api.models.retrieve("tiny").id

    assert await asyncio.to_thread(talk) == ("Hello there", "Hellothere", ["tiny"], "tiny")


def delta(index, **fields):
    made = chunk()
    made["choices"][0] |= {"index": index, "delta": fields}
    return made


def call(index, *, name=None, arguments=""):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    made = {"index": index, "function": function}
    return made | ({"id": f"call_{index}", "type": "function"} if name else {})


async def test_parallel_tool_calls_whose_parts_are_mixed(bench):
    _, decode = await bench.pair()

    async def calls(request, body):
        assert body["parallel_tool_calls"] is True
        return await decode.stream(
            request,
            sse(
                delta(0, role="assistant", content=None),
                delta(0, tool_calls=[call(0, name="look"), call(1, name="go")]),
                delta(0, tool_calls=[call(1, arguments='{"to":')]),
                delta(0, tool_calls=[call(0, arguments='{"at":"x"}')]),
                delta(0, tool_calls=[call(1, arguments='"y"}')]),
                chunk(finish="tool_calls"),
            ),
        )

    decode.behave = calls
    await bench.start()
    async with (
        client(bench) as api,
        api.chat.completions.stream(
            model="tiny", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=True
        ) as stream,
    ):
        final = await stream.get_final_completion()
    said = final.choices[0].message
    made = [(one.function.name, json.loads(one.function.arguments)) for one in said.tool_calls]
    assert made == [("look", {"at": "x"}), ("go", {"to": "y"})]
    # As the client sends it back, it finds its conversation.
    decode.behave = None
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": "done"} for one in said.tool_calls
    ]
    async with client(bench) as api:
        await api.chat.completions.create(
            model="tiny",
            messages=[*MESSAGES, said.model_dump(exclude_none=True), *results],
            tools=TOOLS,
        )
    assert len({turn.session_id for turn in bench.control.completes}) == 1


async def test_several_choices(bench):
    _, decode = await bench.pair()

    async def choices(request, body):
        assert body["n"] == 3
        if not body.get("stream"):
            whole = decode.whole(request, body, None)
            one = whole["choices"][0]
            whole["choices"] = [{**one, "index": i} for i in range(3)]
            return web.json_response(whole)
        # The client itself takes them in order when they begin, in any order then.
        order = [("a", 0), ("a", 1), ("a", 2), ("b", 2), ("b", 0), ("b", 1)]
        parts = [delta(i, content=f"{i}{word}") for word, i in order]
        ends = [chunk(finish="stop") for _ in range(3)]
        for i, end in enumerate(ends):
            end["choices"][0]["index"] = i
        return await decode.stream(request, sse(*parts, *ends))

    decode.behave = choices
    await bench.start()
    async with client(bench) as api:
        answer = await api.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        async with api.chat.completions.stream(model="tiny", messages=MESSAGES, n=3) as stream:
            final = await stream.get_final_completion()
    said = {choice.index: choice.message.content for choice in final.choices}
    assert said == {0: "0a0b", 1: "1a1b", 2: "2a2b"}


def raising(error):
    async def refuse(_request):
        raise error

    return refuse


async def test_errors_have_their_classes(bench):
    await bench.pair()
    await bench.start(auth="api_key", max_body_bytes=2_000)

    async def ask(api, **more):
        return await api.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **more})

    async with client(bench) as api, client(bench, api_key="wrong") as nobody:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(api, n=1000)
        assert caught.value.param == "n"
        assert caught.value.request_id.startswith("req-")
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(api, model="none")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(nobody)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(api, messages=[{"role": "user", "content": "x" * 3_000}])
        assert caught.value.status_code == 413
        over = QuotaExceeded("enough", metadata={"quota": "requests_per_second"}, retry_after=2.0)
        bench.control.before["Route"] = raising(over)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(api)
        assert caught.value.response.headers["Retry-After"] == "2"
        bench.control.before["Route"] = raising(NoWorker("busy", retry_after=1.0))
        for worker in ("prefill-0", "decode-0"):
            await bench.engines[worker].stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(api)
        assert caught.value.status_code == 503


async def test_what_is_busy_is_asked_again(bench):
    """The client's own retries, which go by status and Retry-After."""
    await bench.pair()
    asked = 0

    async def busy_once(_request):
        nonlocal asked
        asked += 1
        if asked == 1:
            raise QuotaExceeded("enough", metadata={"quota": "requests_per_second"}, retry_after=0)

    bench.control.before["Route"] = busy_once
    await bench.start()
    async with client(bench, max_retries=1) as api:
        answer = await api.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello there"
    assert asked == 2


@pytest.mark.parametrize("kind", [QuotaExceeded, NoWorker])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_comes_back_when_it_was_told_to(bench, monkeypatch, kind, stream):
    await bench.pair()
    waited = []

    async def refuse(request):
        if not waited:
            raise kind("enough", retry_after=7.2)

    async def sleep(seconds):
        waited.append(seconds)
        for worker in bench.control.workers.values():
            worker.state = routing.WORKER_STATE_READY

    bench.control.before["Route"] = refuse
    await bench.start()
    for worker in bench.control.workers.values():  # they answer, but nobody may ask
        worker.state = routing.WORKER_STATE_DRAINING
    await bench.gateway._watch.refresh()
    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    async with client(bench, max_retries=2) as api:
        answer = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
        if stream:
            said = [one async for one in answer]
            assert said[-1].choices[0].finish_reason == "stop"
        else:
            assert answer.choices[0].finish_reason == "stop"
    assert waited == [8.0]


async def test_sampled_choices_with_usage_and_logprobs(bench):
    """As it is sent, so it arrives; and the usage comes last, once."""
    prefill, decode = await bench.pair()
    logprobs = {"content": [{"token": "0", "logprob": -0.5, "bytes": [48], "top_logprobs": []}]}

    async def sample(request, body):
        ends = [chunk(finish="length") for _ in range(2)]
        ends[1]["choices"][0]["index"] = 1
        parts = [delta(0, content="0"), delta(1, content="1")]
        parts[0]["choices"][0]["logprobs"] = logprobs
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        last = {**chunk(), "choices": [], "usage": usage}
        return await decode.stream(request, sse(*parts, *ends, last))

    decode.behave = sample
    await bench.start()
    options = {"n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 5, "logprobs": True,
               "max_completion_tokens": 2, "stream_options": {"include_usage": True}}  # fmt: skip
    async with client(bench) as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, **options
        )
        chunks = [one async for one in stream]
    assert {name: decode.requests[0][name] for name in options} == options
    assert (prefill.requests[0]["n"], prefill.requests[0]["max_tokens"]) == (1, 1)
    said = [(one.choices[0].index, one.choices[0].delta.content) for one in chunks[:2]]
    assert said == [(0, "0"), (1, "1")]
    assert chunks[0].choices[0].logprobs.content[0].logprob == -0.5
    assert [one.usage.total_tokens for one in chunks if one.usage] == [13]
    assert chunks[-1].choices == []
    assert bench.control.completes[0].completion_tokens == 4


async def test_what_engines_refuse_and_fail_has_its_class_too(bench):
    _, decode = await bench.pair()
    await bench.start(auth="api_key", drain_s=0.05)

    def status(code, **error):
        async def refuse(_request, _body):
            return web.json_response({"error": error}, status=code)

        return refuse

    async with client(bench) as api:
        for code, kind in (
            (400, openai.BadRequestError),
            (404, openai.NotFoundError),
            (422, openai.UnprocessableEntityError),
            (500, openai.InternalServerError),
        ):
            decode.behave = bench.engines["prefill-0"].behave = status(
                code, message="no", param="x"
            )
            with pytest.raises(kind) as caught:
                await api.chat.completions.create(model="tiny", messages=MESSAGES)
            assert caught.value.status_code == (502 if code == 500 else code)
            assert caught.value.param == (None if code == 500 else "x")

    async def of_a_worker(_request):
        return tenant.ResolveApiKeyResponse(role=tenant.ROLE_WORKER, worker_id="w", key_id="k")

    bench.control.ResolveApiKey = of_a_worker
    async with client(bench, api_key="kvp_w") as api:
        with pytest.raises(openai.PermissionDeniedError):
            await api.models.list()


async def test_a_stream_that_breaks_is_an_error(bench):
    _, decode = await bench.pair()

    async def cut(request, body):
        response = await decode.stream_open(request)
        await response.write(sse(chunk("a"))[0])
        request.transport.abort()
        return response

    decode.behave = cut
    await bench.start()
    async with client(bench) as api:
        stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            [one async for one in stream]
