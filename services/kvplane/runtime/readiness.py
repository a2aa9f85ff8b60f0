"""Whether this process can do its work, asked again and again in the background."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError

# Returns what is wrong and what to do about it, or None.
Check = Callable[[], Awaitable[str | None]]

INTERVAL: Final = 1.0
TIMEOUT: Final = 2.0


class Readiness:
    """The last answer of each check, renewed every second."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        clock: Clock,
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`on_change` hears of each change, with True for ready."""
        self._checks = checks
        self._clock = clock
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._was_ready: bool | None = None
        self._draining = False
        self._log = structlog.get_logger().bind()
        self.problems: dict[str, str] = dict.fromkeys(checks, "not checked yet")

    @property
    def ready(self) -> bool:
        """Nothing is wrong and the process is not on its way out."""
        return not self.problems and not self._draining

    async def start(self) -> None:
        """Check once and go on in the background."""
        await self.check()
        self._task = asyncio.create_task(self._loop())

    async def drain(self) -> None:
        """Be not ready from now on."""
        self._draining = True
        self.problems = {"process": "shutting down"}
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._tell()

    async def check(self) -> None:
        """Run all checks once."""
        names = list(self._checks)
        answers = await asyncio.gather(*(self._ask(name) for name in names))
        problems = {}
        for name, (said, cause) in zip(names, answers, strict=True):
            if said and self.problems.get(name) != said:
                self._log.warning("not ready", check=name, problem=said, cause=cause)
            if said:
                problems[name] = said
        self.problems = problems
        await self._tell()

    async def _ask(self, name: str) -> tuple[str | None, str | None]:
        """Return the problem, and for the log alone what caused it."""
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._checks[name](), None
        except KvplaneError as error:
            cause = error.__cause__
            return error.message, None if cause is None else str(cause).partition("\n")[0]
        except TimeoutError:
            return f"no answer within {TIMEOUT:g} s", None
        except Exception as error:  # noqa: BLE001 - a check that breaks is a check that fails
            self._log.error("check failed", check=name, exc_info=error)
            return f"the check failed: {type(error).__name__}", None

    async def _tell(self) -> None:
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            self._log.info("ready" if self.ready else "not ready", problems=self.problems)
            await self._on_change(self.ready)

    async def _loop(self) -> None:
        while True:
            await self._clock.sleep(INTERVAL)
            await self.check()
