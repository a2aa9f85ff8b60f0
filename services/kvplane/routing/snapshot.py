"""The router's picture of the live workers, a fraction of a second old."""

import asyncio
from collections.abc import Callable, Collection

import structlog

from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, Unavailable
from kvplane.routing.domain import Worker
from kvplane.routing.policy import Pool, make_pool
from kvplane.routing.store import WorkerStore

_log = structlog.get_logger(__name__)
_SHORTLY_S = 0.05


class Snapshots:
    """Reads the live workers when they are asked for and the last picture is too old.

    One read serves all who wait. While the database is away the last picture stays:
    where an engine is changes seldom, and a dead one is excluded by the caller's retry.
    """

    def __init__(
        self, store: WorkerStore, clock: Clock, *, max_age_s: float, bound_s: float
    ) -> None:
        self._store = store
        self._clock = clock
        self._max_age_s = max_age_s
        self._bound_s = bound_s
        self._workers: dict[str, Worker] | None = None
        self._pools: dict[str, Pool] = {}
        self._now_us = 0
        self._read_at = 0.0
        self._valid_until = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._changes = 0
        self._listener: Callable[[Collection[Worker]], None] = lambda workers: None
        self.reachable = True

    def on_refresh(self, listener: Callable[[Collection[Worker]], None]) -> None:
        """Have `listener` called with each new picture."""
        self._listener = listener

    def invalidate(self) -> None:
        """Read again before the next use: something was written."""
        self._changes += 1
        self._valid_until = float("-inf")

    async def fresh(self) -> None:
        """Make the picture young enough. Raises Unavailable when there is none at all."""
        if self._clock.monotonic() < self._valid_until:
            return
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_heard)
        try:
            # Once it is known to be away, nobody waits for it at length.
            async with asyncio.timeout(self._bound_s if self.reachable else _SHORTLY_S):
                await asyncio.shield(self._reading)
        except (TimeoutError, KvplaneError) as error:
            if self.reachable:
                _log.warning("cannot read the workers", error=str(error))
            self.reachable = False
            if self._workers is None:
                raise Unavailable("the database is away", retry_after=1.0) from error

    def get(self, worker_id: str) -> Worker | None:
        """Return a live worker."""
        return self._workers.get(worker_id) if self._workers else None

    def pool(self, model: str, exclude: frozenset[str]) -> Pool:
        """Return who may serve `model`."""
        pool = None if exclude else self._pools.get(model)
        if pool is None:
            pool = make_pool((self._workers or {}).values(), model, exclude)
            if pool.workers and not exclude:  # not for any name that a client makes up
                self._pools[model] = pool
        return pool

    def now_us(self) -> int:
        """Return the shared clock's time as well as it is known here."""
        return self._now_us + round((self._clock.monotonic() - self._read_at) * 1e6)

    async def _read(self) -> None:
        try:
            while True:
                changes, began = self._changes, self._clock.monotonic()
                live = await self._store.live()
                if changes == self._changes:
                    break
            self.reachable = True
            self._workers = {w.worker_id: w for w in live.workers}
            self._pools = {}
            self._now_us, self._read_at = live.now_us, began
            self._valid_until = began + self._max_age_s
            self._listener(live.workers)
        finally:
            self._reading = None


def _heard(reading: "asyncio.Task[None]") -> None:
    """Take note of a failure that nobody has waited for."""
    if not reading.cancelled():
        reading.exception()
