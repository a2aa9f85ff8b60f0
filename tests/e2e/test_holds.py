"""Holds end when the session does, and last longer when asked."""

import asyncio

import httpx
import pytest
from e2e.chat import Chat, bytes_read, control, ownerships_of, session_of, words
from e2e.cluster import HOLD_SECONDS, Cluster
from e2e.engines import figures
from e2e.waiting import eventually
from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2 as lease

pytestmark = pytest.mark.vllm


async def test_a_session_that_ends_frees_its_blocks_at_once(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("Hold this. " + words(3, 300))
    assert (await figures(cluster.decode.url)).usage > 0
    async with httpx.AsyncClient() as http:
        answer = await http.delete(f"{cluster.gateway()}/v1/sessions/{chat.session}")
    assert answer.status_code in (200, 204), answer.text

    async def freed() -> bool:
        return (await figures(cluster.decode.url)).usage == 0

    # Far sooner than the hold ends by itself.
    await eventually(freed, seconds=5)


async def test_a_hold_is_extended_past_the_engines_ttl(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("A long tool call follows. " + words(7, 300))
    async with control(cluster) as client:
        session_id = (await session_of(client, chat.session)).session_id

        async def held() -> list[lease.Ownership]:
            return await ownerships_of(client, session_id, lease.OWNERSHIP_STATE_HELD)

        (owned,) = await eventually(held)
        assert owned.hold.ToTimedelta().total_seconds() < HOLD_SECONDS
        request = lease.ExtendHoldRequest(session_id=session_id, hold=Duration(seconds=75))
        assert (await client.leases.ExtendHold(request)).asked == 1

        async def longer() -> bool:
            (now,) = await held()
            return now.hold.ToTimedelta().total_seconds() > 60

        await eventually(longer)
        await asyncio.sleep(HOLD_SECONDS + 3)
        assert len(await held()) == 1
    before = await bytes_read(cluster.prefill.url)
    await chat.say("The tool has answered.")
    assert await bytes_read(cluster.prefill.url) > before


async def test_a_hold_that_ran_out_costs_only_recomputation(cluster: Cluster, chat: Chat) -> None:
    assert chat.session is not None
    await chat.say("Nobody comes back soon. " + words(9, 300))
    async with control(cluster) as client:
        session_id = (await session_of(client, chat.session)).session_id

        async def over() -> bool:
            return not await ownerships_of(
                client, session_id, lease.OWNERSHIP_STATE_HELD, lease.OWNERSHIP_STATE_LEASED
            )

        await eventually(over, seconds=HOLD_SECONDS + 15)
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Here I am again.")
    assert await bytes_read(cluster.prefill.url) == before
    await chat.say("And reuse comes back.")
    assert await bytes_read(cluster.prefill.url) > before
