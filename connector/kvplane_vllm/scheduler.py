"""The scheduler half: leases around vLLM's reads, reports of what it holds, orders.

It never imports vLLM; it looks at requests and at NIXL's own scheduler half (`nixl`)
from outside and changes only the requests' kv_transfer_params and NIXL's queues:

- `_reqs_need_recv`: reads and notifications that go out with this step's metadata
- `_reqs_need_send`: deadlines of holds, for the worker half
- `_reqs_in_batch`: requests whose holds the worker half will accept

Order of the hooks for a request that reads: adopt, ask, matched (until it is answered),
after_alloc, before_meta, outputs; at its end before_finish and after_finish.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from kvplane.worker.agent import FreeNow, Held, HoldLonger, Pending, Permit, WorkerAgent
from kvplane.worker.cut import HANDLE_KEYS

from kvplane_vllm import compat
from kvplane_vllm.requests import (
    PRIVATE_KEYS,
    Leg,
    Stage,
    Turn,
    computed_tokens,
    handle_of,
    lease_of,
    proof_tokens,
    tag_of,
)

log = logging.getLogger("vllm.kvplane")

# A hold that ends sooner may have ended in the worker half already.
_SURELY_HELD_SECONDS: Final = 1.0
_LOAD_INTERVAL_SECONDS: Final = 0.5

_HANDLE: Final = (
    *HANDLE_KEYS, "remote_block_ids", "remote_num_tokens", "remote_blocks_expiry_time",
)  # fmt: skip


class LeaseScheduler:
    """One engine's turns. Used by the engine's scheduler thread only."""

    def __init__(
        self,
        nixl: Any,
        agent: WorkerAgent,
        *,
        cuttable: bool,
        tail_matters: bool,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`nixl` counts holds with `now`. `tail_matters`: see `_held`."""
        self._nixl, self._agent, self._now = nixl, agent, now
        self._cuttable, self._tail_matters = cuttable, tail_matters
        self.manager: Any = None
        self._turns: dict[str, Turn] = {}
        self._posting: dict[str, Turn] = {}
        self._reading: dict[str, Turn] = {}
        # Blocks of a read that was given up but may still be written to.
        self._quarantine: dict[str, list[Any]] = {}
        # Deadlines of what is held, on NIXL's clock.
        self._held: dict[str, float] = {}
        self._bidirectional = bool(nixl.is_bidirectional_kv_xfer_enabled)
        self._threshold = int(nixl.kv_recompute_threshold)
        self._load_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether the engine has to go on stepping although it has no request."""
        return bool(self._quarantine)

    def knows(self, request: Any) -> bool:
        """Return whether it is a turn of ours."""
        return request.request_id in self._turns

    # -- a request comes ----------------------------------------------------------

    def adopt(self, request: Any) -> None:
        """Take a request in, before the engine looks at its parameters.

        Without our key in them it is nobody's: nothing is read and nothing is held for
        it. Children of one client request (n > 1) share the object, so it is copied.
        """
        params = request.kv_transfer_params
        if not params:
            return
        tag = tag_of(params)
        if tag is None or not self._provable(request):
            request.kv_transfer_params = None
            log.debug("kvplane: %s is computed: not from kvplane", request.request_id)
            return
        params = {k: v for k, v in params.items() if k not in PRIVATE_KEYS}
        leg = Leg.WHOLE
        if params.get("do_remote_decode"):
            leg = Leg.PREFILL
            # What to read comes from the lease service alone.
            params = {k: v for k, v in params.items() if k not in _HANDLE}
            params["do_remote_prefill"] = False
        elif params.get("do_remote_prefill"):
            leg = Leg.DECODE
        request.kv_transfer_params = params
        self._turns[request.request_id] = Turn(
            request=request,
            leg=leg,
            tenant_id=tag["tenant"],
            session_id=tag["session"],
            turn=tag["turn"],
        )

    def ask(self, request: Any) -> None:
        """Begin the read, if there is one. Comes after the engine cut its prompt."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return
        params = request.kv_transfer_params
        lease = lease_of(params["kvplane"])
        handle = handle_of(params)
        if turn.leg is Leg.PREFILL and lease and self._bidirectional:
            question: dict[str, Any] = {"lease": lease, "min_tokens": max(self._threshold, 1)}
        elif turn.leg is Leg.DECODE and handle:
            # The gateway has compared it with what the owner registered.
            address = (params.get("remote_host"), params.get("remote_port"))
            question = {"handle": handle, "address": address}
        else:
            self._compute(turn)
            return
        if self.manager is None or getattr(request, "skip_reading_prefix_cache", False):
            self._compute(turn)
            return
        turn.stage = Stage.ASKED
        self._agent.begin_read(
            request.request_id,
            proof_tokens(request, request.prompt_token_ids),
            tenant_id=turn.tenant_id,
            salt=request.cache_salt or "",
            adapter=_adapter(request),
            **question,
        )

    def _provable(self, request: Any) -> bool:
        return (
            request.prompt_token_ids is not None
            and getattr(request, "prompt_embeds", None) is None
            and not getattr(request, "resumable", False)
        )

    def _compute(self, turn: Turn) -> None:
        """Nothing is read for it, and nobody is notified."""
        request = turn.request
        turn.stage = Stage.NONE
        self._posting.pop(request.request_id, None)
        self._nixl._reqs_need_recv.pop(request.request_id, None)
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True
        for key in _HANDLE:
            params.pop(key, None)
        compat.stop_heartbeat(self._nixl, request.request_id)

    # -- it is scheduled ----------------------------------------------------------

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Answer get_num_new_matched_tokens.

        A read that was done or failed is never offered again: vLLM would wait for it
        for ever.
        """
        turn = self._turns[request.request_id]
        if turn.stage is not Stage.ASKED:
            return 0, False
        answer = self._agent.poll_read(request.request_id)
        if isinstance(answer, Pending):
            return None, False
        if not isinstance(answer, Permit) or answer.num_tokens > request.num_prompt_tokens:
            reason = "longer than the prompt" if isinstance(answer, Permit) else answer.reason
            log.info("kvplane: %s is computed: %s", request.request_id, reason)
            self._compute(turn)
            self._agent.abandon(request.request_id)
            return 0, False
        params = request.kv_transfer_params
        params.pop("remote_blocks_expiry_time", None)
        params.update(answer.params)
        count = answer.num_tokens - num_computed
        if count < (self._threshold if turn.leg is Leg.PREFILL else 1) or count < 1:
            # The engine has (nearly) all of it: nothing is read, the owner is notified.
            turn.promised = 0
            return 0, False
        turn.promised = count
        return count, True

    def after_alloc(self, request: Any, external: int) -> None:
        """The scheduler has decided; NIXL's half has queued the read or notification."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return
        if self._bidirectional:
            # Or the worker half would never end the hold of a turn that read nothing.
            self._nixl._reqs_in_batch.add(request.request_id)
        if turn.stage is not Stage.ASKED:
            return
        turn.external = external
        turn.stage = Stage.POSTING
        self._posting[request.request_id] = turn

    def before_meta(self) -> list[Callable[[], None]]:
        """Return what to do right before this step's reads and deadlines go out.

        One after the other, each whether or not those before it failed.
        """
        return [self._start_reads, self._drop_unleased, self._watch, self._obey, self._tell_load]

    def _start_reads(self) -> None:
        while self._posting:
            self._post(*self._posting.popitem())

    def _drop_unleased(self) -> None:
        """Nothing is ever sent without a lease."""
        queue = self._nixl._reqs_need_recv
        for request_id, entry in list(queue.items()):
            if request_id not in self._reading:
                log.error("kvplane: a read of %s has no lease, dropped", request_id)
                del queue[request_id]
                self._take_back(entry[0])

    def _post(self, request_id: str, turn: Turn) -> None:
        queued = request_id in self._nixl._reqs_need_recv
        expected = turn.external in (0, turn.promised)
        if queued and expected and self._agent.read_started(request_id):
            turn.stage = Stage.READING
            self._reading[request_id] = turn
            return
        self._compute(turn)
        if turn.external:
            log.warning("kvplane: %s is computed: its lease ended too soon", request_id)
            self._take_back(turn.request)
        self._agent.abandon(request_id)

    def _watch(self) -> None:
        for request_id, turn in list(self._reading.items()):
            if not turn.external:
                # A notification. It is on its way, and nothing comes back.
                self._end_read(request_id, turn, failed=False)
            elif not self._agent.still_valid(request_id) and not compat.is_finished(turn.request):
                log.warning("kvplane: %s is computed: its lease ended during the read", request_id)
                self._end_read(request_id, turn, failed=True)
                self._quarantine[request_id] = compat.take_back(turn.request, self.manager)

    def _take_back(self, request: Any) -> None:
        compat.free_blocks(compat.take_back(request, self.manager), self.manager)

    def _end_read(self, request_id: str, turn: Turn, *, failed: bool) -> None:
        self._reading.pop(request_id, None)
        turn.stage = Stage.NONE
        self._agent.read_finished(request_id, sent=True, failed=failed)

    # -- the worker half reports --------------------------------------------------

    def outputs(self, output: Any) -> None:
        """Before the scheduler acts on finished reads and finished holds."""
        if output.finished_recving:
            failed = compat.failed_reads(output, self.manager)
            for request_id in list(output.finished_recving):
                if self._read_is_over(request_id, failed=request_id in failed):
                    output.finished_recving.discard(request_id)
        freed = [ident for ident in output.finished_sending or () if self._held.pop(ident, None)]
        if freed:
            self._agent.report_freed(freed)

    def _read_is_over(self, request_id: str, *, failed: bool) -> bool:
        """Return whether the scheduler must not hear of it."""
        blocks = self._quarantine.pop(request_id, None)
        if blocks is not None:
            compat.free_blocks(blocks, self.manager)
            return True
        turn = self._reading.get(request_id)
        if turn is None:
            return False
        usable = self._agent.still_valid(request_id)
        self._end_read(request_id, turn, failed=failed)
        if usable or failed or compat.is_finished(turn.request):
            return False
        log.warning("kvplane: %s is computed: its lease ended during the read", request_id)
        self._take_back(turn.request)
        return True

    # -- it ends ------------------------------------------------------------------

    def before_finish(self, request: Any) -> None:
        """Before NIXL's half looks at it: without a lease nobody is notified."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            request.kv_transfer_params = None
        elif turn.stage in (Stage.ASKED, Stage.POSTING):
            self._compute(turn)
            self._agent.abandon(request.request_id)

    def after_finish(self, request: Any, pinned: bool, params: dict[str, Any] | None) -> None:
        """NIXL's half has pinned its blocks, or not."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return
        until = self._nixl._reqs_need_send.get(request.request_id)
        held = None
        if pinned and params and until is not None:
            self._held[request.request_id] = until
            held = self._describe(turn, params, until - self._now())
        if held is None:
            self._agent.abandon(request.request_id)
        else:
            self._agent.report_held(held)
        if not self._turns:
            self._set_load()  # an engine without requests may not step again

    def _describe(self, turn: Turn, params: dict[str, Any], hold: float) -> Held | None:
        """Return the report, None for what no reader could use.

        Blocks that cannot be cut are read whole, so they have to end at the last token
        that surely has KV; for a recurrent state at exactly that token.
        """
        request = turn.request
        tokens = computed_tokens(request)
        counted = params.get("remote_num_tokens")
        if tokens < 1 or not isinstance(counted, int) or counted < tokens:
            return None
        size = self._nixl.block_size
        moved = -(-counted // size) != -(-tokens // size) or self._tail_matters
        if counted != tokens and not self._cuttable and moved:
            return None
        return Held(
            request_id=request.request_id,
            params={**params, "remote_num_tokens": tokens},
            tokens=proof_tokens(request, request._all_token_ids),
            num_tokens=tokens,
            hold_seconds=hold,
            cuttable=self._cuttable,
            tenant_id=turn.tenant_id,
            session_id=turn.session_id,
            turn=turn.turn,
            for_decode=turn.leg is Leg.PREFILL,
            salt=request.cache_salt or "",
            adapter=_adapter(request),
        )

    # -- orders and load ----------------------------------------------------------

    def _obey(self) -> None:
        for order in self._agent.take_orders():
            self._carry_out(order)

    def _carry_out(self, order: HoldLonger | FreeNow) -> None:
        """Move a hold's end, of a request that is surely pinned, through NIXL's half."""
        until = self._held.get(order.request_id)
        now = self._now()
        if until is None or (isinstance(order, HoldLonger) and until - now < _SURELY_HELD_SECONDS):
            self._agent.order_done(order, done=False)
            return
        if isinstance(order, FreeNow):
            until = now
        else:
            margin = self._agent.config.hold_margin_seconds
            until = max(until, now + order.seconds + margin)
        self._held[order.request_id] = self._nixl._reqs_need_send[order.request_id] = until
        self._agent.order_done(order, done=True, hold_seconds=until - now)

    def _tell_load(self) -> None:
        if self._now() - self._load_at >= _LOAD_INTERVAL_SECONDS:
            self._set_load()

    def _set_load(self) -> None:
        self._load_at = self._now()
        waiting = sum(turn.stage is Stage.ASKED for turn in self._turns.values())
        self._agent.set_load(
            running=len(self._turns) - waiting,
            waiting=waiting,
            kv_usage=compat.kv_usage(self.manager),
        )

    def fail_closed(self, request: Any) -> None:
        """An error of ours: this request is computed."""
        turn = self._turns.get(request.request_id)
        if turn is not None:
            self._compute(turn)
            self._agent.abandon(request.request_id)
        else:
            request.kv_transfer_params = None


def _adapter(request: Any) -> str:
    lora = getattr(request, "lora_request", None)
    return str(lora.lora_name) if lora is not None else ""
