"""WorkerAgent: everything an engine needs of the control plane, without an engine.

An engine's scheduler calls it from its own thread. No call blocks, waits for the
network or raises: an engine that cannot reach the control plane computes. One
background thread does the rest.

The reader's side, for each request that may read another worker's KV::

    agent.begin_read(id, tokens, lease=("lease-1", 7))      # prefill: the router's lease
    agent.begin_read(id, tokens, handle=(engine, request))  # decode: gets its own lease
    while isinstance(answer := agent.poll_read(id), Pending):
        ...                                                 # ask again at the next step
    if isinstance(answer, Permit) and agent.read_started(id):
        ...  # READ answer.num_tokens tokens with answer.params (kv_transfer_params, cut)
        usable = agent.still_valid(id)  # False: drop what was read, compute
        agent.read_finished(id, sent=True)
    # Refused: compute, and send the owner neither a read nor a notification.
    # A request that ends early, at any stage but a running read: agent.abandon(id).

The owner's side::

    agent.report_held(Held(request_id=..., params=..., tokens=..., ...))  # pinned
    agent.report_freed([request_id])                                      # unpinned
    for order in agent.take_orders():        # each step, cheap when there are none
        ...                                  # HoldLonger / FreeNow
        agent.order_done(order, done=True, hold_seconds=...)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.kernel.clock import Clock
from kvplane.worker.identity import AgentConfig, WorkerIdentity
from kvplane.worker.reads import Answer, Pending, Permit, Refused

__all__ = [
    "Answer", "FreeNow", "Held", "HoldLonger", "Order", "Pending", "Permit", "Refused",
    "WorkerAgent",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that an engine has pinned after a request ended."""

    request_id: str  # the engine's own, remote_request_id of the params
    params: dict[str, Any]  # the kv_transfer_params that the engine returns
    tokens: Sequence[int]  # kept by reference and read later: never change it again
    num_tokens: int  # the first so many have KV
    hold_seconds: float  # the engine's own, from now; less is reported
    cuttable: bool  # all KV-cache groups are full attention
    tenant_id: str = ""
    session_id: str = ""
    turn: int = 0
    for_decode: bool = False  # a prefill's blocks, for the decode of the same turn
    salt: str = ""  # cache_salt
    adapter: str = ""  # LoRA name


@dataclass(frozen=True, slots=True)
class HoldLonger:
    """Keep the blocks of `request_id` for `seconds` from now. See `hold_for`."""

    request_id: str
    seconds: float
    command_id: str = ""


@dataclass(frozen=True, slots=True)
class FreeNow:
    """Unpin the blocks of `request_id` now."""

    request_id: str
    command_id: str = ""


Order = HoldLonger | FreeNow


class WorkerAgent:
    """One engine's side of the protocol. Thread-safe; see the module for its use."""

    def __init__(
        self, identity: WorkerIdentity, config: AgentConfig, clock: Clock | None = None
    ) -> None:
        """Nothing runs before `start`. A new agent is a new instance of the worker."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the background thread: register, heartbeat, connect, renew."""
        raise NotImplementedError

    def close(self, timeout: float = 2.0) -> None:
        """Deregister if the control plane is there, and end the thread."""
        raise NotImplementedError

    # -- reading ------------------------------------------------------------------

    def begin_read(
        self,
        local_id: str,
        tokens: Sequence[int],
        *,
        lease: tuple[str, int] | None = None,
        handle: tuple[str, str] | None = None,
        min_tokens: int = 1,
        salt: str = "",
        adapter: str = "",
    ) -> None:
        """Ask whether `tokens` may begin with KV read from elsewhere.

        Give the lease (id, fencing token) that the router granted, or the handle
        (engine id, request id) to get a lease for. `tokens` is kept by reference: the
        part that exists now must not change. Fewer than `min_tokens` proved equal are
        refused.
        """
        raise NotImplementedError

    def poll_read(self, local_id: str) -> Answer:
        """Return the answer; Refused for an unknown id. A Permit may turn into Refused
        until `read_started`, and no answer after the configured wait is Refused."""
        raise NotImplementedError

    def read_started(self, local_id: str) -> bool:
        """Call right before the read, or its notification, is sent. False: do not send."""
        raise NotImplementedError

    def still_valid(self, local_id: str) -> bool:
        """Return whether a permit or a running read still has its lease."""
        raise NotImplementedError

    def read_finished(self, local_id: str, *, sent: bool, failed: bool = False) -> None:
        """Give the lease back and forget the read.

        `sent`: a read or a notification may have been sent to the owner. `failed`: it
        was, and the owner may not have got it.
        """
        raise NotImplementedError

    def abandon(self, local_id: str) -> None:
        """The request ended before anything was sent. A read that was started stays."""
        raise NotImplementedError

    # -- owning -------------------------------------------------------------------

    def report_held(self, held: Held) -> None:
        """The engine has pinned these blocks."""
        raise NotImplementedError

    def report_freed(self, request_ids: Iterable[str]) -> None:
        """The engine has unpinned these; ids that were never reported do no harm."""
        raise NotImplementedError

    def take_orders(self) -> list[Order]:
        """Return new orders of the control plane for blocks reported and not yet freed."""
        raise NotImplementedError

    def order_done(self, order: Order, *, done: bool, hold_seconds: float = 0.0) -> None:
        """Answer an order. After HoldLonger: the engine's own hold from now."""
        raise NotImplementedError

    def set_load(self, *, running: int, waiting: int, kv_usage: float) -> None:
        """Say how busy the engine is, for the next heartbeat. `kv_usage` is 0 to 1."""
        raise NotImplementedError
