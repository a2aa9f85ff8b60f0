"""What happens to a lease after its grant: reading, renewal, release, revocation, freeing."""

from collections import defaultdict

from sqlalchemy import bindparam, select, update

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, is_listed, prepared
from kvplane.kernel.errors import NotFound
from kvplane.kernel.ids import derived
from kvplane.lease.domain import (
    LeaseConfig,
    begin_read,
    clamp_ttl,
    free,
    release,
    renewed_deadline,
    revoke,
)
from kvplane.lease.sql import sessions
from kvplane.lease.sql.tables import leases, ownerships
from kvplane.lease.sql.workspace import (
    INSERT_COMMAND,
    LEASE_COLUMNS,
    OWNERSHIP_COLUMNS,
    Workspace,
    command_row,
    load_payload,
    to_lease,
    to_ownership,
)
from kvplane.lease.store import NO_EFFECTS, Effects, LeaseRef, Renewal
from kvplane.lease.values import Change, Holder, Lease, LeaseState, Ownership, Payload, micros

# More different deadlines than this are written row by row.
_FEW = 8
# A reader that still waits when its lease nears the hold's end is given so many ttls more.
_HOLD_TTLS = 3
_L = leases.c
_SET_DEADLINE = prepared(
    update(leases)
    .where(_L.lease_id == bindparam("key"))
    .values(deadline_us=bindparam("new_deadline_us"))
)
_SET_DEADLINES = Prepared(
    lambda is_postgres: (
        update(leases)
        .where(is_listed(_L.lease_id, is_postgres))
        .values(deadline_us=bindparam("new_deadline_us"))
    )
)
# The hold is read without its lock: it can only have grown since.
_LOCK_FOR_RENEWAL = Prepared(
    lambda is_postgres: (
        select(*LEASE_COLUMNS, ownerships.c.hold_deadline_us)
        .join(ownerships, ownerships.c.ownership_id == _L.ownership_id)
        .where(is_listed(_L.lease_id, is_postgres))
        .order_by(_L.lease_id)
        .with_for_update(of=leases)
    )
)
# Whose leases they are not are not even looked at, so that they cost what unknown ids do.
_OWNERSHIPS_OF_HOLDER = Prepared(
    lambda is_postgres: select(_L.lease_id, _L.ownership_id).where(
        is_listed(_L.lease_id, is_postgres), _L.holder_worker_id == bindparam("worker_id")
    )
)
_OWNERSHIP_OF_TENANT = prepared(
    select(_L.lease_id, _L.ownership_id).where(
        _L.lease_id == bindparam("lease_id"), _L.tenant_id == bindparam("tenant_id")
    )
)


def begin(
    tx: Tx, config: LeaseConfig, ref: LeaseRef, holder: Holder, ttl_us: int
) -> tuple[Lease, Ownership, Payload, int]:
    """See `LeaseStore.begin_read`."""
    found = _ownerships_of(tx, holder, [ref.lease_id])
    work, lease, own = _lock_one(tx, ref.lease_id, found)
    now_us = tx.now_us()
    reading = begin_read(
        own,
        lease,
        holder,
        ref.fencing_token,
        ttl_us=clamp_ttl(ttl_us, config),
        now_us=now_us,
        config=config,
    )
    work.apply(Change(own, reading))
    work.flush(now_us)
    return reading, own, load_payload(tx, own.ownership_id, digests=True), now_us


def renew(
    tx: Tx, config: LeaseConfig, holder: Holder, refs: list[LeaseRef], ttl_us: int
) -> tuple[list[Renewal], Effects]:
    """See `LeaseStore.renew`."""
    found: dict[str, tuple[Lease, int]] = {}
    ids = id_list(tx, sorted({ref.lease_id for ref in refs}))
    for row in _LOCK_FOR_RENEWAL.one(tx, ids=ids):
        found[row[0]] = (to_lease(row[:-1]), row[-1])
    now_us = tx.now_us()
    ttl_us = clamp_ttl(ttl_us, config)
    moved: dict[str, int] = {}
    short: set[str] = set()
    answers = []
    for ref in refs:
        lease, hold_deadline_us = found.get(ref.lease_id, (None, 0))
        if lease is None or not _is_of(lease, ref, holder):
            answers.append(Renewal(ref.lease_id, renewed=False, state=None))
            continue
        if not lease.usable(now_us):
            state = LeaseState.EXPIRED if lease.live else lease.state
            answers.append(
                Renewal(ref.lease_id, renewed=False, state=state, draining=lease.draining)
            )
            continue
        deadline = renewed_deadline(lease, hold_deadline_us, ttl_us, now_us, config)
        if deadline != lease.deadline_us:
            moved[ref.lease_id] = deadline
        if deadline < now_us + ttl_us:
            short.add(lease.ownership_id)
        answers.append(
            Renewal(ref.lease_id, renewed=True, state=lease.state, ttl_us=deadline - now_us)
        )
    if moved:
        _move_deadlines(tx, moved)
    until_us = now_us + min(
        _HOLD_TTLS * ttl_us + micros(config.margin_s), micros(config.max_hold_s)
    )
    return answers, _ask_to_hold(tx, short, now_us, until_us)


def release_many(
    tx: Tx, holder: Holder, refs: list[LeaseRef]
) -> tuple[list[LeaseState | None], Effects]:
    """See `LeaseStore.release`."""
    owned_by = _ownerships_of(tx, holder, [ref.lease_id for ref in refs])
    work = Workspace(tx)
    work.lock(owned_by.values(), owned_by)
    now_us = tx.now_us()
    states: list[LeaseState | None] = []
    for ref in refs:
        lease = work.leases.get(ref.lease_id)
        if lease is None or not _is_of(lease, ref, holder):
            states.append(None)
            continue
        own = work.ownerships.get(lease.ownership_id)
        if own is not None:
            work.apply(release(own, lease, ref.outcome, now_us))
        states.append(work.leases[ref.lease_id].state)
    sessions.free_outdated(work, now_us)
    return states, work.flush(now_us)


def revoke_one(tx: Tx, tenant_id: str, lease_id: str) -> tuple[Lease, int, Effects]:
    """See `LeaseStore.revoke`."""
    rows = _OWNERSHIP_OF_TENANT.one(tx, lease_id=lease_id, tenant_id=tenant_id)
    work, lease, own = _lock_one(tx, lease_id, {row[0]: row[1] for row in rows})
    now_us = tx.now_us()
    work.apply(revoke(own, lease, now_us))
    effects = work.flush(now_us)
    return work.leases[lease_id], now_us, effects


def free_session(tx: Tx, tenant_id: str, session_id: str) -> tuple[int, int, Effects]:
    """See `LeaseStore.free_session`."""
    sessions.lock(tx, [(tenant_id, session_id)])
    work = Workspace(tx)
    work.lock_session(tenant_id, session_id, for_decode=True)
    now_us = tx.now_us()
    sessions.remember_end(tx, tenant_id, session_id, now_us)
    freed = draining = 0
    for ident, own in list(work.ownerships.items()):
        if not own.live:
            continue
        work.apply(free(own, work.current_lease(own), now_us))
        if work.ownerships[ident].live:
            draining += 1
        else:
            freed += 1
    return freed, draining, work.flush(now_us)


def _ask_to_hold(tx: Tx, short: set[str], now_us: int, until_us: int) -> Effects:
    """Have owners told to hold longer what a reader waits for; one order for each hold's end.

    A hold that has moved is asked for anew: the owner takes an id that it knows for the
    order that it has carried out.
    """
    if not short:
        return NO_EFFECTS
    c = ownerships.c
    query = select(*OWNERSHIP_COLUMNS).where(
        c.ownership_id.in_(sorted(short)), c.hold_deadline_us < until_us
    )
    rows = [
        command_row(
            derived("hold", own.ownership_id, str(own.hold_deadline_us)),
            own,
            now_us=now_us,
            expire_us=until_us,
            hold_until_us=until_us,
        )
        for own in map(to_ownership, tx.connection.execute(query))
    ]
    if rows:
        INSERT_COMMAND.many(tx, rows)
    return Effects(commanded=frozenset(row["worker_id"] for row in rows))


def _lock_one(tx: Tx, lease_id: str, found: dict[str, str]) -> tuple[Workspace, Lease, Ownership]:
    """Lock a lease and its ownership. Raises NotFound when it was not `found`."""
    work = Workspace(tx)
    if found:
        work.lock(found.values(), found)
    lease = work.leases.get(lease_id)
    own = work.ownerships.get(lease.ownership_id) if lease is not None else None
    if lease is None or own is None:
        raise NotFound("lease", lease_id)
    return work, lease, own


def _is_of(lease: Lease, ref: LeaseRef, holder: Holder) -> bool:
    return lease.held_by(holder) and lease.fencing_token == ref.fencing_token


def _ownerships_of(tx: Tx, holder: Holder, lease_ids: list[str]) -> dict[str, str]:
    """Return the ownership id of each lease of a worker; it never changes."""
    rows = _OWNERSHIPS_OF_HOLDER.one(tx, ids=id_list(tx, lease_ids), worker_id=holder.worker_id)
    return {row[0]: row[1] for row in rows}


def _move_deadlines(tx: Tx, moved: dict[str, int]) -> None:
    by_deadline: dict[int, list[str]] = defaultdict(list)
    for lease_id, deadline in moved.items():
        by_deadline[deadline].append(lease_id)
    if len(by_deadline) > _FEW:
        rows = [{"key": i, "new_deadline_us": moved[i]} for i in sorted(moved)]
        _SET_DEADLINE.many(tx, rows)
        return
    # All of one batch end together, unless a hold ends sooner.
    for deadline, ids in by_deadline.items():
        _SET_DEADLINES.one(tx, ids=id_list(tx, ids), new_deadline_us=deadline)
