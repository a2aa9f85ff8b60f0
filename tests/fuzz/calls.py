"""One call, unary or stream, and all that its caller is told."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from kvplane.kernel.clock import SystemClock
from wire.methods import Method

from fuzz.world import Metadata, World

TIMEOUT_S: Final = 20.0
# A call that has not come back waits for the clock, which stands still.
_PATIENCE_S: Final = 0.5
_STEP_S: Final = 0.1
# A stream that has said nothing for so long has nothing to say.
_QUIET_S: Final = 0.05
_MOST_ANSWERS: Final = 50
# What gRPC's own client says when the stream has ended while it wrote: not the server's word.
_LOST: Final = "Internal error from Core"
_clock: Final = SystemClock()


@dataclass
class Told:
    """What came back."""

    code: str = "OK"
    message: str = ""
    answers: list[bytes] = field(default_factory=list)
    # Initial and trailing, keys and values.
    metadata: list[tuple[str, bytes]] = field(default_factory=list)
    seconds: float = 0.0
    # Time passed, so background work may have been done.
    moved: bool = False

    @property
    def refused(self) -> bool:
        """It is an error."""
        return self.code != "OK"

    @property
    def silent(self) -> bool:
        """Nothing came in time, as from a stream that has nothing to say."""
        return not self.refused and not self.answers

    def everything(self) -> bytes:
        """Return all bytes that the caller got to see."""
        return b"\n".join(
            [
                self.message.encode("utf-8", "surrogatepass"),
                *self.answers,
                *(part for key, value in self.metadata for part in (key.encode(), value)),
            ]
        )

    def add_metadata(self, metadata: Any) -> None:
        """Take what came beside the answers."""
        for key, value in metadata or ():
            self.metadata.append((key, value if isinstance(value, bytes) else value.encode()))

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """Take an error."""
        self.code = error.code().name
        self.message = error.details() or ""
        if self.message == _LOST:
            self.code = "CANCELLED"
        self.add_metadata(error.initial_metadata())
        self.add_metadata(error.trailing_metadata())


async def unary(world: World, method: Method, raw: bytes, metadata: Metadata) -> Told:
    """Make a call of one request."""
    told = Told()
    begun = _clock.monotonic()
    call = world.stub(method)(raw, metadata=metadata, timeout=TIMEOUT_S)
    if method.descriptor.server_streaming:
        await _listen(call, told, _MOST_ANSWERS)
        call.cancel()
    else:
        answer = asyncio.ensure_future(_answer(call, told))
        await asyncio.wait({answer}, timeout=_PATIENCE_S)
        while not answer.done():
            told.moved = True
            world.clock.advance(_STEP_S)
            await asyncio.wait({answer}, timeout=0.002)
        await answer
    told.seconds = _clock.monotonic() - begun
    await world.settle()
    return told


async def _answer(call: Any, told: Told) -> None:
    try:
        told.answers.append(await call)
        told.add_metadata(await call.initial_metadata())
        told.add_metadata(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        told.fail(error)


async def _listen(call: Any, told: Told, most: int) -> bool:
    """Read what a stream says until it is quiet; return whether it has ended."""
    try:
        for number in range(most):
            wait = _QUIET_S if number else 4 * _QUIET_S
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait({reading}, timeout=wait)
            if not reading.done():
                reading.cancel()
                return False
            answer = await reading
            if answer is grpc.aio.EOF:
                return True
            told.answers.append(answer)
    except grpc.aio.AioRpcError as error:
        told.fail(error)
        return True
    return False


class Talk:
    """A stream both ways, message by message."""

    def __init__(self, world: World, method: Method, metadata: Metadata) -> None:
        self._world = world
        self._call = world.stub(method)(metadata=metadata, timeout=TIMEOUT_S)
        self.over = False

    async def say(self, raw: bytes) -> Told:
        """Send a message and return what came of it, as far as it did."""
        told = Told()
        begun = _clock.monotonic()
        try:
            await self._call.write(raw)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.over = True  # reading says why
        reading = asyncio.ensure_future(self._call.read())
        await asyncio.wait({reading}, timeout=4 * _QUIET_S)
        try:
            if reading.done():
                answer = await reading
                self.over = answer is grpc.aio.EOF
                if not self.over:
                    told.answers.append(answer)
            else:
                # Nothing is said to it; a cancelled read would end the call.
                self.over = True
        except grpc.aio.AioRpcError as error:
            told.fail(error)
            self.over = True
        told.seconds = _clock.monotonic() - begun
        await self._world.settle()
        return told

    async def leave(self) -> None:
        """End it as a client does that dies."""
        self._call.cancel()
        await self._world.settle()
