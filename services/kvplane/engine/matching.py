"""What vLLM 0.32 makes of kv_transfer_params. Pure functions; nothing is made safer here.

In particular nobody compares tokens: the first min(remote_num_tokens, prompt) tokens are
taken for the prompt's, and block ids are matched from the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
# Slack for clock error and the read's own time, as in vLLM.
EXPIRY_MARGIN_S = 5.0


class EngineDead(Exception):
    """An assertion of vLLM's worker has failed: the whole engine process ends."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's KV may be read."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: tuple[int, ...]
    expires_at: float | None


def external_tokens(params: Mapping[str, Any], prompt: int, computed: int, threshold: int) -> int:
    """Return how many prompt tokens after the `computed` ones are to come from elsewhere."""
    if params.get("do_remote_prefill") and prompt > computed:
        return prompt - computed
    if (
        params.get("do_remote_decode")
        and params.get("remote_block_ids")
        and all(key in params for key in _NEEDED)
    ):
        count = min(params.get("remote_num_tokens") or 0, prompt) - computed
        # Too few to be worth a read: computed here, although the owner is still notified.
        return count if count >= max(threshold, 1) else 0
    return 0


def reads_remote(params: Mapping[str, Any], *, bidirectional: bool) -> bool:
    """Return whether a request gets as far as a read, or a notification in its place."""
    if params.get("do_remote_prefill"):
        return True
    return bool(params.get("do_remote_decode")) and bidirectional


def remote_of(params: Mapping[str, Any]) -> Remote | None:
    """Return the remote place that params name, or None when something is missing."""
    groups = params.get("remote_block_ids")
    if not groups or not all(key in params for key in _NEEDED):
        return None
    return Remote(
        engine_id=str(params["remote_engine_id"]),
        request_id=str(params["remote_request_id"]),
        host=str(params["remote_host"]),
        port=int(params["remote_port"] or 0),
        blocks=tuple(int(block) for block in groups[0]),
        expires_at=params.get("remote_blocks_expiry_time"),
    )


def aligned(local: Sequence[int], remote: Sequence[int]) -> list[int]:
    """Return the remote block for each local one: the last ones, as vLLM takes them.

    EngineDead when there are fewer remote than local ones.
    """
    if len(local) > len(remote):
        raise EngineDead(f"{len(local)} blocks to fill from {len(remote)} remote ones")
    return list(remote[len(remote) - len(local) :])


def is_expired(remote: Remote, now: float, clock_offset: float) -> bool:
    """Return whether the owner's hold is (nearly) over; unknown counts as held.

    `clock_offset` is the owner's clock minus ours.
    """
    if remote.expires_at is None:
        return False
    return now + EXPIRY_MARGIN_S >= remote.expires_at - clock_offset
