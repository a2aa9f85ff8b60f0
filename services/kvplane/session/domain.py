"""Sessions and turns: frozen values, and what may happen to them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from kvplane.session.quota import NOTHING, Ask

DIGEST_SIZE = 16


class SessionState(IntEnum):
    """The numbers are those of the API and of the stored rows."""

    ACTIVE = 1
    ENDED = 2
    EXPIRED = 3


class TurnOutcome(IntEnum):
    """OPEN is a turn that has not been completed."""

    OPEN = 0
    OK = 1
    CANCELLED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The registry's times (seconds) and limits."""

    # A session without a turn for this long expires.
    idle_expiry_s: float = 24 * 3600.0
    # An open turn this old no longer counts as open.
    abandoned_after_s: float = 600.0
    # A turn completed this short ago may not have been reported by its worker yet.
    just_completed_s: float = 2.0
    # How many histories a session can be found by: its newest, and those of branches.
    histories_kept: int = 8
    # How long a call to the lease service may take.
    lease_bound_s: float = 0.3
    # Between attempts to free an ended session's blocks.
    free_retry_s: float = 5.0
    # After a turn that outlived its session: its worker reports about now.
    late_free_s: float = 2.0
    # Ended sessions are listed this long, then forgotten.
    ended_kept_s: float = 7 * 24 * 3600.0
    sweep_interval_s: float = 1.0
    # Sessions that one pass expires, frees or forgets at most, each.
    sweep_batch: int = 100
    # How often a watch looks for the changes of other replicas.
    watch_poll_s: float = 1.0
    # A change becomes visible up to this long after its version was taken.
    watch_overlap_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation of a tenant. Times are microseconds since 1970."""

    tenant_id: str
    session_id: str
    # Empty for a session that is found by its history.
    name: str
    # Of the newest turn.
    model: str
    state: SessionState
    create_us: int
    # The last time a turn was opened or completed.
    last_turn_us: int
    # ACTIVE: expires then, if nothing happens. Otherwise: is forgotten then.
    due_us: int
    # Grows with every change; near enough to the time to be searched by it.
    version: int
    # Turns opened so far.
    turns: int = 0
    last_prefill_worker_id: str = ""
    last_decode_worker_id: str = ""
    # The turn that said so; an older one that completes later changes nothing.
    last_ok_turn: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    # How the newest turn ended, and when.
    newest_outcome: TurnOutcome = TurnOutcome.OPEN
    newest_completed_us: int = 0
    # History digests recorded so far.
    histories: int = 0
    # When to try next to have its blocks freed; None when there is nothing to free.
    free_due_us: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    session_id: str
    # From 1.
    turn: int
    request_id: str
    # Of the key and model in the request that opened it.
    key_digest: bytes
    model: str
    open_us: int
    # What was answered when it was opened, so that it can be answered again.
    previous_completed: bool
    open_turns: int
    before_prefill_worker_id: str
    before_decode_worker_id: str
    before_tokens_reused: int
    before_tokens_recomputed: int
    outcome: TurnOutcome = TurnOutcome.OPEN
    complete_us: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_reused: int = 0
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    time_to_first_token_us: int = 0
    # What the tenant's rate of tokens was charged with; None: it had no such limit.
    charged_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BeginTurn:
    """A wish to open a turn of the session that `name` or `history` finds."""

    request_id: str
    model: str
    name: str = ""
    # Digests of the history's prefixes, longest first. Not used when there is a name.
    history: tuple[bytes, ...] = ()
    # For the tenant's limits.
    ask: Ask = NOTHING


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to BeginTurn; `session` is as it was then."""

    session: Session
    turn: int
    previous_completed: bool
    open_turns: int
    # The request had been answered before.
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class CompleteTurn:
    """How a turn went. Token counts are those of the whole turn."""

    # Empty and 0 for a turn without a session, which has a request_id instead.
    session_id: str
    turn: int
    outcome: TurnOutcome
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Of the prompt's.
    tokens_reused: int = 0
    # Empty, or the digest of the history as the client will send it back.
    history_digest: bytes = b""
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    time_to_first_token_us: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class SessionRef:
    """A session by its id or, when that is empty, by its name."""

    session_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list; an empty field means all."""

    states: tuple[SessionState, ...] = ()
    model: str = ""
    # The last decode worker.
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session that a history digest is known for."""

    session_id: str
    # Turns that the session has opened so far.
    turns: int
    # The turn whose history it is.
    recorded_turn: int
    recorded_us: int


def us(seconds: float) -> int:
    """Return microseconds."""
    return round(seconds * 1_000_000)


def key_digest(request: BeginTurn) -> bytes:
    """Return the same 16 bytes for requests that mean the same session and model."""
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    history = () if request.name else request.history
    for part in (request.model.encode(), request.name.encode(), *history):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def new_session(
    tenant_id: str, session_id: str, name: str, model: str, now_us: int, config: SessionConfig
) -> Session:
    """Return a session without turns."""
    return Session(
        tenant_id=tenant_id,
        session_id=session_id,
        name=name,
        model=model,
        state=SessionState.ACTIVE,
        create_us=now_us,
        last_turn_us=0,
        due_us=now_us + us(config.idle_expiry_s),
        version=now_us,
    )


def open_turn(
    session: Session, request: BeginTurn, now_us: int, open_turns: int, config: SessionConfig
) -> tuple[Session, Turn]:
    """Open the next turn of an active session beside `open_turns` others."""
    recent = now_us - session.newest_completed_us < us(config.just_completed_s)
    turn = Turn(
        session_id=session.session_id,
        turn=session.turns + 1,
        request_id=request.request_id,
        key_digest=key_digest(request),
        model=request.model,
        open_us=now_us,
        previous_completed=session.newest_outcome is TurnOutcome.OK and recent,
        open_turns=open_turns,
        before_prefill_worker_id=session.last_prefill_worker_id,
        before_decode_worker_id=session.last_decode_worker_id,
        before_tokens_reused=session.tokens_reused,
        before_tokens_recomputed=session.tokens_recomputed,
    )
    opened = replace(
        session,
        model=request.model,
        turns=turn.turn,
        last_turn_us=now_us,
        due_us=now_us + us(config.idle_expiry_s),
        newest_outcome=TurnOutcome.OPEN,
        newest_completed_us=0,
        version=_next_version(session, now_us),
    )
    return opened, turn


def begun(session: Session, turn: Turn) -> Begun:
    """Return the answer for a turn that has just been opened."""
    return Begun(session, turn.turn, turn.previous_completed, turn.open_turns)


def begun_again(session: Session, turn: Turn, config: SessionConfig) -> Begun:
    """Return the answer that was given when the turn was opened, whatever came after."""
    then = replace(
        session,
        model=turn.model,
        state=SessionState.ACTIVE,
        turns=turn.turn,
        last_prefill_worker_id=turn.before_prefill_worker_id,
        last_decode_worker_id=turn.before_decode_worker_id,
        tokens_reused=turn.before_tokens_reused,
        tokens_recomputed=turn.before_tokens_recomputed,
        last_turn_us=turn.open_us,
        due_us=turn.open_us + us(config.idle_expiry_s),
    )
    return replace(begun(then, turn), replayed=True)


def complete_turn(
    session: Session, turn: Turn, report: CompleteTurn, now_us: int, config: SessionConfig
) -> tuple[Session, Turn]:
    """Close an open turn. Of a session that has ended, only the counters move.

    Only a turn that ended well says where the conversation lives now.
    """
    closed = replace(
        turn,
        outcome=report.outcome,
        complete_us=now_us,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.completion_tokens,
        tokens_reused=report.tokens_reused,
        prefill_worker_id=report.prefill_worker_id,
        decode_worker_id=report.decode_worker_id,
        time_to_first_token_us=report.time_to_first_token_us,
    )
    changes: dict[str, Any] = {
        "tokens_reused": session.tokens_reused + report.tokens_reused,
        "tokens_recomputed": session.tokens_recomputed
        + (report.prompt_tokens - report.tokens_reused),
        "version": _next_version(session, now_us),
    }
    if session.state is not SessionState.ACTIVE:
        # Its worker may report blocks after the session's were freed.
        changes["free_due_us"] = now_us + us(config.late_free_s)
        return replace(session, **changes), closed
    changes["last_turn_us"] = now_us
    changes["due_us"] = now_us + us(config.idle_expiry_s)
    if turn.turn == session.turns:
        changes["newest_outcome"] = report.outcome
        changes["newest_completed_us"] = now_us
    if report.outcome is TurnOutcome.OK and turn.turn > session.last_ok_turn:
        changes["last_ok_turn"] = turn.turn
        changes["last_prefill_worker_id"] = report.prefill_worker_id
        changes["last_decode_worker_id"] = report.decode_worker_id
    if records_history(session, report):
        changes["histories"] = session.histories + 1
    return replace(session, **changes), closed


def records_history(session: Session, report: CompleteTurn) -> bool:
    """Tell whether the session can be found by the report's history from now on."""
    return (
        session.state is SessionState.ACTIVE
        and report.outcome is TurnOutcome.OK
        and bool(report.history_digest)
    )


def end(session: Session, state: SessionState, now_us: int, config: SessionConfig) -> Session:
    """End an active session; its blocks are still to be freed."""
    # Who ends a session frees it at once; one that expires waits for the sweeper.
    free_in_s = config.free_retry_s if state is SessionState.ENDED else 0.0
    return replace(
        session,
        state=state,
        due_us=now_us + us(config.ended_kept_s),
        free_due_us=now_us + us(free_in_s),
        version=_next_version(session, now_us),
    )


def choose(
    history: Sequence[bytes],
    known: Mapping[bytes, Iterable[Candidate]],
    opened: Mapping[str, int],
) -> str | None:
    """Return the session of the longest known history, if there is one.

    Equal beginnings are common, so several sessions may have the same one: those that
    nobody has continued come first, then the newest. `opened` counts turns that were
    opened since the candidates were read.
    """
    for digest in history:
        candidates = list(known.get(digest, ()))
        if candidates:
            return max(
                candidates, key=lambda c: _fitness(c, opened.get(c.session_id, 0))
            ).session_id
    return None


def _fitness(candidate: Candidate, opened: int) -> tuple[bool, int, str]:
    uncontinued = candidate.turns + opened == candidate.recorded_turn
    return uncontinued, candidate.recorded_us, candidate.session_id


def _next_version(session: Session, now_us: int) -> int:
    return max(session.version + 1, now_us)
