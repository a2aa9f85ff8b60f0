"""A conversation through the gateway, and what it must be compared with."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from demo import text
from e2e.cluster import MODEL, Cluster
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient

ANSWER_TOKENS = 24
_WORDS = " ".join(text.read(name) for name in text.NAMES).split()


def words(start: int, count: int = 120) -> str:
    """Return some real text, other text for another start."""
    return " ".join(_WORDS[(start + i) % len(_WORDS)] for i in range(count))


@dataclass
class Reply:
    """What a client got."""

    content: str
    token_ids: list[int]
    finish_reason: str | None
    usage: dict[str, Any]
    raw: list[dict[str, Any]]


@dataclass
class Chat:
    """One conversation; `session` None leaves finding it to the gateway."""

    cluster: Cluster
    session: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    gateway: int = 1
    # Fields of every request.
    always: dict[str, Any] = field(default_factory=dict)

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the request that `send` makes."""
        return {
            "model": MODEL,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "return_token_ids": True,
            **self.always,
            **more,
        }

    async def say(self, content: str, *, stream: bool = False, **more: Any) -> Reply:
        """Add a user message, send, add the answer, and prove it against a plain run."""
        self.messages.append({"role": "user", "content": content})
        reply = await self.send(stream=stream, **more)
        await self.check(reply, **{k: v for k, v in more.items() if k != "kv_transfer_params"})
        self.messages.append({"role": "assistant", "content": reply.content})
        return reply

    async def check(self, reply: Reply, **more: Any) -> None:
        """The tokens are those of an engine that reads nothing from anyone."""
        wanted = await reference(self.cluster, self.body(**more))
        assert reply.token_ids == wanted.token_ids
        assert len(reply.token_ids) == ANSWER_TOKENS

    async def send(self, *, stream: bool = False, seconds: float = 60, **more: Any) -> Reply:
        """Send the messages as they are."""
        headers = dict(self.headers)
        if self.session is not None:
            headers["x-session-id"] = self.session
        url = f"{self.cluster.gateway(self.gateway)}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=seconds) as http:
            if not stream:
                answer = await http.post(url, json=self.body(**more), headers=headers)
                return _unary(answer)
            more = {"stream": True, "stream_options": {"include_usage": True}, **more}
            async with http.stream("POST", url, json=self.body(**more), headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                chunks = [
                    json.loads(line[6:])
                    async for line in answer.aiter_lines()
                    if line.startswith("data: {")
                ]
            return _streamed(chunks)


async def reference(cluster: Cluster, body: dict[str, Any]) -> Reply:
    """Ask the prefill engine alone: it caches no prefixes and reads nothing."""
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{cluster.prefill.url}/v1/chat/completions", json=body)
    return _unary(answer)


def _unary(answer: httpx.Response) -> Reply:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert "kv_transfer_params" not in answer.text or body.get("kv_transfer_params") is None
    choice = body["choices"][0]
    return Reply(
        choice["message"]["content"],
        choice["token_ids"],
        choice["finish_reason"],
        body["usage"],
        [body],
    )


def _streamed(chunks: list[dict[str, Any]]) -> Reply:
    content, tokens, finish, usage = "", [], None, {}
    for chunk in chunks:
        assert "kv_transfer_params" not in chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            tokens += choice.get("token_ids") or []
            finish = choice.get("finish_reason") or finish
    return Reply(content, tokens, finish, usage, chunks)


async def counters(url: str) -> dict[str, float]:
    """Return an engine's NIXL counters and its KV usage."""
    found: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.get(f"{url}/metrics")
    for line in answer.text.splitlines():
        name, _, rest = line.partition("{")
        if name in {"vllm:nixl_bytes_transferred_sum", "vllm:kv_cache_usage_perc"}:
            found[name] = found.get(name, 0.0) + float(rest.rsplit(" ", 1)[1])
    return found


async def bytes_read(url: str) -> int:
    """Return how many bytes an engine has read over NIXL since it started."""
    return int((await counters(url)).get("vllm:nixl_bytes_transferred_sum", 0))


@asynccontextmanager
async def control(cluster: Cluster, tenant: str | None = None) -> AsyncIterator[KvplaneClient]:
    """Open a client of the control plane."""
    async with KvplaneClient(
        cluster.addresses("routing"),
        session=cluster.addresses("session"),
        lease=cluster.addresses("lease"),
        tenant=tenant,
    ) as client:
        yield client


async def session_of(client: KvplaneClient, name: str) -> session.Session:
    """Return a session by the name that the client gave it."""
    answer = await client.sessions.GetSession(session.GetSessionRequest(name=name))
    return answer.session


async def leases_of(client: KvplaneClient, session_id: str, reader: str) -> list[lease.Lease]:
    """Return the leases that a worker had in a session, the oldest first."""
    answer = await client.leases.ListLeases(lease.ListLeasesRequest(session_id=session_id))
    return [one for one in answer.leases if one.holder.worker_id == reader]


async def ownerships_of(
    client: KvplaneClient, session_id: str, *states: lease.OwnershipState
) -> list[lease.Ownership]:
    """Return what is or was held for a session's next turn."""
    request = lease.ListOwnershipsRequest(session_id=session_id, states=states)
    answer = await client.leases.ListOwnerships(request)
    return [one for one in answer.ownerships if not one.for_decode]
