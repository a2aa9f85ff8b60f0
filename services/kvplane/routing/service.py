"""Where a turn goes and whether it may reuse KV."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection

import structlog

from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, NoWorker, StaleEpoch
from kvplane.kernel.ids import Ids, derived
from kvplane.routing.answers import make_answer, replay
from kvplane.routing.domain import RoutingConfig, State, Worker
from kvplane.routing.inflight import InFlight, TurnKey
from kvplane.routing.metrics import DECIDED
from kvplane.routing.peers import Granted, LeasePeer, SessionPeer
from kvplane.routing.policy import Choice, Pool, Reason, Turn, choose, obstacle, owner_obstacle
from kvplane.routing.snapshot import Snapshots
from kvplane.routing.store import RouteKey, RouteStore

_log = structlog.get_logger(__name__)

_RECENT = 10_000


class Router:
    """Use cases of RoutingService."""

    def __init__(
        self,
        snapshots: Snapshots,
        routes: RouteStore,
        sessions: SessionPeer,
        leases: LeasePeer,
        clock: Clock,
        config: RoutingConfig,
        ids: Ids,
    ) -> None:
        self._snapshots = snapshots
        self._routes = routes
        self._sessions = sessions
        self._leases = leases
        self._clock = clock
        self._config = config
        self._ids = ids
        self._in_flight = InFlight()
        snapshots.on_refresh(self._refresh)
        self._choices = 0
        self._chosen_decode: dict[str, int] = {}
        self._chosen_prefill: dict[str, int] = {}
        # Saves a repeated request its way through the other services.
        self._recent: OrderedDict[RouteKey, tuple[bytes, float]] = OrderedDict()

    async def route(
        self, tenant_id: str, request: routing_pb2.RouteRequest
    ) -> routing_pb2.RouteResponse:
        """Answer a checked request. Raises NoWorker, and what BeginTurn must tell."""
        key = RouteKey(tenant_id, request.request_id, _attempt(request))
        repeated = self._repeated(key)
        if repeated is not None:
            return repeated
        answer = await self._decide(tenant_id, key, request)
        DECIDED[Reason(answer.reason)].inc()
        return answer

    async def complete(self, tenant_id: str, turn: session_pb2.CompleteTurnRequest) -> None:
        """Stop counting a turn and close it. Raises what CompleteTurn raises."""
        self._in_flight.remove(
            _request_key(tenant_id, turn.request_id)
            if turn.request_id
            else (tenant_id, turn.session_id, turn.turn)
        )
        await self._sessions.complete_turn(turn)

    async def _decide(
        self, tenant_id: str, key: RouteKey, request: routing_pb2.RouteRequest
    ) -> routing_pb2.RouteResponse:
        await self._snapshots.fresh()
        self._pool(request)  # nobody there: say so before a turn is opened
        turn = await self._sessions.begin_turn(
            session_pb2.BeginTurnRequest(
                request_id=request.request_id,
                key=request.session,
                model=request.model,
                prompt_tokens_estimate=request.prompt_tokens_estimate,
                request_bytes=request.request_bytes,
            )
        )
        flight = _turn_key(tenant_id, request, turn)
        try:
            choice = self._choose(request, turn, flight)
            granted, reason = await self._reuse(request, choice, turn)
            answer = make_answer(tenant_id, choice, turn, reason, granted)
            kept = await self._keep(key, answer)
        except BaseException:
            self._in_flight.remove(flight)
            raise
        # An answer that may be stored is for whoever asks again, and its lease with it.
        if kept is not None:
            if granted is not None and kept.lease.lease_id != granted.lease.lease_id:
                self._leases.give_back(granted.lease)
            if kept is not answer:  # that is where the turn went
                went_to = (kept.decode.worker_id, kept.prefill.worker_id)
                self._in_flight.add(flight, filter(None, went_to), self._snapshots.now_us())
            return kept
        if granted is None:
            return answer
        # Nobody would hear of this lease again if the answer got lost.
        reason = Reason.LEASE_SERVICE_UNAVAILABLE
        return make_answer(tenant_id, choice, turn, reason, None)

    def _refresh(self, workers: Collection[Worker]) -> None:
        self._in_flight.refresh(workers)
        for chosen in (self._chosen_decode, self._chosen_prefill):
            now = {w.worker_id: chosen.get(w.worker_id, 0) for w in workers}
            chosen.clear()
            chosen.update(now)

    def _pool(self, request: routing_pb2.RouteRequest) -> Pool:
        pool = self._snapshots.pool(request.model, frozenset(request.exclude_worker_ids))
        if not pool.decode and not pool.prefill:
            raise NoWorker(f"no live worker serves {request.model!r}", retry_after=1.0)
        return pool

    def _choose(
        self, request: routing_pb2.RouteRequest, turn: Turn | None, flight: TurnKey
    ) -> Choice:
        choice = choose(
            self._pool(request),
            self._in_flight.loads,
            self._chosen_decode,
            self._chosen_prefill,
            last_decode=turn.last_decode if turn is not None else "",
            gap=self._config.load_gap_requests,
        )
        assert choice is not None, "the pool has somebody"
        self._choices += 1
        self._chosen_decode[choice.decode.worker_id] = self._choices
        targets = [choice.decode.worker_id]
        if choice.prefill is not None:
            self._chosen_prefill[choice.prefill.worker_id] = self._choices
            targets.append(choice.prefill.worker_id)
        self._in_flight.add(flight, targets, self._snapshots.now_us())
        return choice

    async def _reuse(
        self, request: routing_pb2.RouteRequest, choice: Choice, turn: Turn | None
    ) -> tuple[Granted | None, Reason]:
        owner = self._snapshots.get(turn.last_decode) if turn is not None else None
        exclude = set(request.exclude_worker_ids)
        reason = obstacle(
            choice, turn, owner, exclude=exclude, force_recompute=request.force_recompute
        )
        if reason is not None:
            return None, reason
        assert turn is not None
        assert choice.prefill is not None
        reader = choice.prefill
        may_come = (
            turn.previous_completed
            and owner is not None
            and owner.profile.managed
            and owner.state is State.READY
        )
        try:
            granted = await self._leases.grant(
                self._ids.new("grant"),
                turn.session_id,
                reader,
                self._config.report_wait_s if may_come else 0.0,
            )
        except StaleEpoch:
            # The reader has registered again in this moment: cold, but there.
            self._snapshots.invalidate()
            return None, Reason.NOTHING_HELD
        if isinstance(granted, Reason):
            draining = owner is not None and owner.state is State.DRAINING
            if granted is Reason.NOTHING_HELD and draining:
                return None, Reason.OWNER_DRAINING
            return None, granted
        try:
            unfit = await self._unfit(granted, reader, exclude)
        except BaseException:
            self._leases.give_back(granted.lease)
            raise
        if unfit is not None:
            self._leases.give_back(granted.lease)
            return None, unfit
        return granted, Reason.OWNER_HOLDS

    async def _unfit(self, granted: Granted, reader: Worker, exclude: set[str]) -> Reason | None:
        """Check a grant against the registry: the owner may be another than was thought."""
        owner = self._snapshots.get(granted.owner_id)
        if owner is None or owner.epoch != granted.owner_epoch:
            self._snapshots.invalidate()
            await self._snapshots.fresh()
            owner = self._snapshots.get(granted.owner_id)
        if owner is None or owner.epoch != granted.owner_epoch or owner.worker_id in exclude:
            return Reason.OWNER_LOST
        mine = owner.profile
        # A plain engine does not say its id.
        registered = (mine.engine_id or granted.engine_id, mine.kv_host, mine.kv_port)
        named = (granted.engine_id, *granted.side_channel)
        if named != registered:
            _log.warning(
                "a worker's handle names an engine or a side channel that is not its own",
                worker_id=owner.worker_id,
                registered=registered,
                named=named,
            )
            return Reason.INCOMPATIBLE
        return owner_obstacle(reader, owner)

    async def _keep(
        self, key: RouteKey, answer: routing_pb2.RouteResponse
    ) -> routing_pb2.RouteResponse | None:
        """Store the answer and return the one that counts: of two for one request, the first.

        None when the database is away: better an answer that cannot be repeated than none.
        """
        if not self._snapshots.reachable:
            return None
        raw = answer.SerializeToString()
        try:
            async with asyncio.timeout(self._config.store_bound_s):
                counted, age_us = await self._routes.settle(key, raw)
        except (TimeoutError, KvplaneError) as error:
            _log.warning("cannot keep an answer", error=str(error))
            return None
        self._remember(key, counted, age_us)
        return answer if counted is raw else replay(counted, age_us)

    def _repeated(self, key: RouteKey) -> routing_pb2.RouteResponse | None:
        found = self._recent.get(key)
        if found is None:
            return None
        age_s = self._clock.monotonic() - found[1]
        return replay(found[0], round(age_s * 1e6)) if age_s < self._config.route_kept_s else None

    def _remember(self, key: RouteKey, answer: bytes, age_us: int) -> None:
        self._recent[key] = (answer, self._clock.monotonic() - age_us / 1e6)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)


def _attempt(request: routing_pb2.RouteRequest) -> str:
    if not request.exclude_worker_ids and not request.force_recompute:
        return ""
    excluded = sorted(set(request.exclude_worker_ids))
    return derived("attempt", str(request.force_recompute), *excluded)[-32:]


def _turn_key(tenant_id: str, request: routing_pb2.RouteRequest, turn: Turn | None) -> TurnKey:
    if turn is None or not turn.session_id:
        return _request_key(tenant_id, request.request_id)
    return (tenant_id, turn.session_id, turn.turn)


def _request_key(tenant_id: str, request_id: str) -> TurnKey:
    return (tenant_id, f"request:{request_id}", 0)
