"""Locked rows as domain values, and what has changed about them.

Locks are taken in one order everywhere: sessions and ids that may be new, worker epochs,
ownerships by id, leases by id.
An ownership's row guards all its leases; a renewal, which moves nothing but a deadline,
locks leases alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from sqlalchemy import Select, bindparam, false, or_, select, update

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, insert_ignore, is_listed, prepared
from kvplane.kernel.ids import derived
from kvplane.lease.sql.tables import (
    lease_commands,
    leases,
    ownership_payloads,
    ownerships,
    worker_epochs,
)
from kvplane.lease.store import Effects
from kvplane.lease.values import Change, Lease, LeaseState, Ownership, OwnershipState, Payload

# Both databases take about 32,000 parameters a statement.
CHUNK = 10_000
# An order to free is pointless once the engine has done so of its own accord.
_FREE_GRACE_US = 60_000_000

OWNERSHIP_COLUMNS = tuple(ownerships.c[name] for name in Ownership.__dataclass_fields__)
LEASE_COLUMNS = tuple(leases.c[name] for name in Lease.__dataclass_fields__)
_O_STATE, _O_CUTTABLE, _O_FOR_DECODE = (
    list(Ownership.__dataclass_fields__).index(name) for name in ("state", "cuttable", "for_decode")
)
_L_STATE, _L_DRAINING = (
    list(Lease.__dataclass_fields__).index(name) for name in ("state", "draining")
)
# Several times as quick as calling the enum.
_OWNERSHIP_STATES = {int(state): state for state in OwnershipState}
_LEASE_STATES = {int(state): state for state in LeaseState}

_O, _L, _P = ownerships.c, leases.c, ownership_payloads.c


def _locked_ownerships(*, skip_locked: bool) -> Callable[[bool], Select[Any]]:
    return lambda is_postgres: (
        select(*OWNERSHIP_COLUMNS)
        .where(is_listed(_O.ownership_id, is_postgres))
        .order_by(_O.ownership_id)
        .with_for_update(skip_locked=skip_locked)
    )


_LOCK_OWNERSHIPS = Prepared(_locked_ownerships(skip_locked=False))
_LOCK_FREE_OWNERSHIPS = Prepared(_locked_ownerships(skip_locked=True))
_LOCK_SESSION = prepared(
    select(*OWNERSHIP_COLUMNS)
    .where(
        _O.tenant_id == bindparam("tenant_id"),
        _O.session_id == bindparam("session_id"),
        _O.state <= OwnershipState.LEASED,
        or_(_O.for_decode == false(), bindparam("with_for_decode", type_=_O.for_decode.type)),
    )
    .order_by(_O.ownership_id)
    .with_for_update()
)
_LOCK_LEASES = Prepared(
    lambda is_postgres: (
        select(*LEASE_COLUMNS)
        .where(is_listed(_L.lease_id, is_postgres))
        .order_by(_L.lease_id)
        .with_for_update()
    )
)
_UPDATE_OWNERSHIP = prepared(
    update(ownerships)
    .where(_O.ownership_id == bindparam("key"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("state", "hold_deadline_us", "fencing_token", "lease_id", "ended_us")
        }
    )
)
_UPDATE_LEASE = prepared(
    update(leases)
    .where(_L.lease_id == bindparam("key"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("state", "deadline_us", "draining", "ended_us")
        }
    )
)
_INSERT_OWNERSHIP = insert_ignore(ownerships)
_INSERT_PAYLOAD = insert_ignore(ownership_payloads)
_INSERT_LEASE = insert_ignore(leases)
INSERT_COMMAND = insert_ignore(lease_commands)
_PAYLOAD = prepared(
    select(_P.params, _P.digests).where(_P.ownership_id == bindparam("ownership_id"))
)
_PRESENT_EPOCH = prepared(
    select(worker_epochs.c.epoch).where(worker_epochs.c.worker_id == bindparam("worker_id"))
)
_PARAMS = prepared(select(_P.params).where(_P.ownership_id == bindparam("ownership_id")))


def to_ownership(row: Sequence[Any]) -> Ownership:
    """Return the ownership of a row of OWNERSHIP_COLUMNS."""
    values: list[Any] = list(row)
    values[_O_STATE] = _OWNERSHIP_STATES[values[_O_STATE]]
    values[_O_CUTTABLE] = bool(values[_O_CUTTABLE])
    values[_O_FOR_DECODE] = bool(values[_O_FOR_DECODE])
    return Ownership(*values)


def to_lease(row: Sequence[Any]) -> Lease:
    """Return the lease of a row of LEASE_COLUMNS."""
    values: list[Any] = list(row)
    values[_L_STATE] = _LEASE_STATES[values[_L_STATE]]
    values[_L_DRAINING] = bool(values[_L_DRAINING])
    return Lease(*values)


def values_of(item: Ownership | Lease) -> dict[str, Any]:
    """Return a row to insert."""
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def chunks(ids: Iterable[str]) -> Iterable[list[str]]:
    """Yield sorted ids, without repeats, in lists that fit into a statement."""
    rest = iter(sorted(set(ids)))
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def load_payload(tx: Tx, ownership_id: str, *, digests: bool) -> Payload:
    """Return the bulky parts of an ownership; the digests only when wanted."""
    row = (_PAYLOAD if digests else _PARAMS).one(tx, ownership_id=ownership_id).first()
    return Payload(*row) if row else Payload()


class Workspace:
    """The rows that a transition has locked."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx
        self.ownerships: dict[str, Ownership] = {}
        self.leases: dict[str, Lease] = {}
        self._new: dict[str, Payload] = {}
        self._new_leases: list[str] = []
        self._changed_ownerships: set[str] = set()
        self._changed_leases: set[str] = set()
        self._returned: set[str] = set()
        self._free: dict[str, int] = {}

    def lock(
        self,
        ownership_ids: Iterable[str],
        lease_ids: Iterable[str] = (),
        *,
        skip_locked: bool = False,
    ) -> None:
        """Lock ownerships, their current leases, and those leases."""
        query = _LOCK_FREE_OWNERSHIPS if skip_locked else _LOCK_OWNERSHIPS
        ids = sorted(set(ownership_ids))
        rows = query.one(self.tx, ids=id_list(self.tx, ids)) if ids else ()
        self._take(rows, lease_ids)

    def lock_session(self, tenant_id: str, session_id: str, *, for_decode: bool) -> None:
        """Lock a session's live ownerships, also those for a decode if wanted."""
        rows = _LOCK_SESSION.one(
            self.tx, tenant_id=tenant_id, session_id=session_id, with_for_decode=for_decode
        )
        self._take(rows, ())

    def _take(self, rows: Iterable[Sequence[Any]], lease_ids: Iterable[str]) -> None:
        wanted = set(lease_ids)
        for row in rows:
            own = to_ownership(row)
            self.ownerships[own.ownership_id] = own
            if own.lease_id:
                wanted.add(own.lease_id)
        if wanted:
            for row in _LOCK_LEASES.one(self.tx, ids=id_list(self.tx, sorted(wanted))):
                self.leases[row[0]] = to_lease(row)

    def current_lease(self, own: Ownership) -> Lease | None:
        """Return the lease that is live on it or drains."""
        return self.leases.get(own.lease_id) if own.lease_id else None

    def add(self, own: Ownership, payload: Payload) -> None:
        """Add a new ownership."""
        self.ownerships[own.ownership_id] = own
        self._new[own.ownership_id] = payload

    def add_lease(self, lease: Lease) -> None:
        """Add a new lease."""
        self.leases[lease.lease_id] = lease
        self._new_leases.append(lease.lease_id)

    def apply(self, change: Change) -> None:
        """Take over the outcome of a transition of locked rows."""
        own, lease = change.ownership, change.lease
        before = self.ownerships.get(own.ownership_id)
        if before != own:
            if before is not None and before.state is OwnershipState.LEASED:
                self._returned.add(own.ownership_id)
            self.ownerships[own.ownership_id] = own
            self._changed_ownerships.add(own.ownership_id)
        if lease is not None and self.leases.get(lease.lease_id) != lease:
            self.leases[lease.lease_id] = lease
            self._changed_leases.add(lease.lease_id)
        if change.free_now:
            lost = own.state is OwnershipState.LOST
            self.order_free(own, self._present_epoch(own.worker_id) if lost else own.epoch)

    def returned(self) -> list[Ownership]:
        """Return what was leased and is held again."""
        owns = [self.ownerships[ident] for ident in sorted(self._returned)]
        return [own for own in owns if own.state is OwnershipState.HELD]

    def _present_epoch(self, worker_id: str) -> int:
        epoch: int | None = _PRESENT_EPOCH.one(self.tx, worker_id=worker_id).scalar()
        return epoch or 0

    def order_free(self, own: Ownership, epoch: int) -> None:
        """Have the owner told to free it, in its present epoch."""
        self._free[own.ownership_id] = epoch

    def flush(self, now_us: int) -> Effects:
        """Write what has changed and return whom it concerns."""
        if self._new:
            self._insert_new()
        changed = sorted(self._changed_ownerships - self._new.keys())
        if changed:
            _UPDATE_OWNERSHIP.many(
                self.tx, [_ownership_change(self.ownerships[i]) for i in changed]
            )
        if self._new_leases:
            _INSERT_LEASE.many(self.tx, [values_of(self.leases[i]) for i in self._new_leases])
        if self._changed_leases:
            changes = [_lease_change(self.leases[i]) for i in sorted(self._changed_leases)]
            _UPDATE_LEASE.many(self.tx, changes)
        commanded = self._insert_commands(now_us) if self._free else frozenset()
        return Effects(commanded=commanded)

    def _insert_new(self) -> None:
        ids = sorted(self._new)
        rows = [values_of(self.ownerships[i]) for i in ids]
        _INSERT_OWNERSHIP.many(self.tx, rows)
        payloads = [
            {"ownership_id": i, "params": self._new[i].params, "digests": self._new[i].digests}
            for i in ids
        ]
        _INSERT_PAYLOAD.many(self.tx, payloads)

    def _insert_commands(self, now_us: int) -> frozenset[str]:
        rows = [
            command_row(
                derived("cmd", ident, "free", str(self._free[ident])),
                replace(self.ownerships[ident], epoch=self._free[ident]),
                now_us=now_us,
                expire_us=max(now_us, self.ownerships[ident].hold_deadline_us) + _FREE_GRACE_US,
            )
            for ident in sorted(self._free)
        ]
        INSERT_COMMAND.many(self.tx, rows)
        return frozenset(row["worker_id"] for row in rows)


def command_row(
    command_id: str, own: Ownership, *, now_us: int, expire_us: int, hold_until_us: int = 0
) -> dict[str, Any]:
    """Return a row of the outbox: FreeNow, or HoldLonger when `hold_until_us` is set."""
    return {
        "command_id": command_id,
        "worker_id": own.worker_id,
        "epoch": own.epoch,
        "ownership_id": own.ownership_id,
        "engine_id": own.engine_id,
        "request_id": own.request_id,
        "hold_until_us": hold_until_us,
        "created_us": now_us,
        "expire_us": expire_us,
    }


def _ownership_change(own: Ownership) -> dict[str, Any]:
    return {
        "key": own.ownership_id,
        "new_state": own.state,
        "new_hold_deadline_us": own.hold_deadline_us,
        "new_fencing_token": own.fencing_token,
        "new_lease_id": own.lease_id,
        "new_ended_us": own.ended_us,
    }


def _lease_change(lease: Lease) -> dict[str, Any]:
    return {
        "key": lease.lease_id,
        "new_state": lease.state,
        "new_deadline_us": lease.deadline_us,
        "new_draining": lease.draining,
        "new_ended_us": lease.ended_us,
    }
