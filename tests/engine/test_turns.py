"""Two real processes, real NIXL reads: what reuse gives when the handle is right."""

import pytest
from engine.harness import COLD, tokens, wait_for

pytestmark = pytest.mark.processes


def test_five_turns_read_their_history_and_say_what_a_cold_engine_says(pair):
    prompt, handle = tokens("five", 700), None
    for turn in range(1, 6):
        before = pair.prefill.state()["stats"]
        held_tokens = handle["remote_num_tokens"] if handle else 0
        first, second = pair.turn(prompt, handle)
        after = pair.prefill.state()["stats"]
        reference = pair.reference(prompt)
        assert second.ids == reference, f"turn {turn}"
        assert first.ids == reference[:1]
        assert first.cached == held_tokens
        blocks = -(-held_tokens // 32)
        assert after["nixl_bytes"] - before["nixl_bytes"] == blocks * 1024
        assert first.params["remote_prefill_cached_tokens"] == held_tokens
        assert second.cached == held_tokens, "a decode reports its prefill's hits"
        assert second.params["remote_num_tokens"] == len(prompt) + 15
        prompt, handle = prompt + second.ids + tokens(f"turn {turn}", 100), second.params


def test_the_returned_params_are_vllms(pair):
    first, second = pair.turn(tokens("params", 100))
    assert first.params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": first.params["remote_block_ids"],
        "remote_engine_id": pair.prefill.about["engine_id"],
        "remote_request_id": first.params["remote_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": pair.prefill.about["kv_port"],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert [len(group) for group in first.params["remote_block_ids"]] == [4]
    assert second.params["do_remote_decode"] is True
    assert second.params["remote_blocks_expiry_time"] > 0
    assert "remote_prefill_cached_tokens" not in second.params


def test_a_read_frees_the_owners_blocks(pair):
    prompt = tokens("freed", 300)
    first = pair.prefill.complete(prompt, COLD, 1)
    name = first.params["remote_request_id"]
    before = pair.prefill.state()
    assert name in {held["request_id"] for held in before["held"]}
    pair.decode.complete(prompt, first.params)
    wait_for(lambda: name not in {held["request_id"] for held in pair.prefill.state()["held"]})
    assert pair.prefill.state()["blocks"]["in_use"] == before["blocks"]["in_use"] - 10


def test_a_request_without_params_holds_nothing(pair):
    answer = pair.decode.complete(tokens("plain", 100))
    assert answer.params is None
    assert answer.cached == 0


def test_ids_cut_together_with_the_count_read_a_prefix_and_free_everything(pair):
    prompt = tokens("cut", 320)
    _, second = pair.turn(prompt)
    handle = dict(second.params, remote_num_tokens=128)
    handle["remote_block_ids"] = [second.params["remote_block_ids"][0][:4]]
    edited = prompt[:128] + tokens("edited", 300)
    first, after = pair.turn(edited, handle)
    assert first.cached == 128
    assert after.ids == pair.reference(edited)
    held = {held["request_id"] for held in pair.decode.state()["held"]}
    assert second.params["remote_request_id"] not in held


def test_too_few_tokens_are_computed_and_the_owner_is_told_all_the_same(pair):
    prompt = tokens("few", 40)
    _, second = pair.turn(prompt, max_tokens=4)
    first, after = pair.turn(prompt + tokens("more", 60), second.params)
    assert first.cached == 0
    assert after.ids == pair.reference(prompt + tokens("more", 60))
    held = {held["request_id"] for held in pair.decode.state()["held"]}
    assert second.params["remote_request_id"] not in held


def test_a_handle_without_port_is_computed_and_stays_held(pair):
    prompt = tokens("no port", 200)
    _, second = pair.turn(prompt)
    handle = {key: value for key, value in second.params.items() if key != "remote_port"}
    first, after = pair.turn([*prompt, 1, 2, 3], handle)
    assert first.cached == 0
    assert after.ids == pair.reference([*prompt, 1, 2, 3])
    held = {held["request_id"] for held in pair.decode.state()["held"]}
    assert second.params["remote_request_id"] in held


def test_the_metrics_count_what_was_read_and_held(pair):
    prompt = tokens("metrics", 300)
    _, second = pair.turn(prompt)
    pair.turn(prompt + tokens("next", 40), second.params)
    lines = pair.prefill.http.get("/metrics").text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}
    stats = pair.prefill.state()["stats"]
    assert values["vllm:nixl_bytes_transferred_sum"] == stats["nixl_bytes"] > 0
    assert values["vllm:external_prefix_cache_hits_total"] == stats["external_hits"] > 0
    lines = pair.decode.http.get("/metrics").text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}
    state = pair.decode.state()
    assert values["kvplane_engine_held_requests"] == len(state["held"]) > 0
    assert values["kvplane_engine_blocks_in_use"] == state["blocks"]["in_use"] > 0
