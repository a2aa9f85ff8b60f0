"""Random conversations, many at once: whatever clients do, every token is right.

Their clients go on, edit what was said, branch, ask again, send turns at once, leave, and
stop naming their session. KVPLANE_E2E_TURNS sets how many turns there are and
KVPLANE_E2E_SEED which ones; the same seed gives the same requests::

    KVPLANE_E2E_TURNS=1000 KVPLANE_E2E_SEED=7 \\
        .venv/bin/python -m pytest tests/e2e/test_random_turns.py -s
"""

import asyncio
import copy
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from e2e.chat import Chat, Reply, bytes_read, words
from e2e.cluster import KV_BYTES_PER_TOKEN, Cluster

TURNS = int(os.environ.get("KVPLANE_E2E_TURNS", "80"))
SEED = int(os.environ.get("KVPLANE_E2E_SEED", "1"))

pytestmark = pytest.mark.vllm

CONVERSATIONS = 5
# Of a conversation's text; then it ends and another begins.
MAX_WORDS = 900
SYSTEM = "You answer in few words. " + words(40, 60)


@dataclass
class Crowd:
    """The clients, and what came of what they did."""

    cluster: Cluster
    random: random.Random
    chats: list[Chat] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    begun: int = 0

    async def step(self) -> None:
        """Have one client do something."""
        rng = self.random
        if len(self.chats) < CONVERSATIONS:
            return await self.begin()
        chat = rng.choice(self.chats)
        if sum(len(one["content"].split()) for one in chat.messages) > MAX_WORDS:
            return await self.end(chat)
        what = rng.choices(
            [self.go_on, self.ask_again, self.edit, self.branch, self.at_once, self.leave],
            [8, 2, 2, 2, 2, 1],
        )[0]
        self.counts[what.__name__] += 1
        return await what(chat)

    async def begin(self) -> None:
        self.begun += 1
        name = f"random-{SEED}-{self.begun}" if self.random.random() < 0.7 else None
        chat = Chat(self.cluster, name)
        if self.random.random() < 0.5:
            chat.messages.append({"role": "system", "content": SYSTEM})
        self.chats.append(chat)
        self.counts["begin"] += 1
        await self.go_on(chat)

    async def end(self, chat: Chat) -> None:
        self.chats.remove(chat)
        self.counts["end"] += 1
        if chat.session is None:
            return
        async with httpx.AsyncClient(timeout=30) as http:
            url = f"{self.cluster.gateway(self.random.choice([1, 2]))}/v1/sessions/{chat.session}"
            answer = await http.delete(url)
        # A branch under the same name may have ended it.
        assert answer.status_code in (200, 404), answer.text

    async def go_on(self, chat: Chat) -> None:
        self.ask(chat)
        await self.answer(chat)

    async def ask_again(self, chat: Chat) -> None:
        """The same question once more."""
        del chat.messages[-1]
        await self.answer(chat)

    async def edit(self, chat: Chat) -> None:
        """Change what was said, in the middle or at the end, and keep what follows or not."""
        said = [n for n, one in enumerate(chat.messages) if one["role"] == "user"]
        at = self.random.choice(said)
        text = chat.messages[at]["content"].split()
        text[self.random.randrange(len(text))] = self.random.choice(["other", "else", "new"])
        chat.messages[at]["content"] = " ".join(text)
        if self.random.random() < 0.5:
            del chat.messages[at + 1 :]
        else:
            self.ask(chat)
        await self.answer(chat)

    async def branch(self, chat: Chat) -> None:
        """Go on from an earlier answer, under the same name, another, or none."""
        answers = [n for n, one in enumerate(chat.messages) if one["role"] == "assistant"]
        other = copy.copy(chat)
        other.messages = copy.deepcopy(chat.messages[: self.random.choice(answers) + 1])
        other.session = self.random.choice([chat.session, f"{chat.session}-b{self.begun}", None])
        self.chats[self.random.randrange(len(self.chats))] = other
        await self.go_on(other)

    async def at_once(self, chat: Chat) -> None:
        """Several turns at the same moment, of one conversation and of others."""
        twin = copy.copy(chat)
        twin.messages = copy.deepcopy(chat.messages)
        others = [one for one in self.chats if one is not chat]
        group = [chat, twin, *self.random.sample(others, 2)]
        for one in group:
            self.ask(one)
        await asyncio.gather(*[self.answer(one) for one in group])

    async def leave(self, chat: Chat) -> None:
        """Send something, do not wait for the answer, and go on as if it had not been."""
        self.ask(chat)
        sent = asyncio.create_task(chat.send(stream=self.random.random() < 0.5, max_tokens=200))
        await asyncio.wait([sent], timeout=self.random.uniform(0, 0.6))
        sent.cancel()
        await asyncio.wait([sent])
        if not sent.cancelled():
            sent.result()
        del chat.messages[-1]
        await self.go_on(chat)

    def ask(self, chat: Chat) -> None:
        """Add a question."""
        count = self.random.choice([3, 20, 60, 150])
        content = words(self.random.randrange(5000), count)
        chat.messages.append({"role": "user", "content": content})

    async def answer(self, chat: Chat) -> None:
        """Get the answer to what is asked, and prove it."""
        rng = self.random
        chat.gateway = rng.choice([1, 2])
        more: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 12])}
        stream = rng.random() < 0.5
        if rng.random() < 0.1:
            more |= {"n": 2, "temperature": 1, "top_k": 1}
        reply = await chat.send(stream=stream, **more)
        await chat.check(reply, **more)
        chat.messages.append({"role": "assistant", "content": reply.content})
        self.note(reply)

    def note(self, reply: Reply) -> None:
        self.counts["turns"] += 1
        self.counts["streams"] += "text/event-stream" in reply.headers["content-type"]
        self.counts["tokens"] += sum(len(one.token_ids) for one in reply.choices)
        self.counts[reply.headers["x-kvplane-decision"]] += 1


@pytest.mark.timeout(600 + 10 * TURNS)
async def test_random_conversations(cluster: Cluster) -> None:
    crowd = Crowd(cluster, random.Random(SEED))
    before = await bytes_read(cluster.prefill.url)
    while crowd.counts["turns"] < TURNS:
        done = crowd.counts["turns"] // 100
        await crowd.step()
        if crowd.counts["turns"] // 100 > done:
            print(f"\n{crowd.counts['turns']} turns", flush=True)
    read = (await bytes_read(cluster.prefill.url) - before) // KV_BYTES_PER_TOKEN
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(crowd.counts.items()))
    print(f"\nseed {SEED}: {counts}, prompt tokens read: {read}")
    reused = sum(n for name, n in crowd.counts.items() if name.startswith("reuse"))
    assert reused > crowd.counts["turns"] / 3
    assert read > 0
