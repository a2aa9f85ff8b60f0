"""What time ends, and what is thrown away long after."""

from typing import Any

from sqlalchemy import ColumnElement, Table, and_, delete, or_, select, text, tuple_

from kvplane.db.database import Tx
from kvplane.lease.domain import LeaseConfig, expire
from kvplane.lease.sql.sessions import free_outdated
from kvplane.lease.sql.tables import (
    OPEN_LEASE,
    ended_sessions,
    lease_commands,
    lease_requests,
    leases,
    ownership_payloads,
    ownerships,
    worker_epochs,
)
from kvplane.lease.sql.workspace import Workspace
from kvplane.lease.store import Command, StreamView, Swept
from kvplane.lease.values import Handle, LeaseState, OwnershipState, micros


def sweep(tx: Tx, config: LeaseConfig, rows: int) -> Swept:
    """See `LeaseStore.sweep`."""
    before_us, slack_us = tx.now_us(), micros(config.sweep_slack_s)
    due_leases = tx.connection.execute(
        select(leases.c.lease_id, leases.c.ownership_id)
        # Word for word the index's condition, or SQLite would not use it.
        .where(
            text(f"({OPEN_LEASE})"),
            leases.c.deadline_us <= before_us,
            or_(leases.c.state == LeaseState.GRANTED, leases.c.deadline_us <= before_us - slack_us),
        )
        .order_by(leases.c.deadline_us)
        .limit(rows)
    ).all()
    due_holds = tx.connection.scalars(
        select(ownerships.c.ownership_id)
        .where(
            ownerships.c.state == OwnershipState.HELD, ownerships.c.hold_deadline_us <= before_us
        )
        .order_by(ownerships.c.hold_deadline_us)
        .limit(rows)
    ).all()
    work = Workspace(tx)
    work.lock({row.ownership_id for row in due_leases} | set(due_holds), skip_locked=True)
    now_us = tx.now_us()
    ended_leases = ended_holds = 0
    for own in list(work.ownerships.values()):
        change = expire(own, work.current_lease(own), now_us, config)
        if change is None:
            continue
        work.apply(change)
        ended_leases += change.lease is not None
        ended_holds += change.lease is None
    free_outdated(work, now_us)
    effects = work.flush(now_us)
    more = len(due_leases) == rows or len(due_holds) == rows
    return Swept(ended_leases, ended_holds, more and bool(work.ownerships), effects)


def purge(tx: Tx, rows: int, retention_us: int) -> int:
    """See `LeaseStore.purge`."""
    now_us = tx.now_us()
    old_us = now_us - retention_us
    o, le = ownerships.c, leases.c
    count = _delete(tx, leases, and_(le.ended_us.between(1, old_us), le.draining.is_(False)), rows)
    gone = _keys(tx, ownerships, and_(o.ended_us.between(1, old_us), o.lease_id == ""), rows)
    _delete_keys(tx, ownership_payloads, gone)
    _delete_keys(tx, ownerships, gone)
    count += len(gone)
    count += _delete(tx, lease_requests, lease_requests.c.answered_us <= old_us, rows)
    count += _delete(tx, ended_sessions, ended_sessions.c.ended_us <= old_us, rows)
    return count + _delete(tx, lease_commands, lease_commands.c.expire_us <= now_us, rows)


def watch(tx: Tx, worker_ids: list[str]) -> dict[str, StreamView]:
    """See `LeaseStore.watch`."""
    e, c = worker_epochs.c, lease_commands.c
    views = {
        row.worker_id: StreamView(row.epoch, row.stream_id)
        for row in tx.connection.execute(
            select(e.worker_id, e.epoch, e.stream_id).where(e.worker_id.in_(worker_ids))
        )
    }
    rows = tx.connection.execute(
        select(c.command_id, c.worker_id, c.epoch, c.engine_id, c.request_id, c.hold_until_us)
        .where(c.worker_id.in_(worker_ids))
        .order_by(c.created_us, c.command_id)
    ).all()
    now_us = tx.now_us() if any(row.hold_until_us for row in rows) else 0
    for row in rows:
        hold_us = row.hold_until_us - now_us if row.hold_until_us else None
        view = views.get(row.worker_id)
        if view is not None and view.epoch == row.epoch and (hold_us is None or hold_us > 0):
            handle = Handle(row.engine_id, row.request_id)
            view.commands.append(Command(row.command_id, row.worker_id, row.epoch, handle, hold_us))
    return views


def _delete(tx: Tx, table: Table, condition: ColumnElement[bool], rows: int) -> int:
    keys = _keys(tx, table, condition, rows)
    _delete_keys(tx, table, keys)
    return len(keys)


def _keys(tx: Tx, table: Table, condition: ColumnElement[bool], rows: int) -> list[tuple[Any, ...]]:
    """Return primary keys of at most `rows` rows that nobody else has locked."""
    query = select(*table.primary_key).where(condition).limit(rows)
    return [tuple(row) for row in tx.connection.execute(query.with_for_update(skip_locked=True))]


def _delete_keys(tx: Tx, table: Table, keys: list[tuple[Any, ...]]) -> None:
    if keys:
        tx.connection.execute(delete(table).where(tuple_(*table.primary_key).in_(keys)))
