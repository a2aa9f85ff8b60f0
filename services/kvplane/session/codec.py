"""Messages to values, checked field by field, and values to messages."""

import base64
import binascii
import hashlib
from typing import cast

from google.protobuf.duration_pb2 import Duration

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel import validate
from kvplane.kernel.errors import InvalidField
from kvplane.session.domain import (
    DIGEST_SIZE,
    BeginTurn,
    Begun,
    CompleteTurn,
    Session,
    SessionFilter,
    SessionRef,
    SessionState,
    TurnOutcome,
)
from kvplane.session.quota import Ask, OverQuota
from kvplane.session.usage import Usage

NAME_BYTES = 512
MODEL_BYTES = 256
ID_BYTES = 128
MAX_HISTORY = 64
_MAX_STATES = 1000
MAX_TOKENS = 1_000_000_000
# Guesses; what routing takes.
_MAX_ESTIMATE = 2**53
_MAX_WAIT_S = 86_400
_TURN_LIMIT = 2**62


def begin_turn(request: pb.BeginTurnRequest) -> BeginTurn:
    """Check a BeginTurnRequest. A key without name and history finds nothing."""
    validate.plain("request_id", request.request_id, ID_BYTES)
    validate.plain("model", request.model, MODEL_BYTES)
    if request.key.name:
        validate.text("key.name", request.key.name, NAME_BYTES)
    validate.at_most_items("key.history", len(request.key.history), MAX_HISTORY)
    for index, digest in enumerate(request.key.history):
        if len(digest) != DIGEST_SIZE:
            raise InvalidField(
                f"key.history[{index}]", f"must be {DIGEST_SIZE} bytes, not {len(digest)}"
            )
    validate.between("prompt_tokens_estimate", request.prompt_tokens_estimate, 0, _MAX_ESTIMATE)
    validate.between("request_bytes", request.request_bytes, 0, _MAX_ESTIMATE)
    return BeginTurn(
        request_id=request.request_id,
        model=request.model,
        name=request.key.name,
        history=tuple(request.key.history),
        ask=Ask(request.prompt_tokens_estimate, request.request_bytes),
    )


def complete_turn(request: pb.CompleteTurnRequest) -> CompleteTurn:
    """Check a CompleteTurnRequest."""
    if request.request_id:
        validate.plain("request_id", request.request_id, ID_BYTES)
        if request.session_id or request.turn:
            raise InvalidField("request_id", "set it, or session_id and turn, not both")
    else:
        _session_id(request.session_id)
        validate.between("turn", request.turn, 1, _TURN_LIMIT)
    if request.outcome not in (
        pb.TURN_OUTCOME_OK,
        pb.TURN_OUTCOME_CANCELLED,
        pb.TURN_OUTCOME_FAILED,
    ):
        raise InvalidField("outcome", "must be OK, CANCELLED or FAILED")
    validate.between("prompt_tokens", request.prompt_tokens, 0, MAX_TOKENS)
    validate.between("completion_tokens", request.completion_tokens, 0, MAX_TOKENS)
    validate.between("tokens_reused", request.tokens_reused, 0, MAX_TOKENS)
    if request.tokens_reused > request.prompt_tokens:
        raise InvalidField("tokens_reused", "must be at most prompt_tokens")
    if len(request.history_digest) not in (0, DIGEST_SIZE):
        raise InvalidField("history_digest", f"must be {DIGEST_SIZE} bytes, or empty")
    for field in ("prefill_worker_id", "decode_worker_id"):
        if value := getattr(request, field):
            validate.identifier(field, value, ID_BYTES)
    return CompleteTurn(
        session_id=request.session_id,
        turn=request.turn,
        outcome=TurnOutcome(request.outcome),
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        tokens_reused=request.tokens_reused,
        history_digest=request.history_digest,
        prefill_worker_id=request.prefill_worker_id,
        decode_worker_id=request.decode_worker_id,
        time_to_first_token_us=_wait_us("time_to_first_token", request.time_to_first_token),
        request_id=request.request_id,
    )


def name_and_model(request: pb.CreateSessionRequest) -> tuple[str, str]:
    """Check a CreateSessionRequest."""
    validate.text("name", request.name, NAME_BYTES)
    validate.plain("model", request.model, MODEL_BYTES)
    return request.name, request.model


def session_ref(request: pb.GetSessionRequest | pb.EndSessionRequest) -> SessionRef:
    """Check that exactly one of id and name is there."""
    if request.session_id and request.name:
        raise InvalidField("session_id", "set session_id or name, not both")
    if request.session_id:
        return SessionRef(session_id=_session_id(request.session_id))
    if not request.name:
        raise InvalidField("session_id", "set session_id or name")
    return SessionRef(name=validate.text("name", request.name, NAME_BYTES))


def watched_id(request: pb.WatchSessionsRequest) -> str:
    """Check a WatchSessionsRequest."""
    return _session_id(request.session_id) if request.session_id else ""


def list_request(
    request: pb.ListSessionsRequest,
) -> tuple[SessionFilter, tuple[int, str] | None, int]:
    """Check a ListSessionsRequest: filter, where to go on, how many."""
    validate.at_most_items("states", len(request.states), _MAX_STATES)
    states: list[SessionState] = []
    for index, state in enumerate(request.states):
        try:
            states.append(SessionState(state))
        except ValueError:
            raise InvalidField(f"states[{index}]", "must be ACTIVE, ENDED or EXPIRED") from None
    if request.model:
        validate.plain("model", request.model, MODEL_BYTES)
    if request.worker_id:
        validate.identifier("worker_id", request.worker_id, ID_BYTES)
    which = SessionFilter(tuple(sorted(set(states))), request.model, request.worker_id)
    after = _after(request.page_token, which) if request.page_token else None
    return which, after, validate.page_size(request.page_size)


def page_token(last: Session, which: SessionFilter) -> str:
    """Return where the next page of the same list begins."""
    raw = f"{_fingerprint(which)}:{last.create_us}:{last.session_id}"
    return base64.urlsafe_b64encode(raw.encode()).decode()


def session_message(session: Session, ownership_ids: list[str] | None = None) -> pb.Session:
    """Return the API's form of a session."""
    message = pb.Session(
        session_id=session.session_id,
        tenant_id=session.tenant_id,
        name=session.name,
        model=session.model,
        state=cast("pb.SessionState", int(session.state)),
        turns=session.turns,
        last_prefill_worker_id=session.last_prefill_worker_id,
        last_decode_worker_id=session.last_decode_worker_id,
        tokens_reused=session.tokens_reused,
        tokens_recomputed=session.tokens_recomputed,
        ownership_ids=ownership_ids or (),
    )
    message.create_time.FromMicroseconds(session.create_us)
    if session.last_turn_us:
        message.last_turn_time.FromMicroseconds(session.last_turn_us)
    if session.state is SessionState.ACTIVE:
        message.expire_time.FromMicroseconds(session.due_us)
    return message


def begun_message(begun: Begun | OverQuota) -> pb.BeginTurnResponse:
    """Return the API's form of an opened turn, or of one without a session."""
    if isinstance(begun, OverQuota):
        return pb.BeginTurnResponse(over_quota=begun.quota)
    return pb.BeginTurnResponse(
        session=session_message(begun.session),
        turn=begun.turn,
        previous_completed=begun.previous_completed,
        open_turns=begun.open_turns,
    )


def usage_message(used: Usage, active_sessions: int) -> pb.GetUsageResponse:
    """Return the API's form of a tenant's usage."""
    return pb.GetUsageResponse(
        active_sessions=active_sessions,
        turns=used.turns,
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        tokens_reused=used.tokens_reused,
        tokens_recomputed=used.tokens_recomputed,
    )


def _session_id(value: str) -> str:
    return validate.identifier("session_id", value, ID_BYTES)


def _wait_us(field: str, value: Duration) -> int:
    if not (0 <= value.seconds <= _MAX_WAIT_S and 0 <= value.nanos < 1_000_000_000):
        raise InvalidField(field, "must be from 0 s to one day")
    return value.seconds * 1_000_000 + value.nanos // 1000


def _fingerprint(which: SessionFilter) -> str:
    return hashlib.blake2b(repr(which).encode(), digest_size=6).hexdigest()


def _after(token: str, which: SessionFilter) -> tuple[int, str]:
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
        fingerprint, create_us, session_id = raw.split(":", 2)
        after = int(create_us), validate.identifier("page_token", session_id, ID_BYTES)
    except (ValueError, binascii.Error):
        raise InvalidField("page_token", "is not one that was given out") from None
    if not 0 <= after[0] < 2**62:
        raise InvalidField("page_token", "is not one that was given out")
    if fingerprint != _fingerprint(which):
        raise InvalidField("page_token", "was given out for other filters")
    return after
