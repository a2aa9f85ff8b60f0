"""Finding the conversation: by name, by history; tenants and their keys."""

import asyncio
import json

import pytest
from gateway.bench import Bench
from kvplane.gateway import history
from kvplane.gateway.session_key import session_name
from kvplane.kernel.errors import InvalidField, Unavailable
from multidict import CIMultiDict


def name(headers=None, **body):
    return session_name(CIMultiDict(headers or {}), body)


@pytest.mark.parametrize(
    ("headers", "body", "wanted"),
    [
        ({"X-Session-Id": "a"}, {"session_id": "b"}, "a"),
        ({"x-conversation-id": "c"}, {}, "c"),
        ({}, {"session_id": "b", "metadata": {"session_id": "m"}}, "b"),
        ({}, {"conversation": {"id": "conv_1"}}, "conv_1"),
        ({}, {"conversation": "conv_2"}, "conv_2"),
        ({}, {"metadata": {"session_id": "m"}}, "m"),
        ({}, {"extra_body": {"metadata": {"thread_id": "t"}}}, "t"),
        ({}, {"session_id": 42}, "42"),
        ({"x-session-id": "ünïcode 会话"}, {}, "ünïcode 会话"),
        ({}, {"session_id": "", "conversation": None, "metadata": None}, ""),
        ({}, {"user": "u", "prompt_cache_key": "p", "safety_identifier": "s"}, ""),
        ({"x-request-id": "r"}, {}, ""),
    ],
)
def test_names(headers, body, wanted):
    assert name(headers, **body) == wanted


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"session_id": "x" * 513}, "session_id"),
        ({"session_id": ["a"]}, "session_id"),
        ({"conversation": {"id": 1.5}}, "conversation.id"),
        ({"metadata": {"session_id": True}}, "metadata.session_id"),
        ({"extra_body": {"session_id": {}}}, "extra_body.session_id"),
    ],
)
def test_wrong_names_are_named(body, field):
    with pytest.raises(InvalidField) as caught:
        name(**body)
    assert caught.value.metadata["field"] == field


def candidates(messages, model="m"):
    return history.of_messages(model, messages).candidates


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}


def test_candidates_are_longest_first_and_end_at_answers():
    first = history.of_messages("m", [USER, ANSWER]).digest
    second = history.of_messages("m", [USER, ANSWER, USER, ANSWER]).digest
    assert candidates([USER, ANSWER, USER, ANSWER, USER]) == [second, first]
    assert candidates([USER]) == []
    assert len(candidates([USER, ANSWER] * 100)) == 64
    assert (
        candidates([USER, ANSWER] * 100)[0] == history.of_messages("m", [USER, ANSWER] * 100).digest
    )


def call(arguments, ident="c1", name="f"):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
        ({"content": " a\n"}, {"content": "a"}),
        ({"content": "ab"}, {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}),
        ({"content": None, "tool_calls": [call("{}")]}, {"tool_calls": [call("{ }")]}),
        ({"content": "", "tool_calls": []}, {"content": None, "tool_calls": None}),
        (
            {"tool_calls": [call('{"a":1,"b":[1.0]}')]},
            {"tool_calls": [call(' {"b": [1], "a": 1}', ident="other")]},
        ),
        ({"tool_calls": [call('{"a":"\\u00e9"}')]}, {"tool_calls": [call('{"a":"é"}')]}),
        ({"tool_calls": [call('{"a":1}')]}, {"tool_calls": [call({"a": 1})]}),
        ({"tool_calls": [call("")]}, {"tool_calls": [call("{}")]}),
        ({"content": "a", "reasoning_content": "hm", "refusal": None}, {"content": "a"}),
    ],
)
def test_messages_that_say_the_same(one, other):
    assert candidates([USER, {"role": "assistant", **one}]) == candidates(
        [USER, {"role": "assistant", **other}]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": "b"}),
        ({"content": "a"}, {"content": "a", "tool_calls": [call("{}")]}),
        ({"tool_calls": [call('{"a":1}')]}, {"tool_calls": [call('{"a":"1"}')]}),
        ({"tool_calls": [call("{}", name="f")]}, {"tool_calls": [call("{}", name="g")]}),
        ({"tool_calls": [call('{"a":1')]}, {"tool_calls": [call('{"a":2')]}),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            {"content": [{"type": "image_url", "image_url": {"url": "b"}}]},
        ),
    ],
)
def test_messages_that_differ(one, other):
    assert candidates([USER, {"role": "assistant", **one}]) != candidates(
        [USER, {"role": "assistant", **other}]
    )


def test_model_and_kind_separate_histories():
    assert candidates([ANSWER], "m") != candidates([ANSWER], "n")
    text = "x" * 300
    assert history.of_text("m", text).digest != history.of_text("n", text).digest


def test_odd_messages_make_no_error():
    deep = "[" * 900 + "]" * 900
    nested = json.loads(deep)
    for message in (
        {"role": "assistant", "tool_calls": [call(deep)]},
        {"role": "assistant", "tool_calls": [call(nested)]},
        {"role": "assistant", "content": [{"type": "x", "x": nested}]},
        {"role": "assistant", "content": 5, "tool_calls": [5, {"function": 7}, None]},
        {"role": "assistant", "content": [None, 5], "function_call": "f"},
        "not a message",
    ):
        assert len(history.of_messages("m", [message]).digest) == 16


def test_a_text_continues_in_links():
    prompt, reply = "p" * 700, "r" * 400
    stored = history.after_text("m", prompt + reply)
    assert stored in history.of_text("m", prompt + reply + "and so on" * 100).candidates
    assert stored not in history.of_text("m", prompt + "other" * 200).candidates
    assert history.after_text("m", "short") == b""
    assert len(history.of_text("m", "x" * 100_000).candidates) == 64


async def test_an_unnamed_chat_is_found_again(bench):
    _, decode = await bench.pair()
    await bench.start()
    messages = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        decode.text = f"answer {turn} 你好"
        _, raw, _ = await bench.chat(messages)
        reply = json.loads(raw)["choices"][0]["message"]
        messages += [reply, {"role": "tool", "tool_call_id": "x", "content": "result"}]
    await bench.chat([{"role": "user", "content": "something else"}])
    sessions = [turn.session_id for turn in bench.control.completes]
    assert sessions == ["session-0", "session-0", "session-0", "session-1"]
    assert [turn.turn for turn in bench.control.completes] == [1, 2, 3, 1]


async def test_an_unnamed_completion_is_found_again(bench):
    _, decode = await bench.pair()
    decode.text = "the reply " * 30
    await bench.start()
    prompt = "a long beginning " * 40
    for _ in range(2):
        async with bench.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": prompt}
        ) as response:
            prompt += (await response.json())["choices"][0]["text"] + "and then? " * 30
    tokens = list(range(1000))
    for _ in range(2):
        async with bench.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": tokens}
        ) as response:
            assert response.status == 200
        tokens = [*tokens, *range(100)]
    sessions = [turn.session_id for turn in bench.control.completes]
    assert sessions == ["session-0", "session-0", "session-1", "session-1"]


async def test_a_named_session_needs_no_history(bench):
    await bench.pair()
    await bench.start()
    for content in ("one", "two"):
        await bench.chat([{"role": "user", "content": content}], headers={"X-Session-Id": "mine"})
    keys = [request.session for _, request in bench.control.routes]
    assert [(key.name, list(key.history)) for key in keys] == [("mine", [])] * 2


async def test_ending_a_session(bench):
    await bench.pair()
    await bench.start(auth="api_key")
    async with bench.http.delete(
        "/v1/sessions/my%2Fown%20one", headers={"Authorization": "Bearer kvp_b"}
    ) as response:
        assert response.status == 200
        assert (await response.json())["deleted"] is True
    assert bench.control.ended == [("tenant-b", "my/own one")]


async def test_keys_name_tenants(bench):
    await bench.pair()
    await bench.start(auth="api_key")
    for key in ("kvp_a", "kvp_b", "kvp_a", "kvp_a"):
        status, _, _ = await bench.chat(
            headers={"Authorization": f"Bearer {key}", "X-Kvplane-Tenant": "tenant-c"}
        )
        assert status == 200
    assert [t for t, _ in bench.control.routes] == ["tenant-a", "tenant-b", "tenant-a", "tenant-a"]
    assert bench.control.resolved == 2  # the others were remembered


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer nobodys"}, {"Authorization": "Basic kvp_a"}]
)
async def test_no_key_or_a_wrong_one(bench, headers):
    prefill, _ = await bench.pair()
    await bench.start(auth="api_key")
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/sessions/x"),
    ):
        async with bench.http.request(method, path, headers=headers, json={}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert prefill.requests == bench.control.routes == bench.control.ended == []


async def test_a_revoked_key_ends_after_the_cache_time(bench):
    await bench.pair()
    await bench.start(auth="api_key", auth_cache_s=0.05)
    headers = {"Authorization": "Bearer kvp_a"}
    assert (await bench.chat(headers=headers))[0] == 200
    del bench.control.keys["kvp_a"]
    async with asyncio.timeout(2):
        while (await bench.chat(headers=headers))[0] != 401:
            pass


async def test_an_outage_of_the_tenant_service_shuts_nobody_known_out(bench):
    await bench.pair()
    await bench.start(auth="api_key", auth_cache_s=0.0)
    headers = {"Authorization": "Bearer kvp_a"}
    assert (await bench.chat(headers=headers))[0] == 200

    async def away(_request):
        raise Unavailable("away")

    bench.control.before["ResolveApiKey"] = away
    assert (await bench.chat(headers=headers))[0] == 200
    assert (await bench.chat(headers={"Authorization": "Bearer kvp_b"}))[0] == 503


async def test_requests_of_one_connection_have_their_own_tenants():
    bench = Bench()
    await bench.pair()
    await bench.start(auth="api_key")
    try:
        for key in ("kvp_a", "", "kvp_b"):
            await bench.chat(headers={"Authorization": f"Bearer {key}"} if key else {})
        assert [t for t, _ in bench.control.routes] == ["tenant-a", "tenant-b"]
    finally:
        await bench.stop()
