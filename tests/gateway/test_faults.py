"""Engines that fail or hang, a control plane that is away: right answers in bounded time."""

import asyncio
import copy
import json

import pytest
from aiohttp import web
from gateway.bench import Bench, chunk, data_of, eventually, sse
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.kernel.errors import Unavailable

PREFILL, DECODE = routing.WORKER_ROLE_PREFILL, routing.WORKER_ROLE_DECODE


async def fail(_request, _body):
    return web.json_response({"error": {"message": "inside"}}, status=500)


async def hang(_request, _body):
    await asyncio.Event().wait()


async def two_each(bench):
    return [
        await bench.engine("prefill-0", PREFILL),
        await bench.engine("prefill-1", PREFILL),
        await bench.engine("decode-0", DECODE),
        await bench.engine("decode-1", DECODE),
    ]


@pytest.mark.parametrize("how", ["500", "closed"])
async def test_a_failed_prefill_is_tried_once_elsewhere_and_cold(bench, how):
    first, second, decode, _ = await two_each(bench)
    bench.control.lease_next = True
    if how == "500":
        first.behave = fail
    else:
        await first.stop()
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert "lease_id" not in second.requests[0]["kv_transfer_params"]["kvplane"]
    assert decode.requests[0]["kv_transfer_params"]["remote_request_id"] == "prefill-1-1"
    again = bench.control.routes[1][1]
    assert list(again.exclude_worker_ids) == ["prefill-0"]
    assert again.force_recompute
    assert again.request_id == bench.control.routes[0][1].request_id
    [turn] = bench.control.completes
    assert turn.prefill_worker_id == "prefill-1"
    assert await bench.metric("kvplane_gateway_retries_total") == 1


async def test_two_failed_prefills_leave_the_decode_alone(bench):
    first, second, decode, _ = await two_each(bench)
    first.behave = second.behave = fail
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert "remote_block_ids" not in decode.requests[0]["kv_transfer_params"]
    assert bench.control.completes[0].prefill_worker_id == ""


async def test_the_only_prefill_fails_and_the_decode_goes_on(bench):
    prefill, decode = await bench.pair()
    prefill.behave = fail
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert len(prefill.requests) == len(decode.requests) == 1


@pytest.mark.parametrize(
    ("how", "stream"),
    [
        ("500", True),
        ("500", False),
        ("closed", True),
        ("closed", False),
        ("error first", True),
        ("empty", True),
    ],
)
async def test_a_failed_decode_is_replaced(bench, how, stream):
    prefill, _, first, second = await two_each(bench)

    async def error_first(request, body):
        return await first.stream(request, [b'data: {"error":{"code":500}}\n\n'])

    async def empty(request, body):
        return await first.stream(request, [])

    first.behave = {"500": fail, "error first": error_first, "empty": empty}.get(how)
    if how == "closed":
        await first.stop()
    await bench.start()
    status, raw, _ = await bench.chat(stream=stream)
    assert status == 200
    assert b"error" not in raw
    again = bench.control.routes[1][1]
    assert list(again.exclude_worker_ids) == ["decode-0"]
    assert again.force_recompute
    assert second.requests[0]["kv_transfer_params"]["remote_request_id"] == "prefill-0-2"
    # What the first prefill holds is nobody's now.
    await eventually(lambda: bench.control.revoked)
    assert bench.control.grants[0].handle.request_id == "prefill-0-1"
    [turn] = bench.control.completes
    assert (turn.outcome, turn.decode_worker_id) == (session.TURN_OUTCOME_OK, "decode-1")
    assert len(prefill.requests) == 2


async def test_all_decodes_fail(bench):
    _, _, first, second = await two_each(bench)
    first.behave = second.behave = fail
    await bench.start(decode_tries=2)
    status, raw, _ = await bench.chat()
    assert status == 502
    error = json.loads(raw)["error"]
    assert (error["type"], error["code"]) == ("server_error", "upstream_error")
    assert "127.0.0.1" not in raw.decode()
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_FAILED


async def test_nobody_can_be_reached(bench):
    await bench.pair()
    for engine in bench.engines.values():
        await engine.stop()
    await bench.start()
    status, raw, headers = await bench.chat()
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert json.loads(raw)["error"]["code"] == "service_unavailable"


async def test_the_only_decode_fails_over_its_read_and_computes(bench):
    prefill, decode = await bench.pair()
    await bench.engine("x", DECODE, register=False)
    bench.control.prefills.clear()
    bench.control.prefills.append("prefill-0")

    async def read_fails(request, body):
        if "remote_block_ids" in (body.get("kv_transfer_params") or {}):
            return await fail(request, body)
        return None

    decode.behave = read_fails

    async def no_prefill_alone(request):
        if "decode-0" in request.exclude_worker_ids:
            bench.control.prefills.clear()

    bench.control.before["Route"] = no_prefill_alone
    await bench.start()
    assert (await bench.chat())[0] == 200
    assert "kv_transfer_params" not in decode.requests[1]
    assert len(prefill.requests) == 1


async def test_a_prefill_that_hangs_over_its_read_is_cancelled_and_computes(bench):
    prefill, decode = await bench.pair()
    bench.control.lease_next = True

    async def stuck(request, body):
        if "lease_id" in body["kv_transfer_params"]["kvplane"]:
            await asyncio.Event().wait()

    prefill.behave = stuck
    await bench.start(reuse_timeout_s=0.2)
    async with asyncio.timeout(2):
        status, _, headers = await bench.chat()
    assert status == 200
    assert prefill.aborted.is_set()
    assert headers["X-Kvplane-Decision"].startswith("recompute")
    again = bench.control.routes[1][1]
    assert again.force_recompute
    assert list(again.exclude_worker_ids) == []
    assert decode.requests[0]["kv_transfer_params"]["remote_request_id"] == "prefill-0-2"
    # A dispatch that timed out may have been used: only what was not is given back.
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]
    assert bench.control.completes[0].tokens_reused == 0


async def test_a_prefill_that_is_lost_is_left(bench):
    first, second, _, _ = await two_each(bench)
    first.behave = hang
    await bench.start()
    request = asyncio.create_task(bench.chat())
    await first.arrived.wait()
    bench.control.lose("prefill-0")
    async with asyncio.timeout(2):
        assert (await request)[0] == 200
        await first.aborted.wait()
    assert len(second.requests) == 1


async def test_an_owner_that_freezes_while_it_is_read_from_is_left(bench):
    prefill, _, first, second = await two_each(bench)
    bench.control.lease_next = True

    async def reads(request, body):
        if "lease_id" in body["kv_transfer_params"]["kvplane"]:
            await asyncio.Event().wait()

    prefill.behave = reads
    await bench.start()
    request = asyncio.create_task(bench.chat())
    await prefill.arrived.wait()
    bench.control.lose("decode-0")
    async with asyncio.timeout(2):
        assert (await request)[0] == 200
    assert (len(first.requests), len(second.requests)) == (0, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_that_freezes_before_its_first_byte_is_left(bench, stream):
    _, _, first, second = await two_each(bench)
    first.behave = hang
    await bench.start()
    request = asyncio.create_task(bench.chat(stream=stream))
    await first.arrived.wait()
    bench.control.workers["decode-0"].epoch = 2  # it has started again
    async with asyncio.timeout(2):
        assert (await request)[0] == 200
        await first.aborted.wait()
    assert len(second.requests) == 1


async def away(_request):
    raise Unavailable("the database is away")


async def silent(_request):
    await asyncio.Event().wait()


@pytest.mark.parametrize("how", [away, silent])
async def test_without_a_control_plane_requests_go_on(bench, how):
    prefill, decode = await bench.pair()
    await bench.start(route_timeout_s=0.1, complete_timeout_s=0.1)
    bench.control.before = dict.fromkeys(("Route", "Complete", "ListWorkers", "GrantLease"), how)
    for stream in (True, False):
        async with asyncio.timeout(2):
            status, raw, headers = await bench.chat(stream=stream)
        assert status == 200
        assert headers["X-Kvplane-Decision"] == "none; reason=control_plane_unavailable"
        assert b"error" not in raw
    assert prefill.requests == []
    assert "kv_transfer_params" not in decode.requests[0]
    assert bench.control.completes == []
    # Nobody waits again for who did not answer, until the registry does.
    asked = len(bench.control.routes)
    await eventually(lambda: not bench.gateway._watch.answering)
    for _ in range(3):
        assert (await bench.chat())[0] == 200
    assert len(bench.control.routes) == asked
    bench.control.before = {}
    await eventually(lambda: bench.gateway._watch.answering)
    _, _, headers = await bench.chat()
    assert headers["X-Kvplane-Decision"] == "recompute; reason=nothing_held"


async def test_without_a_control_plane_a_failed_worker_is_replaced(bench):
    _, _, first, second = await two_each(bench)
    await bench.start()
    bench.control.before = dict.fromkeys(("Route", "ListWorkers"), away)
    await first.stop()
    for _ in range(4):
        assert (await bench.chat())[0] == 200
    assert len(second.requests) == 4


async def test_a_route_that_comes_too_late_is_given_back(bench):
    await bench.pair()
    bench.control.lease_next = True
    answer = asyncio.Event()

    async def late(_request):
        await answer.wait()

    bench.control.before["Route"] = late
    await bench.start(route_timeout_s=0.05)
    assert (await bench.chat())[0] == 200
    answer.set()
    await eventually(lambda: bench.control.released and bench.control.completes)
    assert bench.control.released == [("lease-1", lease.READ_OUTCOME_NEVER_BEGUN)]
    assert bench.control.completes[0].outcome == session.TURN_OUTCOME_CANCELLED


@pytest.mark.parametrize("what", ["EndSession", "ResolveApiKey"])
async def test_an_outage_is_told_in_our_own_words(bench, what):
    """gRPC's words name an address."""

    async def unreachable(_request):
        raise Unavailable("failed to connect to all addresses; ipv4:10.9.8.7:7701: refused")

    bench.control.before[what] = unreachable
    await bench.start(auth="api_key")
    headers = {"Authorization": "Bearer kvp_a"}
    async with bench.http.delete("/v1/sessions/x", headers=headers) as response:
        raw = await response.read()
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    assert json.loads(raw)["error"]["code"] == "service_unavailable"
    assert b"10.9.8.7" not in raw


async def test_an_end_that_nobody_confirms_is_not_waited_for(bench):
    bench.control.before["EndSession"] = silent
    await bench.start(complete_timeout_s=0.05)
    async with asyncio.timeout(2), bench.http.delete("/v1/sessions/x") as response:
        assert response.status == 503


async def test_nobody_known_and_nobody_to_ask():
    bench = Bench()
    bench.control.before = dict.fromkeys(("Route", "ListWorkers"), away)
    await bench.start()
    try:
        status, raw, headers = await bench.chat()
        assert status == 503
        assert "Retry-After" in headers
        assert json.loads(raw)["error"]["code"] == "service_unavailable"
        async with bench.http.get("/readyz") as response:
            assert response.status == 503
        async with bench.http.get("/health") as response:
            assert response.status == 200
    finally:
        await bench.stop()


async def test_no_worker_left_is_503_and_an_unknown_model_404(bench):
    prefill, decode = await bench.pair()
    await bench.start()
    status, raw, _ = await bench.chat(model="other")
    assert status == 404
    assert json.loads(raw)["error"] == {
        "message": "The model 'other' does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    for engine in (prefill, decode):
        bench.control.lose(engine.worker_id)
        await engine.stop()
    status, _, headers = await bench.chat()
    assert status == 503
    assert "Retry-After" in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", [False, True])
async def test_workers_that_only_the_registry_has_lost_still_answer(bench, known, stream):
    """It cannot hear them; we can. Nothing is read, and nothing held."""
    prefill, decode = await bench.pair()
    await bench.start(refresh_interval_s=60)
    for engine in (prefill, decode):
        if not known:  # the gateway keeps the list from before
            bench.control.workers[engine.worker_id] = copy.copy(
                bench.control.workers[engine.worker_id]
            )
        bench.control.lose(engine.worker_id)
    for _ in range(4):
        assert (await bench.chat(stream=stream))[0] == 200
    sent = prefill.requests + decode.requests
    assert len(sent) == 4
    assert not any("kv_transfer_params" in body for body in sent)


async def test_a_broken_first_chunk_does_not_show_twice(bench):
    _, _, first, second = await two_each(bench)

    async def half(request, body):
        response = await first.stream_open(request)
        await response.write(sse(chunk("never"))[0][:30])
        request.transport.abort()
        return response

    first.behave = half
    await bench.start()
    raw = await bench.stream()
    assert b"never" not in raw
    assert data_of(raw)[0]["choices"][0]["delta"]["content"] == "Hello"
    assert len(second.requests) == 1


async def test_without_any_worker_yet_a_client_may_try_again(bench):
    await bench.start()
    status, _, headers = await bench.chat()
    assert status == 503
    assert "Retry-After" in headers
