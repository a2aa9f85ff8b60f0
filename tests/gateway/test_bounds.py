"""Every wait for others has an end, and so has what they may say."""

import asyncio
import gzip
import json

import aiohttp
import pytest
from aiohttp import web
from gateway.bench import PROMPT_IDS, chunk, eventually, sse
from gateway.test_plain import hold, plain  # noqa: F401 - a fixture
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway import tracing, upstream
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.plain import Read
from kvplane.kernel.clock import FakeClock, loop_turn
from kvplane.kernel.errors import Unavailable

PREFILL, DECODE = routing.WORKER_ROLE_PREFILL, routing.WORKER_ROLE_DECODE


async def hang(*_whatever):
    await asyncio.Event().wait()


# -- what is asked beside completions -------------------------------------------


@pytest.fixture
async def asked():
    """An engine that is asked for other things, in every wrong way, and who asks it."""
    seen = []

    async def answer(request):
        seen.append(request)
        return await ANSWERS[request.match_info["what"]](request)

    app = web.Application()
    app.router.add_get("/{what}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ask = upstream.Upstream(GatewayConfig())
    await ask.start()
    yield ask, f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    await ask.stop()
    await runner.cleanup()


async def away(_request):
    return web.Response(status=302, headers={"Location": "/fine", "Set-Cookie": "a=b"})


async def fine(_request):
    return web.Response(body=b"fine", headers={"Set-Cookie": "a=b"})


async def bomb(_request):
    return web.Response(body=gzip.compress(b"x" * 1000), headers={"Content-Encoding": "gzip"})


async def large(_request):
    return web.Response(body=b"x" * 1000)


ANSWERS = {"health": away, "fine": fine, "bomb": bomb, "large": large, "slow": hang}


async def test_no_redirect_is_followed_no_cookie_kept_nothing_opened(asked):
    ask, url, seen = asked
    assert not await ask.healthy(url, 1.0)
    assert await ask.get(f"{url}/fine", 1.0) == (200, b"fine")
    _, raw = await ask.get(f"{url}/bomb", 1.0)
    assert gzip.decompress(raw) == b"x" * 1000
    assert [request.path for request in seen] == ["/health", "/fine", "/bomb"]
    assert not any("Cookie" in request.headers for request in seen)


async def test_small_answers_are_small_and_come_soon(asked, monkeypatch):
    ask, url, _ = asked
    monkeypatch.setattr(upstream, "_MAX_SMALL", 999)
    with pytest.raises(aiohttp.ClientError):
        await ask.get(f"{url}/large", 1.0)
    monkeypatch.setattr(upstream, "_MAX_SMALL", 1000)
    assert (await ask.get(f"{url}/large", 1.0))[1] == b"x" * 1000
    async with asyncio.timeout(2):
        with pytest.raises(TimeoutError):
            await ask.get(f"{url}/slow", 0.05)


# -- legs -----------------------------------------------------------------------


async def test_a_prefill_and_a_first_byte_have_their_time(bench):
    prefill, first = await bench.pair()
    second = await bench.engine("decode-1", DECODE)
    prefill.behave = first.behave = hang
    await bench.start(prefill_timeout_s=0.1, first_byte_timeout_s=0.1)
    async with asyncio.timeout(3):
        await bench.stream()
    assert len(prefill.requests) == len(first.requests) == len(second.requests) == 1


async def test_plans_are_not_made_for_ever(bench):
    prefill = await bench.engine("prefill-0", PREFILL)
    decodes = [await bench.engine(f"decode-{number}", DECODE) for number in range(8)]

    async def lose_the_decode(_request, _body):
        bench.control.lose(decodes[len(prefill.requests) - 1].worker_id)
        await asyncio.Event().wait()

    prefill.behave = lose_the_decode
    await bench.start(refresh_interval_s=0.02, drain_s=0.05)
    async with asyncio.timeout(5):
        status, _, _ = await bench.chat()
    assert status == 503
    assert len(bench.control.routes) == 6


async def test_of_many_silent_workers_a_few_are_asked(bench, monkeypatch):
    for number in range(12):
        engine = await bench.engine(f"worker-{number}", DECODE)
        bench.control.lose(engine.worker_id)
    await bench.start(drain_s=0.05)
    asked = []

    async def healthy(url, _seconds):
        asked.append(url)
        return False

    monkeypatch.setattr(bench.gateway._upstream, "healthy", healthy)
    assert (await bench.chat())[0] == 503
    assert len(asked) == len(set(asked)) == 8


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-zz-zz-01"},
        {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01\r\nX: y"},
        {"tracestate": "a=b"},
    ],
)
def test_what_is_no_trace_goes_no_further(monkeypatch, headers):
    monkeypatch.setattr(tracing, "_telemetry", lambda: None)
    with tracing.span("x", headers) as passed:
        assert passed == {}
    right = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "a=b"}
    with tracing.span("x", {**right, "baggage": "c=d"}) as passed:
        assert passed == right
    with tracing.span("x", {**right, "tracestate": "x" * 513}) as passed:
        assert "tracestate" not in passed


# -- plain engines ----------------------------------------------------------------


@pytest.mark.parametrize("call", ["BeginRead", "GrantLease", "ReportOwnership"])
async def test_a_lease_service_that_is_silent_is_not_waited_for(plain, monkeypatch, call):  # noqa: F811
    bench, prefill, decode = plain
    monkeypatch.setattr("kvplane.gateway.plain._BOUND_S", 0.05)
    hold(bench, PROMPT_IDS[:96])
    bench.control.before[call] = hang
    async with asyncio.timeout(3):
        assert (await bench.chat())[0] == 200
    read = prefill.requests[0]["kv_transfer_params"]["remote_block_ids"] is not None
    assert read == (call != "BeginRead")
    handed_over = "kv_transfer_params" in decode.requests[0]
    assert handed_over == (call == "BeginRead")


@pytest.mark.parametrize("how", ["slow", "large", "500"])
async def test_a_tokenizer_that_fails_costs_the_read_only(bench, how):
    from gateway.test_plain import start_plain

    prefill, _ = await start_plain(bench, reuse_timeout_s=0.2, max_answer_bytes=5_000)
    hold(bench, PROMPT_IDS[:96])
    text = json.dumps({"tokens": PROMPT_IDS}) + " " * (6_000 if how == "large" else 0)

    async def tokenizer():
        if how == "slow":
            await asyncio.Event().wait()
        return web.Response(text=text, status=500 if how == "500" else 200)

    prefill.tokenizer = tokenizer
    async with asyncio.timeout(3):
        assert (await bench.chat())[0] == 200
    assert prefill.requests[0]["kv_transfer_params"]["remote_block_ids"] is None


@pytest.mark.parametrize("count", [0, -1, 102, "100", None])
async def test_of_more_tokens_than_there_are_nothing_is_reported(plain, count):  # noqa: F811
    bench, prefill, decode = plain

    async def answer(request, body):
        handle = {**prefill.handle(prefill=True), "remote_num_tokens": count}
        whole = prefill.whole(request, body, handle)
        whole["choices"][0]["token_ids"] = [900]
        return web.json_response(whole)

    prefill.behave = answer
    assert (await bench.chat())[0] == 200
    assert not any(own.for_decode for r in bench.control.reports for own in r.ownerships)
    assert "kv_transfer_params" not in decode.requests[0]


async def test_a_decode_reads_a_prefill_whole_or_not_at_all(plain):  # noqa: F811
    bench, _, decode = plain
    decode.tokens = [*PROMPT_IDS[:90], *range(500, 510)]
    assert (await bench.chat())[0] == 200
    assert "kv_transfer_params" not in decode.requests[0]
    await eventually(lambda: bench.control.released)
    assert bench.control.released == [("granted-1", lease.READ_OUTCOME_UNUSED)]


async def test_a_read_is_ended_a_second_before_its_lease_is():
    clock = FakeClock()
    told = []

    class Guard:
        def interrupt(self, what):
            told.append((what, clock.monotonic() - begun))

    class Leases:
        async def RenewLeases(self, _request):
            raise Unavailable("away")

    begun = clock.monotonic()
    read = Read(Leases(), clock, lease.Lease(), begun + 2.5)
    read.guard(Guard())
    for _ in range(25):
        await loop_turn()
        await loop_turn()
        if told:
            break
        clock.advance(0.1)
    assert told == [("the lease was lost", pytest.approx(1.5))]
    read._renewing.cancel()


async def test_a_client_that_leaves_in_the_middle_of_many_choices_cancels_all(bench):
    from gateway.bench import dropped

    _, decode = await bench.pair()

    async def slowly(request, body):
        assert body["n"] == 2
        response = await decode.stream_open(request)
        for event in sse(chunk("a"), chunk("b"), done=False):
            await response.write(event)
        await asyncio.Event().wait()

    decode.behave = slowly
    await bench.start()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}
    async with dropped(bench.url, body) as reader:
        await reader.readuntil(b'"b"')
    async with asyncio.timeout(2):
        await decode.aborted.wait()
