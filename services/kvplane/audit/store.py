"""What storage must do for the audit."""

from typing import Protocol

from kvplane.audit.domain import Ending, Entry, Event, Filter, Place


class AuditStore(Protocol):
    """Each method is one atomic transition; any of them raises Unavailable."""

    async def add(self, event_id: str, entry: Entry) -> None:
        """Write down that something begins now."""
        ...

    async def finish(self, event_id: str, ending: Ending) -> None:
        """Write down how it ended, once."""
        ...

    async def drop(self, event_id: str) -> None:
        """Forget something that began and was not done."""
        ...

    async def list_events(self, wanted: Filter, after: Place | None, limit: int) -> list[Event]:
        """Return events, the newest first, beyond the given place."""
        ...

    async def purge(self, kept_us: int, limit: int) -> int:
        """Delete up to `limit` events that are older, and return how many."""
        ...
