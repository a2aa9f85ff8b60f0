"""Opening turns, many in one go: the number of statements does not grow with the batch.

What is needed is read, the sessions are locked in the order of their ids (after the
tenant's own row, if it has limits), the domain decides item by item in memory, and what
changed is written.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import bindparam, delete, func, insert, select

from kvplane.db.database import Tx
from kvplane.db.prepared import Prepared, PreparedBlobs, id_list, is_listed, prepared
from kvplane.kernel.errors import InvalidField, KvplaneError, QuotaExceeded, Unavailable
from kvplane.kernel.limits import Quotas
from kvplane.session import domain
from kvplane.session.domain import (
    BeginTurn,
    Begun,
    Candidate,
    Session,
    SessionConfig,
    SessionState,
    Turn,
)
from kvplane.session.quota import OverQuota
from kvplane.session.sql_limits import Gate, Unheld, open_gate
from kvplane.session.sql_rows import (
    IN_TENANT,
    IS_ACTIVE,
    IS_OPEN,
    NEW_SESSIONS,
    locked_sessions,
    read_sessions,
    save_sessions,
)
from kvplane.session.store import NewTurn
from kvplane.session.tables import (
    TURN_COLUMNS,
    session_history,
    session_values,
    sessions,
    turn_of,
    turn_values,
    turns,
)

# Losing the race for a name, or for a session that just ended, this often in a row.
_FIND_TRIES = 4

_TURNS_BY_REQUEST = Prepared(
    lambda is_postgres: select(*TURN_COLUMNS).where(
        turns.c.tenant_id == IN_TENANT, is_listed(turns.c.request_id, is_postgres)
    )
)
_OPEN_TURNS = Prepared(
    lambda is_postgres: (
        select(turns.c.session_id, func.count())
        .where(
            turns.c.tenant_id == IN_TENANT,
            is_listed(turns.c.session_id, is_postgres),
            IS_OPEN,
            turns.c.open_us > bindparam("since"),
        )
        .group_by(turns.c.session_id)
    )
)
_ACTIVE_NAMES = PreparedBlobs(
    lambda _, is_among: select(sessions.c.name, sessions.c.session_id).where(
        sessions.c.tenant_id == IN_TENANT, is_among(sessions.c.name), IS_ACTIVE
    )
)
_CANDIDATES = PreparedBlobs(
    lambda is_postgres, is_among: (
        select(
            session_history.c.model,
            session_history.c.digest,
            session_history.c.session_id,
            sessions.c.turns,
            session_history.c.turn,
            session_history.c.recorded_us,
        )
        .join(
            sessions,
            (sessions.c.tenant_id == session_history.c.tenant_id)
            & (sessions.c.session_id == session_history.c.session_id),
        )
        .where(
            session_history.c.tenant_id == IN_TENANT,
            is_listed(session_history.c.model, is_postgres, "models"),
            is_among(session_history.c.digest),
            IS_ACTIVE,
        )
    )
)
_INSERT_TURN = prepared(insert(turns))
_DELETE_SESSIONS = Prepared(
    lambda is_postgres: delete(sessions).where(
        sessions.c.tenant_id == IN_TENANT, is_listed(sessions.c.session_id, is_postgres)
    )
)


def begin_turns(
    tx: Tx, tenant_id: str, wishes: Sequence[NewTurn], config: SessionConfig, quotas: Quotas
) -> list[Begun | OverQuota | KvplaneError]:
    """Do SessionStore.begin_turns."""
    gate = open_gate(tx, tenant_id, quotas)
    known = _known_turns(tx, tenant_id, {wish.request.request_id for wish in wishes})
    todo: dict[str, NewTurn] = {}
    for wish in wishes:
        if wish.request.request_id not in known:
            todo.setdefault(wish.request.request_id, wish)
    fresh: dict[str, Begun] = {}
    without = _Without()
    if todo and gate is not None:
        without.unheld = gate.known(todo.keys())
        for request_id, wish in todo.items():
            if request_id not in without.unheld:
                without.add(wish.request, gate.judge(wish.request.ask))
        todo = {i: wish for i, wish in todo.items() if not without.has(i)}
    if todo:
        targets, locked = _targets(tx, tenant_id, list(todo.values()), config, gate, without)
        # Another replica may have answered while we waited for the locks; a tenant's own row
        # was locked before we looked.
        if tx.is_postgres and gate is None:
            known |= _known_turns(tx, tenant_id, todo.keys())
        now_us = tx.now_us()
        open_turns = _count_open(
            tx, tenant_id, locked, now_us - domain.us(config.abandoned_after_s)
        )
        opened: list[Turn] = []
        changed: set[str] = set()
        for request_id, wish in todo.items():
            target = targets.get(request_id)
            if target is None or request_id in known:
                continue
            session, turn = domain.open_turn(
                locked[target], wish.request, now_us, open_turns[target], config
            )
            if gate is not None:
                turn = replace(turn, charged_tokens=gate.charge_of(wish.request.ask))
            locked[target] = session
            changed.add(target)
            open_turns[target] += 1
            opened.append(turn)
            known[request_id] = turn
            fresh[request_id] = domain.begun(session, turn)
        if opened:
            _INSERT_TURN.many(tx, [turn_values(tenant_id, turn) for turn in opened])
            save_sessions(tx, [locked[session_id] for session_id in sorted(changed)])
        # Made for requests that another replica has answered meanwhile.
        made = {wish.new_session_id for wish in todo.values()} & locked.keys()
        if orphans := [i for i in made - changed if not locked[i].turns]:
            _DELETE_SESSIONS.one(tx, tenant=tenant_id, ids=id_list(tx, orphans))
    if gate is not None:
        gate.save([todo[request_id].request for request_id in fresh], without.new)
    old = {t.session_id for request_id, t in known.items() if request_id not in fresh}
    before = read_sessions(tx, tenant_id, old)
    return [_answer(wish, known, fresh, before, without, config) for wish in wishes]


@dataclass(slots=True)
class _Without:
    """Requests that get no session, by their ids."""

    unheld: dict[str, Unheld] = field(default_factory=dict)
    refused: dict[str, QuotaExceeded] = field(default_factory=dict)
    # Those of `unheld` that were not known before.
    new: list[tuple[BeginTurn, OverQuota]] = field(default_factory=list)

    def add(self, request: BeginTurn, verdict: OverQuota | QuotaExceeded | None) -> bool:
        """Take in a verdict; return whether the request gets no session."""
        if isinstance(verdict, QuotaExceeded):
            self.refused[request.request_id] = verdict
        elif verdict is not None:
            self.unheld[request.request_id] = Unheld(domain.key_digest(request), verdict)
            self.new.append((request, verdict))
        return verdict is not None

    def has(self, request_id: str) -> bool:
        return request_id in self.unheld or request_id in self.refused


def _answer(
    wish: NewTurn,
    known: dict[str, Turn],
    fresh: dict[str, Begun],
    before: dict[str, Session],
    without: _Without,
    config: SessionConfig,
) -> Begun | OverQuota | KvplaneError:
    request_id = wish.request.request_id
    if request_id in without.refused:
        return without.refused[request_id]
    turn = known.get(request_id)
    unheld = without.unheld.get(request_id)
    first = turn or unheld
    if first is None:
        return Unavailable("the session is changing too fast", retry_after=0.1)
    if first.key_digest != domain.key_digest(wish.request):
        return InvalidField("request_id", "was used for a turn of another key or model")
    if turn is None:
        assert unheld is not None
        return unheld.over
    if request_id in fresh:
        return fresh[request_id]
    return domain.begun_again(before[turn.session_id], turn, config)


def _known_turns(tx: Tx, tenant_id: str, request_ids: Collection[str]) -> dict[str, Turn]:
    rows = _TURNS_BY_REQUEST.one(tx, tenant=tenant_id, ids=id_list(tx, request_ids))
    return {turn.request_id: turn for turn in map(turn_of, rows)}


def _count_open(
    tx: Tx, tenant_id: str, ids: Collection[str], since_us: int
) -> defaultdict[str, int]:
    counts: defaultdict[str, int] = defaultdict(int)
    if ids:
        rows = _OPEN_TURNS.one(tx, tenant=tenant_id, ids=id_list(tx, ids), since=since_us)
        counts.update((row[0], row[1]) for row in rows)
    return counts


def _targets(
    tx: Tx,
    tenant_id: str,
    wishes: Sequence[NewTurn],
    config: SessionConfig,
    gate: Gate | None,
    without: _Without,
) -> tuple[dict[str, str], dict[str, Session]]:
    """Find or make each request's session and lock them.

    Returns request ids to session ids, and the locked sessions. A request is missing
    when others kept taking its session away, and when it is put into `without`, since
    the tenant has as many sessions as it may have.
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
            session_id = by_name.get(request.name, wish.new_session_id)
            verdict = None if gate is None or session_id in made else gate.judge_session()
            if without.add(request, verdict):
                continue
            if request.name:
                by_name[request.name] = session_id
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
        missing = [
            wish
            for wish in missing
            if (i := wish.request.request_id) not in targets and not without.has(i)
        ]
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
    NEW_SESSIONS.many(tx, rows)


def _find(tx: Tx, tenant_id: str, wishes: Sequence[NewTurn]) -> dict[str, str]:
    """Return session ids of those requests that find one. Nothing is locked yet."""
    found: dict[str, str] = {}
    if names := {w.request.name.encode() for w in wishes if w.request.name}:
        ids = {row[0]: row[1] for row in _ACTIVE_NAMES.one(tx, names, tenant=tenant_id)}
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
    rows = _CANDIDATES.one(tx, digests, tenant=tenant_id, models=id_list(tx, models))
    for model, digest, *candidate in rows:
        known[model][digest].append(Candidate(*candidate))
    return known
