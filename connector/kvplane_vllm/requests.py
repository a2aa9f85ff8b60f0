"""What a request says, without its engine: the tag, the leg, the tokens to prove."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

PRIVATE_KEYS: Final = ("_remote_blocks_processed", "_p_side_truncated")


class Leg(Enum):
    """What part of a turn a request is."""

    PREFILL = "prefill"  # its blocks are for the decode of the same turn
    DECODE = "decode"  # reads a prefill's blocks; its own are for the next turn
    WHOLE = "whole"  # no prefill leg


class Stage(Enum):
    """Where a request's read is."""

    NONE = "none"  # nothing is read, or nothing any more
    ASKED = "asked"  # pending, or permitted and not scheduled yet
    POSTING = "posting"  # scheduled; the engine sends it with this step's metadata
    READING = "reading"


@dataclass(slots=True)
class Turn:
    """One request of ours."""

    request: Any
    leg: Leg
    tenant_id: str
    session_id: str
    turn: int
    stage: Stage = Stage.NONE
    promised: int = 0  # external tokens that the scheduler was told of
    external: int = 0  # external tokens that it took
    extra: dict[str, Any] = field(default_factory=dict)


def tag_of(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return our own key, None when the request is not from our gateway."""
    tag = params.get("kvplane")
    if not isinstance(tag, dict) or not isinstance(tag.get("tenant"), str) or not tag["tenant"]:
        return None
    session, turn = tag.get("session"), tag.get("turn")
    if not isinstance(session, str) or isinstance(turn, bool) or not isinstance(turn, int):
        session, turn = "", 0
    # A turn of no session belongs to nobody's history.
    return {**tag, "session": session if turn > 0 else "", "turn": max(turn, 0)}


def lease_of(tag: dict[str, Any]) -> tuple[str, int] | None:
    """Return the lease that the router had granted."""
    lease_id, token = tag.get("lease_id"), tag.get("fencing_token")
    if isinstance(lease_id, str) and lease_id and isinstance(token, int):
        return lease_id, token
    return None


def handle_of(params: dict[str, Any]) -> tuple[str, str] | None:
    """Return whose blocks a decode is to read."""
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    if isinstance(engine_id, str) and isinstance(request_id, str) and engine_id and request_id:
        return engine_id, request_id
    return None


def proof_tokens(request: Any, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens with each image, sound or video put in by its content.

    An engine's placeholder tokens are the same for every picture; what they stand for
    has to be proved equal too.
    """
    features = getattr(request, "mm_features", None)
    if not features:
        return tokens
    mixed = list(tokens)
    for feature in features:
        at, length = feature.mm_position.offset, feature.mm_position.length
        seed = hashlib.blake2b(str(feature.identifier).encode(), digest_size=16).digest()
        for i in range(at, min(at + length, len(mixed))):
            mark = hashlib.blake2b(seed + (i - at).to_bytes(8, "little"), digest_size=4).digest()
            mixed[i] = int.from_bytes(mark, "little")
    return mixed


def computed_tokens(request: Any) -> int:
    """Return how many of the request's tokens surely have KV when it has ended.

    The newest sampled token has none; under asynchronous scheduling the engine counts
    steps in flight.
    """
    flying = getattr(request, "num_output_placeholders", 0) or 0
    # `all_token_ids` is a view; its length is free.
    return int(min(request.num_computed_tokens - flying, len(request.all_token_ids) - 1))
