"""A conversation through the gateway, and what it must be compared with."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from demo import text
from e2e.cluster import MODEL, Cluster
from e2e.engines import figures
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient

ANSWER_TOKENS = 24
_WORDS = " ".join(text.read(name) for name in text.NAMES).split()


def words(start: int, count: int = 120) -> str:
    """Return some real text, other text for another start."""
    return " ".join(_WORDS[(start + i) % len(_WORDS)] for i in range(count))


@dataclass
class Choice:
    """One of the answers to a request."""

    content: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Reply:
    """What a client got."""

    choices: list[Choice]
    usage: dict[str, Any]
    headers: httpx.Headers

    @property
    def content(self) -> str:
        """The first choice's text."""
        return self.choices[0].content

    @property
    def token_ids(self) -> list[int]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    @property
    def reuses(self) -> bool:
        """The router had a lease granted for this turn."""
        return self.headers.get("x-kvplane-decision", "").startswith("reuse")


@dataclass
class Chat:
    """One conversation; `session` None leaves finding it to the gateway."""

    cluster: Cluster
    session: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    gateway: int = 1
    # The base URL of a gateway that is not one of the cluster's two.
    at: str = ""
    # Fields of every request.
    always: dict[str, Any] = field(default_factory=dict)
    answer_tokens: int = ANSWER_TOKENS

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the request that `send` makes."""
        return {
            "model": MODEL,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": self.answer_tokens,
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
        body = self.body(**more)
        wanted = await reference(self.cluster, body)
        assert [one.token_ids for one in reply.choices] == [one.token_ids for one in wanted.choices]
        assert {len(one.token_ids) for one in reply.choices} == {body["max_tokens"]}

    async def send(self, *, stream: bool = False, seconds: float = 60, **more: Any) -> Reply:
        """Send the messages as they are."""
        headers = dict(self.headers)
        if self.session is not None:
            headers["x-session-id"] = self.session
        url = f"{self.at or self.cluster.gateway(self.gateway)}/v1/chat/completions"
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
            return _streamed(chunks, answer.headers)


async def reference(cluster: Cluster, body: dict[str, Any]) -> Reply:
    """Ask the prefill engine alone: it caches no prefixes and reads nothing."""
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{cluster.prefill.url}/v1/chat/completions", json=body)
    return _unary(answer)


def _unary(answer: httpx.Response) -> Reply:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert "kv_transfer_params" not in answer.text or body.get("kv_transfer_params") is None
    choices = [
        Choice(one["message"]["content"], one["token_ids"], one["finish_reason"])
        for one in body["choices"]
    ]
    return Reply(choices, body["usage"], answer.headers)


def _streamed(chunks: list[dict[str, Any]], headers: httpx.Headers) -> Reply:
    choices: dict[int, Choice] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        assert "kv_transfer_params" not in chunk
        usage = chunk.get("usage") or usage
        for one in chunk["choices"]:
            choice = choices.setdefault(one["index"], Choice())
            choice.content += one["delta"].get("content") or ""
            choice.token_ids += one.get("token_ids") or []
            choice.finish_reason = one.get("finish_reason") or choice.finish_reason
    return Reply([choices[index] for index in sorted(choices)], usage, headers)


async def bytes_read(url: str) -> int:
    """Return how many bytes an engine has read over NIXL since it started."""
    return (await figures(url)).bytes_read


@asynccontextmanager
async def control(cluster: Cluster, tenant: str | None = None) -> AsyncIterator[KvplaneClient]:
    """Open a client of the control plane."""
    async with KvplaneClient(
        cluster.addresses("routing"),
        session=cluster.addresses("session"),
        lease=cluster.addresses("lease"),
        tenant=tenant,
        timeout=10,  # the engines leave little of the machine
    ) as client:
        yield client


async def session_of(client: KvplaneClient, name: str) -> session.Session:
    """Return a session by the name that the client gave it."""
    answer = await client.sessions.GetSession(session.GetSessionRequest(name=name))
    return answer.session


async def leases_of(client: KvplaneClient, session_id: str, reader: str) -> list[lease.Lease]:
    """Return the leases that a worker had in a session, the newest first."""
    answer = await client.leases.ListLeases(lease.ListLeasesRequest(session_id=session_id))
    return [one for one in answer.leases if one.holder.worker_id == reader]


async def ownerships_of(
    client: KvplaneClient, session_id: str, *states: lease.OwnershipState
) -> list[lease.Ownership]:
    """Return what is or was held for a session's next turn."""
    request = lease.ListOwnershipsRequest(session_id=session_id, states=states)
    answer = await client.leases.ListOwnerships(request)
    return [one for one in answer.ownerships if not one.for_decode]


async def lease_of(
    client: KvplaneClient, session_id: str, reader: str, *states: lease.LeaseState
) -> lease.Lease | None:
    """Return the newest lease that a worker had in a session if it is in one of `states`."""
    leases = await leases_of(client, session_id, reader)
    return leases[0] if leases and leases[0].state in states else None
