"""What a reader may take of what an owner holds."""

import pytest
from kvplane.kernel.digests import DigestChain, block_digests, digest_space
from kvplane.worker.cut import Owned, cut_params, cut_read
from kvplane.worker.reads import Permit, Refused

SIZE = 16
SPACE = digest_space("model")


def handle(tokens: int, groups: int = 1, **more: object) -> dict[str, object]:
    blocks = -(-tokens // SIZE)
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[100 * g + i for i in range(blocks)] for g in range(groups)],
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_host": "host",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123.0,
        "future_key": {"a": 1},
        **more,
    }


def owned(tokens: list[int], *, cuttable: bool = True, space: bytes = SPACE) -> Owned:
    return Owned(
        params=handle(len(tokens)),
        num_tokens=len(tokens),
        block_size=SIZE,
        digests=block_digests(tokens, SIZE, space),
        cuttable=cuttable,
    )


def read(
    held: Owned, prompt: list[int], *, min_tokens: int = 1, space: bytes = SPACE
) -> Permit | Refused:
    return cut_read(held, prompt, block_digests(prompt, SIZE, space), space, min_tokens)


HISTORY = list(range(1000, 1100))  # 6 blocks and 4 tokens


def test_all_that_is_held_is_read_with_its_partial_tail() -> None:
    permit = read(owned(HISTORY), HISTORY + [1, 2, 3] * 20)
    assert isinstance(permit, Permit)
    assert permit.num_tokens == permit.params["remote_num_tokens"] == 100
    assert permit.params["remote_block_ids"] == [list(range(7))]


def test_a_cut_sets_the_count_and_the_ids_together() -> None:
    edited = HISTORY[:50] + [7] * 50
    permit = read(owned(HISTORY), edited)
    assert isinstance(permit, Permit)
    assert permit.num_tokens == permit.params["remote_num_tokens"] == 48
    assert permit.params["remote_block_ids"] == [[0, 1, 2]]


def test_a_prompt_shorter_than_what_is_held_gets_whole_blocks() -> None:
    permit = read(owned(HISTORY), HISTORY[:70])
    assert isinstance(permit, Permit)
    assert permit.num_tokens == 64


def test_an_edit_in_the_partial_tail_gives_the_whole_blocks() -> None:
    permit = read(owned(HISTORY), [*HISTORY[:99], 7, 8, 9])
    assert isinstance(permit, Permit)
    assert permit.num_tokens == 96


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 96, 99, 100])
def test_every_length_that_is_held_whole(length: int) -> None:
    permit = read(owned(HISTORY[:length]), HISTORY)
    assert isinstance(permit, Permit)
    assert permit.num_tokens == length
    assert len(permit.params["remote_block_ids"][0]) == -(-length // SIZE)


@pytest.mark.parametrize("edit", range(100))
def test_no_token_from_the_first_edited_one_on_is_ever_read(edit: int) -> None:
    prompt = list(HISTORY)
    prompt[edit] += 1
    answer = read(owned(HISTORY), prompt)
    expected = edit // SIZE * SIZE
    if expected:
        assert isinstance(answer, Permit)
        assert answer.num_tokens == expected
    else:
        assert isinstance(answer, Refused)


def test_what_cannot_be_cut_is_read_whole_or_not_at_all() -> None:
    whole = read(owned(HISTORY, cuttable=False), [*HISTORY, 1])
    assert isinstance(whole, Permit)
    assert whole.params["remote_num_tokens"] == 100
    assert isinstance(read(owned(HISTORY, cuttable=False), [*HISTORY[:99], 7, 8]), Refused)


def test_below_the_threshold_nothing_is_read() -> None:
    assert isinstance(read(owned(HISTORY), HISTORY[:79] + [0] * 9, min_tokens=65), Refused)
    assert isinstance(read(owned(HISTORY), HISTORY[:80] + [0] * 9, min_tokens=65), Permit)


@pytest.mark.parametrize(
    "other",
    [
        digest_space("other"),
        digest_space("model", revision="r2"),
        digest_space("model", salt="s"),
        digest_space("model", adapter="lora"),
        digest_space("mode", revision="l"),
    ],
)
def test_another_model_salt_or_adapter_never_matches(other: bytes) -> None:
    assert isinstance(read(owned(HISTORY, space=other), HISTORY), Refused)


def test_the_owners_deadline_and_flags_are_not_passed_on() -> None:
    permit = read(owned(HISTORY), HISTORY)
    assert isinstance(permit, Permit)
    assert not {"do_remote_prefill", "do_remote_decode", "remote_blocks_expiry_time"} & set(
        permit.params
    )
    assert permit.params["future_key"] == {"a": 1}


@pytest.mark.parametrize("broken", ["digests", "ids", "host", "no_ids"])
def test_an_incomplete_report_is_never_read(broken: str) -> None:
    held = owned(HISTORY)
    params = dict(held.params)
    digests = held.digests
    if broken == "digests":
        digests = digests[:-16]
    elif broken == "ids":
        params["remote_block_ids"] = [[1, 2, 3]]
    elif broken == "host":
        params["remote_host"] = None
    else:
        params["remote_block_ids"] = []
    damaged = Owned(params, held.num_tokens, SIZE, digests, cuttable=True)
    assert isinstance(read(damaged, HISTORY), Refused)


def test_every_group_is_cut() -> None:
    cut = cut_params(handle(100, groups=2), 40, SIZE, cuttable=True)
    assert cut is not None
    assert cut["remote_block_ids"] == [[0, 1, 2], [100, 101, 102]]


def test_a_chain_made_in_pieces_is_the_chain() -> None:
    chain = DigestChain(HISTORY, 100, SIZE, SPACE)
    pieces = 0
    while chain.advance(1):
        pieces += 1
    assert pieces == 6
    assert bytes(chain.digests) == block_digests(HISTORY, SIZE, SPACE)


@pytest.mark.parametrize("known", [0, 1, 3, 6])
def test_a_chain_goes_on_from_digests_made_before(known: int) -> None:
    before = block_digests(HISTORY[: known * SIZE], SIZE, SPACE)
    chain = DigestChain(HISTORY, 100, SIZE, SPACE)
    chain.resume(before)
    while chain.advance(2):
        pass
    assert bytes(chain.digests) == block_digests(HISTORY, SIZE, SPACE)


def test_a_chain_never_takes_over_a_partial_tail() -> None:
    before = block_digests(HISTORY[:20], SIZE, SPACE)  # the second digest is of 4 tokens
    chain = DigestChain(HISTORY, 20, SIZE, SPACE)
    chain.resume(before)
    while chain.advance(2):
        pass
    assert bytes(chain.digests) == before
