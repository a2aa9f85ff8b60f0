"""Calls of the lease store, as values."""

from dataclasses import dataclass
from typing import Any

from kvplane.kernel.errors import NotFound
from kvplane.lease.store import GrantOrder, LeaseRef, Page, ReportedItem
from kvplane.lease.values import (
    Handle,
    Holder,
    Ownership,
    OwnershipState,
)
from properties.lease_state import CommandKey

Store = Any
WORKERS = ["d1", "d2", "p1", "p2"]


@dataclass(frozen=True)
class Report:
    worker: str
    epoch: int
    sent_by_us: int
    items: list[ReportedItem]
    stream: str | None

    async def on(self, store: Store) -> Any:
        return await store.report(self.worker, self.epoch, self.sent_by_us, self.items, self.stream)


@dataclass(frozen=True)
class Withdraw:
    worker: str
    epoch: int
    handles: list[Handle]

    async def on(self, store: Store) -> Any:
        return await store.withdraw(self.worker, self.epoch, self.handles)


def stream_number(stream: str) -> int:
    """Return the number of a stream of that name, 0 for none."""
    return int(stream.rpartition("-")[2] or 0)


@dataclass(frozen=True)
class Hello:
    worker: str
    epoch: int
    stream: str
    held: list[Handle]

    async def on(self, store: Store) -> Any:
        return await store.hello(self.worker, self.epoch, self.stream, self.number, self.held)

    @property
    def number(self) -> int:
        """Which of its worker's streams it is: the end of its name."""
        return stream_number(self.stream)


@dataclass(frozen=True)
class EndEpoch:
    worker: str
    current: int

    async def on(self, store: Store) -> Any:
        return await store.end_epoch(self.worker, self.current)


@dataclass(frozen=True)
class Grant:
    order: GrantOrder
    lease_id: str
    final: bool

    async def on(self, store: Store) -> Any:
        return await store.grant(self.order, self.lease_id, final=self.final)


@dataclass(frozen=True)
class BeginRead:
    ref: LeaseRef
    holder: Holder
    ttl_us: int

    async def on(self, store: Store) -> Any:
        return await store.begin_read(self.ref, self.holder, self.ttl_us)


@dataclass(frozen=True)
class Renew:
    refs: list[LeaseRef]
    holder: Holder
    ttl_us: int

    async def on(self, store: Store) -> Any:
        return await store.renew(self.holder, self.refs, self.ttl_us)


@dataclass(frozen=True)
class Release:
    refs: list[LeaseRef]
    holder: Holder

    async def on(self, store: Store) -> Any:
        return await store.release(self.holder, self.refs)


@dataclass(frozen=True)
class Revoke:
    tenant: str
    lease_id: str

    async def on(self, store: Store) -> Any:
        return await store.revoke(self.tenant, self.lease_id)


@dataclass(frozen=True)
class FreeSession:
    tenant: str
    session: str

    async def on(self, store: Store) -> Any:
        return await store.free_session(self.tenant, self.session)


@dataclass(frozen=True)
class ExtendHold:
    tenant: str
    session: str
    hold_us: int
    command_ids: list[str]

    async def on(self, store: Store) -> Any:
        return await store.extend_hold(self.tenant, self.session, self.hold_us, self.command_ids)


@dataclass(frozen=True)
class Acknowledge:
    worker: str
    epoch: int
    command_id: str
    # The same one, as the model knows it.
    command: CommandKey
    done: bool
    sent_by_us: int
    hold_us: int

    async def on(self, store: Store) -> Any:
        return await store.acknowledge(
            self.worker,
            self.epoch,
            self.command_id,
            done=self.done,
            sent_by_us=self.sent_by_us,
            hold_us=self.hold_us,
        )


@dataclass(frozen=True)
class Sweep:
    rows: int

    async def on(self, store: Store) -> Any:
        return await store.sweep(self.rows)


@dataclass(frozen=True)
class Purge:
    retention_us: int

    async def on(self, store: Store) -> Any:
        return await store.purge(1000, self.retention_us)


@dataclass(frozen=True)
class Lookups:
    """All that only reads, one after the other."""

    tenant: str
    ownership_id: str
    lease_id: str
    session: str
    worker: str
    states: list[OwnershipState]
    page: int

    async def on(self, store: Store) -> Any:
        async def listed(method: Any, *filters: Any) -> list[Any]:
            rows, after = [], None
            while True:
                found = await method(self.tenant, *filters, Page(self.page, after))
                rows += found.rows
                after = found.next_after
                if after is None:
                    return rows

        return (
            await _or_none(store.get_ownership(self.tenant, self.ownership_id)),
            await _or_none(store.get_lease(self.tenant, self.lease_id)),
            await listed(store.list_ownerships, self.session, "", self.states),
            await listed(store.list_leases, "", self.worker, []),
            await store.watch(WORKERS),
        )


async def _or_none(asked: Any) -> Any:
    try:
        return await asked
    except NotFound:
        return None


def never_reported(worker: str, epoch: int, handle: Handle, now_us: int) -> Ownership:
    """Return what is remembered of a handle that was withdrawn before any report of it."""
    return Ownership(
        handle.ownership_id, "", "", 0, worker, epoch, handle.engine_id, handle.request_id,
        0, 1, "", False, False, now_us, OwnershipState.EXPIRED, now_us, ended_us=now_us,
    )  # fmt: skip
