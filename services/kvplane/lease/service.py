"""The use cases of the lease manager."""

from kvplane.kernel.clock import Clock
from kvplane.kernel.ids import Ids
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.limits import Limits
from kvplane.lease.metrics import ENDED, GRANTS, NOT_RENEWED, RENEWED, UNKNOWN
from kvplane.lease.store import (
    Effects,
    Granted,
    GrantOrder,
    LeaseQuota,
    LeaseRef,
    LeaseStore,
    Listed,
    Page,
    Renewal,
    Reported,
    ReportedItem,
)
from kvplane.lease.streams import Streams
from kvplane.lease.values import (
    Handle,
    Holder,
    Lease,
    LeaseState,
    Ownership,
    OwnershipState,
    Payload,
    micros,
)
from kvplane.lease.waiting import Arrivals

# No session has as many live ownerships; more are not asked to hold.
_MAX_ASKED = 64
# Transactions of one sweep, so that it does not crowd out the calls.
_MAX_SWEEPS = 20
# Beside others that take as many, a tenant may get a lease too many rather than wait.
_MAX_CROWDED = 50


class LeaseService:
    """Transitions of the store, and the news of them for those who wait in this process."""

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        config: LeaseConfig,
        ids: Ids,
        streams: Streams,
        limits: Limits,
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._ids = ids
        self._streams = streams
        self._limits = limits
        self._arrivals = Arrivals(clock)

    async def report(
        self,
        worker_id: str,
        epoch: int,
        sent_by_us: int,
        items: list[ReportedItem],
        stream_id: str | None = None,
    ) -> Reported:
        """Store what a worker holds and wake those who wait for it."""
        reported = await self._store.report(worker_id, epoch, sent_by_us, items, stream_id)
        self._tell(reported.effects)
        for item in items:
            own = item.ownership
            self._arrivals.announce(
                (("own", own.ownership_id), ("session", own.tenant_id, own.session_id))
            )
        return reported

    async def now_us(self) -> int:
        """Return a time anchor."""
        return await self._store.now_us()

    async def withdraw(
        self, worker_id: str, epoch: int, handles: list[Handle]
    ) -> list[OwnershipState | None]:
        """Take note of freed blocks; None for a handle never reported."""
        withdrawn = await self._store.withdraw(worker_id, epoch, handles)
        self._tell(withdrawn.effects)
        return withdrawn.states

    async def grant(self, order: GrantOrder, wait_us: int) -> Granted:
        """Give a lease or refuse it, waiting for a report that may be under way."""
        lease_id = self._ids.new("lease")
        if order.tenant_id:
            await self._limits.learn(order.tenant_id)
        crowded = 0
        wait_s = min(wait_us / 1e6, self._config.max_wait_s)
        until = self._clock.monotonic() + wait_s
        key = (
            ("session", order.tenant_id or "", order.session_id)
            if order.session_id
            else ("own", order.ownership_id)
        )
        with self._arrivals.listen(key) as listener:
            while True:
                left = until - self._clock.monotonic()
                quota = LeaseQuota(self._limits.leases, exact=crowded < _MAX_CROWDED)
                granted = await self._store.grant(order, lease_id, final=left <= 0, quota=quota)
                self._tell(granted.effects)
                if granted.limit_of:
                    await self._limits.learn(granted.limit_of)
                    continue
                if granted.crowded:
                    crowded += 1
                    continue
                if not granted.pending:
                    break
                # The poll is for reports that other replicas have taken.
                await listener.wait(min(left, self._config.report_poll_interval_s))
        GRANTS.labels("granted" if granted.refusal is None else granted.refusal.name.lower()).inc()
        return granted

    async def begin_read(
        self, ref: LeaseRef, holder: Holder, ttl_us: int
    ) -> tuple[Lease, Ownership, Payload, int]:
        """Check a lease before its read."""
        return await self._store.begin_read(ref, holder, ttl_us)

    async def renew(self, holder: Holder, refs: list[LeaseRef], ttl_us: int) -> list[Renewal]:
        """Extend leases, item by item."""
        renewals, effects = (
            await self._store.renew(holder, refs, ttl_us) if refs else ([], Effects())
        )
        self._tell(effects)
        renewed = sum(item.renewed for item in renewals)
        unknown = sum(item.state is None for item in renewals)
        RENEWED.inc(renewed)
        UNKNOWN.inc(unknown)
        NOT_RENEWED.inc(len(renewals) - renewed - unknown)
        return renewals

    async def release(self, holder: Holder, refs: list[LeaseRef]) -> list[LeaseState | None]:
        """End leases at their holder's word, item by item."""
        states, effects = await self._store.release(holder, refs) if refs else ([], Effects())
        self._tell(effects)
        return states

    async def revoke(self, tenant_id: str, lease_id: str) -> tuple[Lease, int]:
        """Take a lease away."""
        lease, now_us, effects = await self._store.revoke(tenant_id, lease_id)
        self._tell(effects)
        return lease, now_us

    async def free_session(self, tenant_id: str, session_id: str) -> tuple[int, int]:
        """Free all that a session holds; return how many at once and how many drain."""
        freed, draining, effects = await self._store.free_session(tenant_id, session_id)
        self._tell(effects)
        return freed, draining

    async def extend_hold(self, tenant_id: str, session_id: str, hold_us: int) -> int:
        """Ask a session's owners to hold longer; return how many were asked."""
        hold_us = min(hold_us, micros(self._config.max_hold_s))
        command_ids = [self._ids.new("cmd") for _ in range(_MAX_ASKED)]
        asked, effects = await self._store.extend_hold(tenant_id, session_id, hold_us, command_ids)
        self._tell(effects)
        return asked

    async def end_epoch(self, worker_id: str, current_epoch: int) -> tuple[int, int]:
        """Void a worker's older epochs; return how many ownerships and leases were lost."""
        owned, held, effects = await self._store.end_epoch(worker_id, current_epoch)
        self._tell(effects)
        return owned, held

    async def acknowledge(
        self,
        worker_id: str,
        epoch: int,
        command_id: str,
        *,
        done: bool,
        sent_by_us: int,
        hold_us: int,
    ) -> None:
        """Take note of what an owner did about a command."""
        effects = await self._store.acknowledge(
            worker_id,
            epoch,
            command_id,
            done=done,
            sent_by_us=sent_by_us,
            hold_us=min(hold_us, micros(self._config.max_hold_s)),
        )
        self._tell(effects)

    async def get_ownership(
        self, tenant_id: str, ownership_id: str
    ) -> tuple[Ownership, Payload, int]:
        """Return one ownership of the tenant."""
        return await self._store.get_ownership(tenant_id, ownership_id)

    async def list_ownerships(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[OwnershipState],
        page: Page,
    ) -> Listed:
        """Return a page of the tenant's ownerships, newest first."""
        return await self._store.list_ownerships(tenant_id, session_id, worker_id, states, page)

    async def get_lease(self, tenant_id: str, lease_id: str) -> tuple[Lease, int]:
        """Return one lease of the tenant."""
        return await self._store.get_lease(tenant_id, lease_id)

    async def list_leases(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[LeaseState],
        page: Page,
    ) -> Listed:
        """Return a page of the tenant's leases, newest first."""
        return await self._store.list_leases(tenant_id, session_id, worker_id, states, page)

    async def sweep(self) -> tuple[int, int]:
        """End what time has ended; return how many leases and how many holds."""
        leases = holds = 0
        for _ in range(_MAX_SWEEPS):
            swept = await self._store.sweep(self._config.sweep_rows)
            self._tell(swept.effects)
            leases += swept.ended_leases
            holds += swept.ended_ownerships
            if not swept.more:
                break
        ENDED.labels("lease").inc(leases)
        ENDED.labels("hold").inc(holds)
        return leases, holds

    async def purge(self) -> int:
        """Delete rows that ended long ago, a bounded number; return how many."""
        count = 0
        for _ in range(_MAX_SWEEPS):
            deleted = await self._store.purge(
                self._config.sweep_rows, micros(self._config.retention_s)
            )
            count += deleted
            if deleted < self._config.sweep_rows:
                break
        return count

    def _tell(self, effects: Effects) -> None:
        if effects.commanded or effects.epoch_ended:
            self._streams.look()
