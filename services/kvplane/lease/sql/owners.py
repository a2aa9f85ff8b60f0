"""What owners say and are told: reports, withdrawals, inventories, holds."""

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import delete, select, tuple_

from kvplane.db.database import Tx
from kvplane.kernel.errors import InvalidField
from kvplane.lease.domain import (
    LeaseConfig,
    age_order,
    free,
    hold_deadline,
    hold_until,
    superseded,
    withdraw,
)
from kvplane.lease.sql import sessions
from kvplane.lease.sql.epochs import begin_stream, ensure_epoch, ensure_stream
from kvplane.lease.sql.tables import lease_commands, ownerships
from kvplane.lease.sql.workspace import (
    INSERT_COMMAND,
    OWNERSHIP_COLUMNS,
    Workspace,
    chunks,
    command_row,
    to_ownership,
)
from kvplane.lease.store import Effects, Reported, ReportedItem, Welcomed, Withdrawn
from kvplane.lease.values import (
    LIVE_OWNERSHIP,
    Change,
    Handle,
    Ownership,
    OwnershipState,
    Payload,
    micros,
)


def report(
    tx: Tx,
    config: LeaseConfig,
    worker_id: str,
    epoch: int,
    sent_by_us: int,
    items: list[ReportedItem],
    stream_id: str | None,
) -> Reported:
    """See `LeaseStore.report`."""
    by_id = {item.ownership.ownership_id: item for item in items}
    named = [item.ownership for item in by_id.values() if item.ownership.session_id]
    sessions.lock(tx, {_session(own) for own in named}, by_id)
    _refuse_strangers(tx, worker_id, items)
    ended = ensure_epoch(tx, worker_id, epoch)
    if stream_id is not None:
        ensure_stream(tx, worker_id, stream_id)
    over = sessions.ended(tx, {_session(own) for own in named})
    families = {_session(own) for own in named if not own.for_decode} - over
    work = Workspace(tx)
    work.lock([*by_id, *_live_of_sessions(tx, families)])
    now_us = tx.now_us()
    for ident, item in by_id.items():
        hold_us = micros(config.unknown_hold_s) if item.hold_us is None else item.hold_us
        hold_us = min(hold_us, micros(config.max_hold_s))
        deadline = hold_deadline(now_us, sent_by_us, hold_us)
        known = work.ownerships.get(ident)
        if known is None:
            new = _new(item.ownership, deadline, now_us)
            work.add(new, item.payload)
            if _session(new) in over:
                work.apply(free(new, None, now_us))
        elif known.live:
            work.apply(Change(hold_until(known, deadline)))
        elif _lost_and_idle(known) and known.worker_id == worker_id:
            # Still pinned by an engine that has registered again; nobody can read it.
            work.order_free(known, epoch)
    for session in families:
        family = [own for own in work.ownerships.values() if _session(own) == session]
        for own in superseded(family):
            work.apply(free(own, None, now_us))
    effects = work.flush(now_us)
    stored = [
        replace(
            item.ownership,
            state=work.ownerships[ident].state,
            hold_deadline_us=work.ownerships[ident].hold_deadline_us,
            lease_id=work.ownerships[ident].lease_id,
        )
        for item in items
        for ident in [item.ownership.ownership_id]
    ]
    return Reported(stored, now_us, effects | ended)


def withdraw_handles(tx: Tx, worker_id: str, epoch: int, handles: list[Handle]) -> Withdrawn:
    """See `LeaseStore.withdraw`."""
    by_id = {handle.ownership_id: handle for handle in handles}
    sessions.lock(tx, (), by_id)
    ended = ensure_epoch(tx, worker_id, epoch)
    work = Workspace(tx)
    work.lock(by_id)
    now_us = tx.now_us()
    states: dict[str, OwnershipState | None] = {}
    for ident, handle in by_id.items():
        own = work.ownerships.get(ident)
        if own is None:
            work.add(_tombstone(worker_id, epoch, handle, now_us), Payload())
        elif own.tenant_id and own.worker_id == worker_id:
            work.apply(withdraw(own, work.current_lease(own), now_us))
            states[ident] = work.ownerships[ident].state
    _forget_commands(tx, states)
    work.flush(now_us)
    answers = [states.get(handle.ownership_id) for handle in handles]
    return Withdrawn(answers, ended)


def hello(
    tx: Tx,
    worker_id: str,
    epoch: int,
    stream_id: str,
    number: int,
    held: list[Handle],
    hold_limit_blocks: int,
) -> Welcomed:
    """See `LeaseStore.hello`."""
    ended = ensure_epoch(tx, worker_id, epoch, exclusive=True)
    begin_stream(tx, worker_id, stream_id, number, hold_limit_blocks)
    held_ids = {handle.ownership_id for handle in held}
    believed = set(
        tx.connection.scalars(
            select(ownerships.c.ownership_id).where(
                ownerships.c.worker_id == worker_id, ownerships.c.state.in_(LIVE_OWNERSHIP)
            )
        )
    )
    gone = believed - held_ids
    work = Workspace(tx)
    work.lock(gone | held_ids)
    now_us = tx.now_us()
    for ident in gone:
        own = work.ownerships[ident]
        work.apply(withdraw(own, work.current_lease(own), now_us))
    for ident in held_ids & work.ownerships.keys():
        own = work.ownerships[ident]
        ours = own.worker_id == worker_id and own.tenant_id
        if ours and not own.live and not own.lease_id:
            work.order_free(own, epoch)
    _forget_commands(tx, gone)
    effects = work.flush(now_us)
    return Welcomed(now_us, effects | ended)


def extend_hold(
    tx: Tx, tenant_id: str, session_id: str, hold_us: int, command_ids: list[str]
) -> tuple[int, Effects]:
    """See `LeaseStore.extend_hold`."""
    work = Workspace(tx)
    work.lock_session(tenant_id, session_id, for_decode=True)
    now_us = tx.now_us()
    until_us = now_us + hold_us
    short = [o for o in work.ownerships.values() if o.live and o.hold_deadline_us < until_us]
    short.sort(key=age_order, reverse=True)
    rows = [
        command_row(ident, own, now_us=now_us, expire_us=until_us, hold_until_us=until_us)
        for ident, own in zip(command_ids, short, strict=False)
    ]
    if rows:
        _forget_commands(tx, [row["ownership_id"] for row in rows])
        INSERT_COMMAND.many(tx, rows)
    return len(rows), Effects(commanded=frozenset(row["worker_id"] for row in rows))


def acknowledge(
    tx: Tx,
    worker_id: str,
    epoch: int,
    command_id: str,
    *,
    done: bool,
    sent_by_us: int,
    hold_us: int,
) -> Effects:
    """See `LeaseStore.acknowledge`."""
    ended = ensure_epoch(tx, worker_id, epoch)
    c = lease_commands.c
    row = tx.connection.execute(
        select(c.ownership_id, c.hold_until_us).where(
            c.command_id == command_id, c.worker_id == worker_id
        )
    ).first()
    if row is None:
        return ended
    work = Workspace(tx)
    work.lock([row.ownership_id])
    now_us = tx.now_us()
    own = work.ownerships.get(row.ownership_id)
    if own is not None and row.hold_until_us:
        if done:
            work.apply(Change(hold_until(own, hold_deadline(now_us, sent_by_us, hold_us))))
        else:
            work.apply(withdraw(own, work.current_lease(own), now_us))
    tx.connection.execute(delete(lease_commands).where(c.command_id == command_id))
    effects = work.flush(now_us)
    return effects | ended


def _lost_and_idle(own: Ownership) -> bool:
    return own.state is OwnershipState.LOST and not own.lease_id


def _session(own: Ownership) -> sessions.Session:
    return own.tenant_id, own.session_id


def _refuse_strangers(tx: Tx, worker_id: str, items: list[ReportedItem]) -> None:
    """Raise InvalidField when an id is another tenant's or worker's, or twice two tenants'."""
    c = ownerships.c
    known = {}
    for chunk in chunks(item.ownership.ownership_id for item in items):
        query = select(c.ownership_id, c.tenant_id, c.worker_id)
        query = query.where(c.ownership_id.in_(chunk), c.state.in_(LIVE_OWNERSHIP))
        known.update({row[0]: row for row in tx.connection.execute(query)})
    tenants = {ident: row.tenant_id for ident, row in known.items()}
    for index, item in enumerate(items):
        own = item.ownership
        if tenants.setdefault(own.ownership_id, own.tenant_id) != own.tenant_id:
            raise InvalidField(f"ownerships[{index}].tenant_id", "differs from the first report's")
        row = known.get(own.ownership_id)
        if row is not None and row.worker_id != worker_id:
            raise InvalidField(
                f"ownerships[{index}].worker_id", "these blocks are reported by another worker"
            )


def _live_of_sessions(tx: Tx, families: Iterable[sessions.Session]) -> list[str]:
    """Return the ids of live ownerships of sessions, but not those for a decode."""
    pairs = sorted(families)
    if not pairs:
        return []
    c = ownerships.c
    query = select(c.ownership_id).where(
        tuple_(c.tenant_id, c.session_id).in_(pairs),
        c.state.in_(LIVE_OWNERSHIP),
        c.for_decode.is_(False),
    )
    return list(tx.connection.scalars(query))


def newest_of_session(tx: Tx, tenant_id: str, session_id: str) -> Ownership | None:
    """Return a session's newest ownership, ended or not, that is not for a decode."""
    c = ownerships.c
    query = (
        select(*OWNERSHIP_COLUMNS)
        .where(c.tenant_id == tenant_id, c.session_id == session_id, c.for_decode.is_(False))
        .order_by(c.turn.desc(), c.reported_us.desc())
        .limit(1)
    )
    row = tx.connection.execute(query).first()
    return to_ownership(row) if row else None


def _forget_commands(tx: Tx, ownership_ids: Iterable[str]) -> None:
    for chunk in chunks(ownership_ids):
        tx.connection.execute(
            delete(lease_commands).where(lease_commands.c.ownership_id.in_(chunk))
        )


def _new(own: Ownership, deadline_us: int, now_us: int) -> Ownership:
    over = deadline_us <= now_us
    return replace(
        own,
        state=OwnershipState.EXPIRED if over else OwnershipState.HELD,
        hold_deadline_us=deadline_us,
        reported_us=now_us,
        ended_us=now_us if over else 0,
    )


def _tombstone(worker_id: str, epoch: int, handle: Handle, now_us: int) -> Ownership:
    """Return an ended ownership of no tenant."""
    return Ownership(
        ownership_id=handle.ownership_id,
        tenant_id="",
        session_id="",
        turn=0,
        worker_id=worker_id,
        epoch=epoch,
        engine_id=handle.engine_id,
        request_id=handle.request_id,
        num_tokens=0,
        block_size=1,
        compatibility="",
        cuttable=False,
        for_decode=False,
        reported_us=now_us,
        state=OwnershipState.EXPIRED,
        hold_deadline_us=now_us,
        ended_us=now_us,
    )
