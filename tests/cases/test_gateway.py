"""Failures of streaming gateways, as reported from the field."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from aiohttp import web
from demo.servers import stop_all, wait_for
from e2e.waiting import eventually
from gateway.bench import dropped
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as sessions

from cases.conftest import Deployment
from cases.processes import CLOCK, Engine, client, registered
from cases.relay import Parts, Relay
from cases.talk import held, session_of, words

pytestmark = pytest.mark.processes

PATH = "/v1/chat/completions"
PARAMS = re.compile(rb', ?"kv_transfer_params": ?(\{[^{}]*(\{[^{}]*\}[^{}]*)*\}|null)')


@dataclass
class Face:
    """A prefill and a decode behind relays, and the deployment that knows them."""

    deployment: Deployment
    prefill: Engine
    decode: Engine
    to_prefill: Relay
    to_decode: Relay

    def body(self, content: str, **more: Any) -> dict[str, Any]:
        return {
            "model": "face",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            **more,
        }

    async def post(self, body: dict[str, Any], session: str = "") -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as http:
            headers = {"x-session-id": session} if session else {}
            url = self.deployment.gateway() + PATH
            return await http.post(url, json=body, headers=headers)


@pytest.fixture(scope="module")
def engines(deployment: Deployment) -> Iterator[Face]:
    """Both engines, registered under their relays' addresses."""
    relays = Relay(), Relay()
    made = [
        deployment.engine(f"face-{role}", role, "--url", relay.url, model="face")
        for role, relay in zip(("prefill", "decode"), relays, strict=True)
    ]
    for engine, relay in zip(made, relays, strict=True):
        relay.target = engine.url
    try:
        for engine in made:
            engine.start()
        wait_for(made, 60)
        asyncio.run(registered(deployment, *(engine.name for engine in made)))
        yield Face(deployment, made[0], made[1], *relays)
    finally:
        stop_all(made)


@pytest.fixture
async def face(engines: Face) -> AsyncIterator[Face]:
    """Both with their relays there."""
    async with engines.to_prefill.running(), engines.to_decode.running():
        yield engines


async def reuses(face: Face, session: str, content: str) -> None:
    """Prove that what the registry has of the turn before is of use."""
    async with client(face.deployment) as kv:
        await eventually(lambda: held(kv, session))
    again = await face.post(face.body(content), session)
    assert again.headers["x-kvplane-decision"] == "reuse; reason=owner_holds"


async def test_an_event_does_not_wait_for_the_next_ones(face: Face) -> None:
    """G-01, llm-d-router PR#2432: tokens are held back in batches, and of a stream nothing is
    ever stored.
    """
    first = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    assert len(first) == 57
    sent_at = 0.0

    async def pause(parts: Parts) -> Parts:
        nonlocal sent_at
        sent_at = CLOCK.monotonic()
        yield first
        await CLOCK.sleep(2)
        async for part in parts:
            yield part

    face.to_decode.stream = pause
    content = words(101)
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream(
            "POST", face.deployment.gateway() + PATH,
            json=face.body(content, stream=True), headers={"x-session-id": "g01"},
        ) as answer,
    ):  # fmt: skip
        pieces = answer.aiter_raw()
        assert await anext(pieces) == first
        # 100 ms, on a machine that has nothing else to do.
        assert CLOCK.monotonic() - sent_at < 0.5
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"kv_transfer_params" not in rest
    await reuses(face, "g01", content)


async def test_a_large_answer_loses_the_params_and_no_other_byte(face: Face) -> None:
    """G-01: 300 kB that are no stream."""
    sent = b""

    def pad(raw: bytes) -> bytes:
        nonlocal sent
        text = json.dumps('xé☃ \\ " {}[],:' * 20_000, ensure_ascii=False).encode()
        sent = b'{ "pad" : ' + text + b"," + raw[1:]
        return sent

    face.to_decode.whole = pad
    content = words(102)
    answer = await face.post(face.body(content), "g01-large")
    assert len(sent) > 300_000
    assert b"remote_block_ids" in sent
    assert answer.content == PARAMS.sub(b"", sent)
    assert answer.json()["usage"] == json.loads(sent)["usage"]
    face.to_decode.whole = None
    await reuses(face, "g01-large", content)


async def test_characters_that_the_network_cuts_stay_whole(face: Face) -> None:
    """G-03: text is broken, or whole chunks are lost, when a character straddles two pieces."""
    text = "你好 🦀🌍é " * 3
    sent = b""

    async def cut(parts: Parts) -> Parts:
        nonlocal sent
        whole = b"".join([part async for part in parts])
        # The engine's first text is this; the others are empty.
        said = iter([text])
        sent = re.sub(
            rb'"content": ?"[^"]+"',
            lambda _: f'"content":{json.dumps(next(said, ""), ensure_ascii=False)}'.encode(),
            whole,
        )
        for at in range(len(sent)):
            yield sent[at : at + 1]

    face.to_decode.stream = cut
    messages = [{"role": "user", "content": f"再见 👋 {words(103)}"}]
    usage = {"stream_options": {"include_usage": True}}
    first = await face.post({**face.body("", **usage), "messages": messages, "stream": True})
    assert first.content == PARAMS.sub(b"", sent)
    assert text in first.content.decode()
    assert "\ufffd" not in first.content.decode()
    # What is stored of it finds the conversation again, which has no name.
    face.to_decode.stream = None
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    async with client(face.deployment) as kv:
        session_id = first.headers["x-kvplane-session-id"]
        request = lease.ListOwnershipsRequest(
            session_id=session_id, states=[lease.OWNERSHIP_STATE_HELD]
        )

        async def there() -> bool:
            return bool((await kv.leases.ListOwnerships(request)).ownerships)

        await eventually(there)
    again = await face.post({**face.body(""), "messages": messages})
    assert again.headers["x-kvplane-session-id"] == session_id
    assert again.headers["x-kvplane-decision"] == "reuse; reason=owner_holds"


@pytest.mark.parametrize("asked", [True, False])
async def test_the_last_chunk_has_usage_and_no_choices(face: Face, asked: bool) -> None:
    """G-04, litellm PR#25410: the empty list of choices kills the stream, or usage is lost."""
    sent = b""

    async def keep(parts: Parts) -> Parts:
        nonlocal sent
        async for part in parts:
            sent += part
            yield part

    face.to_decode.stream = keep
    content, session = words(104 + asked), f"g04-{asked}"
    more = {"stream_options": {"include_usage": True}} if asked else {}
    async with client(face.deployment) as kv:
        before = await kv.sessions.GetUsage(sessions.GetUsageRequest())
        answer = await face.post(face.body(content, stream=True, **more), session)
        events = sent.split(b"\n\n")
        usage = json.loads(events[-3][6:])
        assert usage["choices"] == []
        assert json.loads(events[-4][6:])["choices"][0]["finish_reason"] == "length"
        whole = PARAMS.sub(b"", sent)
        assert answer.content == (whole if asked else whole.replace(events[-3] + b"\n\n", b""))

        async def counted() -> bool:
            now = await kv.sessions.GetUsage(sessions.GetUsageRequest())
            # Others of the tenant may have been there too, but none with this many.
            grown = now.completion_tokens - before.completion_tokens
            return bool(grown >= usage["usage"]["completion_tokens"])

        await eventually(counted)
    face.to_decode.stream = None
    await reuses(face, session, content)


async def test_each_leg_gets_its_own_limits(face: Face) -> None:
    """G-05, vllm router PR#2 and others: a prefill that gets stream_options refuses, and the
    decode does all the work unnoticed; or it runs for the client's max_completion_tokens.
    """
    wanted = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 12,
        "min_tokens": 2,
        "n": 2,
        "logprobs": True,
    }
    body = face.body(words(106), **wanted)
    del body["max_tokens"]
    answer = await face.post(body, "g05")
    assert answer.status_code == 200, answer.text
    [prefill], [decode] = face.to_prefill.bodies, face.to_decode.bodies
    assert (prefill["stream"], prefill["max_tokens"], prefill["n"]) == (False, 1, 1)
    for name in ("stream_options", "max_completion_tokens", "min_tokens"):
        assert name not in prefill
    assert {name: decode[name] for name in wanted} == wanted
    texts = answer.content.count(b'"finish_reason":"') + answer.content.count(b'"finish_reason": "')
    assert texts == wanted["n"]


async def test_what_a_prefill_refuses_is_told(face: Face) -> None:
    """G-05: a prefill's 4xx is swallowed."""

    async def refuse() -> web.Response:
        error = {"message": "no such template", "type": "BadRequestError", "param": "x"}
        return web.json_response({"error": {**error, "code": 400}}, status=400)

    face.to_prefill.before = refuse
    answer = await face.post(face.body(words(107)))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "no such template"
    assert face.to_decode.requests == []


@contextlib.asynccontextmanager
async def held_back(relay: Relay, after: int) -> AsyncIterator[None]:
    """Let so many events of a stream pass, and nothing of another answer."""

    async def some(parts: Parts) -> Parts:
        count, rest = 0, b""
        async for part in parts:
            rest += part
            while count < after and b"\n\n" in rest:
                event, _, rest = rest.partition(b"\n\n")
                count += 1
                yield event + b"\n\n"
            if count == after:
                break
        await asyncio.Event().wait()

    async def nothing() -> None:
        await asyncio.Event().wait()

    relay.stream, relay.after = some, nothing
    yield
    relay.reset()


@pytest.mark.parametrize(
    ("leg", "events", "stream"),
    [
        pytest.param("decode", 3, True, id="a-after-three-chunks"),
        pytest.param("decode", 0, True, id="b-before-the-first-token"),
        pytest.param("decode", 0, False, id="c-no-stream"),
        pytest.param("prefill", 0, True, id="d-during-prefill"),
    ],
)
async def test_a_client_that_leaves_ends_the_work(
    face: Face, leg: str, events: int, stream: bool
) -> None:
    """G-06, litellm#30244: the engine goes on generating and keeps its slot."""
    relay = face.to_decode if leg == "decode" else face.to_prefill

    async def begun() -> bool:
        return bool(face.decode.state()["stats"]["running"])

    session = f"g06-{leg}-{events}-{stream}"
    content = words(108 + events)
    # A turn to come back to, so that the second one begins with a lease.
    assert (await face.post(face.body(content), session)).status_code == 200
    async with client(face.deployment) as kv:
        await eventually(lambda: held(kv, session))
        session_id = (await session_of(kv, session)).session_id
        before = face.decode.state()["stats"]
        relay.reset()
        async with held_back(relay, events):
            # Long enough to be in the middle of it.
            body = {**face.body(content, stream=stream, max_tokens=20_000), "session_id": session}
            async with dropped(face.deployment.gateway(), body) as reader:
                async with asyncio.timeout(10):
                    await relay.arrived.wait()
                    for _ in range(events):
                        await reader.readuntil(b"data: ")
                if leg == "decode":  # what never reached the engine ends nothing there
                    await eventually(begun)
            async with asyncio.timeout(1):
                await relay.left.wait()

        async def nothing_left() -> bool:
            request = lease.ListLeasesRequest(
                session_id=session_id,
                states=[lease.LEASE_STATE_GRANTED, lease.LEASE_STATE_READING],
            )
            leases = await kv.leases.ListLeases(request)
            busy = any(one.state()["stats"]["running"] for one in (face.prefill, face.decode))
            return not (leases.leases or busy or face.prefill.held())

        await eventually(nothing_left)
        after = face.decode.state()["stats"]
        assert after["aborted"] - before["aborted"] == (1 if leg == "decode" else 0)
        # The half turn is none: nothing is held of it for a next one.
        assert [one for one in await held(kv, session) if one.turn == 2] == []
        # And it does not stand in the way of the next.
        assert (await face.post(face.body(content), session)).status_code == 200
