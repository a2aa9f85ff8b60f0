"""Two replicas of everything: turns alternate, one dies, nothing is lost."""

import pytest
from demo.servers import wait_for
from e2e.chat import Chat, bytes_read, words
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
    finally:
        for server in killed:
            server.start()
        wait_for(killed, 60)
