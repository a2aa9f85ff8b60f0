"""One turn on its way: route, prefill, decode; tried again elsewhere where that is safe."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client.api import RoutingApi
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import ClientError, Failure, unavailable, upstream_failed
from kvplane.gateway.giveback import GiveBack
from kvplane.gateway.legs import Answer, LegFailed, Legs, Prefilled
from kvplane.gateway.metrics import Metrics
from kvplane.gateway.plain import PlainLeases, Read, duration
from kvplane.gateway.plan import Plan, Planner
from kvplane.gateway.reply import Reply, Usage
from kvplane.gateway.request import ClientRequest
from kvplane.gateway.tasks import Background
from kvplane.gateway.upstream import Sent
from kvplane.gateway.workers import WorkerWatch
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, NoWorker

log = structlog.get_logger(__name__)

_MAX_ATTEMPTS: Final = 6


@dataclass(frozen=True, slots=True)
class Parts:
    """What every turn works with."""

    config: GatewayConfig
    clock: Clock
    routing: RoutingApi
    watch: WorkerWatch
    planner: Planner
    legs: Legs
    plain: PlainLeases
    give_back: GiveBack
    metrics: Metrics
    background: Background


@dataclass(slots=True)
class Turn:
    """One request of a client. `open` it, forward its answer, then `complete` it."""

    parts: Parts
    request: ClientRequest
    tenant_id: str
    request_id: str
    # Headers of the client's trace, for the engines.
    trace: Mapping[str, str]
    begun: float
    plan: Plan | None = None
    prefilled: Prefilled | None = None
    # The worker whose prefill was used.
    prefill_worker_id: str = ""
    first_byte_s: float = 0.0
    _read: Read | None = None
    _alone: bool = False
    # Managed prefills that have a request of this turn, or had.
    _asked: dict[str, routing.Target] = field(default_factory=dict)
    _exclude: set[str] = field(default_factory=set)
    _prefills_failed: int = 0
    _decodes_failed: int = 0
    _attempts: int = 0
    _completed: bool = False

    @property
    def asks_token_ids(self) -> bool:
        """We ask the decode for token ids that the client did not ask for."""
        return self._reports_decode and not self.request.body.get("return_token_ids")

    @property
    def asks_usage(self) -> bool:
        """We ask the decode's stream for usage that the client did not ask for."""
        options = self.request.body.get("stream_options")
        return (
            self.request.stream
            and not self.request.wants_usage
            and (options is None or isinstance(options, Mapping))
        )

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that the prefill read."""
        return self.prefilled.reused_tokens if self.prefilled is not None else 0

    async def open(self) -> Answer:
        """Return the decode's answer as soon as something of it is there.

        Raises Failure, ClientError for an engine's own 4xx, InvalidField.
        """
        try:
            self.plan = await self._new_plan(force=False)
        except NoWorker as error:
            raise unavailable(error.message, error.retry_after or 1.0) from error
        while True:
            plan = self.plan
            self.prefilled = None
            if self._two_legs(plan):
                try:
                    await self._prefill(plan)
                except LegFailed as failure:
                    self._release(plan)
                    if await self._prefill_again(failure):
                        continue
            self._release(plan)
            try:
                return await self._decode(plan)
            except LegFailed as failure:
                self.drop_handle()
                await self._decode_again(failure)

    def _two_legs(self, plan: Plan) -> bool:
        if plan.prefill is None or self._alone or not self.request.one_prompt:
            return False
        if plan.prefill.managed and plan.decode.managed:
            return True
        # The gateway can do the lease work for one reader of one handle only.
        both = (
            plan.prefill.managed == plan.decode.managed
            and self.parts.plain.static(plan.prefill) is not None
            and self.parts.plain.static(plan.decode) is not None
        )
        return both and self.request.choices == 1 and bool(plan.session_id)

    async def _new_plan(self, *, force: bool) -> Plan:
        self._attempts += 1
        return await self.parts.planner.plan(
            self.request, self.request_id, exclude=self._exclude, force_recompute=force
        )

    async def _prefill(self, plan: Plan) -> None:
        assert plan.prefill is not None
        parts, sent = self.parts, Sent()
        read: Read | None = None
        params: Mapping[str, Any] = plan.prefill_params
        if not plan.prefill.managed:
            params, read = await parts.plain.begin_prefill(self.request, plan)
        try:
            self.prefilled = await parts.legs.prefill(
                self.request,
                plan,
                params,
                self.request_id,
                sent,
                trace=self.trace,
                token_ids=not plan.prefill.managed,
                started=read,
                reads=plan.reuse if plan.prefill.managed else read is not None,
            )
        finally:
            if read is not None:
                read.end(parts.give_back, sent=sent.sent)
            elif sent.sent and plan.prefill.managed:
                self._asked[plan.prefill.worker_id] = plan.prefill
        plan.lease = None  # its reader gives it back
        parts.metrics.prefills.inc()
        self.prefill_worker_id = plan.prefill.worker_id
        if self.prefilled.params is not None and not plan.prefill.managed:
            await self._hand_over(plan, self.prefilled)

    async def _hand_over(self, plan: Plan, prefilled: Prefilled) -> None:
        """Get a plain decode its read of a plain prefill's blocks, or nothing to read."""
        assert plan.prefill is not None
        assert prefilled.params is not None
        plain, handle = self.parts.plain, prefilled.params
        tokens = [*(prefilled.prompt_token_ids or ()), *prefilled.token_ids]
        prefilled.params = None
        if not await plain.report(
            plan.prefill, plan, self.tenant_id, self.request, handle, tokens, for_decode=True
        ):
            return
        try:
            own = await plain.tokenize(plan.decode, self.request)
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("the decode computes the prompt", reason=str(error))
            return
        granted = await plain.begin_decode(self.request, plan, handle, own)
        if granted is not None:
            prefilled.params, self._read = granted

    async def _prefill_again(self, failure: LegFailed) -> bool:
        """Make another plan; False: the decode goes on alone."""
        self._note("prefill", failure)
        assert self.plan is not None
        stuck = self.plan.reuse and failure.kind in ("timeout", "lease")
        if not stuck:
            self._exclude.add(failure.worker_id)
            self._prefills_failed += failure.worker_id != self.plan.decode.worker_id
        lost_decode = failure.worker_id == self.plan.decode.worker_id
        if self._prefills_failed > 1 and not lost_decode:
            return False
        try:
            if self._attempts >= _MAX_ATTEMPTS:
                raise NoWorker("too many workers failed for this request")
            self.plan = await self._new_plan(force=True)
        except (NoWorker, Failure) as error:
            if lost_decode:
                raise unavailable(error.message) from failure
            return False
        return True

    async def _decode(self, plan: Plan) -> Answer:
        parts, prefilled = self.parts, self.prefilled
        params: dict[str, Any] | None = None
        if self._alone or not self.request.one_prompt:
            pass
        elif prefilled is not None and prefilled.params is not None:
            params = {**prefilled.params, **(plan.decode_params if plan.decode.managed else {})}
        elif plan.decode.managed and plan.decode_params:
            params = plan.decode_params
        # A plain engine that reads nothing is not asked to hold: vLLM's worker half forgets
        # such a request, and its blocks would stay pinned for ever.
        body = self.request.decode_body(
            params, usage=self.asks_usage, token_ids=self.asks_token_ids
        )
        sent = Sent()
        try:
            answer = await parts.legs.decode(
                self.request,
                plan.decode,
                body,
                self.request_id,
                sent,
                trace=self.trace,
                started=self._read,
            )
        except ClientError:
            self.drop_handle()
            raise
        finally:
            if self._read is not None:
                self._read.end(parts.give_back, sent=sent.sent)
                self._read = None
        self.first_byte_s = parts.clock.monotonic() - self.begun
        parts.metrics.time_to_first_token.labels(plan.decision).observe(self.first_byte_s)
        return answer

    @property
    def _reports_decode(self) -> bool:
        plan = self.plan
        return (
            plan is not None
            and not self._alone
            and self.request.one_prompt
            and self.request.choices == 1
            and bool(plan.session_id)
            and (static := self.parts.plain.static(plan.decode)) is not None
            and static.bidirectional
        )

    async def _decode_again(self, failure: LegFailed) -> None:
        """Make another plan. Raises Failure when there is none."""
        self._note("decode", failure)
        alive = failure.kind in ("status", "lease")
        self._decodes_failed += 1
        if self._decodes_failed < self.parts.config.decode_tries:
            if failure.kind != "lease":
                self._exclude.add(failure.worker_id)
            try:
                self.plan = await self._new_plan(force=True)
                return
            except (NoWorker, Failure):
                # It may have failed over what it was to read: without, it may not.
                if alive and not self._alone:
                    self._alone = True
                    return
        if failure.kind in ("status", "broken"):
            raise upstream_failed("The workers that were tried could not answer.") from failure
        raise unavailable("No worker could be reached; try again.") from failure

    def drop_handle(self) -> None:
        """Have the prefill free what no decode will read."""
        plan, prefilled = self.plan, self.prefilled
        self.prefilled = None
        if plan is None or plan.prefill is None or not plan.prefill.managed:
            return
        if prefilled is not None and prefilled.params is not None:
            key = f"{self.request_id}:{self._attempts}"
            self.parts.give_back.handle(plan.prefill, prefilled.params, key)

    def abandon(self) -> None:
        """The client has left, or was told of a failure: leave nothing behind."""
        plan = self.plan
        if plan is not None:
            self._release(plan)
        self.drop_handle()
        if plan is not None and plan.session_id:
            for prefill in self._asked.values():
                self.parts.give_back.turn(prefill, plan.session_id, plan.turn)

    def _release(self, plan: Plan) -> None:
        """Release a lease under which no engine reads, whether or not one has heard of it."""
        if plan.lease is not None:
            self.parts.give_back.unless_begun(plan.lease)
            plan.lease = None

    def complete(
        self, outcome: session.TurnOutcome, reply: Reply | None = None
    ) -> asyncio.Task[None] | None:
        """Say how it went, once, in the background; None when there is nobody to tell."""
        plan = self.plan
        name = session.TurnOutcome.Name(outcome).removeprefix("TURN_OUTCOME_").lower()
        if self._completed:
            return None
        self._completed = True
        decision = plan.decision if plan is not None else "none"
        self.parts.metrics.requests.labels(self.request.path, decision, name).inc()
        usage = self._usage(reply)
        if outcome == session.TURN_OUTCOME_OK:
            reused = min(self.reused_tokens, usage.prompt_tokens)
            self.parts.metrics.tokens_reused.inc(reused)
            self.parts.metrics.tokens_recomputed.inc(usage.prompt_tokens - reused)
        if plan is None or not (plan.session_id or plan.over_quota):
            return None
        turn = session.CompleteTurnRequest(
            session_id=plan.session_id,
            turn=plan.turn,
            request_id="" if plan.session_id else self.request_id,
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            tokens_reused=min(self.reused_tokens, usage.prompt_tokens),
            prefill_worker_id=self.prefill_worker_id,
            decode_worker_id=plan.decode.worker_id,
            time_to_first_token=duration(self.first_byte_s),
        )
        if outcome == session.TURN_OUTCOME_OK and reply is not None and plan.session_id:
            turn.history_digest = self.request.with_reply(reply.message(), reply.text)
        return self.parts.background.start(self._complete(turn, reply), "complete")

    def _usage(self, reply: Reply | None) -> Usage:
        if reply is not None and reply.usage is not None:
            return reply.usage
        return self.prefilled.usage if self.prefilled is not None else Usage()

    async def _complete(self, turn: session.CompleteTurnRequest, reply: Reply | None) -> None:
        if turn.outcome == session.TURN_OUTCOME_OK and reply is not None:
            await self._report_decode(reply)
        try:
            async with asyncio.timeout(self.parts.config.complete_timeout_s):
                await self.parts.routing.Complete(routing.CompleteRequest(turn=turn))
        except (KvplaneError, TimeoutError, OSError) as error:
            log.warning("a turn was not completed", error=str(error), turn=turn.turn)

    async def _report_decode(self, reply: Reply) -> None:
        plan, params = self.plan, reply.kv_transfer_params
        if plan is None or params is None or not self._reports_decode:
            return
        tokens = [*(reply.prompt_token_ids or ()), *reply.token_ids]
        await self.parts.plain.report(
            plan.decode, plan, self.tenant_id, self.request, params, tokens, for_decode=False
        )

    def _note(self, leg: str, failure: LegFailed) -> None:
        cause = repr(failure.__cause__) if failure.__cause__ is not None else ""
        log.warning("a leg failed", leg=leg, kind=failure.kind, error=str(failure), cause=cause)
        self.parts.metrics.retries.labels(leg, failure.kind).inc()
