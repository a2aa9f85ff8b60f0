"""Chained digests of token blocks: the proof that two histories begin alike.

``digest[i] = blake2b-128(digest[i-1] + tokens of block i)``, tokens as little-endian
uint32, ``digest[-1] = blake2b-128(space)``. Equal digests at i mean equal tokens up to
and including block i. The last one may cover a partial block.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_SIZE = 16
_CHUNK = 256


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

    `previous` continues a chain; `tokens` then begin at the block after it. Raises
    OverflowError for a token outside uint32.
    """
    chain = DigestChain(tokens, len(tokens), block_size, previous if previous else space)
    while chain.advance(_CHUNK):
        pass
    return bytes(chain.digests)


class DigestChain:
    """Digests of the first `count` of `tokens`, made a piece at a time.

    Whoever shares the interpreter with an engine lets go of it between two pieces:
    64 blocks of 16 tokens take about 70 microseconds.
    """

    __slots__ = ("_block_size", "_count", "_done", "_last", "_tokens", "digests")

    def __init__(self, tokens: Sequence[int], count: int, block_size: int, space: bytes) -> None:
        self._tokens = tokens
        self._count = count
        self._block_size = block_size
        self._done = 0
        self._last = space
        self.digests = bytearray()

    def resume(self, digests: bytes) -> None:
        """Start after these digests of whole blocks, made of the same tokens before."""
        whole = min(len(digests) // DIGEST_SIZE, self._count // self._block_size)
        if whole and not self._done:
            self.digests += digests[: whole * DIGEST_SIZE]
            self._last = bytes(self.digests[-DIGEST_SIZE:])
            self._done = whole * self._block_size

    def advance(self, blocks: int) -> bool:
        """Add up to `blocks` digests; return whether there are more to come."""
        end = min(self._done + blocks * self._block_size, self._count)
        raw = array("I", self._tokens[self._done : end]).tobytes()
        width = self._block_size * 4
        last, blake2b = self._last, hashlib.blake2b
        for start in range(0, len(raw), width):
            last = blake2b(last + raw[start : start + width], digest_size=DIGEST_SIZE).digest()
            self.digests += last
        self._last, self._done = last, end
        return end < self._count


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
