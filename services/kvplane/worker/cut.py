"""How much of what an owner holds a reader may take: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplane.kernel.digests import DIGEST_SIZE, matching_tokens
from kvplane.worker.reads import Permit, Refused

# Not part of a handle: what a leg is for, and our own key, are the reader's. The
# owner's own deadline goes too: the lease proves the hold, and an order to hold longer
# would have made it wrong.
_NOT_A_HANDLE: Final = frozenset(
    {"do_remote_prefill", "do_remote_decode", "kvplane", "remote_blocks_expiry_time"}
)
HANDLE_KEYS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class Owned:
    """What an owner holds, as the control plane tells it."""

    params: Mapping[str, Any]
    num_tokens: int
    block_size: int
    digests: bytes
    cuttable: bool


def blocks_to_compare(owned_tokens: int, own_tokens: int, block_size: int) -> int:
    """Return how many whole blocks both sides have."""
    return min(owned_tokens, own_tokens) // block_size


def cut_read(
    owned: Owned, tokens: Sequence[int], own_digests: bytes, space: bytes, min_tokens: int
) -> Permit | Refused:
    """Return what may be read, or why nothing is.

    `own_digests` cover at least `blocks_to_compare` blocks of `tokens`, in `space`. The
    permit covers a whole number of blocks, or all tokens held, the partial tail
    included, and exactly as many block ids: the engine aligns them from the end. Groups
    that cannot be cut are read whole or not at all.
    """
    size, held = owned.block_size, owned.num_tokens
    if size < 1 or held < 1 or len(owned.digests) != -(-held // size) * DIGEST_SIZE:
        return Refused("the owner's report is incomplete")
    matched = matching_tokens(owned.digests, held, own_digests, tokens, size, space)
    if matched < held and not owned.cuttable:
        return Refused(f"{matched} of {held} tokens match and the blocks cannot be cut")
    if matched < max(min_tokens, 1):
        return Refused(f"{matched} of {held} tokens match, fewer than {min_tokens}")
    params = cut_params(owned.params, matched, size, cuttable=owned.cuttable)
    if params is None:
        return Refused("the owner's report is incomplete")
    return Permit(matched, params)


def cut_params(
    params: Mapping[str, Any], num_tokens: int, block_size: int, *, cuttable: bool
) -> dict[str, Any] | None:
    """Return a handle for exactly `num_tokens` tokens, None for one that is no handle.

    Both the count and every group's ids are set: with one alone the engine reads wrong
    blocks or dies.
    """
    groups = params.get("remote_block_ids")
    if not groups or any(params.get(key) is None for key in HANDLE_KEYS):
        return None
    cut = {key: value for key, value in params.items() if key not in _NOT_A_HANDLE}
    if not cuttable:
        if params.get("remote_num_tokens") != num_tokens:
            return None
        return cut
    blocks = -(-num_tokens // block_size)
    if any(len(group) < blocks for group in groups):
        return None
    cut["remote_num_tokens"] = num_tokens
    cut["remote_block_ids"] = [list(group[:blocks]) for group in groups]
    return cut
