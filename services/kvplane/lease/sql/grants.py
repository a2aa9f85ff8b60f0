"""Granting a lease, once for each idempotency key."""

from sqlalchemy import String, bindparam, func, select, text

from kvplane.db.database import Tx
from kvplane.db.prepared import insert_ignore, prepared
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.ids import derived
from kvplane.lease.domain import LeaseConfig, clamp_ttl, expire, grant, newest_readable
from kvplane.lease.sql.epochs import ensure_epoch
from kvplane.lease.sql.owners import newest_of_session
from kvplane.lease.sql.sessions import free_outdated
from kvplane.lease.sql.tables import LIVE_LEASE, lease_requests, leases, ownerships
from kvplane.lease.sql.workspace import Workspace, load_payload
from kvplane.lease.store import NO_EFFECTS, Effects, Granted, GrantOrder, LeaseQuota
from kvplane.lease.values import LeaseState, Ownership, OwnershipState, Payload, Refusal

_R = lease_requests.c
_ANSWER = prepared(
    select(_R.fingerprint, _R.lease_id, _R.refusal).where(
        _R.tenant_id == bindparam("tenant_id"), _R.request_id == bindparam("request_id")
    )
)
_INSERT_REQUEST = insert_ignore(lease_requests)
_OWNER = prepared(
    select(ownerships.c.tenant_id).where(ownerships.c.ownership_id == bindparam("ownership_id"))
)
_LEASED = prepared(select(leases.c.ownership_id).where(leases.c.lease_id == bindparam("lease_id")))
# One transaction at a time gives a tenant that has a limit leases. It is not waited for:
# others in the same batch have locks already.
_TRY_LOCK = prepared(
    text("SELECT pg_try_advisory_xact_lock(hashtextextended(:key, 1))").bindparams(
        bindparam("key", type_=String)
    )
)
_LIVE = prepared(
    select(func.count())
    .select_from(leases)
    .where(
        leases.c.tenant_id == bindparam("tenant_id"),
        text(LIVE_LEASE),
        leases.c.deadline_us > bindparam("now_us"),
    )
)


def grant_lease(
    tx: Tx,
    config: LeaseConfig,
    order: GrantOrder,
    lease_id: str,
    *,
    final: bool,
    quota: LeaseQuota,
) -> Granted:
    """See `LeaseStore.grant`."""
    tenant_id = _tenant(tx, order)
    if replay := _replay(tx, order):
        return replay
    effects = ensure_epoch(tx, order.holder.worker_id, order.holder.epoch)
    work = Workspace(tx)
    _lock_target(work, order)
    now_us = tx.now_us()
    effects |= _end_what_was_not_read(work, config, now_us)
    own = _target(work, tenant_id, order, now_us)
    if own is None:
        refusal = _absence(tx, tenant_id, order)
        if not final:
            return Granted(None, None, Payload(), None, now_us, pending=True, effects=effects)
        return _refuse(tx, order, refusal, now_us, effects)
    change = grant(
        own,
        lease_id,
        order.holder,
        ttl_us=clamp_ttl(order.ttl_us, config),
        min_tokens=order.min_tokens,
        begin_read=order.begin_read,
        now_us=now_us,
        config=config,
    )
    if isinstance(change, Refusal):
        return _refuse(tx, order, change, now_us, effects)
    most = quota.most(tenant_id)
    if most is None:
        return Granted(
            None, None, Payload(), None, now_us, pending=True, effects=effects, limit_of=tenant_id
        )
    if most and quota.exact and not _alone(tx, tenant_id):
        return Granted(
            None, None, Payload(), None, now_us, pending=True, effects=effects, crowded=True
        )
    if most and (_LIVE.one(tx, tenant_id=tenant_id, now_us=now_us).scalar() or 0) >= most:
        return _refuse(tx, order, Refusal.OVER_QUOTA, now_us, effects)
    if not _remember(tx, order, lease_id, 0, now_us):
        return _first_answer(tx, order)
    lease = change.lease
    assert lease is not None
    work.add_lease(lease)
    work.apply(change)
    work.flush(now_us)
    payload = load_payload(tx, own.ownership_id, digests=order.begin_read)
    return Granted(lease, change.ownership, payload, None, now_us, effects=effects)


def _tenant(tx: Tx, order: GrantOrder) -> str:
    """Return whose ownership is meant; "" when nobody's, or another tenant's."""
    if order.session_id:
        return order.tenant_id or ""
    owner = _OWNER.one(tx, ownership_id=order.ownership_id).scalar()
    if order.tenant_id is None:
        return owner or ""
    return order.tenant_id


def _alone(tx: Tx, tenant_id: str) -> bool:
    """Tell whether no other transaction gives this tenant a lease until this one is over.

    SQLite has one writer at a time in any case.
    """
    return not tx.is_postgres or bool(_TRY_LOCK.one(tx, key=tenant_id).scalar())


def _lock_target(work: Workspace, order: GrantOrder) -> None:
    if order.session_id:
        work.lock_session(order.tenant_id or "", order.session_id, for_decode=False)
    else:
        work.lock([order.ownership_id])


def _target(work: Workspace, tenant_id: str, order: GrantOrder, now_us: int) -> Ownership | None:
    if order.session_id:
        return newest_readable(list(work.ownerships.values()), now_us)
    own = work.ownerships.get(order.ownership_id)
    return own if own is not None and own.tenant_id and own.tenant_id == tenant_id else None


def _end_what_was_not_read(work: Workspace, config: LeaseConfig, now_us: int) -> Effects:
    """End holds and unread leases whose time is over, so that nobody waits for the sweep.

    What is being read is left to the sweep, which begins a while after a start: SQLite's
    clock is the process's, and may have been set forward in between.
    """
    for own in list(work.ownerships.values()):
        lease = work.current_lease(own)
        if lease is None or lease.state is LeaseState.GRANTED:
            change = expire(own, lease, now_us, config)
            if change is not None:
                work.apply(change)
    free_outdated(work, now_us)
    return work.flush(now_us)


def _absence(tx: Tx, tenant_id: str, order: GrantOrder) -> Refusal:
    if order.session_id:
        newest = newest_of_session(tx, tenant_id, order.session_id)
        if newest is not None and newest.state is OwnershipState.LOST:
            return Refusal.OWNER_LOST
    return Refusal.NOT_HELD


def _refuse(tx: Tx, order: GrantOrder, refusal: Refusal, now_us: int, effects: Effects) -> Granted:
    if not _remember(tx, order, "", refusal, now_us):
        return _first_answer(tx, order)
    return Granted(None, None, Payload(), refusal, now_us, effects=effects)


def _asked_by(order: GrantOrder) -> str:
    """Return whose request ids these are. Workers' belong to no tenant: of a handle that is
    not reported yet nobody knows whose it is, and its refusal must be remembered too."""
    return order.tenant_id or ""


def _remember(tx: Tx, order: GrantOrder, lease_id: str, refusal: int, now_us: int) -> bool:
    """Store the answer; False when another replica has just answered the same request."""
    row = {
        "tenant_id": _asked_by(order),
        "request_id": order.request_id,
        "fingerprint": _fingerprint(order),
        "lease_id": lease_id,
        "refusal": refusal,
        "answered_us": now_us,
    }
    return _INSERT_REQUEST.one(tx, **row).rowcount > 0


def _first_answer(tx: Tx, order: GrantOrder) -> Granted:
    replay = _replay(tx, order)
    assert replay is not None
    return replay


def _replay(tx: Tx, order: GrantOrder) -> Granted | None:
    """Return the first answer to this request, the lease as it is now."""
    row = _ANSWER.one(tx, tenant_id=_asked_by(order), request_id=order.request_id).first()
    if row is None:
        return None
    if row.fingerprint != _fingerprint(order):
        raise InvalidField("request_id", "was used for another request")
    if not row.lease_id:
        refusal = Refusal(row.refusal)
        return Granted(None, None, Payload(), refusal, tx.now_us(), effects=NO_EFFECTS)
    found = _LEASED.one(tx, lease_id=row.lease_id).scalar()
    work = Workspace(tx)
    work.lock([found] if found else [], [row.lease_id])
    now_us = tx.now_us()
    lease = work.leases.get(row.lease_id)
    if lease is None:
        return Granted(None, None, Payload(), Refusal.NOT_HELD, now_us)
    own = work.ownerships.get(lease.ownership_id)
    if own is None or not lease.usable(now_us):
        return Granted(lease, None, Payload(), None, now_us)
    payload = load_payload(tx, own.ownership_id, digests=order.begin_read)
    return Granted(lease, own, payload, None, now_us)


def _fingerprint(order: GrantOrder) -> str:
    holder = order.holder
    target = ("session", order.session_id) if order.session_id else ("own", order.ownership_id)
    return derived("ask", *target, holder.worker_id, str(holder.epoch))
