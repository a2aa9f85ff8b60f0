"""Waiting inside one process for something that another call does."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from kvplane.kernel.clock import Clock


class Arrivals:
    """Lets calls wait for a report of an ownership or for a session."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[tuple[str, ...], set[asyncio.Event]] = defaultdict(set)

    def announce(self, keys: Iterable[tuple[str, ...]]) -> None:
        """Wake those who wait for these."""
        for key in keys:
            for event in self._waiting.get(key, ()):
                event.set()

    def listen(self, key: tuple[str, ...]) -> "Listener":
        """Begin to listen, before looking, so that nothing is missed between the two."""
        return Listener(self._waiting, key, self._clock)


class Listener:
    """One call's ear for one key; use it with `with`."""

    def __init__(
        self, waiting: dict[tuple[str, ...], set[asyncio.Event]], key: tuple[str, ...], clock: Clock
    ) -> None:
        self._waiting, self._key, self._clock = waiting, key, clock
        self._event = asyncio.Event()

    def __enter__(self) -> "Listener":
        self._waiting[self._key].add(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        listeners = self._waiting[self._key]
        listeners.discard(self._event)
        if not listeners:
            del self._waiting[self._key]

    async def wait(self, seconds: float) -> None:
        """Wait for an announcement, or that long."""
        await wait_or_sleep(self._event, self._clock, seconds)


async def wait_or_sleep(event: asyncio.Event, clock: Clock, seconds: float) -> None:
    """Wait until `event` is set, and clear it, or until that much time has passed."""
    signal = asyncio.ensure_future(event.wait())
    sleep = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({signal, sleep}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal.cancel()
        sleep.cancel()
    event.clear()
