"""Let calls that are about to arrive share a batch with those that have."""

from collections.abc import Sized
from typing import Final

from kvplane.kernel.clock import loop_turn

# A call over gRPC takes several turns of the event loop from the socket to its handler.
# Without other work a turn takes some microseconds.
_QUIET_TURNS: Final = 12
_MOST_TURNS: Final = 96


async def gathered(queue: Sized, limit: int) -> None:
    """Return when nothing has joined the queue for some turns of the loop, or it is full.

    Never waits for time to pass: a lone call is held up by `_QUIET_TURNS` empty turns.
    """
    quiet, known = 0, len(queue)
    for _ in range(_MOST_TURNS):
        if quiet == _QUIET_TURNS or known >= limit:
            return
        await loop_turn()
        quiet = quiet + 1 if len(queue) == known else 0
        known = len(queue)
