"""Reading, locking and writing whole rows, many in one go."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, Select, Table, bindparam, literal_column, select, update

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, insert_ignore, is_listed, prepared
from kvplane.session.domain import Session, Turn
from kvplane.session.tables import (
    SESSION_COLUMNS,
    session_of,
    session_values,
    sessions,
    turn_values,
    turns,
)

IN_TENANT: BindParameter[str] = bindparam("tenant")
# Literals: a statement prepared with a parameter there could not use the partial indexes.
IS_OPEN = turns.c.outcome == literal_column("0")
IS_ACTIVE = sessions.c.state == literal_column("1")


def _sessions_by_id(is_postgres: bool) -> Select[Any]:
    return select(*SESSION_COLUMNS).where(
        sessions.c.tenant_id == IN_TENANT, is_listed(sessions.c.session_id, is_postgres)
    )


_READ_SESSIONS = Prepared(_sessions_by_id)
_LOCK_SESSIONS = Prepared(
    lambda is_postgres: (
        _sessions_by_id(is_postgres).order_by(sessions.c.session_id).with_for_update()
    )
)
NEW_SESSIONS = insert_ignore(sessions)


def _update_of(table: Table, key: Sequence[str], fixed: Collection[str]) -> Prepared:
    """Return an UPDATE of one row by `key`, without what never changes."""
    names = [c.name for c in table.columns if c.name not in key and c.name not in fixed]
    columns: dict[str, Any] = {name: bindparam(name) for name in names}
    # Apart from the columns' own names, which an UPDATE keeps for the values to be set.
    where = [table.c[name] == bindparam(f"of_{name}") for name in key]
    return prepared(update(table).where(*where).values(columns))


_SESSION_KEY = ("tenant_id", "session_id")
_TURN_KEY = ("tenant_id", "session_id", "turn")
_UPDATE_SESSION = _update_of(sessions, _SESSION_KEY, {"name", "create_us"})
_UPDATE_TURN = _update_of(
    turns,
    _TURN_KEY,
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
        "charged_tokens",
    },
)


def _keyed(values: dict[str, Any], key: Sequence[str]) -> dict[str, Any]:
    return values | {f"of_{name}": values[name] for name in key}


def read_sessions(tx: Tx, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    """Read the sessions that exist."""
    return _sessions(tx, _READ_SESSIONS, tenant_id, ids)


def locked_sessions(tx: Tx, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    """Lock the sessions that exist, in the order of their ids."""
    return _sessions(tx, _LOCK_SESSIONS, tenant_id, ids)


def _sessions(tx: Tx, query: Prepared, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    if not ids:
        return {}
    found = map(session_of, query.one(tx, tenant=tenant_id, ids=id_list(tx, ids)))
    return {session.session_id: session for session in found}


def save_sessions(tx: Tx, changed: Iterable[Session]) -> None:
    """Write sessions that exist."""
    if rows := [_keyed(session_values(session), _SESSION_KEY) for session in changed]:
        _UPDATE_SESSION.many(tx, rows)


def save_turns(tx: Tx, tenant_id: str, changed: Iterable[Turn]) -> None:
    """Write turns that exist."""
    if rows := [_keyed(turn_values(tenant_id, turn), _TURN_KEY) for turn in changed]:
        _UPDATE_TURN.many(tx, rows)
