"""The registry, put together."""

import asyncio
import contextlib

from kvplane.client.api import LeaseApi
from kvplane.client.quotas import NoQuotas, QuotaSource
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.session.blocks import LeaseBlocks
from kvplane.session.domain import SessionConfig
from kvplane.session.service import SessionService
from kvplane.session.servicer import SessionServicer
from kvplane.session.store_sql import SqlSessionStore


class SessionPart:
    """The registry's servicer and its background work."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.servicer = SessionServicer(service)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to sweep."""
        self._sweeper = asyncio.create_task(self.service.sweep_forever())

    async def stop(self) -> None:
        """Stop sweeping and end all watches. Calls under way finish by themselves."""
        self.service.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None


# Configs and ids hold no state.
_DEFAULT_CONFIG = SessionConfig()
_RANDOM_IDS = RandomIds()
_NO_QUOTAS = NoQuotas()


def build(
    database: Database,
    clock: Clock,
    leases: LeaseApi,
    config: SessionConfig = _DEFAULT_CONFIG,
    ids: Ids = _RANDOM_IDS,
    quotas: QuotaSource = _NO_QUOTAS,
) -> SessionPart:
    """Put the registry together over a migrated database; `quotas` are the tenants' limits."""
    store = SqlSessionStore(database, config)
    blocks = LeaseBlocks(leases, config.lease_bound_s)
    return SessionPart(SessionService(store, blocks, clock, config, ids, quotas))
