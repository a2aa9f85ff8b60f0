"""What the session store should be, in plain Python, written from its docstrings.

It shares the product's values and none of its rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any

from kvplane.kernel.errors import InvalidField, NotFound
from kvplane.session.domain import (
    BeginTurn,
    Begun,
    CompleteTurn,
    Session,
    SessionConfig,
    SessionRef,
    SessionState,
    TurnOutcome,
)
from kvplane.session.store import FreeTask
from properties import session_calls as calls
from properties.explain import Mismatch, expect
from properties.replicas import Rows
from properties.session_told import ModelTurn, age, same, told, turn_row

SECOND = 1_000_000
CONFIG = SessionConfig(histories_kept=2)
ACTIVE, OPEN, OK = SessionState.ACTIVE, TurnOutcome.OPEN, TurnOutcome.OK
Key = tuple[str, str]


@dataclass(frozen=True)
class Recorded:
    """A history of a session: the turn that it follows, and its place among the others."""

    turn: int
    number: int
    recorded_us: int


@dataclass(frozen=True)
class SessionModel:
    """Each method returns the states in which a call may leave it."""

    now_us: int
    sessions: dict[Key, Session] = field(default_factory=dict)
    turns: dict[tuple[str, str, int], ModelTurn] = field(default_factory=dict)
    requests: dict[Key, tuple[str, str, int]] = field(default_factory=dict)
    # By tenant, session, model, digest.
    histories: dict[tuple[str, str, str, bytes], Recorded] = field(default_factory=dict)

    def at(self, now_us: int) -> "SessionModel":
        return replace(self, now_us=now_us)

    def copy(self) -> Any:
        copies = {f.name: dict(getattr(self, f.name)) for f in fields(self)[1:]}
        return replace(self, **copies)

    def after(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable["SessionModel"]:
        """See `explain.Model`."""
        alone = at_once is None
        copy = self.copy()
        match call:
            case calls.Begin():
                told(answer, [copy._begin(call.tenant, *wish) for wish in call.wishes])
            case calls.Complete():
                told(answer, [copy._complete(call.tenant, report) for report in call.reports])
            case calls.Create():
                expect(answer, copy._create(call), "create")
            case calls.Get():
                told([answer], [copy._get(call.tenant, call.ref, answer)])
            case calls.End():
                told([answer], [copy._end(call, answer)])
            case calls.ListSessions():
                expect(answer, copy._list(call), "list")
            case calls.Changes():
                expect(answer, copy._changes(call), "changes")
            case calls.Freed():
                copy._freed(call.task)
            case calls.ExpireIdle():
                copy._expire_idle(call.limit, answer, alone=alone)
            case calls.ClaimFrees():
                copy._claim_frees(call.limit, answer, alone=alone)
            case calls.ForgetEnded():
                return copy._forget_ended(call.limit, answer, alone=alone)
            case _:
                raise AssertionError(call)
        return [copy]

    def _begin(self, tenant: str, request: BeginTurn, new_id: str) -> Begun | type[Exception]:
        known = self.requests.get((tenant, request.request_id))
        if known is not None:
            turn = self.turns[known]
            return turn.first if same(turn.request, request) else InvalidField
        key = self._find(tenant, request)
        if key is None:
            key = (tenant, new_id)
            self._make(key, request.name, request.model)
        session = self.sessions[key]
        ago_us = self.now_us - session.newest_completed_us
        since_us = self.now_us - round(CONFIG.abandoned_after_s * SECOND)
        opened = replace(
            session,
            model=request.model,
            turns=session.turns + 1,
            last_turn_us=self.now_us,
            due_us=self.now_us + round(CONFIG.idle_expiry_s * SECOND),
            version=self._version(session),
            newest_outcome=OPEN,
            newest_completed_us=0,
        )
        begun = Begun(
            opened,
            opened.turns,
            previous_completed=session.newest_outcome is OK
            and ago_us < CONFIG.just_completed_s * SECOND,
            open_turns=sum(
                turn.report is None and turn.open_us > since_us
                for (*whose, _), turn in self.turns.items()
                if tuple(whose) == key
            ),
        )
        self.sessions[key] = opened
        self.turns[*key, opened.turns] = ModelTurn(request, begun, self.now_us)
        self.requests[tenant, request.request_id] = (*key, opened.turns)
        return begun

    def _find(self, tenant: str, request: BeginTurn) -> Key | None:
        if request.name:
            return self._named(tenant, request.name)
        for digest in request.history:
            found = [
                (self.sessions[tenant, ident].turns == recorded.turn, recorded.recorded_us, ident)
                for (whose, ident, model, known), recorded in self.histories.items()
                if (whose, model, known) == (tenant, request.model, digest)
            ]
            if found:
                return tenant, max(found)[2]
        return None

    def _named(self, tenant: str, name: str) -> Key | None:
        named = [k for k, s in self.sessions.items() if (k[0], s.name) == (tenant, name)]
        return next((key for key in named if self.sessions[key].state is ACTIVE), None)

    def _make(self, key: Key, name: str, model: str) -> None:
        assert key not in self.sessions
        self.sessions[key] = Session(
            *key,
            name,
            model,
            ACTIVE,
            create_us=self.now_us,
            last_turn_us=0,
            due_us=self.now_us + round(CONFIG.idle_expiry_s * SECOND),
            version=self.now_us,
        )

    def _complete(self, tenant: str, report: CompleteTurn) -> Session | type[Exception]:
        key = (tenant, report.session_id)
        turn = self.turns.get((*key, report.turn))
        if turn is None:
            return NotFound
        session = self.sessions[key]
        if turn.report is not None:
            return session
        self.turns[*key, report.turn] = replace(turn, report=report, complete_us=self.now_us)
        session = replace(
            session,
            tokens_reused=session.tokens_reused + report.tokens_reused,
            tokens_recomputed=session.tokens_recomputed
            + report.prompt_tokens
            - report.tokens_reused,
            version=self._version(session),
        )
        if session.state is not ACTIVE:
            free_us = self.now_us + round(CONFIG.late_free_s * SECOND)
            self.sessions[key] = replace(session, free_due_us=free_us)
            return self.sessions[key]
        due_us = self.now_us + round(CONFIG.idle_expiry_s * SECOND)
        session = replace(session, last_turn_us=self.now_us, due_us=due_us)
        if report.turn == session.turns:
            session = replace(
                session, newest_outcome=report.outcome, newest_completed_us=self.now_us
            )
        if report.outcome is OK and report.turn > session.last_ok_turn:
            session = replace(
                session,
                last_ok_turn=report.turn,
                last_prefill_worker_id=report.prefill_worker_id,
                last_decode_worker_id=report.decode_worker_id,
            )
        if report.outcome is OK and report.history_digest:
            session = replace(session, histories=session.histories + 1)
            place = (*key, turn.request.model, report.history_digest)
            self.histories[place] = Recorded(report.turn, session.histories, self.now_us)
            oldest = session.histories - CONFIG.histories_kept
            for place, recorded in list(self.histories.items()):
                if place[:2] == key and recorded.number <= oldest:
                    del self.histories[place]
        self.sessions[key] = session
        return session

    def _create(self, call: calls.Create) -> tuple[Session, bool]:
        key = self._named(call.tenant, call.name)
        if key is not None:
            return self.sessions[key], False
        self._make((call.tenant, call.new_id), call.name, call.model)
        return self.sessions[call.tenant, call.new_id], True

    def _get(self, tenant: str, ref: SessionRef, answer: Any) -> Session | type[Exception]:
        if ref.session_id:
            return self.sessions.get((tenant, ref.session_id), NotFound)
        key = self._named(tenant, ref.name)
        if key is not None:
            return self.sessions[key]
        ended = [s for k, s in self.sessions.items() if (k[0], s.name) == (tenant, ref.name)]
        # All are kept equally long, so the one to be forgotten last ended last. Of those
        # that ended in one microsecond any may count.
        last_us = max((s.due_us for s in ended), default=0)
        last = [s for s in ended if s.due_us == last_us]
        return answer if answer in last else next(iter(last), NotFound)

    def _end(self, call: calls.End, answer: Any) -> tuple[Session, bool] | type[Exception]:
        given = answer[0] if isinstance(answer, tuple) else answer
        session = self._get(call.tenant, call.ref, given)
        if not isinstance(session, Session):
            return session
        if session.state is not ACTIVE:
            return session, False
        return self._ended(session, SessionState.ENDED, CONFIG.free_retry_s), True

    def _ended(self, session: Session, state: SessionState, free_in_s: float) -> Session:
        key = (session.tenant_id, session.session_id)
        self.sessions[key] = replace(
            session,
            state=state,
            due_us=self.now_us + round(CONFIG.ended_kept_s * SECOND),
            free_due_us=self.now_us + round(free_in_s * SECOND),
            version=self._version(session),
        )
        for place in [place for place in self.histories if place[:2] == key]:
            del self.histories[place]
        return self.sessions[key]

    def _list(self, call: calls.ListSessions) -> list[Session]:
        which = call.which
        found = [
            session
            for (tenant, _), session in self.sessions.items()
            if tenant == call.tenant
            and (not which.states or session.state in which.states)
            and which.model in {"", session.model}
            and which.worker_id in {"", session.last_decode_worker_id}
            and (call.after is None or age(session) < call.after)
        ]
        return sorted(found, key=age, reverse=True)[: call.limit]

    def _changes(self, call: calls.Changes) -> list[Session]:
        mine = [s for (tenant, _), s in self.sessions.items() if tenant == call.tenant]
        newer = [s for s in mine if (s.version, s.session_id) > call.after]
        return sorted(newer, key=lambda s: (s.version, s.session_id))[: call.limit]

    def _freed(self, task: FreeTask) -> None:
        session = self.sessions.get((task.tenant_id, task.session_id))
        if session is not None and session.free_due_us == task.due_us:
            self.sessions[task.tenant_id, task.session_id] = replace(session, free_due_us=None)

    def _expire_idle(self, limit: int, answer: Any, *, alone: bool) -> None:
        due = {k: s.due_us for k, s in self.sessions.items() if s.state is ACTIVE}
        keys = [(session.tenant_id, session.session_id) for session in answer]
        self._check_due(due, keys, limit, alone=alone)
        ended = [self._ended(self.sessions[k], SessionState.EXPIRED, 0) for k in keys]
        expect(answer, ended, "expired")

    def _claim_frees(self, limit: int, answer: Any, *, alone: bool) -> None:
        due = {k: s.free_due_us for k, s in self.sessions.items() if s.free_due_us is not None}
        keys = [(task.tenant_id, task.session_id) for task in answer]
        self._check_due(due, keys, limit, alone=alone)
        again_us = self.now_us + round(CONFIG.free_retry_s * SECOND)
        expect(answer, [FreeTask(*key, again_us) for key in keys], "claimed")
        for key in keys:
            self.sessions[key] = replace(self.sessions[key], free_due_us=again_us)

    def _check_due(self, due: dict[Key, int], taken: list[Key], limit: int, *, alone: bool) -> None:
        """Check which ones were taken: the oldest, each once, all unless somebody has them."""
        due = {key: at_us for key, at_us in due.items() if at_us <= self.now_us}
        expect(len(set(taken)), len(taken), "each is taken once")
        expect(set(taken) - due.keys(), set(), "taken before the time")
        if not alone:
            return
        expect(len(taken), min(limit, len(due)), "how many are taken")
        left = [at_us for key, at_us in due.items() if key not in taken]
        if taken and left and max(due[key] for key in taken) > min(left):
            raise Mismatch("older ones were left")

    def _forget_ended(self, limit: int, count: Any, *, alone: bool) -> Iterable["SessionModel"]:
        old = [
            key
            for key, session in self.sessions.items()
            if session.state is not ACTIVE
            and session.free_due_us is None
            and session.due_us <= self.now_us
        ]
        if alone:
            expect(count, min(limit, len(old)), "how many are forgotten")
        return [self._without(set(keys)) for keys in combinations(old, count)]

    def _without(self, gone: set[Key]) -> "SessionModel":
        return replace(
            self,
            sessions={k: s for k, s in self.sessions.items() if k not in gone},
            turns={k: t for k, t in self.turns.items() if k[:2] not in gone},
            requests={k: place for k, place in self.requests.items() if place[:2] not in gone},
        )

    def _version(self, session: Session) -> int:
        return max(session.version + 1, self.now_us)

    def compare(self, rows: Rows) -> None:
        """See `explain.Model`."""
        stored = {(row["tenant_id"], row["session_id"]): row for row in rows["sessions"]}
        expect(stored.keys(), self.sessions.keys(), "sessions")
        for key, session in self.sessions.items():
            wanted = {name: getattr(session, name) for name in stored[key]}
            wanted["name"] = session.name.encode() or None
            expect(stored[key], wanted, f"session {key}")
        turns = {(r["tenant_id"], r["session_id"], r["turn"]): r for r in rows["turns"]}
        expect(turns.keys(), self.turns.keys(), "turns")
        for place, turn in self.turns.items():
            wanted = turn_row(turn)
            expect({name: turns[place][name] for name in wanted}, wanted, f"turn {place}")
        expect(
            {
                (r["tenant_id"], r["session_id"], r["model"], r["digest"]): Recorded(
                    r["turn"], r["number"], r["recorded_us"]
                )
                for r in rows["session_history"]
            },
            self.histories,
            "histories",
        )
