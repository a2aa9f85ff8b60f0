"""Engines without our connector: the gateway does their lease work."""

import asyncio

import pytest
from aiohttp import web
from gateway.bench import OUTPUT_IDS, PROMPT_IDS, Bench, eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import kv_params
from kvplane.gateway.config import StaticWorker
from kvplane.kernel.digests import block_digests, digest_space
from kvplane.kernel.errors import Unavailable

BLOCK = 16
CONSUMED, UNUSED = lease.READ_OUTCOME_CONSUMED, lease.READ_OUTCOME_UNUSED


@pytest.fixture
async def plain(bench):
    """A registered plain pair behind a gateway."""
    return (bench, *await start_plain(bench))


async def start_plain(bench, **config):
    """Start a gateway with a plain pair that is registered; return the pair."""
    prefill = await bench.engine("prefill-0", routing.WORKER_ROLE_PREFILL, register=False)
    decode = await bench.engine("decode-0", routing.WORKER_ROLE_DECODE, register=False)
    statics = tuple(
        StaticWorker(
            worker_id=engine.worker_id,
            url=engine.url,
            role=role,
            model="tiny",
            block_size=BLOCK,
            kv_host=engine.kv_host,
            kv_port=engine.kv_port,
            bidirectional=True,
        )
        for engine, role in ((prefill, "prefill"), (decode, "decode"))
    )
    await bench.start(static_workers=statics, health_interval_s=0.05, **config)
    await eventually(lambda: len(bench.control.workers) == 2)
    await bench.gateway._watch.refresh()
    return prefill, decode


def hold(bench, tokens, *, cuttable=True):
    """Let the session hold the KV of these tokens."""
    blocks = -(-len(tokens) // BLOCK)
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(50, 50 + blocks))],
        "remote_engine_id": "engine-decode-0",
        "remote_request_id": "turn-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_num_tokens": len(tokens),
        "remote_blocks_expiry_time": 99.5,
    }
    bench.control.lease_next = True
    bench.control.held = lease.Ownership(
        params=kv_params.from_dict(params),
        num_tokens=len(tokens),
        block_size=BLOCK,
        digests=block_digests(tokens, BLOCK, digest_space("tiny")),
        cuttable=cuttable,
    )


async def test_they_are_registered_as_they_are(plain):
    bench, prefill, _ = plain
    first = next(r for r in bench.control.registered if r.worker.worker_id == "prefill-0")
    worker = first.worker
    assert not worker.managed
    assert worker.url == prefill.url
    assert (worker.compatibility.model, worker.compatibility.engine_version) == ("tiny", "0.32.0")
    assert (list(worker.served_models), worker.max_model_len) == (["tiny"], 8192)
    assert (worker.kv_host, worker.kv_port) == ("127.0.0.1", 5600)
    assert first.instance_id == "started-1790005600000"


async def test_one_that_stops_is_registered_again_when_it_comes_back(plain):
    bench, prefill, _ = plain
    before = len(bench.control.registered)
    port = prefill.port
    await prefill.stop()
    await asyncio.sleep(0.15)
    assert len(bench.control.registered) == before
    await prefill.start(port)
    await eventually(lambda: len(bench.control.registered) == before + 1)


async def test_a_decode_that_reads_nothing_is_not_asked_to_hold(plain):
    bench, prefill, decode = plain

    async def fail(request, body):
        return web.Response(status=500)

    prefill.behave = fail
    status, _, _ = await bench.chat()
    assert status == 200
    # vLLM would pin its blocks and never let go of them, whatever its settings say.
    assert "kv_transfer_params" not in decode.requests[-1]
    assert [r for r in bench.control.reports if r.ownerships] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_handed_over_under_a_lease_and_reported(plain, stream):
    bench, prefill, decode = plain
    status, raw, _ = await bench.chat(stream=stream)
    assert status == 200
    assert b"token_ids" not in raw
    assert b"kv_transfer_params" not in raw
    assert prefill.requests[0]["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    handle = decode.requests[0]["kv_transfer_params"]
    assert (handle["do_remote_prefill"], handle["do_remote_decode"]) == (True, False)
    assert handle["remote_num_tokens"] == 100
    assert handle["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7]]
    assert "kvplane" not in handle
    [grant] = bench.control.grants
    assert grant.begin_read
    assert grant.holder.worker_id == "decode-0"
    await eventually(lambda: bench.control.released)
    assert bench.control.released == [("granted-1", CONSUMED)]

    reports = [r.ownerships[0] for r in bench.control.reports if r.ownerships]
    own, last = reports
    space = digest_space("tiny")
    assert own.for_decode
    assert own.digests == block_digests(PROMPT_IDS, BLOCK, space)
    assert (last.for_decode, last.session_id, last.turn) == (False, "session-0", 1)
    assert last.digests == block_digests([*PROMPT_IDS, *OUTPUT_IDS][:104], BLOCK, space)
    assert last.num_tokens == 104
    assert 470 < last.hold.seconds < 480
    assert all(r.time_anchor.anchor for r in bench.control.reports)


async def test_reuse_reads_what_matches_and_no_more(plain):
    bench, prefill, _ = plain
    hold(bench, [*PROMPT_IDS[:85], 1, 2, 3])  # the first 80 tokens are whole equal blocks
    assert (await bench.chat(tools=[{"type": "function"}]))[0] == 200
    params = prefill.requests[0]["kv_transfer_params"]
    assert params["remote_num_tokens"] == 80
    assert params["remote_block_ids"] == [[50, 51, 52, 53, 54]]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_blocks_expiry_time"] == 99.5
    assert prefill.tokenized["tools"] == [{"type": "function"}]
    assert bench.control.begun[0].fencing_token == 7
    assert '"model":"tiny"' in bench.control.begun[0].holder.compatibility
    await eventually(lambda: len(bench.control.released) == 2)
    assert ("lease-1", CONSUMED) in bench.control.released
    assert bench.control.completes[0].tokens_reused == 80


@pytest.mark.parametrize(
    "why",
    ["other tokens", "not cuttable", "too few", "no tokenizer", "no lease service", "odd tokens"],
)
async def test_nothing_is_read_that_is_not_proved(plain, why):
    bench, prefill, _ = plain
    hold(bench, PROMPT_IDS[:96])
    if why == "other tokens":
        hold(bench, [7, *PROMPT_IDS[1:96]])
    elif why == "not cuttable":
        hold(bench, [*PROMPT_IDS[:80], 5], cuttable=False)
    elif why == "too few":
        hold(bench, PROMPT_IDS[:48])
    elif why == "no tokenizer":
        prefill.tokens = "none"
    elif why == "odd tokens":
        prefill.tokens = [*PROMPT_IDS, -1]
    else:

        async def away(_request):
            raise Unavailable("away")

        bench.control.before["BeginRead"] = away
    assert (await bench.chat())[0] == 200
    assert prefill.requests[0]["kv_transfer_params"]["remote_block_ids"] is None
    await eventually(lambda: ("lease-1", UNUSED) in bench.control.released)
    assert bench.control.completes[0].tokens_reused == 0


async def test_a_whole_hold_that_cannot_be_cut_is_read_whole(plain):
    bench, prefill, _ = plain
    hold(bench, PROMPT_IDS[:90], cuttable=False)
    assert (await bench.chat())[0] == 200
    params = prefill.requests[0]["kv_transfer_params"]
    assert params["remote_num_tokens"] == 90
    assert len(params["remote_block_ids"][0]) == 6


async def test_a_lease_that_is_lost_ends_the_prefill_and_it_is_computed(plain):
    bench, prefill, _ = plain
    hold(bench, PROMPT_IDS[:96])

    async def stuck(request, body):
        if body["kv_transfer_params"]["remote_block_ids"]:
            await asyncio.Event().wait()

    async def short(_request):
        raise Unavailable("away")

    prefill.behave = stuck
    bench.control.before["RenewLeases"] = short
    original = bench.control.BeginRead

    async def begin(request):
        answer = await original(request)
        answer.lease.ttl.FromMilliseconds(1300)
        return answer

    bench.control.BeginRead = begin
    async with asyncio.timeout(3):
        assert (await bench.chat())[0] == 200
    assert prefill.aborted.is_set()
    assert prefill.requests[1]["kv_transfer_params"]["remote_block_ids"] is None
    assert ("lease-1", CONSUMED) in bench.control.released


async def test_a_decode_with_other_tokens_reads_nothing(plain):
    bench, _, decode = plain
    decode.tokens = [5, *PROMPT_IDS[1:]]
    assert (await bench.chat())[0] == 200
    assert "kv_transfer_params" not in decode.requests[0]
    await eventually(lambda: bench.control.released)
    assert bench.control.released == [("granted-1", UNUSED)]


@pytest.mark.parametrize("odd", [-1, 1 << 32, 1.5, None, "1", [1], True])
@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_tokens_that_are_none_are_not_handed_over(plain, who, odd):
    bench, *engines = plain
    dict(zip(("prefill", "decode"), engines, strict=True))[who].tokens = [odd, *PROMPT_IDS[1:]]
    assert (await bench.chat())[0] == 200
    _, decode = engines
    assert "kv_transfer_params" not in decode.requests[0]
    reports = [r.ownerships[0] for r in bench.control.reports if r.ownerships]
    assert [own.for_decode for own in reports] == ([] if who == "prefill" else [True])


async def test_a_handle_that_is_not_the_workers_own_is_not_reported(plain):
    bench, _, decode = plain
    decode.kv_port = 1
    assert (await bench.chat())[0] == 200
    reports = [r.ownerships[0] for r in bench.control.reports if r.ownerships]
    assert [own.for_decode for own in reports] == [True]


async def test_several_choices_are_not_handed_over(plain):
    bench, prefill, decode = plain
    assert (await bench.chat(n=2))[0] == 200
    assert prefill.requests == []
    assert "kv_transfer_params" not in decode.requests[0]


async def test_without_a_side_channel_nothing_is_handed_over():
    bench = Bench()
    try:
        prefill, decode = await bench.pair(managed=False)
        await bench.start()
        assert (await bench.chat())[0] == 200
        assert prefill.requests == []
        assert "kv_transfer_params" not in decode.requests[0]
    finally:
        await bench.stop()
