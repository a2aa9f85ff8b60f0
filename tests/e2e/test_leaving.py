"""A client leaves, at each stage of a turn: nothing of it stays and the next turn is right."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from e2e.chat import Chat, bytes_read, control, lease_of, leases_of, session_of, words
from e2e.cluster import Cluster
from e2e.engines import AT_ONCE, crowd, figures
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease

pytestmark = pytest.mark.vllm

# From the moment when the last one that was frozen can act again.
SOON = 5.0
ENDLESS = {"max_tokens": 4000}


@dataclass
class Client:
    """Sends a turn and leaves."""

    cluster: Cluster
    chat: Chat
    stream: bool = False
    chunks: int = 0
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    def send(self, **more: Any) -> None:
        """Send the chat's messages; return at once."""
        self._task = asyncio.create_task(self._run(more))

    async def _run(self, more: dict[str, Any]) -> None:
        url = f"{self.cluster.gateway()}/v1/chat/completions"
        body = self.chat.body(stream=self.stream, **more)
        headers = {"x-session-id": str(self.chat.session)}
        async with (
            httpx.AsyncClient(timeout=120) as http,
            http.stream("POST", url, json=body, headers=headers) as answer,
        ):
            async for line in answer.aiter_lines():
                self.chunks += line.startswith("data: {") and bool(json.loads(line[6:]))

    async def leave(self) -> None:
        """Close the connection before the answer is there."""
        assert self._task is not None
        assert not self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def reads(self) -> bool:
        """Tell whether the prefill has taken up the turn's lease."""
        async with control(self.cluster) as client:
            session_id = (await session_of(client, str(self.chat.session))).session_id
            reading = await lease_of(client, session_id, "prefill", lease.LEASE_STATE_READING)
        return reading is not None


Stage = Callable[[Cluster, Client], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def before_route_answers(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """The routing services stand still."""
    for server in cluster.both("routing"):
        server.freeze()
    try:
        client.send()

        async def arrived() -> bool:
            async with httpx.AsyncClient() as http:
                answer = await http.get(f"{cluster.gateway()}/metrics")
            return "kvplane_gateway_requests_running 1.0" in answer.text

        await eventually(arrived)
        yield
    finally:
        for server in cluster.both("routing"):
            server.thaw()


@asynccontextmanager
async def queued_at_the_prefill(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """Others are before it. They stay until all of it is gone."""
    async with crowd(cluster.prefill.url, AT_ONCE):
        client.send()
        await eventually(client.reads)
        yield

        async def gone() -> bool:
            return not await client.reads() and not (await figures(cluster.prefill.url)).waiting

        await eventually(gone, SOON)


@asynccontextmanager
async def while_the_prefill_reads(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """The owner stands still with the read in flight."""
    cluster.decode.freeze()
    try:
        client.send()

        async def parked() -> bool:
            now = await figures(cluster.prefill.url)
            return bool(now.waiting and now.usage and not now.running)

        await eventually(parked)
        yield
    finally:
        cluster.decode.thaw()


@asynccontextmanager
async def while_the_prefill_computes(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """A long prompt, and an engine that is stopped in the middle of it."""
    client.chat.messages[-1]["content"] += words(0, 2200)
    client.send()
    try:

        async def computes() -> bool:
            return bool((await figures(cluster.prefill.url)).running)

        await eventually(computes)
        cluster.prefill.freeze()
        yield
    finally:
        cluster.prefill.thaw()


@asynccontextmanager
async def between_the_legs(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """The gateway stands still from when the prefill has the request until it has answered."""
    gateway = cluster.services["gateway-1"]
    try:
        async with crowd(cluster.prefill.url, AT_ONCE):
            client.send()
            await eventually(client.reads)
            gateway.freeze()
            before = await figures(cluster.prefill.url)

        async def answered() -> bool:
            now = await figures(cluster.prefill.url)
            return now.answered > before.answered and not now.running

        await eventually(answered)
        yield
    finally:
        gateway.thaw()


@asynccontextmanager
async def as_the_prefill_answers(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """The gateway hears at once that the client has left and, then, that the prefill is done."""
    gateway = cluster.services["gateway-1"]
    try:
        async with crowd(cluster.prefill.url, AT_ONCE):
            client.send()
            await eventually(client.reads)
            gateway.freeze()
            before = await figures(cluster.prefill.url)
            yield

        async def answered() -> bool:
            now = await figures(cluster.prefill.url)
            return now.answered > before.answered and not now.running

        await eventually(answered)
    finally:
        gateway.thaw()


@asynccontextmanager
async def queued_at_the_decode(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """Before its first token: others are before it. They stay until all of it is gone."""
    async with crowd(cluster.decode.url, AT_ONCE):
        before = await figures(cluster.decode.url)
        client.send()

        async def waits() -> bool:
            return bool((await figures(cluster.decode.url)).waiting)

        await eventually(waits)
        yield

        async def gone() -> bool:
            now = await figures(cluster.decode.url)
            return not now.waiting and now.answered == before.answered

        await eventually(gone, SOON)
        await eventually(lambda: at_rest(cluster), SOON)


@asynccontextmanager
async def queued_at_a_slow_decode(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """It has a lease, and is in a step that takes longer than anybody waits for it."""
    try:
        async with crowd(cluster.decode.url, AT_ONCE):
            client.send()

            async def waits() -> bool:
                return bool((await figures(cluster.decode.url)).waiting)

            await eventually(waits)
            cluster.decode.freeze()
            yield
            await asyncio.sleep(2)
            cluster.decode.thaw()
    finally:
        cluster.decode.thaw()


@asynccontextmanager
async def while_the_decode_reads(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """The prefill stands still when the decode comes to read."""
    try:
        async with crowd(cluster.decode.url, AT_ONCE):
            client.send()

            async def waits() -> bool:
                return bool((await figures(cluster.decode.url)).waiting)

            await eventually(waits)
            cluster.prefill.freeze()

        async def parked() -> bool:
            now = await figures(cluster.decode.url)
            return bool(now.waiting and now.usage and not now.running)

        await eventually(parked)
        yield
    finally:
        cluster.prefill.thaw()


@asynccontextmanager
async def in_the_middle_of_the_stream(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """Some of the answer has come."""
    client.stream = True
    client.send(**ENDLESS)

    async def some() -> bool:
        return client.chunks > 3

    await eventually(some)
    yield


@asynccontextmanager
async def while_the_decode_writes(cluster: Cluster, client: Client) -> AsyncIterator[None]:
    """No stream: nothing has come."""
    client.send(**ENDLESS)

    async def writes() -> bool:
        return bool((await figures(cluster.decode.url)).running)

    await eventually(writes)
    yield


async def at_rest(cluster: Cluster) -> bool:
    """Tell whether the prefill has nothing left, of this turn or any other."""
    return (await figures(cluster.prefill.url)).at_rest


@pytest.mark.parametrize(
    ("stage", "reusable"),
    [
        (before_route_answers, True),
        (queued_at_the_prefill, True),
        (while_the_prefill_reads, False),
        (while_the_prefill_computes, False),
        (between_the_legs, False),
        (as_the_prefill_answers, False),
        (queued_at_the_decode, False),
        (queued_at_a_slow_decode, False),
        (while_the_decode_reads, False),
        (in_the_middle_of_the_stream, False),
        (while_the_decode_writes, False),
    ],
)
async def test_leaving(cluster: Cluster, chat: Chat, stage: Stage, reusable: bool) -> None:
    assert chat.session is not None
    await chat.say("Before. " + words(83, 250))
    await chat.say("And this. " + words(183, 80))
    held = (await figures(cluster.decode.url)).usage
    answered = (await figures(cluster.decode.url)).answered
    chat.messages.append({"role": "user", "content": "Nobody waits for this. " + words(283, 60)})
    client = Client(cluster, chat)
    async with stage(cluster, client):
        await client.leave()

    async def all_gone() -> bool:
        decode = await figures(cluster.decode.url)
        assert decode.answered == answered, "the turn was over before the client left"
        busy = decode.running or decode.waiting or decode.usage > held
        return await at_rest(cluster) and not busy

    await eventually(all_gone, SOON)
    async with control(cluster) as control_plane:
        session_id = (await session_of(control_plane, chat.session)).session_id

        async def leases_over() -> bool:
            leases = [
                *await leases_of(control_plane, session_id, "prefill"),
                *await leases_of(control_plane, session_id, "decode"),
            ]
            live = (lease.LEASE_STATE_GRANTED, lease.LEASE_STATE_READING)
            return not any(one.draining or one.state in live for one in leases)

        await eventually(leases_over, SOON)
    del chat.messages[-1]
    before = await bytes_read(cluster.prefill.url)
    await chat.say("I am back.")
    read = await bytes_read(cluster.prefill.url) - before
    assert read > 0 or not reusable, "what nobody has read can still be read"
