"""Play the conversation through the gateway, each turn with and without reuse."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient
from kvplane.kernel.clock import SystemClock

from demo.cluster import MODEL, PREFILL
from demo.conversation import TURNS, Conversation
from demo.servers import Failed

_clock = SystemClock()


@dataclass
class Answer:
    """One streamed answer."""

    content: str = ""
    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Turn:
    """One turn, with reuse and without."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    lease_id: str | None
    ttft_ms: float
    baseline_ttft_ms: float
    tokens_equal: bool

    @property
    def recomputed_tokens(self) -> int:
        """Return the prompt tokens that were computed."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def speedup(self) -> float:
        """Return how many times sooner the first token came."""
        return self.baseline_ttft_ms / self.ttft_ms

    def as_json(self) -> dict[str, Any]:
        """Return the turn as it stands in report.json."""
        return {
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "lease_id": self.lease_id,
            "ttft_ms": round(self.ttft_ms, 1),
            "baseline_ttft_ms": round(self.baseline_ttft_ms, 1),
            "speedup": round(self.speedup, 2),
            "tokens_equal": self.tokens_equal,
        }


async def ask(
    http: aiohttp.ClientSession, url: str, session_name: str, body: dict[str, Any]
) -> Answer:
    """Send one streamed request. Raises RuntimeError with the gateway's error."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    began = _clock.monotonic()
    async with http.post(
        f"{url}/v1/chat/completions", json=body, headers={"x-session-id": session_name}
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"error in the stream: {chunk['error']}")
            _take(answer, chunk, began)
    return answer


def _take(answer: Answer, chunk: dict[str, Any], began: float) -> None:
    for choice in chunk["choices"]:
        content = choice["delta"].get("content") or ""
        if content and not answer.content:
            answer.ttft_s = _clock.monotonic() - began
        answer.content += content
        answer.token_ids += choice.get("token_ids") or []
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def play(url: str, control_plane: str) -> AsyncIterator[Turn]:
    """Yield each turn once it was played both ways.

    The conversation is one session. Without reuse, each turn is sent again as a session of
    its own, which has nothing to come back to, and is ended at once.
    """
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http, KvplaneClient(control_plane) as kv:
        await _workers_known(http, url, kv)
        await _warm_up(http, url, kv)
        conversation, seen = Conversation(), set[str]()
        for number in range(1, TURNS + 1):
            body = conversation.request(MODEL)
            with_reuse = await ask(http, url, "demo", body)
            baseline = await ask(http, url, f"demo-without-{number}", body)
            await kv.sessions.EndSession(session.EndSessionRequest(name=f"demo-without-{number}"))
            lease_id = await _read_under(kv, seen)
            yield Turn(
                turn=number,
                prompt_tokens=with_reuse.prompt_tokens,
                reused_tokens=with_reuse.cached_tokens if lease_id else 0,
                lease_id=lease_id,
                ttft_ms=with_reuse.ttft_s * 1e3,
                baseline_ttft_ms=baseline.ttft_s * 1e3,
                tokens_equal=with_reuse.token_ids == baseline.token_ids != [],
            )
            conversation.answer(with_reuse.content)


async def _workers_known(http: aiohttp.ClientSession, url: str, kv: KvplaneClient) -> None:
    """Wait until both engines have registered and the gateway knows it. Raises Failed."""
    ready = routing.ListWorkersRequest(states=[routing.WORKER_STATE_READY])
    end = _clock.monotonic() + 60
    while _clock.monotonic() < end:
        workers = (await kv.workers.ListWorkers(ready)).workers
        async with http.get(f"{url}/v1/models") as response:
            models = await response.json()
        if len(workers) == 2 and MODEL in [model["id"] for model in models["data"]]:
            return
        await _clock.sleep(0.2)
    raise Failed("the engines did not register with the control plane; see their logs")


async def _warm_up(http: aiohttp.ClientSession, url: str, kv: KvplaneClient) -> None:
    """Let the engines meet and do everything once, so that no turn pays for it."""
    conversation = Conversation()
    for _ in range(2):
        answer = await ask(http, url, "demo-warm-up", conversation.request(MODEL))
        conversation.answer(answer.content)
    await kv.sessions.EndSession(session.EndSessionRequest(name="demo-warm-up"))


async def _read_under(kv: KvplaneClient, seen: set[str]) -> str | None:
    """Return the new lease under which the prefill has read in the demo's session."""
    found = await kv.sessions.GetSession(session.GetSessionRequest(name="demo"))
    request = lease.ListLeasesRequest(
        session_id=found.session.session_id,
        worker_id=PREFILL,
        states=[lease.LEASE_STATE_CONSUMED],
    )
    answer = await kv.leases.ListLeases(request)
    new = [one for one in answer.leases if one.lease_id not in seen]
    seen.update(one.lease_id for one in new)
    return new[0].lease_id if new else None
