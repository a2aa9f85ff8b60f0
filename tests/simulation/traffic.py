"""Users and their gateway: route, prefill, decode, complete; edits, branches, retries, leaving."""

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import kv_params
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import KvplaneError

from simulation.fabric import Request
from simulation.loop import Process, SimClock
from simulation.scenario import Conversation, Op

if TYPE_CHECKING:
    from simulation.world import World

_LEG_TIMEOUT_S = 12.0
# Of a user who repeats a request: how it is repeated, and how soon.
_PATIENT, _GIVES_UP, _IMPATIENT_S = 0.3, 0.6, 1.0
_SYSTEM = [9, 8, 7, 6, 5, 4, 3, 2]  # all conversations begin alike


class LegFailed(Exception):
    """An engine did not do its part; `sent`: it may have heard of the request."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Talk:
    """One conversation; its gateway is a process of its own."""

    def __init__(self, world: "World", index: int, plan: Conversation) -> None:
        self._world, self._plan, self._index = world, plan, index
        self._rng = random.Random(f"talk {world.scenario.seed} {index}")
        self.process = Process(f"gateway{index}")
        self._history: list[int] = list(_SYSTEM)
        self._marks: list[int] = [len(_SYSTEM)]
        self._requests = 0
        self._last_request = ""
        self._handle: dict[str, Any] | None = None  # plain: what the last decode returned
        self._decode = -1
        self.session_id = ""
        self.task: asyncio.Task[None] | None = None
        if not world.plain:
            net, clock = world.network, SimClock(world.loop, 0.0)
            self._routing = net.client(self.process, clock, routing, "RoutingService", 3.0)
            self._leases = net.client(self.process, clock, lease, "LeaseService", 3.0)
            self._sessions = net.client(self.process, clock, session, "SessionService", 3.0)

    async def run(self) -> None:
        """Do all that is planned."""
        set_caller(Caller(tenant_id=self._plan.tenant))
        for op in self._plan.ops:
            await asyncio.sleep(op.pause)
            await self._do(op)

    async def _do(self, op: Op) -> None:
        match op.kind:
            case "edit":
                self._go_back(op, replace=True)
                await self._turn(op, self._say(op.said))
            case "branch":
                self._go_back(op, replace=False)
                await self._turn(op, self._say(op.said))
            case "double":
                one = [*self._history, *self._tokens(op.said)]
                two = [*self._history, *self._tokens(op.said)]
                await asyncio.gather(self._turn(op, one), self._turn(op, two))
            case "leave":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(op.draw * 1.0):
                        await self._turn(op, self._say(op.said))
            case "retry":
                await self._repeat(op)
            case "end":
                await self._end()
            case "extend":
                await self._extend(op)
                await self._turn(op, self._say(op.said))
            case _:
                await self._turn(op, self._say(op.said))

    async def _repeat(self, op: Op) -> None:
        """Ask twice for the same: after its answer, beside it, or after giving it up."""
        said = self._say(op.said)
        first = asyncio.get_running_loop().create_task(self._turn(op, said))
        if op.draw < _PATIENT:
            await first
        else:
            await asyncio.sleep(self._rng.random() * _IMPATIENT_S)
            if op.draw > _GIVES_UP:
                first.cancel()
        await self._turn(op, said, again=True)
        with contextlib.suppress(asyncio.CancelledError):
            await first

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randint(1, 50) for _ in range(count)]

    def _say(self, count: int) -> list[int]:
        return [*self._history, *self._tokens(count)]

    def _go_back(self, op: Op, *, replace: bool) -> None:
        mark = self._marks[int(op.draw * len(self._marks))]
        self._history = self._history[: mark - (1 if replace else 0)]
        self._marks = [m for m in self._marks if m <= len(self._history)] or [len(self._history)]

    async def _turn(self, op: Op, tokens: list[int], *, again: bool = False) -> None:
        if len(tokens) > 72:
            tokens = tokens[-40:]  # the window slides: an edit of everything
        if not again:
            self._requests += 1
        request_id = f"r{self._index}.{self._requests}"
        try:
            if self._world.plain:
                answer = await self._plain_turn(request_id, tokens, op)
            else:
                answer = await self._managed_turn(request_id, tokens, op)
        except (KvplaneError, LegFailed) as error:
            self._world.checker.event("turn failed", request_id, error)
            return
        self._world.turns += 1
        self._history = [*tokens, *answer["reply"]]
        self._marks.append(len(self._history))

    # -- with kvplane -------------------------------------------------------------

    async def _managed_turn(self, request_id: str, tokens: list[int], op: Op) -> dict[str, Any]:
        ask = routing.RouteRequest(
            request_id=request_id, session=session.SessionKey(name=self._plan.name), model="m"
        )
        route = await self._routing.Route(ask)
        if self._rng.random() < 0.05:  # a gateway that restarts asks again
            route = await self._routing.Route(ask)
        self.session_id = route.session_id or self.session_id
        outcome = session.TURN_OUTCOME_FAILED
        used_prefill = ""
        read = 0
        try:
            handle: dict[str, Any] = {}
            if route.HasField("prefill"):
                params = kv_params.to_dict(route.prefill_params)
                try:
                    answer = await self._leg(
                        route.prefill.worker_id, f"{request_id}-p", tokens, params, 0
                    )
                    handle = answer["kv_transfer_params"]
                    used_prefill, read = route.prefill.worker_id, answer["read"]
                except LegFailed:
                    # The worker may have begun, or the same request sent once more.
                    if route.HasField("lease"):
                        await self._give_back(route.lease)
            params = {**handle, **kv_params.to_dict(route.decode_params)}
            answer = await self._leg(
                route.decode.worker_id, f"{request_id}-d", tokens, params, op.answer
            )
            outcome = session.TURN_OUTCOME_OK
            return answer
        except asyncio.CancelledError:
            outcome = session.TURN_OUTCOME_CANCELLED
            raise
        finally:
            if route.session_id:
                self._complete_later(route, outcome, used_prefill, read, len(tokens))

    def _complete_later(
        self, route: Any, outcome: Any, prefill: str, read: int, prompt: int
    ) -> None:
        turn = session.CompleteTurnRequest(
            session_id=route.session_id,
            turn=route.turn,
            outcome=outcome,
            prompt_tokens=prompt,
            tokens_reused=read,
            prefill_worker_id=prefill,
            decode_worker_id=route.decode.worker_id,
        )

        async def complete() -> None:
            with contextlib.suppress(KvplaneError):
                await self._routing.Complete(routing.CompleteRequest(turn=turn))

        asyncio.get_running_loop().create_task(complete())

    async def _give_back(self, given: lease.Lease) -> None:
        with contextlib.suppress(KvplaneError):
            await self._leases.ReleaseLeases(
                lease.ReleaseLeasesRequest(
                    holder=given.holder,
                    releases=[
                        lease.LeaseRelease(
                            lease_id=given.lease_id,
                            fencing_token=given.fencing_token,
                            outcome=lease.READ_OUTCOME_NEVER_BEGUN,
                        )
                    ],
                )
            )

    async def _end(self) -> None:
        self._handle = None
        if self._world.plain:
            return
        with contextlib.suppress(KvplaneError):
            await self._sessions.EndSession(session.EndSessionRequest(name=self._plan.name))

    async def _extend(self, op: Op) -> None:
        if self._world.plain or not self.session_id:
            return
        hold = Duration(seconds=round(6 + op.draw * 20))
        with contextlib.suppress(KvplaneError):
            await self._leases.ExtendHold(
                lease.ExtendHoldRequest(session_id=self.session_id, hold=hold)
            )
        await asyncio.sleep(op.draw * 12.0)

    # -- without ------------------------------------------------------------------

    async def _plain_turn(self, request_id: str, tokens: list[int], op: Op) -> dict[str, Any]:
        """Do what today's proxies do: pass the last handle on."""
        prefills, decodes = [], []
        for index, worker in enumerate(self._world.workers):
            if worker.up and worker.kind == "k":
                if worker.role != "decode":
                    prefills.append(index)
                if worker.role != "prefill":
                    decodes.append(index)
        if not decodes:
            raise LegFailed("nobody there", sent=False)
        if self._decode not in decodes:
            self._decode = self._rng.choice(decodes)
        prefills = [index for index in prefills if index != self._decode]
        handle: dict[str, Any] = {}
        if prefills:
            params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
            if self._handle:
                params["plain"] = self._handle
            params["kvplane"] = {"tenant": self._plan.tenant}
            chosen = f"w{self._rng.choice(prefills)}"
            with contextlib.suppress(LegFailed):
                answer = await self._leg(chosen, f"{request_id}-p", tokens, params, 0)
                handle = answer["kv_transfer_params"]
        params = {**handle, "kvplane": {"tenant": self._plan.tenant}}
        answer = await self._leg(f"w{self._decode}", f"{request_id}-d", tokens, params, op.answer)
        self._handle = answer["kv_transfer_params"]
        return answer

    # -- an engine's HTTP ---------------------------------------------------------

    async def _leg(
        self, worker_id: str, ident: str, tokens: list[int], params: dict[str, Any], answer: int
    ) -> dict[str, Any]:
        """Send a request to an engine; it is aborted when nobody waits for it any more."""
        world, loop = self._world, self._world.loop
        await asyncio.sleep(world.network.latency())
        worker = next(w for w in world.workers if w.worker_id == worker_id)
        engine = worker.engine
        if not worker.up or engine is None:
            raise LegFailed("connection refused", sent=False)
        # Engines name their requests anew, whatever the client calls them.
        world.requests += 1
        request = Request(
            f"{ident}.{world.requests}", list(tokens), params, answer, self._plan.salt,
            loop.create_future(),
        )  # fmt: skip
        loop.post(engine.process, engine.submit, request)
        try:
            async with asyncio.timeout(_LEG_TIMEOUT_S):
                result = await request.answer
        except (ConnectionResetError, TimeoutError) as error:
            loop.post(engine.process, engine.abort, request)
            raise LegFailed(f"{worker_id}: {error!r}", sent=True) from error
        except asyncio.CancelledError:
            loop.post(engine.process, engine.abort, request)
            raise
        await asyncio.sleep(world.network.latency())
        # What travels is JSON.
        return {**result, "kv_transfer_params": dict(result["kv_transfer_params"])}
