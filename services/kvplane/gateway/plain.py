"""The lease work for engines that run without our connector.

The gateway is the acting holder: it compares tokens through the engine's tokenizer,
cuts the handle, keeps the lease while the engine reads, and reports what the engine says
it holds. Without an answer of the control plane nothing is read.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson
import structlog
from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import kv_params
from kvplane.client.api import LeaseApi
from kvplane.gateway.config import GatewayConfig, StaticWorker
from kvplane.gateway.giveback import GiveBack
from kvplane.gateway.legs import Started, is_registered
from kvplane.gateway.plan import Plan
from kvplane.gateway.request import ClientRequest, is_ids
from kvplane.gateway.upstream import Upstream, read_all
from kvplane.gateway.workers import Guard, WorkerWatch
from kvplane.kernel.clock import Clock
from kvplane.kernel.digests import block_digests, digest_space
from kvplane.kernel.errors import InvalidField, KvplaneError
from kvplane.worker.cut import Owned, blocks_to_compare, cut_read
from kvplane.worker.reads import Permit

log = structlog.get_logger(__name__)

_BOUND_S: Final = 0.5
_TTL_S: Final = 10.0
# A read must be over before its lease is.
_MARGIN_S: Final = 1.0
# What a report may lose on its way from the engine to us.
_HOLD_MARGIN_S: Final = 1.0

COLD: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(slots=True)
class Read(Started):
    """A read under a lease that the gateway holds."""

    leases: LeaseApi
    clock: Clock
    granted: lease.Lease
    # Monotonic: the end of the lease as its holder counts it.
    until: float
    _guard: Guard | None = None
    _renewing: asyncio.Task[None] | None = None

    def guard(self, guard: Guard) -> None:
        """Keep the lease while the engine reads; end the leg when it is lost."""
        self._guard = guard
        self._renewing = asyncio.create_task(self._renew(), name="renew lease")

    def end(self, give_back: GiveBack, *, sent: bool) -> None:
        """Give the lease back. A request that was sent counts as a use."""
        if self._renewing is not None:
            self._renewing.cancel()
        outcome = lease.READ_OUTCOME_CONSUMED if sent else lease.READ_OUTCOME_UNUSED
        give_back.release(self.granted, outcome)

    async def _renew(self) -> None:
        ref = lease.LeaseRef(
            lease_id=self.granted.lease_id, fencing_token=self.granted.fencing_token
        )
        request = lease.RenewLeasesRequest(
            holder=self.granted.holder, leases=[ref], ttl=duration(_TTL_S)
        )
        while True:
            left = self.until - self.clock.monotonic() - _MARGIN_S
            if left <= 0:
                break
            await self.clock.sleep(min(_TTL_S / 3, left))
            sent_at = self.clock.monotonic()
            try:
                async with asyncio.timeout(max(min(_BOUND_S, self.until - sent_at), 0)):
                    answer = await self.leases.RenewLeases(request)
            except (KvplaneError, TimeoutError, OSError):
                continue
            if not answer.results or not answer.results[0].renewed:
                break
            self.until = sent_at + seconds(answer.results[0].ttl)
        if self._guard is not None:
            self._guard.interrupt("the lease was lost")


@dataclass(slots=True)
class PlainLeases:
    """Leases and reports of the static workers."""

    leases: LeaseApi
    upstream: Upstream
    watch: WorkerWatch
    give_back: GiveBack
    clock: Clock
    config: GatewayConfig
    # Worker -> what the lease service gave out, and when (monotonic).
    _anchors: dict[str, tuple[int, float]] = field(default_factory=dict)

    def static(self, target: routing.Target | None) -> StaticWorker | None:
        """Return the settings of a plain worker that KV may be handed to and from."""
        if target is None or target.managed:
            return None
        for worker in self.config.static_workers:
            if worker.worker_id == target.worker_id and worker.kv_port:
                return worker
        return None

    async def begin_prefill(
        self, request: ClientRequest, plan: Plan
    ) -> tuple[Mapping[str, Any], Read | None]:
        """Return the prefill's params, and the read if there is one.

        The plan's lease is used or released.
        """
        static = self.static(plan.prefill)
        assert plan.prefill is not None
        if plan.lease is None or static is None:
            return COLD, None
        granted, plan.lease = plan.lease, None
        # The service says who holds it, and asks what its KV must be like.
        granted.holder.compatibility = self.watch.compatibility(plan.prefill.worker_id)
        read = Read(self.leases, self.clock, granted, plan.sent_at + seconds(granted.ttl))
        params: dict[str, Any] | None = None
        try:
            tokens = await self.tokenize(plan.prefill, request)
            sent_at = self.clock.monotonic()
            async with asyncio.timeout(_BOUND_S):
                answer = await self.leases.BeginRead(
                    lease.BeginReadRequest(
                        lease_id=granted.lease_id,
                        fencing_token=granted.fencing_token,
                        holder=granted.holder,
                        ttl=duration(_TTL_S),
                    )
                )
            read.until = sent_at + seconds(answer.lease.ttl)
            params = self._permitted(
                answer.ownership, tokens, request, static, static.recompute_threshold
            )
        except (KvplaneError, TimeoutError, OSError, aiohttp.ClientError) as error:
            log.info("the prompt is computed", reason=str(error))
        if params is None:
            read.end(self.give_back, sent=False)
            return COLD, None
        params.update(do_remote_decode=True, do_remote_prefill=False)
        return params, read

    async def begin_decode(
        self,
        request: ClientRequest,
        plan: Plan,
        params: Mapping[str, Any],
        tokens: Sequence[int] | None,
    ) -> tuple[dict[str, Any], Read] | None:
        """Return the decode's params and its read of the prefill's blocks, None for none.

        `tokens` are the decode's own ids of the prompt.
        """
        static, source = self.static(plan.decode), self.static(plan.prefill)
        if static is None or source is None or tokens is None:
            return None
        sent_at = self.clock.monotonic()
        ask = lease.GrantLeaseRequest(
            request_id=f"{plan.session_id}:{plan.turn}:{params['remote_request_id']}"[:128],
            holder=lease.Holder(
                worker_id=plan.decode.worker_id,
                epoch=plan.decode.epoch,
                compatibility=self.watch.compatibility(plan.decode.worker_id),
            ),
            handle=lease.OwnedHandle(
                engine_id=params["remote_engine_id"], request_id=params["remote_request_id"]
            ),
            ttl=duration(_TTL_S),
            begin_read=True,
        )
        try:
            async with asyncio.timeout(_BOUND_S):
                answer = await self.leases.GrantLease(ask)
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("the decode computes the prompt", reason=str(error))
            return None
        if not answer.HasField("lease"):
            return None
        read = Read(self.leases, self.clock, answer.lease, sent_at + seconds(answer.lease.ttl))
        permitted = self._permitted(answer.ownership, tokens, request, source, 1)
        # A decode takes all of a prefill's blocks or none.
        if permitted is None or permitted["remote_num_tokens"] != answer.ownership.num_tokens:
            read.end(self.give_back, sent=False)
            return None
        permitted.update(do_remote_prefill=True, do_remote_decode=False)
        return permitted, read

    async def report(
        self,
        target: routing.Target,
        plan: Plan,
        tenant_id: str,
        request: ClientRequest,
        params: Mapping[str, Any],
        tokens: Sequence[int],
        *,
        for_decode: bool,
    ) -> bool:
        """Tell the lease service what a plain worker says it holds; False: nobody heard it.

        `tokens` are the prompt's and the reply's; KV exists for the first of them.
        """
        static = self.static(target)
        count = params.get("remote_num_tokens")
        if static is None or not isinstance(count, int) or not 0 < count <= len(tokens):
            return False
        if not is_ids(tokens):
            return False
        if not is_registered(self.watch.get(target.worker_id), params):
            return False
        kept = {key: value for key, value in params.items() if key != "kvplane"}
        hold = static.prefill_hold_s if for_decode else static.decode_hold_s
        try:
            ownership = lease.Ownership(
                tenant_id=tenant_id,
                session_id=plan.session_id,
                turn=plan.turn,
                worker_id=target.worker_id,
                epoch=target.epoch,
                params=kv_params.from_dict(kept),
                num_tokens=count,
                block_size=static.block_size,
                digests=block_digests(tokens[:count], static.block_size, _space(static, request)),
                compatibility=self.watch.compatibility(target.worker_id),
                cuttable=static.cuttable,
                hold=duration(max(0.0, hold - _HOLD_MARGIN_S)),
                for_decode=for_decode,
            )
            async with asyncio.timeout(_BOUND_S):
                await self._report(target, [ownership])
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a handle was not reported", worker=target.worker_id, reason=str(error))
            return False
        return True

    async def tokenize(self, target: routing.Target, request: ClientRequest) -> list[int]:
        """Return the prompt's ids as this engine makes them.

        Raises aiohttp.ClientError, TimeoutError, and InvalidField for an odd answer.
        """
        prompt = request.body.get("prompt")
        if not request.is_chat and isinstance(prompt, list):
            return prompt
        names = _CHAT_FIELDS if request.is_chat else _PROMPT_FIELDS
        body = {name: request.body[name] for name in names if name in request.body}
        async with (
            asyncio.timeout(self.config.reuse_timeout_s),
            self.upstream.post(target, "/tokenize", orjson.dumps(body)) as response,
        ):
            raw = await read_all(response, self.config.max_answer_bytes)
        if response.status != 200:
            raise aiohttp.ClientError(f"/tokenize answered {response.status}")
        try:
            tokens = orjson.loads(raw)["tokens"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidField("tokens", "/tokenize answered without them") from error
        if not is_ids(tokens):
            raise InvalidField("tokens", "must be token ids")
        return tokens  # type: ignore[no-any-return]

    def _permitted(
        self,
        ownership: lease.Ownership,
        tokens: Sequence[int],
        request: ClientRequest,
        static: StaticWorker,
        min_tokens: int,
    ) -> dict[str, Any] | None:
        params = kv_params.to_dict(ownership.params)
        owned = Owned(
            params,
            ownership.num_tokens,
            ownership.block_size,
            ownership.digests,
            ownership.cuttable,
        )
        space = _space(static, request)
        blocks = blocks_to_compare(owned.num_tokens, len(tokens), owned.block_size)
        own = block_digests(tokens[: blocks * owned.block_size], owned.block_size, space)
        permit = cut_read(owned, tokens, own, space, min_tokens)
        if not isinstance(permit, Permit):
            log.info("nothing is read", reason=permit.reason)
            return None
        # Nobody moves a plain engine's deadline, so its own check stays on.
        expiry = params.get("remote_blocks_expiry_time")
        if expiry is not None:
            return {**permit.params, "remote_blocks_expiry_time": expiry}
        return dict(permit.params)

    async def _report(self, target: routing.Target, ownerships: Sequence[lease.Ownership]) -> None:
        if target.worker_id not in self._anchors:
            # A report of nothing, to learn the server's time.
            await self._send(target, (1, self.clock.monotonic()), ())
        await self._send(target, self._anchors[target.worker_id], ownerships)

    async def _send(
        self,
        target: routing.Target,
        anchor: tuple[int, float],
        ownerships: Sequence[lease.Ownership],
    ) -> None:
        elapsed = duration(self.clock.monotonic() - anchor[1])
        answer = await self.leases.ReportOwnership(
            lease.ReportOwnershipRequest(
                worker_id=target.worker_id,
                epoch=target.epoch,
                time_anchor=lease.TimeAnchor(anchor=anchor[0], elapsed=elapsed),
                ownerships=ownerships,
            )
        )
        self._anchors[target.worker_id] = (answer.anchor, self.clock.monotonic())


_CHAT_FIELDS: Final = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template", "chat_template_kwargs", "media_io_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip
_PROMPT_FIELDS: Final = ("model", "prompt", "add_special_tokens")


def _space(static: StaticWorker, request: ClientRequest) -> bytes:
    # A client's name for the model that is not the model's own is an adapter.
    adapter = "" if request.model in (static.model, *static.served_models) else request.model
    return digest_space(static.model, static.revision, request.cache_salt, adapter)


def duration(value: float) -> Duration:
    """Return seconds as a message."""
    message = Duration()
    message.FromMicroseconds(round(value * 1e6))
    return message


def seconds(value: Duration) -> float:
    """Return a message as seconds."""
    return value.ToMicroseconds() / 1e6
