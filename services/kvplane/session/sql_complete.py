"""Closing turns, many in one go, as `sql_begin` opens them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from kvplane.db.database import Tx
from kvplane.kernel.errors import KvplaneError, NotFound
from kvplane.session import domain
from kvplane.session.domain import CompleteTurn, Session, SessionConfig, Turn, TurnOutcome
from kvplane.session.sql_rows import (
    IN_TENANT,
    IS_OPEN,
    locked_sessions,
    padded,
    save_sessions,
    save_turns,
)
from kvplane.session.tables import session_history, turn_of, turns

# All that are open, which are few. A list of pairs would be searched by no index on SQLite.
_open_turns = select(turns).where(
    turns.c.tenant_id == IN_TENANT,
    turns.c.session_id.in_(bindparam("ids", expanding=True)),
    IS_OPEN,
)
# Of one session: a repetition is rare.
_any_turns = select(turns).where(
    turns.c.tenant_id == IN_TENANT,
    turns.c.session_id == bindparam("id"),
    turns.c.turn.in_(bindparam("numbers", expanding=True)),
)
_insert_history = insert(session_history)
_delete_history = delete(session_history).where(
    session_history.c.tenant_id == bindparam("b_tenant"),
    session_history.c.model == bindparam("b_model"),
    session_history.c.digest == bindparam("b_digest"),
    session_history.c.session_id == bindparam("b_session"),
)
_prune_history = delete(session_history).where(
    session_history.c.tenant_id == bindparam("b_tenant"),
    session_history.c.session_id == bindparam("b_session"),
    session_history.c.number <= bindparam("b_number"),
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
    parameters = {"tenant": tenant_id, "ids": padded(wanted)}
    rows = list(tx.connection.execute(_open_turns, parameters))
    for row in rows:
        wanted[row.session_id].discard(row.turn)
    for session_id, numbers in wanted.items():
        if numbers:
            one = {"tenant": tenant_id, "id": session_id, "numbers": padded(numbers)}
            rows += tx.connection.execute(_any_turns, one)
    return {(row.session_id, row.turn): turn_of(row) for row in rows}


def _record(tx: Tx, rows: list[dict[str, Any]], config: SessionConfig) -> None:
    keys = [
        {
            "b_tenant": row["tenant_id"],
            "b_model": row["model"],
            "b_digest": row["digest"],
            "b_session": row["session_id"],
        }
        for row in rows
    ]
    tx.connection.execute(_delete_history, keys)
    tx.connection.execute(_insert_history, rows)
    newest: dict[str, dict[str, Any]] = {}
    for row in rows:
        newest[row["session_id"]] = {
            "b_tenant": row["tenant_id"],
            "b_session": row["session_id"],
            "b_number": row["number"] - config.histories_kept,
        }
    tx.connection.execute(_prune_history, list(newest.values()))
