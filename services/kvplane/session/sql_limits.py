"""A tenant's limits in a transaction: its row is locked before anything else is."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, delete, func, insert, select, update

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, insert_ignore, is_listed, prepared
from kvplane.kernel.errors import QuotaExceeded
from kvplane.kernel.limits import Quotas
from kvplane.session import domain, quota
from kvplane.session.domain import BeginTurn
from kvplane.session.quota import NOTHING, Ask, OverQuota, Used
from kvplane.session.sql_rows import IN_TENANT
from kvplane.session.sql_usage import count_active, read_corrections
from kvplane.session.tables import tenant_rates, unheld_turns

_USED: Final = ("at_us", "soft_requests", "soft_tokens", "hard_requests", "hard_tokens")
_SETTLED: Final = ("settled_tokens", "settled_unheld_tokens")
_COLUMNS: Final = tuple(tenant_rates.c[name] for name in (*_USED, *_SETTLED))

# A tenant's replicas wait for one another here. All lock in one order, so a long wait is no
# deadlock, and PostgreSQL is told so before it takes the lock.
_IS_PATIENT: Final = func.set_config("lock_timeout", "1500", True).is_not(None)
_LOCK = Prepared(
    lambda is_postgres: (
        select(*_COLUMNS)
        .where(tenant_rates.c.tenant_id == IN_TENANT, *((_IS_PATIENT,) if is_postgres else ()))
        .with_for_update()
    )
)
_NEW = insert_ignore(tenant_rates)
_SAVE = prepared(
    update(tenant_rates)
    .where(tenant_rates.c.tenant_id == IN_TENANT)
    .values({name: bindparam(name) for name in (*_USED, *_SETTLED)})
)
_UNHELD = Prepared(
    lambda is_postgres: select(
        unheld_turns.c.request_id,
        unheld_turns.c.key_digest,
        unheld_turns.c.quota,
    ).where(
        unheld_turns.c.tenant_id == IN_TENANT, is_listed(unheld_turns.c.request_id, is_postgres)
    )
)
_INSERT_UNHELD = prepared(insert(unheld_turns))
_CLOSE_UNHELD = Prepared(
    lambda is_postgres: (
        update(unheld_turns)
        .where(
            unheld_turns.c.tenant_id == IN_TENANT,
            is_listed(unheld_turns.c.request_id, is_postgres),
        )
        .values(completed=True)
    )
)
_LOCK_UNHELD = Prepared(
    lambda is_postgres: (
        select(
            unheld_turns.c.request_id,
            unheld_turns.c.charged_tokens,
            unheld_turns.c.open_us,
            unheld_turns.c.completed,
        )
        .where(
            unheld_turns.c.tenant_id == IN_TENANT,
            is_listed(unheld_turns.c.request_id, is_postgres),
        )
        .order_by(unheld_turns.c.request_id)
        .with_for_update()
    )
)


@dataclass(frozen=True, slots=True)
class Charged:
    """A turn without a session, as the one who completes it needs it."""

    # None: there was no limit.
    tokens: int | None
    open_us: int
    completed: bool


@dataclass(frozen=True, slots=True)
class Unheld:
    """A turn that was served without a session."""

    key_digest: bytes
    over: OverQuota


class Gate:
    """What a tenant may still do. Its row stays locked until the transaction ends."""

    def __init__(self, tx: Tx, tenant_id: str, quotas: Quotas) -> None:
        """Lock the tenant's row, made if it is new."""
        self._tx = tx
        self._tenant_id = tenant_id
        self._quotas = quotas
        self._counts_tokens = max(quotas.hard.tokens_per_second, quotas.soft.tokens_per_second) > 0
        row = _LOCK.one(tx, tenant=tenant_id).one_or_none()
        if row is None:
            self._make()
            row = _LOCK.one(tx, tenant=tenant_id).one()
        stored, before = Used(*row[: len(_USED)]), row[len(_USED) :]
        self._settled = read_corrections(tx, tenant_id) if self._counts_tokens else tuple(before)
        self._now_us = tx.now_us()
        held, unheld = (now - then for now, then in zip(self._settled, before, strict=True))
        # As if what turns really used had been known when they began.
        whole = quota.settled(stored, held=held, unheld=unheld)
        self._base = quota.drained(whole, quotas, self._now_us)
        # With those turns of this transaction that are not certain to begin.
        self._used = self._base
        self._active: int | None = None

    def _make(self) -> None:
        held, unheld = read_corrections(self._tx, self._tenant_id)
        row = dict.fromkeys(_USED, 0) | {
            "tenant_id": self._tenant_id,
            "settled_tokens": held,
            "settled_unheld_tokens": unheld,
        }
        _NEW.many(self._tx, [row])

    def known(self, request_ids: Collection[str]) -> dict[str, Unheld]:
        """Return those of the requests that were served without a session before."""
        rows = _UNHELD.one(self._tx, tenant=self._tenant_id, ids=id_list(self._tx, request_ids))
        return {row[0]: Unheld(row[1], OverQuota(row[2])) for row in rows}

    def judge(self, ask: Ask) -> OverQuota | QuotaExceeded | None:
        """Decide about a turn by its size and the rates."""
        verdict = quota.judge(self._used, self._quotas, ask)
        if not isinstance(verdict, QuotaExceeded):
            self._used = quota.charged(self._used, ask, held=verdict is None)
        return verdict

    def create(self) -> None:
        """Charge a session that is made without a turn. Raises QuotaExceeded."""
        for verdict in (self.judge(NOTHING), self.judge_session()):
            if isinstance(verdict, QuotaExceeded):
                raise verdict
        self._write(self._used)

    def judge_session(self) -> OverQuota | QuotaExceeded | None:
        """Decide about one session more, which is counted if it may be made."""
        if not (self._quotas.hard.sessions or self._quotas.soft.sessions):
            return None
        if self._active is None:
            self._active = count_active(self._tx, self._tenant_id)
        verdict = quota.judge_sessions(self._active, self._quotas)
        self._active += verdict is None
        return verdict

    def charge_of(self, ask: Ask) -> int | None:
        """Return what the rate of tokens is charged with, None where there is none."""
        return ask.tokens if self._counts_tokens else None

    def save(
        self, opened: Iterable[BeginTurn], unheld: Collection[tuple[BeginTurn, OverQuota]]
    ) -> None:
        """Charge the turns that have begun, with and without a session."""
        used = self._base
        for request in opened:
            used = quota.charged(used, request.ask, held=True)
        for request, _ in unheld:
            used = quota.charged(used, request.ask, held=False)
        if used is self._base:
            return
        self._write(used)
        if unheld:
            _INSERT_UNHELD.many(self._tx, [self._row(*item) for item in unheld])

    def _write(self, used: Used) -> None:
        # What no limit counts is no debt when there is one later.
        used = quota.drained(used, self._quotas, self._now_us)
        values = {name: getattr(used, name) for name in _USED}
        values |= zip(_SETTLED, self._settled, strict=True)
        _SAVE.one(self._tx, tenant=self._tenant_id, **values)

    def _row(self, request: BeginTurn, over: OverQuota) -> dict[str, object]:
        return {
            "tenant_id": self._tenant_id,
            "request_id": request.request_id,
            "key_digest": domain.key_digest(request),
            "quota": over.quota,
            "open_us": self._now_us,
            "charged_tokens": self.charge_of(request.ask),
            "completed": False,
        }


def open_gate(tx: Tx, tenant_id: str, quotas: Quotas) -> Gate | None:
    """Lock the row of a tenant with limits; None for one without."""
    return Gate(tx, tenant_id, quotas) if quota.concerns_turns(quotas) else None


def lock_unheld(tx: Tx, tenant_id: str, request_ids: Collection[str]) -> dict[str, Charged]:
    """Lock the turns without a session that there are, in the order of their ids."""
    if not request_ids:
        return {}
    rows = _LOCK_UNHELD.one(tx, tenant=tenant_id, ids=id_list(tx, request_ids))
    return {row[0]: Charged(row[1], row[2], bool(row[3])) for row in rows}


def close_unheld(tx: Tx, tenant_id: str, request_ids: Collection[str]) -> None:
    """Note that they are completed."""
    _CLOSE_UNHELD.one(tx, tenant=tenant_id, ids=id_list(tx, request_ids))


def forget_unheld(tx: Tx, before_us: int, limit: int) -> None:
    """Delete those that were begun before, of all tenants."""
    old = (
        select(unheld_turns.c.tenant_id, unheld_turns.c.request_id)
        .where(unheld_turns.c.open_us < before_us)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    for tenant_id, request_id in tx.connection.execute(old).all():
        tx.connection.execute(
            delete(unheld_turns).where(
                unheld_turns.c.tenant_id == tenant_id, unheld_turns.c.request_id == request_id
            )
        )
