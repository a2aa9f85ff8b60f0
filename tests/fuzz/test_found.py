"""What searches have found, as it was sent."""

from collections.abc import AsyncIterator

import pytest
from gateway.bench import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.stop()


@pytest.mark.parametrize("path", ["/health", "/healthz", "/v1/models", "/openapi.json", "/metrics"])
async def test_an_answer_names_its_request(bench: Bench, path: str) -> None:
    """Not only errors do: the document says so."""
    await bench.pair()
    await bench.start()
    async with bench.http.get(path) as answer:
        assert answer.status == 200
        assert answer.headers["X-Request-Id"].startswith("req-")


async def test_a_stream_is_as_documented(bench: Bench) -> None:
    """Some tools look at each event, some at the whole text."""
    await bench.pair()
    await bench.start()
    async with bench.http.get("/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    stream = paths["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert "type" not in stream["schema"]
