"""The main job: each next turn reads its KV back under a lease, and the tokens are right."""

import pytest
from e2e.chat import Chat, bytes_read, control, leases_of, session_of, words
from e2e.cluster import BLOCK, KV_BYTES_PER_TOKEN, Cluster
from kvplane.api.lease.v1 import lease_pb2 as lease

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streaming"])
async def test_five_turns_read_and_are_right(cluster: Cluster, chat: Chat, stream: bool) -> None:
    assert chat.session is not None
    held = 0
    for turn in range(1, 6):
        before = await bytes_read(cluster.prefill.url)
        await chat.say(words(turn * 300), stream=stream)
        read = await bytes_read(cluster.prefill.url) - before
        async with control(cluster) as client:
            now = await session_of(client, chat.session)
            leases = await leases_of(client, now.session_id, "prefill")
        if turn == 1:
            assert read == 0
            assert leases == []
        else:
            # The engine's own counter and our records tell the same story.
            assert held - BLOCK < read // KV_BYTES_PER_TOKEN <= held + BLOCK
            assert len(leases) == turn - 1
            assert {one.state for one in leases} == {lease.LEASE_STATE_CONSUMED}
        reused = now.tokens_reused
        async with control(cluster) as client:
            owned = await client.leases.ListOwnerships(
                lease.ListOwnershipsRequest(
                    session_id=now.session_id, states=[lease.OWNERSHIP_STATE_HELD]
                )
            )
        (current,) = [one for one in owned.ownerships if not one.for_decode]
        held = current.num_tokens
    assert reused > 4 * BLOCK


async def test_a_conversation_without_an_id_is_found_by_its_history(cluster: Cluster) -> None:
    chat = Chat(cluster, session=None)
    await chat.say("Without an id. " + words(40))
    for turn in range(2, 4):
        before = await bytes_read(cluster.prefill.url)
        await chat.say(words(turn * 170), stream=turn == 3)
        assert await bytes_read(cluster.prefill.url) > before
