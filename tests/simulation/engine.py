"""A model engine: a finite pool whose blocks say what they hold, and reads that take time.

It calls the agent as the connector's scheduler half does (connector/kvplane_vllm/
scheduler.py): ask, poll at each step, start right before the read goes out, look at the
lease when it has come, obey orders, report what is pinned and what is freed.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from kvplane.worker.agent import Held, HoldLonger, Pending, Permit

from simulation.checker import Checker
from simulation.fabric import BLOCK, Contents, Fabric, Request, Transfer
from simulation.loop import Process, SimClock, VirtualLoop

_SURELY_HELD_S = 1.0


@dataclass
class Pin:
    """Blocks held after a request."""

    blocks: list[int]
    until: float
    tenant: str
    session: str
    tokens: list[int]


class Engine:
    """One engine process."""

    def __init__(
        self,
        loop: VirtualLoop,
        clock: SimClock,
        process: Process,
        agent: Any,
        checker: Checker,
        contents: Contents,
        rng: random.Random,
        fabric: "Fabric",
        *,
        engine_id: str,
        address: str,
        kind: str,
        num_blocks: int,
        hold_s: float,
        block_read_s: float,
    ) -> None:
        self.loop, self.clock, self.process, self.agent = loop, clock, process, agent
        self._checker, self._contents, self._rng, self._fabric = checker, contents, rng, fabric
        self.engine_id, self.address, self.kind = engine_id, address, kind
        self.num_blocks, self.hold_s, self._block_read_s = num_blocks, hold_s, block_read_s
        self.memory = [0] * num_blocks
        self._free = list(range(num_blocks))
        self.pins: dict[str, Pin] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.transfers: dict[str, Transfer] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._arrived: list[Transfer] = []
        self._notified: list[str] = []
        # Of these the notification got lost: they are pinned until their hold ends.
        self.unnotified: set[str] = set()
        self._kick = asyncio.Event()
        self.up = True

    # -- from outside -------------------------------------------------------------

    async def run(self) -> None:
        """Step for ever."""
        while True:
            self._step()
            busy = self.waiting or self.running or self._arrived or self._notified
            if busy:
                await asyncio.sleep(0.02 + self._rng.random() * 0.05)
                continue
            self._kick.clear()
            # What is held must be looked at; without anything held only late orders may come.
            timer = self.loop.call_later(0.3 if self.pins else 1.0, self._kick.set)
            await self._kick.wait()
            timer.cancel()

    def submit(self, request: Request) -> None:
        """Take a request in and ask for its read."""
        params = request.params
        if params.get("do_remote_decode"):
            request.leg = "prefill"
        elif params.get("do_remote_prefill"):
            request.leg = "decode"
        tag = request.tag
        question: dict[str, Any] | None = None
        if request.leg == "prefill" and tag.get("lease_id"):
            lease = (tag["lease_id"], int(tag["fencing_token"]))
            question = {"lease": lease, "min_tokens": BLOCK}
        elif request.leg == "decode":
            handle = (params["remote_engine_id"], params["remote_request_id"])
            question = {"handle": handle}
        elif params.get("plain"):
            question = {"plain": params["plain"]}
        if self.agent.plain and request.leg != "whole":
            source = params.get("plain") or (params if request.leg == "decode" else None)
            question = {"plain": source} if source else None
        if question is not None:
            request.stage = "asked"
            self.agent.begin_read(
                request.ident,
                request.tokens,
                tenant_id=tag.get("tenant", ""),
                salt=request.salt,
                **question,
            )
        self.waiting.append(request)
        self._kick.set()

    def abort(self, request: Request) -> None:
        """The client has gone."""
        if request.finished:
            return
        request.finished = True
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request.stage != "reading":
            self._release(request.blocks, f"abort {request.ident}")
            request.blocks = []
        self.agent.abandon(request.ident)
        if not request.answer.done():
            request.answer.set_exception(ConnectionResetError("aborted"))

    @property
    def idle_blocks(self) -> int:
        """How many are free."""
        return len(self._free)

    # -- a step -------------------------------------------------------------------

    def _step(self) -> None:
        for request in list(self.waiting):
            self._schedule(request)
        self._watch_reads()
        self._obey()
        self._outputs()
        now = self.clock.monotonic()
        for request in list(self.running):
            if request.ready_at is not None and request.ready_at <= now:
                self.running.remove(request)
                self._finish(request)

    def _schedule(self, request: Request) -> None:
        agent = self.agent
        permit: Permit | None = None
        if request.stage == "asked":
            answer = agent.poll_read(request.ident)
            if isinstance(answer, Pending):
                return
            if isinstance(answer, Permit) and answer.num_tokens <= len(request.tokens):
                permit = answer
            else:
                request.stage = "none"
                agent.abandon(request.ident)
        total = len(request.tokens) + request.max_tokens
        if not self._allocate(request, -(-total // BLOCK)):
            return
        self.waiting.remove(request)
        self.running.append(request)
        if permit is None:
            self._compute(request, 0)
            return
        if not agent.read_started(request.ident):
            request.stage = "none"
            agent.abandon(request.ident)
            self._compute(request, 0)
            return
        self._checker.event("read", request.ident, permit.params["remote_request_id"])
        if self._rng.random() < 0.03:
            # All of it is in the engine's own cache: the owner is only notified.
            owner = (permit.params["remote_engine_id"], permit.params["remote_request_id"])
            self._checker.notified(self, request.ident, owner)
            self._fabric.notify(self, permit.params)
            request.stage = "none"
            agent.read_finished(request.ident, sent=True)
            self._compute(request, 0)
            return
        self._read(request, permit)

    def _read(self, request: Request, permit: Permit) -> None:
        request.stage = "reading"
        expected = self._contents.of((self.kind, request.salt), request.tokens[: permit.num_tokens])
        # As vLLM does, from the end: a list longer than the count reads other blocks.
        ids = list(permit.params["remote_block_ids"][0])[-len(expected) :]
        transfer = Transfer(
            request,
            (permit.params["remote_engine_id"], permit.params["remote_request_id"]),
            expected,
            local=request.blocks[: len(ids)],
            tenant=request.tag.get("tenant", ""),
        )
        request.read_tokens = permit.num_tokens
        self.transfers[request.ident] = transfer
        self._checker.read_started(self, transfer)
        self._fabric.start(self, transfer, permit.params, ids, self._block_read_s)

    def _watch_reads(self) -> None:
        for transfer in list(self.transfers.values()):
            request = transfer.request
            if transfer.done or request.stage != "reading":
                continue
            if not request.finished and not self.agent.still_valid(request.ident):
                self._checker.event("lost", request.ident)
                self.agent.read_finished(request.ident, sent=True, failed=True)
                request.stage = "none"
                self._quarantine[request.ident] = request.blocks
                request.blocks = []
                self.running.remove(request)
                self.waiting.append(request)

    def _obey(self) -> None:
        now = self.clock.monotonic()
        for order in self.agent.take_orders():
            pin = self.pins.get(order.request_id)
            longer = isinstance(order, HoldLonger)
            if pin is None or (longer and pin.until - now < _SURELY_HELD_S):
                self.agent.order_done(order, done=False)
                continue
            if longer:
                margin = self.agent.config.hold_margin_seconds
                pin.until = max(pin.until, now + order.seconds + margin)
            else:
                pin.until = now
            self._checker.event("order", order.request_id, "longer" if longer else "free")
            self.agent.order_done(order, done=True, hold_seconds=pin.until - now)

    def _outputs(self) -> None:
        arrived, self._arrived = self._arrived, []
        for transfer in arrived:
            self._arrive(transfer)
        now = self.clock.monotonic()
        notified, self._notified = self._notified, []
        freed = [ident for ident in notified if ident in self.pins]
        over = [i for i, pin in self.pins.items() if pin.until <= now and i not in freed]
        for ident in over:
            self._checker.pin_ends(self, ident)
        for ident in freed + over:
            pin = self.pins.pop(ident)
            self._release(pin.blocks, f"unpin {ident}")
        if freed or over:
            self.agent.report_freed(freed + over)

    def _arrive(self, transfer: Transfer) -> None:
        request = transfer.request
        transfer.done = True
        self.transfers.pop(request.ident, None)
        blocks = self._quarantine.pop(request.ident, None)
        if blocks is not None:
            self._checker.read_dropped(self, transfer)
            self._release(blocks, "quarantine")
            return
        usable = self.agent.still_valid(request.ident)
        self.agent.read_finished(request.ident, sent=True, failed=transfer.failed)
        request.stage = "none"
        if request.finished:
            self._checker.read_dropped(self, transfer)
            self._release(request.blocks, f"aborted read {request.ident}")
            request.blocks = []
            return
        if transfer.failed or not usable:
            self._checker.read_dropped(self, transfer)
            self._compute(request, 0)
            return
        self._checker.read_used(self, transfer)
        self._compute(request, request.read_tokens)

    def _compute(self, request: Request, have: int) -> None:
        """Compute the rest, then the answer's tokens."""
        contents = self._contents.of((self.kind, request.salt), request.tokens)
        for index in range(have // BLOCK, len(contents)):  # a partial block is completed in place
            self.memory[request.blocks[index]] = contents[index]
        work = (len(request.tokens) - have) * 0.002 + request.max_tokens * 0.02
        request.ready_at = self.clock.monotonic() + work * (0.5 + self._rng.random())

    def _finish(self, request: Request) -> None:
        request.finished = True
        seed = self.memory[request.blocks[0]] * 31 + len(request.tokens)
        reply = [(seed + 7 * i) % 50 + 1 for i in range(request.max_tokens)]
        everything = request.tokens + reply
        computed = len(everything) - 1 if request.leg != "prefill" else len(request.tokens)
        contents = self._contents.of((self.kind, request.salt), everything[:computed])
        keep = len(contents)
        for index in range(len(request.tokens) // BLOCK, keep):
            self.memory[request.blocks[index]] = contents[index]
        kept, rest = request.blocks[:keep], request.blocks[keep:]
        self._release(rest, f"tail of {request.ident}")
        answer: dict[str, Any] = {"reply": reply, "read": request.read_tokens}
        until = self.clock.monotonic() + self.hold_s
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.ident,
            "remote_host": self.address,
            "remote_port": 5600,
            "remote_block_ids": [list(kept)],
            "remote_num_tokens": computed,
            "tp_size": 1,
        }
        tag = request.tag
        tenant, session = tag.get("tenant", ""), tag.get("session", "")
        self.pins[request.ident] = Pin(kept, until, tenant, session, everything[:computed])
        self._checker.pinned(self, request.ident)
        self.agent.report_held(
            Held(
                request_id=request.ident,
                params=params,
                tokens=everything,
                num_tokens=computed,
                hold_seconds=self.hold_s,
                cuttable=True,
                tenant_id=tenant,
                session_id=session,
                turn=tag.get("turn", 0),
                for_decode=request.leg == "prefill",
                salt=request.salt,
            )
        )
        answer["kv_transfer_params"] = params
        if not request.answer.done():
            request.answer.set_result(answer)

    # -- blocks -------------------------------------------------------------------

    def _allocate(self, request: Request, count: int) -> bool:
        if request.blocks:
            return True
        if len(self._free) < count:
            return False
        request.blocks = [self._free.pop() for _ in range(count)]
        return True

    def _release(self, blocks: list[int], why: str) -> None:
        self._checker.freed(self, blocks, why)
        self._free.extend(reversed(blocks))

    # -- the fabric's side --------------------------------------------------------

    def arrived(self, transfer: Transfer) -> None:
        """A transfer of ours has ended."""
        self._arrived.append(transfer)
        self._kick.set()

    def notified(self, request_id: str) -> None:
        """Somebody has read this."""
        self._notified.append(request_id)
        self._kick.set()
