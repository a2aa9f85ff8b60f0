"""A request's life: permission, blocks, read, prefill, tokens, pin."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplane.engine import matching
from kvplane.engine.blocks import Blocks
from kvplane.engine.config import ENGINE_VERSION, KV_DTYPE, KV_LAYOUT, EngineConfig
from kvplane.engine.faults import Faults
from kvplane.engine.model import ToyModel
from kvplane.engine.pool import Pin
from kvplane.engine.reading import Reader
from kvplane.engine.reuse import Grant, Holding, Params, Reuse
from kvplane.engine.stats import Stats
from kvplane.engine.transfer import Transfer
from kvplane.kernel.clock import Clock
from kvplane.kernel.compat import compatibility_key

_PREFILL_CHUNK = 512
# How often peers' reads advance: shortly after something was held for them or read, while
# something is held, and otherwise.
_BUSY_POLL_S, _HELD_POLL_S, _IDLE_POLL_S = 0.002, 0.01, 0.05
_BUSY_FOR_S = 2.0


@dataclass(slots=True)
class Request:
    """One request, as the engine sees it; the second half is filled in on its way."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    params: Params | None = None
    cache_salt: str = ""

    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    # Prompt tokens that were not computed for this request.
    cached_tokens: int = 0
    # kv_transfer_params of the answer.
    returned: Params | None = None


class Engine:
    """One engine over one KV memory. All of it runs in one event loop."""

    def __init__(
        self, config: EngineConfig, clock: Clock, *, engine_id: str = "", kv_port: int = 0
    ) -> None:
        self.config = config
        self.clock = clock
        self.engine_id = engine_id or secrets.token_hex(8)
        self.kv_port = kv_port
        self.stats = Stats()
        self.faults = Faults()
        self.model = ToyModel(
            f"{config.model}@{config.revision}", config.num_blocks, config.block_size
        )
        self.compatibility = compatibility_key(
            model=config.model,
            revision=config.revision,
            block_size=config.block_size,
            kv_layout=KV_LAYOUT,
            kv_dtype=KV_DTYPE,
            engine_version=ENGINE_VERSION,
        )
        self.transfer = Transfer(self.model.memory, self.engine_id, self.compatibility, clock)
        self.blocks = Blocks(config)
        self._device = asyncio.Lock()
        self._busy_until = 0.0
        self.dead: str | None = None

    def attach(self, reuse: Reuse) -> None:
        """Say who decides on reads. Once, before the first request."""
        self.reuse = reuse
        self.reader = Reader(self)

    async def generate(self, request: Request) -> AsyncGenerator[int, None]:
        """Yield the tokens of a request one by one, and leave its outcome in it.

        `finish_reason` is set before the last token is yielded. Closing the iterator
        before that is an abort: nothing is pinned. RemoteLoadFailed when vLLM's policy
        `fail` says so. EngineDead ends the engine.
        """
        if self.dead:
            raise matching.EngineDead(self.dead)
        self.stats.requests += 1
        self.stats.waiting += 1
        running = False
        table: list[int] = []
        try:
            computed, table = await self._load(request)
            self.stats.waiting -= 1
            self.stats.running += 1
            running = True
            request.cached_tokens = computed
            await self._prefill(request, table, computed)
            while True:
                token = self._next(request, table)
                if request.finish_reason is not None:
                    self._finish(request, table)
                    table = []
                    yield token
                    return
                yield token
                await self.clock.sleep(self.config.decode_us_per_token / 1e6)
                length = len(request.prompt) + len(request.output) - 1
                self.model.compute(table, length, (token,))
        except matching.EngineDead as error:
            self.dead = str(error)
            raise
        finally:
            self.reader.unexpect(request.request_id)
            if request.finish_reason is None:
                self.stats.aborted += 1
            if request.returned is None:
                self.reuse.ended(request.request_id)
            if running:
                self.stats.running -= 1
            else:
                self.stats.waiting -= 1
            self.blocks.release(table)

    async def _load(self, request: Request) -> tuple[int, list[int]]:
        """Return how many tokens need no computing, and all blocks of the request."""
        prompt, config = request.prompt, self.config
        hits = self.blocks.pool.take_prefix(prompt, request.cache_salt)
        self.stats.prefix_queries += len(prompt)
        self.stats.prefix_hits += len(hits) * config.block_size
        loaded = 0
        try:
            grant = await self._ask(request, len(hits) * config.block_size)
            try:
                own = await self._allocate(request, len(hits))
            except BaseException:
                self.reuse.finished(request.request_id, sent=False)
                raise
            if grant is not None:
                loaded, own = await self.reader.load(request, grant, len(hits), own)
        except BaseException:
            self.blocks.release(hits)
            raise
        # The last token is always computed: the next one comes from it.
        return min(len(hits) * config.block_size + loaded, len(prompt) - 1), hits + own

    async def _ask(self, request: Request, computed: int) -> Grant | None:
        """Return leave to read, if the request wants to read and may."""
        params, threshold = request.params, self.config.kv_recompute_threshold
        if params is None:
            return None
        if not matching.reads_remote(params, bidirectional=self.config.bidirectional):
            if matching.external_tokens(params, len(request.prompt), computed, threshold):
                # vLLM counts the tokens, never reads them and waits until the client leaves.
                await asyncio.get_running_loop().create_future()
            return None
        self.reader.expect(request.request_id, params)
        least = computed + max(threshold if params.get("do_remote_decode") else 0, 1)
        grant = await self.reuse.permit(
            request.request_id, request.prompt, params, least, request.cache_salt
        )
        self.stats.reads_denied += grant is None and bool(params.get("do_remote_prefill"))
        return grant

    async def _allocate(self, request: Request, have: int) -> list[int]:
        # The newest token of a request never has KV.
        tokens = len(request.prompt) + request.max_tokens - 1
        return await self.blocks.allocate(-(-tokens // self.config.block_size) - have)

    async def _prefill(self, request: Request, table: Sequence[int], computed: int) -> None:
        prompt = request.prompt
        async with self._device:
            if self.faults.prefill_delay_s:
                await self.clock.sleep(self.faults.prefill_delay_s)
            for start in range(computed, len(prompt), _PREFILL_CHUNK):
                chunk = prompt[start : start + _PREFILL_CHUNK]
                self.model.compute(table, start, chunk)
                await self.clock.sleep(self.config.prefill_us_per_token * len(chunk) / 1e6)
        self.stats.prompt_tokens += len(prompt)
        self.blocks.pool.remember(prompt, table, request.cache_salt)

    def _next(self, request: Request, table: Sequence[int]) -> int:
        token = self.model.next_token(table, len(request.prompt) + len(request.output))
        request.output.append(token)
        self.stats.generation_tokens += 1
        if token in request.stop_token_ids:
            request.finish_reason, request.stop_reason = "stop", token
        elif len(request.output) >= request.max_tokens:
            request.finish_reason = "length"
        return token

    def _finish(self, request: Request, table: list[int]) -> None:
        """Pin what vLLM would pin, and free the rest."""
        tokens = request.prompt + request.output
        computed = len(tokens) - 1
        used = -(-computed // self.config.block_size)
        self.blocks.pool.remember(tokens[:computed], table, request.cache_salt)
        params, config = request.params, self.config
        prefills = bool(params and params.get("do_remote_decode"))
        if not params or not (prefills or config.bidirectional):
            self.blocks.release(table)
            return
        for_turn = self.faults.hold_s or config.decoder_kv_blocks_ttl_s
        hold = config.kv_lease_duration_s if prefills else for_turn
        deadline = self.clock.monotonic() + hold
        pin = Pin(request.request_id, table[:used], deadline, by_decode=not prefills)
        self.blocks.pins.add(pin)
        self._busy_until = self.clock.monotonic() + _BUSY_FOR_S
        self.blocks.release(table[used:])
        request.returned = self._handle(request, pin, computed)
        self.reuse.held(
            Holding(
                request_id=request.request_id,
                tokens=tokens,
                num_tokens=computed,
                hold_s=hold,
                asked=params,
                returned=request.returned,
                salt=request.cache_salt,
            )
        )

    def _handle(self, request: Request, pin: Pin, computed: int) -> Params:
        handle: dict[str, Any] = {
            "do_remote_prefill": not pin.by_decode,
            "do_remote_decode": pin.by_decode,
            "remote_block_ids": [pin.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.config.kv_host,
            "remote_port": self.kv_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": computed,
            "remote_blocks_expiry_time": pin.deadline if pin.by_decode else None,
            "transfer_mode": "pull",
        }
        if not pin.by_decode:
            handle["remote_prefill_cached_tokens"] = request.cached_tokens
        return handle

    async def run(self) -> None:
        """Serve peers: hand out notifications, end holds, carry out orders. Until cancelled."""
        while True:
            self.tick()
            pause = _HELD_POLL_S if len(self.blocks.pins) else _IDLE_POLL_S
            if self.clock.monotonic() < self._busy_until:
                pause = _BUSY_POLL_S
            await self.clock.sleep(pause)

    def tick(self) -> None:
        """Do what is due now."""
        now, pins = self.clock.monotonic(), self.blocks.pins
        for note in self.transfer.notifications():
            self._notified(note, now)
        expired = pins.expire(now)
        if expired:
            self.stats.kv_expired += len(expired)
            self.reuse.freed(expired)
        self.reuse.carry_out_orders(pins, now, self.faults, self.stats)
        self.reader.tick(now)
        self.blocks.wake()
        usage = self.blocks.pool.in_use / self.config.num_blocks
        self.reuse.load(self.stats.running, self.stats.waiting, usage)

    def _notified(self, note: str, now: float) -> None:
        pins = self.blocks.pins
        if note.startswith("HB:"):
            for request_id in note[3:].split(","):
                pins.extend(request_id, now + self.config.kv_lease_duration_s * 2 / 3)
            return
        if self.faults.take("drop_notifications"):
            return
        request_id = note.rpartition(":")[0]
        if pins.free(request_id):
            self._busy_until = now + _BUSY_FOR_S
            self.reuse.freed([request_id])
        else:
            # Somebody has read blocks that were no longer theirs.
            self.stats.late_notifications += 1
