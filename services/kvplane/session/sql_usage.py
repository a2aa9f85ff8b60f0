"""What tenants have used: sums in parts, so that no two replicas share a row as a rule."""

import secrets
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Table, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, prepared
from kvplane.session.sql_rows import IN_TENANT, IS_ACTIVE
from kvplane.session.tables import sessions, tenant_usage
from kvplane.session.usage import Usage

_PARTS: Final = 256
_PART: Final = secrets.randbelow(_PARTS)
_USAGE: Final = tuple(field.name for field in fields(Usage))
_CORRECTIONS: Final = ("corrected_tokens", "corrected_unheld_tokens")


def _adding(table: Table, key: tuple[str, ...], names: tuple[str, ...]) -> Prepared:
    """Return an insert of a row, or the addition of its numbers to the one that is there."""

    def build(is_postgres: bool) -> Any:
        dialect: Any = postgresql if is_postgres else sqlite
        values = {name: bindparam(name, type_=table.c[name].type) for name in (*key, *names)}
        statement = dialect.insert(table).values(values)
        sums = {name: table.c[name] + statement.excluded[name] for name in names}
        return statement.on_conflict_do_update(index_elements=key, set_=sums)

    return Prepared(build)


_ADD = _adding(tenant_usage, ("tenant_id", "part"), (*_USAGE, *_CORRECTIONS))
_SUMS = prepared(
    select(*(func.coalesce(func.sum(tenant_usage.c[name]), 0) for name in _USAGE)).where(
        tenant_usage.c.tenant_id == IN_TENANT
    )
)
_CORRECTED = prepared(
    select(*(func.coalesce(func.sum(tenant_usage.c[name]), 0) for name in _CORRECTIONS)).where(
        tenant_usage.c.tenant_id == IN_TENANT
    )
)
_ACTIVE = prepared(
    select(func.count()).select_from(sessions).where(sessions.c.tenant_id == IN_TENANT, IS_ACTIVE)
)


def add_usage(tx: Tx, tenant_id: str, used: Usage, held: int = 0, unheld: int = 0) -> None:
    """Add what turns used; `held` and `unheld` are tokens beyond what they were charged."""
    values = {name: getattr(used, name) for name in _USAGE}
    corrections = {"corrected_tokens": held, "corrected_unheld_tokens": unheld}
    _ADD.many(tx, [{"tenant_id": tenant_id, "part": _PART, **values, **corrections}])


def read_usage(tx: Tx, tenant_id: str) -> Usage:
    """Return a tenant's sums."""
    return Usage(*map(int, _SUMS.one(tx, tenant=tenant_id).one()))


def read_corrections(tx: Tx, tenant_id: str) -> tuple[int, int]:
    """Return the sums of all corrections, with and without a session."""
    held, unheld = _CORRECTED.one(tx, tenant=tenant_id).one()
    return int(held), int(unheld)


def count_active(tx: Tx, tenant_id: str) -> int:
    """Return how many sessions a tenant has, by the partial index of active ones."""
    return int(_ACTIVE.one(tx, tenant=tenant_id).scalar_one())
