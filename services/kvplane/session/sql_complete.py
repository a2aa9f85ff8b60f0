"""Closing turns, many in one go, as `sql_begin` opens them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, id_list, is_listed, prepared
from kvplane.kernel.errors import KvplaneError, NotFound
from kvplane.kernel.limits import Quotas
from kvplane.session import domain
from kvplane.session.domain import (
    CompleteTurn,
    SessionConfig,
    Turn,
    TurnOutcome,
)
from kvplane.session.sql_limits import Charged, close_unheld, lock_unheld
from kvplane.session.sql_rows import (
    IN_TENANT,
    IS_OPEN,
    locked_sessions,
    save_sessions,
    save_turns,
)
from kvplane.session.sql_usage import add_usage
from kvplane.session.tables import TURN_COLUMNS, session_history, turn_of, turns
from kvplane.session.usage import Completed, Usage, correction, usage_of

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
_NOTHING = Usage()
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
    tx: Tx,
    tenant_id: str,
    reports: Sequence[CompleteTurn],
    config: SessionConfig,
    quotas: Quotas,
) -> list[Completed | KvplaneError]:
    """Do SessionStore.complete_turns."""
    locked = locked_sessions(tx, tenant_id, {r.session_id for r in reports if r.session_id})
    known = _read_turns(tx, tenant_id, locked, reports)
    unheld = lock_unheld(tx, tenant_id, {r.request_id for r in reports if r.request_id})
    now_us = tx.now_us()
    closed: dict[tuple[str, int], Turn] = {}
    changed: set[str] = set()
    histories: dict[tuple[str, str, bytes], dict[str, Any]] = {}
    answers: list[Completed | KvplaneError] = []
    total = _Total(now_us, max(quotas.soft.tokens_per_second, quotas.hard.tokens_per_second))
    for report in reports:
        if report.request_id:
            answers.append(_complete_unheld(report, unheld, total))
            continue
        session = locked.get(report.session_id)
        key = (report.session_id, report.turn)
        turn = known.get(key)
        if session is None:
            answers.append(NotFound("session", report.session_id))
            continue
        if turn is None:
            answers.append(NotFound("turn", f"{report.session_id}/{report.turn}"))
            continue
        used: Usage | None = None
        if turn.outcome is TurnOutcome.OPEN:
            total.held += total.correction(turn.charged_tokens, report, turn.open_us)
            used = total.add(report)
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
        answers.append(Completed(session, used))
    if closed:
        save_turns(tx, tenant_id, closed.values())
        save_sessions(tx, [locked[session_id] for session_id in sorted(changed)])
    if histories:
        _record(tx, list(histories.values()), config)
    if total.unheld_ids:
        close_unheld(tx, tenant_id, total.unheld_ids)
    if total.used.turns:
        add_usage(tx, tenant_id, total.used, total.held, total.unheld)
    return answers


@dataclass(slots=True)
class _Total:
    """What the turns that are closed now have used together."""

    now_us: int
    # The tenant's limit, the larger one; 0 for none.
    tokens_per_second: float
    used: Usage = _NOTHING
    # Tokens beyond what was charged at their beginning, with and without a session.
    held: int = 0
    unheld: int = 0
    unheld_ids: set[str] = field(default_factory=set)

    def correction(self, charged: int | None, report: CompleteTurn, open_us: int) -> int:
        drained = self.tokens_per_second * (self.now_us - open_us) / 1e6
        return correction(charged, report, drained)

    def add(self, report: CompleteTurn) -> Usage:
        used = usage_of(report)
        self.used += used
        return used


def _complete_unheld(
    report: CompleteTurn, unheld: dict[str, Charged], total: _Total
) -> Completed | KvplaneError:
    turn = unheld.get(report.request_id)
    if turn is None:
        return NotFound("turn", report.request_id)
    if turn.completed or report.request_id in total.unheld_ids:
        return Completed(None, None)
    total.unheld_ids.add(report.request_id)
    total.unheld += total.correction(turn.tokens, report, turn.open_us)
    return Completed(None, total.add(report))


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
