"""The promise of the toy model: a wrong block anywhere shows, and nothing else matters."""

import pytest
from kvplane.engine.model import ToyModel

TOKENS = list(range(100, 200))
BLOCKS = [5, 2, 9, 0]


def model(name="m") -> ToyModel:
    made = ToyModel(name, 16, 32)
    made.compute(BLOCKS, 0, TOKENS)
    return made


def test_the_next_token_depends_on_content_and_not_on_where_it_lies():
    other = ToyModel("m", 16, 32)
    other.compute([1, 3, 4, 6], 0, TOKENS)
    assert other.next_token([1, 3, 4, 6], 100) == model().next_token(BLOCKS, 100)
    assert model("n").next_token(BLOCKS, 100) != model().next_token(BLOCKS, 100)


def test_computing_in_pieces_gives_the_same_kv():
    pieces = ToyModel("m", 16, 32)
    for start, end in ((0, 7), (7, 64), (64, 100)):
        pieces.compute(BLOCKS, start, TOKENS[start:end])
    assert (pieces.memory == model().memory).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_one_wrong_byte_in_any_block_changes_the_next_token(block):
    right, wrong = model(), model()
    wrong.memory[block, 17] ^= 1
    assert wrong.next_token(BLOCKS, 100) != right.next_token(BLOCKS, 100)


def test_swapped_blocks_change_the_next_token():
    assert model().next_token([2, 5, 9, 0], 100) != model().next_token(BLOCKS, 100)


def test_what_lies_behind_the_last_token_does_not_matter():
    right, other = model(), model()
    other.memory[0, 4 * 32 :] = 7
    assert other.next_token(BLOCKS, 100) == right.next_token(BLOCKS, 100)


def test_later_kv_is_computed_from_what_lies_in_memory():
    right, wrong = model(), model()
    wrong.memory[9, -1] ^= 1
    right.compute(BLOCKS, 96, TOKENS[96:])
    wrong.compute(BLOCKS, 96, TOKENS[96:])
    assert (right.memory[0] != wrong.memory[0]).any()
