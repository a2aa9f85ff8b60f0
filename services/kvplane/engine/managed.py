"""Reads and holds under leases: the connector's own agent decides, the engine obeys."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvplane.engine.faults import Faults
from kvplane.engine.pool import Pins
from kvplane.engine.reuse import Grant, Holding, Params
from kvplane.engine.stats import Stats
from kvplane.kernel.clock import Clock
from kvplane.worker.agent import HoldLonger, Pending, Permit, WorkerAgent
from kvplane.worker.holdings import Held

_log = logging.getLogger("kvplane.engine")
_ASK_AGAIN_S = 0.002


class Managed:
    """The engine's seam to a WorkerAgent.

    A request without our key in its kv_transfer_params is not ours: it reads nothing and
    is not reported.
    """

    managed = True

    def __init__(self, agent: WorkerAgent, clock: Clock) -> None:
        self._agent = agent
        self._clock = clock

    async def permit(
        self, request_id: str, prompt: Sequence[int], params: Params, min_tokens: int, salt: str
    ) -> Grant | None:
        """Ask the agent; it answers within its bounds."""
        key = _key(params)
        if key is None:
            return None
        lease: tuple[str, int] | None = None
        handle: tuple[str, str] | None = None
        address: tuple[Any, Any] = (None, None)
        if params.get("do_remote_prefill"):
            engine, remote = params.get("remote_engine_id"), params.get("remote_request_id")
            if not engine or not remote:
                return None
            handle = (str(engine), str(remote))
            address = (params.get("remote_host"), params.get("remote_port"))
        else:
            if not key.get("lease_id"):
                return None
            lease = (str(key["lease_id"]), int(key.get("fencing_token") or 0))
        self._agent.begin_read(
            request_id,
            prompt,
            lease=lease,
            handle=handle,
            address=address,
            min_tokens=min_tokens,
            tenant_id=str(key.get("tenant") or ""),
            salt=salt,
        )
        while isinstance(answer := self._agent.poll_read(request_id), Pending):
            await self._clock.sleep(_ASK_AGAIN_S)
        if isinstance(answer, Permit):
            return Grant(answer.params, answer.num_tokens)
        _log.info("%s is computed: %s", request_id, answer.reason)
        self._agent.read_finished(request_id, sent=False)
        return None

    def started(self, request_id: str) -> bool:
        """Take the permit; False when it has run out."""
        return self._agent.read_started(request_id)

    def still_valid(self, request_id: str) -> bool:
        """Return whether the lease lives."""
        return self._agent.still_valid(request_id)

    def finished(self, request_id: str, *, sent: bool, failed: bool = False) -> None:
        """Give the lease back."""
        self._agent.read_finished(request_id, sent=sent, failed=failed)

    def ended(self, request_id: str) -> None:
        """Forget a request that holds nothing."""
        self._agent.abandon(request_id)

    def held(self, holding: Holding) -> None:
        """Report what is held, under the session that the gateway named."""
        key = _key(holding.asked)
        if key is None:
            self._agent.abandon(holding.request_id)
            return
        self._agent.report_held(
            Held(
                request_id=holding.request_id,
                params=holding.returned,
                tokens=holding.tokens,
                num_tokens=holding.num_tokens,
                hold_seconds=holding.hold_s,
                cuttable=True,
                tenant_id=str(key.get("tenant") or ""),
                session_id=str(key.get("session") or ""),
                turn=int(key.get("turn") or 0),
                for_decode=bool(holding.asked.get("do_remote_decode")),
                salt=holding.salt,
            )
        )

    def freed(self, request_ids: Iterable[str]) -> None:
        """Report what is held no more."""
        self._agent.report_freed(request_ids)

    def carry_out_orders(self, pins: Pins, now: float, faults: Faults, stats: Stats) -> None:
        """Hold longer, or free now."""
        for order in self._agent.take_orders():
            if isinstance(order, HoldLonger):
                longer = 0.0 if faults.take("keep_holds") else order.seconds
                left = pins.extend(order.request_id, now + longer)
                stats.held_longer += left is not None and longer > 0
                self._agent.order_done(
                    order, done=left is not None, hold_seconds=(left or now) - now
                )
            else:
                done = pins.free(order.request_id)
                stats.freed_by_order += done and bool(order.command_id)
                self._agent.order_done(order, done=done)
                self._agent.report_freed([order.request_id])

    def load(self, running: int, waiting: int, usage: float) -> None:
        """Pass it on, for the next heartbeat."""
        self._agent.set_load(running=running, waiting=waiting, kv_usage=usage)


def _key(params: Params) -> Mapping[str, Any] | None:
    key = params.get("kvplane")
    return key if isinstance(key, Mapping) else None
