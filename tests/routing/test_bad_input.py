"""Every wrong field is named, and nothing is stored."""

import math

import pytest
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.kernel.errors import InvalidField
from routing.fakes import PREFILL, beat, worker_message
from routing.harness import One

BAD_URLS = [
    "",
    "127.0.0.1:80",
    "ftp://h:1",
    "http://h",
    "http://h:0",
    "http://h:65536",
    "http://h:-1",
    "http://h:x",
    "http://:80",
    "http://h:80/",
    "http://h:80/v1",
    "http://h:80?x",
    "http://h:80#x",
    "http://u@h:80",
    "http://u:p@h:80",
    "http://@h:80",
    "http://h:80 ",
    "http://h\t:80",
    "http://h:80\r\nX: y",
    "http://h:08000",
    "http://a b:80",
    "http://h\0:80",
    "http://[::1:80",
    "http://" + "h" * 600 + ":80",
]

WORKERS = [
    ("worker.worker_id", {"worker_id": ""}),
    ("worker.worker_id", {"worker_id": "a b"}),
    ("worker.worker_id", {"worker_id": "x" * 129}),
    ("worker.role", {"role": 0}),
    ("worker.role", {"role": 4}),
    *(("worker.url", {"url": url}) for url in BAD_URLS),
    ("worker.kv_host", {"kv_host": ""}),
    ("worker.kv_host", {"kv_host": "a/b"}),
    ("worker.kv_port", {"kv_port": 0}),
    ("worker.kv_port", {"kv_port": 65536}),
    ("worker.kv_port", {"kv_port": -1}),
    ("worker.kv_port", {"kv_port": 0, "managed": False}),
    ("worker.engine_id", {"engine_id": ""}),
    ("worker.engine_id", {"engine_id": "a\nb"}),
    ("worker.data_parallel_rank", {"data_parallel_rank": -1}),
    ("worker.max_model_len", {"max_model_len": -1}),
    ("worker.recompute_threshold", {"recompute_threshold": -1}),
    ("worker.served_models[1]", {"served_models": ["a", ""]}),
    ("worker.served_models", {"served_models": ["a"] * 65}),
    ("worker.compatibility.model", {"compatibility": {"model": ""}}),
    ("worker.compatibility.model", {"compatibility": {"model": "x" * 257}}),
    ("worker.compatibility.block_size", {"compatibility": {"block_size": 0}}),
    ("worker.compatibility.block_size", {"compatibility": {"block_size": -16}}),
    ("worker.compatibility.kv_layout", {"compatibility": {"kv_layout": ""}}),
    ("worker.compatibility.kv_dtype", {"compatibility": {"kv_dtype": ""}}),
    ("worker.compatibility.engine_version", {"compatibility": {"engine_version": "\0"}}),
    ("worker.compatibility.revision", {"compatibility": {"revision": "\x1b"}}),
]


@pytest.mark.parametrize(("field", "change"), WORKERS)
async def test_a_worker_with_a_wrong_field_is_not_registered(fake: One, field: str, change: dict):
    worker = worker_message(**{"worker_id": "d", **change})
    request = pb.RegisterWorkerRequest(worker=worker, instance_id="i")
    with pytest.raises(InvalidField) as caught:
        await fake.part.worker_servicer.RegisterWorker(request)
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(f"{field}: ")
    assert await fake.plane.execute("SELECT count(*) FROM workers") == [(0,)]


@pytest.mark.parametrize("url", ["http://h:1", "https://a-b.c_d:65535", "http://[::1]:8000"])
async def test_right_addresses_are_taken(fake: One, url: str):
    assert (await fake.register("d", url=url)).url == url


async def test_a_plain_engine_needs_to_say_less(fake: One):
    unknown = {"kv_layout": "", "kv_dtype": "", "engine_version": "", "revision": ""}
    plain = {"managed": False, "kv_host": "", "kv_port": 0, "engine_id": ""}
    assert (await fake.register("d", **plain, compatibility=unknown)).epoch == 1


W, R = "worker_servicer", "routing_servicer"
TURN = {"session_id": "s", "turn": 1, "outcome": "TURN_OUTCOME_OK"}
ROUTE = {"request_id": "r", "model": "m"}
CALLS = [
    (W, "RegisterWorker", "worker", {"instance_id": "i"}),
    (W, "RegisterWorker", "instance_id", {"worker": worker_message("d")}),
    (W, "Heartbeat", "beats", {"beats": [beat("d")] * 1001}),
    (W, "Heartbeat", "beats[1].worker_id", {"beats": [beat("d"), beat("")]}),
    (W, "Heartbeat", "beats[0].epoch", {"beats": [beat("d", 0)]}),
    (W, "Heartbeat", "beats[0].load.running", {"beats": [beat("d", running=-1)]}),
    (W, "Heartbeat", "beats[0].load.waiting", {"beats": [beat("d", waiting=-1)]}),
    (W, "Heartbeat", "beats[0].load.held", {"beats": [beat("d", held=-1)]}),
    (W, "Heartbeat", "beats[0].load.kv_usage", {"beats": [beat("d", kv_usage=1.5)]}),
    (W, "Heartbeat", "beats[0].load.kv_usage", {"beats": [beat("d", kv_usage=math.nan)]}),
    (W, "DrainWorker", "worker_id", {"worker_id": ""}),
    (W, "DeregisterWorker", "worker_id", {"worker_id": "?", "epoch": 1}),
    (W, "DeregisterWorker", "epoch", {"worker_id": "d"}),
    (W, "GetWorker", "worker_id", {}),
    (W, "ListWorkers", "page_size", {"page_size": -1}),
    (W, "ListWorkers", "page_size", {"page_size": 1001}),
    (W, "ListWorkers", "page_token", {"page_token": "*"}),
    (W, "ListWorkers", "page_token", {"page_token": "AAAA"}),
    (W, "ListWorkers", "role", {"role": 9}),
    (W, "ListWorkers", "states[1]", {"states": [1, 0]}),
    (W, "ListWorkers", "model", {"model": "x" * 257}),
    (R, "Route", "request_id", {"model": "m"}),
    (R, "Route", "request_id", {**ROUTE, "request_id": "a b"}),
    (R, "Route", "request_id", {**ROUTE, "request_id": "a\r\nX: y"}),
    (R, "Route", "request_id", {**ROUTE, "request_id": "x" * 129}),
    (R, "Route", "model", {"request_id": "r"}),
    (R, "Route", "session.name", {**ROUTE, "session": {"name": "x" * 513}}),
    (R, "Route", "session.history[0]", {**ROUTE, "session": {"history": [b"x"]}}),
    (R, "Route", "session.history", {**ROUTE, "session": {"history": [b"x" * 16] * 65}}),
    (R, "Route", "prompt_tokens_estimate", {**ROUTE, "prompt_tokens_estimate": -1}),
    (R, "Route", "exclude_worker_ids[0]", {**ROUTE, "exclude_worker_ids": [""]}),
    (R, "Route", "exclude_worker_ids", {**ROUTE, "exclude_worker_ids": ["d"] * 1001}),
    (R, "Complete", "turn", {}),
    (R, "Complete", "turn.session_id", {"turn": {**TURN, "session_id": ""}}),
    (R, "Complete", "turn.turn", {"turn": {**TURN, "turn": 0}}),
    (R, "Complete", "turn.outcome", {"turn": {**TURN, "outcome": 0}}),
    (R, "Complete", "turn.outcome", {"turn": {**TURN, "outcome": 9}}),
    (R, "Complete", "turn.prompt_tokens", {"turn": {**TURN, "prompt_tokens": -1}}),
    (R, "Complete", "turn.completion_tokens", {"turn": {**TURN, "completion_tokens": -1}}),
    (R, "Complete", "turn.tokens_reused", {"turn": {**TURN, "tokens_reused": -1}}),
    (R, "Complete", "turn.history_digest", {"turn": {**TURN, "history_digest": b"x"}}),
    (R, "Complete", "turn.decode_worker_id", {"turn": {**TURN, "decode_worker_id": " "}}),
]


@pytest.mark.parametrize(("servicer", "call", "field", "values"), CALLS)
async def test_a_wrong_field_is_named(
    fake: One, servicer: str, call: str, field: str, values: dict
):
    await fake.register("d")
    await fake.register("p", **PREFILL)
    before = await fake.plane.execute("SELECT * FROM workers ORDER BY worker_id")
    request = getattr(pb, f"{call}Request")(**values)
    with pytest.raises(InvalidField) as caught:
        await getattr(getattr(fake.part, servicer), call)(request)
    assert caught.value.metadata["field"] == field
    assert await fake.plane.execute("SELECT * FROM workers ORDER BY worker_id") == before
    assert fake.sessions.begun == fake.sessions.completed == []
    assert await fake.plane.execute("SELECT count(*) FROM routes") == [(0,)]
