"""Clients that leave (G-06), and hand-overs that do not happen (L-04)."""

import asyncio
import contextlib
import json
import socket

import pytest
from aiohttp import web
from gateway.bench import chunk, dropped, eventually, sse
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.kernel.context import GATEWAY, Role

CANCELLED = session.TURN_OUTCOME_CANCELLED
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


async def hang(_request, _body):
    await asyncio.Event().wait()


async def expect_cancelled(bench, engine):
    async with asyncio.timeout(1):
        await engine.aborted.wait()
    await eventually(lambda: bench.control.completes)
    [turn] = bench.control.completes
    assert turn.outcome == CANCELLED
    assert turn.history_digest == b""
    await eventually_running(bench)


async def eventually_running(bench):
    async with asyncio.timeout(2):
        while await bench.metric("kvplane_gateway_requests_running") != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_g06a_after_three_chunks(bench):
    _, decode = await bench.pair()

    async def slowly(request, body):
        response = await decode.stream_open(request)
        for event in sse(chunk("a"), chunk("b"), chunk("c"), done=False):
            await response.write(event)
        await asyncio.Event().wait()

    decode.behave = slowly
    await bench.start()
    async with dropped(bench.url, {**BODY, "stream": True}) as reader:
        await reader.readuntil(b'"c"')
    await expect_cancelled(bench, decode)


@pytest.mark.parametrize("stream", [True, False])
async def test_g06bc_before_the_first_byte(bench, stream):
    _, decode = await bench.pair()
    decode.behave = hang
    await bench.start()
    async with dropped(bench.url, {**BODY, "stream": stream}):
        await decode.arrived.wait()
    await expect_cancelled(bench, decode)


async def test_g06d_during_prefill(bench):
    prefill, decode = await bench.pair()
    prefill.behave = hang
    bench.control.lease_next = True
    await bench.start()
    async with dropped(bench.url, BODY):
        await prefill.arrived.wait()
    await expect_cancelled(bench, prefill)
    assert decode.requests == []
    # The prefill may have begun to read: its connector gives the lease back then, not we.
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]


def owned(number, *, turn=1, for_decode=True):
    return lease.Ownership(
        ownership_id=f"own-{number}", worker_id="prefill-0", turn=turn, for_decode=for_decode
    )


async def test_what_a_prefill_ends_with_after_its_client_has_left_is_freed(bench):
    prefill, _ = await bench.pair()
    prefill.behave = hang
    await bench.start()
    async with dropped(bench.url, BODY):
        await prefill.arrived.wait()
    # Its answer crossed the news that nobody waits for it; the report follows.
    bench.control.owned = [owned(1), owned(2, turn=2), owned(3, for_decode=False)]
    await eventually(lambda: bench.control.revoked, seconds=2)
    [grant] = bench.control.grants
    assert grant.ownership_id == "own-1"
    assert grant.holder.worker_id == "prefill-0"
    assert not grant.begin_read
    assert bench.control.revoked == ["granted-1"]
    # By the gateway, for the tenant: the client has not asked for it.
    [who] = bench.control.revokers
    assert (who.tenant_id, who.roles, who.actor) == ("default", {Role.SERVICE}, GATEWAY)
    assert who.request_id == bench.control.routes[0][1].request_id
    [asked] = bench.control.listed
    assert (asked.session_id, asked.worker_id) == ("session-0", "prefill-0")
    assert asked.states == [lease.OWNERSHIP_STATE_HELD]


async def test_what_a_slow_decode_lets_go_of_is_freed_too(bench):
    _, decode = await bench.pair()
    decode.behave = hang
    await bench.start()
    async with dropped(bench.url, BODY):
        await decode.arrived.wait()
    # What the prefill answered is freed at once if it can be; later it is looked for.
    await eventually(lambda: bench.control.listed, seconds=2)
    bench.control.owned = [owned(1)]
    await eventually(lambda: len(bench.control.grants) == 2, seconds=4)
    assert bench.control.grants[0].handle.request_id == "prefill-0-1"
    assert bench.control.grants[1].ownership_id == "own-1"
    assert bench.control.grants[0].request_id != bench.control.grants[1].request_id


async def test_during_route_what_was_given_is_given_back(bench):
    prefill, _ = await bench.pair()
    bench.control.lease_next = True
    asked, answer = asyncio.Event(), asyncio.Event()

    async def hold(_request):
        asked.set()
        await answer.wait()

    bench.control.before["Route"] = hold
    await bench.start(route_timeout_s=30.0)
    async with dropped(bench.url, BODY):
        await asked.wait()
    await eventually_running(bench)
    answer.set()
    await eventually(lambda: bench.control.released and bench.control.completes)
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]
    assert bench.control.completes[0].outcome == CANCELLED
    assert prefill.requests == []


async def test_l04a_a_decode_that_refuses_frees_the_prefills_blocks(bench):
    _, decode = await bench.pair()

    async def refuse(request, body):
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    decode.behave = refuse
    await bench.start()
    status, raw, _ = await bench.chat()
    assert (status, json.loads(raw)["error"]["message"]) == (400, "too long")
    await eventually(lambda: bench.control.revoked, seconds=1)
    [grant] = bench.control.grants
    assert grant.handle.engine_id == "engine-prefill-0"
    assert grant.handle.request_id == "prefill-0-1"
    assert grant.holder.worker_id == "prefill-0"
    assert not grant.begin_read
    assert bench.control.revoked == ["granted-1"]
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_FAILED


@pytest.fixture
def nowhere():
    """A port where connecting takes for ever: the listener's queue is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = []
    for _ in range(3):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            waiting[-1].connect(listener.getsockname())
    yield listener.getsockname()[1]
    for one in (*waiting, listener):
        one.close()


async def test_l04b_a_client_that_leaves_between_the_legs_frees_them_too(bench, nowhere):
    prefill, decode = await bench.pair()
    bench.control.workers["decode-0"].url = f"http://127.0.0.1:{nowhere}"
    await bench.start(connect_timeout_s=60.0)
    async with dropped(bench.url, BODY):
        await prefill.arrived.wait()
        async with asyncio.timeout(2):
            while not await bench.metric("kvplane_gateway_prefills_total"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await eventually(lambda: bench.control.revoked, seconds=1)
    assert bench.control.grants[0].handle.request_id == "prefill-0-1"
    await eventually(lambda: bench.control.completes)
    assert bench.control.completes[0].outcome == CANCELLED
    assert decode.requests == []


async def test_a_connection_that_nobody_accepts_is_not_waited_for(bench, nowhere):
    prefill, _ = await bench.pair()
    bench.control.workers["decode-0"].url = f"http://127.0.0.1:{nowhere}"
    await bench.start(connect_timeout_s=0.1)
    async with asyncio.timeout(3):
        assert (await bench.chat())[0] == 200
    assert len(prefill.requests) == 2  # once for the other, once alone


async def test_a_prefill_that_was_never_reached_leaves_its_lease_unused(bench):
    prefill, _ = await bench.pair()
    bench.control.lease_next = True
    await prefill.stop()
    await bench.start()
    status, _, _ = await bench.chat()
    assert status == 200
    await eventually(lambda: bench.control.released)
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]


async def test_a_lease_of_a_prefill_that_refuses_is_given_back_unless_it_has_begun(bench):
    prefill, _ = await bench.pair()
    bench.control.lease_next = True

    async def refuse(request, body):
        return web.json_response({}, status=400)

    prefill.behave = refuse
    await bench.start()
    assert (await bench.chat())[0] == 400
    await eventually(lambda: bench.control.completes)
    await bench.gateway.stop()
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]


async def test_a_stop_finishes_what_is_under_way(bench):
    _, decode = await bench.pair()
    go_on = asyncio.Event()

    async def wait(request, body):
        await go_on.wait()

    decode.behave = wait
    await bench.start()
    request = asyncio.create_task(bench.chat())
    await decode.arrived.wait()
    stop = asyncio.create_task(bench.gateway.stop())
    await asyncio.sleep(0)
    go_on.set()
    status, _, _ = await request
    await stop
    assert status == 200
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_OK
