"""Filling a request's blocks from another engine, and what to do when that fails."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplane.engine import matching
from kvplane.engine.reuse import Grant, Params
from kvplane.engine.transfer import Peer, Read, ReadFailed

if TYPE_CHECKING:
    from kvplane.engine.core import Engine, Request

_POLL_S = 0.001


class RemoteLoadFailed(Exception):
    """kv_load_failure_policy is `fail`, and a read has failed: the request gets a 500."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one request reads: `tokens` into the blocks `local`; none means notify only."""

    remote: matching.Remote
    tokens: int
    local: list[int]


@dataclass(slots=True)
class _Parked:
    """A read that nobody waits for any more; its blocks stay untouched till its end."""

    request_id: str
    read: Read
    blocks: list[int]


class Reader:
    """The reading half of an engine."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._parked: list[_Parked] = []
        # What decodes have been promised and not read yet: kept alive by heartbeats.
        self._awaited: dict[str, matching.Remote] = {}
        self._last_heartbeat = engine.clock.monotonic()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def parked_blocks(self) -> int:
        """Blocks in quarantine."""
        return sum(len(parked.blocks) for parked in self._parked)

    def expect(self, request_id: str, params: Params) -> None:
        """Keep a prefill's blocks alive until `unexpect`, as vLLM's decode does."""
        remote = matching.remote_of(params) if params.get("do_remote_prefill") else None
        if remote is not None:
            self._awaited[request_id] = remote

    def unexpect(self, request_id: str) -> None:
        """Stop the heartbeats for a request. If it has not read: as vLLM, tell the owner.

        Under leases nothing is sent without one: the owner's hold runs out.
        """
        remote = self._awaited.pop(request_id, None)
        if remote is not None and not self._engine.reuse.managed:
            self._send([remote], f"{remote.request_id}:1")

    async def load(
        self, request: "Request", grant: Grant, hits: int, own: list[int]
    ) -> tuple[int, list[int]]:
        """Fill what can be filled of `own`, the blocks after `hits` local ones.

        Returns how many tokens came, and the request's own blocks: others when the given
        ones may still be written to. RemoteLoadFailed by vLLM's policy `fail`. Whatever
        is raised, `own` has been looked after.
        """
        engine = self._engine
        try:
            plan = await self._plan(request, grant, hits, own)
            read = await self._begin(request, plan) if plan is not None else None
        except ReadFailed as error:
            engine.stats.nixl_failed += 1
            engine.reuse.finished(request.request_id, sent=error.sent, failed=True)
            if not engine.reuse.managed:
                engine.blocks.release(own)
                await self._load_failure_policy(request)
                return 0, await engine.blocks.allocate(len(own))
            return 0, own
        except BaseException:
            engine.reuse.finished(request.request_id, sent=False)
            engine.blocks.release(own)
            raise
        if plan is None:
            engine.reuse.finished(request.request_id, sent=False)
            return 0, own
        if read is None:
            return 0, own
        return await self._complete(request, plan, read, own)

    async def _plan(
        self, request: "Request", grant: Grant, hits: int, own: list[int]
    ) -> _Plan | None:
        engine, prompt = self._engine, len(request.prompt)
        computed = hits * engine.config.block_size
        if grant.num_tokens is None:
            tokens = matching.external_tokens(
                grant.params, prompt, computed, engine.config.kv_recompute_threshold
            )
        else:
            tokens = max(min(grant.num_tokens, prompt) - computed, 0)
        engine.stats.external_queries += prompt - computed
        remote = matching.remote_of(grant.params)
        if remote is None:
            if not tokens:
                return None
            if not grant.params.get("remote_block_ids"):
                raise matching.EngineDead("tokens to load, but no blocks to load them from")
            # vLLM warns, reads nothing and waits until the client leaves.
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        end = -(-(computed + tokens) // engine.config.block_size)
        return _Plan(remote, tokens, own[: end - hits] if tokens else [])

    async def _begin(self, request: "Request", plan: _Plan) -> Read | None:
        engine, remote = self._engine, plan.remote
        if engine.faults.read_delay_s:
            await engine.clock.sleep(engine.faults.read_delay_s)
        if engine.faults.take("fail_reads"):
            raise ReadFailed("injected", sent=False)
        peer = await engine.transfer.connect(remote.host, remote.port, remote.engine_id)
        if plan.local and not engine.reuse.managed and self._expired(remote, peer):
            engine.stats.kv_expired += 1
            raise ReadFailed("declined: the owner's hold is over, or nearly so", sent=False)
        # Before anything is sent, since this is where an engine can die.
        blocks = matching.aligned(plan.local, remote.blocks)
        if not engine.reuse.started(request.request_id):
            engine.stats.reads_refused += 1
            engine.reuse.finished(request.request_id, sent=False)
            return None
        self._awaited.pop(request.request_id, None)
        notification = f"{remote.request_id}:1"
        if plan.local:
            return engine.transfer.read(
                peer, plan.local, blocks, notification, lambda: engine.faults.slow_reads_s
            )
        try:
            engine.transfer.notify(peer, notification)
            engine.reuse.finished(request.request_id, sent=True)
        except ReadFailed:
            # All KV is here: the request goes on, the owner frees by its own deadline.
            engine.stats.nixl_failed_notifications += 1
            engine.reuse.finished(request.request_id, sent=True, failed=True)
        return None

    def _expired(self, remote: matching.Remote, peer: Peer) -> bool:
        engine = self._engine
        return engine.config.bidirectional and matching.is_expired(
            remote, engine.clock.monotonic(), peer.clock_offset
        )

    async def _complete(
        self, request: "Request", plan: _Plan, read: Read, own: list[int]
    ) -> tuple[int, list[int]]:
        engine, began = self._engine, self._engine.clock.monotonic()
        engine.stats.reading += 1
        try:
            while (state := read.state()) == "PROC":
                if not engine.reuse.still_valid(request.request_id):
                    break
                await engine.clock.sleep(_POLL_S)
        except BaseException:
            engine.stats.reads_abandoned += 1
            self._park(request.request_id, read, own)
            raise
        finally:
            engine.stats.reading -= 1
        valid = engine.reuse.still_valid(request.request_id)
        if state == "DONE" and valid and read.over():
            engine.reuse.finished(request.request_id, sent=True)
            engine.stats.nixl_reads += 1
            engine.stats.nixl_bytes += read.nbytes
            engine.stats.nixl_seconds += engine.clock.monotonic() - began
            engine.stats.external_hits += plan.tokens
            return plan.tokens, own
        if state == "ERR":
            engine.stats.nixl_failed += 1
            engine.transfer.forget(read.peer)
        else:
            engine.stats.reads_dropped += 1
        self._park(request.request_id, read, own)
        if state == "ERR" and not engine.reuse.managed:
            await self._load_failure_policy(request)
        return 0, await engine.blocks.allocate(len(own))

    async def _load_failure_policy(self, request: "Request") -> None:
        """Do as vLLM does without our connector: return to recompute, raise, or hang."""
        if not self._engine.config.recompute_on_load_failure:
            raise RemoteLoadFailed(f"{request.request_id}: KV load failed")
        if request.params and request.params.get("do_remote_decode"):
            # A prefill offers itself the same tokens again and again, and never reads.
            await asyncio.get_running_loop().create_future()

    def _park(self, request_id: str, read: Read, blocks: list[int]) -> None:
        self._parked.append(_Parked(request_id, read, blocks))
        self._sweep()

    def _sweep(self) -> None:
        for parked in list(self._parked):
            failed = parked.read.state() == "ERR"
            if parked.read.over():
                self._parked.remove(parked)
                self._engine.reuse.finished(parked.request_id, sent=True, failed=failed)
                self._engine.blocks.release(parked.blocks)

    def tick(self, now: float) -> None:
        """Free quarantined blocks whose reads are over, and send heartbeats that are due."""
        self._sweep()
        if now - self._last_heartbeat < self._engine.config.kv_lease_duration_s / 6:
            return
        self._last_heartbeat = now
        by_engine: dict[str, list[matching.Remote]] = {}
        for remote in self._awaited.values():
            by_engine.setdefault(remote.engine_id, []).append(remote)
        for remotes in by_engine.values():
            self._send(remotes, "HB:" + ",".join(remote.request_id for remote in remotes))

    def _send(self, remotes: list[matching.Remote], notification: str) -> None:
        """Notify an engine, from the background: it may have to be met first."""

        async def send() -> None:
            first, transfer = remotes[0], self._engine.transfer
            try:
                peer = await transfer.connect(first.host, first.port, first.engine_id)
                transfer.notify(peer, notification)
            except ReadFailed:
                self._engine.stats.nixl_failed_notifications += 1

        task = asyncio.create_task(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
