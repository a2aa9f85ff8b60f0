"""Reading, locking and writing whole rows, many in one go."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, Insert, Table, bindparam, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Tx
from kvplane.session.domain import Session, Turn
from kvplane.session.tables import session_of, session_values, sessions, turn_values, turns

IN_TENANT: BindParameter[str] = bindparam("tenant")
# Literals: a statement prepared with a parameter there could not use the partial indexes.
IS_OPEN = turns.c.outcome == literal_column("0")
IS_ACTIVE = sessions.c.state == literal_column("1")

_sessions_by_id = select(sessions).where(
    sessions.c.tenant_id == IN_TENANT,
    sessions.c.session_id.in_(bindparam("ids", expanding=True)),
)
_locked_sessions = _sessions_by_id.order_by(sessions.c.session_id).with_for_update()


def insert_new(tx: Tx, table: Table) -> Insert:
    """Return an INSERT that leaves rows alone which exist already."""
    if tx.is_postgres:
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def _update_of(table: Table, key: Sequence[str], fixed: Collection[str]) -> tuple[Any, list[str]]:
    """Return an UPDATE of one row by `key`, without what never changes, and its parameters."""
    names = [c.name for c in table.columns if c.name not in key and c.name not in fixed]
    columns: dict[str, Any] = {name: bindparam(f"v_{name}") for name in names}
    where = [table.c[name] == bindparam(f"v_{name}") for name in key]
    return update(table).where(*where).values(columns), [*key, *names]


_update_sessions, _session_columns = _update_of(
    sessions, ("tenant_id", "session_id"), {"name", "create_us"}
)
_update_turns, _turn_columns = _update_of(
    turns,
    ("tenant_id", "session_id", "turn"),
    {
        "request_id",
        "key_digest",
        "model",
        "open_us",
        "previous_completed",
        "open_turns",
        "before_prefill_worker_id",
        "before_decode_worker_id",
        "before_tokens_reused",
        "before_tokens_recomputed",
    },
)


def _chosen(values: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {f"v_{name}": values[name] for name in names}


def padded(values: Iterable[Any]) -> list[Any]:
    """Fill up an IN list to a power of two, so that few statements need preparing."""
    result = list(values)
    size = 1
    while size < len(result):
        size *= 2
    return result + result[:1] * (size - len(result))


def read_sessions(tx: Tx, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    """Read the sessions that exist."""
    if not ids:
        return {}
    rows = tx.connection.execute(_sessions_by_id, {"tenant": tenant_id, "ids": padded(ids)})
    return {row.session_id: session_of(row) for row in rows}


def locked_sessions(tx: Tx, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    """Lock the sessions that exist, in the order of their ids."""
    if not ids:
        return {}
    rows = tx.connection.execute(_locked_sessions, {"tenant": tenant_id, "ids": padded(ids)})
    return {row.session_id: session_of(row) for row in rows}


def save_sessions(tx: Tx, changed: Iterable[Session]) -> None:
    """Write sessions that exist."""
    if values := [_chosen(session_values(session), _session_columns) for session in changed]:
        tx.connection.execute(_update_sessions, values)


def save_turns(tx: Tx, tenant_id: str, changed: Iterable[Turn]) -> None:
    """Write turns that exist."""
    if values := [_chosen(turn_values(tenant_id, turn), _turn_columns) for turn in changed]:
        tx.connection.execute(_update_turns, values)
