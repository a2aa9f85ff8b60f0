"""Requests that are no messages, or too large: a clear error, and the server lives."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from kvplane.runtime.server import MAX_MESSAGE_BYTES
from wire.methods import METHODS
from wire.plane import Plane, refused
from wire.seed import RIGHT, Seed

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Bytes that no text of ours has, as long as what takes their place.
MARK = "\x01\x02\x03\x04\x05\x06"
NOT_UTF8 = {
    "a lone surrogate": b"\xed\xa0\x80abc",
    "a cut character": b"abcd\xe2\x82",
    "Latin-1": b"caf\xe9\xe9\xe9",
    "an overlong NUL": b"a\xc0\x80bcd",
}


def texts(descriptor: Descriptor) -> Iterator[list[FieldDescriptor]]:
    """Every text in a message, as the way to it."""
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield [field]
        elif field.message_type is not None:
            for way in texts(field.message_type):
                yield [field, *way]


def with_mark(message: Message, way: list[FieldDescriptor]) -> str:
    """Put MARK there, and return the path."""
    target: Message = message
    path = []
    for field in way[:-1]:
        inner = getattr(target, field.name)
        target = inner.add() if field.is_repeated else inner
        path.append(f"{field.name}[0]" if field.is_repeated else field.name)
    last = way[-1]
    if last.is_repeated:
        getattr(target, last.name).append(MARK)
        path.append(f"{last.name}[0]")
    else:
        setattr(target, last.name, MARK)
        path.append(last.name)
    return ".".join(path)


WITH_TEXTS = [name for name, one in METHODS.items() if [*texts(one.descriptor.input_type)]]


@pytest.mark.parametrize("name", WITH_TEXTS)
async def test_a_text_that_is_not_utf8(plane: Plane, name: str) -> None:
    method = METHODS[name]
    before = plane.dump()
    for way in texts(method.descriptor.input_type):
        message = method.request()
        path = with_mark(message, way)
        raw = message.SerializeToString()
        for what, wrong in NOT_UTF8.items():
            refusal = await plane.refusal(name, raw.replace(MARK.encode(), wrong))
            assert (refusal.code, refusal.reason, refusal.metadata) == (
                "INVALID_ARGUMENT",
                "INVALID_FIELD",
                {"field": path},
            ), (what, refusal)
            assert "UTF-8" in refusal.message
    assert plane.dump() == before


@pytest.mark.parametrize("raw", [b"\x00", b"\xff" * 50, b"GET / HTTP/1.1\r\n\r\n", b"\x0a\x7f"])
@pytest.mark.parametrize("name", METHODS)
async def test_bytes_that_are_no_message(plane: Plane, name: str, raw: bytes) -> None:
    before = plane.dump()
    refusal = await plane.refusal(name, raw)
    assert (refusal.code, refusal.domain, refusal.reason, refusal.metadata) == (
        "INVALID_ARGUMENT",
        "kvplane",
        "INVALID_FIELD",
        {"field": "request"},
    )
    assert METHODS[name].request.DESCRIPTOR.name in refusal.message
    assert "Decode" not in refusal.message
    assert plane.dump() == before


async def test_unreadable_later_on_a_stream(plane: Plane, seed: Seed) -> None:
    name = "LeaseService/Connect"
    stream = plane.stub(METHODS[name])(timeout=20)
    await stream.write(RIGHT[name](seed))
    assert (await stream.read()).HasField("welcome")
    before = plane.dump()
    await stream.write(b"\xff\xff")
    assert (await refused(stream)).code == "INVALID_ARGUMENT"
    assert plane.dump() == before


def padded(message: Message, size: int) -> bytes:
    """The message with a field that nobody knows, so many bytes long altogether."""
    raw = message.SerializeToString()
    # Field 1000, length-delimited, with a length of four bytes.
    body = size - len(raw) - 6
    length = bytes((body >> shift & 0x7F) | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21))
    return raw + b"\xc2\x3e" + length + bytes(body)


@pytest.mark.parametrize("name", METHODS)
async def test_too_large(plane: Plane, seed: Seed, name: str) -> None:
    right = RIGHT[name](seed)
    before = plane.dump()
    refusal = await plane.refusal(name, padded(right, MAX_MESSAGE_BYTES + 1))
    assert refusal.code == "RESOURCE_EXHAUSTED"
    assert str(MAX_MESSAGE_BYTES) in refusal.message
    assert plane.dump() == before
    # The server lives, and takes what is as large as can be.
    get = RIGHT["LeaseService/GetLease"](seed)
    answer = await plane.call("LeaseService/GetLease", padded(get, MAX_MESSAGE_BYTES))
    assert answer.lease.lease_id == seed.granted.lease_id


async def test_too_large_later_on_a_stream(plane: Plane, seed: Seed) -> None:
    name = "LeaseService/Connect"
    stream = plane.stub(METHODS[name])(timeout=20)
    await stream.write(RIGHT[name](seed))
    assert (await stream.read()).HasField("welcome")
    before = plane.dump()
    await stream.write(padded(RIGHT[name](seed), MAX_MESSAGE_BYTES + 1))
    assert (await refused(stream)).code == "RESOURCE_EXHAUSTED"
    assert plane.dump() == before
    assert await plane.call(name, RIGHT[name](seed))
