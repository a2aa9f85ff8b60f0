"""Bad input at every endpoint of the gateway: an OpenAI error that names it, nothing stored."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from kvplane.gateway.session_key import BODY_FIELDS, HEADERS, METADATA_FIELDS
from wire.plane import Plane
from wire.seed import MODEL, Seed

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": MESSAGES},
    TEXT: {"model": MODEL, "prompt": "once"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(plane: Plane, seed: Seed) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a gateway that knows the workers."""
    async with aiohttp.ClientSession(plane.gateway_url) as session:
        async with asyncio.timeout(20):
            while True:
                async with session.get("/v1/models") as answer:
                    if (await answer.json())["data"]:
                        break
                await asyncio.sleep(0.02)
        yield session


def changed(path: str, **fields: Any) -> dict[str, Any]:
    """The right body with other fields; ... takes one away."""
    body = {**RIGHT[path], **fields}
    return {key: value for key, value in body.items() if value is not ...}


NOT_OBJECTS = [
    b"", b"{", b"[]", b"[1]", b"1", b"null", b'"text"', b"\xff\xfe", b'{"model": "\xff"}',
    b'{"model": "\\ud800"}', b"{'model': 1}", b'{"model": NaN}', b'{"a": 1,}', b"\0",
    b"--x\r\nContent-Disposition: form-data\r\n\r\n", b"model=tiny", b"[" * 90_000,
]  # fmt: skip

# Path, body, what the answer names.
BODIES: list[tuple[str, Any, str]] = [
    *((path, raw, "body") for path in (CHAT, TEXT) for raw in NOT_OBJECTS),
    *(
        (path, changed(path, model=model), "model")
        for path in (CHAT, TEXT)
        for model in (..., None, "", 5, [], {}, True, "x" * 513, "\U0001f600" * 129)
    ),
    *(
        (CHAT, changed(CHAT, messages=messages), "messages")
        for messages in (..., None, [], {}, "hi", 5, True)
    ),
    *(
        (CHAT, changed(CHAT, messages=[*MESSAGES, message]), "messages[1]")
        for message in (None, 5, "hi", [], True)
    ),
    *(
        (CHAT, changed(CHAT, messages=[{"role": role, "content": "x"}]), "messages[0].role")
        for role in (None, 5, [], {})
    ),
    (CHAT, changed(CHAT, messages=[{}]), "messages[0].role"),
    *((TEXT, changed(TEXT, prompt=prompt), "prompt") for prompt in (..., None, 5, True, {})),
    *(
        (path, changed(path, stream=stream), "stream")
        for path in (CHAT, TEXT)
        for stream in ("yes", 1, [True], {"a": 1})
    ),
    *(
        (path, changed(path, cache_salt=salt), "cache_salt")
        for path in (CHAT, TEXT)
        for salt in ("", 5, [], {})
    ),
    *(
        (CHAT, changed(CHAT, **{field: value}), field)
        for field in BODY_FIELDS
        if field != "conversation"
        for value in ("x" * 513, "é" * 257, True, [], {}, 1.5)
    ),
    *(
        (CHAT, changed(CHAT, conversation={"id": value}), "conversation.id")
        for value in ("x" * 513, True, [], {}, 1.5)
    ),
    *(
        (CHAT, changed(CHAT, metadata={field: value}), f"metadata.{field}")
        for field in METADATA_FIELDS
        for value in ("x" * 513, True, [])
    ),
    *(
        (CHAT, changed(CHAT, extra_body={field: "x" * 513}), f"extra_body.{field}")
        for field in BODY_FIELDS
    ),
]


def error_of(raw: bytes) -> dict[str, Any]:
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    for inside in ("Traceback", "Error(", ".py", "kvplane.", "line "):
        if inside == "line " and "JSON" in error["message"]:
            continue  # of the client's own text
        assert inside not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"), BODIES, ids=lambda value: ascii(value)[-40:].replace("/", "_")
)
async def test_a_bad_body(
    plane: Plane, http: aiohttp.ClientSession, path: str, body: Any, param: str
) -> None:
    before = plane.dump()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=raw) as answer:
        error = error_of(await answer.read())
        assert answer.status == 400
        assert answer.content_type == "application/json"
        assert answer.headers["X-Request-Id"].startswith("req-")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert plane.dump() == before


@pytest.mark.parametrize("header", HEADERS)
async def test_a_bad_session_header(plane: Plane, http: aiohttp.ClientSession, header: str) -> None:
    before = plane.dump()
    for value in ("x" * 513, "é" * 257):
        async with http.post(CHAT, json=RIGHT[CHAT], headers={header: value}) as answer:
            error = error_of(await answer.read())
            assert answer.status == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", header)
    assert plane.dump() == before


async def send(plane: Plane, raw: bytes) -> bytes:
    """Send bytes as they are and return all that comes back."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(plane.gateway_url.rpartition(":")[2])
    )
    writer.write(raw)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("header", ["X-Session-Id", "conversation-id"])
async def test_a_session_header_that_is_not_utf8(plane: Plane, seed: Seed, header: str) -> None:
    """Two names must not become one by way of a replacement character."""
    before = plane.dump()
    body = json.dumps(RIGHT[CHAT]).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    )
    raw = b"%s\r\n%s: caf\xe9\r\n\r\n%s" % (head.encode(), header.encode(), body)
    answer = await send(plane, raw)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer.partition(b"\r\n\r\n")[2])["param"] == header.lower()
    assert plane.dump() == before


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_body_that_is_too_large(
    plane: Plane, http: aiohttp.ClientSession, path: str
) -> None:
    before = plane.dump()
    large = json.dumps(changed(path, padding="x" * 200_000)).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]

    packed = {"Content-Encoding": "gzip"}
    for data, headers in ((large, {}), (chunks(), {}), (gzip.compress(large), packed)):
        async with http.post(path, data=data, headers=headers) as answer:
            error = error_of(await answer.read())
            assert answer.status == 413
        assert (error["type"], error["param"]) == ("invalid_request_error", "body")
        assert "100000" in error["message"]
    assert plane.dump() == before


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_what_its_header_says(
    plane: Plane, http: aiohttp.ClientSession, encoding: str
) -> None:
    before = plane.dump()
    raw = json.dumps(RIGHT[CHAT]).encode()
    async with http.post(CHAT, data=raw, headers={"Content-Encoding": encoding}) as answer:
        text = await answer.read()
        assert answer.status == 400
    assert error_of(text)["param"] == "body"
    assert plane.dump() == before


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "model", ["unknown", "TINY", "tiny ", "../tiny", "a\nb", "a\0b", "x" * 400]
)
async def test_a_model_that_nobody_serves(
    plane: Plane, http: aiohttp.ClientSession, path: str, model: str
) -> None:
    before = plane.dump()
    body = changed(path, model=model, session_id="a conversation")
    async with http.post(path, json=body) as answer:
        error = error_of(await answer.read())
        assert answer.status in {400, 404}
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    assert (answer.status == 404) == (error["code"] == "model_not_found")
    assert plane.dump() == before


PATHS = [
    ("GET", "/", 404),
    ("GET", "/v1", 404),
    ("POST", "/v1/embeddings", 404),
    ("POST", "/v1/chat/completions/", 404),
    ("POST", "/v1/chat/completions/x", 404),
    ("GET", "/v1/sessions", 404),
    ("GET", "/..%2f..%2fetc/passwd", 404),
    ("POST", "/v1/nothing%00", 404),
    ("DELETE", "/v1/sessions/", 404),
    ("GET", CHAT, 405),
    ("PUT", CHAT, 405),
    ("DELETE", TEXT, 405),
    ("PATCH", TEXT, 405),
    ("POST", "/v1/models", 405),
    ("DELETE", "/v1/models/tiny", 405),
    ("GET", "/v1/sessions/name", 405),
    ("POST", "/health", 405),
    ("POST", "/healthz", 405),
    ("POST", "/readyz", 405),
    ("PUT", "/metrics", 405),
]


@pytest.mark.parametrize(("method", "path", "status"), PATHS)
async def test_a_path_or_method_that_is_not_there(
    plane: Plane, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    before = plane.dump()
    async with http.request(method, path, json=RIGHT[CHAT]) as answer:
        error = error_of(await answer.read())
        assert answer.status == status
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert answer.headers["Allow"]
    assert plane.dump() == before


@pytest.mark.parametrize("name", ["unknown", "x" * 512, "%C3%A9", "%00", "%ff", "a/b/c", "%2e%2e"])
async def test_ending_a_conversation_that_is_not_there(
    plane: Plane, http: aiohttp.ClientSession, name: str
) -> None:
    from yarl import URL

    before = plane.dump()
    url = URL(f"{plane.gateway_url}/v1/sessions/{name}", encoded=True)
    async with http.delete(url) as answer:
        error = error_of(await answer.read())
        assert answer.status == 404
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
    assert plane.dump() == before


async def test_ending_a_conversation_with_an_overlong_name(
    plane: Plane, http: aiohttp.ClientSession
) -> None:
    before = plane.dump()
    async with http.delete("/v1/sessions/" + "x" * 513) as answer:
        error = error_of(await answer.read())
        assert answer.status == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", "name")
    assert plane.dump() == before


@pytest.mark.parametrize("name", ["unknown", "%00", "%ff", "x" * 1000, "a/b"])
async def test_a_model_that_is_not_there(
    plane: Plane, http: aiohttp.ClientSession, name: str
) -> None:
    from yarl import URL

    async with http.get(URL(f"{plane.gateway_url}/v1/models/{name}", encoded=True)) as answer:
        error = error_of(await answer.read())
        assert answer.status == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"NONSENSE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
        b"Content-Encoding: br\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nBad Header: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Session-Id: a\0b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_not_http(plane: Plane, http: aiohttp.ClientSession, raw: bytes) -> None:
    before = plane.dump()
    answer = await send(plane, raw)
    assert answer.split(b" ")[1].startswith(b"4")
    for inside in (b"Traceback", b".py", b"kvplane"):
        assert inside not in answer
    assert plane.dump() == before
    async with http.get("/health") as alive:
        assert alive.status == 200
