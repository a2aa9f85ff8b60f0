"""Use cases of the audit: write down, list, delete what is too old."""

import structlog

from kvplane.audit import domain
from kvplane.audit.domain import AuditConfig, Ending, Entry, Event, Filter, Place
from kvplane.audit.store import AuditStore
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.ids import Ids

log = structlog.get_logger(__name__)
_PURGE_EVERY_S = 3600.0
_PURGE_BATCH = 1000


class AuditLog:
    """Written by all services; requests are valid when they get to `list_events`."""

    def __init__(self, store: AuditStore, clock: Clock, ids: Ids, config: AuditConfig) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._kept_us = config.kept_days * domain.DAY_US

    async def begin(self, entry: Entry) -> str:
        """Write down what is about to be done, and return the event's id.

        Raises Unavailable: then it must not be done.
        """
        event_id = self._ids.new("event")
        await self._store.add(event_id, entry)
        return event_id

    async def finish(self, event_id: str, ending: Ending) -> None:
        """Write down how it ended. Without the database it stays as started."""
        try:
            await self._store.finish(event_id, ending)
        except KvplaneError as error:
            self._lost(event_id, ending.outcome.name, error)

    async def drop(self, event_id: str) -> None:
        """Forget what was not done. Without the database it stays as started."""
        try:
            await self._store.drop(event_id)
        except KvplaneError as error:
            self._lost(event_id, "dropped", error)

    async def list_events(self, wanted: Filter, after: Place | None, limit: int) -> list[Event]:
        """Return events, the newest first, beyond the given place."""
        return await self._store.list_events(wanted, after, limit)

    async def purge_forever(self) -> None:
        """Delete what is too old, now and every hour."""
        while True:
            try:
                await self.purge()
            except Exception as error:
                log.warning(
                    "audit.purge_failed",
                    error=str(error),
                    exc_info=not isinstance(error, KvplaneError),
                )
            await self._clock.sleep(_PURGE_EVERY_S)

    async def purge(self) -> int:
        """Delete all that is too old and return how many. Raises Unavailable."""
        count = 0
        while True:
            deleted = await self._store.purge(self._kept_us, _PURGE_BATCH)
            count += deleted
            if deleted < _PURGE_BATCH:
                return count

    def _lost(self, event_id: str, outcome: str, error: KvplaneError) -> None:
        log.warning("audit.outcome_lost", event_id=event_id, outcome=outcome, error=error.message)
