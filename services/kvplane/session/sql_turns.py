"""Opening and closing turns, many in one go: the statements do not grow with the batch.

Each reads what it needs, locks the sessions in the order of their ids, lets the domain
decide item by item in memory, and writes what changed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, Insert, Table, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import Tx
from kvplane.kernel.errors import InvalidField, KvplaneError, NotFound, Unavailable
from kvplane.session import domain
from kvplane.session.domain import (
    Begun,
    Candidate,
    CompleteTurn,
    Session,
    SessionConfig,
    SessionState,
    Turn,
    TurnOutcome,
)
from kvplane.session.store import NewTurn
from kvplane.session.tables import (
    session_history,
    session_of,
    session_values,
    sessions,
    turn_of,
    turn_values,
    turns,
)

# Losing the race for a name, or for a session that just ended, this often in a row.
_FIND_TRIES = 4

_IN_TENANT: BindParameter[str] = bindparam("tenant")

_turns_by_request = select(turns).where(
    turns.c.tenant_id == _IN_TENANT, turns.c.request_id.in_(bindparam("ids", expanding=True))
)
_turns_by_number = select(turns).where(
    turns.c.tenant_id == _IN_TENANT,
    turns.c.session_id.in_(bindparam("ids", expanding=True)),
    turns.c.turn.in_(bindparam("numbers", expanding=True)),
)
_open_turns = (
    select(turns.c.session_id, func.count())
    .where(
        turns.c.tenant_id == _IN_TENANT,
        turns.c.session_id.in_(bindparam("ids", expanding=True)),
        turns.c.outcome == 0,
        turns.c.open_us > bindparam("since"),
    )
    .group_by(turns.c.session_id)
)
_sessions_by_id = select(sessions).where(
    sessions.c.tenant_id == _IN_TENANT,
    sessions.c.session_id.in_(bindparam("ids", expanding=True)),
)
_locked_sessions = _sessions_by_id.order_by(sessions.c.session_id).with_for_update()
_active_names = select(sessions.c.name, sessions.c.session_id).where(
    sessions.c.tenant_id == _IN_TENANT,
    sessions.c.name.in_(bindparam("names", expanding=True)),
    sessions.c.state == 1,
)
_candidates = (
    select(
        session_history.c.model,
        session_history.c.digest,
        session_history.c.session_id,
        session_history.c.turn,
        session_history.c.recorded_us,
        sessions.c.turns,
    )
    .join(
        sessions,
        (sessions.c.tenant_id == session_history.c.tenant_id)
        & (sessions.c.session_id == session_history.c.session_id),
    )
    .where(
        session_history.c.tenant_id == _IN_TENANT,
        session_history.c.model.in_(bindparam("models", expanding=True)),
        session_history.c.digest.in_(bindparam("digests", expanding=True)),
        sessions.c.state == 1,
    )
)
_insert_turns = insert(turns)
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


def begin_turns(
    tx: Tx, tenant_id: str, wishes: Sequence[NewTurn], config: SessionConfig
) -> list[Begun | KvplaneError]:
    """Do SessionStore.begin_turns."""
    known = _known_turns(tx, tenant_id, {wish.request.request_id for wish in wishes})
    todo: dict[str, NewTurn] = {}
    for wish in wishes:
        if wish.request.request_id not in known:
            todo.setdefault(wish.request.request_id, wish)
    fresh: dict[str, Begun] = {}
    if todo:
        targets, locked = _targets(tx, tenant_id, list(todo.values()), config)
        if tx.is_postgres:  # another replica may have answered while we waited for the locks
            known |= _known_turns(tx, tenant_id, todo.keys())
        now_us = tx.now_us()
        open_turns = _count_open(
            tx, tenant_id, locked, now_us - domain.us(config.abandoned_after_s)
        )
        opened: list[Turn] = []
        changed: set[str] = set()
        for wish in wishes:
            request_id = wish.request.request_id
            target = targets.get(request_id)
            if target is None or request_id in known:
                continue
            session, turn = domain.open_turn(
                locked[target], wish.request, now_us, open_turns[target], config
            )
            locked[target] = session
            changed.add(target)
            open_turns[target] += 1
            opened.append(turn)
            known[request_id] = turn
            fresh[request_id] = domain.begun(session, turn)
        if opened:
            tx.connection.execute(_insert_turns, [turn_values(tenant_id, turn) for turn in opened])
            save_sessions(tx, [locked[session_id] for session_id in sorted(changed)])
    old = {t.session_id for request_id, t in known.items() if request_id not in fresh}
    before = _read_sessions(tx, tenant_id, old)
    return [_answer(wish, known, fresh, before, config) for wish in wishes]


def _answer(
    wish: NewTurn,
    known: dict[str, Turn],
    fresh: dict[str, Begun],
    before: dict[str, Session],
    config: SessionConfig,
) -> Begun | KvplaneError:
    turn = known.get(wish.request.request_id)
    if turn is None:
        return Unavailable("the session is changing too fast", retry_after=0.1)
    if turn.key_digest != domain.key_digest(wish.request):
        return InvalidField("request_id", "was used for a turn of another key or model")
    if wish.request.request_id in fresh:
        return fresh[wish.request.request_id]
    return domain.begun_again(before[turn.session_id], turn, config)


def _known_turns(tx: Tx, tenant_id: str, request_ids: Collection[str]) -> dict[str, Turn]:
    parameters = {"tenant": tenant_id, "ids": padded(request_ids)}
    return {
        row.request_id: turn_of(row) for row in tx.connection.execute(_turns_by_request, parameters)
    }


def _read_sessions(tx: Tx, tenant_id: str, ids: Collection[str]) -> dict[str, Session]:
    if not ids:
        return {}
    rows = tx.connection.execute(_sessions_by_id, {"tenant": tenant_id, "ids": padded(ids)})
    return {row.session_id: session_of(row) for row in rows}


def _count_open(
    tx: Tx, tenant_id: str, ids: Collection[str], since_us: int
) -> defaultdict[str, int]:
    counts: defaultdict[str, int] = defaultdict(int)
    if ids:
        parameters = {"tenant": tenant_id, "ids": padded(ids), "since": since_us}
        counts.update((row[0], row[1]) for row in tx.connection.execute(_open_turns, parameters))
    return counts


def _targets(
    tx: Tx, tenant_id: str, wishes: Sequence[NewTurn], config: SessionConfig
) -> tuple[dict[str, str], dict[str, Session]]:
    """Find or make each request's session and lock them.

    Returns request ids to session ids, and the locked sessions. A request is missing
    when others kept taking its session away.
    """
    targets: dict[str, str] = {}
    locked: dict[str, Session] = {}
    missing = list(wishes)
    for _ in range(_FIND_TRIES):
        found = _find(tx, tenant_id, missing)
        made: dict[str, Session] = {}
        by_name: dict[str, str] = {}
        for wish in missing:
            request = wish.request
            if request.request_id in found:
                continue
            session_id = wish.new_session_id
            if request.name:
                session_id = by_name.setdefault(request.name, session_id)
            found[request.request_id] = session_id
            made[session_id] = domain.new_session(
                tenant_id, session_id, request.name, request.model, 0, config
            )
        if made:
            _make(tx, made.values(), config)
        wanted = sorted({*found.values()} - locked.keys())
        active = locked_sessions(tx, tenant_id, wanted)
        locked |= {i: s for i, s in active.items() if s.state is SessionState.ACTIVE}
        targets |= {request_id: i for request_id, i in found.items() if i in locked}
        missing = [wish for wish in missing if wish.request.request_id not in targets]
        if not missing:
            break
    return targets, locked


def _make(tx: Tx, made: Iterable[Session], config: SessionConfig) -> None:
    now_us = tx.now_us()
    rows = [
        session_values(
            domain.new_session(s.tenant_id, s.session_id, s.name, s.model, now_us, config)
        )
        for s in made
    ]
    # In one order everywhere: a unique name makes replicas wait for one another.
    rows.sort(key=lambda row: (row["name"] or b"", row["session_id"]))
    tx.connection.execute(insert_new(tx, sessions), rows)


def _find(tx: Tx, tenant_id: str, wishes: Sequence[NewTurn]) -> dict[str, str]:
    """Return session ids of those requests that find one. Nothing is locked yet."""
    found: dict[str, str] = {}
    if names := {w.request.name.encode() for w in wishes if w.request.name}:
        parameters = {"tenant": tenant_id, "names": padded(names)}
        ids = {row.name: row.session_id for row in tx.connection.execute(_active_names, parameters)}
        for wish in wishes:
            session_id = ids.get(wish.request.name.encode())
            if session_id is not None:
                found[wish.request.request_id] = session_id
    by_history = [w.request for w in wishes if not w.request.name and w.request.history]
    if by_history:
        known = _read_candidates(
            tx,
            tenant_id,
            {request.model for request in by_history},
            {digest for request in by_history for digest in request.history},
        )
        opened: defaultdict[str, int] = defaultdict(int)
        for request in by_history:
            session_id = domain.choose(request.history, known[request.model], opened)
            if session_id is not None:
                found[request.request_id] = session_id
                opened[session_id] += 1
    return found


def _read_candidates(
    tx: Tx, tenant_id: str, models: Collection[str], digests: Collection[bytes]
) -> defaultdict[str, defaultdict[bytes, list[Candidate]]]:
    known: defaultdict[str, defaultdict[bytes, list[Candidate]]] = defaultdict(
        lambda: defaultdict(list)
    )
    parameters = {"tenant": tenant_id, "models": padded(models), "digests": padded(digests)}
    for row in tx.connection.execute(_candidates, parameters):
        candidate = Candidate(row.session_id, row.turns, row.turn, row.recorded_us)
        known[row.model][row.digest].append(candidate)
    return known


def complete_turns(
    tx: Tx, tenant_id: str, reports: Sequence[CompleteTurn], config: SessionConfig
) -> list[Session | KvplaneError]:
    """Do SessionStore.complete_turns."""
    locked = locked_sessions(tx, tenant_id, {report.session_id for report in reports})
    open_turns: dict[tuple[str, int], Turn] = {}
    if locked:
        numbers = {report.turn for report in reports}
        parameters = {"tenant": tenant_id, "ids": padded(locked), "numbers": padded(numbers)}
        rows = tx.connection.execute(_turns_by_number, parameters)
        open_turns = {(row.session_id, row.turn): turn_of(row) for row in rows}
    now_us = tx.now_us()
    closed: dict[tuple[str, int], Turn] = {}
    changed: set[str] = set()
    histories: dict[tuple[str, str, bytes], dict[str, Any]] = {}
    answers: list[Session | KvplaneError] = []
    for report in reports:
        session = locked.get(report.session_id)
        key = (report.session_id, report.turn)
        turn = open_turns.get(key)
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
            open_turns[key] = closed[key] = turn
            changed.add(session.session_id)
        answers.append(session)
    if closed:
        values = [_chosen(turn_values(tenant_id, turn), _turn_columns) for turn in closed.values()]
        tx.connection.execute(_update_turns, values)
        save_sessions(tx, [locked[session_id] for session_id in sorted(changed)])
    if histories:
        _record(tx, list(histories.values()), config)
    return answers


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
