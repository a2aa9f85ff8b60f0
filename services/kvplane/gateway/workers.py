"""What the gateway knows of workers: a list kept fresh, and who of them is lost.

The list answers when the control plane does not, and it ends waiting for an engine that
hangs: an engine that is frozen closes no connection.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import structlog

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.api import WorkerApi
from kvplane.gateway.config import GatewayConfig
from kvplane.kernel.clock import Clock
from kvplane.kernel.compat import compatibility_key
from kvplane.kernel.errors import KvplaneError

log = structlog.get_logger(__name__)

_PAGE = 1000


class Interrupted(Exception):
    """What was waited for will not come: a worker is lost, or a lease is."""

    def __init__(self, what: str, worker_id: str) -> None:
        super().__init__(what)
        # Empty: a lease.
        self.worker_id = worker_id


class Guard:
    """A bounded wait for workers, to be used with `async with`.

    Raises TimeoutError when the time is over, Interrupted when a target is lost.
    """

    __slots__ = ("_patience", "_scope", "_watch", "interrupted", "targets")

    def __init__(
        self,
        watch: "WorkerWatch",
        seconds: float,
        targets: tuple[routing.Target, ...],
        patience: float,
    ) -> None:
        self._watch = watch
        self._scope = asyncio.timeout(seconds)
        self._patience = patience
        self.targets = targets
        self.interrupted: Interrupted | None = None

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._watch.enter(self)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._watch.leave(self)
        try:
            await self._scope.__aexit__(*error)
        except TimeoutError:
            if self.interrupted is not None:
                raise self.interrupted from None
            raise

    def interrupt(self, what: str, worker_id: str = "") -> None:
        """End the wait, after the guard's patience."""
        self.interrupted = Interrupted(what, worker_id)
        self.extend(self._patience)

    def extend(self, seconds: float) -> None:
        """Wait that much longer from now."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._scope.reschedule(asyncio.get_running_loop().time() + seconds)


@dataclass(slots=True)
class _Known:
    workers: dict[str, routing.Worker] = field(default_factory=dict)
    # Monotonic; minus infinity: never.
    at: float = float("-inf")


class WorkerWatch:
    """Asks for the list again and again."""

    def __init__(self, api: WorkerApi, clock: Clock, config: GatewayConfig) -> None:
        self._api, self._clock, self._config = api, clock, config
        self._known = _Known()
        self._guards: set[Guard] = set()
        self._task: asyncio.Task[None] | None = None
        self._turn = 0
        # The registry answered when it was last asked.
        self.answering = False

    async def start(self) -> None:
        """Ask once, then in the background."""
        await self.refresh()
        self._task = asyncio.create_task(self._run(), name="worker list")

    async def stop(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def ready(self) -> bool:
        """The registry has answered at least once."""
        return self._known.at > float("-inf")

    def all(self) -> list[routing.Worker]:
        """Return all workers of the last list."""
        return list(self._known.workers.values())

    def get(self, worker_id: str) -> routing.Worker | None:
        """Return a worker as the last list has it."""
        return self._known.workers.get(worker_id)

    def compatibility(self, worker_id: str) -> str:
        """Return what a reader of the worker's KV must have equal; "" for an unknown one."""
        worker = self.get(worker_id)
        if worker is None:
            return ""
        what = worker.compatibility
        return compatibility_key(
            model=what.model,
            revision=what.revision,
            block_size=what.block_size,
            kv_layout=what.kv_layout,
            kv_dtype=what.kv_dtype,
            engine_version=what.engine_version,
        )

    def pick(self, model: str, exclude: Iterable[str]) -> routing.Worker | None:
        """Return a worker that can answer alone, each in turn; decodes before prefills."""
        able = self._able(model, exclude, (routing.WORKER_STATE_READY,))
        decodes = [w for w in able if w.role != routing.WORKER_ROLE_PREFILL]
        return next(iter(decodes or able), None)

    def silent(self, model: str, exclude: Collection[str]) -> list[routing.Worker]:
        """Return those that are lost; the first is another one each time.

        When nobody is excluded, those too of whose loss the list may not know yet.
        """
        lost, ready = routing.WORKER_STATE_LOST, routing.WORKER_STATE_READY
        return self._able(model, exclude, (lost,) if exclude else (lost, ready))

    def _able(
        self, model: str, exclude: Iterable[str], states: tuple[routing.WorkerState, ...]
    ) -> list[routing.Worker]:
        excluded = set(exclude)
        able = [
            worker
            for worker in self._known.workers.values()
            if worker.state in states
            and worker.worker_id not in excluded
            and model in served_names(worker)
        ]
        self._turn += 1
        first = self._turn % max(len(able), 1)
        return able[first:] + able[:first]

    def unknown(self, model: str) -> bool:
        """Tell whether there are workers, living or not, and none of them serves the model."""
        known = self._known.workers.values()
        return bool(known) and not any(model in served_names(worker) for worker in known)

    def guard(self, seconds: float, *targets: routing.Target, patience: float = 0.0) -> Guard:
        """Return a bound for what waits for `targets`.

        `patience` is for streams: once a worker is lost, the wait ends after so many
        seconds without `Guard.extend`.
        """
        return Guard(self, seconds, targets, patience)

    def enter(self, guard: Guard) -> None:
        """Tell the guard of losses from now on."""
        self._guards.add(guard)
        self._check(guard)

    def leave(self, guard: Guard) -> None:
        """Tell it no more."""
        self._guards.discard(guard)

    async def refresh(self) -> None:
        """Ask once; keep the old list when there is no answer."""
        workers: dict[str, routing.Worker] = {}
        request = routing.ListWorkersRequest(page_size=_PAGE)
        try:
            async with asyncio.timeout(max(self._config.refresh_interval_s, 0.5)):
                while True:
                    answer = await self._api.ListWorkers(request)
                    workers.update((worker.worker_id, worker) for worker in answer.workers)
                    if not answer.next_page_token:
                        break
                    request.page_token = answer.next_page_token
        except (KvplaneError, TimeoutError, OSError) as error:
            log.debug("no list of workers", error=str(error))
            self.answering = False
            return
        self.answering = True
        self._known = _Known(workers, self._clock.monotonic())
        for guard in list(self._guards):
            self._check(guard)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._config.refresh_interval_s)
            try:
                await self.refresh()
            except Exception:
                log.warning("asking for the list of workers failed", exc_info=True)

    def _check(self, guard: Guard) -> None:
        if guard.interrupted is not None:
            return
        if self._clock.monotonic() - self._known.at > self._config.refresh_stale_s:
            return
        for target in guard.targets:
            worker = self._known.workers.get(target.worker_id)
            # An older epoch is a list from before the worker came.
            if worker is None or worker.epoch < target.epoch:
                continue
            if worker.state == routing.WORKER_STATE_LOST or worker.epoch > target.epoch:
                guard.interrupt(f"worker {target.worker_id!r} is lost", target.worker_id)
                return


def served_names(worker: routing.Worker) -> list[str]:
    """Return the names that clients may use for its model, the main one first."""
    return list(worker.served_models) or [worker.compatibility.model]
