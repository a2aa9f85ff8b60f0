"""The block pool as requests see it: who finds none free waits, first come first served."""

import asyncio
from collections import deque
from collections.abc import Iterable

from kvplane.engine.config import EngineConfig
from kvplane.engine.pool import BlockPool, Pins


class Blocks:
    """Allocation that waits. Used from one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool = BlockPool(
            config.num_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self.pins = Pins(self.pool)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    async def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, as soon as there are that many."""
        if not self._waiting:
            blocks = self.pool.allocate(count)
            if blocks is not None:
                return blocks
        ready: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, ready))
        try:
            return await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                self.release(ready.result())
            raise

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, and on to those who wait."""
        self.pool.release(blocks)
        self.wake()

    def wake(self) -> None:
        """Serve those who wait, after pins have been freed."""
        while self._waiting:
            count, ready = self._waiting[0]
            if not ready.done():
                blocks = self.pool.allocate(count)
                if blocks is None:
                    return
                ready.set_result(blocks)
            self._waiting.popleft()
