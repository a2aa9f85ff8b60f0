"""A lease is taken away while its read is in flight: the owner's process stands still."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from e2e.chat import Chat, Reply, bytes_read, control, lease_of, session_of, words
from e2e.cluster import BLOCK, KV_BYTES_PER_TOKEN, LEASE_SECONDS, Cluster
from e2e.engines import Figures, figures
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient

pytestmark = pytest.mark.vllm

REVOKED = lease.LEASE_STATE_REVOKED


@dataclass
class InFlight:
    """A turn whose prefill reads from an owner that does not answer."""

    client: KvplaneClient
    session_id: str
    lease_id: str
    owned: lease.Ownership
    # Before it, of the reader and of the owner.
    reader: Figures
    owner: Figures
    reply: asyncio.Task[Reply]

    async def its_lease(self) -> lease.Lease:
        """Return it as it is now."""
        answer = await self.client.leases.GetLease(lease.GetLeaseRequest(lease_id=self.lease_id))
        return answer.lease

    async def what_is_read(self) -> lease.Ownership:
        """Return what is read as it is now."""
        request = lease.GetOwnershipRequest(ownership_id=self.owned.ownership_id)
        return (await self.client.leases.GetOwnership(request)).ownership

    async def drained(self) -> bool:
        """Tell whether nobody can be reading any more."""
        now = await self.its_lease()
        assert now.state == REVOKED
        return not now.draining


@asynccontextmanager
async def read_in_flight(cluster: Cluster, chat: Chat) -> AsyncIterator[InFlight]:
    """Send a third turn and freeze the decode, so that the prefill's read hangs."""
    assert chat.session is not None
    await chat.say("Hold this. " + words(67, 250))
    # The engines know each other after this: what hangs is the read and nothing before it.
    await chat.say("And this. " + words(167, 100))
    async with control(cluster) as client:
        session_id = (await session_of(client, chat.session)).session_id
        chat.messages.append({"role": "user", "content": "Now read. " + words(267, 60)})

        async def held() -> list[lease.Ownership]:
            request = lease.ListOwnershipsRequest(
                session_id=session_id, states=[lease.OWNERSHIP_STATE_HELD]
            )
            listed = (await client.leases.ListOwnerships(request)).ownerships
            return [one for one in listed if one.turn == 2 and not one.for_decode]

        (owned,) = await eventually(held)
        reader, owner = await figures(cluster.prefill.url), await figures(cluster.decode.url)
        assert reader.at_rest
        cluster.decode.freeze()
        reply = asyncio.create_task(chat.send())
        try:

            async def parked() -> bool:
                """Its blocks are there and it does not run: they are being written to."""
                now = await figures(cluster.prefill.url)
                return bool(now.waiting and now.usage and not now.running)

            await eventually(parked)
            reading = await lease_of(client, session_id, "prefill", lease.LEASE_STATE_READING)
            assert reading is not None
            yield InFlight(client, session_id, reading.lease_id, owned, reader, owner, reply)
        finally:
            cluster.decode.thaw()
            await asyncio.wait([reply])


async def read_once(cluster: Cluster, flight: InFlight) -> None:
    """The blocks went over once, while they were held, and were given back once."""
    reader, owner = await figures(cluster.prefill.url), await figures(cluster.decode.url)
    read = (reader.bytes_read - flight.reader.bytes_read) / KV_BYTES_PER_TOKEN
    assert flight.owned.num_tokens - BLOCK < read <= flight.owned.num_tokens + BLOCK
    assert owner.read_too_late == flight.owner.read_too_late


@pytest.mark.parametrize("how", ["revoked", "ended"])
async def test_a_read_in_flight_is_waited_for(cluster: Cluster, chat: Chat, how: str) -> None:
    async with read_in_flight(cluster, chat) as flight:
        leases = flight.client.leases
        if how == "revoked":
            request = lease.RevokeLeaseRequest(lease_id=flight.lease_id)
            answered = (await leases.RevokeLease(request)).lease
            assert (answered.state, answered.draining) == (REVOKED, True)
        else:
            await flight.client.sessions.EndSession(
                session.EndSessionRequest(session_id=flight.session_id)
            )
        assert not await flight.drained()
        assert (await flight.what_is_read()).state == lease.OWNERSHIP_STATE_LEASED
        assert await bytes_read(cluster.prefill.url) == flight.reader.bytes_read
        assert not flight.reply.done()
        cluster.decode.thaw()
        reply = await flight.reply
        await eventually(flight.drained, seconds=5)
        assert (await flight.what_is_read()).state == lease.OWNERSHIP_STATE_CONSUMED
        await read_once(cluster, flight)
        # The read's end gave the blocks back; nothing was left to free by order.
        freed = (await figures(cluster.decode.url)).ran_out - flight.owner.ran_out
        assert freed == (0 if how == "revoked" else 1), "only what the turn itself left"
    await chat.check(reply)
    chat.messages.append({"role": "assistant", "content": reply.content})
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Go on.")
    assert (await bytes_read(cluster.prefill.url) > before) == (how == "revoked")


async def test_a_read_that_outlives_its_lease_is_dropped(cluster: Cluster, chat: Chat) -> None:
    async with read_in_flight(cluster, chat) as flight:
        request = lease.RevokeLeaseRequest(lease_id=flight.lease_id)
        await flight.client.leases.RevokeLease(request)

        async def computed() -> bool:
            return (await figures(cluster.prefill.url)).answered > flight.reader.answered

        # The prompt is computed while the owner still stands still.
        await eventually(computed, seconds=LEASE_SECONDS + 4)
        assert await bytes_read(cluster.prefill.url) == flight.reader.bytes_read
        await eventually(flight.drained, seconds=5)
        assert (await flight.what_is_read()).state == lease.OWNERSHIP_STATE_RELEASED
        cluster.decode.thaw()
        reply = await flight.reply

        async def arrived() -> bool:
            return await bytes_read(cluster.prefill.url) > flight.reader.bytes_read

        # Into blocks that were kept aside for it.
        await eventually(arrived)
        await read_once(cluster, flight)
    await chat.check(reply)
    chat.messages.append({"role": "assistant", "content": reply.content})
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Go on.")
    assert await bytes_read(cluster.prefill.url) > before
