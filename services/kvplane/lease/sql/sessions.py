"""What concerns a session as a whole: one report at a time, newer turns, its end."""

from collections.abc import Iterable

from sqlalchemy import ARRAY, String, bindparam, false, select, text, tuple_

from kvplane.db.database import Tx
from kvplane.db.prepared import insert_ignore, prepared
from kvplane.lease.domain import free
from kvplane.lease.sql.tables import ended_sessions, ownerships
from kvplane.lease.sql.workspace import Workspace
from kvplane.lease.values import OwnershipState

Session = tuple[str, str]  # tenant_id, session_id

# Rows that are not there yet cannot be locked. Two reports of one session that do not see each
# other's would not see which is newer; a report and a withdrawal of one id that do not see
# each other would both be believed. They share 1,024 locks: PostgreSQL has room for some
# thousands, and a batch of reports may name more sessions than that.
_LOCK = prepared(
    text(
        "SELECT pg_advisory_xact_lock(k) FROM (SELECT DISTINCT"
        " hashtextextended(k, 0) & 1023 AS k FROM unnest(:keys) AS k ORDER BY 1) AS ks"
    ).bindparams(bindparam("keys", type_=ARRAY(String)))
)
_O = ownerships.c
_NEWER = prepared(
    select(_O.ownership_id)
    .where(
        _O.tenant_id == bindparam("tenant_id"),
        _O.session_id == bindparam("session_id"),
        _O.state <= OwnershipState.LEASED,
        _O.for_decode == false(),
        _O.turn > bindparam("turn"),
    )
    .limit(1)
)
_INSERT_ENDED = insert_ignore(ended_sessions)


def lock(tx: Tx, sessions: Iterable[Session], ownership_ids: Iterable[str] = ()) -> None:
    """Let nobody else report or end these sessions, or report or withdraw these ids, until
    this transaction is over.

    Comes before all other locks. SQLite has one writer at a time in any case.
    """
    keys = {f"{len(tenant_id)} {tenant_id} {name}" for tenant_id, name in sessions}
    keys.update(ownership_ids)
    if keys and tx.is_postgres:
        _LOCK.one(tx, keys=sorted(keys))


def ended(tx: Tx, sessions: Iterable[Session]) -> set[Session]:
    """Return which of these sessions have ended, as far as that is remembered."""
    pairs = sorted(sessions)
    if not pairs:
        return set()
    c = ended_sessions.c
    query = select(c.tenant_id, c.session_id)
    query = query.where(tuple_(c.tenant_id, c.session_id).in_(pairs))
    return {(row[0], row[1]) for row in tx.connection.execute(query)}


def remember_end(tx: Tx, tenant_id: str, session_id: str, now_us: int) -> None:
    """Have what is reported of this session from now on freed at once."""
    _INSERT_ENDED.one(tx, tenant_id=tenant_id, session_id=session_id, ended_us=now_us)


def free_outdated(work: Workspace, now_us: int) -> None:
    """Free what this transition has put back to HELD if its session has a later turn by now."""
    for own in work.returned():
        if own.for_decode or not own.session_id:
            continue
        newer = _NEWER.one(
            work.tx, tenant_id=own.tenant_id, session_id=own.session_id, turn=own.turn
        )
        if newer.first() is not None:
            work.apply(free(own, None, now_us))
