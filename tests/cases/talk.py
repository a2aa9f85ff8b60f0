"""A conversation through a gateway, each answer checked against an engine that only computes."""

from dataclasses import dataclass, field
from typing import Any

import httpx
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as sessions
from kvplane.client import KvplaneClient

from cases.processes import Dev, Engine, Services

ANSWER_TOKENS = 16
_BUYS = ("bread", "salt", "a lamp", "rope", "ink", "two goats", "tin", "maps", "honey", "glass")


def words(start: int, count: int = 60) -> str:
    """Return some text, other text for another start."""
    return " ".join(f"{_BUYS[(start + i * i) % 10]} {start * 31 + i}," for i in range(count // 2))


@dataclass
class Answer:
    """What a client got, and what the gateway said of it."""

    token_ids: list[int]
    decision: str  # reuse, recompute
    reason: str  # of the router, such as owner_holds


@dataclass
class Talk:
    """One conversation with one pair of engines."""

    plane: Dev | Services
    prefill: Engine
    session: str
    model: str
    gateway: int = 1
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer | None = None

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the request for the next answer."""
        return {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": ANSWER_TOKENS,
            "return_token_ids": True,
            **more,
        }

    async def say(self, content: str, *, right: bool = True) -> Answer:
        """Say something and take the answer in; `right`: prove it against a cold run."""
        self.messages.append({"role": "user", "content": content})
        async with httpx.AsyncClient(timeout=60) as http:
            got = await http.post(
                f"{self.plane.gateway(self.gateway)}/v1/chat/completions",
                json=self.body(),
                headers={"x-session-id": self.session},
            )
            assert got.status_code == 200, got.text
        choice = got.json()["choices"][0]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        decision, _, reason = got.headers["x-kvplane-decision"].partition("; reason=")
        self.last = Answer(choice["token_ids"], decision, reason)
        if right:
            await self.check()
        return self.last

    async def check(self) -> None:
        """Prove the last answer against a cold run."""
        assert self.last is not None
        *before, _ = self.messages
        async with httpx.AsyncClient(timeout=60) as http:
            cold = await http.post(
                f"{self.prefill.url}/v1/chat/completions", json=self.body(messages=before)
            )
        assert self.last.token_ids == cold.json()["choices"][0]["token_ids"]
        assert len(self.last.token_ids) == ANSWER_TOKENS


async def session_of(kv: KvplaneClient, name: str) -> sessions.Session:
    """Return a conversation as the registry knows it."""
    return (await kv.sessions.GetSession(sessions.GetSessionRequest(name=name))).session


async def held(kv: KvplaneClient, session: str, *states: lease.OwnershipState) -> Any:
    """Return what is held for a conversation's next turn, the states by default HELD."""
    session_id = (await session_of(kv, session)).session_id
    request = lease.ListOwnershipsRequest(
        session_id=session_id, states=states or [lease.OWNERSHIP_STATE_HELD]
    )
    owned = (await kv.leases.ListOwnerships(request)).ownerships
    return [one for one in owned if not one.for_decode]
