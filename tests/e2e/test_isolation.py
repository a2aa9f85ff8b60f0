"""Nobody gets another conversation's or tenant's KV."""

import pytest
from e2e.chat import Chat, bytes_read, control, leases_of, session_of, words
from e2e.cluster import Cluster
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.kernel.errors import NotFound

pytestmark = pytest.mark.vllm


async def test_another_conversation_gets_nothing(cluster: Cluster, chat: Chat) -> None:
    await chat.say("Mine. " + words(13, 200))
    other = Chat(cluster, session=f"{chat.session}-other")
    before = await bytes_read(cluster.prefill.url)
    await other.say("Mine. " + words(13, 200))
    assert await bytes_read(cluster.prefill.url) == before


async def test_a_session_taken_over_with_another_prompt(cluster: Cluster, chat: Chat) -> None:
    await chat.say("Mine. " + words(17, 200))
    other = Chat(cluster, session=chat.session)
    before = await bytes_read(cluster.prefill.url)
    await other.say("Something else. " + words(900, 200))
    assert await bytes_read(cluster.prefill.url) == before


async def test_a_client_sent_handle_is_dropped(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("Mine. " + words(19, 200))
    stolen = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": "someone",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_num_tokens": 128,
    }
    other = Chat(cluster, session=f"{chat.session}-thief")
    before = await bytes_read(cluster.prefill.url)
    await other.say("Mine. " + words(19, 200), kv_transfer_params=stolen)
    assert await bytes_read(cluster.prefill.url) == before


async def test_another_tenant_sees_and_reuses_nothing(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("Secret. " + words(23, 200))
    async with control(cluster) as mine, control(cluster, tenant="other") as theirs:
        ours = await session_of(mine, chat.session)
        with pytest.raises(NotFound) as foreign:
            await theirs.sessions.GetSession(session.GetSessionRequest(session_id=ours.session_id))
        with pytest.raises(NotFound) as unknown:
            await theirs.sessions.GetSession(session.GetSessionRequest(session_id="session-none"))
        assert foreign.value.code == unknown.value.code
        assert await leases_of(theirs, ours.session_id, "prefill") == []
