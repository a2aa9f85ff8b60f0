"""The registry's use cases."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from kvplane.client.quotas import QuotaSource
from kvplane.kernel import ids as kernel_ids
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.ids import Ids
from kvplane.session import domain
from kvplane.session.batching import Batches
from kvplane.session.domain import (
    BeginTurn,
    Begun,
    CompleteTurn,
    Session,
    SessionConfig,
    SessionFilter,
    SessionRef,
    SessionState,
)
from kvplane.session.metrics import count_turn
from kvplane.session.quota import OverQuota
from kvplane.session.store import FreeTask, NewTurn, SessionStore
from kvplane.session.usage import Completed, Usage
from kvplane.session.watch import Hub, Subscription

_log = logging.getLogger(__name__)
_PAGE = 500


class Blocks(Protocol):
    """The lease service, as far as sessions go. Both calls are bounded."""

    async def held(self, session_id: str) -> list[str]:
        """Return ids of the live ownerships; none when they cannot be known."""
        ...

    async def free(self, tenant_id: str, session_id: str) -> None:
        """Free a session's blocks; raises KvplaneError."""
        ...


class SessionService:
    """Sessions of tenants. Requests are valid when they get here."""

    def __init__(
        self,
        store: SessionStore,
        blocks: Blocks,
        clock: Clock,
        config: SessionConfig,
        ids: Ids,
        quotas: QuotaSource,
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._clock = clock
        self._config = config
        self._ids = ids
        self._quotas = quotas
        self._hub = Hub()
        self._begins: Batches[NewTurn, Begun | OverQuota] = Batches(self._begin_turns)
        self._completes: Batches[CompleteTurn, Completed] = Batches(self._complete_turns)

    async def begin_turn(self, tenant_id: str, request: BeginTurn) -> Begun | OverQuota:
        """Find or make the session and open its next turn; the same answer to a repetition.

        Raises QuotaExceeded beyond a hard limit.
        """
        # Two replicas that get the same request at the same moment must make the same
        # session. For a named one the name sees to that, otherwise the id must.
        new_id = (
            self._ids.new("session")
            if request.name
            else kernel_ids.derived("session", tenant_id, request.request_id)
        )
        answer = await self._begins.submit(tenant_id, NewTurn(request, new_id))
        if isinstance(answer, Begun) and not answer.replayed:
            self._hub.publish(answer.session)
        return answer

    async def _begin_turns(
        self, tenant_id: str, turns: Sequence[NewTurn]
    ) -> list[Begun | OverQuota | KvplaneError]:
        return await self._store.begin_turns(tenant_id, turns, await self._quotas.of(tenant_id))

    async def _complete_turns(
        self, tenant_id: str, reports: Sequence[CompleteTurn]
    ) -> list[Completed | KvplaneError]:
        quotas = await self._quotas.of(tenant_id)
        return await self._store.complete_turns(tenant_id, reports, quotas)

    async def complete_turn(self, tenant_id: str, report: CompleteTurn) -> Session | None:
        """Close a turn; the first outcome stays. None for one without a session.

        Raises NotFound.
        """
        completed = await self._completes.submit(tenant_id, report)
        if completed.session is not None:
            self._hub.publish(completed.session)
        if completed.used is not None:
            count_turn(tenant_id, completed.used)
        return completed.session

    async def usage(self, tenant_id: str) -> tuple[Usage, int]:
        """Return what the tenant's turns have used, and its active sessions."""
        return await self._store.usage(tenant_id)

    async def create(self, tenant_id: str, name: str, model: str) -> tuple[Session, bool]:
        """Return the active session of that name, and whether it is new.

        Raises QuotaExceeded beyond a hard limit.
        """
        quotas = await self._quotas.of(tenant_id)
        session, created = await self._store.create(
            tenant_id, name, model, self._ids.new("session"), quotas
        )
        if created:
            self._hub.publish(session)
        return session, created

    async def get(self, tenant_id: str, ref: SessionRef) -> tuple[Session, list[str]]:
        """Return a session and its live ownerships. Raises NotFound."""
        session = await self._store.get(tenant_id, ref)
        return session, await self._blocks.held(session.session_id)

    async def list_sessions(
        self, tenant_id: str, which: SessionFilter, after: tuple[int, str] | None, limit: int
    ) -> list[Session]:
        """Return a page of sessions, newest first."""
        return await self._store.list_sessions(tenant_id, which, after, limit)

    async def end(self, tenant_id: str, ref: SessionRef) -> tuple[Session, bool]:
        """End a session, and return whether it was active.

        Its blocks are freed, now or as soon as the lease service is back. Raises NotFound.
        """
        session, was_active = await self._store.end(tenant_id, ref)
        self._hub.publish(session)
        if session.free_due_us is not None:
            await self._free(FreeTask(tenant_id, session.session_id, session.free_due_us))
        return session, was_active

    async def watch(self, tenant_id: str, session_id: str = "") -> AsyncIterator[Session]:
        """Yield the present state, then changes; only the newest of several of one session.

        All of a tenant's: begins with the active ones and ends with the service. One
        session: ends with the session. Raises NotFound.
        """
        subscription = self._hub.subscribe(tenant_id)
        try:
            async with aclosing(self._changes(tenant_id, session_id, subscription)) as changes:
                async for session in changes:
                    yield session
        finally:
            self._hub.unsubscribe(tenant_id, subscription)

    async def _changes(
        self, tenant_id: str, session_id: str, subscription: Subscription
    ) -> AsyncGenerator[Session]:
        overlap_us = domain.us(self._config.watch_overlap_s)
        newest_us = await self._store.now_us()
        next_poll = self._clock.monotonic() + self._config.watch_poll_s
        seen: dict[str, int] = {}
        async for session in self._present(tenant_id, session_id):
            seen[session.session_id] = session.version
            yield session
            if session_id and session.state is not SessionState.ACTIVE:
                return
        while not subscription.closed:
            await self._wait(subscription, next_poll - self._clock.monotonic())
            changed = subscription.take()
            if self._clock.monotonic() >= next_poll:
                changed += await self._changed_since(tenant_id, newest_us - overlap_us)
                next_poll = self._clock.monotonic() + self._config.watch_poll_s
            for session in changed:
                if session_id and session.session_id != session_id:
                    continue
                if session.version <= seen.get(session.session_id, 0):
                    continue
                seen[session.session_id] = session.version
                newest_us = max(newest_us, session.version)
                yield session
                if session_id and session.state is not SessionState.ACTIVE:
                    return
            # Older versions cannot come again.
            horizon = newest_us - overlap_us
            seen = {key: version for key, version in seen.items() if version >= horizon}

    async def _present(self, tenant_id: str, session_id: str) -> AsyncIterator[Session]:
        if session_id:
            yield await self._store.get(tenant_id, SessionRef(session_id))
            return
        which = SessionFilter(states=(SessionState.ACTIVE,))
        after: tuple[int, str] | None = None
        while True:
            page = await self._store.list_sessions(tenant_id, which, after, _PAGE)
            for session in page:
                yield session
            if len(page) < _PAGE:
                return
            after = (page[-1].create_us, page[-1].session_id)

    async def _wait(self, subscription: Subscription, seconds: float) -> None:
        """Wait for a change in this process, or that long."""
        event = asyncio.ensure_future(subscription.wait())
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, seconds)))
        try:
            await asyncio.wait((event, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            event.cancel()
            timer.cancel()

    async def _changed_since(self, tenant_id: str, since_us: int) -> list[Session]:
        changed: list[Session] = []
        after = (since_us, "")
        while True:
            page = await self._store.changes(tenant_id, after, _PAGE)
            changed += page
            if len(page) < _PAGE:
                return changed
            after = (page[-1].version, page[-1].session_id)

    async def sweep(self) -> None:
        """Expire idle sessions, free what is due, forget what ended long ago: a bounded pass."""
        limit = self._config.sweep_batch
        for session in await self._store.expire_idle(limit):
            self._hub.publish(session)
        tasks = await self._store.claim_frees(limit)
        await asyncio.gather(*(self._free(task) for task in tasks))
        await self._store.forget_ended(limit)

    async def sweep_forever(self) -> None:
        """Sweep at an interval, whatever happens."""
        while True:
            await self._clock.sleep(self._config.sweep_interval_s)
            try:
                await self.sweep()
            except KvplaneError as error:
                _log.warning("sweep of sessions failed: %s", error.message)
            except Exception:  # noqa: BLE001 - the next pass may work
                _log.exception("sweep of sessions failed")

    def close(self) -> None:
        """End all watches."""
        self._hub.close()

    async def _free(self, task: FreeTask) -> None:
        try:
            await self._blocks.free(task.tenant_id, task.session_id)
            await self._store.freed(task)
        except KvplaneError as error:
            # The row says that it is due; the sweeper tries again.
            _log.info("session %s: blocks not freed yet: %s", task.session_id, error.message)
