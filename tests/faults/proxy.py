"""TCP proxies that cut connections, delay bytes or hold them back, and heal.

They run in a thread with an event loop of its own, so they outlive a test's loop and work
while a test waits.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Target = tuple[str, int] | Path
# "up" is from the client to the server.
Direction = Literal["up", "down"]


class Links:
    """All proxies of a test run, by name."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._links: dict[str, Link] = {}

    def open(self, name: str, target: Target) -> str:
        """Listen for connections to `target`; return ``host:port``."""
        link = Link(target)
        port = self._do(link.listen())
        self._links[name] = link
        return f"127.0.0.1:{port}"

    def cut(self, *names: str) -> int:
        """Reset all connections and refuse new ones; return how many there were."""
        return sum(self._do(link.cut()) for link in self._named(names))

    def delay(self, seconds: float, *names: str) -> None:
        """Let every byte arrive so much later, either way."""
        for link in self._named(names):
            self._do(link.delay(seconds))

    def silence(self, direction: Direction, *names: str) -> None:
        """Let nothing arrive any more that is sent that way, not even an end."""
        for link in self._named(names):
            self._do(link.silence(direction))

    def carried(self, *names: str) -> int:
        """Return how many bytes have arrived so far."""
        return sum(link.carried for link in self._named(names))

    def waiting(self, *names: str) -> int:
        """Return how many bytes are held back now."""
        return sum(link.waiting for link in self._named(names))

    def heal(self) -> None:
        """Be a plain network again; what was held back arrives now."""
        for link in self._links.values():
            self._do(link.heal())

    def close(self) -> None:
        """End them all."""
        for link in self._links.values():
            self._do(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _named(self, names: tuple[str, ...]) -> list["Link"]:
        return [self._links[name] for name in names]

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class Link:
    """One proxy. Its methods run in the proxies' loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._refuses = False
        self._delay_s = 0.0
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._connections: set[asyncio.Task[None]] = set()
        self.carried = 0
        self.waiting = 0

    async def listen(self) -> int:
        for gate in self._open.values():
            gate.set()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def cut(self) -> int:
        self._refuses = True
        return await self._end_all()

    async def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    async def silence(self, direction: Direction) -> None:
        self._open[direction].clear()

    async def heal(self) -> None:
        self._refuses, self._delay_s = False, 0.0
        for gate in self._open.values():
            gate.set()

    async def close(self) -> None:
        self._server.close()
        await self._end_all()

    async def _end_all(self) -> int:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        return len(connections)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        ends = [writer]
        try:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await self._connect()
                ends.append(far_writer)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, far_writer, "up"))
                    group.create_task(self._carry(far_reader, writer, "down"))
        except (asyncio.CancelledError, ExceptionGroup):
            pass  # cut, or one side has gone
        finally:
            self._connections.discard(connection)
            for end in ends:
                end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(str(self._target))
        return await asyncio.open_connection(*self._target)

    async def _carry(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, direction: Direction
    ) -> None:
        way = _Way(self, to, self._open[direction])
        async with asyncio.TaskGroup() as group:
            delivery = group.create_task(way.deliver())
            loop = asyncio.get_running_loop()
            while data := await source.read(1 << 16):
                self.waiting += len(data)
                way.queue.put_nowait((loop.time() + self._delay_s, data))
            way.queue.put_nowait((loop.time() + self._delay_s, b""))
            await delivery


@dataclass
class _Way:
    """One direction of one connection: what is on its way."""

    link: Link
    to: asyncio.StreamWriter
    gate: asyncio.Event
    queue: "asyncio.Queue[tuple[float, bytes]]" = field(default_factory=asyncio.Queue)

    async def deliver(self) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        try:
            while True:
                due, data = await self.queue.get()
                await asyncio.sleep(max(due - loop.time(), 0))
                await self.gate.wait()
                if not data:
                    self.to.write_eof()
                    return
                self.to.write(data)
                await self.to.drain()
                self.link.waiting -= len(data)
                self.link.carried += len(data)
                data = b""
        finally:
            self.link.waiting -= len(data)
            while not self.queue.empty():
                self.link.waiting -= len(self.queue.get_nowait()[1])
