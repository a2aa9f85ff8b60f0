"""Puts the lease manager together."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from kvplane.client.quotas import NoQuotas, QuotaSource
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.keeper import Keeper
from kvplane.lease.limits import Limits
from kvplane.lease.service import LeaseService
from kvplane.lease.servicer import LeaseServicer
from kvplane.lease.store_sql import SqlLeaseStore
from kvplane.lease.streams import Streams

_DEFAULTS = LeaseConfig()
_RANDOM_IDS = RandomIds()
_NO_QUOTAS = NoQuotas()
log = structlog.get_logger(__name__)


class LeasePart:
    """The lease service: its servicer, and the loops beside it."""

    def __init__(
        self,
        servicer: LeaseServicer,
        service: LeaseService,
        streams: Streams,
        keeper: Keeper,
        clock: Clock,
        config: LeaseConfig,
    ) -> None:
        self.servicer = servicer
        self.service = service
        self.streams = streams
        self.keeper = keeper
        self._clock, self._config = clock, config
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to sweep, after the restart's grace, and to serve streams."""
        self._loops = [
            asyncio.create_task(self._repeat("sweep", self._sweep, self._config.restart_grace_s)),
            asyncio.create_task(self._repeat("pump", self.streams.pump)),
            asyncio.create_task(self._repeat("tick", self.streams.tick)),
        ]

    async def stop(self) -> None:
        """End the streams and the loops."""
        self.streams.finish_all()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []

    async def _sweep(self) -> None:
        await self._clock.sleep(self._config.sweep_interval_s)
        await self.service.sweep()
        await self.service.purge()
        await self.keeper.keep()

    async def _repeat(
        self, name: str, step: Callable[[], Awaitable[None]], after_s: float = 0.0
    ) -> None:
        """Run `step` for ever. It waits by itself; after a failure, this waits."""
        if after_s:
            await self._clock.sleep(after_s)
        failing = False
        while True:
            try:
                await step()
                failing = False
            except Exception as error:
                if not failing:
                    log.warning(
                        "lease.loop_failed",
                        loop=name,
                        error=str(error),
                        exc_info=not isinstance(error, KvplaneError),
                    )
                failing = True
                await self._clock.sleep(1.0)


def build(
    database: Database,
    clock: Clock,
    config: LeaseConfig = _DEFAULTS,
    ids: Ids = _RANDOM_IDS,
    quotas: QuotaSource = _NO_QUOTAS,
) -> LeasePart:
    """Wire everything; nothing runs before `start`."""
    store = SqlLeaseStore(database, config)
    streams = Streams(store, clock, config, ids)
    limits = Limits(quotas)
    service = LeaseService(store, clock, config, ids, streams, limits)
    keeper = Keeper(store, config, limits, streams)
    servicer = LeaseServicer(service, streams, keeper, config)
    return LeasePart(servicer, service, streams, keeper, clock, config)
