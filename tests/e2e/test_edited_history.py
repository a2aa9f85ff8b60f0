"""Whatever is done to the history: right tokens, and reuse of what is still equal."""

import json

import pytest
from demo.servers import ROOT
from e2e.chat import Chat, bytes_read, words
from e2e.cluster import BLOCK, KV_BYTES_PER_TOKEN, Cluster

pytestmark = pytest.mark.vllm


async def two_turns(chat: Chat) -> None:
    await chat.say("First question. " + words(11, 200))
    await chat.say("Second question. " + words(211, 150))


async def read_of_next(cluster: Cluster, chat: Chat, content: str) -> int:
    """Say it and return how many tokens the prefill read."""
    before = await bytes_read(cluster.prefill.url)
    await chat.say(content)
    return (await bytes_read(cluster.prefill.url) - before) // KV_BYTES_PER_TOKEN


async def test_edited_in_the_middle(cluster: Cluster, chat: Chat) -> None:
    await two_turns(chat)
    chat.messages[2]["content"] = chat.messages[2]["content"].replace("Second", "Other")
    read = await read_of_next(cluster, chat, "And now?")
    assert read > 0, "the first question is still the same"
    assert read % BLOCK == 0


async def test_edited_at_the_start(cluster: Cluster, chat: Chat) -> None:
    await two_turns(chat)
    chat.messages[0]["content"] = "Changed! " + chat.messages[0]["content"]
    assert await read_of_next(cluster, chat, "And now?") == 0


async def test_summarised(cluster: Cluster, chat: Chat) -> None:
    await two_turns(chat)
    chat.messages = [{"role": "system", "content": "Summary so far: " + words(500, 60)}]
    assert await read_of_next(cluster, chat, "Go on.") == 0


async def test_a_prompt_shorter_than_what_is_held(cluster: Cluster, chat: Chat) -> None:
    await two_turns(chat)
    # The client asks the first question again: a strict prefix of what is held.
    chat.messages = chat.messages[:1]
    reply = await chat.send()
    await chat.check(reply)


async def test_a_tool_call_serialised_again(cluster: Cluster, chat: Chat) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    await chat.say("Look it up. " + words(31, 200), tools=[tool], tool_choice="none")
    arguments = {"where": "index", "limit": 5}
    call = {"id": "call_1", "type": "function"}

    def with_arguments(serialised: str) -> dict[str, object]:
        return {**call, "function": {"name": "look", "arguments": serialised}}

    chat.messages[-1]["tool_calls"] = [with_arguments(json.dumps(arguments))]
    chat.messages.append({"role": "tool", "tool_call_id": "call_1", "content": words(77, 90)})
    await chat.say("What does it say?")
    spaced = json.dumps(arguments, indent=1, sort_keys=True)
    chat.messages[1]["tool_calls"] = [with_arguments(spaced)]
    read = await read_of_next(cluster, chat, "And what follows?")
    assert read % BLOCK == 0


async def test_earlier_reasoning_dropped_by_the_chat_template(cluster: Cluster, chat: Chat) -> None:
    template = (ROOT / "examples/demo/chat_template_reasoning.jinja").read_text()
    chat.always["chat_template"] = template
    await chat.say("Think. " + words(61, 200))
    # Within one question the template shows the reasoning ...
    chat.messages[-1]["reasoning"] = words(5, 60)
    chat.messages.append({"role": "tool", "tool_call_id": "call_1", "content": words(15, 60)})
    reply = await chat.send()
    await chat.check(reply)
    chat.messages.append({"role": "assistant", "content": reply.content})
    # ... and drops it with the next question, from the middle of what is held.
    read = await read_of_next(cluster, chat, "Think again. " + words(460, 100))
    assert read > 0
    assert read % BLOCK == 0
