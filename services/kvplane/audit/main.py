"""The audit, put together."""

import asyncio
import contextlib

from kvplane.audit.domain import AuditConfig
from kvplane.audit.service import AuditLog
from kvplane.audit.servicer import AuditServicer
from kvplane.audit.store_sql import SqlAuditStore
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.kernel.ids import Ids, RandomIds

# Hold no state.
_DEFAULT_CONFIG = AuditConfig()
_RANDOM_IDS = RandomIds()


class AuditPart:
    """The servicer, and what deletes old events."""

    def __init__(self, log: AuditLog) -> None:
        self.servicer = AuditServicer(log)
        self._log = log
        self._purger: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to delete what is too old."""
        self._purger = asyncio.create_task(self._log.purge_forever())

    async def stop(self) -> None:
        """End that."""
        if self._purger is not None:
            self._purger.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._purger
            self._purger = None


def log(
    database: Database,
    clock: Clock,
    config: AuditConfig = _DEFAULT_CONFIG,
    ids: Ids = _RANDOM_IDS,
) -> AuditLog:
    """Return the log over a migrated database, whose clock is its own."""
    return AuditLog(SqlAuditStore(database), clock, ids, config)
