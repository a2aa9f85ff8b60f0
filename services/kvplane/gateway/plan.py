"""Where a request goes: Route's word, or the last known workers when there is none."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import kv_params
from kvplane.client.api import RoutingApi
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import from_kvplane, unavailable, unknown_model
from kvplane.gateway.giveback import GiveBack
from kvplane.gateway.metrics import Metrics
from kvplane.gateway.request import ClientRequest
from kvplane.gateway.tasks import Background
from kvplane.gateway.upstream import Upstream
from kvplane.gateway.workers import WorkerWatch
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, NoWorker, Unavailable

log = structlog.get_logger(__name__)

# Lost workers that are asked, and how long each may take to answer.
_PROBED: Final = 8
_PROBE_S: Final = 1.0


@dataclass(slots=True)
class Plan:
    """The workers of one attempt, and what their requests carry."""

    decode: routing.Target
    # None: the decode does it all.
    prefill: routing.Target | None = None
    # Empty: there is none.
    session_id: str = ""
    turn: int = 0
    decision: str = "none"
    reason: str = "control_plane_unavailable"
    prefill_params: dict[str, Any] = field(default_factory=dict)
    decode_params: dict[str, Any] = field(default_factory=dict)
    # Granted to the prefill worker; None once it is used or given back.
    lease: lease_pb2.Lease | None = None
    # When Route was sent, on the monotonic clock: the lease's ttl counts from there.
    sent_at: float = 0.0
    held_tokens: int = 0

    @property
    def reuse(self) -> bool:
        """Route gave the prefill a lease on what an earlier turn left."""
        return self.decision == "reuse"

    @property
    def over_quota(self) -> bool:
        """The tenant is beyond a soft limit, so that the turn has no session."""
        return self.reason == "over_quota" and not self.session_id


class Planner:
    """Asks the router, for a bounded time."""

    def __init__(
        self,
        routing_service: RoutingApi,
        give_back: GiveBack,
        watch: WorkerWatch,
        upstream: Upstream,
        background: Background,
        metrics: Metrics,
        clock: Clock,
        config: GatewayConfig,
    ) -> None:
        self._routing, self._give_back, self._watch = routing_service, give_back, watch
        self._upstream = upstream
        self._background, self._metrics = background, metrics
        self._clock, self._config = clock, config
        self._away = False

    async def plan(
        self,
        request: ClientRequest,
        request_id: str,
        *,
        exclude: Collection[str] = (),
        force_recompute: bool = False,
    ) -> Plan:
        """Return a plan. Raises NoWorker, and Failure for what the client must know."""
        asked = routing.RouteRequest(
            request_id=request_id,
            session=_key(request),
            model=request.model,
            prompt_tokens_estimate=request.prompt_tokens_estimate,
            request_bytes=len(request.raw),
            exclude_worker_ids=sorted(exclude),
            force_recompute=force_recompute or not request.one_prompt,
        )
        if self._away and not self._watch.answering:
            return await self._without_router(request, exclude)  # as it was a moment ago
        sent_at = self._clock.monotonic()
        # Not cancelled with the request: a turn or a lease that was given must be
        # given back.
        task = self._background.start(self._ask(asked), "route")
        try:
            done, _ = await asyncio.wait([task], timeout=self._config.route_timeout_s)
        except asyncio.CancelledError:
            self._give_back_late(task)
            raise
        if not done:
            self._away = True
            self._give_back_late(task)
            log.warning("the router does not answer in time")
            return await self._without_router(request, exclude)
        self._metrics.route_seconds.observe(self._clock.monotonic() - sent_at)
        answer = task.result()
        self._away = answer is None or isinstance(answer, Unavailable)
        if isinstance(answer, KvplaneError):
            return await self._refused(request, exclude, answer)
        if answer is None:
            return await self._without_router(request, exclude)
        return _plan(answer, sent_at)

    async def _ask(
        self, asked: routing.RouteRequest
    ) -> routing.RouteResponse | KvplaneError | None:
        try:
            return await self._routing.Route(asked)
        except KvplaneError as error:
            return error
        except Exception:
            log.warning("the router cannot be reached", exc_info=True)
            return None

    async def _refused(
        self, request: ClientRequest, exclude: Collection[str], error: KvplaneError
    ) -> Plan:
        if isinstance(error, NoWorker):
            if not exclude and self._watch.unknown(request.model):
                raise unknown_model(request.model) from error
            plan = await self._last_resort(request, exclude)
            if plan is None:
                raise error
            return plan
        failure = from_kvplane(error)
        if failure is not None:
            raise failure from error
        log.warning("going on without the router", error=error.message)
        return await self._without_router(request, exclude)

    async def _without_router(self, request: ClientRequest, exclude: Collection[str]) -> Plan:
        self._metrics.without_control_plane.inc()
        worker = self._watch.pick(request.model, exclude)
        if worker is not None:
            return _alone(worker, worker.epoch)
        if self._watch.unknown(request.model):
            raise unknown_model(request.model)
        plan = await self._last_resort(request, exclude)
        if plan is None:
            raise unavailable("No worker is known to be there; try again.")
        return plan

    async def _last_resort(self, request: ClientRequest, exclude: Collection[str]) -> Plan | None:
        """Find a worker that answers though the registry calls it lost.

        All of them can only be silent there when it is the registry that cannot be reached.
        """
        silent = self._watch.silent(request.model, exclude)[:_PROBED]
        up = await asyncio.gather(*(self._upstream.healthy(w.url, _PROBE_S) for w in silent))
        for worker, is_up in zip(silent, up, strict=True):
            if is_up:
                log.warning("a lost worker answers", worker_id=worker.worker_id)
                # Not to be taken for lost at once: the epoch that it will begin.
                return _alone(worker, worker.epoch + 1)
        return None

    def _give_back_late(self, task: asyncio.Task[Any]) -> None:
        task.add_done_callback(self._came_late)

    def _came_late(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or not isinstance(answer := task.result(), routing.RouteResponse):
            return
        plan = _plan(answer, 0.0)
        if plan.lease is not None:
            self._give_back.unless_begun(plan.lease)
        if plan.session_id:
            turn = session.CompleteTurnRequest(
                session_id=plan.session_id, turn=plan.turn, outcome=session.TURN_OUTCOME_CANCELLED
            )
            self._background.start(
                self._routing.Complete(routing.CompleteRequest(turn=turn)), "complete"
            )


def _alone(worker: routing.Worker, epoch: int) -> Plan:
    target = routing.Target(
        worker_id=worker.worker_id, epoch=epoch, url=worker.url, managed=worker.managed
    )
    if worker.HasField("data_parallel_rank"):
        target.headers["X-data-parallel-rank"] = str(worker.data_parallel_rank)
    return Plan(decode=target)


def _key(request: ClientRequest) -> session.SessionKey:
    if request.session:
        return session.SessionKey(name=request.session)
    return session.SessionKey(history=request.history.candidates if request.history else ())


def _plan(answer: routing.RouteResponse, sent_at: float) -> Plan:
    has_prefill = answer.HasField("prefill")
    return Plan(
        decode=answer.decode,
        prefill=answer.prefill if has_prefill else None,
        session_id=answer.session_id,
        turn=answer.turn,
        decision=routing.Decision.Name(answer.decision).removeprefix("DECISION_").lower(),
        reason=routing.DecisionReason.Name(answer.reason).removeprefix("DECISION_REASON_").lower(),
        prefill_params=kv_params.to_dict(answer.prefill_params) if has_prefill else {},
        decode_params=kv_params.to_dict(answer.decode_params),
        lease=answer.lease if answer.HasField("lease") else None,
        sent_at=sent_at,
        held_tokens=answer.held_tokens,
    )
