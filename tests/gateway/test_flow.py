"""Two legs, what travels between them, and what the client sees of it."""

import json

from aiohttp import web
from gateway.bench import USAGE, data_of, eventually
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session


async def test_a_turn_runs_through_both_workers(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    status, raw, headers = await bench.chat(temperature=0, unknown_field={"a": [1]})
    assert status == 200
    answer = json.loads(raw)
    assert answer["choices"][0]["message"]["content"] == "Hello there"
    assert answer["usage"] == USAGE
    assert "kv_transfer_params" not in answer
    assert headers["X-Kvplane-Session-Id"] == "session-0"

    [p], [d] = prefill.requests, decode.requests
    assert p["kv_transfer_params"]["do_remote_decode"] is True
    assert p["kv_transfer_params"]["kvplane"]["session"] == "session-0"
    assert p["unknown_field"] == d["unknown_field"] == {"a": [1]}
    handle = d["kv_transfer_params"]
    assert handle["do_remote_prefill"] is True
    assert handle["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7]]
    assert handle["remote_request_id"] == "prefill-0-1"
    assert handle["new_key_of_tomorrow"] == [1, {"x": 2}]
    assert type(handle["remote_port"]) is int
    assert handle["kvplane"] == {"tenant": "default", "session": "session-0", "turn": 1}
    ids = {prefill.headers[0]["X-Request-Id"], decode.headers[0]["X-Request-Id"]}
    assert ids == {bench.control.routes[0][1].request_id}
    assert decode.headers[0]["X-data-parallel-rank"] == "0"

    [turn] = bench.control.completes
    assert turn.outcome == session.TURN_OUTCOME_OK
    assert (turn.prompt_tokens, turn.completion_tokens, turn.tokens_reused) == (100, 5, 0)
    assert (turn.prefill_worker_id, turn.decode_worker_id) == ("prefill-0", "decode-0")
    assert len(turn.history_digest) == 16
    assert turn.time_to_first_token.ToMicroseconds() > 0


async def test_reuse_sends_the_lease_to_the_prefill_only(bench):
    prefill, decode = await bench.pair()
    bench.control.lease_next = True
    await bench.start()
    _, _, headers = await bench.chat()
    assert headers["X-Kvplane-Decision"] == "reuse; reason=owner_holds"
    assert prefill.requests[0]["kv_transfer_params"]["kvplane"]["lease_id"] == "lease-1"
    assert prefill.requests[0]["kv_transfer_params"]["kvplane"]["fencing_token"] == 7
    assert "lease_id" not in decode.requests[0]["kv_transfer_params"]["kvplane"]
    assert "remote_block_ids" not in prefill.requests[0]["kv_transfer_params"]
    [turn] = bench.control.completes
    assert turn.tokens_reused == 80
    assert await bench.metric("kvplane_gateway_prompt_tokens_reused_total") == 80
    assert await bench.metric("kvplane_gateway_prompt_tokens_recomputed_total") == 20
    assert bench.control.released == []


async def test_what_the_connector_says_it_read_counts(bench):
    prefill, _ = await bench.pair()
    bench.control.lease_next = True
    original = prefill.handle
    prefill.handle = lambda **kw: {**original(**kw), "kvplane": {"read_tokens": 64}}
    await bench.start()
    await bench.chat()
    assert bench.control.completes[0].tokens_reused == 64


async def test_g05_each_leg_gets_its_own_limits(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    wanted = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 500,
        "max_tokens": 400,
        "min_tokens": 50,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["END"],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    await bench.chat(**wanted)
    [p], [d] = prefill.requests, decode.requests
    assert p["stream"] is False
    assert "stream_options" not in p
    assert "max_completion_tokens" not in p
    assert "min_tokens" not in p
    assert p["max_tokens"] == 1
    assert p["n"] == 1
    assert p["tools"] == wanted["tools"]
    assert {key: d[key] for key in wanted} == wanted


async def test_g05_a_prefills_4xx_is_the_clients(bench):
    prefill, decode = await bench.pair()

    async def refuse(request, body):
        from aiohttp import web

        return web.json_response({"error": {"message": "bad template", "param": "x"}}, status=422)

    prefill.behave = refuse
    bench.control.lease_next = True
    await bench.start()
    status, raw, _ = await bench.chat(stream=True)
    assert status == 422
    assert json.loads(raw)["error"]["message"] == "bad template"
    assert decode.requests == []
    # The engine refused before it read: the lease is free for the next turn.
    await eventually(lambda: bench.control.released)
    assert bench.control.released[0][0] == "lease-1"
    [turn] = bench.control.completes
    assert turn.outcome == session.TURN_OUTCOME_FAILED
    assert turn.history_digest == b""


async def test_one_worker_does_it_alone(bench):
    await bench.engine("both-0", routing.WORKER_ROLE_BOTH)
    await bench.start()
    status, _, _ = await bench.chat()
    assert status == 200
    [body] = bench.engines["both-0"].requests
    # The session's tag lets its connector report what it holds.
    assert body["kv_transfer_params"] == {
        "kvplane": {"tenant": "default", "session": "session-0", "turn": 1}
    }


async def test_several_prompts_have_no_handle(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    async with bench.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": ["a", "b"]}
    ) as response:
        assert response.status == 200
    assert prefill.requests == []
    assert "kv_transfer_params" not in decode.requests[0]
    assert bench.control.routes[0][1].force_recompute


async def test_bytes_of_the_request_stay_as_they_were(bench):
    _, decode = await bench.pair()
    raws = []

    async def keep(request, body):
        raws.append(await request.read())

    decode.behave = keep
    await bench.start()
    raw = (
        b'{"model": "tiny", "messages": [{"role":"user","content":"\\u00e9"}], '
        b'"seed": 123456789012345678901234567890, "temperature": 1.0 }\n'
    )
    async with bench.http.post("/v1/chat/completions", data=raw) as response:
        assert response.status == 200
    assert raws[0].startswith(raw.rstrip(b"\n} "))


async def test_n03_a_client_cannot_steer_engines(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    evil = {
        "do_remote_prefill": True,
        "remote_host": "169.254.169.254",
        "remote_port": 80,
        "remote_block_ids": [[1]],
        "remote_engine_id": "other",
        "kvplane": {"tenant": "victim"},
    }
    headers = {
        "X-data-parallel-rank": "7",
        "X-Kvplane-Tenant": "victim",
        "X-Request-Id": "chosen",
        "X-Remote-Host": "169.254.169.254",
    }
    for stream in (False, True):
        status, raw, _ = await bench.chat(
            kv_transfer_params=evil,
            extra_body={"kv_transfer_params": evil, "keep": 1},
            vllm_xargs={"kv_transfer_params": "x", "keep": 1},
            ec_transfer_params=evil,
            stream=stream,
            headers=headers,
        )
        assert status == 200
        assert b"kv_transfer_params" not in raw
        assert b"remote_" not in raw
    for engine in (prefill, decode):
        for body in engine.requests:
            assert "169.254.169.254" not in json.dumps(body)
            assert "victim" not in json.dumps(body)
            assert "ec_transfer_params" not in body
            assert body["extra_body"] == body["vllm_xargs"] == {"keep": 1}
        for sent in engine.headers:
            assert sent["X-data-parallel-rank"] == "0"
            assert sent["X-Request-Id"].startswith("chosen-")
            assert "X-Kvplane-Tenant" not in sent
            assert "X-Remote-Host" not in sent
    assert {tenant for tenant, _ in bench.control.routes} == {"default"}


async def test_n03_a_handle_of_an_unregistered_place_goes_nowhere(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    for host, port in (("169.254.169.254", prefill.kv_port), (prefill.kv_host, 1)):
        prefill.kv_host, prefill.kv_port = host, port
        status, _, _ = await bench.chat()
        assert status == 200
        assert "remote_host" not in decode.requests[-1]["kv_transfer_params"]


async def test_n03_a_handle_of_another_s_engine_goes_nowhere(bench):
    """Whose side channel a worker has registered as its own."""
    prefill, decode = await bench.pair()

    async def answer(request, body):
        params = {**prefill.handle(prefill=True), "remote_engine_id": "engine-decode-0"}
        return web.json_response(prefill.whole(request, body, params))

    prefill.behave = answer
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert "remote_host" not in decode.requests[-1]["kv_transfer_params"]


async def test_credentials_of_clients_stay_here(bench):
    prefill, decode = await bench.pair()
    await bench.start(upstream_api_key="engine-secret")
    await bench.chat(headers={"Authorization": "Bearer sk-client", "Cookie": "a=b"})
    for engine in (prefill, decode):
        assert engine.headers[0]["Authorization"] == "Bearer engine-secret"
        assert "Cookie" not in engine.headers[0]


async def test_the_trace_reaches_engines_and_services(bench):
    from opentelemetry import propagate

    prefill, decode = await bench.pair()
    seen = {}

    async def look(_request):
        propagate.inject(seen)

    bench.control.before["Route"] = look
    await bench.start()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await bench.chat(headers={"traceparent": trace})
    for passed in (prefill.headers[0], decode.headers[0], seen):
        assert passed["traceparent"].split("-")[1] == trace.split("-")[1]
    seen.clear()
    await bench.chat()
    assert seen == {}
    assert "traceparent" not in decode.headers[1]


async def test_tenants_have_their_own_cache_salt(bench):
    prefill, decode = await bench.pair()
    await bench.start(auth="api_key")
    for key, salt in (("kvp_a", None), ("kvp_b", None), ("kvp_a", "mine"), ("kvp_b", "mine")):
        more = {} if salt is None else {"cache_salt": salt}
        status, _, _ = await bench.chat(headers={"Authorization": f"Bearer {key}"}, **more)
        assert status == 200
    salts = [body["cache_salt"] for body in decode.requests]
    assert len(set(salts)) == 4
    assert [body["cache_salt"] for body in prefill.requests] == salts
    assert "mine" not in salts


async def test_legs_agree_on_the_text_completion_too(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    async with bench.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "once upon", "stream": True}
    ) as response:
        raw = await response.read()
    assert data_of(raw)
    assert prefill.paths == decode.paths == ["/v1/completions"]
    assert prefill.requests[0]["prompt"] == decode.requests[0]["prompt"] == "once upon"
