"""The network between simulated processes: gRPC's semantics, with everything that goes wrong.

Above it runs the product's own client (`kvplane.client.connect`), below it the product's
own servicers. Messages are serialised and parsed again, errors travel as
google.rpc.Status, deadlines cancel at the server too, streams are ordered and may be cut.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from kvplane.client.connect import _Remote, _Settings
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import Internal, KvplaneError, Unavailable
from kvplane.runtime.status import CODES, DETAILS_KEY, to_status

from simulation.loop import Process, SimClock, VirtualLoop

_NOBODY = grpc.StatusCode.UNAVAILABLE


def rpc_error(
    code: grpc.StatusCode, details: str, trailers: tuple[Any, ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details
    )


def wire_error(error: BaseException) -> grpc.aio.AioRpcError:
    """Return what a client sees of an error that a handler raised."""
    if isinstance(error, TimeoutError):
        error = Unavailable("another part took too long", retry_after=0.5)
    elif not isinstance(error, KvplaneError):
        error = Internal("internal error")
    status = to_status(error)
    return rpc_error(
        CODES[error.code], status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )


@dataclass
class Weather:
    """What happens to messages for a while between some processes."""

    kind: str  # lost, reply_lost, late, twice, reset, mute, cut
    chance: float
    of: str = ""  # a part of the sender's or receiver's name; "" for all
    most_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def hits(self, sender: str, receiver: str) -> bool:
        """Draw whether it hits this message."""
        if self.of and self.of not in sender and self.of not in receiver:
            return False
        return self.rng.random() < self.chance


@dataclass
class Server:
    """A process that answers calls: services by name."""

    process: Process
    services: dict[str, Any]
    inside: set["Stream"] = field(default_factory=set)

    @property
    def up(self) -> bool:
        return self.process.alive


class Network:
    """All links. `weather` is what is in force now."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop, self._rng = loop, rng
        self.servers: list[Server] = []
        self.weather: list[Weather] = []
        self.faults = 0
        self.watch: Callable[[str, Any, Any], None] = lambda method, request, answer: None
        self.unexpected: list[str] = []

    def latency(self) -> float:
        """Draw how long one message takes on a good day."""
        return 0.0003 + self._rng.random() ** 3 * 0.02

    def struck(self, kind: str, sender: Process, receiver: Process) -> Weather | None:
        """Draw whether such a fault hits."""
        for weather in self.weather:
            if weather.kind == kind and weather.hits(sender.name, receiver.name):
                self.faults += 1
                return weather
        return None

    def delay(self, sender: Process, receiver: Process) -> float:
        late = self.struck("late", sender, receiver)
        return self.latency() + (late.rng.random() * late.most_s if late else 0.0)

    def pick(self) -> Server | None:
        """Return one server of those that the name stands for, dead ones too."""
        return self._rng.choice(self.servers) if self.servers else None

    def client(
        self, process: Process, clock: SimClock, module: Any, service: str, timeout: float
    ) -> Any:
        """Return the product's client of a service, over this network."""
        descriptor = module.DESCRIPTOR.services_by_name[service]
        settings = _Settings(None, None, timeout, clock)
        return _Remote(descriptor, _Stub(self, process, descriptor), settings)


class _Stub:
    def __init__(self, network: Network, process: Process, descriptor: Any) -> None:
        for method in descriptor.methods:
            make = _StreamMethod if method.server_streaming else _UnaryMethod
            classes = method.input_type._concrete_class, method.output_type._concrete_class
            call = make(network, process, descriptor.name, method.name, *classes)
            setattr(self, method.name, call)


@dataclass
class _Method:
    network: Network
    process: Process
    service: str
    name: str
    request: Any
    answer: Any


class _UnaryMethod(_Method):
    async def __call__(self, request: Any, *, timeout: float, metadata: Any) -> Any:
        network, loop = self.network, self.network.loop
        server = network.pick()
        done: asyncio.Future[Any] = loop.create_future()
        attempt = _Attempt(self, server, request.SerializeToString(), metadata, done)
        timer = loop.call_later(timeout, attempt.late)
        try:
            attempt.send()
            return await done
        finally:
            timer.cancel()
            attempt.gone()


class _Attempt:
    """One request on the wire and its answer."""

    def __init__(
        self,
        method: _UnaryMethod,
        server: Server | None,
        raw: bytes,
        metadata: Any,
        done: "asyncio.Future[Any]",
    ) -> None:
        self._method, self._server, self._raw = method, server, raw
        self._metadata, self._done = dict(metadata), done
        self._tasks: list[asyncio.Task[None]] = []
        self._network, self._loop = method.network, method.network.loop

    def send(self) -> None:
        network, me, server = self._network, self._method.process, self._server
        if server is None:
            self._fail(_NOBODY, "nobody there")
            return
        if network.struck("lost", me, server.process):
            return
        if network.struck("reset", me, server.process):
            self._answer_later(lambda: self._fail(_NOBODY, "connection reset"))
            return
        copies = 2 if network.struck("twice", me, server.process) else 1
        for copy in range(copies):
            at = self._loop.time() + network.delay(me, server.process) * (1 + 3 * copy)
            # Nobody runs in a dead process: the machine answers for it.
            self._loop.post_at(at, self._loop.nobody, self._arrive)

    def _arrive(self) -> None:
        server = self._server
        assert server is not None
        if not server.up:
            self._answer_later(lambda: self._fail(_NOBODY, "connection refused"))
            return
        self._loop.post(server.process, self._begin)

    def _begin(self) -> None:
        assert self._server is not None
        task = self._loop.spawn(self._server.process, self._handle(self._server))
        self._tasks.append(task)

    async def _handle(self, server: Server) -> None:
        network, method = self._network, self._method
        set_caller(
            Caller(
                self._metadata.get("x-kvplane-tenant", "default"),
                self._metadata.get("x-request-id", ""),
            )
        )
        request = method.request.FromString(self._raw)
        handler = getattr(server.services[method.service], method.name)
        deliver: Callable[[], None]
        try:
            answer = await handler(request)
        except Exception as error:  # noqa: BLE001 - as the interceptor does
            if not isinstance(error, KvplaneError | TimeoutError):
                network.unexpected.append(f"{method.name}: {error!r}")
            failure = wire_error(error)
            deliver = lambda: self._finish(failure)  # noqa: E731
        else:
            raw = answer.SerializeToString()
            network.watch(method.name, request, answer)
            deliver = lambda: self._finish(method.answer.FromString(raw))  # noqa: E731
        if network.struck("reply_lost", server.process, method.process):
            return
        self._answer_later(deliver)

    def _answer_later(self, deliver: Callable[[], None]) -> None:
        server = self._server
        assert server is not None
        at = self._loop.time() + self._network.delay(server.process, self._method.process)
        self._loop.post_at(at, self._method.process, deliver)

    def _finish(self, outcome: Any) -> None:
        if self._done.done():
            return
        if isinstance(outcome, BaseException):
            self._done.set_exception(outcome)
        else:
            self._done.set_result(outcome)

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        self._finish(rpc_error(code, details))

    def late(self) -> None:
        self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")

    def gone(self) -> None:
        """The caller waits no more: gRPC cancels the handler, some time later."""
        running = [task for task in self._tasks if not task.done()]
        if running and self._server is not None and self._server.up:
            at = self._loop.time() + self._network.latency()
            for task in running:
                self._loop.post_at(at, self._server.process, task.cancel)


class _StreamMethod(_Method):
    def __call__(self, requests: Any, *, metadata: Any) -> "Stream":
        return Stream(self, requests)


class _Pipe:
    """One direction: in order, with delays, until it is cut."""

    def __init__(self, network: Network, sender: Process, receiver: Process) -> None:
        self._network, self._sender, self._receiver = network, sender, receiver
        self._items: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._last = 0.0
        self.mute = False

    def send(self, item: Any) -> None:
        """Send a message, or an error that ends it."""
        network = self._network
        if self.mute:
            return
        at = network.loop.time() + network.delay(self._sender, self._receiver)
        self._last = max(self._last, at)
        network.loop.post_at(self._last, self._receiver, self._put, item)

    def end(self, error: Any) -> None:
        """Break it now; what is on its way is lost."""
        self._network.loop.post(self._receiver, self._put_first, error)

    def _put(self, item: Any) -> None:
        if self._items and isinstance(self._items[-1], Exception):
            return
        self._items.append(item)
        self._wake()

    def _put_first(self, error: Any) -> None:
        self._items.clear()
        self._items.append(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> Any:
        while not self._items:
            self._waiting = self._network.loop.create_future()
            await self._waiting
        item = self._items[0]
        if isinstance(item, Exception):
            raise item
        return self._items.popleft()


class _End(Exception):
    """The other side has said all it had to say."""


class Stream:
    """A streaming call, as grpc.aio's call object."""

    def __init__(self, method: _StreamMethod, requests: Any) -> None:
        self._method, self._requests = method, requests
        self._network, self._loop = method.network, method.network.loop
        self._over = False
        self._server = server = self._network.pick()
        self._tasks: list[asyncio.Task[None]] = []
        if server is None:
            return
        self._up = _Pipe(self._network, method.process, server.process)
        self._down = _Pipe(self._network, server.process, method.process)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        if self._server is None or (not self._tasks and not self._server.up):
            raise rpc_error(_NOBODY, "connection refused")
        if not self._tasks:
            self._server.inside.add(self)
            self._tasks.append(self._loop.spawn(self._method.process, self._pump()))
            self._tasks.append(self._loop.spawn(self._server.process, self._handle(self._server)))
        try:
            raw = await self._down.get()
        except _End:
            raise StopAsyncIteration from None
        return self._method.answer.FromString(raw)

    async def _pump(self) -> None:
        async for message in self._requests:
            self._up.send(message.SerializeToString())
        self._up.send(_End())

    async def _incoming(self) -> Any:
        while True:
            try:
                yield self._method.request.FromString(await self._up.get())
            except _End:
                return

    async def _handle(self, server: Server) -> None:
        method = self._method
        handler = getattr(server.services[method.service], method.name)
        try:
            async for answer in handler(self._incoming()):
                self._down.send(answer.SerializeToString())
            self._down.send(_End())
        except Exception as error:  # noqa: BLE001 - as the interceptor does
            expected = KvplaneError | TimeoutError | grpc.aio.AioRpcError
            if not isinstance(error, expected):
                self._network.unexpected.append(f"{method.name}: {error!r}")
            self._down.send(wire_error(error))
        finally:
            server.inside.discard(self)

    def mute(self, *, up: bool, down: bool) -> None:
        """Let nothing through any more, without anybody hearing of it."""
        self._up.mute, self._down.mute = up, down

    def cut(self) -> None:
        """Break the connection: both sides see it."""
        if self._over or self._server is None:
            return
        self._over = True
        error = rpc_error(_NOBODY, "connection reset")
        self._down.end(error)
        self._up.end(rpc_error(_NOBODY, "connection reset"))
        self._loop.post(self._method.process, self._tasks[0].cancel)
        if self._server.up:
            self._loop.post(self._server.process, self._tasks[1].cancel)
        self._server.inside.discard(self)

    def cancel(self) -> None:
        """The client ends it; the server's handler is cancelled."""
        if self._over or not self._tasks:
            return
        self._over = True
        self._tasks[0].cancel()
        assert self._server is not None
        self._server.inside.discard(self)
        if self._server.up:
            at = self._loop.time() + self._network.latency()
            self._loop.post_at(at, self._server.process, self._tasks[1].cancel)
