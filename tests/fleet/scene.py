"""A conversation of the narrow pair at its second turn, for what may happen to that."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvplane.lease.values import LeaseState
from sqlalchemy import text

from fleet.books import Books, eventually
from fleet.client import Client, Reply
from fleet.cluster import NARROW
from fleet.oracle import BLOCK
from fleet.words import sentence, word_tokens

PREFILL, DECODE = "narrow-p", "narrow-d"
_numbers = itertools.count()


@dataclass
class Scene:
    """One named session; `begin` plays its first turn."""

    client: Client
    books: Books
    model: str = NARROW
    name: str = field(default_factory=lambda: f"scene-{next(_numbers)}")
    messages: list[dict[str, Any]] = field(default_factory=list)
    session_id: str = ""

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the request of the turn that the messages end with."""
        return {"model": self.model, "max_tokens": 8, "messages": self.messages, **more}

    async def begin(self, words: int = 100) -> Reply:
        """Play the first turn and say something for the second."""
        self.messages.append({"role": "user", "content": sentence(self.name, words)})
        reply = await self.client.ask(self.body(), self.name)
        assert reply.reason == "first_turn"
        self.session_id = reply.session_id

        async def reported() -> list[Any]:
            held = "SELECT 1 FROM ownerships WHERE session_id = :session AND state = 1"
            return await self.books.rows(f"{held} AND NOT for_decode", session=self.session_id)

        await eventually(reported)
        self.go_on(reply)
        return reply

    def go_on(self, reply: Reply) -> None:
        """Take in an answer, and say something for the next turn."""
        said = sentence(f"{self.name}-{len(self.messages)}", 30)
        self.messages.append({"role": "assistant", "content": reply.texts[0]})
        self.messages.append({"role": "user", "content": said})

    def send(self, **more: Any) -> "asyncio.Task[Reply]":
        """Send the turn and let it go on."""
        return asyncio.create_task(self.client.ask(self.body(**more), self.name))

    async def leases(self) -> list[Any]:
        """Return the leases on what the session's decodes held, the oldest first."""
        return await self.books.rows(
            "SELECT l.*, o.worker_id AS owner FROM leases l JOIN ownerships o USING (ownership_id)"
            " WHERE l.session_id = :session AND NOT o.for_decode ORDER BY l.granted_us",
            session=self.session_id,
        )

    async def lease(self, state: LeaseState) -> Any:
        """Wait for the newest lease to be in that state, and return it."""

        async def found() -> Any:
            leases = await self.leases()
            return leases[-1] if leases and leases[-1].state == state else None

        return await eventually(found)

    async def holds(self, engine: str) -> int:
        """Return how many requests an engine holds blocks of."""
        return len((await self.books.state(engine))["held"])

    async def stat(self, engine: str, name: str) -> int:
        """Return a counter of an engine."""
        found: int = (await self.books.state(engine))["stats"][name]
        return found

    async def until(self, engine: str, name: str, least: int, seconds: float = 15) -> None:
        """Wait for a counter of an engine."""

        async def enough() -> bool:
            return await self.stat(engine, name) >= least

        await eventually(enough, seconds)

    async def churn(self, engine: str, blocks: int) -> None:
        """Let an engine hand out that many blocks and write over them."""
        await self.compute(engine, word_tokens(random.Random(self.name), blocks * BLOCK - 1))

    async def compute(self, engine: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Have an engine compute something, past the gateway."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        url = f"{self.books.fleet.url(engine)}/v1/completions"
        async with self.books.http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()

    @asynccontextmanager
    async def grants_waiting(self) -> AsyncIterator[None]:
        """Keep the lease services from granting, as a busy database would."""
        async with self.books.database.connect() as connection:
            await connection.execute(text("LOCK TABLE lease_requests IN ACCESS EXCLUSIVE MODE"))
            try:
                yield
            finally:
                await connection.rollback()

    async def grant_waits(self) -> bool:
        """Return whether a grant waits for the database."""
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
        return bool(await self.books.rows(waiting))
