"""An event loop on virtual time for many simulated processes.

Each process has a ready queue of its own, first in first out as asyncio's is; which
process runs next is drawn. A frozen process does not run, a killed one never again:
its tasks stop where they are, as under `kill -9`. When nobody can run, time jumps to the
next timer. Nothing sleeps and nothing runs in a thread.
"""

import asyncio
import heapq
import random
from asyncio import events
from collections import deque
from contextvars import Context, ContextVar, copy_context
from typing import Any


class Process:
    """What lives and dies together: a replica, an engine, its agent, a gateway."""

    __slots__ = ("alive", "context", "frozen", "name", "ready", "slot")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self.ready: deque[Handle] = deque()
        self.slot = False  # in the loop's list of those that can run
        self.context = copy_context()
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return self.name


_process: ContextVar[Process] = ContextVar("simulated_process")


class Handle:
    """A callback to run; also a timer's."""

    __slots__ = ("_args", "_callback", "_context", "_when", "live", "process")

    def __init__(self, callback: Any, args: Any, context: Context, process: Process, when: float):
        self._callback, self._args, self._context = callback, args, context
        self.process, self._when, self.live = process, when, True

    def cancel(self) -> None:
        """Never run it."""
        self.live = False
        self._callback = self._args = None

    def cancelled(self) -> bool:
        """Tell whether it was cancelled."""
        return not self.live

    def when(self) -> float:
        """Return when it is due."""
        return self._when

    def run(self) -> None:
        """Run it in its context."""
        self._context.run(self._callback, *self._args)


class Stuck(Exception):
    """Too many steps without time passing."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = 0
        self._runnable: list[Process] = []
        self._closed = False
        self.nobody = Process("nobody")
        self.steps = 0
        self.errors: list[str] = []

    # -- what asyncio asks of a loop ----------------------------------------------

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Handle:
        """Queue it in the process that calls."""
        if context is None:
            context = copy_context()
        process = context.get(_process, self.nobody)
        handle = Handle(callback, args, context, process, self._now)
        if process.alive and not self._closed:
            process.ready.append(handle)
            if not process.slot and not process.frozen:
                process.slot = True
                self._runnable.append(process)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Handle:
        """Queue it when the time has come."""
        if context is None:
            context = copy_context()
        handle = Handle(callback, args, context, context.get(_process, self.nobody), when)
        if not self._closed:
            self._numbers += 1
            heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Handle:
        """Queue it after that many seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        """Return a task; it lives in the process that made it."""
        if context is None:
            task = asyncio.Task(coro, loop=self, name=name)
        else:
            task = asyncio.Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False
        return task

    def get_debug(self) -> bool:
        """No."""
        return False

    def is_running(self) -> bool:
        """Tell whether it can be used."""
        return not self._closed

    def is_closed(self) -> bool:
        """Tell whether it is over."""
        return self._closed

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Note what nobody caught."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note what nobody caught."""
        if self._closed:
            return
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    # -- the simulation's own -----------------------------------------------------

    def spawn(self, process: Process, coro: Any) -> "asyncio.Task[Any]":
        """Start a task in a process."""
        return self.create_task(coro, context=process.context.copy())

    def post(self, process: Process, callback: Any, *args: Any) -> None:
        """Run a callback in a process, after what is queued there."""
        self.call_soon(callback, *args, context=process.context)

    def post_at(self, when: float, process: Process, callback: Any, *args: Any) -> Handle:
        """Run a callback in a process at a time."""
        return self.call_at(when, callback, *args, context=process.context)

    def freeze(self, process: Process) -> None:
        """Stop it, as SIGSTOP does."""
        process.frozen = True
        if process.slot:
            process.slot = False
            self._runnable.remove(process)

    def thaw(self, process: Process) -> None:
        """Let it go on."""
        process.frozen = False
        if process.ready and process.alive and not process.slot:
            process.slot = True
            self._runnable.append(process)

    def kill(self, process: Process) -> None:
        """End it, as SIGKILL does."""
        process.alive = False
        process.ready.clear()
        if process.slot:
            process.slot = False
            self._runnable.remove(process)

    def run_to(self, until: float) -> None:
        """Run until that time."""
        events._set_running_loop(self)
        try:
            self._run_to(until)
        finally:
            events._set_running_loop(None)

    def _run_to(self, until: float) -> None:
        runnable, timers, draw = self._runnable, self._timers, self._rng.random
        still = 0
        while True:
            if runnable:
                index = int(draw() * len(runnable)) if len(runnable) > 1 else 0
                process = runnable[index]
                handle = process.ready.popleft()
                if not process.ready:
                    process.slot = False
                    runnable[index] = runnable[-1]
                    runnable.pop()
                if handle.live:
                    self.steps += 1
                    still += 1
                    if still > 100_000:
                        raise Stuck(f"{process} spins")
                    handle.run()
                continue
            still = 0
            if not timers or timers[0][0] > until:
                self._now = until
                return
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                handle = heapq.heappop(timers)[2]
                process = handle.process
                if handle.live and process.alive:
                    process.ready.append(handle)
                    if not process.slot and not process.frozen:
                        process.slot = True
                        runnable.append(process)

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True
        self._timers.clear()


class SimClock:
    """A machine's clock: its monotonic clock began anywhere and runs at a rate of its own,
    its wall clock may be wrong."""

    def __init__(
        self, loop: VirtualLoop, start: float, wall_offset_s: float = 0.0, rate: float = 1.0
    ) -> None:
        self._loop, self._start, self.rate = loop, start, rate
        self.wall_offset_s = wall_offset_s

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self._loop._now * self.rate + self._start

    def true_us(self, monotonic: float) -> int:
        """Return what the database's clock shows when this one's `monotonic()` is that."""
        return EPOCH_US + round((monotonic - self._start) / self.rate * 1e6)

    def now_us(self) -> int:
        """Return microseconds since 1970, as this machine believes."""
        return EPOCH_US + round((self._loop._now + self.wall_offset_s) * 1e6)

    async def sleep(self, seconds: float) -> None:
        """Wait, by this clock."""
        await asyncio.sleep(seconds / self.rate)


# The database's clock at the beginning.
EPOCH_US = 1_800_000_000_000_000
