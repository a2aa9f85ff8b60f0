"""Readiness, and what is said of it over HTTP."""

import asyncio
import json

import pytest
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import Unavailable
from kvplane.runtime.readiness import Readiness
from kvplane.runtime.status_http import StatusHttp
from prometheus_client import CollectorRegistry, Counter


class Checked:
    """A check that says what the test wants."""

    def __init__(self) -> None:
        self.says: str | Exception | None = None

    async def __call__(self):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.fixture
def check():
    return Checked()


@pytest.fixture
def changes():
    return []


@pytest.fixture
async def readiness(check, changes, lines):
    clock = FakeClock()

    async def on_change(ready):
        changes.append(ready)

    made = Readiness({"database": check}, clock, on_change)
    made.clock = clock
    yield made
    await made.drain()


async def until(readiness, condition):
    """Let time pass until the loop has seen it."""
    async with asyncio.timeout(5):
        while not condition():
            readiness.clock.advance(1)
            await asyncio.sleep(0)


async def test_it_follows_the_check(readiness, check, changes):
    check.says = "run `kvplane migrate up`"
    assert not readiness.ready
    await readiness.start()
    assert readiness.problems == {"database": "run `kvplane migrate up`"}
    check.says = None
    await until(readiness, lambda: readiness.ready)
    check.says = Unavailable("the database is away")
    await until(readiness, lambda: readiness.problems == {"database": "the database is away"})
    check.says = None
    await until(readiness, lambda: readiness.ready)
    assert changes == [False, True, False, True]


async def test_what_caused_it_is_in_the_log_only(readiness, check, lines):
    check.says = Unavailable("the database is away")
    check.says.__cause__ = OSError("role kv does not exist\nand more")
    await readiness.start()
    assert readiness.problems == {"database": "the database is away"}
    [line] = [line for line in lines.all("not ready") if "check" in line]
    assert line["cause"] == "role kv does not exist"


async def test_a_check_that_breaks_is_a_check_that_fails(readiness, check, lines):
    check.says = ValueError("bug")
    await readiness.start()
    assert readiness.problems == {"database": "the check failed: ValueError"}
    assert lines.all("check failed")


async def test_draining_it_stays_not_ready(readiness, check, changes):
    await readiness.start()
    assert readiness.ready
    await readiness.drain()
    assert not readiness.ready
    assert changes == [True, False]
    await readiness.check()
    assert not readiness.ready


async def get(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else None, body


@pytest.fixture
async def http(readiness):
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    server = StatusHttp(readiness, registry)
    yield await server.start("127.0.0.1", 0)
    await server.stop()


async def test_readyz(http, readiness, check):
    request = b"GET /readyz?x=1 HTTP/1.1\r\nHost: x\r\n\r\n"
    check.says = "behind"
    await readiness.start()
    code, body = await get(http, request)
    assert (code, json.loads(body)) == (503, {"ready": False, "problems": {"database": "behind"}})
    check.says = None
    await readiness.check()
    code, body = await get(http, request)
    assert (code, json.loads(body)) == (200, {"ready": True, "problems": {}})


async def test_alive_and_metrics(http):
    assert (await get(http, b"GET /healthz HTTP/1.0\r\n\r\n"))[0] == 200
    code, body = await get(http, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert code == 200
    assert b"things_total 3.0" in body
    assert (await get(http, b"HEAD /metrics HTTP/1.1\r\n\r\n")) == (200, b"")


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", None),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", None),
    ],
)
async def test_what_is_not_served(http, request_bytes, code):
    try:
        answer = await get(http, request_bytes)
    except ConnectionResetError:
        answer = (None, b"")
    assert answer[0] == code
    assert (await get(http, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
