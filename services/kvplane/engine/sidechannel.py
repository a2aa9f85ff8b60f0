"""The side channel on kv_port: one JSON line asks for an engine's NIXL metadata."""

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass

from kvplane.kernel.clock import Clock

HANDSHAKE_TIMEOUT_S = 5.0
_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an engine says about itself to one that wants to read from it."""

    engine_id: str
    compatibility: str
    agent_metadata: bytes
    address: int
    num_blocks: int
    block_bytes: int
    # The engine's monotonic clock as it answered.
    clock: float


class HandshakeFailed(Exception):
    """There is nobody there, or it is not the engine that was meant."""


async def serve(host: str, port: int, introduce: Callable[[], Introduction]) -> asyncio.Server:
    """Answer handshakes until the server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await reader.readline()
                me = introduce()
                fields = {name: getattr(me, name) for name in me.__slots__}
                fields["agent_metadata"] = base64.b64encode(me.agent_metadata).decode()
                writer.write(json.dumps(fields).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # The other side sees the closed connection.
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=_LIMIT)


async def meet(
    host: str, port: int, engine_id: str, compatibility: str, clock: Clock
) -> tuple[Introduction, float]:
    """Return a peer's introduction, and its clock minus ours.

    HandshakeFailed when nobody answers within 5 s, when it is another engine than
    `engine_id` (a restarted one), or when its KV cannot be understood here.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
            try:
                asked = clock.monotonic()
                writer.write(b"introduce\n")
                fields = json.loads(await reader.readline())
                received = clock.monotonic()
            finally:
                writer.close()
            fields["agent_metadata"] = base64.b64decode(fields["agent_metadata"])
            peer = Introduction(**fields)
    except (OSError, TimeoutError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise HandshakeFailed(f"no answer from {host}:{port}: {error!r}") from error
    if peer.engine_id != engine_id:
        raise HandshakeFailed(f"{host}:{port} is engine {peer.engine_id}, not {engine_id}")
    if peer.compatibility != compatibility:
        raise HandshakeFailed(f"engine {engine_id} holds another kind of KV")
    return peer, peer.clock - (asked + received) / 2
