"""Two replicas of everything: turns alternate, one dies, nothing is lost."""

import asyncio
import copy

import pytest
from demo.servers import wait_for
from e2e.chat import Chat, bytes_read, control, leases_of, session_of, words
from e2e.cluster import Cluster

pytestmark = pytest.mark.vllm


async def test_turns_alternate_between_replicas_and_one_dies(cluster: Cluster, chat: Chat) -> None:
    killed = [cluster.services[f"{kind}-1"] for kind in ("session", "lease", "routing", "gateway")]
    try:
        for turn in range(1, 7):
            chat.gateway = 2 if turn > 3 or turn % 2 == 0 else 1
            if turn == 4:
                for server in killed:
                    server.kill()
            before = await bytes_read(cluster.prefill.url)
            await chat.say(words(turn * 310), stream=turn % 2 == 1)
            if turn > 1:
                assert await bytes_read(cluster.prefill.url) > before, f"turn {turn} did not reuse"
        # And two turns at once, with half of everything gone.
        async with control(cluster) as client:
            session_id = (await session_of(client, chat.session or "")).session_id
            before_both = await leases_of(client, session_id, "prefill")
        other = Chat(cluster, chat.session, copy.deepcopy(chat.messages), gateway=2)
        await asyncio.gather(chat.say("Left."), other.say("Right.", stream=True))
        async with control(cluster) as client:
            after_both = await leases_of(client, session_id, "prefill")
        assert len(after_both) <= len(before_both) + 1
    finally:
        for server in killed:
            server.start()
        wait_for(killed, 60)
