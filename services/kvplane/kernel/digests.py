"""Chained digests of token blocks: the proof that two histories begin alike.

``digest[i] = blake2b-128(digest[i-1] + tokens of block i)``, tokens as little-endian
uint32, ``digest[-1] = blake2b-128(space)``. Equal digests at i mean equal tokens up to
and including block i. The last one may cover a partial block.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

DIGEST_SIZE = 16


def digest_space(model: str, revision: str = "", salt: str = "", adapter: str = "") -> bytes:
    """Return the chain's seed. KV under another model, salt or adapter never matches."""
    seed = hashlib.blake2b(b"kvplane.v1", digest_size=DIGEST_SIZE)
    for part in (model, revision, salt, adapter):
        raw = part.encode("utf-8", "surrogatepass")
        seed.update(len(raw).to_bytes(8, "little"))
        seed.update(raw)
    return seed.digest()


def block_digests(
    tokens: Sequence[int], block_size: int, space: bytes, previous: bytes | None = None
) -> bytes:
    """Return the joined digests of `tokens`: ceil(len / block_size) times 16 bytes.

    `previous` continues a chain; `tokens` then begin at the block after it.
    """
    return b"".join(iter_block_digests(tokens, block_size, space, previous))


def iter_block_digests(
    tokens: Sequence[int], block_size: int, space: bytes, previous: bytes | None = None
) -> Iterator[bytes]:
    """Yield one digest at a time, so that a caller can let go of the GIL between blocks."""
    last = previous if previous is not None else space
    for start in range(0, len(tokens), block_size):
        block = array("I", tokens[start : start + block_size])
        last = hashlib.blake2b(last + block.tobytes(), digest_size=DIGEST_SIZE).digest()
        yield last


def matching_tokens(
    held: bytes,
    held_tokens: int,
    own: bytes,
    own_tokens: Sequence[int],
    block_size: int,
    space: bytes,
) -> int:
    """Return how many leading tokens are proved equal.

    `held` are the owner's digests of `held_tokens` tokens, `own` the reader's of its
    `own_tokens`. The result is a whole number of blocks, or all of `held_tokens` when
    the owner's partial tail is proved too.
    """
    low, high = 0, min(held_tokens, len(own_tokens)) // block_size
    # The chain makes equality monotonic: once different, different for ever.
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * DIGEST_SIZE
        if held[end - DIGEST_SIZE : end] == own[end - DIGEST_SIZE : end]:
            low = middle
        else:
            high = middle - 1
    matched = low * block_size
    if matched < held_tokens < matched + block_size and held_tokens <= len(own_tokens):
        end = low * DIGEST_SIZE
        previous = own[end - DIGEST_SIZE : end] if low else None
        tail = block_digests(own_tokens[matched:held_tokens], block_size, space, previous)
        if held[end : end + DIGEST_SIZE] == tail:
            return held_tokens
    return matched
