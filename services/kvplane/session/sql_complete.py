"""Closing turns, many in one go, as `sql_begin` opens them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, is_listed, prepared
from kvplane.kernel.errors import KvplaneError, NotFound
from kvplane.session import domain
from kvplane.session.domain import CompleteTurn, Session, SessionConfig, Turn, TurnOutcome
from kvplane.session.sql_rows import (
    IN_TENANT,
    IS_OPEN,
    locked_sessions,
    save_sessions,
    save_turns,
)
from kvplane.session.tables import TURN_COLUMNS, session_history, turn_of, turns

# All that are open, which are few. A list of pairs would be searched by no index on SQLite.
_OPEN_TURNS = Prepared(
    lambda is_postgres: select(*TURN_COLUMNS).where(
        turns.c.tenant_id == IN_TENANT, is_listed(turns.c.session_id, is_postgres), IS_OPEN
    )
)
# Of one session: a repetition is rare.
_ANY_TURNS = Prepared(
    lambda is_postgres: select(*TURN_COLUMNS).where(
        turns.c.tenant_id == IN_TENANT,
        turns.c.session_id == bindparam("id"),
        is_listed(turns.c.turn, is_postgres, "numbers"),
    )
)
_INSERT_HISTORY = prepared(insert(session_history))
_DELETE_HISTORY = prepared(
    delete(session_history).where(
        session_history.c.tenant_id == bindparam("tenant_id"),
        session_history.c.model == bindparam("model"),
        session_history.c.digest == bindparam("digest"),
        session_history.c.session_id == bindparam("session_id"),
    )
)
_PRUNE_HISTORY = prepared(
    delete(session_history).where(
        session_history.c.tenant_id == bindparam("tenant_id"),
        session_history.c.session_id == bindparam("session_id"),
        session_history.c.number <= bindparam("newest_gone"),
    )
)


def complete_turns(
    tx: Tx, tenant_id: str, reports: Sequence[CompleteTurn], config: SessionConfig
) -> list[Session | KvplaneError]:
    """Do SessionStore.complete_turns."""
    locked = locked_sessions(tx, tenant_id, {report.session_id for report in reports})
    known = _read_turns(tx, tenant_id, locked, reports)
    now_us = tx.now_us()
    closed: dict[tuple[str, int], Turn] = {}
    changed: set[str] = set()
    histories: dict[tuple[str, str, bytes], dict[str, Any]] = {}
    answers: list[Session | KvplaneError] = []
    for report in reports:
        session = locked.get(report.session_id)
        key = (report.session_id, report.turn)
        turn = known.get(key)
        if session is None:
            answers.append(NotFound("session", report.session_id))
            continue
        if turn is None:
            answers.append(NotFound("turn", f"{report.session_id}/{report.turn}"))
            continue
        if turn.outcome is TurnOutcome.OPEN:
            after, turn = domain.complete_turn(session, turn, report, now_us, config)
            if domain.records_history(session, report):
                histories[(session.session_id, turn.model, report.history_digest)] = {
                    "tenant_id": tenant_id,
                    "model": turn.model,
                    "digest": report.history_digest,
                    "session_id": session.session_id,
                    "turn": turn.turn,
                    "number": after.histories,
                    "recorded_us": now_us,
                }
            locked[session.session_id] = session = after
            known[key] = closed[key] = turn
            changed.add(session.session_id)
        answers.append(session)
    if closed:
        save_turns(tx, tenant_id, closed.values())
        save_sessions(tx, [locked[session_id] for session_id in sorted(changed)])
    if histories:
        _record(tx, list(histories.values()), config)
    return answers


def _read_turns(
    tx: Tx, tenant_id: str, locked: Collection[str], reports: Sequence[CompleteTurn]
) -> dict[tuple[str, int], Turn]:
    wanted: defaultdict[str, set[int]] = defaultdict(set)
    for report in reports:
        if report.session_id in locked:
            wanted[report.session_id].add(report.turn)
    if not wanted:
        return {}
    found = list(map(turn_of, _OPEN_TURNS.one(tx, tenant=tenant_id, ids=id_list(tx, wanted))))
    for turn in found:
        wanted[turn.session_id].discard(turn.turn)
    for session_id, numbers in wanted.items():
        if numbers:
            listed = id_list(tx, numbers)
            rows = _ANY_TURNS.one(tx, tenant=tenant_id, id=session_id, numbers=listed)
            found += map(turn_of, rows)
    return {(turn.session_id, turn.turn): turn for turn in found}


def _record(tx: Tx, rows: list[dict[str, Any]], config: SessionConfig) -> None:
    _DELETE_HISTORY.many(tx, rows)
    _INSERT_HISTORY.many(tx, rows)
    newest = {row["session_id"]: row for row in rows}
    _PRUNE_HISTORY.many(
        tx,
        [row | {"newest_gone": row["number"] - config.histories_kept} for row in newest.values()],
    )
