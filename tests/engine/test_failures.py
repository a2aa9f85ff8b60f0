"""Failures between two processes, as vLLM has them and as the fault injection makes them."""

import threading

import httpx
import pytest
from engine.harness import CLOCK, COLD, tokens, wait_for

pytestmark = pytest.mark.processes


def test_a_dead_owner_is_a_500_or_recomputed_by_policy(pair, start):
    owner = start("--role", "prefill")
    strict, lenient = (
        start("--role", "decode", "--kv-load-failure-policy", policy)
        for policy in ("fail", "recompute")
    )
    prompt = tokens("dead", 300)
    handles = [owner.complete(prompt, COLD, 1).params for _ in range(4)]
    for reader, handle in zip((strict, lenient), handles[:2], strict=True):
        assert reader.complete(prompt, handle).ids == pair.reference(prompt)
    owner.kill()
    assert strict.complete(prompt, handles[2]).status == 500
    assert lenient.complete(prompt, handles[3]).ids == pair.reference(prompt)
    for reader in (strict, lenient):
        assert reader.state()["blocks"]["quarantined"] == 0
        assert reader.complete(prompt).ids == pair.reference(prompt)


def test_an_engine_that_was_never_met_and_is_gone_is_a_500(pair, start):
    owner = start("--role", "decode")
    handle = owner.complete(tokens("gone", 300), {"x": 1}).params
    owner.kill()
    answer = pair.prefill.complete(tokens("gone", 400), {**handle, **COLD}, 1)
    assert answer.status == 500
    assert answer.raw["error"]["type"] == "InternalServerError"


def test_a_restarted_engine_on_the_same_port_is_another_one(pair, start):
    old = start("--role", "decode")
    handle = old.complete(tokens("restart", 300), {"x": 1}).params
    old.kill()
    new = start("--role", "decode", "--kv-port", str(old.about["kv_port"]))
    assert new.about["engine_id"] != old.about["engine_id"]
    assert pair.prefill.complete(tokens("restart", 400), {**handle, **COLD}, 1).status == 500


def test_another_model_is_not_read(pair, start):
    other = start("--role", "prefill", "--model", "other")
    _, second = pair.turn(tokens("model", 300))
    assert other.complete(tokens("model", 400), {**second.params, **COLD}, 1).status == 500


def test_an_expired_hold_is_declined_and_the_owner_is_not_told(pair):
    prompt = tokens("expired", 300)
    _, second = pair.turn(prompt)
    soon = second.params["remote_blocks_expiry_time"] - 480 + 4
    handle = dict(second.params, remote_blocks_expiry_time=soon, **COLD)
    before = pair.prefill.state()["stats"]["kv_expired"]
    assert pair.prefill.complete([*prompt, 1], handle, 1).status == 500
    assert pair.prefill.state()["stats"]["kv_expired"] == before + 1
    held = {held["request_id"] for held in pair.decode.state()["held"]}
    assert second.params["remote_request_id"] in held


def test_a_hold_runs_out(start):
    short = start("--kv-lease-duration", "0.3", "--decoder-kv-blocks-ttl", "0.6")
    short.complete(tokens("hold", 100), COLD, 1)
    short.complete(tokens("hold", 100), {"x": 1})
    assert [held["by_decode"] for held in short.state()["held"]] == [False, True]
    short.wait_held(1)
    assert short.state()["held"][0]["by_decode"]
    short.wait_held(0)
    assert short.state()["blocks"]["in_use"] == 0
    assert short.state()["stats"]["kv_expired"] == 2


def test_a_frozen_owner_keeps_its_reader_waiting_until_it_wakes(pair, start):
    owner = start("--role", "decode")
    prompt = tokens("frozen", 300)
    warm = owner.complete(prompt, {"x": 1}).params
    assert pair.prefill.complete([*prompt, 1], {**warm, **COLD}, 1).status == 200
    handle = owner.complete(prompt, {"x": 1}).params
    began = CLOCK.monotonic()
    owner.http.post("/debug/freeze", json={"seconds": 1.5})
    first = pair.prefill.complete([*prompt, 2], {**handle, **COLD}, 1)
    assert CLOCK.monotonic() - began > 1.0
    assert first.ids == pair.reference([*prompt, 2], 1)
    assert first.cached == 300


def test_a_client_that_leaves_during_a_read_holds_nothing_and_its_blocks_come_back(pair, start):
    reader = start("--role", "prefill")
    _, second = pair.turn(tokens("leaves", 300))
    reader.http.post("/debug/faults", json={"read_delay_s": 30})
    body = {"prompt": tokens("leaves", 400), "kv_transfer_params": {**second.params, **COLD}}

    def leave():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{reader.url}/v1/completions", json=body, timeout=0.5)

    leaver = threading.Thread(target=leave)
    leaver.start()
    wait_for(lambda: reader.state()["blocks"]["in_use"] > 0)
    leaver.join()
    wait_for(lambda: reader.state()["stats"]["aborted"] == 1)
    assert reader.state()["blocks"]["in_use"] == 0
    assert reader.state()["held"] == []


def test_a_client_that_leaves_a_stream_holds_nothing(start):
    slow = start("--role", "decode", "--decode-us-per-token", "20000")
    body = {"prompt": tokens("stream", 100), "max_tokens": 500, "stream": True}
    body["kv_transfer_params"] = {"x": 1}
    with slow.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert slow.state()["stats"]["running"] == 1
    wait_for(lambda: slow.state()["stats"]["aborted"] == 1)
    assert slow.state()["blocks"]["in_use"] == 0
    assert slow.state()["held"] == []


def test_a_decode_that_ends_by_a_stop_string_holds_nothing(pair):
    prompt = tokens("stop", 200)
    text = pair.decode.complete(prompt).text
    before = len(pair.decode.state()["held"])
    first = pair.prefill.complete(prompt, COLD, 1)
    stopped = pair.decode.complete(prompt, first.params, stop=text[20:24])
    assert stopped.text == text[:20]
    assert stopped.raw["choices"][0]["finish_reason"] == "stop"
    assert stopped.raw["choices"][0]["stop_reason"] == text[20:24]
    assert stopped.params is None
    assert len(pair.decode.state()["held"]) == before


def test_a_decode_that_ends_by_a_stop_token_holds(pair):
    prompt = tokens("stop token", 200)
    ids = pair.decode.complete(prompt).ids
    first = pair.prefill.complete(prompt, COLD, 1)
    stopped = pair.decode.complete(prompt, first.params, stop_token_ids=[ids[3]])
    assert stopped.ids == ids[:4]
    assert stopped.raw["choices"][0]["stop_reason"] == ids[3]
    assert stopped.params["remote_num_tokens"] == 203


def test_a_prefill_that_is_not_bidirectional_hangs_on_a_handle(pair, start):
    one_way = start("--role", "prefill", "--no-bidirectional")
    _, second = pair.turn(tokens("one way", 300))
    one_way.http.timeout = httpx.Timeout(1.0)
    with pytest.raises(httpx.ReadTimeout):
        one_way.complete(tokens("one way", 400), {**second.params, **COLD}, 1)
    one_way.http.timeout = httpx.Timeout(30)
    wait_for(lambda: one_way.state()["stats"]["aborted"] == 1)
    assert one_way.complete(tokens("one way", 400), COLD, 1).ids == pair.reference(
        tokens("one way", 400), 1
    )


def test_injected_faults_fail_reads_and_drop_notifications(pair, start):
    reader = start("--role", "prefill")
    _, second = pair.turn(tokens("inject", 300))
    reader.http.post("/debug/faults", json={"fail_reads": 1})
    pair.decode.http.post("/debug/faults", json={"drop_notifications": 1})
    params = {**second.params, **COLD}
    assert reader.complete(tokens("inject", 400), params, 1).status == 500
    assert reader.complete(tokens("inject", 400), params, 1).status == 200
    wait_for(lambda: pair.decode.state()["faults"]["drop_notifications"] == 0)
    held = {held["request_id"] for held in pair.decode.state()["held"]}
    assert second.params["remote_request_id"] in held


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"typo": 1}, "typo"),
        ({"fail_reads": -1}, "fail_reads"),
        ({"fail_reads": 1.5}, "fail_reads"),
        ({"read_delay_s": "x"}, "read_delay_s"),
        ([], "body"),
    ],
)
def test_a_wrong_fault_is_named_and_changes_nothing(pair, body, field):
    before = pair.prefill.state()["faults"]
    answer = pair.prefill.http.post("/debug/faults", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert pair.prefill.state()["faults"] == before
