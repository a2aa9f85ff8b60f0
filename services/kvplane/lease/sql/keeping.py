"""What is held in all, what of it is freed before its time, and how much it was over all time."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Select,
    bindparam,
    case,
    cast,
    func,
    literal,
    literal_column,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, insert_ignore, prepared
from kvplane.lease.domain import free
from kvplane.lease.holds import Share, Stock, Usage
from kvplane.lease.keeping import Amount, Bound, Hold
from kvplane.lease.sql.tables import (
    LIVE_LEASE,
    LIVE_OWNERSHIP,
    leases,
    ownerships,
    tenant_holds,
    worker_epochs,
)
from kvplane.lease.sql.workspace import Workspace
from kvplane.lease.store import Effects
from kvplane.lease.values import Ownership, OwnershipState

# The row of tenant_holds that says until when all others count.
_NOBODY = ""

_O, _L, _T, _W = ownerships.c, leases.c, tenant_holds.c, worker_epochs.c
# Word for word the indexes' conditions, or SQLite would not use them.
_IS_HELD = text(LIVE_OWNERSHIP)
_HOLD_COLUMNS = (
    _O.ownership_id, _O.tenant_id, _O.worker_id, _O.num_tokens, _O.blocks, _O.reported_us,
    _O.state, _O.for_decode,
)  # fmt: skip


def _whole(value: ColumnElement[Any]) -> ColumnElement[int]:
    """Return a sum, which PostgreSQL makes a decimal of, as a number; 0 for no rows."""
    return func.coalesce(cast(value, _O.num_tokens.type), 0)


def _token_seconds(end_us: ColumnElement[int]) -> ColumnElement[float]:
    """Return tokens times seconds from the report, or from `until_us`, to `end_us`."""
    until_us = bindparam("until_us", type_=_O.reported_us.type)
    begin_us = case((_O.reported_us > until_us, _O.reported_us), else_=until_us)
    held_us = case((end_us > begin_us, end_us - begin_us), else_=0)
    return func.sum(cast(_O.num_tokens, Double) * held_us / 1e6)


_UNTIL = prepared(select(_T.counted_until_us).where(_T.tenant_id == _NOBODY))
# Not the column by itself, or SQLite would go by its index through all that has ever ended.
_ENDED_OF = _O.tenant_id.concat(literal_column("''"))
# In one statement, so that what ends meanwhile is not in both sums.
_STOCK = prepared(
    union_all(
        select(
            _O.worker_id,
            _O.tenant_id,
            _whole(func.sum(_O.num_tokens)),
            _whole(func.sum(_O.blocks)),
            _token_seconds(bindparam("now_us", type_=_O.reported_us.type)),
        )
        .where(_IS_HELD)
        .group_by(_O.worker_id, _O.tenant_id),
        select(literal(""), _ENDED_OF, literal(0), literal(0), _token_seconds(_O.ended_us))
        .where(
            _O.ended_us > bindparam("until_us", type_=_O.reported_us.type), _O.tenant_id != _NOBODY
        )
        .group_by(_ENDED_OF),
    )
)
_LIVE_LEASES = prepared(
    select(_L.tenant_id, func.count()).where(text(LIVE_LEASE)).group_by(_L.tenant_id)
)
_LIMITS = prepared(select(_W.worker_id, _W.hold_limit_blocks).where(_W.hold_limit_blocks > 0))
_ADD_MARK = insert_ignore(tenant_holds)
_LOCK_MARK = prepared(select(_T.counted_until_us).where(_T.tenant_id == _NOBODY).with_for_update())
_MOVE_MARK = prepared(
    update(tenant_holds).where(_T.tenant_id == _NOBODY).values(counted_until_us=bindparam("now_us"))
)


def _add_held(is_postgres: bool) -> Any:
    values = {name: bindparam(name, type_=c.type) for name, c in _T.items()}
    insert = (postgresql.insert if is_postgres else sqlite.insert)(tenant_holds).values(values)
    return insert.on_conflict_do_update(
        index_elements=[_T.tenant_id],
        set_={
            "held_token_seconds": _T.held_token_seconds + insert.excluded.held_token_seconds,
            "counted_until_us": insert.excluded.counted_until_us,
        },
    )


_ADD_HELD = Prepared(_add_held)


def _amount(where: ColumnElement[bool]) -> Prepared:
    return prepared(
        select(_whole(func.sum(_O.num_tokens)), _whole(func.sum(_O.blocks))).where(where, _IS_HELD)
    )


_ON_WORKER = _amount(_O.worker_id == bindparam("worker_id"))
_OF_TENANT = _amount(_O.tenant_id == bindparam("tenant_id"))
_LEASES_OF = prepared(
    select(func.count())
    .select_from(leases)
    .where(_L.tenant_id == bindparam("tenant_id"), text(LIVE_LEASE))
)
_HELD_SECONDS = prepared(
    select(_T.held_token_seconds).where(_T.tenant_id == bindparam("tenant_id"))
)


def stock(tx: Tx) -> Stock:
    """See `HoldStore.stock`."""
    until_us = _UNTIL.one(tx).scalar() or 0
    now_us = tx.now_us()
    shares: list[Share] = []
    token_seconds: dict[str, float] = {}
    for worker_id, tenant_id, tokens, blocks, held in _STOCK.one(
        tx, until_us=until_us, now_us=now_us
    ):
        if worker_id:
            shares.append(Share(worker_id, tenant_id, Amount(tokens, blocks)))
        token_seconds[tenant_id] = token_seconds.get(tenant_id, 0.0) + held
    return Stock(
        now_us=now_us,
        until_us=until_us,
        shares=shares,
        token_seconds=token_seconds,
        leases={row[0]: row[1] for row in _LIVE_LEASES.one(tx)},
        limits={row[0]: row[1] for row in _LIMITS.one(tx)},
    )


def count_held(tx: Tx, counted: Stock) -> bool:
    """See `HoldStore.count_held`."""
    _ADD_MARK.one(tx, tenant_id=_NOBODY, held_token_seconds=0.0, counted_until_us=0)
    if _LOCK_MARK.one(tx).scalar() != counted.until_us:
        return False
    rows = [
        {
            "tenant_id": tenant_id,
            "held_token_seconds": held,
            "counted_until_us": counted.now_us,
        }
        for tenant_id, held in sorted(counted.token_seconds.items())
        if held
    ]
    if rows:
        _ADD_HELD.many(tx, rows)
    _MOVE_MARK.one(tx, now_us=counted.now_us)
    return True


def usage(tx: Tx, tenant_id: str) -> Usage:
    """See `HoldStore.usage`."""
    return Usage(
        held=_held(tx, Bound(tenant_id=tenant_id)),
        live_leases=_LEASES_OF.one(tx, tenant_id=tenant_id).scalar() or 0,
        held_token_seconds=_HELD_SECONDS.one(tx, tenant_id=tenant_id).scalar() or 0.0,
    )


def holds_on(tx: Tx, worker_id: str) -> tuple[list[Hold], int]:
    """See `HoldStore.holds_on`."""
    return _holds(tx, select(*_HOLD_COLUMNS).where(_O.worker_id == worker_id, _IS_HELD))


def holds_of(tx: Tx, tenant_id: str) -> tuple[list[Hold], int]:
    """See `HoldStore.holds_of`."""
    return _holds(tx, select(*_HOLD_COLUMNS).where(_O.tenant_id == tenant_id, _IS_HELD))


def free_holds(tx: Tx, bound: Bound, chosen: Sequence[Hold]) -> tuple[list[Hold], Effects]:
    """See `HoldStore.free_holds`."""
    work = Workspace(tx)
    work.lock(hold.ownership_id for hold in chosen)
    # After the locks: who had them may have freed as much.
    held = _held(tx, bound)
    now_us = tx.now_us()
    freed = []
    for hold in chosen:
        if not bound.excess(held).some:
            break
        own = work.ownerships.get(hold.ownership_id)
        if own is not None and _is_idle(own):
            work.apply(free(own, None, now_us))
            held -= hold.amount
            freed.append(hold)
    return freed, work.flush(now_us)


def _is_idle(own: Ownership) -> bool:
    """Tell whether nobody reads it or may begin to: it may have been leased since the choice."""
    return own.state is OwnershipState.HELD


def _held(tx: Tx, bound: Bound) -> Amount:
    if bound.worker_id:
        [(tokens, blocks)] = _ON_WORKER.one(tx, worker_id=bound.worker_id)
    else:
        [(tokens, blocks)] = _OF_TENANT.one(tx, tenant_id=bound.tenant_id)
    return Amount(tokens, blocks)


def _holds(tx: Tx, query: Select[Any]) -> tuple[list[Hold], int]:
    holds = [
        Hold(
            ownership_id=row.ownership_id,
            tenant_id=row.tenant_id,
            worker_id=row.worker_id,
            amount=Amount(row.num_tokens, row.blocks),
            reported_us=row.reported_us,
            leased=row.state == OwnershipState.LEASED,
            for_decode=row.for_decode,
        )
        for row in tx.connection.execute(query)
    ]
    return holds, tx.now_us()
