"""Two requests of one session at the same moment."""

import asyncio
import copy

import pytest
from e2e.chat import Chat, control, leases_of, session_of, words
from e2e.cluster import Cluster

pytestmark = pytest.mark.vllm


async def test_both_are_right_and_at_most_one_reuses(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("Start. " + words(21, 200))
    other = Chat(cluster, chat.session, copy.deepcopy(chat.messages), gateway=2)
    await asyncio.gather(
        chat.say("Left. " + words(121, 100)), other.say("Right. " + words(721, 100), stream=True)
    )
    async with control(cluster) as client:
        session_id = (await session_of(client, chat.session)).session_id
        leases = await leases_of(client, session_id, "prefill")
    assert len(leases) <= 1
    # Both branches can go on.
    await chat.say("Left again.")
    await other.say("Right again.")
