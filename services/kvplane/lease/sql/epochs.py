"""Worker epochs: which is the newest, and the end of the older ones."""

from sqlalchemy import bindparam, delete, or_, select, update

from kvplane.db.database import Tx
from kvplane.db.prepared import insert_ignore, prepared
from kvplane.kernel.errors import StaleEpoch, Unavailable
from kvplane.lease.domain import lose_holder, lose_owner
from kvplane.lease.sql.sessions import free_outdated
from kvplane.lease.sql.tables import lease_commands, leases, ownerships, worker_epochs
from kvplane.lease.sql.workspace import Workspace
from kvplane.lease.store import NO_EFFECTS, Effects
from kvplane.lease.values import LIVE_LEASE, LIVE_OWNERSHIP

_EPOCH = select(worker_epochs.c.epoch).where(worker_epochs.c.worker_id == bindparam("worker_id"))
_SHARE = prepared(_EPOCH.with_for_update(read=True))
_LOCK = prepared(_EPOCH.with_for_update())
_STREAM = prepared(
    select(worker_epochs.c.stream_id).where(worker_epochs.c.worker_id == bindparam("worker_id"))
)
_INSERT = insert_ignore(worker_epochs)


def ensure_epoch(tx: Tx, worker_id: str, epoch: int, *, exclusive: bool = False) -> Effects:
    """Refuse an old epoch, end the older ones for a new one, and keep it from ending.

    The worker's row stays locked, so that no epoch ends while something is stored in it.
    Raises StaleEpoch before anything is written.
    """
    known = _lock(tx, worker_id, exclusive=exclusive)
    if known is None:
        _add(tx, worker_id, epoch)
        known = _lock(tx, worker_id, exclusive=exclusive)
        assert known is not None
    if known > epoch:
        raise StaleEpoch(worker_id, epoch, known)
    if known < epoch:
        return end_epoch(tx, worker_id, epoch)[2]
    return NO_EFFECTS


def ensure_stream(tx: Tx, worker_id: str, stream_id: str) -> None:
    """Refuse what comes on a stream that a newer one has replaced; `ensure_epoch` comes first.

    Its Hello said what the worker holds: an older report may name blocks freed since.
    Raises Unavailable before anything is written.
    """
    if _STREAM.one(tx, worker_id=worker_id).scalar() != stream_id:
        raise Unavailable("a newer stream of this worker has taken over")


def begin_stream(
    tx: Tx, worker_id: str, stream_id: str, number: int, hold_limit_blocks: int
) -> None:
    """Make it the worker's stream; `ensure_epoch`, exclusive, comes first.

    Raises Unavailable for one that is no newer than the last. Its Hello was under way for
    longer than another one, and would withdraw what the worker has pinned meanwhile.
    """
    e = worker_epochs.c
    newer = update(worker_epochs).where(
        e.worker_id == worker_id, or_(e.stream_number < number, e.stream_id == stream_id)
    )
    changed = tx.connection.execute(
        newer.values(stream_id=stream_id, stream_number=number, hold_limit_blocks=hold_limit_blocks)
    )
    if not changed.rowcount:
        raise Unavailable("a newer stream of this worker has taken over")


def end_epoch(tx: Tx, worker_id: str, current_epoch: int) -> tuple[int, int, Effects]:
    """Void what a worker owned and held before `current_epoch`; see the store's contract."""
    known = _lock(tx, worker_id, exclusive=True)
    if known is None:
        _add(tx, worker_id, current_epoch)
    elif known < current_epoch:
        tx.connection.execute(
            update(worker_epochs)
            .where(worker_epochs.c.worker_id == worker_id)
            .values(epoch=current_epoch, stream_id="", stream_number=0, hold_limit_blocks=0)
        )
    owned = set(
        tx.connection.scalars(
            select(ownerships.c.ownership_id).where(
                ownerships.c.worker_id == worker_id,
                ownerships.c.state.in_(LIVE_OWNERSHIP),
                ownerships.c.epoch < current_epoch,
            )
        )
    )
    held = tx.connection.execute(
        select(leases.c.lease_id, leases.c.ownership_id).where(
            leases.c.holder_worker_id == worker_id,
            leases.c.state.in_(LIVE_LEASE),
            leases.c.holder_epoch < current_epoch,
        )
    ).all()
    work = Workspace(tx)
    work.lock(owned | {row.ownership_id for row in held}, (row.lease_id for row in held))
    # After the locks: whoever had them may have left an order.
    tx.connection.execute(
        delete(lease_commands).where(
            lease_commands.c.worker_id == worker_id, lease_commands.c.epoch < current_epoch
        )
    )
    now_us = tx.now_us()
    live_before = {ident for ident, lease in work.leases.items() if lease.live}
    lost = 0
    for ownership_id in sorted(owned):
        own = work.ownerships[ownership_id]
        lost += own.live
        work.apply(lose_owner(own, work.current_lease(own), now_us))
    for row in held:
        lease, own = work.leases[row.lease_id], work.ownerships[row.ownership_id]
        if lease.live:
            work.apply(lose_holder(own, lease, now_us))
    leases_lost = sum(not work.leases[ident].live for ident in live_before)
    free_outdated(work, now_us)
    effects = work.flush(now_us)
    return lost, leases_lost, Effects(effects.commanded, frozenset([worker_id]))


def _lock(tx: Tx, worker_id: str, *, exclusive: bool) -> int | None:
    epoch: int | None = (_LOCK if exclusive else _SHARE).one(tx, worker_id=worker_id).scalar()
    return epoch


def _add(tx: Tx, worker_id: str, epoch: int) -> None:
    _INSERT.one(
        tx,
        worker_id=worker_id,
        epoch=epoch,
        stream_id="",
        stream_number=0,
        hold_limit_blocks=0,
    )
