"""Random conversations: what a client does to its history, drawn from a seed."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplane.kernel.clock import SystemClock

from fleet.client import Client, Reply
from fleet.cluster import NARROW, PLAIN, TOY
from fleet.oracle import text_of
from fleet.words import word_tokens

_clock = SystemClock()
Tokens = list[int]

# What a client does, and how often.
MOVES = {
    "append": 60,
    "edit": 7,
    "truncate": 5,
    "summarise": 4,
    "branch": 5,
    "retry": 5,
    "parallel": 5,
    "choices": 4,
    "leave": 5,
}
MODELS = {TOY: 15, PLAIN: 4, NARROW: 1}


@dataclass
class Tally:
    """What happened, counted."""

    moves: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    left: int = 0
    # Model -> turns whose prefill read something, and tokens.
    reused: Counter[str] = field(default_factory=Counter)
    reused_tokens: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    appended: int = 0
    appended_reused: int = 0
    # Session -> turns that read and were answered.
    by_session: Counter[str] = field(default_factory=Counter)
    # Some of the requests.
    sample: list[dict[str, Any]] = field(default_factory=list)

    def count(self, model: str, reply: Reply) -> None:
        """Take in an answer."""
        self.requests += 1
        self.prompt_tokens[model] += reply.usage["prompt_tokens"]
        self.reasons[reply.decision] += 1
        if reply.reused:
            self.reused[model] += 1
            self.reused_tokens[model] += reply.reused
            self.by_session[reply.session_id] += 1


@dataclass
class Conversation:
    """One client's view of one conversation: what was said, and under which name."""

    rng: random.Random
    client: Client
    model: str
    # A chat, or text completions over token ids.
    chat: bool
    session: str | None
    # Of a chat: the system message. Else the beginning.
    head: Tokens = field(default_factory=list)
    # What the user said, and the answers.
    turns: list[tuple[Tokens, Tokens]] = field(default_factory=list)
    # The last request was an ordinary one that went well.
    smooth: bool = False

    def body(self, said: Tokens) -> dict[str, Any]:
        """Return the request for one more turn."""
        rng = self.rng
        body: dict[str, Any] = {"model": self.model, "max_tokens": rng.randint(4, 20)}
        if rng.random() < 0.5:
            body["return_token_ids"] = True
        if rng.random() < 0.5:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if not self.chat:
            return {**body, "prompt": sum([*self._said(), said], self.head)}
        messages = [{"role": "system", "content": text_of(self.head)}] if self.head else []
        for asked, answered in self.turns:
            messages.append({"role": "user", "content": text_of(asked)})
            messages.append({"role": "assistant", "content": text_of(answered)})
        return {**body, "messages": [*messages, {"role": "user", "content": text_of(said)}]}

    def _said(self) -> list[Tokens]:
        return [part for turn in self.turns for part in turn]

    def new_text(self) -> Tokens:
        """Return what the user says next."""
        return word_tokens(self.rng, self.rng.randint(12, 45))

    def answered(self, said: Tokens, body: dict[str, Any]) -> None:
        """Add a turn to the history."""
        self.turns.append((said, self.client.expected(body)))

    def copy(self, turns: Sequence[tuple[Tokens, Tokens]]) -> "Conversation":
        """Return a branch with its own future."""
        rng = random.Random(self.rng.random())
        names = [self.session, None, f"branch-{uuid.UUID(int=rng.getrandbits(128))}"]
        return Conversation(
            rng, self.client, self.model, self.chat, rng.choice(names), self.head, list(turns)
        )


class Talk:
    """Conversations that go on side by side until so many requests have been sent."""

    def __init__(self, clients: list[Client], seed: int, requests: int) -> None:
        self._rng = random.Random(seed)
        self._clients = clients
        self._left = requests
        self.tally = Tally()

    async def run(self, side_by_side: int) -> Tally:
        """Talk. Raises what a wrong answer raises."""
        async with asyncio.TaskGroup() as group:
            for _ in range(side_by_side):
                group.create_task(self._talk(random.Random(self._rng.random())))
        return self.tally

    async def _talk(self, rng: random.Random) -> None:
        while self._left > 0:
            await self._converse(self._begin(rng), rng.randint(6, 24))

    def _begin(self, rng: random.Random) -> Conversation:
        model = rng.choices(list(MODELS), list(MODELS.values()))[0]
        name = f"talk-{uuid.UUID(int=rng.getrandbits(128))}" if rng.random() < 0.6 else None
        made = Conversation(rng, rng.choice(self._clients), model, rng.random() < 0.8, name)
        if not made.chat or rng.random() < 0.7:
            made.head = word_tokens(rng, rng.randint(10, 60))
        return made

    async def _converse(self, conversation: Conversation, moves: int) -> None:
        branches: list[Conversation] = []
        for _ in range(moves):
            if self._left <= 0:
                return
            known = len(conversation.turns) > 1
            move = conversation.rng.choices(list(MOVES), list(MOVES.values()))[0]
            await self._move(conversation, move if known else "append", branches)
        for branch in branches:
            await self._converse(branch, branch.rng.randint(2, 5))

    async def _move(self, one: Conversation, move: str, branches: list[Conversation]) -> None:
        rng, turns = one.rng, one.turns
        self.tally.moves[move] += 1
        said = one.new_text()
        if move == "edit":
            at = rng.randrange(len(turns))
            turns[at] = (one.new_text(), turns[at][1])
        elif move == "truncate":
            del turns[-rng.randint(1, len(turns) - 1) :]
        elif move == "summarise":
            del turns[: rng.randint(1, len(turns))]
            one.head = word_tokens(rng, rng.randint(20, 50))
        elif move == "branch":
            branches.append(one.copy(turns[: rng.randint(1, len(turns))]))
        elif move == "parallel":
            await self._parallel(one, [said, one.new_text(), one.new_text()][: rng.randint(2, 3)])
            return
        body = one.body(said)
        if move == "choices" and one.chat:
            body["n"] = rng.randint(2, 3)
        elif move == "leave":
            await self._leave(one, body)
        was_smooth, one.smooth = one.smooth, False
        request_id = f"retry-{rng.getrandbits(64):x}" if move == "retry" else ""
        reply = await self._ask(one, body, request_id)
        if move == "retry":
            # A client that has not heard the answer sends the same again.
            await asyncio.gather(*(self._ask(one, body, request_id) for _ in range(2)))
        if move == "append" and was_smooth:
            self.tally.appended += 1
            self.tally.appended_reused += reply.reused > 0
        one.answered(said, body)
        one.smooth = move != "retry"

    async def _parallel(self, one: Conversation, said: list[Tokens]) -> None:
        bodies = [one.body(text) for text in said]
        await asyncio.gather(*(self._ask(one, body) for body in bodies))
        goes_on = one.rng.randrange(len(said))
        one.answered(said[goes_on], bodies[goes_on])
        one.smooth = False

    async def _ask(self, one: Conversation, body: dict[str, Any], request_id: str = "") -> Reply:
        self._left -= 1
        reply = await one.client.ask(
            body, one.session, gateway=one.rng.randrange(2), request_id=request_id
        )
        self.tally.count(one.model, reply)
        if self._left % 50 == 0:
            self.tally.sample.append(body)
        return reply

    async def _leave(self, one: Conversation, body: dict[str, Any]) -> None:
        self._left -= 1
        after = one.rng.choice((0.0, 0.01, 0.02, 0.03, 0.05, 0.08))
        left = await one.client.leave(body, one.session, after=after, gateway=one.rng.randrange(2))
        self.tally.requests += 1
        self.tally.left += left


def now() -> float:
    """Return the time by which pace is measured."""
    return _clock.monotonic()
