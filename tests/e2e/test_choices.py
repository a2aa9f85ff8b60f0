"""Several answers to one request: they share one handle, and all hold for the next turn."""

import pytest
from e2e.chat import Chat, bytes_read, words
from e2e.cluster import Cluster

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streaming"])
async def test_several_equal_choices(cluster: Cluster, chat: Chat, stream: bool) -> None:
    await chat.say("Start. " + words(29, 200))
    # Greedy sampling refuses n > 1; the most probable token alone is the same.
    reply = await chat.say("Answer thrice.", stream=stream, n=3, temperature=1, top_k=1)
    assert len(reply.choices) == 3
    assert len({tuple(one.token_ids) for one in reply.choices}) == 1
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Go on.", stream=stream)
    assert await bytes_read(cluster.prefill.url) > before


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streaming"])
async def test_the_client_goes_on_with_another_choice_than_the_first(
    cluster: Cluster, chat: Chat, stream: bool
) -> None:
    await chat.say("Start. " + words(39, 200))
    chat.messages.append({"role": "user", "content": "Answer in three ways."})
    # No seed: with one, a prompt in several steps ends vLLM on CPU.
    reply = await chat.send(stream=stream, n=3, temperature=1, top_k=5)
    assert len({tuple(one.token_ids) for one in reply.choices}) == 3
    chat.messages.append({"role": "assistant", "content": reply.choices[2].content})
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Go on.", stream=stream)
    assert await bytes_read(cluster.prefill.url) > before
