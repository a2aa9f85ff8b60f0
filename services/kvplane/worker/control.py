"""The worker's line to the control plane: registration, heartbeats, the Connect stream."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.api import LeaseApi, WorkerApi
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.worker.holdings import Holdings, duration, seconds
from kvplane.worker.identity import WorkerIdentity

log = logging.getLogger(__name__)

_FIRST_BACKOFF: Final = 0.1
# Below a heartbeat's interval: a service that comes back has its workers back within one.
_MAX_BACKOFF: Final = 0.5
# A server that is silent for so many ticks is away, whatever TCP thinks.
_SILENT_TICKS: Final = 3.0
# Well below any limit on a message; a 1M-token report is about 1.5 MB.
_BATCH_BYTES: Final = 4_000_000
_BATCH_ITEMS: Final = 500


class Control:
    """What is known of the control plane, and the loops that keep it known.

    `epoch` and `away` are plain attributes that the engine's thread may read.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        instance_id: str,
        holdings: Holdings,
        clock: Clock,
        load: Callable[[], routing.Load],
        epoch_ended: Callable[[], None],
    ) -> None:
        self._identity, self._instance_id = identity, instance_id
        self._holdings, self._clock = holdings, clock
        self._load, self._epoch_ended = load, epoch_ended
        self.epoch = 0  # 0: not registered yet
        self._seen = 0  # the highest epoch heard of
        self._streams = 0  # opened so far
        # The circuit breaker: a reason while reads are refused at once.
        self.away: str | None = "not connected to the control plane yet"
        self._known = asyncio.Event()
        self._new_epoch = asyncio.Event()
        # Open from Hello on: what is freed after it was named must be withdrawn. Reports
        # need Welcome's anchor first.
        self._outbox: asyncio.Queue[lease.ConnectRequest] | None = None
        self._welcomed = False
        self._anchor, self._anchor_at = 0, 0.0
        self._sequence = 0
        self._unacknowledged: dict[int, list[str]] = {}  # by the report's sequence

    # -- registration -------------------------------------------------------------

    def register_again(self) -> None:
        """The control plane does not know this epoch (any more)."""
        self._known.clear()

    async def keep_registered(self, workers: WorkerApi) -> None:
        """Register, heartbeat, and register again whenever that is needed. Runs for ever."""
        backoff, interval, silent = _FIRST_BACKOFF, 1.0, False
        while True:
            try:
                if not self._known.is_set():
                    interval = await self._register(workers)
                else:
                    await self._heartbeat(workers)
                backoff, pause, silent = _FIRST_BACKOFF, interval, False
            except KvplaneError as error:
                if error.reason in ("NOT_FOUND", "STALE_EPOCH"):
                    self.register_again()
                if not silent:
                    away = error.reason == "UNAVAILABLE"
                    name = self._identity.worker_id
                    what = "does not answer" if away else f"refuses us, worker {name!r}"
                    log.warning("kvplane: the worker registry %s: %s", what, error)
                silent = True
                pause, backoff = backoff, min(backoff * 2, _MAX_BACKOFF)
            await self._clock.sleep(pause)

    async def _register(self, workers: WorkerApi) -> float:
        worker = self._identity.registration()
        worker.epoch = self._seen
        response = await workers.RegisterWorker(
            routing.RegisterWorkerRequest(worker=worker, instance_id=self._instance_id)
        )
        epoch = response.worker.epoch
        if self.epoch and epoch != self.epoch:
            # What is held stays held until it is ordered to be freed: somebody may still
            # be reading it. The lease service looks at it when Hello names it.
            log.warning(
                "kvplane: worker %s begins epoch %d after %d",
                self._identity.worker_id, epoch, self.epoch,
            )  # fmt: skip
            self._epoch_ended()
        elif not self.epoch:
            log.info("kvplane: worker %s begins epoch %d", self._identity.worker_id, epoch)
        self.epoch = epoch
        self._seen = max(self._seen, epoch)
        self._new_epoch.set()
        self._known.set()
        return seconds(response.heartbeat_interval) or 1.0

    async def _heartbeat(self, workers: WorkerApi) -> None:
        beat = routing.WorkerBeat(
            worker_id=self._identity.worker_id, epoch=self.epoch, load=self._load()
        )
        response = await workers.Heartbeat(routing.HeartbeatRequest(beats=[beat]))
        if not all(result.known for result in response.results):
            log.warning("kvplane: the worker registry forgot us, registering again")
            self._known.clear()

    # -- the stream ---------------------------------------------------------------

    async def keep_connected(self, leases: LeaseApi) -> None:
        """Hold the Connect stream open, again after each loss. Runs for ever."""
        backoff = _FIRST_BACKOFF
        while True:
            await self._known.wait()
            reason = "an error of our own"
            try:
                reason = await self._connection(leases, self.epoch)
            finally:
                was_there = self.away is None
                self.away, self._outbox, self._welcomed = reason, None, False
            if was_there:
                backoff = _FIRST_BACKOFF
                log.warning("kvplane: reads are refused: %s", reason)
            await self._clock.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF)

    async def _connection(self, leases: LeaseApi, epoch: int) -> str:
        """Hold one stream until it ends; return why it did."""
        reason = "the lease service ended the stream"
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_epoch(epoch))
                await self._converse(leases, epoch)
                watch.cancel()
        except* KvplaneError as errors:
            error = errors.exceptions[0]
            reason = f"the lease service is away: {error}"
            self._blame(error)
        except* (TimeoutError, _EpochEnded) as errors:
            reason = str(errors.exceptions[0]) or "the lease service is silent"
        return reason

    def _blame(self, error: BaseException) -> None:
        reason = getattr(error, "reason", "")
        if isinstance(error, KvplaneError) and reason == "STALE_EPOCH":
            # A registry that was emptied may have begun to count anew.
            self._seen = max(self._seen, int(error.metadata.get("current", "0")))
            self.register_again()
        elif reason == "INVALID_FIELD":
            # Sent again it would end the next stream too.
            suspects = [ident for batch in self._unacknowledged.values() for ident in batch]
            log.error("kvplane: not reported: %s; the cause: %s", ", ".join(suspects), error)
            self._holdings.never_report(suspects)

    async def _watch_epoch(self, epoch: int) -> None:
        while self.epoch == epoch:
            self._new_epoch.clear()
            await self._new_epoch.wait()
        raise _EpochEnded("a new epoch began")

    async def _converse(self, leases: LeaseApi, epoch: int) -> None:
        outbox: asyncio.Queue[lease.ConnectRequest] = asyncio.Queue()
        self._streams += 1
        hello = lease.Hello(
            worker_id=self._identity.worker_id,
            epoch=epoch,
            held=self._holdings.handles(),
            number=self._streams,
            hold_limit_blocks=self._holdings.limit_blocks,
        )
        outbox.put_nowait(lease.ConnectRequest(hello=hello))
        self._outbox = outbox
        self._unacknowledged.clear()
        answers = leases.Connect(_drain(outbox))
        tick = 1.0
        while True:
            async with asyncio.timeout(max(tick * _SILENT_TICKS, 1.0)):
                message = await anext(answers, None)
            if message is None:
                return
            kind = message.WhichOneof("message")
            if kind == "welcome":
                tick = seconds(message.welcome.tick_interval) or tick
                self._take_anchor(message.welcome.anchor)
                self._welcomed = True
                self._send_reports(again=True)
                log.info("kvplane: connected to the lease service")
            elif kind == "tick":
                self._take_anchor(message.tick.anchor)
            elif kind == "acknowledged":
                self._unacknowledged.pop(message.acknowledged.sequence, None)
            elif kind == "command":
                answered = self._holdings.command(message.command)
                if answered is not None:
                    self.acknowledge(answered)
            if self._welcomed:
                self.away = None

    def _take_anchor(self, anchor: int) -> None:
        self._anchor, self._anchor_at = anchor, self._clock.monotonic()

    def _time_anchor(self) -> lease.TimeAnchor:
        elapsed = self._clock.monotonic() - self._anchor_at
        return lease.TimeAnchor(anchor=self._anchor, elapsed=duration(elapsed))

    def failed(self, reason: str) -> None:
        """A call got no answer: refuse reads until the server is heard again."""
        self.away = reason

    # -- saying things ------------------------------------------------------------

    def send_new_reports(self) -> None:
        """Report what is prepared and was not reported yet, if there is a stream."""
        self._send_reports(again=False)

    def _send_reports(self, *, again: bool) -> None:
        if not self._welcomed:
            return
        batch: list[lease.Ownership] = []
        size = 0
        for message in self._holdings.reports(self.epoch, again=again):
            batch.append(message)
            size += len(message.digests) + 1000
            if size > _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
                self._report(batch)
                batch, size = [], 0
        if batch:
            self._report(batch)

    def _report(self, batch: list[lease.Ownership]) -> None:
        assert self._outbox is not None
        self._sequence += 1
        report = lease.Report(
            sequence=self._sequence, time_anchor=self._time_anchor(), ownerships=batch
        )
        self._unacknowledged[self._sequence] = [o.params.remote_request_id for o in batch]
        self._outbox.put_nowait(lease.ConnectRequest(report=report))

    def withdraw(self, request_ids: list[str]) -> None:
        """Say that they are freed. Without a stream the next Hello says it."""
        if self._outbox is None:
            return
        handles = [self._holdings.handle(ident) for ident in request_ids]
        for start in range(0, len(handles), _BATCH_ITEMS):
            self._sequence += 1
            withdraw = lease.Withdraw(
                sequence=self._sequence, handles=handles[start : start + _BATCH_ITEMS]
            )
            self._outbox.put_nowait(lease.ConnectRequest(withdraw=withdraw))

    def acknowledge(self, command_id: str) -> None:
        """Answer a command. Without a stream it comes again."""
        if self._outbox is None or not self._welcomed:
            return
        ack = self._holdings.acknowledgement(command_id, self._time_anchor())
        if ack is not None:
            self._outbox.put_nowait(lease.ConnectRequest(command_ack=ack))

    async def deregister(self, workers: WorkerApi) -> None:
        """Say goodbye, if there is anybody to say it to."""
        if self.epoch and self._known.is_set():
            await workers.DeregisterWorker(
                routing.DeregisterWorkerRequest(
                    worker_id=self._identity.worker_id, epoch=self.epoch
                )
            )


class _EpochEnded(Exception):
    """The stream belongs to an epoch that has ended."""


async def _drain(
    outbox: "asyncio.Queue[lease.ConnectRequest]",
) -> AsyncIterator[lease.ConnectRequest]:
    while True:
        yield await outbox.get()
