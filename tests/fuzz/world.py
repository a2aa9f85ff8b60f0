"""A whole control plane that asks for credentials, with two tenants who share nothing."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import grpc
import structlog
from google.protobuf.message import Message
from kvplane.cli.front import DevProcess
from kvplane.client.channels import MAX_MESSAGE_BYTES
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, loop_turn
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.settings import Settings, load
from prometheus_client import CollectorRegistry
from wire.methods import Method

from fuzz.databases import Kind, Watch
from fuzz.methods import METHODS

TOKEN: Final = "the-internal-token-of-these-tests"
OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
_QUIET_READS: Final = 5
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass
class World:
    """The running plane. Its clock moves only when the search says so."""

    channel: grpc.aio.Channel
    clock: FakeClock
    watch: Watch
    database: Database
    metadata: Metadata = (("authorization", f"Bearer {TOKEN}"),)
    heard: list[tuple[str, str, Message, Message]] = field(default_factory=list)

    async def call(self, name: str, request: Message, *, tenant: str = "default") -> Any:
        """Call as a service of that tenant, and remember what was said."""
        _make_unique(name, request)
        method = METHODS[name]
        stub = self.channel.unary_unary(
            method.path, type(request).SerializeToString, method.response.FromString
        )
        metadata = (*self.metadata, ("x-kvplane-tenant", tenant))
        answer = await stub(request, metadata=metadata, timeout=20)
        self.heard.append((name, tenant, request, answer))
        return answer

    def stub(self, method: Method) -> Any:
        """Return the bare call: bytes out, bytes in."""
        kind = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }[method.descriptor.client_streaming, method.descriptor.server_streaming]
        return kind(method.path)

    async def settle(self) -> None:
        """Let everything that a call has begun in the background come to its end."""
        for _ in range(20):
            await loop_turn()
        await self._queue_empty()
        if not self.database.is_sqlite:  # whose answers take real time, during which all is quiet
            same, seen = 0, await self.watch.tables()
            while same < _QUIET_READS:
                await self._queue_empty()
                now = await self.watch.tables()
                same, seen = (same + 1, seen) if now == seen else (0, now)

    async def _queue_empty(self) -> None:
        while self.database._lanes or self.database._queue:
            await loop_turn()

    async def advance(self, seconds: float) -> None:
        """Let time pass, and the background loops do what is due."""
        self.clock.advance(seconds)
        await self.settle()


def _make_unique(name: str, request: Any) -> None:
    """Give a request of the seeds what nobody else has."""
    if name == "TenantService/CreateTenant":
        request.display_name = f"Called {secrets.token_hex(8)}"
    elif name == "SessionService/CompleteTurn":
        request.history_digest = secrets.token_bytes(16)
    elif name == "LeaseService/ReportOwnership":
        for own in request.ownerships:
            own.digests = secrets.token_bytes(len(own.digests))
            own.params.extra_json = f'{{"secret":"{secrets.token_hex(8)}"}}'
            ids = own.params.remote_block_ids[0].ids
            own.params.remote_block_ids[0].ids[:] = [
                (1 << 40) + secrets.randbelow(1 << 40) for _ in ids
            ]


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged: a search makes thousands of calls fail."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        structlog.configure(**before)
        logging.disable(logging.NOTSET)


def composed(settings: Settings, clock: Clock) -> DevProcess:
    """Put everything together as `kvplane dev` does, with metrics of its own."""
    with patch("kvplane.runtime.process.RpcMetrics", lambda: RpcMetrics(CollectorRegistry())):
        return DevProcess(settings, clock)


@asynccontextmanager
async def running(kind: Kind, url: str) -> AsyncIterator[World]:
    """Run all services over a database, asking for credentials."""
    settings = load(
        database={"url": url},
        grpc={"port": 0, "status_port": 0, "drain_s": 0},
        auth={"mode": "api_key", "internal_token": TOKEN},
    )
    clock = FakeClock()
    process = composed(settings, clock).grpc
    database = process._database
    await process.start()
    watch = kind.watch(url, database)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{process.port}", options=OPTIONS)
    try:
        async with asyncio.timeout(20):
            while not process.ready:
                await loop_turn()
        yield World(channel, clock, watch, database)
    finally:
        watch.close()
        await channel.close()
        await process.drain()
