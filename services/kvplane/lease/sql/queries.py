"""Looking things up, within one tenant."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, Table, and_, or_, select

from kvplane.db.database import Tx
from kvplane.kernel.errors import NotFound
from kvplane.lease.sql.tables import leases, ownerships
from kvplane.lease.sql.workspace import (
    LEASE_COLUMNS,
    OWNERSHIP_COLUMNS,
    load_payload,
    to_lease,
    to_ownership,
)
from kvplane.lease.store import Listed, Page
from kvplane.lease.values import Lease, LeaseState, Ownership, OwnershipState, Payload


def get_ownership(tx: Tx, tenant_id: str, ownership_id: str) -> tuple[Ownership, Payload, int]:
    """See `LeaseStore.get_ownership`."""
    c = ownerships.c
    query = select(*OWNERSHIP_COLUMNS)
    query = query.where(c.tenant_id == tenant_id, c.ownership_id == ownership_id)
    row = tx.connection.execute(query).first()
    if row is None:
        raise NotFound("ownership", ownership_id)
    return to_ownership(row), load_payload(tx, ownership_id, digests=True), tx.now_us()


def get_lease(tx: Tx, tenant_id: str, lease_id: str) -> tuple[Lease, int]:
    """See `LeaseStore.get_lease`."""
    query = select(*LEASE_COLUMNS)
    query = query.where(leases.c.tenant_id == tenant_id, leases.c.lease_id == lease_id)
    row = tx.connection.execute(query).first()
    if row is None:
        raise NotFound("lease", lease_id)
    return to_lease(row), tx.now_us()


def list_ownerships(
    tx: Tx,
    tenant_id: str,
    session_id: str,
    worker_id: str,
    states: Sequence[OwnershipState],
    page: Page,
) -> Listed:
    """See `LeaseStore.list_ownerships`."""
    c = ownerships.c
    query = _filtered(select(*OWNERSHIP_COLUMNS), ownerships, tenant_id, session_id, states)
    if worker_id:
        query = query.where(c.worker_id == worker_id)
    query = _paged(query, c.reported_us, c.ownership_id, page)
    rows = [to_ownership(row) for row in tx.connection.execute(query)]
    shown, after = rows[: page.size], None
    if len(rows) > page.size:
        after = (shown[-1].reported_us, shown[-1].ownership_id)
    return Listed(shown, after, tx.now_us())


def list_leases(
    tx: Tx,
    tenant_id: str,
    session_id: str,
    worker_id: str,
    states: Sequence[LeaseState],
    page: Page,
) -> Listed:
    """See `LeaseStore.list_leases`."""
    c = leases.c
    query = _filtered(select(*LEASE_COLUMNS), leases, tenant_id, session_id, states)
    if worker_id:
        query = query.where(c.holder_worker_id == worker_id)
    query = _paged(query, c.granted_us, c.lease_id, page)
    rows = [to_lease(row) for row in tx.connection.execute(query)]
    shown, after = rows[: page.size], None
    if len(rows) > page.size:
        after = (shown[-1].granted_us, shown[-1].lease_id)
    return Listed(shown, after, tx.now_us())


def _filtered(
    query: Select[tuple[object, ...]],
    table: Table,
    tenant_id: str,
    session_id: str,
    states: Sequence[int],
) -> Select[tuple[object, ...]]:
    query = query.where(table.c.tenant_id == tenant_id)
    if session_id:
        query = query.where(table.c.session_id == session_id)
    if states:
        query = query.where(table.c.state.in_(states))
    return query


def _paged(
    query: Select[tuple[object, ...]],
    instant: ColumnElement[int],
    ident: ColumnElement[str],
    page: Page,
) -> Select[tuple[object, ...]]:
    if page.after is not None:
        at_us, after_id = page.after
        query = query.where(or_(instant < at_us, and_(instant == at_us, ident < after_id)))
    # One more than wanted, to know whether another page follows.
    return query.order_by(instant.desc(), ident.desc()).limit(page.size + 1)
