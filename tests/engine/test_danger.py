"""Where plain vLLM answers 200 with wrong text, so does this engine. No lease, no safety."""

import pytest
from engine.harness import COLD, tokens

pytestmark = pytest.mark.processes


def test_a_handle_used_twice_reads_blocks_of_somebody_else(pair):
    prompt = tokens("twice", 400)
    _, second = pair.turn(prompt)
    again = prompt + second.ids + tokens("again", 50)
    _, right = pair.turn(again, second.params)
    assert right.ids == pair.reference(again)
    pair.turn(tokens("somebody else", 500))  # takes the freed blocks, at once
    first, wrong = pair.turn(again, second.params)
    assert first.cached == second.params["remote_num_tokens"]
    assert wrong.ids != pair.reference(again)
    assert pair.decode.state()["stats"]["late_notifications"] > 0


def test_an_edited_history_gets_the_old_ones_answer(pair):
    prompt = tokens("edited", 400)
    _, second = pair.turn(prompt)
    edited = [*prompt[:100], *tokens("another middle", 100), *prompt[200:], *second.ids, 1, 2]
    _, wrong = pair.turn(edited, second.params)
    assert wrong.ids != pair.reference(edited)


def test_another_conversations_handle_is_believed(pair):
    _, other = pair.turn(tokens("one", 400))
    mine = tokens("two", 500)
    _, wrong = pair.turn(mine, other.params)
    assert wrong.ids != pair.reference(mine)


def test_a_prompt_shorter_than_what_is_held_reads_the_wrong_end(pair):
    prompt = tokens("shorter", 400)
    _, second = pair.turn(prompt)
    _, wrong = pair.turn(prompt[:200], second.params)
    assert wrong.ids != pair.reference(prompt[:200])


def test_a_count_cut_without_the_ids_reads_the_wrong_end(pair):
    prompt = tokens("only the count", 400)
    _, second = pair.turn(prompt)
    longer = prompt + second.ids + tokens("next", 30)
    _, wrong = pair.turn(longer, dict(second.params, remote_num_tokens=128))
    assert wrong.ids != pair.reference(longer)


def test_ids_cut_without_the_count_end_the_engine(pair, start):
    victim = start("--role", "prefill")
    _, second = pair.turn(tokens("only the ids", 400))
    handle = dict(second.params, **COLD)
    handle["remote_block_ids"] = [second.params["remote_block_ids"][0][:4]]
    answer = victim.complete(tokens("only the ids", 450), handle, 1)
    assert answer.status == 500
    assert victim.process.wait(10) == 0, "as vLLM's API server: not even the code tells"


def test_a_wrong_read_poisons_the_prefix_cache(pair, start):
    caching = start("--role", "prefill", "--prefix-caching")
    _, other = pair.turn(tokens("poison", 400))
    mine = tokens("victim", 500)
    caching.complete(mine, dict(other.params, **COLD), 1)
    plain = caching.complete(mine)
    assert plain.cached > 0
    assert plain.ids != pair.reference(mine)
