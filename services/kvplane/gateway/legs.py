"""The two requests to engines that one turn is made of, each tried once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aiohttp
import orjson
import structlog

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import CLIENTS_FAULT, client_error
from kvplane.gateway.plan import Plan
from kvplane.gateway.reply import Reply, Usage
from kvplane.gateway.request import ClientRequest
from kvplane.gateway.stream import EventSplitter, event_data
from kvplane.gateway.upstream import Exchange, Sent, Upstream, read_all
from kvplane.gateway.workers import Guard, Interrupted, WorkerWatch
from kvplane.kernel.errors import InvalidField

log = structlog.get_logger(__name__)

Kind = Literal["unreachable", "timeout", "lost", "lease", "status", "broken"]

_EVENTS: Final = "text/event-stream"
_AS_IT_IS: Final = ("", "identity")
_MAX_ID: Final = 512


class LegFailed(Exception):
    """An engine did not do its part."""

    def __init__(self, kind: Kind, worker_id: str, message: str) -> None:
        super().__init__(f"{worker_id}: {message}")
        self.kind: Kind = kind
        self.worker_id = worker_id


@dataclass(slots=True)
class Prefilled:
    """What a prefill answered."""

    # kv_transfer_params for the decode; None when there is nothing that it may read.
    params: dict[str, Any] | None
    usage: Usage
    reused_tokens: int
    # Where they were asked for.
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """A decode's answer, from its first bytes on."""

    response: aiohttp.ClientResponse
    connection: Exchange
    # Of a stream: the events that have come. None: not a stream.
    events: list[bytes] | None = None
    splitter: EventSplitter | None = None
    # Of the others: all of it.
    body: bytes = b""

    async def close(self) -> None:
        """End the request; the engine aborts what it has not answered yet."""
        await self.connection.__aexit__()


class Legs:
    """Sends requests to engines and tells how they failed."""

    def __init__(self, upstream: Upstream, watch: WorkerWatch, config: GatewayConfig) -> None:
        self._upstream, self._watch, self._config = upstream, watch, config

    async def prefill(
        self,
        request: ClientRequest,
        plan: Plan,
        params: Mapping[str, Any],
        request_id: str,
        sent: Sent,
        *,
        trace: Mapping[str, str],
        token_ids: bool = False,
        started: "Started | None" = None,
        reads: bool,
    ) -> Prefilled:
        """Run a prefill; `reads`: it may read KV, so it gets less time.

        Raises LegFailed, ClientError for its 4xx, InvalidField.
        """
        target = plan.prefill
        assert target is not None
        body = request.prefill_body(params, token_ids=token_ids)
        limit = self._config.reuse_timeout_s if reads else self._config.prefill_timeout_s
        try:
            async with self._watch.guard(limit, target, plan.decode) as guard:
                if started is not None:
                    started.guard(guard)
                async with self._upstream.post(
                    target, request.path, body, request_id=request_id, trace=trace, sent=sent
                ) as response:
                    raw = await read_all(response, self._config.max_answer_bytes)
        except (aiohttp.ClientError, OSError, TimeoutError, Interrupted) as error:
            raise _failed(target, error, sent) from error
        _check(target, response, raw)
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise LegFailed("broken", target.worker_id, "the answer is no JSON") from error
        known = self._watch.get(target.worker_id)
        if known is None or known.epoch < target.epoch:  # it registered a moment ago
            await self._watch.refresh()
        return self._prefilled(plan if reads else None, target, answer)

    async def decode(
        self,
        request: ClientRequest,
        target: routing.Target,
        body: bytes,
        request_id: str,
        sent: Sent,
        *,
        trace: Mapping[str, str],
        started: "Started | None" = None,
    ) -> Answer:
        """Return a decode's answer once something of it is there.

        Raises LegFailed, ClientError for its 4xx.
        """
        config = self._config
        limit = config.first_byte_timeout_s if request.stream else config.answer_timeout_s
        exchange = self._upstream.post(
            target, request.path, body, request_id=request_id, trace=trace, sent=sent
        )
        try:
            async with self._watch.guard(limit, target) as guard:
                if started is not None:
                    started.guard(guard)
                response = await exchange.__aenter__()
                return await self._first_bytes(target, response, exchange)
        except (aiohttp.ClientError, OSError, TimeoutError, Interrupted) as error:
            await exchange.__aexit__()
            raise _failed(target, error, sent) from error
        except BaseException:
            await exchange.__aexit__()
            raise

    async def _first_bytes(
        self,
        target: routing.Target,
        response: aiohttp.ClientResponse,
        exchange: Exchange,
    ) -> Answer:
        if response.headers.get("Content-Encoding", "").lower() not in _AS_IT_IS:
            raise LegFailed("broken", target.worker_id, "the answer is compressed, unasked")
        content_type = response.headers.get("Content-Type", "").partition(";")[0]
        if response.status != 200 or content_type.strip().lower() != _EVENTS:
            raw = await read_all(response, self._config.max_answer_bytes)
            _check(target, response, raw)
            return Answer(response, exchange, body=raw)
        splitter = EventSplitter(self._config.max_event_bytes)
        while True:
            chunk = await response.content.readany()
            if not chunk:
                raise LegFailed("broken", target.worker_id, "the stream ended before it began")
            try:
                events = splitter.feed(chunk)
            except InvalidField as error:
                raise LegFailed("broken", target.worker_id, error.message) from error
            if events:
                _refuse_error(target, events)
                return Answer(response, exchange, events=events, splitter=splitter)

    def _prefilled(self, plan: Plan | None, target: routing.Target, answer: Any) -> Prefilled:
        reply = Reply()
        reply.add(answer)
        usage = reply.usage or Usage()
        params = reply.kv_transfer_params
        handle = dict(params) if params is not None else None
        if handle is not None and not self._is_handle(target, handle):
            handle = None
        return Prefilled(
            params=handle,
            usage=usage,
            reused_tokens=_reused(plan, usage, params or {}),
            prompt_token_ids=reply.prompt_token_ids,
            token_ids=reply.token_ids,
        )

    def _is_handle(self, target: routing.Target, params: Mapping[str, Any]) -> bool:
        """Tell whether a decode may be sent there: to the prefill's registered address only."""
        if params.get("do_remote_prefill") is not True or not params.get("remote_block_ids"):
            return False
        ids = (params.get("remote_engine_id"), params.get("remote_request_id"))
        if not all(isinstance(one, str) and 0 < len(one) <= _MAX_ID for one in ids):
            return False
        try:
            orjson.dumps(params)
        except TypeError:  # nested too deep to be sent on
            return False
        return is_registered(self._watch.get(target.worker_id), params)


class Started:
    """Hears of the guard of a leg, to end it early. Subclasses say what for."""

    def guard(self, guard: Guard) -> None:
        """Take it."""
        raise NotImplementedError


def is_registered(worker: routing.Worker | None, params: Mapping[str, Any]) -> bool:
    """Tell whether params point to the engine and side channel that their worker registered."""
    if worker is None or not worker.kv_host or not worker.kv_port:
        log.warning("a handle of a worker without a registered side channel is not used")
        return False
    named = [params.get(f"remote_{name}") for name in ("engine_id", "host", "port")]
    # A plain engine does not say its id.
    registered = [worker.engine_id or named[0], worker.kv_host, worker.kv_port]
    if named == registered:
        return True
    log.warning(
        "a worker named an engine or a side channel that is not its own",
        worker_id=worker.worker_id,
        registered=registered,
        named=named,
    )
    return False


def _reused(plan: Plan | None, usage: Usage, params: Mapping[str, Any]) -> int:
    """Return how many prompt tokens the prefill read, as far as it says."""
    if plan is None:
        return 0
    tag = params.get("kvplane")
    said = tag.get("read_tokens") if isinstance(tag, Mapping) else None
    if isinstance(said, int) and not isinstance(said, bool):
        return max(0, said)
    return min(usage.cached_tokens, plan.held_tokens)


def _check(target: routing.Target, response: aiohttp.ClientResponse, raw: bytes) -> None:
    status = response.status
    if status == 200:
        return
    if status in CLIENTS_FAULT:
        raise client_error(status, raw)
    raise LegFailed("status", target.worker_id, f"answered {status}")


def _refuse_error(target: routing.Target, events: Iterable[bytes]) -> None:
    """A stream that begins with the engine's own failure is a failed request."""
    first = next((data for data in map(event_data, events) if data is not None), b"")
    try:
        chunk = orjson.loads(first)
    except orjson.JSONDecodeError:
        return
    error = chunk.get("error") if isinstance(chunk, dict) else None
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        if not isinstance(code, int) or code >= 500:
            raise LegFailed("status", target.worker_id, "the stream began with an error")


def _failed(target: routing.Target, error: BaseException, sent: Sent) -> LegFailed:
    if isinstance(error, Interrupted):
        kind: Kind = "lost" if error.worker_id else "lease"
        return LegFailed(kind, error.worker_id or target.worker_id, str(error))
    if not sent.sent:
        return LegFailed("unreachable", target.worker_id, "cannot be reached")
    if isinstance(error, TimeoutError):
        return LegFailed("timeout", target.worker_id, "did not answer in time")
    return LegFailed("broken", target.worker_id, "broke the connection")
