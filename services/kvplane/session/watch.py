"""Changes of sessions, to whoever watches them in this process."""

import asyncio
from collections import defaultdict

from kvplane.session.domain import Session

# A watcher this far behind is served by its next look at the store instead.
_MAX_PENDING = 10_000


class Subscription:
    """The newest state of each session that has changed since it was last asked."""

    def __init__(self) -> None:
        self._pending: dict[str, Session] = {}
        self._event = asyncio.Event()
        self.closed = False

    async def wait(self) -> None:
        """Wait for a change or the end."""
        await self._event.wait()

    def take(self) -> list[Session]:
        """Return the changes, oldest first."""
        self._event.clear()
        changed = sorted(self._pending.values(), key=lambda session: session.version)
        self._pending.clear()
        return changed

    def put(self, session: Session) -> None:
        """Keep it, unless a newer state of it is kept already."""
        kept = self._pending.get(session.session_id)
        if kept is not None and kept.version >= session.version:
            return
        if kept is not None or len(self._pending) < _MAX_PENDING:
            self._pending[session.session_id] = session
        self._event.set()

    def close(self) -> None:
        """End the watch."""
        self.closed = True
        self._event.set()


class Hub:
    """Who watches which tenant."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, set[Subscription]] = defaultdict(set)

    def subscribe(self, tenant_id: str) -> Subscription:
        """Begin to collect a tenant's changes."""
        subscription = Subscription()
        self._subscriptions[tenant_id].add(subscription)
        return subscription

    def unsubscribe(self, tenant_id: str, subscription: Subscription) -> None:
        """Stop collecting."""
        self._subscriptions[tenant_id].discard(subscription)
        if not self._subscriptions[tenant_id]:
            del self._subscriptions[tenant_id]

    def publish(self, session: Session) -> None:
        """Tell the watchers of its tenant. Call it after the commit."""
        for subscription in self._subscriptions.get(session.tenant_id, ()):
            subscription.put(session)

    def close(self) -> None:
        """End all watches."""
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.close()
