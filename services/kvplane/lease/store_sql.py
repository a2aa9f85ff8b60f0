"""The lease store over SQLAlchemy: SQLite for one process, PostgreSQL for replicas."""

from collections.abc import Sequence

from kvplane.db.database import Database
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.holds import Stock, Usage
from kvplane.lease.keeping import Bound, Hold
from kvplane.lease.sql import epochs, grants, holders, keeping, owners, queries, sweeping
from kvplane.lease.store import (
    Effects,
    Granted,
    GrantOrder,
    LeaseQuota,
    LeaseRef,
    Listed,
    Page,
    Renewal,
    Reported,
    ReportedItem,
    StreamView,
    Swept,
    Welcomed,
    Withdrawn,
)
from kvplane.lease.values import (
    Handle,
    Holder,
    Lease,
    LeaseState,
    Ownership,
    OwnershipState,
    Payload,
)

_NO_QUOTA = LeaseQuota()


class SqlLeaseStore:
    """`LeaseStore` and `HoldStore`, each method one operation of `Database.run`."""

    def __init__(self, database: Database, config: LeaseConfig) -> None:
        self._run = database.run
        self._read = database.read
        self._config = config

    async def now_us(self) -> int:
        """See `LeaseStore`."""
        return await self._read(lambda tx: tx.now_us())

    async def report(
        self,
        worker_id: str,
        epoch: int,
        sent_by_us: int,
        items: list[ReportedItem],
        stream_id: str | None = None,
    ) -> Reported:
        """See `LeaseStore`."""
        return await self._run(
            lambda tx: owners.report(
                tx, self._config, worker_id, epoch, sent_by_us, items, stream_id
            )
        )

    async def withdraw(self, worker_id: str, epoch: int, handles: list[Handle]) -> Withdrawn:
        """See `LeaseStore`."""
        return await self._run(lambda tx: owners.withdraw_handles(tx, worker_id, epoch, handles))

    async def hello(
        self,
        worker_id: str,
        epoch: int,
        stream_id: str,
        number: int,
        held: list[Handle],
        hold_limit_blocks: int = 0,
    ) -> Welcomed:
        """See `LeaseStore`."""
        return await self._run(
            lambda tx: owners.hello(
                tx, worker_id, epoch, stream_id, number, held, hold_limit_blocks
            )
        )

    async def end_epoch(self, worker_id: str, current_epoch: int) -> tuple[int, int, Effects]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: epochs.end_epoch(tx, worker_id, current_epoch))

    async def grant(
        self,
        order: GrantOrder,
        lease_id: str,
        *,
        final: bool,
        quota: LeaseQuota = _NO_QUOTA,
    ) -> Granted:
        """See `LeaseStore`."""
        return await self._run(
            lambda tx: grants.grant_lease(
                tx, self._config, order, lease_id, final=final, quota=quota
            )
        )

    async def begin_read(
        self, ref: LeaseRef, holder: Holder, ttl_us: int
    ) -> tuple[Lease, Ownership, Payload, int]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: holders.begin(tx, self._config, ref, holder, ttl_us))

    async def renew(
        self, holder: Holder, refs: list[LeaseRef], ttl_us: int
    ) -> tuple[list[Renewal], Effects]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: holders.renew(tx, self._config, holder, refs, ttl_us))

    async def release(
        self, holder: Holder, refs: list[LeaseRef]
    ) -> tuple[list[LeaseState | None], Effects]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: holders.release_many(tx, holder, refs))

    async def revoke(self, tenant_id: str, lease_id: str) -> tuple[Lease, int, Effects]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: holders.revoke_one(tx, tenant_id, lease_id))

    async def free_session(self, tenant_id: str, session_id: str) -> tuple[int, int, Effects]:
        """See `LeaseStore`."""
        return await self._run(lambda tx: holders.free_session(tx, tenant_id, session_id))

    async def extend_hold(
        self, tenant_id: str, session_id: str, hold_us: int, command_ids: list[str]
    ) -> tuple[int, Effects]:
        """See `LeaseStore`."""
        return await self._run(
            lambda tx: owners.extend_hold(tx, tenant_id, session_id, hold_us, command_ids)
        )

    async def acknowledge(
        self,
        worker_id: str,
        epoch: int,
        command_id: str,
        *,
        done: bool,
        sent_by_us: int,
        hold_us: int,
    ) -> Effects:
        """See `LeaseStore`."""
        return await self._run(
            lambda tx: owners.acknowledge(
                tx,
                worker_id,
                epoch,
                command_id,
                done=done,
                sent_by_us=sent_by_us,
                hold_us=hold_us,
            )
        )

    async def sweep(self, rows: int) -> Swept:
        """See `LeaseStore`."""
        return await self._run(lambda tx: sweeping.sweep(tx, self._config, rows))

    async def stock(self) -> Stock:
        """See `HoldStore`."""
        return await self._read(keeping.stock)

    async def count_held(self, counted: Stock) -> bool:
        """See `HoldStore`."""
        return await self._run(lambda tx: keeping.count_held(tx, counted))

    async def usage(self, tenant_id: str) -> Usage:
        """See `HoldStore`."""
        return await self._read(lambda tx: keeping.usage(tx, tenant_id))

    async def holds_on(self, worker_id: str) -> tuple[list[Hold], int]:
        """See `HoldStore`."""
        return await self._read(lambda tx: keeping.holds_on(tx, worker_id))

    async def holds_of(self, tenant_id: str) -> tuple[list[Hold], int]:
        """See `HoldStore`."""
        return await self._read(lambda tx: keeping.holds_of(tx, tenant_id))

    async def free_holds(self, bound: Bound, chosen: Sequence[Hold]) -> tuple[list[Hold], Effects]:
        """See `HoldStore`."""
        return await self._run(lambda tx: keeping.free_holds(tx, bound, chosen))

    async def purge(self, rows: int, retention_us: int) -> int:
        """See `LeaseStore`."""
        return await self._run(lambda tx: sweeping.purge(tx, rows, retention_us))

    async def get_ownership(
        self, tenant_id: str, ownership_id: str
    ) -> tuple[Ownership, Payload, int]:
        """See `LeaseStore`."""
        return await self._read(lambda tx: queries.get_ownership(tx, tenant_id, ownership_id))

    async def list_ownerships(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[OwnershipState],
        page: Page,
    ) -> Listed:
        """See `LeaseStore`."""
        return await self._read(
            lambda tx: queries.list_ownerships(tx, tenant_id, session_id, worker_id, states, page)
        )

    async def get_lease(self, tenant_id: str, lease_id: str) -> tuple[Lease, int]:
        """See `LeaseStore`."""
        return await self._read(lambda tx: queries.get_lease(tx, tenant_id, lease_id))

    async def list_leases(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[LeaseState],
        page: Page,
    ) -> Listed:
        """See `LeaseStore`."""
        return await self._read(
            lambda tx: queries.list_leases(tx, tenant_id, session_id, worker_id, states, page)
        )

    async def watch(self, worker_ids: list[str]) -> dict[str, StreamView]:
        """See `LeaseStore`."""
        return await self._read(lambda tx: sweeping.watch(tx, worker_ids))
