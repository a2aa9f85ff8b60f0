"""The toy model. It reads what lies in the blocks, so a wrong block always shows.

The KV of token i is a hash of the token and of the KV that lies in memory for token
i - 1. The next token is a hash of the KV in memory of all tokens before it. Nothing is
remembered outside the blocks.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvplane.engine.tokenizer import FIRST_WORD, NUM_WORDS

KV_BYTES = 32


class ToyModel:
    """One model over one engine's KV memory of `num_blocks` blocks."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * KV_BYTES
        self.memory: npt.NDArray[np.uint8] = np.zeros((num_blocks, self.block_bytes), np.uint8)
        self._flat: memoryview = self.memory.reshape(-1).data
        # Takes the place of the KV before the first token; differs from model to model.
        self._seed = hashlib.blake2b(name.encode(), digest_size=KV_BYTES).digest()

    def compute(self, blocks: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Write the KV of `tokens`, the first of them at position `start`."""
        flat, size = self._flat, self.block_size
        last = self._seed
        if start:
            at = self._offset(blocks, start - 1)
            last = bytes(flat[at : at + KV_BYTES])
        done = 0
        while done < len(tokens):
            # One block, or what is left of it, at a time.
            part = tokens[done : done + size - (start + done) % size]
            written = bytearray()
            for token in part:
                last = hashlib.blake2b(
                    token.to_bytes(4, "little") + last, digest_size=KV_BYTES
                ).digest()
                written += last
            at = self._offset(blocks, start + done)
            flat[at : at + len(written)] = written
            done += len(part)

    def next_token(self, blocks: Sequence[int], length: int) -> int:
        """Return the token that follows the first `length` ones, from their KV."""
        used = -(-length // self.block_size)
        content = self.memory[list(blocks[:used])].reshape(-1)[: length * KV_BYTES]
        digest = hashlib.blake2b(content.data, digest_size=8, key=self._seed).digest()
        return FIRST_WORD + int.from_bytes(digest, "little") % NUM_WORDS

    def _offset(self, blocks: Sequence[int], position: int) -> int:
        block, slot = divmod(position, self.block_size)
        return blocks[block] * self.block_bytes + slot * KV_BYTES
