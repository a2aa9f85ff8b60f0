"""What stands between a gateway and an engine in a test: it looks, and it cuts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from demo.servers import free_port

Parts = AsyncIterator[bytes]


@dataclass
class Relay:
    """Passes requests on to an engine that has its address from us.

    `stream` changes the pieces of an answer that is a stream, `whole` one that is not. `before`
    is awaited before the engine is asked, and may answer itself; `after` once it has answered.
    """

    port: int = field(default_factory=free_port)
    target: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    stream: Callable[[Parts], Parts] | None = None
    whole: Callable[[bytes], bytes] | None = None
    before: Callable[[], Awaitable[web.Response | None]] | None = None
    after: Callable[[], Awaitable[None]] | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    # The gateway has given a request up.
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """What its engine registers as its own."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What was asked."""
        return [body for _, body in self.requests]

    def reset(self) -> None:
        """Forget all, change nothing."""
        self.requests.clear()
        self.stream = self.whole = self.before = self.after = None
        self.arrived, self.left = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        """Be there."""
        self.reset()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _pass(self, http: web.Request) -> web.StreamResponse:
        raw = await http.read()
        if http.method == "POST":
            self.requests.append((dict(http.headers), json.loads(raw)))
        self.arrived.set()
        try:
            if self.before is not None and (answer := await self.before()) is not None:
                return answer
            kept = {"X-Request-Id", "Content-Type", "X-data-parallel-rank"}
            headers = {name: value for name, value in http.headers.items() if name in kept}
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    http.method, self.target + http.path, data=raw, headers=headers
                ) as answer,
            ):
                return await self._answer(http, answer)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _answer(
        self, http: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        kind = answer.headers.get("Content-Type", "")
        if not kind.startswith("text/event-stream"):
            raw = await answer.read()
            if self.after is not None:
                await self.after()
            changed = self.whole(raw) if self.whole is not None else raw
            return web.Response(status=answer.status, body=changed, headers={"Content-Type": kind})
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(http)
        parts = answer.content.iter_any()
        async for part in self.stream(parts) if self.stream is not None else parts:
            await response.write(part)
        await response.write_eof()
        return response
