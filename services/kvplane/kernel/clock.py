"""The only place that reads a clock or sleeps, so that tests can own time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time as the rest of the code sees it."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences mean anything."""
        ...

    def now_us(self) -> int:
        """Return microseconds since 1970."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clock.

    `now_us` is anchored once and then follows the monotonic clock, so a step of
    the wall clock changes no deadline of a running process.
    """

    def __init__(self) -> None:
        self._offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000

    def monotonic(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    def now_us(self) -> int:
        """Return microseconds since 1970, free of steps."""
        return self._offset_us + time.monotonic_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds."""
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that moves only when a test says so."""

    def __init__(self, now_us: int = 1_800_000_000_000_000) -> None:
        self._now_us = now_us
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Return the fake time in seconds."""
        return self._now_us / 1e6

    def now_us(self) -> int:
        """Return the fake time in microseconds."""
        return self._now_us

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has passed that time."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._now_us + round(seconds * 1e6), done))
        await done

    def advance(self, seconds: float) -> None:
        """Move on and wake the sleepers whose time has come."""
        self._now_us += round(seconds * 1e6)
        due = [w for w in self._waiting if w[0] <= self._now_us]
        self._waiting = [w for w in self._waiting if w[0] > self._now_us]
        for _, done in due:
            if not done.done():
                done.set_result(None)


def sleep_blocking(seconds: float) -> None:
    """Wait in a thread that has no event loop."""
    time.sleep(seconds)


async def loop_turn() -> None:
    """Let everything that is ready run once. Takes no time by any clock."""
    await asyncio.sleep(0)
