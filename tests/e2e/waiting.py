"""Waiting for something to become true, with an end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(probe: Callable[[], Awaitable[T]], seconds: float = 20) -> T:
    """Ask until the answer is true-ish; fail after `seconds`, with the last answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        answer = await probe()
        if answer:
            return answer
        if loop.time() > end:
            raise AssertionError(f"still {answer!r} after {seconds} s")
        await asyncio.sleep(0.1)
