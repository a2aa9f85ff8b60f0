"""The worker registry: epochs, signs of life, and telling the lease service who is gone."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.routing.domain import Profile, RoutingConfig, Worker
from kvplane.routing.metrics import WORKERS_LOST
from kvplane.routing.peers import LeasePeer
from kvplane.routing.store import Beat, BeatAnswer, RouteStore, Seen, WorkerFilter, WorkerStore

_log = structlog.get_logger(__name__)


class Registry:
    """Use cases of WorkerService, and the loop that notices silence."""

    def __init__(
        self,
        store: WorkerStore,
        routes: RouteStore,
        leases: LeasePeer,
        clock: Clock,
        config: RoutingConfig,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called after each write that a router must see at once."""
        self._store = store
        self._routes = routes
        self._leases = leases
        self._clock = clock
        self._config = config
        self._changed = changed
        self._grace_until = clock.monotonic() + config.worker_timeout_s
        self._loop: asyncio.Task[None] | None = None

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a worker should be heard."""
        return self._config.heartbeat_interval_s

    async def register(self, profile: Profile, instance_id: str, seen: int) -> Worker:
        """Begin or go on with an epoch. The old one has ended when this returns.

        Unless the lease service is away: then the sweeper tells it later.
        """
        worker = await self._store.register(profile, instance_id, seen)
        self._changed()
        await self._settle_debt(worker)
        return worker

    async def beat(self, beats: Sequence[Beat]) -> list[BeatAnswer]:
        """Note signs of life; an unknown one must register again."""
        return await self._store.beat(beats)

    async def drain(self, worker_id: str, *, undo: bool) -> Seen:
        """Send no new turns to a worker, or send them again."""
        seen = await self._store.drain(worker_id, undo=undo)
        self._changed()
        return seen

    async def deregister(self, worker_id: str, epoch: int) -> None:
        """End a worker's epoch at its own word."""
        worker = await self._store.deregister(worker_id, epoch)
        self._changed()
        await self._settle_debt(worker)

    async def get(self, worker_id: str) -> Seen:
        """Read one. Raises NotFound."""
        return await self._store.get(worker_id)

    async def page(self, wanted: WorkerFilter, after: str, limit: int) -> list[Seen]:
        """Read some, by worker id."""
        return await self._store.page(wanted, after, limit)

    async def sweep(self) -> None:
        """Lose silent workers, end epochs at the lease service, forget old routes.

        Nobody is lost within one timeout of a start, of a pause of this process or of a time
        when the database was away or slow: workers could not be heard then. Raises
        Unavailable when it is away.
        """
        timeout_s, began = self._config.worker_timeout_s, self._clock.monotonic()
        silent_us = round(timeout_s * 1e6) if began >= self._grace_until else None

        def in_time() -> bool:
            return self._clock.monotonic() - began < timeout_s / 2

        quick = False
        try:
            found = await self._store.sweep(silent_us, in_time)
            quick = in_time()
        finally:
            if not quick:
                self._grace_until = self._clock.monotonic() + timeout_s
        if found.lost:
            WORKERS_LOST.inc(len(found.lost))
            _log.warning("workers lost", worker_ids=found.lost)
            self._changed()
        for worker_id, current_epoch in found.pending:
            if not await self._leases.end_epoch(worker_id, current_epoch):
                break
            await self._store.voided(worker_id, current_epoch)
        await self._routes.purge(round(self._config.route_kept_s * 1e6))

    def start(self) -> None:
        """Begin to sweep."""
        self._grace_until = self._clock.monotonic() + self._config.worker_timeout_s
        self._loop = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """Stop sweeping."""
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
            self._loop = None

    async def _settle_debt(self, worker: Worker) -> None:
        if worker.voided_below >= worker.void_below:
            return
        if await self._leases.end_epoch(worker.worker_id, worker.void_below):
            with contextlib.suppress(KvplaneError):
                await self._store.voided(worker.worker_id, worker.void_below)

    async def _sweep_for_ever(self) -> None:
        config, looked_at = self._config, self._clock.monotonic()
        while True:
            await self._clock.sleep(config.sweep_interval_s)
            now = self._clock.monotonic()
            late_s = now - looked_at - config.sweep_interval_s
            if late_s > config.worker_timeout_s / 2:
                _log.warning("this process stood still", seconds=round(late_s, 1))
                self._grace_until = now + config.worker_timeout_s
            looked_at = now
            try:
                await self.sweep()
            except KvplaneError as error:
                _log.warning("sweep failed", error=str(error))
            except Exception:  # noqa: BLE001 - the loop must live
                _log.exception("sweep failed")
