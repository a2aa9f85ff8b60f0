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

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import Channels, lease_api, worker_api
from kvplane.client.api import LeaseApi, WorkerApi
from kvplane.kernel.clock import Clock, SystemClock
from kvplane.kernel.digests import DigestChain
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.worker.control import Control
from kvplane.worker.holdings import FreeNow, Held, Holdings, HoldLonger, Item, Order
from kvplane.worker.identity import AgentConfig, WorkerIdentity
from kvplane.worker.reading import Reading, make_digests
from kvplane.worker.reads import Answer, Pending, Permit, Question, Refused

__all__ = [
    "AgentConfig", "Answer", "FreeNow", "Held", "HoldLonger", "Order", "Pending", "Permit",
    "Refused", "WorkerAgent", "WorkerIdentity",
]  # fmt: skip

log = logging.getLogger(__name__)

_RESTART_PAUSE: Final = 1.0
_GOODBYE_SECONDS: Final = 1.0


class WorkerAgent:
    """One engine's side of the protocol. Thread-safe; see the module for its use."""

    def __init__(
        self,
        identity: WorkerIdentity,
        config: AgentConfig,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        """Nothing runs before `start`. A new agent is a new instance of the worker."""
        self.identity, self.config = identity, config
        self._clock = clock or SystemClock()
        self._load = (0, 0, 0.0)
        self._holdings = Holdings(identity, config, self._clock)
        self._control = Control(
            identity,
            (ids or RandomIds()).new("instance"),
            self._holdings,
            self._clock,
            self._load_message,
            self._epoch_ended,
        )
        self._reading = Reading(identity, config, self._control, self._clock, self._post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._new_held: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvplane-agent", daemon=True)
        # Waking an event loop is a system call, and lets its thread take the interpreter
        # from the engine's in the middle of a hook (1.5 ms). This queue does not: a third
        # thread passes on what is in it when the engine next waits for something.
        self._mail: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]
        self._mail = queue.SimpleQueue()
        self._postman = threading.Thread(target=self._deliver, name="kvplane-post", daemon=True)

    def start(self) -> None:
        """Start the background thread: register, heartbeat, connect, renew."""
        self._thread.start()
        self._ready.wait()
        self._postman.start()

    def close(self, timeout: float = 2.0) -> None:
        """Deregister if the control plane is there, and end the thread."""
        if self._stop is not None:
            self._post(self._stop.set)
            self._thread.join(timeout)

    @property
    def away(self) -> str | None:
        """Why reads are refused at once, None while the control plane is there."""
        return self._control.away

    @property
    def epoch(self) -> int:
        """The worker's epoch, 0 before the first registration."""
        return self._control.epoch

    # -- reading ------------------------------------------------------------------

    def begin_read(
        self,
        local_id: str,
        tokens: Sequence[int],
        *,
        lease: tuple[str, int] | None = None,
        handle: tuple[str, str] | None = None,
        address: tuple[Any, Any] = (None, None),
        min_tokens: int = 1,
        tenant_id: str = "",
        salt: str = "",
        adapter: str = "",
    ) -> None:
        """Ask whether `tokens` may begin with KV read from elsewhere.

        Give the lease (id, fencing token) that the router granted, or the handle
        (engine id, request id) to get a lease for, with the `address` (host, port) that
        stands beside it in the request: an owner that names another one is refused.
        `tokens` is kept by reference: the part that exists now must not change. Fewer
        than `min_tokens` proved equal are refused, and so is what another tenant than
        `tenant_id` owns.
        """
        wait = self.config.begin_wait_seconds if lease else self.config.grant_wait_seconds
        self._reading.begin(
            Question(
                local_id=local_id,
                tokens=tokens,
                count=len(tokens),
                lease=lease,
                handle=handle,
                address=address,
                min_tokens=min_tokens,
                tenant_id=tenant_id,
                space=self._reading.space(salt, adapter),
                wait=wait,
            )
        )

    def poll_read(self, local_id: str) -> Answer:
        """Return the answer; Refused for an unknown id.

        A Permit may turn into Refused until `read_started`, and no answer within the
        configured wait is Refused.
        """
        return self._reading.poll(local_id)

    def read_started(self, local_id: str) -> bool:
        """Call right before the read, or its notification, is sent. False: do not send."""
        return self._reading.started(local_id)

    def still_valid(self, local_id: str) -> bool:
        """Return whether a permit or a running read still has its lease."""
        return self._reading.valid(local_id)

    def read_finished(self, local_id: str, *, sent: bool, failed: bool = False) -> None:
        """Give the lease back and forget the read.

        `sent`: a read or a notification may have been sent to the owner. `failed`: it
        was, and the owner may not have got it.
        """
        self._reading.finished(local_id, sent=sent, failed=failed)

    def abandon(self, local_id: str) -> None:
        """The request ended without a report. A read that was started goes on.

        Harmless for a request without a read.
        """
        self._reading.abandon(local_id)

    # -- owning -------------------------------------------------------------------

    def report_held(self, held: Held) -> None:
        """The engine has pinned these blocks."""
        if self._holdings.add(held):
            self._post(self._prepare)
        else:
            self._reading.take_digests(held.request_id)

    def report_freed(self, request_ids: Iterable[str]) -> None:
        """The engine has unpinned these; ids that were never reported do no harm."""
        sent = self._holdings.remove(request_ids)
        if sent:
            self._post(self._control.withdraw, sent)

    def take_orders(self) -> list[Order]:
        """Return new orders of the control plane for blocks reported and not yet freed."""
        return self._holdings.take_orders()

    def order_done(self, order: Order, *, done: bool, hold_seconds: float = 0.0) -> None:
        """Answer an order. After HoldLonger: the engine's own hold from now."""
        command_id = self._holdings.answered(order, done, hold_seconds)
        if command_id:
            self._post(self._control.acknowledge, command_id)

    def set_load(self, *, running: int, waiting: int, kv_usage: float) -> None:
        """Say how busy the engine is, for the next heartbeat. `kv_usage` is 0 to 1."""
        self._load = (running, waiting, kv_usage)

    # -- the background thread ----------------------------------------------------

    def _load_message(self) -> routing.Load:
        running, waiting, kv_usage = self._load
        return routing.Load(
            running=running, waiting=waiting, kv_usage=kv_usage, held=len(self._holdings)
        )

    def _epoch_ended(self) -> None:
        self._reading.lose_all("the worker's epoch ended")

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        self._mail.put((call, args))

    def _deliver(self) -> None:
        while (letter := self._mail.get()) is not None:
            call, args = letter
            loop = self._loop
            if loop is None:
                return
            try:
                loop.call_soon_threadsafe(call, *args)
            except RuntimeError:  # closed meanwhile
                return

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            log.exception("kvplane: the agent's thread ended")
        finally:
            self._loop = None
            self._control.away = "the agent has ended"
            self._mail.put(None)
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        channels = Channels()
        config = self.config
        leases = lease_api(
            config.lease,
            token=config.token,
            timeout=config.call_timeout_seconds,
            channels=channels,
            tls=config.tls,
        )
        workers = worker_api(
            config.routing,
            token=config.token,
            timeout=config.call_timeout_seconds,
            channels=channels,
            tls=config.tls,
        )
        await self._serve(leases, workers)
        await channels.close()

    async def _serve(self, leases: LeaseApi, workers: WorkerApi) -> None:
        """Do all the background work on the running loop, until `close`."""
        self._stop, self._new_held = asyncio.Event(), asyncio.Event()
        self._reading.use(leases)
        loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("register", lambda: self._control.keep_registered(workers)),
            ("connect", lambda: self._control.keep_connected(leases)),
            ("release", lambda: self._reading.keep_released(leases)),
            ("renew", lambda: self._reading.keep_renewed(leases)),
            ("report", self._keep_reported),
        ]
        tasks = [asyncio.create_task(self._forever(name, loop)) for name, loop in loops]
        self._ready.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._control.deregister(workers)
        except (KvplaneError, TimeoutError) as error:
            log.info("kvplane: left without a goodbye: %s", error)

    async def _forever(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:
                log.exception("kvplane: the agent's %s loop failed, going on", name)
            await self._clock.sleep(_RESTART_PAUSE)

    def _prepare(self) -> None:
        assert self._new_held is not None
        self._new_held.set()

    async def _keep_reported(self) -> None:
        assert self._new_held is not None
        while True:
            await self._new_held.wait()
            self._new_held.clear()
            for item in self._holdings.unprepared():
                await self._digest(item)
                self._control.send_new_reports()

    async def _digest(self, item: Item) -> None:
        held = item.held
        space = self._reading.space(held.salt, held.adapter)
        chain = DigestChain(held.tokens, held.num_tokens, self.identity.block_size, space)
        try:
            chain.resume(self._reading.take_digests(held.request_id))
            digests = await make_digests(
                chain, self._clock, lambda: self._holdings.still_held(item)
            )
            if self._holdings.still_held(item):
                self._holdings.prepare(item, digests)
        except Exception:
            log.exception("kvplane: %s cannot be reported", held.request_id)
            self._holdings.drop(item)
