"""A hold runs out while its reader is queued behind fifty requests at the prefill."""

import asyncio
from dataclasses import dataclass

import pytest
from e2e.chat import Chat, Reply, bytes_read, control, lease_of, ownerships_of, session_of, words
from e2e.cluster import HOLD_SECONDS, LEASE_SECONDS, Cluster
from e2e.engines import AT_ONCE, crowd, figures
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import KvplaneClient

pytestmark = pytest.mark.vllm

FIFTY = 50
READING = lease.LEASE_STATE_READING


@dataclass
class Held:
    """A session whose next turn can be read."""

    cluster: Cluster
    client: KvplaneClient
    session_id: str
    ownership_id: str
    # On the loop's clock, no earlier than the hold's begin.
    since: float

    async def passed(self, seconds: float) -> None:
        """Wait until the hold is so old."""
        await asyncio.sleep(self.since + seconds - asyncio.get_running_loop().time())

    def age(self) -> float:
        """Return how old the hold is."""
        return asyncio.get_running_loop().time() - self.since

    async def reading(self) -> lease.Lease | None:
        """Return the reader's lease while it lives."""
        return await lease_of(self.client, self.session_id, "prefill", READING)

    async def queued(self) -> bool:
        """Tell whether the reader and all but those that run are waiting."""
        return (await figures(self.cluster.prefill.url)).waiting == FIFTY - AT_ONCE + 1

    async def states(self, lease_id: str) -> tuple[lease.LeaseState, lease.OwnershipState]:
        """Return what became of the lease and of what it was for."""
        leases = self.client.leases
        one = (await leases.GetLease(lease.GetLeaseRequest(lease_id=lease_id))).lease
        request = lease.GetOwnershipRequest(ownership_id=self.ownership_id)
        return one.state, (await leases.GetOwnership(request)).ownership.state


async def hold(cluster: Cluster, client: KvplaneClient, chat: Chat) -> Held:
    """Have a first turn."""
    assert chat.session is not None
    await chat.say("Hold this. " + words(71, 250))
    since = asyncio.get_running_loop().time()
    session_id = (await session_of(client, chat.session)).session_id

    async def held() -> list[lease.Ownership]:
        return await ownerships_of(client, session_id, lease.OWNERSHIP_STATE_HELD)

    (owned,) = await eventually(held)
    chat.messages.append({"role": "user", "content": "Read it after a while."})
    return Held(cluster, client, session_id, owned.ownership_id, since)


async def goes_on(cluster: Cluster, chat: Chat, reply: Reply) -> None:
    """The answer is right and the turn after it reuses."""
    await chat.check(reply)
    chat.messages.append({"role": "assistant", "content": reply.content})
    before = await bytes_read(cluster.prefill.url)
    await chat.say("Go on.")
    assert await bytes_read(cluster.prefill.url) > before


async def test_the_owner_holds_longer_and_the_reader_reads(cluster: Cluster, chat: Chat) -> None:
    async with control(cluster) as client:
        held = await hold(cluster, client, chat)
        before = await bytes_read(cluster.prefill.url)
        async with crowd(cluster.prefill.url, FIFTY):
            reply = asyncio.create_task(chat.send())
            await eventually(held.queued)
            begun = await eventually(held.reading)
            await held.passed(HOLD_SECONDS + 2)
            assert await held.queued()
            now = await held.reading()
            assert now is not None
            assert now.lease_id == begun.lease_id
        answer = await reply
        assert await bytes_read(cluster.prefill.url) > before
        assert await held.states(begun.lease_id) == (
            lease.LEASE_STATE_CONSUMED,
            lease.OWNERSHIP_STATE_CONSUMED,
        )
    await goes_on(cluster, chat, answer)


async def test_the_owner_cannot_be_asked_and_the_reader_computes(
    cluster: Cluster, chat: Chat
) -> None:
    async with control(cluster) as client:
        held = await hold(cluster, client, chat)
        before = await bytes_read(cluster.prefill.url)
        try:
            async with crowd(cluster.prefill.url, FIFTY):
                reply = asyncio.create_task(chat.send())
                await eventually(held.queued)
                begun = await eventually(held.reading)
                # Before the order comes to hold longer, and not until the owner counts as lost.
                await held.passed(HOLD_SECONDS - LEASE_SECONDS - 4)
                cluster.decode.freeze()
                assert held.age() < HOLD_SECONDS - LEASE_SECONDS - 3

                async def over() -> bool:
                    return await held.reading() is None

                await eventually(over)
                assert held.age() < HOLD_SECONDS, "a lease ends before the hold"
                assert await held.queued()
                answered = (await figures(cluster.prefill.url)).answered

            async def computed() -> bool:
                return (await figures(cluster.prefill.url)).answered > answered

            # The fifty have gone, and it is the reader's turn.
            await eventually(computed)
        finally:
            cluster.decode.thaw()
        answer = await reply
        assert await bytes_read(cluster.prefill.url) == before
        assert await held.states(begun.lease_id) == (
            lease.LEASE_STATE_EXPIRED,
            lease.OWNERSHIP_STATE_RELEASED,
        )
    await goes_on(cluster, chat, answer)
