"""What vLLM makes of kv_transfer_params, case by case."""

import pytest
from kvplane.engine import matching

HANDLE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [[3, 1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_num_tokens": 90,
}


def count(prompt=200, computed=0, threshold=64, **changes):
    return matching.external_tokens({**HANDLE, **changes}, prompt, computed, threshold)


def test_a_prefill_takes_what_the_handle_says_up_to_its_prompt():
    assert count() == 90
    assert count(prompt=80) == 80
    assert count(computed=20) == 70


def test_a_prefill_takes_nothing_below_the_threshold():
    assert count(computed=32) == 0
    assert count(computed=32, threshold=58) == 58
    assert count(computed=90, threshold=0) == 0


def test_a_prefill_needs_a_whole_handle():
    assert count(remote_block_ids=[]) == 0
    without = {key: value for key, value in HANDLE.items() if key != "remote_port"}
    assert matching.external_tokens(without, 200, 0, 64) == 0
    assert matching.remote_of(without) is None


def test_a_decode_takes_its_whole_prompt_whatever_the_count():
    params = {**HANDLE, "do_remote_decode": False, "do_remote_prefill": True}
    assert matching.external_tokens(params, 200, 30, 64) == 170


def test_blocks_are_matched_from_the_end():
    assert matching.aligned([7, 8], [3, 1, 2]) == [1, 2]
    assert matching.aligned([], [3]) == []
    with pytest.raises(matching.EngineDead):
        matching.aligned([7, 8], [3])


def test_a_hold_that_is_nearly_over_counts_as_over_and_an_unknown_one_as_held():
    remote = matching.remote_of({**HANDLE, "remote_blocks_expiry_time": 100.0})
    assert not matching.is_expired(remote, now=94.9, clock_offset=0)
    assert matching.is_expired(remote, now=95.0, clock_offset=0)
    assert matching.is_expired(remote, now=85.0, clock_offset=10)
    assert not matching.is_expired(matching.remote_of(HANDLE), now=1e9, clock_offset=0)
