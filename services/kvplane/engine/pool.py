"""Blocks: who uses them, which are free, and which are pinned for a reader.

A freed block is the next one to be handed out, so that a stale read shows at once.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BlockPool:
    """`num_blocks` blocks with reference counts and, if asked for, a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._caching = prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._uses: dict[int, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Unused blocks whose content can still be found; the oldest first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many blocks could be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        """How many blocks somebody uses or holds."""
        return len(self._uses)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks, or None when there are not that many."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
            self._uses[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. KeyError for one that nobody uses."""
        for block in blocks:
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            del self._uses[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def take_prefix(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return and share the cached full blocks that begin `tokens`.

        The last token is never covered: it must be computed to get the next one.
        """
        if not self._caching:
            return []
        found = []
        for chained in self._hashes(tokens[: len(tokens) - 1], salt):
            block = self._by_hash.get(chained)
            if block is None:
                break
            self._uses[block] = self._uses.get(block, 0) + 1
            self._cached.pop(block, None)
            found.append(block)
        return found

    def remember(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        """Let the full blocks of computed `tokens` be found again, by tokens alone.

        As in vLLM, what really lies in the blocks is not looked at.
        """
        if not self._caching:
            return
        for block, chained in zip(blocks, self._hashes(tokens, salt), strict=False):
            if chained not in self._by_hash and block not in self._hash_of:
                self._by_hash[chained] = block
                self._hash_of[block] = chained

    def _hashes(self, tokens: Sequence[int], salt: str) -> Iterable[bytes]:
        last = salt.encode("utf-8", "surrogatepass")
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            block = array("I", tokens[start : start + self._block_size]).tobytes()
            last = hashlib.blake2b(last + block, digest_size=16).digest()
            yield last

    def _forget(self, block: int) -> None:
        del self._by_hash[self._hash_of.pop(block)]


@dataclass(slots=True)
class Pin:
    """Blocks held for a reader after their request has ended."""

    request_id: str
    blocks: list[int]
    # On the engine's monotonic clock.
    deadline: float
    # False: a prefill's blocks, waiting for the decode of the same turn.
    by_decode: bool


class Pins:
    """Everything that is held for readers, by request id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    def add(self, pin: Pin) -> None:
        """Hold the blocks of a request that has ended."""
        self._pins[pin.request_id] = pin

    def free(self, request_id: str) -> bool:
        """Let go of a request's blocks; False when nothing is held (any more)."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        self._pool.release(pin.blocks)
        return True

    def extend(self, request_id: str, deadline: float) -> float | None:
        """Move a deadline, never to an earlier time; return it, None when nothing is held."""
        pin = self._pins.get(request_id)
        if pin is None:
            return None
        pin.deadline = max(pin.deadline, deadline)
        return pin.deadline

    def expire(self, now: float) -> list[str]:
        """Let go of all that has run out; return their request ids."""
        over = [pin.request_id for pin in self._pins.values() if now >= pin.deadline]
        for request_id in over:
            self.free(request_id)
        return over

    def held(self) -> list[Pin]:
        """Return what is held now."""
        return list(self._pins.values())
