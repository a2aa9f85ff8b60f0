"""The workers' long-lived streams on this replica, and what is pushed down on them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, StaleEpoch, Unavailable
from kvplane.kernel.ids import Ids
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.metrics import STREAMS
from kvplane.lease.store import Command, LeaseStore
from kvplane.lease.values import Handle
from kvplane.lease.waiting import wait_or_sleep

# A worker that reads nothing any more is cut off.
_MAX_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first answer."""

    anchor: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A new time anchor."""

    anchor: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A report or withdrawal is stored."""

    sequence: int


Event = Welcome | Tick | Acknowledged | Command


class Stream:
    """One worker's stream: events to send, until it is finished."""

    def __init__(self, worker_id: str, epoch: int, stream_id: str) -> None:
        self.worker_id, self.epoch, self.stream_id = worker_id, epoch, stream_id
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._error: BaseException | None = None
        self._finished = False
        self._pushed: set[str] = set()

    def put(self, event: Event) -> None:
        """Queue an event to send; nothing after the end."""
        if self._finished:
            return
        if self._queue.qsize() >= _MAX_QUEUED:
            self.finish(Unavailable("the worker does not read its stream"))
            return
        self._queue.put_nowait(event)

    def push(self, commands: list[Command]) -> None:
        """Queue the open commands that this stream has not carried yet."""
        for command in commands:
            if command.command_id not in self._pushed:
                self.put(command)
        # One that is no longer open is not repeated, so it need not be remembered.
        self._pushed = {command.command_id for command in commands}

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream once what is queued is sent; the first word counts."""
        if not self._finished:
            self._finished = True
            self._error = error
            self._queue.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Yield what is to be sent; raise what the stream was finished with."""
        while (event := await self._queue.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error


class Streams:
    """All streams of this replica. `pump` and `tick` run in the background."""

    def __init__(self, store: LeaseStore, clock: Clock, config: LeaseConfig, ids: Ids) -> None:
        self._store, self._clock, self._config, self._ids = store, clock, config, ids
        self._open: dict[str, Stream] = {}
        self._news = asyncio.Event()

    async def open(
        self,
        worker_id: str,
        epoch: int,
        number: int,
        held: list[Handle],
        hold_limit_blocks: int = 0,
    ) -> Stream:
        """Welcome a worker; an older stream of it ends. Raises StaleEpoch, Unavailable."""
        stream = Stream(worker_id, epoch, self._ids.new("stream"))
        welcomed = await self._store.hello(
            worker_id, epoch, stream.stream_id, number, held, hold_limit_blocks
        )
        older = self._open.get(worker_id)
        if older is not None:
            self._end_replaced(older, epoch)
        self._open[worker_id] = stream
        STREAMS.set(len(self._open))
        stream.put(Welcome(welcomed.now_us))
        self.look()
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream that is over."""
        if self._open.get(stream.worker_id) is stream:
            del self._open[stream.worker_id]
        STREAMS.set(len(self._open))

    def look(self) -> None:
        """There may be commands or ended epochs: look at once."""
        self._news.set()

    def finish_all(self) -> None:
        """End all streams: this replica stops."""
        for stream in self._open.values():
            stream.finish(Unavailable("the lease service is stopping", retry_after=0.1))

    async def pump(self) -> None:
        """Wait for news, own or of another replica, and pass it down."""
        await wait_or_sleep(self._news, self._clock, self._config.poll_interval_s)
        if not self._open:
            return
        with contextlib.suppress(Unavailable):  # the next look will do
            await self.pump_now()

    async def pump_now(self) -> None:
        """Pass down commands, and end the streams that are no longer their worker's."""
        streams = list(self._open.values())
        views = await self._store.watch([stream.worker_id for stream in streams])
        for stream in streams:
            view = views.get(stream.worker_id)
            if view is None:
                continue
            if view.epoch > stream.epoch or view.stream_id != stream.stream_id:
                self._end_replaced(stream, view.epoch)
            else:
                stream.push(view.commands)

    async def tick(self) -> None:
        """Give every worker a new anchor. None while the storage is away: theirs grow older."""
        await self._clock.sleep(self._config.tick_interval_s)
        if not self._open:
            return
        with contextlib.suppress(Unavailable):
            anchor = await self._store.now_us()
            for stream in list(self._open.values()):
                stream.put(Tick(anchor))

    def _end_replaced(self, stream: Stream, epoch: int) -> None:
        error: KvplaneError
        if epoch > stream.epoch:
            error = StaleEpoch(stream.worker_id, stream.epoch)
        else:
            error = Unavailable("a newer stream of this worker has taken over")
        stream.finish(error)
