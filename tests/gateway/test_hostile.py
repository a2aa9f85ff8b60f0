"""Clients that want more than an answer: nothing of theirs steers an engine."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvplane.gateway.request import (
    CHAT,
    COMPLETIONS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    MAX_WORDS,
    parse,
)
from kvplane.kernel.errors import InvalidField

MESSAGES = [{"role": "user", "content": "hi"}]
HOLDERS = ["extra_body", "vllm_xargs", "extra_args"]
STEERING = {"kv_transfer_params", "ec_transfer_params"}
OURS = STEERING | {"priority", "request_id", "cache_salt"}
OWN = {"do_remote_decode": True}


def escaped(draw, name):
    """A key as JSON may spell it."""
    spelled = "".join(f"\\u{ord(letter):04x}" if draw(st.booleans()) else letter for letter in name)
    return f'"{spelled}"'


@st.composite
def bodies(draw):
    """A request with steering anywhere an engine looks, names twice and oddly spelled."""
    evil = st.sampled_from(['{"remote_host":"evil"}', "null", '"evil"', "[1]", "7"])

    def member(depth):
        kind = draw(st.integers(0, 3 if depth else 1))
        if kind == 0:
            return f"{escaped(draw, draw(st.sampled_from(sorted(OURS))))}:{draw(evil)}"
        if kind == 1:
            return f'"keep{draw(st.integers(0, 9))}":[{{"kv_transfer_params":"a word"}}]'
        inner = ",".join(member(depth - 1) for _ in range(draw(st.integers(0, 3))))
        held = "{" + inner + "}" if kind == 2 else "[{" + inner + "}]"
        return f"{escaped(draw, draw(st.sampled_from(HOLDERS)))}:{held}"

    members = [member(2) for _ in range(draw(st.integers(1, 6)))]
    members.insert(0, '"model":"m","messages":[{"role":"user","content":"kv_transfer_params"}]')
    return "{" + ",".join(members) + "}"


def all_members(raw):
    """All members of an object, of those of one name each."""
    return json.loads(raw, object_pairs_hook=lambda pairs: pairs)


def steering_in(members, *, held=False):
    """Names that steer, at the top or at any depth of a holder."""
    found = []
    for name, value in members:
        if name in STEERING or (not held and name in OURS):
            found.append((name, value))
        if held or name in HOLDERS:
            for inner in value if isinstance(value, list) else ():
                if isinstance(inner, tuple):
                    found += steering_in([inner], held=True)
                elif isinstance(inner, list):
                    found += steering_in(inner, held=True)
    return found


@settings(max_examples=100, deadline=None)
@given(bodies())
def test_whatever_the_spelling_no_engine_is_steered(body):
    try:
        request = parse(CHAT, body.encode(), {})
    except InvalidField as error:
        assert error.metadata["field"] == "cache_salt"  # noqa: PT017 - a number, say
        return
    for made in (
        request.prefill_body(OWN, token_ids=False),
        request.decode_body(OWN, usage=True, token_ids=False),
        request.decode_body(None, usage=False, token_ids=False),
    ):
        others = [one for one in steering_in(all_members(made)) if one[1] != [*OWN.items()]]
        assert others == []
        assert json.loads(made)["messages"][0]["content"] == "kv_transfer_params"


def test_the_salt_is_ours_alone():
    raw = b'{"model":"m","prompt":"p","cache_salt":"victim","cache\\u005fsalt":"victim"}'
    request = parse(COMPLETIONS, raw, {})
    for salt in ("", "made"):
        request.cache_salt = salt
        for made in (
            request.prefill_body(OWN, token_ids=False),
            request.decode_body(None, usage=False, token_ids=False),
        ):
            salts = [value for name, value in all_members(made) if name == "cache_salt"]
            assert salts == ([salt] if salt else [])


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": MAX_CHOICES + 1}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"n": 1e9}, "n"),
        (CHAT, {"best_of": 10**30}, "best_of"),
        (CHAT, {"tools": [{}] * (MAX_TOOLS + 1)}, "tools"),
        (CHAT, {"tools": {}}, "tools"),
        (CHAT, {"stop": ["x"] * (MAX_WORDS + 1)}, "stop"),
        (COMPLETIONS, {"stop_token_ids": [1] * (MAX_WORDS + 1)}, "stop_token_ids"),
        (CHAT, {"bad_words": ["x"] * (MAX_WORDS + 1)}, "bad_words"),
        (CHAT, {"messages": MESSAGES * (MAX_MESSAGES + 1)}, "messages"),
        (CHAT, {"stream_options": "usage"}, "stream_options"),
        (CHAT, {"logits_processors": ["os.system"]}, "logits_processors"),
        (CHAT, {"mm_processor_kwargs": {"cache_dir": "/etc"}}, "mm_processor_kwargs"),
        (COMPLETIONS, {"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 32]}, "prompt"),
    ],
)
def test_what_is_too_much_is_named(path, more, field):
    body = {"model": "m", "messages": MESSAGES, "prompt": "p", **more}
    with pytest.raises(InvalidField) as caught:
        parse(path, json.dumps(body).encode(), {})
    assert caught.value.metadata["field"] == field


def test_the_most_that_is_allowed_is_allowed():
    for path, more in (
        (CHAT, {"n": MAX_CHOICES, "best_of": MAX_CHOICES, "tools": [{}] * MAX_TOOLS}),
        (CHAT, {"stop": ["x"] * MAX_WORDS, "bad_words": ["x"] * MAX_WORDS}),
        (COMPLETIONS, {"stop": "x" * 2 * MAX_WORDS, "stop_token_ids": [1] * MAX_WORDS}),
        (CHAT, {"messages": MESSAGES * MAX_MESSAGES, "n": None, "tools": None}),
        (COMPLETIONS, {"prompt": ["x"] * MAX_PROMPTS, "stream_options": None}),
    ):
        body = {"model": "m", "messages": MESSAGES, "prompt": "p", **more}
        assert parse(path, json.dumps(body).encode(), {}).model == "m"


@pytest.mark.parametrize("name", ["logits_processors", "mm_processor_kwargs"])
def test_of_a_name_that_comes_twice_no_other_parser_sees_the_other(name):
    raw = f'{{"model":"m","prompt":"p","{name}":["os.system"],"{name}":null}}'.encode()
    made = parse(COMPLETIONS, raw, {}).decode_body(None, usage=False, token_ids=False)
    assert [value for key, value in all_members(made) if key == name] in ([], [None])


@pytest.mark.parametrize("text", ["[" * 90, '{"a":' * 90])
def test_brackets_in_a_text_are_no_nesting(text):
    body = {"model": "m", "messages": MESSAGES, "tools": [{"deep": [text] * 3}]}
    assert parse(CHAT, json.dumps(body).encode(), {}).model == "m"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_an_end(opening):
    closing = "]" if opening == "[" else "}"
    for depth, right in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False)):
        deep = opening * depth + "1" + closing * depth
        raw = f'{{"model":"m","prompt":"p","x":{deep}}}'.encode()
        if right:
            assert parse(COMPLETIONS, raw, {}).model == "m"
            continue
        with pytest.raises(InvalidField) as caught:
            parse(COMPLETIONS, raw, {})
        assert caught.value.metadata["field"] == "body"


async def test_a_clients_headers_stay_at_the_gateway(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    headers = {
        "X-data-parallel-rank": "7",
        "x-prefiller-host-port": "169.254.169.254:80",
        "x-gateway-destination-endpoint": "169.254.169.254:80",
        "X-Forwarded-Host": "evil",
        "X-Forwarded-For": "10.0.0.1",
        "Forwarded": "for=10.0.0.1",
        "Host": "evil",
        "X-Request-Id": "a b\tc",
        "X-KV-Transfer-Params": "{}",
        "Te": "trailers",
        "Proxy-Authorization": "Basic eA==",
        "Authorization": "Bearer sk-client",
        "traceparent": "00-zz-zz-01",
        "tracestate": "é",
    }
    for stream in (False, True):
        status, _, answer = await bench.chat(stream=stream, headers=headers)
        assert status == 200
        assert answer["X-Request-Id"].startswith("req-")
    ours = {
        "Host", "Accept", "Accept-Encoding", "Content-Length", "Content-Type", "User-Agent",
        "X-Request-Id", "X-data-parallel-rank",
    }  # fmt: skip
    for engine in (prefill, decode):
        for sent in engine.headers:
            assert {name.lower() for name in sent} <= {name.lower() for name in ours}
            assert sent["X-data-parallel-rank"] == "0"
            assert sent["Accept-Encoding"] == "identity"
            assert sent["Host"] == engine.url.removeprefix("http://")
            assert sent["X-Request-Id"].startswith("req-")


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x",
                                  "Application/X-WWW-Form-Urlencoded; charset=utf-8"])  # fmt: skip
async def test_a_web_page_cannot_have_a_browser_ask(bench, kind):
    _, decode = await bench.pair()
    await bench.start()
    raw = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    async with bench.http.post(CHAT, data=raw, headers={"Content-Type": kind}) as response:
        assert response.status == 415
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert decode.requests == []


async def test_no_redirect_is_followed(bench):
    from aiohttp import web

    prefill, decode = await bench.pair()
    elsewhere = await bench.engine("elsewhere", 3, register=False)

    async def away(request, body):
        return web.Response(status=307, headers={"Location": f"{elsewhere.url}{request.path}"})

    prefill.behave = decode.behave = away
    await bench.start()
    status, raw, _ = await bench.chat()
    assert status == 502
    assert b"elsewhere" not in raw
    assert b"127.0.0.1" not in raw
    assert elsewhere.requests == []


@pytest.mark.parametrize(
    ("status", "body", "told", "message"),
    [
        (400, {"error": {"message": "too long", "code": 400, "trace": "x.py"}}, 400, "too long"),
        (400, {"object": "error", "message": "too long", "code": 400}, 400, "too long"),
        (422, {"detail": [{"loc": ["body", "x"]}]}, 422, "The engine refuses this request."),
        (400, {"message": "x" * 5_000}, 400, "x" * 2_000),
        (404, "<html>nginx/1.27 at 10.0.0.1</html>", 404, "The engine refuses this request."),
        (401, {"error": {"message": "wrong engine key"}}, 502, None),
        (429, {"error": {"message": "slow down"}}, 502, None),
        (500, "Traceback: worker at http://10.0.0.1", 502, None),
    ],
)
async def test_what_an_engine_refuses_is_told_without_the_inside(
    bench, status, body, told, message
):
    from aiohttp import web

    prefill, decode = await bench.pair()

    async def refuse(request, _body):
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"Server": "uvicorn", "X-Secret": "1"}
        return web.Response(status=status, text=text, content_type="text/html", headers=headers)

    prefill.behave = decode.behave = refuse
    await bench.start()
    got, raw, headers = await bench.chat()
    assert got == told
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message is None or error["message"] == message
    for inside in (b"10.0.0.1", b"127.0.0.1", b"Traceback", b"nginx", b"decode-0", b"key"):
        assert inside not in raw
    assert headers["Content-Type"].startswith("application/json")
    assert "X-Secret" not in headers


async def test_what_cannot_be_read_is_not_shown(bench):
    """Not even by accident: an answer with NaN is no JSON to most parsers."""
    from aiohttp import web

    _, decode = await bench.pair()
    params = b'"kv_transfer_params":{"remote_host":"10.0.0.1"}'
    whole = b'{"choices":[{"index":0,"finish_reason":"stop","x":NaN,%b}],%b}' % (params, params)

    async def answer(request, body):
        if body.get("stream"):
            broken = b"data: {%b,\n\n" % params
            end = b"data: [DONE]\n\n"
            return await decode.stream(request, [b"data: " + whole + b"\n\n", broken, end])
        return web.Response(body=whole, content_type="application/json")

    decode.behave = answer
    await bench.start()
    _, raw, _ = await bench.chat()
    assert raw == b'{"choices":[{"index":0,"finish_reason":"stop","x":NaN}]}'
    raw = await bench.stream()
    assert raw == b"data: " + whole.replace(b"," + params, b"") + b"\n\ndata: [DONE]\n\n"

    async def no_json(request, body):
        return web.Response(text="<html>", content_type="text/html")

    decode.behave = no_json
    status, raw, _ = await bench.chat()
    assert status == 502
    assert b"html" not in raw
