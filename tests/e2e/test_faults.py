"""Each part dies or freezes in the middle of a conversation. Every request is answered in
bounded time with right tokens, and reuse comes back by itself."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from demo.servers import wait_for
from e2e.chat import Chat, bytes_read, words
from e2e.cluster import Cluster, Postgres
from e2e.waiting import eventually

pytestmark = pytest.mark.vllm
BOUND = 30.0


@pytest.fixture
def patience() -> float:
    """What nobody could be told ends by itself: a prefill holds for 30 s, a decode for less."""
    return 45.0


@pytest.fixture
def engines_may_complain() -> bool:
    """Their peers die."""
    return True


@pytest.fixture(autouse=True)
async def _whole_again(cluster: Cluster) -> AsyncIterator[None]:
    """The next test finds everything up."""
    yield
    for server in (*cluster.services.values(), cluster.prefill, cluster.decode):
        server.thaw()
        if not server.alive():
            server.start()
    await asyncio.to_thread(
        wait_for, [*cluster.services.values(), cluster.prefill, cluster.decode], 120
    )


async def bounded(chat: Chat, content: str) -> None:
    async with asyncio.timeout(BOUND):
        await chat.say(content)


async def reuse_is_back(cluster: Cluster, chat: Chat) -> None:
    """Talk on until a turn reads again."""

    async def reads() -> bool:
        before = await bytes_read(cluster.prefill.url)
        await chat.say("Go on. " + words(len(chat.messages), 70))
        return await bytes_read(cluster.prefill.url) > before

    await eventually(reads, seconds=60)


async def test_lease_service_killed_and_started_again(cluster: Cluster, chat: Chat) -> None:
    await chat.say("Before. " + words(41, 200))
    for server in cluster.both("lease"):
        server.kill()
    await bounded(chat, "Without leases. " + words(141, 80))
    await bounded(chat, "Still without. " + words(241, 80))
    for server in cluster.both("lease"):
        server.start()
    await asyncio.to_thread(wait_for, cluster.both("lease"), 60)
    await reuse_is_back(cluster, chat)


async def test_the_whole_control_plane_killed(cluster: Cluster, chat: Chat) -> None:
    await chat.say("Before. " + words(43, 200))
    gone = [*cluster.both("lease"), *cluster.both("session"), *cluster.both("routing")]
    for server in gone:
        server.kill()
    await bounded(chat, "Alone. " + words(143, 80))
    await bounded(chat, "Still alone. " + words(243, 80))
    for server in gone:
        server.start()
    await asyncio.to_thread(wait_for, gone, 60)
    await reuse_is_back(cluster, chat)


async def test_database_stopped_and_started(
    cluster: Cluster, postgres: Postgres, chat: Chat
) -> None:
    await chat.say("Before. " + words(47, 200))
    postgres.stop()
    try:
        await bounded(chat, "No database. " + words(147, 80))
    finally:
        postgres.start()
    await asyncio.to_thread(wait_for, list(cluster.services.values()), 60)
    await reuse_is_back(cluster, chat)


async def test_decode_frozen(cluster: Cluster, chat: Chat) -> None:
    await chat.say("Before. " + words(53, 200))
    cluster.decode.freeze()
    await bounded(chat, "It does not move. " + words(153, 80))
    cluster.decode.thaw()
    await reuse_is_back(cluster, chat)


async def test_decode_killed_and_restarted_on_the_same_address(
    cluster: Cluster, chat: Chat
) -> None:
    await chat.say("Before. " + words(59, 200))
    cluster.decode.kill()
    await bounded(chat, "It is gone. " + words(159, 80))
    cluster.decode.start()
    await asyncio.to_thread(wait_for, [cluster.decode], 180)
    await bounded(chat, "It is new. " + words(259, 80))
    await reuse_is_back(cluster, chat)
