"""What of a session callers are told, and what of a turn is stored."""

from dataclasses import dataclass
from typing import Any

from kvplane.session.domain import BeginTurn, Begun, CompleteTurn, Session, TurnOutcome
from properties.explain import expect

# What a caller is told of a session. The rest is the registry's own.
TOLD = (
    "tenant_id", "session_id", "name", "model", "state", "create_us", "last_turn_us", "due_us",
    "turns", "last_prefill_worker_id", "last_decode_worker_id", "tokens_reused",
    "tokens_recomputed",
)  # fmt: skip


@dataclass(frozen=True)
class ModelTurn:
    """A turn, with what opened it and what was answered."""

    request: BeginTurn
    first: Begun
    open_us: int
    report: CompleteTurn | None = None
    complete_us: int = 0


def turn_row(turn: ModelTurn) -> dict[str, Any]:
    report = turn.report or CompleteTurn("", 0, TurnOutcome.OPEN)
    return {
        "request_id": turn.request.request_id,
        "model": turn.request.model,
        "open_us": turn.open_us,
        "complete_us": turn.complete_us,
    } | {
        name: getattr(report, name)
        for name in (
            "outcome", "prompt_tokens", "completion_tokens", "tokens_reused",
            "prefill_worker_id", "decode_worker_id", "time_to_first_token_us",
        )
    }  # fmt: skip


def age(session: Session) -> tuple[int, str]:
    return session.create_us, session.session_id


def same(one: BeginTurn, other: BeginTurn) -> bool:
    """Tell whether the requests mean the same. A name makes the history superfluous."""
    if (one.name, one.model) != (other.name, other.model):
        return False
    return bool(one.name) or one.history == other.history


def told(answers: Any, wanted: list[Any]) -> None:
    """Compare what callers are told; of an error, which one it is."""
    expect([_part(a) for a in answers], [_part(w) for w in wanted], "answers")


def _part(answer: Any) -> Any:
    if isinstance(answer, Exception):
        return type(answer)
    if isinstance(answer, Begun):
        told = (answer.turn, answer.previous_completed, answer.open_turns)
        return (_part(answer.session), *told)
    if isinstance(answer, Session):
        return {name: getattr(answer, name) for name in TOLD}
    return answer
